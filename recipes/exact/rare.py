"""Measure a chance of success that is far smaller than the rest of a tree.

In: the agent's trees, and a guide: another checkpoint that succeeds more often. Out: an exact lower
bound of the chance, and an unbiased estimate of what is above it, with its relative error.

A rest of .01 cannot tell a chance of 2 in 100 from one of 2 in 100,000. So the plays
of the guide that succeed are expanded first. One pass computes the agent's exact probability of
each. Successes in no tree are estimated by importance sampling. Half of the plays are drawn from
the agent, half from the guide. A play of probability p for the agent and g for the guide counts
p / (p/2 + g/2) times. That is at most 2, so no single play can decide (defensive mixture,
Hesterberg 1995).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, pvariance

import torch

from agent_r1 import Trajectory, collate, derive_seed, trajectory_rows
from agent_r1_recipes.exact.gradient import play_logprobs
from agent_r1_recipes.exact.replay import Script
from agent_r1_recipes.exact.tree import Agent, Tree
from agent_r1_recipes.exact.truth import Measure


@dataclass(frozen=True)
class RareChance:
    """The chance of a rare success."""

    bound: float
    """Sum of the plays that are known to succeed: an exact lower bound."""
    plays: int
    """How many they are."""
    beyond: float
    """Estimate of the chance of all other plays that succeed."""
    error: float
    """Its standard error."""

    @property
    def estimate(self) -> float:
        return self.bound + self.beyond

    @property
    def relative_error(self) -> float:
        return self.error / self.estimate if self.estimate else math.inf


def rare_chance(
    agent: Agent,
    guide: Agent,
    tree: Tree,
    guide_tree: Tree,
    success: Measure,
    samples: int,
    seed: int,
) -> RareChance:
    """Compute the agent's chance of success in the question of both trees."""
    known_plays: dict[tuple[tuple[int, ...], ...], float] = {}
    for play in tree.plays:
        if success(play.trajectory):
            known_plays[_key(play.trajectory)] = play.logprob
    successes = [play.trajectory for play in guide_tree.plays if success(play.trajectory)]
    successes = [trajectory for trajectory in successes if _key(trajectory) not in known_plays]
    for trajectory, logprob in zip(successes, logprobs_of(agent, successes), strict=True):
        known_plays[_key(trajectory)] = logprob
    bound = math.fsum(math.exp(logprob) for logprob in known_plays.values())

    def weigh(trajectories: list[Trajectory]) -> list[float]:
        weights = []
        own = logprobs_of(agent, trajectories)
        others = logprobs_of(guide, trajectories)
        for trajectory, p, g in zip(trajectories, own, others, strict=True):
            counts = success(trajectory) and _key(trajectory) not in known_plays
            weights.append(2 / (1 + math.exp(min(g - p, 700.0))) if counts else 0.0)
        return weights

    halves = []
    for who, player in (("agent", agent), ("guide", guide)):
        jobs = [(tree.row, tree.name, Script(())) for _ in range(samples // 2)]
        seeds = [derive_seed(seed, "rare", who, tree.name, i) for i in range(len(jobs))]
        halves.append(weigh(player.player(samples=True).play_whole(jobs, seeds)))
    beyond = fmean(fmean(half) for half in halves)
    error = math.sqrt(sum(pvariance(half) / len(half) for half in halves)) / 2
    return RareChance(bound, len(known_plays), beyond, error)


def _key(trajectory: Trajectory) -> tuple[tuple[int, ...], ...]:
    """Return the sampled ids of each turn: equal for equal plays."""
    return tuple(tuple(step.action_ids) for step in trajectory.steps)


def logprobs_of(agent: Agent, trajectories: list[Trajectory]) -> list[float]:
    """Compute the logarithm of each play's probability under the agent."""
    if not trajectories:
        return []
    rows = []
    for number, trajectory in enumerate(trajectories):
        rows += trajectory_rows(trajectory, number)
    with torch.no_grad():
        return play_logprobs(agent.model, collate(rows), agent.temperature).tolist()
