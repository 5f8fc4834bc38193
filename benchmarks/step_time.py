"""Time one GRPO step of the local loop by phases.

    PYTHONPATH=src .venv/bin/python benchmarks/step_time.py --steps 20 --eval 500

In: data, index and cold start of a preset (`agent-r1 data`, `index`, `cold-start`), or the paths
given. Out: a table and a JSON line. It calls `agent_r1.training.loop.train`, the loop of every run,
and reads its clock. The losses share a lap with the passes through the network, so their forward is
timed separately.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from statistics import fmean

from common import (
    PHASES,
    Result,
    Setting,
    StepRecord,
    Watch,
    greedy_em,
    load_setting,
    make_parser,
    max_memory_gb,
    report,
    run,
)

from agent_r1.core import Trajectory
from agent_r1.env import make_env
from agent_r1.model import files as model_files
from agent_r1.rollout.training_rows import Batch
from agent_r1.training import loop
from agent_r1.training.learner import make_learner
from agent_r1.training.loop import train
from agent_r1.training.parts import make_parts


class TargetReached(Exception):
    """Leaves the training loop, which has no other way to end before its last step."""


def main() -> None:
    arguments = make_parser(__doc__.splitlines()[0]).parse_args()
    setting = load_setting(arguments)
    watch = Watch(setting, arguments.until, arguments.look_every) if arguments.until else None
    em_before = em_after = None
    if setting.test and not watch:
        em_before = greedy_em(setting, model_files.load_model(setting.model), setting.test)
    c = setting.config
    learner = make_learner(
        model_files.load_model(setting.model), c.actor, c.critic if c.algorithm == "ppo" else None
    )
    records: list[StepRecord] = []
    zero_advantage: list[float] = []
    advantages: list[float] = []
    cpu = time.process_time()

    def on_step(metrics: dict[str, float], _: list[Trajectory], batch: Batch) -> None:
        nonlocal cpu
        before, cpu = cpu, time.process_time()
        rows_B = (batch.advantages_BT != 0).any(dim=1)  # the update skips the others
        learnt = int(batch.lengths_B[rows_B].sum()), int(batch.mask_BT[rows_B].sum())
        records.append(read_metrics(metrics, setting, cpu - before, learnt))
        zero_advantage.append(metrics["groups/zero_advantage"])
        advantages.append(metrics["timing_s/adv"])
        if watch and watch.reached(learner.step, lambda: learner.actor):
            raise TargetReached

    losses = [0.0]

    def timed(loss: Callable) -> Callable:
        def inside(*arguments, **named_arguments):
            begin = time.perf_counter()
            result = loss(*arguments, **named_arguments)
            losses[0] += time.perf_counter() - begin
            return result

        return inside

    loop.policy_loss, loop.aggregate_loss = timed(loop.policy_loss), timed(loop.aggregate_loss)
    s = setting
    env_of = partial(make_env, tools=s.tools, config=s.config.env)
    with contextlib.suppress(TargetReached):
        train(
            s.config,
            make_parts(s.config, learner.actor, s.chat, env_of, s.questions),
            learner,
            on_step,
            evaluate=lambda _: {},
            save=lambda _: None,
        )
    if watch:
        return
    whole = sum(record.seconds["step"] for record in records)
    notes = {
        "rows skipped (zero advantage)": fmean(zero_advantage[arguments.warmup :]),
        "advantages and losses, share of a step": (sum(advantages) + losses[0]) / whole,
    }
    memory = max_memory_gb()
    if setting.test:
        em_after = greedy_em(setting, learner.actor, setting.test)
    measured_steps = records[arguments.warmup :]
    result = Result(
        "agent-r1",
        arguments.threads,
        arguments.warmup,
        measured_steps,
        memory,
        em_before,
        em_after,
        notes,
    )
    report(result, setting)


def read_metrics(
    metrics: dict[str, float], setting: Setting, cpu: float, learnt: tuple[int, int]
) -> StepRecord:
    """Convert one step's metrics to the phases of benchmarks/README.md.

    `cpu` is its processor time in seconds.
    """
    timing = {
        name.removeprefix("timing_s/"): value
        for name, value in metrics.items()
        if name.startswith("timing_s/")
    }
    seconds = {
        "step": timing["step"],
        "rollout": timing["gen"] - timing["env"],
        "environment": timing["env"],
        # the sampler's log-probs are exact in float32, so nothing is recomputed
        "old log-probs": 0.0,
        "update": timing["update_actor"],
        "cpu": cpu,
    }
    seconds["overhead"] = seconds["step"] - sum(seconds.get(phase, 0.0) for phase in PHASES)
    n = setting.episodes
    return StepRecord(
        seconds,
        agent_tokens=round(metrics["response_length/mean"] * n),
        learnt=learnt,
        all_tokens=round(metrics["sequence_length/mean"] * n),
        reward=metrics["critic/score/mean"],
    )


if __name__ == "__main__":
    run(main)
