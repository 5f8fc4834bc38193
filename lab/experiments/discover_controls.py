"""Train the preset `discover` with one thing changed: which of its parts does RL need?

python -m lab.experiments.discover_controls "random plans" 1 2 3     a control, and its seeds
python -m lab.experiments.discover_controls --table

Each control exchanges a part of the demonstrator or of the training while the program runs. So the
recipe has no switches that no one else uses. Figures are added to
docs/lab/discover-controls.json. One thread, greedy evaluation on 500 test questions.
`smoke_controls` does the same with `smoke`, whose runs are short.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent_r1 import Row, Run, Trajectory, load_config, open_run
from agent_r1.training import loop
from agent_r1_recipes.laptop import demonstrator
from agent_r1_recipes.laptop.explorer import Explorer
from agent_r1_recipes.laptop.shown import Play, has_whole_chain, is_right
from lab.experiments.seed_files import run_arms

FILE = Path(__file__).parents[2] / "docs" / "lab" / "discover-controls.json"


class RandomPlans(Explorer):
    """Write the plan's items in random order. What is looked for was random before."""

    def __init__(self, question: str, rng: random.Random):
        super().__init__(question, rng)
        self.plan = rng.sample(self.plan, len(self.plan))


class NoPlan(Explorer):
    """Write no plan, but look for the same items."""

    def __init__(self, question: str, rng: random.Random):
        super().__init__(question, rng)
        self.plan = []


def explore_by(explorer: type[Explorer]) -> Callable[[], None]:
    """Let another explorer play."""
    return lambda: demonstrator.EXPLORERS.update(explore=explorer)


def drop_nothing() -> None:
    """Clone right plays of several hops, too."""
    demonstrator.shows_solution = lambda play, row: False


def drop_every_success() -> None:
    """Clone no right play, of one hop neither: then there are none of one hop."""

    def shows_solution(play: Play, row: Row) -> bool:
        return is_right(play, row) or has_whole_chain(play, row)

    demonstrator.shows_solution = shows_solution


def shuffle_rewards() -> None:
    """Give each episode of a step the reward of another one of this step."""
    make_batch = loop.make_batch
    rng = random.Random(0)

    def make_shuffled(episodes: list[Trajectory], estimate: Any) -> Any:
        rewards = [episode.steps[-1].reward for episode in episodes]
        rng.shuffle(rewards)
        answers = []
        for episode, reward in zip(episodes, rewards, strict=True):
            *first, last = episode.steps
            answers.append(replace(episode, steps=[*first, replace(last, reward=reward)]))
        return make_batch(answers, estimate)

    loop.make_batch = make_shuffled


def change_nothing() -> None:
    """Leave the preset's code as it is."""


CONTROLS: dict[str, tuple[Callable[[], None], dict[str, Any]]] = {
    "as it is": (change_nothing, {}),
    "random plans": (explore_by(RandomPlans), {}),
    "no plan": (explore_by(NoPlan), {}),
    "nothing dropped": (drop_nothing, {}),
    "no success at all": (drop_every_success, {}),
    "shuffled rewards": (shuffle_rewards, {}),
    "penalty of .2": (change_nothing, {"env.format_penalty": 0.2}),
    "cloning twice as long": (change_nothing, {}),
    "cloning four times as long": (change_nothing, {}),
    "ppo": (change_nothing, {}),
}
"""Name -> what to exchange, and settings."""
LONGER = {"cloning twice as long": 2, "cloning four times as long": 4}
"""Control -> factor of the preset's steps of cloning."""


@contextmanager
def open_control(name: str, seed: int, preset: str = "discover") -> Iterator[Run]:
    """Exchange the control's part, and open its run in an empty home."""
    exchange, settings = CONTROLS[name]
    exchange()
    quick = {"trainer.threads": 1, "trainer.eval_samples": 1, "cold_start.probe": 0}
    steps = LONGER.get(name, 1) * load_config(preset).cold_start.copy_steps
    quick |= {"cold_start.copy_steps": steps}
    with tempfile.TemporaryDirectory() as home:
        os.environ["AGENT_R1_HOME"] = home
        algorithm = "ppo" if name == "ppo" else "grpo"
        yield open_run(preset, algorithm, seed=seed, run="control", **quick, **settings)


def measure(name: str, seed: int, preset: str = "discover") -> dict[str, Any]:
    """Train and evaluate one seed of a control."""
    with open_control(name, seed, preset) as run:
        cards = {"before": run.evaluate(before=True).card}
        run.train()
        cards["after"] = run.evaluate().card
    return {
        when: {kind: scores["em"] for kind, scores in card["by_kind"].items()}
        | {"all": card["em"], "calls": card["mean_tool_calls"]}
        for when, card in cards.items()
    }


def table(controls: dict[str, dict[str, Any]]) -> str:
    """Return a line for each seed of each control."""
    lines = ["| | seed | before: 1, 2, 3 hops | after: 1, 2, 3 hops |", "|---|---|---|---|"]
    for name in CONTROLS:
        for seed, cards in controls.get(name, {}).items():
            cells = []
            for when in ("before", "after"):
                hops = [cards[when][f"{hops}-hop"] for hops in (1, 2, 3)]
                cells.append(", ".join(f"{em:.3f}" for em in hops))
            lines.append(f"| {name} | {seed} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


if __name__ == "__main__":
    run_arms(__doc__ or "", CONTROLS, measure, FILE, table)
