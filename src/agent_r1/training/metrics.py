"""The numbers of a step: means over micro-batches, where the time went, and what its episodes were like.

In: what a step computed. Out: one flat dictionary, under verl's names where verl has one, which `log.py` writes down.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from statistics import fmean

from torch import Tensor

from agent_r1.core import Trajectory
from agent_r1.rollout.sampler import SamplerStats
from agent_r1.rollout.training_rows import Batch

SAMPLER_GAP = "training/rollout_logprobs_diff_mean"
"""How far trainer and sampler are apart in the log-probability of a sampled token, before any update; in both engines. Rounding
in bfloat16 gives .01 to .02."""
GAP_ROW_STRIDE = 32
"""In float32 one row in this many is computed again, to see that sampler and trainer do agree."""


def sampler_gap(batch: Batch, now_BT: Tensor) -> float:
    """Mean distance between what the sampler recorded and `now_BT`, what the trainer computes of the same tokens."""
    return (now_BT - batch.logprobs_BT)[batch.mask_BT.bool()].abs().mean().item()


class Means:
    """What an update reports: means over its tokens, and its losses, of which each micro-batch has a part."""

    def __init__(self):
        self.sums: dict[str, float] = defaultdict(float)
        self.weights: dict[str, float] = defaultdict(float)
        self.losses: dict[str, float] = defaultdict(float)
        self.updates = 0

    def add(self, weight: float, values: dict[str, float]) -> None:
        """Means over `weight` tokens."""
        for name, value in values.items():
            self.sums[name] += weight * value
            self.weights[name] += weight

    def add_loss(self, name: str, part: float) -> None:
        """A micro-batch's part of a loss: parts add up within an update."""
        self.losses[name] += part

    def finish_update(self, values: dict[str, float]) -> None:
        """An optimiser step is over; `values` belong to it as a whole."""
        self.updates += 1
        self.add(1.0, values)

    def result(self) -> dict[str, float]:
        means = {name: self.sums[name] / max(self.weights[name], 1e-12) for name in self.sums}
        return means | {name: value / max(self.updates, 1) for name, value in self.losses.items()}


class Clock:
    """Where a step's time went."""

    def __init__(self):
        self.last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self.last
        self.last = now

    def seconds(self) -> dict[str, float]:
        """`timing_s/step` is the sum of the laps without the evaluation, which is no part of the algorithm."""
        step = sum(value for name, value in self.laps.items() if name != "testing")
        return {f"timing_s/{name}": value for name, value in self.laps.items()} | {"timing_s/step": step}


def explained_variance(values_BT: Tensor, returns_BT: Tensor, mask_BT: Tensor) -> float:
    """1 - Var(R - V) / Var(R) over action tokens: 1 is a perfect critic, 0 one that knows no more than the mean."""
    values, returns = values_BT[mask_BT.bool()], returns_BT[mask_BT.bool()]
    return (1 - (returns - values).var() / returns.var().clamp(min=1e-8)).item()


def rollout_metrics(played: list[Trajectory], batch: Batch, sampler: SamplerStats, clock: Clock) -> dict[str, float]:
    """What this step was like, under verl's names where verl has one.

    Episodes are reported as they were played. `batch` may be a choice of them, which scores otherwise
    (recipes/credit/dynamic_sampling.py).
    """
    zero_B = (batch.advantages_BT == 0).all(dim=1)
    return {
        "response_length/mean": fmean(sum(len(step.action_ids) for step in t.steps) for t in played),
        "sequence_length/mean": batch.lengths_B.float().mean().item(),
        "groups/zero_advantage": zero_B.float().mean().item(),
        "rollout/prefill_tokens": sampler.prefill_tokens,
        "rollout/decode_tokens": sampler.decode_tokens,
        "timing_s/env": clock.laps["gen"] - sampler.seconds,
        "perf/agent_tokens_per_s": sampler.decode_tokens / clock.laps["gen"],
        **episode_metrics([EpisodeNumbers.from_trajectory(t) for t in played]),
    }


@dataclass(frozen=True)
class EpisodeNumbers:
    """What is reported of an episode. With verl, this alone comes back from the process that ran it."""

    score: float
    turns: int
    stop_reason: str
    parts: dict[str, float]
    """What it was paid for, as the environment names it."""
    metrics: dict[str, float]
    """What else was measured."""
    process: float = 0.0
    """`Trajectory.process`."""

    @classmethod
    def from_trajectory(cls, t: Trajectory) -> EpisodeNumbers:
        parts = {name: float(value) for name, value in t.reward_parts.items()}
        metrics = {name: float(value) for name, value in t.metrics.items() if name not in parts}
        return cls(t.reward, len(t.steps), t.stop_reason.value, parts, metrics, t.process)


def episode_metrics(episodes: list[EpisodeNumbers]) -> dict[str, float]:
    """Means over the episodes of a step; the same for both executors."""

    def total(name: str) -> float:
        return sum(e.metrics.get(name, 0.0) for e in episodes)

    n, calls = len(episodes), total("tool_calls")
    metrics = {
        "critic/score/mean": fmean(e.score for e in episodes),
        "tool_calls/mean": calls / n,
        "tool_calls/invalid_rate": total("invalid_calls") / max(calls, 1),
        "tool_calls/failed_rate": total("failed_calls") / max(calls, 1),
        "num_turns/mean": fmean(e.turns for e in episodes),
    }
    for kind, values in (("reward", [e.parts for e in episodes]), ("episode", [e.metrics for e in episodes])):
        for name in dict.fromkeys(name for each in values for name in each):
            metrics[f"{kind}/{name}"] = fmean(each[name] for each in values if name in each)
    if any(e.process for e in episodes):
        metrics["reward/process"] = fmean(e.process for e in episodes)
    for reason, count in Counter(e.stop_reason for e in episodes).items():
        metrics[f"stop/{reason}"] = count / n
    return metrics
