"""Convert trajectories to training rows with action masks and rewards.

In: `Trajectory`. Out: `TrainingRow`s and, padded, a `Batch` of tensors. Next:
`training/advantages.py`.

**The row rule.** A step whose observation extends all tokens so far joins the row; any other step
begins a new row. An environment that appends gives one row per episode; each rewrite of the context
adds one. Statistics are per trajectory, so each row has its trajectory's number.

**The action mask** is 1 on sampled tokens and 0 on all others (prompt, tool results, template). It
gates the policy loss, KL, entropy, value loss and the recursion of GAE. Unlike in single-turn RL,
tokens that the policy did not choose (tool results, templates) also follow its first action.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from agent_r1.core import Trajectory
from agent_r1.ground.errors import ConfigError
from agent_r1.rollout.columns import Column, Columns


@dataclass
class TrainingRow:
    """One sequence of T tokens; the lists have length T."""

    trajectory: int
    """Index of the trajectory in its batch.

    A trajectory's rows are consecutive and in time order.
    """
    group_id: str
    input_ids: list[int] = field(default_factory=list)
    action_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """At sampling time; 0 where the mask is 0."""
    rewards: list[float] = field(default_factory=list)
    """A call's reward on the call's last token, a step's other reward on its last action token.

    The reward of a step without action tokens is on the last action token before it, or the next
    one if there is none.
    """
    step_ids: list[int] = field(default_factory=list)
    """Index of an action token's step; -1 for observations."""
    truncated: bool = False
    """`Trajectory.truncated`."""
    columns: dict[str, Any] = field(default_factory=dict)
    """`Column.name` -> one value per token, or one for the row."""

    def _add_observation(self, ids: list[int]) -> None:
        self.input_ids += ids
        self.action_mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.rewards += [0.0] * len(ids)
        self.step_ids += [-1] * len(ids)

    def _add_action(self, ids: list[int], logprobs: list[float], step: int) -> None:
        # These are exactly the sampled ids, so the mask never has to be found in a text. The turn's
        # end token is among them, because the policy chose to end there (lesson 3).
        self.input_ids += ids
        self.action_mask += [1] * len(ids)
        self.logprobs += logprobs
        self.rewards += [0.0] * len(ids)
        self.step_ids += [step] * len(ids)


def trajectory_rows(
    trajectory: Trajectory, index: int, columns: Sequence[Column] = ()
) -> list[TrainingRow]:
    """Return the training rows of one trajectory, with `columns`; none if nothing was sampled."""
    rows: list[TrainingRow] = []
    last_action: tuple[TrainingRow, int] | None = None  # row and position of the last action token
    unassigned_reward = 0.0
    for number, step in enumerate(trajectory.steps):
        context = rows[-1].input_ids if rows else None
        # The row rule. In lesson 2's episode, step 2 observes 71 tokens and the first 25 are the
        # row so far, so it joins. A context that was rewritten does not begin like the row.
        if context is None or step.observation_ids[: len(context)] != context:
            rows.append(TrainingRow(index, trajectory.group_id, truncated=trajectory.truncated))
            context = rows[-1].input_ids
        row = rows[-1]
        row._add_observation(step.observation_ids[len(context) :])
        row._add_action(step.action_ids, step.action_logprobs, number)
        for column in columns:
            column.extend(row.columns, step if column.of_tokens else trajectory, len(row.input_ids))
        for token, reward in step.token_rewards:
            # `token` counts from the start of the action, which ends where the row now ends: so
            # count from the row's end. The last of 10 tokens, number 9, is at -1, whatever was read
            # before (lesson 4).
            row.rewards[token - len(step.action_ids)] += reward
        # A step may have sampled nothing. Its reward goes to the last sampled token before it, or
        # else to the next one. On a token with mask 0, every later formula would drop it.
        unassigned_reward += step.reward - sum(reward for _, reward in step.token_rewards)
        if step.action_ids:
            last_action = row, len(row.rewards) - 1
        if last_action is not None:
            row_of_action, position = last_action
            row_of_action.rewards[position] += unassigned_reward
            unassigned_reward = 0.0
    return [row for row in rows if any(row.action_mask)]


