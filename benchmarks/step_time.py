"""How long is one GRPO step of the local loop, and where does the time go?

    PYTHONPATH=src:benchmarks .venv/bin/python benchmarks/step_time.py --steps 20 --eval 500

In: data, index and cold start of a preset (`agent-r1 data`, `index`, `cold-start`), or the paths given. Out: a table and
a JSON line. It calls `agent_r1.training.loop.train`, the loop of every run, and only reads the clock that this keeps.
"""

from __future__ import annotations

from common import PHASES, Result, Setting, StepRecord, greedy_em, load_setting, max_memory_gb, parse_arguments, report

from agent_r1.rollout import qwen
from agent_r1.training.loop import make_learner, train


def main() -> None:
    arguments = parse_arguments(__doc__.splitlines()[0])
    setting = load_setting(arguments)
    before = greedy_em(setting, qwen.load(setting.model)) if setting.test else None
    learner = make_learner(setting.config, qwen.load(setting.model), "cpu")
    records: list[StepRecord] = []
    zero_advantage: list[float] = []

    def on_step(metrics: dict[str, float], *_) -> None:
        records.append(read_metrics(metrics, setting))
        zero_advantage.append(metrics["groups/zero_advantage"])

    train(setting.config, learner, setting.chat, setting.tools, setting.questions, on_step, evaluate=lambda _: {}, save=lambda _: None)
    measured = slice(arguments.warmup, None)
    notes = {"rows skipped (zero advantage)": sum(zero_advantage[measured]) / arguments.steps}
    memory = max_memory_gb()  # of the training, not of the evaluation that follows
    after = greedy_em(setting, learner.actor)
    report(Result("agent-r1", arguments.threads, arguments.warmup, records[measured], memory, before, after, notes), setting)


def read_metrics(metrics: dict[str, float], setting: Setting) -> StepRecord:
    """The phases of benchmarks/README.md from the metrics of one step."""
    timing = {name.removeprefix("timing_s/"): value for name, value in metrics.items() if name.startswith("timing_s/")}
    seconds = {
        "step": timing["step"],
        "rollout": timing["gen"] - timing["env"],
        "environment": timing["env"],
        "old log-probs": 0.0,  # the sampler's own are exact in float32, so nothing is recomputed
        "update": timing["update_actor"],
    }
    seconds["overhead"] = seconds["step"] - sum(seconds.get(phase, 0.0) for phase in PHASES)
    n = setting.episodes
    return StepRecord(
        seconds,
        agent_tokens=round(metrics["response_length/mean"] * n),
        all_tokens=round(metrics["sequence_length/mean"] * n),
        reward=metrics["critic/score/mean"],
    )


if __name__ == "__main__":
    main()
