"""Pay the turn that first shows a passage of the question's evidence.

In: `Rollouts`, a way to play prompts. Out: the same episodes with process rewards. Next:
`training_rows.py`.

A question of a made-up world names the passages that its answer needs (`extra_info.lookups`). The
first turn whose result shows such a passage is paid; showing it again pays nothing. The idea, to
credit a search agent where evidence is exposed first, is STAMP's (2607.11172). This is not its
method: there the evidence is estimated, and here it is known. So a comparison with an outcome
reward is one of information, too. Grpo adds the payments up: it has the information without the
credit. Reinforce++ and gigpo credit each turn with what follows it.
"""

from __future__ import annotations

from agent_r1 import Rollouts, Trajectory
from agent_r1_recipes.credit.settings import CreditRollout


class Exposed(Rollouts):
    """Play as `inner` does, and pay first exposures."""

    def __init__(self, inner: Rollouts, rollout: CreditRollout):
        self.inner = inner
        self.policy = inner.policy
        self.rollout = rollout
        self.episodes = inner.episodes

    def choose(self, step: int) -> tuple[list[Trajectory], list[Trajectory], dict[str, float]]:
        batch_episodes, all_episodes, metrics = self.inner.choose(step)
        shares = [pay_exposures(episode, self.rollout.exposure_reward) for episode in all_episodes]
        mean = sum(shares) / max(len(shares), 1)
        return batch_episodes, all_episodes, metrics | {"episode/exposed": mean}


def pay_exposures(episode: Trajectory, reward: float) -> float:
    """Share `reward` among the evidence, and pay each turn for what it shows first.

    Returns the share of the evidence that was shown: 0 for a question that names none.
    """
    lookups = (episode.row.get("extra_info") or {}).get("lookups") or ()
    missing = {lookup["passage_id"] for lookup in lookups}
    number = len(missing)
    for step in episode.steps:
        for call in step.info.get("tool_calls", ()):
            lines = call["content"].splitlines()
            # A passage begins with its title.
            new = {title for title in missing if any(x.startswith(f"{title} ") for x in lines)}
            missing -= new
            if new:
                payment = reward * len(new) / number
                step.reward += payment
                step.token_rewards.append((len(step.action_ids) - 1, payment))
    return (number - len(missing)) / number if number else 0.0