@dataclass(kw_only=True)
class Batch:
    """Rows padded on the right to the longest. Everything is 0 on padding.

    Under verl, a batch serves the estimators only, and `ids_BT`, `logprobs_BT` and `lengths_B` are
    None.
    """

    ids_BT: Tensor | None = None
    """int64."""
    logprobs_BT: Tensor | None = None
    """float32. log pi_old: recorded while sampling, or recomputed before an update."""
    lengths_B: Tensor | None = None
    """int64. Tokens without padding."""
    mask_BT: Tensor
    """float32. The action mask."""
    rewards_BT: Tensor
    """float32. Each reward on the action token that earned it."""
    groups: list[str]
    """Prompt group of each row."""
    trajectory_B: Tensor
    """int64. Equal numbers are one trajectory; its rows are consecutive and in time order."""
    trajectories: list[Trajectory] = field(default_factory=list)
    """Sources of the rows; `trajectory_B` is an index into this list."""
    columns: Columns = field(default_factory=Columns)
    """What the estimator declares."""
    metrics: dict[str, float] = field(default_factory=dict)
    """For the step's line in metrics.jsonl."""

    steps_BT: Tensor | None = None
    """int64. Index of an action token's step in its trajectory; 0 also on padding."""
    truncated_B: Tensor | None = None
    """bool. `Trajectory.truncated`; None: no row is."""
    values_BT: Tensor | None = None
    """float32. V(s_t) at action token t: the critic's value of the state *before* the token."""
    ref_logprobs_BT: Tensor | None = None
    """log pi_ref, if a KL is configured."""
    advantages_BT: Tensor | None = None
    returns_BT: Tensor | None = None
    """The critic's target. Without a critic, the trajectory's score or reward-to-go, for logs."""
    episode_tokens_B: Tensor | None = None
    """int64. Action tokens in all rows of the row's trajectory, for `losses.aggregate_loss`."""

    def __post_init__(self):
        self.columns = Columns(self.columns)

    def __len__(self) -> int:
        return len(self.groups)

    def to(self, device: str | torch.device) -> Batch:
        """Copy the batch to `device`."""

        def move(name: str, tensor: Tensor) -> Tensor:
            return tensor.to(device)

        return self._with(move)

    def __getitem__(self, index: Tensor) -> Batch:
        """Return the rows at `index` (int64), cut to the longest of them."""
        T = int(self.lengths_B[index].max())

        def select(name: str, tensor: Tensor) -> Tensor:
            # The shape in the name says which tensors have a time axis to cut.
            return tensor[index, :T] if name.endswith("_BT") else tensor[index]

        part = self._with(select)
        return replace(part, groups=[self.groups[i] for i in index.tolist()])

    # ------------------------------------------------------------------------------- for estimators

    def number_trajectories(self) -> tuple[Tensor, int]:
        """Return [B]: the number of each row's trajectory, 0..N-1 in order of appearance; and N.

        Raises ValueError if the rows of a trajectory are not consecutive.
        """
        numbers, index_B = torch.unique_consecutive(self.trajectory_B, return_inverse=True)
        if len(numbers.unique()) != len(numbers):
            raise ValueError("the rows of a trajectory must be consecutive and in time order")
        return index_B, len(numbers)

    def members(self) -> dict[str, list[int]]:
        """Map each group to the numbers of its trajectories."""
        index_B, _ = self.number_trajectories()
        # A trajectory with several rows counts once: two votes would move its group's mean.
        pairs = dict.fromkeys(zip(self.groups, index_B.tolist(), strict=True))
        members: dict[str, list[int]] = {}
        for group, trajectory in pairs:
            members.setdefault(group, []).append(trajectory)
        return members

    def scores(self) -> tuple[Tensor, Tensor]:
        """Return [B]: the number of each row's trajectory; and [N]: the sum of its rewards.

        Raises ConfigError for truncated trajectories.
        """
        self.refuse_truncated()
        index_B, N = self.number_trajectories()
        reward_B = torch.where(self.mask_BT.bool(), self.rewards_BT.float(), 0.0).sum(dim=1)
        return index_B, reward_B.new_zeros(N).index_add_(0, index_B, reward_B)

    def refuse_truncated(self) -> None:
        """Raise ConfigError for truncated episodes: only a critic can value the rest."""
        if self.truncated_B is None:
            return
        episodes = len(self.trajectory_B[self.truncated_B].unique())
        if episodes:
            raise ConfigError(
                f"{episodes} episodes were truncated (Outcome.truncated), which requires a "
                "critic's value of the missing rest; use an estimator with a critic, such as ppo, "
                "or an environment that does not set it",
                code="needs_critic",
            )

    def to_tokens(self, x_B: Tensor) -> Tensor:
        """Copy each row's value to its action tokens: [B] to [B, T]."""
        return torch.where(self.mask_BT.bool(), x_B[:, None], 0.0)

    def at_actions(self, x_A: Tensor) -> Tensor:
        """Put values of action tokens, row by row, in their places: [A] to [B, T]."""
        return scatter(x_A, self.mask_BT.bool())

    def _with(self, change: Callable[[str, Tensor], Tensor]) -> Batch:
        changes: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                changes[name] = change(name, value)
        columns = {name: change(name, value) for name, value in self.columns.items()}
        return replace(self, **changes, columns=columns)


def scatter(values_A: Tensor, where_BT: Tensor) -> Tensor:
    """Put A values in their places in [B, T], with zeros elsewhere. Differentiable."""
    return torch.zeros(where_BT.shape, device=values_A.device).masked_scatter(where_BT, values_A)


def collate(
    rows: Sequence[TrainingRow],
    trajectories: Iterable[Trajectory] = (),
    columns: Sequence[Column] = (),
) -> Batch:
    """Pad rows to one batch. Raise ValueError if the rows' columns differ from `columns`."""
    T = max(len(row.input_ids) for row in rows)
    names = {column.name for column in columns}
    for row in rows:
        other = row.columns.keys() ^ names
        if other:
            raise ValueError(f"rows and estimator differ in the columns {', '.join(sorted(other))}")

    def pad(lists: list[list], dtype: torch.dtype) -> Tensor:
        # On the right: a token then sees no padding, because it attends to the left only. 0 is some
        # token's id, but its mask is 0 as well, so it reaches no loss.
        return torch.tensor([values + [0] * (T - len(values)) for values in lists], dtype=dtype)

    def column_of(column: Column) -> Tensor:
        values = [row.columns[column.name] for row in rows]
        if column.of_tokens:
            return pad(values, column.dtype)
        return torch.tensor(values, dtype=column.dtype)

    return Batch(
        ids_BT=pad([row.input_ids for row in rows], torch.long),
        mask_BT=pad([row.action_mask for row in rows], torch.float32),
        logprobs_BT=pad([row.logprobs for row in rows], torch.float32),
        rewards_BT=pad([row.rewards for row in rows], torch.float32),
        lengths_B=torch.tensor([len(row.input_ids) for row in rows]),
        trajectory_B=torch.tensor([row.trajectory for row in rows]),
        steps_BT=pad([row.step_ids for row in rows], torch.long),
        truncated_B=torch.tensor([row.truncated for row in rows]),
        groups=[row.group_id for row in rows],
        trajectories=list(trajectories),
        columns=Columns({column.name: column_of(column) for column in columns}),
    )
