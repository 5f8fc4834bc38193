"""Dynamic sampling: groups that agree make room for others, until a batch is full of groups that teach something.

In: `Rollouts`, a way to play prompts. Out: `Rollouts`, whose batches are full. Next: `rows.py`.

Where all samples of a prompt score alike, all of their advantages are 0 (grpo and its kin). DAPO (2503.14476, section 3.2)
plays other prompts instead, so that every batch has as many rows with a gradient. What it costs is episodes: the later in a
run, the more groups agree, because they are right. Hence a budget.
"""

from __future__ import annotations

from collections.abc import Callable

from agent_r1 import Played, Rollouts, Trajectory
from agent_r1_recipes.credit.settings import CreditRollout


class Refilled(Rollouts):
    """Rollouts whose groups that agree make room for others, `rollout.refill_rounds` times."""

    def __init__(self, inner: Rollouts, rollout: CreditRollout):
        self.policy, self.rollout, self.episodes = inner.policy, rollout, inner.episodes

    def play(self, step: int) -> Played:
        prompts, rounds = self.rollout.prompts_per_step, self.rollout.refill_rounds
        chosen, played = play_until_full(lambda again, n: self.episodes(step, again, n), prompts, rounds)
        # Undecided groups say less about the agent: all other numbers of a step are of what was played.
        score = sum(episode.reward for episode in chosen) / len(chosen)
        metrics = {"rollout/episodes_played": len(played), "rollout/score_chosen": score}
        return Played(chosen, played, metrics | self.policy.stats.mean_entropy())


def play_until_full(
    play: Callable[[int, int], list[Trajectory]], prompts: int, rounds: int
) -> tuple[list[Trajectory], list[Trajectory]]:
    """The episodes of `prompts` groups, and all that were played.

    `play(round, n)` plays n prompts that no other round has, or as many as there are. After so many further `rounds` groups
    that agree fill the rest.
    """
    differ: list[list[Trajectory]] = []
    agree: list[list[Trajectory]] = []
    played: list[Trajectory] = []
    for number in range(rounds + 1):
        episodes = play(number, prompts - len(differ))
        played += episodes
        for group in _groups(episodes):
            (differ if _differs(group) else agree).append(group)
        if len(differ) == prompts:
            break
    batch = differ + agree[: prompts - len(differ)]
    # In the order in which they were played: with no round to spare, this changes nothing.
    chosen = {group[0].group_id for group in batch}
    return [episode for episode in played if episode.group_id in chosen], played


def _groups(episodes: list[Trajectory]) -> list[list[Trajectory]]:
    groups: dict[str, list[Trajectory]] = {}
    for episode in episodes:
        groups.setdefault(episode.group_id, []).append(episode)
    return list(groups.values())


def _differs(group: list[Trajectory]) -> bool:
    scores = [episode.reward for episode in group if not episode.stop_reason.broken_off]
    return bool(scores) and max(scores) - min(scores) > 1e-6 * max(map(abs, scores))
