"""Who plays the episodes of a training step.

In: a step's number. Out: `Played`, what a batch is made of and what was measured. `Rollouts` plays each prompt so many times;
a wrapper holds another one and changes what it plays (`Greedy` here, `Refilled` in recipes/credit). Next: `training_rows.py`.
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

    chosen: list[Trajectory]
    """Those that are learnt from."""
    played: list[Trajectory]
    """All that say what the policy is like: metrics are of these."""
    metrics: dict[str, float] = field(default_factory=dict)


class Rollouts:
    """Each prompt of a step, `rollout.samples_per_prompt` times."""

    def __init__(
        self, flow: AgentFlowBase, policy: LocalPolicy, tasks: Callable[[int, int], list[Task]], rollout: RolloutConfig
    ):
        """`tasks(step, again)` are the episodes of a step, prompt by prompt; `again` counts rounds with other prompts."""
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
"""In a trajectory's `extra`: what the greedy episode of its prompt was paid; NaN where that was broken off."""


class Greedy(Rollouts):
    """Rollouts with one greedy episode more for each prompt. It is compared with and not learnt from."""

    def __init__(self, inner: Rollouts):
        self.inner, self.episodes = inner, inner.episodes

    def play(self, step: int) -> Played:
        played = self.inner.play(step)
        scores = {t.group_id: greedy_score(t) for t in self.episodes(step, samples=1, greedy=True)}
        for trajectory in played.chosen:
            trajectory.extra[GREEDY] = scores[trajectory.group_id]
        return played


def greedy_score(greedy: Trajectory) -> float:
    """What a greedy episode says of its prompt."""
    return float("nan") if greedy.stop_reason.failed else greedy.reward
