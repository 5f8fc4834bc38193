"""Play the episodes of a training step.

In: a step's number. Out: `Played`, the episodes for the batch and the metrics. Next: `rows.py`. `Rollouts` plays each
prompt several times; a wrapper has an inner `Rollouts` and changes its result (`Greedy`, and `Refilled` in
recipes/credit).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from agent_r1.config.settings import RolloutConfig
from agent_r1.core import Sampling, Trajectory
from agent_r1.rollout.episode import AgentFlowBase, Task, run_episodes
from agent_r1.rollout.sampler import LocalPolicy


@dataclass
class Played:
    """The episodes of a step."""

    chosen: list[Trajectory]  # for learning
    played: list[Trajectory]  # for metrics
    metrics: dict[str, float] = field(default_factory=dict)


class Rollouts:
    """Episodes of a step: each prompt `rollout.samples_per_prompt` times."""

    def __init__(
        self, flow: AgentFlowBase, policy: LocalPolicy, tasks: Callable[[int, int], list[Task]], rollout: RolloutConfig
    ):
        """`tasks(step, again)` lists a step's episodes, prompt by prompt; `again` counts rounds with other prompts."""
        self.flow, self.policy, self.tasks, self.rollout = flow, policy, tasks, rollout

    def play(self, step: int) -> Played:
        episodes = self.episodes(step)
        return Played(episodes, episodes, self.policy.stats.mean_entropy())

    def episodes(
        self, step: int, again: int = 0, prompts: int | None = None, *, samples: int | None = None, greedy: bool = False
    ) -> list[Trajectory]:
        """Play the first `prompts` of a round; only the first `samples` of each."""
        r = self.rollout
        G, tasks = r.samples_per_prompt, self.tasks(step, again)
        tasks = [t for i, t in enumerate(tasks) if i // G < (prompts or len(tasks)) and i % G < (samples or G)]
        sampling = Sampling(r.max_tokens_per_turn, 0.0 if greedy else r.temperature)
        return asyncio.run(run_episodes(self.flow, tasks, sampling, at_once=r.max_concurrent_episodes))


GREEDY = "greedy_score"
"""Key of `Trajectory.extra`: the reward of the prompt's greedy episode; NaN if it failed."""


class Greedy(Rollouts):
    """Rollouts with an extra greedy episode per prompt, for comparison only."""

    def __init__(self, inner: Rollouts):
        self.inner, self.episodes = inner, inner.episodes

    def play(self, step: int) -> Played:
        played = self.inner.play(step)
        scores = {t.group_id: greedy_score(t) for t in self.episodes(step, samples=1, greedy=True)}
        for trajectory in played.chosen:
            trajectory.extra[GREEDY] = scores[trajectory.group_id]
        return played


def greedy_score(greedy: Trajectory) -> float:
    """Return the reward of a greedy episode; NaN if it failed."""
    return float("nan") if greedy.stop_reason.failed else greedy.reward
