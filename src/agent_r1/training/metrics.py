"""Compute the metrics of a step: means over micro-batches, times, and statistics of its episodes.

In: what a step computed. Out: a flat dictionary for `watch/log.py`, under verl's names where verl
has one.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from statistics import fmean

from torch import Tensor

from agent_r1.core import Trajectory
from agent_r1.model.sampler import SamplerStats
from agent_r1.rollout.training_rows import Batch

GAP_ROW_STRIDE = 32
"""One row in this many is recomputed, to check that sampler and trainer agree."""


def sampler_gap(batch: Batch, now_BT: Tensor) -> float:
    """Average |`now_BT` - recorded log-probability| over action tokens, in nats."""
    return (now_BT - batch.logprobs_BT)[batch.mask_BT.bool()].abs().mean().item()


class Means:
    """Means over an update's tokens, and its losses, which micro-batches contribute to."""

    def __init__(self):
        self.sums: dict[str, float] = defaultdict(float)
        self.weights: dict[str, float] = defaultdict(float)
        self.losses: dict[str, float] = defaultdict(float)
        self.updates = 0

    def add(self, weight: float, values: dict[str, float]) -> None:
        """Add means over `weight` tokens."""
        for name, value in values.items():
            self.sums[name] += weight * value
            self.weights[name] += weight

    def add_loss(self, name: str, part: float) -> None:
        """Add a micro-batch's part of a loss; the parts of an update are summed."""
        self.losses[name] += part

    def finish_update(self, values: dict[str, float]) -> None:
        """End an optimiser step; `values` belong to it as a whole."""
        self.updates += 1
        self.add(1.0, values)

    def result(self) -> dict[str, float]:
        means = {name: self.sums[name] / max(self.weights[name], 1e-12) for name in self.sums}
        return means | {name: value / max(self.updates, 1) for name, value in self.losses.items()}


class Clock:
    """Times of a step's stages, in seconds."""

    def __init__(self):
        self.last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self.last
        self.last = now

    def seconds(self) -> dict[str, float]:
        """Return all laps.

        `timing_s/step` is their sum without evaluation, which is not part of the algorithm.
        """
        step = sum(value for name, value in self.laps.items() if name != "testing")
        return {f"timing_s/{name}": value for name, value in self.laps.items()} | {
            "timing_s/step": step
        }


def explained_variance(values_BT: Tensor, returns_BT: Tensor, mask_BT: Tensor) -> float:
    """Compute 1 - Var(R - V) / Var(R) over action tokens.

    1 for a perfect critic, 0 for a constant one.
    """
    values = values_BT[mask_BT.bool()]
    returns = returns_BT[mask_BT.bool()]
    return (1 - (returns - values).var() / returns.var().clamp(min=1e-8)).item()


def rollout_metrics(
    episodes: list[Trajectory], batch: Batch, sampler: SamplerStats, clock: Clock
) -> dict[str, float]:
    """Collect a step's metrics.

    Episodes count as played. `batch` may be a selection of them with other scores
    (recipes/credit/dynamic_sampling.py).
    """
    zero_B = (batch.advantages_BT == 0).all(dim=1)
    return {
        "response_length/mean": fmean(_action_tokens(t) for t in episodes),
        "sequence_length/mean": batch.lengths_B.float().mean().item(),
        "groups/zero_advantage": zero_B.float().mean().item(),
        "rollout/prefill_tokens": sampler.prefill_tokens,
        "rollout/decode_tokens": sampler.decode_tokens,
        "timing_s/env": clock.laps["gen"] - sampler.seconds,
        "perf/agent_tokens_per_s": sampler.decode_tokens / clock.laps["gen"],
        **episode_metrics([EpisodeNumbers.from_trajectory(t) for t in episodes]),
    }


def _action_tokens(trajectory: Trajectory) -> int:
    return sum(len(step.action_ids) for step in trajectory.steps)


@dataclass(frozen=True)
class EpisodeNumbers:
    """Numbers of an episode. With verl, only these return from the process that ran it."""

    score: float
    turns: int
    stop_reason: str
    parts: dict[str, float]  # summands of the reward, by the environment's names
    metrics: dict[str, float]  # other measurements
    process: float = 0.0  # `Trajectory.process`

    @classmethod
    def from_trajectory(cls, t: Trajectory) -> EpisodeNumbers:
        parts = {name: float(value) for name, value in t.reward_parts.items()}
        metrics = {name: float(value) for name, value in t.metrics.items() if name not in parts}
        return cls(t.reward, len(t.steps), t.stop_reason.value, parts, metrics, t.process)


def episode_metrics(episodes: list[EpisodeNumbers]) -> dict[str, float]:
    """Average over the episodes of a step, for both engines."""

    def total(name: str) -> float:
        return sum(e.metrics.get(name, 0.0) for e in episodes)

    n = len(episodes)
    calls = total("tool_calls")
    metrics = {
        "critic/score/mean": fmean(e.score for e in episodes),
        "tool_calls/mean": calls / n,
        "tool_calls/invalid_rate": total("invalid_calls") / max(calls, 1),
        "tool_calls/failed_rate": total("failed_calls") / max(calls, 1),
        "num_turns/mean": fmean(e.turns for e in episodes),
    }
    for kind, numbers in (
        ("reward", [e.parts for e in episodes]),
        ("episode", [e.metrics for e in episodes]),
    ):
        values_of: dict[str, list[float]] = {}
        for numbers_of_episode in numbers:
            for name, value in numbers_of_episode.items():
                values_of.setdefault(name, []).append(value)
        for name, values in values_of.items():
            metrics[f"{kind}/{name}"] = fmean(values)
    if any(e.process for e in episodes):
        metrics["reward/process"] = fmean(e.process for e in episodes)
    for reason, count in Counter(e.stop_reason for e in episodes).items():
        metrics[f"stop/{reason}"] = count / n
    return metrics
