"""Play some training questions before RL, to see whether it has anything to compare.

In: the model that RL starts from. Out: `Probe`, and a verdict. Next: `loop.py`. GRPO learns from
differences between samples of a question. If they always agree, its gradient is zero in every step,
and hours pass without an error. The probe sees this in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from agent_r1.config import Config
from agent_r1.core import Row, Trajectory
from agent_r1.ground.errors import ConfigError
from agent_r1.rollout.episode import Task, derive_seed
from agent_r1.rollout.rollouts import epoch_order

LEAST_SAMPLES = 4
"""Samples of a question, at least: ppo may play it once, and one sample shows no difference."""
AGREED = 0.95
"""Share of groups with equal rewards from which a start is refused.

It is not refused if, on average, at least one group of a step of RL differs.
"""
FEW_DIFFER = 0.8
"""Share of groups with equal rewards from which a warning is due.

lab/laptop.yaml has .3 to .7, and `discover` .8 to .95.
"""
RIGHT = 0.95
"""Mean score from which groups that agree are right."""


@dataclass(frozen=True)
class Probe:
    """What the start model does on training questions, sampled as in RL."""

    groups: int
    samples: int
    """Episodes of each group."""
    score: float
    """Mean, as evaluations compute it."""
    best_score: float
    equal: float
    """Share of groups whose rewards are all equal."""
    entropy: float
    """Mean over the sampled tokens, in nats."""
    graded: bool
    """Whether every episode's answer was compared with a right one (the metric `em`)."""

    def __str__(self) -> str:
        return (
            f"it can now: a mean score of {self.score:.2f} on {self.groups} training questions x "
            f"{self.samples} samples, entropy {self.entropy:.3f} nats, {self.equal:.0%} of the "
            "groups are equal"
        )


def probe_tasks(questions: Sequence[Row], groups: int, samples: int, seed: int) -> list[Task]:
    """List the episodes of a probe, group by group.

    Fewer questions than `groups` are played in several groups, each with other noise.
    """
    order = epoch_order(len(questions), 0, derive_seed(seed, "probe"))
    tasks: list[Task] = []
    for g in range(groups):
        row = questions[order[g % len(order)]]
        for sample in range(samples):
            noise_seed = derive_seed(seed, "probe", g, sample)
            tasks.append(Task(row, f"probe-{g}", f"probe-{g}-{sample}", noise_seed))
    return tasks


def summarize(trajectories: Sequence[Trajectory], samples: int, entropy: float) -> Probe:
    """Summarize the episodes of `probe_tasks`."""
    groups: list[Sequence[Trajectory]] = []
    for start in range(0, len(trajectories), samples):
        groups.append(trajectories[start : start + samples])
    equal = 0
    for group in groups:
        rewards = [trajectory.reward for trajectory in group]
        equal += max(rewards) - min(rewards) < 1e-6
    scores = [trajectory.score for trajectory in trajectories]
    return Probe(
        groups=len(groups),
        samples=samples,
        score=fmean(scores),
        best_score=max(scores),
        equal=equal / len(groups),
        entropy=entropy,
        graded=all("em" in trajectory.metrics for trajectory in trajectories),
    )


def samples_of(config: Config) -> int:
    """Return the episodes of a probe's group."""
    return max(config.rollout.samples_per_prompt, LEAST_SAMPLES)


def warning_or_refusal(probe: Probe, config: Config) -> str:
    """Return a warning, or "" for a start that RL can learn from.

    Raises ConfigError if most steps of RL would have a gradient of zero. The share of equal groups
    alone does not tell. RL took a start with .953 to an EM of .978, because 1.5 of the 32 groups of
    a step differed.
    """
    env = config.env
    differ = (1 - probe.equal) * config.rollout.prompts_per_step
    nothing_differs = probe.equal >= AGREED and differ < 1
    # Where no answer is right, rewards that differ are penalties for the form: RL would learn the
    # form, and no answer. Rewards for calls or evidence are worth learning from.
    only_form = probe.graded and not env.call_reward and not env.evidence_reward
    never_right = probe.best_score <= 0 and (only_form or nothing_differs)
    if probe.equal < FEW_DIFFER and not never_right:
        return ""
    if probe.score >= RIGHT:
        return (
            f"the start model already has a mean score of {probe.score:.2f}, and {probe.equal:.0%} "
            "of the groups are equal: RL has nothing left to learn from these questions"
        )
    if config.rollout.replaces_equal_groups:
        return (
            f"{probe.equal:.0%} of the groups are equal; dynamic sampling will look for the others"
        )
    c = config.cold_start
    if never_right:
        episodes = probe.groups * probe.samples
        raise ConfigError(
            f"the start model never succeeds: {episodes} episodes on {probe.groups} training "
            "questions, no score above 0, so RL has nothing to reinforce. Clone more (now "
            f"cold_start.copy_steps={c.copy_steps} cold_start.mix_steps={c.mix_steps}), from a "
            "demonstrator that is right more often; cold_start.probe=0 starts anyway",
            code="start_all_wrong",
        )
    if not nothing_differs:
        return (
            f"only {1 - probe.equal:.0%} of the groups have anything to compare; a higher "
            "rollout.temperature or more cold_start.plays may help"
        )
    raise ConfigError(
        f"{probe.equal:.0%} of {probe.groups} groups of {probe.samples} samples are equal (mean "
        f"score {probe.score:.2f}, entropy {probe.entropy:.3f} nats): the start model repeats its "
        "demonstrations, and RL has nothing to compare. Raise rollout.temperature (now "
        f"{config.rollout.temperature:g}), or give it more demonstrations (cold_start.plays, now "
        f"{c.plays or 'automatic'}; data.train) or fewer steps (cold_start.copy_steps="
        f"{c.copy_steps} cold_start.mix_steps={c.mix_steps}); cold_start.probe=0 starts anyway",
        code="start_all_equal",
    )
