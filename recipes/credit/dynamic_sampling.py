"""Replace groups with equal scores by groups of new prompts (dynamic sampling).

In: `Rollouts`, a way to play prompts. Out: `Rollouts` whose batches are full. Next:
`training_rows.py`.

If all samples of a prompt have equal scores, all of their advantages are 0 (grpo and similar). DAPO
(2503.14476, section 3.2) plays other prompts instead, so that every batch has as many rows with a
gradient. It costs episodes, and more later in a run, when more groups are all right. Therefore it
has a budget.
"""

from __future__ import annotations

from collections.abc import Callable

from agent_r1 import Rollouts, Trajectory
from agent_r1_recipes.credit.settings import CreditRollout


class Refilled(Rollouts):
    """Replace groups with equal scores in up to `rollout.dynamic_sampling_rounds` rounds."""

    def __init__(self, inner: Rollouts, rollout: CreditRollout):
        self.policy = inner.policy
        self.rollout = rollout
        self.episodes = inner.episodes

    def choose(self, step: int) -> tuple[list[Trajectory], list[Trajectory], dict[str, float]]:
        def play(number: int, prompts: int) -> list[Trajectory]:
            return self.episodes(step, number, prompts)

        batch_episodes, all_episodes = play_until_full(
            play, self.rollout.prompts_per_step, self.rollout.dynamic_sampling_rounds
        )
        # Groups with unequal scores are a biased sample: prompts that the agent always solves are
        # not among them. So all other metrics of a step use every played group.
        score = sum(episode.reward for episode in batch_episodes) / len(batch_episodes)
        metrics = {"rollout/episodes_played": len(all_episodes), "rollout/score_chosen": score}
        return batch_episodes, all_episodes, metrics


def play_until_full(
    play: Callable[[int, int], list[Trajectory]], prompts: int, rounds: int
) -> tuple[list[Trajectory], list[Trajectory]]:
    """Return the episodes of `prompts` groups, and all that were played.

    `play(round, n)` plays n prompts of no other round, or as many as there are. After `rounds`
    further rounds, groups with equal scores fill the rest.
    """
    differ: list[list[Trajectory]] = []
    agree: list[list[Trajectory]] = []
    all_episodes: list[Trajectory] = []
    for number in range(rounds + 1):
        episodes = play(number, prompts - len(differ))
        all_episodes += episodes
        for group in _groups(episodes):
            (differ if _differs(group) else agree).append(group)
        if len(differ) == prompts:
            break
    batch = differ + agree[: prompts - len(differ)]
    # In the order of play: without extra rounds, this changes nothing.
    batch_groups = {group[0].group_id for group in batch}
    return [episode for episode in all_episodes if episode.group_id in batch_groups], all_episodes


def _groups(episodes: list[Trajectory]) -> list[list[Trajectory]]:
    groups: dict[str, list[Trajectory]] = {}
    for episode in episodes:
        groups.setdefault(episode.group_id, []).append(episode)
    return list(groups.values())


def _differs(group: list[Trajectory]) -> bool:
    scores = [episode.reward for episode in group if not episode.stop_reason.failed]
    if not scores:
        return False
    largest = max(abs(min(scores)), abs(max(scores)))
    # Relative: sums of process rewards may differ by rounding alone.
    return max(scores) - min(scores) > 1e-6 * largest
