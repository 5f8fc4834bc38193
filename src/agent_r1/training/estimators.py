"""Look up estimators by name: `ESTIMATORS["grpo"]`. `advantages.py` has grpo and ppo, recipes/credit the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from agent_r1.config import tables
from agent_r1.training.advantages import Estimator


class _Estimators(Mapping[str, Estimator]):
    """The table of names; an estimator is imported when looked up."""

    def __getitem__(self, name: str) -> Estimator:
        if name not in tables.names("estimator"):
            raise KeyError(name)
        return tables.resolve("estimator", name, "algorithm")

    def __iter__(self) -> Iterator[str]:
        return iter(tables.names("estimator"))

    def __len__(self) -> int:
        return len(tables.names("estimator"))


ESTIMATORS = _Estimators()
