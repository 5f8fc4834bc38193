"""The numbers of a step: means over micro-batches, where the time went, and what its episodes were like.

In: what a step computed. Out: one flat dictionary, under verl's names where verl has one, which `log.py` writes down.
"""

from __future__ import annotations

import resource
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from statistics import fmean

from torch import Tensor

from agent_r1.config import Config
from agent_r1.rollout.rows import Experience
from agent_r1.rollout.sampler import LocalPolicy
from agent_r1.types import Trajectory


class Means:
    """Weighted means of metrics over micro-batches, and sums over the parts of a loss."""

    def __init__(self):
        self.sums: dict[str, float] = defaultdict(float)
        self.weights: dict[str, float] = defaultdict(float)
        self.totals: dict[str, float] = defaultdict(float)
        self.steps = 0

    def add(self, weight: float, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.sums[name] += weight * value
            self.weights[name] += weight

    def total(self, name: str, value: float) -> None:
        """A part of a minibatch's loss: parts add up within an optimiser step."""
        self.totals[name] += value

    def step(self, values: dict[str, float]) -> None:
        """One optimiser step is over."""
        self.steps += 1
        self.add(1.0, values)

    def means(self) -> dict[str, float]:
        means = {name: self.sums[name] / max(self.weights[name], 1e-12) for name in self.sums}
        return means | {name: value / max(self.steps, 1) for name, value in self.totals.items()}


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


def rollout_metrics(
    trajectories: list[Trajectory], x: Experience, policy: LocalPolicy, clock: Clock, config: Config
) -> dict[str, float]:
    """What this step was like, under verl's names where verl has one."""
    n = len(trajectories)
    zero_B = (x.advantages_BT == 0).all(dim=1)
    tokens = int(x.batch.mask_BT.sum())
    return {
        "response_length/mean": tokens / n,
        "sequence_length/mean": x.batch.lengths_B.float().mean().item(),
        "groups/zero_advantage": zero_B.float().mean().item(),
        "actor/entropy": policy.stats.entropy / policy.stats.decode_tokens,  # at each sampled token, before the update
        "rollout/prefill_tokens": policy.stats.prefill_tokens,
        "rollout/decode_tokens": policy.stats.decode_tokens,
        "timing_s/env": clock.laps["gen"] - policy.stats.seconds,
        "perf/agent_tokens_per_s": policy.stats.decode_tokens / clock.laps["gen"],
        "perf/memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        **episode_metrics([EpisodeNumbers.of(t) for t in trajectories]),
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

    @classmethod
    def of(cls, t: Trajectory) -> EpisodeNumbers:
        parts = {name: float(value) for name, value in t.reward_parts.items()}
        metrics = {name: float(value) for name, value in t.metrics.items() if name not in parts}
        return cls(t.reward, len(t.steps), t.stop_reason.value, parts, metrics)


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
    for reason, count in Counter(e.stop_reason for e in episodes).items():
        metrics[f"stop/{reason}"] = count / n
    return metrics
