"""Count the quotes that stand in no passage: how well does an agent copy?

python -m lab.experiments.quotes --seed 3373756665 data.test=1600                    the start
python -m lab.experiments.quotes --seed 3373756665 data.test=1600 model.induction=bigram
python -m lab.experiments.quotes --run shuffled-grpo                                 a trained agent

A thought after a search quotes a passage from its name on. The quote is right if a passage of the
search's result begins with it, word for word. Test questions, greedy.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from agent_r1 import Config, Workspace, find_model, make_loop, open_run, trajectory_rows
from agent_r1.evaluation.evaluate import evaluate
from agent_r1.inference.agent import open_agent
from lab.experiments.plan_order import share

RESULT_AND_QUOTE = re.compile(
    r"<tool_response>\s*(.*?)\s*</tool_response>.*?<think>([^/<]*)", re.DOTALL
)


def count_quotes(text: str) -> tuple[int, int]:
    """Return how many quotes of an episode's text are wrong, and of how many."""
    wrong = count = 0
    for result, quote in RESULT_AND_QUOTE.findall(text):
        count += 1
        wrong += not any(passage.startswith(quote) for passage in result.splitlines())
    return wrong, count


def print_quotes(model: Path, config: Config) -> None:
    """Play the test questions and print the shares of wrong quotes and of right answers."""
    rows = Workspace(config).load_rows("test")
    with open_agent(model, config, "local") as agent:
        loop = make_loop(agent.policy, agent.chat, agent.tools, config.rollout, config.env)
        trajectories = evaluate(loop, rows, temperature=0.0, seed=config.seed)
        counts = []
        for trajectory in trajectories:
            text = agent.chat.decode(trajectory_rows(trajectory, 0)[0].input_ids)
            counts.append(count_quotes(text))
    print(f"wrong quotes: {share(sum(w for w, _ in counts), sum(n for _, n in counts))}")
    right = sum(trajectory.reward >= 1 for trajectory in trajectories)
    print(f"right answers: {share(right, len(rows))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--run", help="name of a finished run (default: the start of --preset)")
    parser.add_argument("--preset", default="shuffled")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("settings", nargs="*", help="settings of the start, such as data.test=1600")
    arguments = parser.parse_args()
    if arguments.run:
        model, config = find_model(run=arguments.run)
    else:
        settings = dict(setting.split("=", 1) for setting in arguments.settings)
        run = open_run(arguments.preset, "grpo", seed=arguments.seed, run="quotes", **settings)
        model, config = run.prepare().start_model, run.config
    print_quotes(model, config)


if __name__ == "__main__":
    main()
