"""Define columns: extra inputs that an estimator declares, and what fills them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agent_r1.core import Step, Trajectory
from agent_r1.ground.errors import ConfigError


@dataclass(frozen=True)
class Column:
    """An extra input of an estimator, with one value per token or per row."""

    name: str  # ends in its shape: `states_BT` has a value per token, `baseline_B` one per row
    dtype: torch.dtype
    fill: Callable[[Step], list] | Callable[[Trajectory], Any]
    """For `*_BT`, maps a Step to the values of its action tokens; other tokens get 0. For `*_B`,
    maps a Trajectory to one."""

    @classmethod
    def process(cls) -> Column:
        """Make `process_BT`: the rewards in `Step.token_rewards`, which rollouts record."""
        return cls("process_BT", torch.float32, _process_rewards)

    @property
    def of_tokens(self) -> bool:
        return self.name.endswith("_BT")

    def extend(self, columns: dict[str, Any], owner: Step | Trajectory, length: int) -> None:
        """Extend this column to the `length` of its row.

        Raise ValueError for a wrong number of values.
        """
        value = self.fill(owner)
        if not self.of_tokens:
            columns[self.name] = value
            return
        n = len(owner.action_ids)
        if len(value) != n:
            raise ValueError(
                f"column {self.name}: {len(value)} values for a step of {n} action tokens"
            )
        before = columns.setdefault(self.name, [])
        nothing = [0.0 if self.dtype.is_floating_point else 0]
        before += nothing * (length - len(before) - len(value)) + value


def _process_rewards(step: Step) -> list[float]:
    rewards = [0.0] * len(step.action_ids)
    for token, reward in step.token_rewards:
        rewards[token] += reward
    return rewards


PROCESS = Column.process()


class Columns(dict[str, Tensor]):
    """Columns by name. A missing name raises ConfigError."""

    def __missing__(self, name: str) -> Tensor:
        raise ConfigError(
            f"the batch has no column {name}; declare it in the estimator's `columns`, with the "
            "function that fills it (columns.py)",
            code="missing_column",
        )
