"""Trajectories to training sequences: what was sampled, what was not, and where the reward sits.

In: `Trajectory`. Out: `TrainingRow`s and, padded, a `Batch` of tensors. Next: `training/advantages.py`.

**The row rule.** A step whose observation extends all tokens so far joins the row; otherwise a new row begins. An
environment that appends gives one row an episode; one that rewrites its context gives one row a rewrite. Advantages need to
know which it was: statistics are per trajectory, so each row carries its trajectory's number.

**The action mask** is 1 on sampled tokens and 0 on all others (prompt, tool results, template). It gates the policy
loss, KL, entropy and value loss, and the recursion of advantages. This is the whole difference between RL for chat
and RL for agents: tool tokens are in the context, but the policy did not choose them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from agent_r1.types import Trajectory


@dataclass
class TrainingRow:
    """One sequence of tokens; the lists are equally long (T)."""

    trajectory: int
    """Index of the trajectory in its batch. The rows of a trajectory are consecutive and in time order."""
    group_id: str
    input_ids: list[int] = field(default_factory=list)
    action_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """At sampling time; 0 where the mask is 0."""
    rewards: list[float] = field(default_factory=list)
    """A call's reward on the call's last token, the rest of a step's on its last action token (of a step that sampled nothing:
    on the one before)."""
    step_ids: list[int] = field(default_factory=list)
    """The step that a token belongs to as an action; -1 for observations."""
    states: list[int] = field(default_factory=list)
    """The `state` of that step; 0 for observations."""
    process: list[float] = field(default_factory=list)
    """What of `rewards` was paid on the way (`Step.process`)."""
    truncated: bool = False
    """`Trajectory.truncated`."""

    def _extend(self, ids: list[int], logprobs: list[float] | None, step: int, state: int = 0) -> None:
        n, sampled = len(ids), logprobs is not None
        self.input_ids += ids
        self.action_mask += [int(sampled)] * n
        self.logprobs += logprobs if sampled else [0.0] * n
        self.rewards += [0.0] * n
        self.process += [0.0] * n
        self.step_ids += [step if sampled else -1] * n
        self.states += [state if sampled else 0] * n


def trajectory_rows(trajectory: Trajectory, index: int) -> list[TrainingRow]:
    """The training sequences of one trajectory (none if nothing was sampled)."""
    rows: list[TrainingRow] = []
    paid_to, owed = None, 0.0
    for number, step in enumerate(trajectory.steps):
        seen = rows[-1].input_ids if rows else None
        if seen is None or step.observation_ids[: len(seen)] != seen:
            rows.append(TrainingRow(index, trajectory.group_id, truncated=trajectory.truncated))
            seen = rows[-1].input_ids
        row = rows[-1]
        row._extend(step.observation_ids[len(seen) :], None, number)
        row._extend(step.action_ids, step.action_logprobs, number, step.extra.get("state", 0))
        # A step may have sampled nothing. What it was paid belongs to the last token that somebody chose before it.
        owed += step.reward - sum(paid for _, paid in step.process)
        for token, paid in step.process:
            row.rewards[token - len(step.action_ids)] += paid
            row.process[token - len(step.action_ids)] += paid
        if step.action_ids:
            paid_to = row, len(row.rewards) - 1
        if paid_to is not None:
            paid_to[0].rewards[paid_to[1]] += owed
            owed = 0.0
    return [row for row in rows if any(row.action_mask)]


@dataclass(kw_only=True)
class Batch:
    """Rows padded on the right to the longest, B x T, from here to the loss. Everything is 0 on padding.

    verl keeps its own tensors and makes a batch for the estimators only: then the first three are None.
    """

    ids_BT: Tensor | None = None
    """int64."""
    logprobs_BT: Tensor | None = None
    """float32, log pi_old: of the policy that sampled."""
    lengths_B: Tensor | None = None
    """int64, tokens without padding."""
    mask_BT: Tensor
    """The action mask: 1 on sampled tokens."""
    rewards_BT: Tensor
    """float32. The reward on the action token that earned it, 0 elsewhere."""
    process_BT: Tensor | None = None
    """float32. What of it was paid on the way."""
    groups: list[str]
    """Prompt group of each row."""
    trajectory_B: Tensor
    """int64. Rows with one number are one trajectory; they are consecutive and in time order."""
    trajectories: list[Trajectory] = field(default_factory=list)
    """Those that the rows come from; `trajectory_B` counts in this list."""

    steps_BT: Tensor | None = None
    """int64. The step of its trajectory that an action token belongs to."""
    states_BT: Tensor | None = None
    """int64. Where the agent stood when that step began (`Step.extra`)."""
    truncated_B: Tensor | None = None
    """bool. `Trajectory.truncated`."""
    baseline_B: Tensor | None = None
    """float32. remax: the score of the greedy episode of the row's prompt; NaN where it was broken off."""
    values_BT: Tensor | None = None
    """V(s_t) at action token t: the critic's value of the state *before* the token. None without a critic."""
    ref_logprobs_BT: Tensor | None = None
    """log pi_ref, where a KL is asked for."""
    advantages_BT: Tensor | None = None
    returns_BT: Tensor | None = None
    """With a critic: its target. Else the score of the trajectory, or what is left of it (for logs)."""
    episode_tokens_B: Tensor | None = None
    """int64. Tokens of the mask in all rows of the row's trajectory, for the loss (`losses.aggregate_loss`)."""

    def __len__(self) -> int:
        return len(self.groups)

    def to(self, device: str) -> Batch:
        """The same batch with its tensors on `device`."""
        return self._with(lambda name, tensor: tensor.to(device))

    def __getitem__(self, index: Tensor) -> Batch:
        """The rows at `index` (int64), cut to the longest of them."""
        T = int(self.lengths_B[index].max())
        part = self._with(lambda name, tensor: tensor[index, :T] if name.endswith("_BT") else tensor[index])
        return replace(part, groups=[self.groups[i] for i in index.tolist()])

    def _with(self, change: Callable[[str, Tensor], Tensor]) -> Batch:
        tensors = {name: change(name, value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors)


def collate(rows: list[TrainingRow], trajectories: Iterable[Trajectory] = ()) -> Batch:
    """Pad rows into one batch."""
    T = max(len(row.input_ids) for row in rows)

    def pad(name: str, dtype: torch.dtype) -> Tensor:
        lists = [getattr(row, name) for row in rows]
        return torch.tensor([values + [0] * (T - len(values)) for values in lists], dtype=dtype)

    return Batch(
        ids_BT=pad("input_ids", torch.long),
        mask_BT=pad("action_mask", torch.float32),
        logprobs_BT=pad("logprobs", torch.float32),
        rewards_BT=pad("rewards", torch.float32),
        process_BT=pad("process", torch.float32),
        lengths_B=torch.tensor([len(row.input_ids) for row in rows]),
        trajectory_B=torch.tensor([row.trajectory for row in rows]),
        steps_BT=pad("step_ids", torch.long),
        states_BT=pad("states", torch.long),
        truncated_B=torch.tensor([row.truncated for row in rows]),
        groups=[row.group_id for row in rows],
        trajectories=list(trajectories),
    )
