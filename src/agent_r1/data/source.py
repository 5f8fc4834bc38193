"""Define the interface of a data set.

In: `DataConfig` and a seed. Out: `Made`, questions by split and passages. Next: `build.py` writes
them. A data set is an object of a class below, in a table of names (`tables.py`), or a user-defined
function (`own_rows.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from agent_r1.config import tables
from agent_r1.config.settings import DataConfig
from agent_r1.data.storage import Passage
from agent_r1.ground.errors import ConfigError

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Asked:
    """One question of any source."""

    question: str
    answers: list[str]
    extra: dict[str, Any]  # for evaluations and environments, not for the agent
    system: str | None = None  # the question's own system message
    tools: list[str] | None = None  # its part of env.tools; None: all


@dataclass(frozen=True)
class Made:
    """Result of a source: questions by split, passages, and its part of the manifest."""

    splits: dict[str, list[Asked]]
    passages: Iterable[Passage]
    manifest: dict[str, Any]


class Source(ABC):
    """A data set."""

    splits: tuple[str, ...] = SPLITS
    ability: str = "question-answering"  # the kind of task in verl's rows

    @abstractmethod
    def make(self, config: DataConfig, seed: int) -> Made:
        """Make questions and passages; the same for the same configuration, seed and files."""

    def check_settings(self, config: DataConfig, seed: int) -> None:  # noqa: B027 (optional)
        """Raise ConfigError for settings that `make` would refuse. The plan of a run asks."""

    def is_one_file(self, config: DataConfig) -> bool:
        """Return whether the splits are parts of one file."""
        return False

    def check_split_by(self, config: DataConfig) -> None:
        """Raise ConfigError if `data.split_by` would have no effect: only one file is divided."""
        if config.split_by != "auto" and not self.is_one_file(config):
            raise ConfigError(
                f"data.split_by={config.split_by} divides one file of questions, and the splits of "
                f"{config.source or config.name} are made already; leave it out, or give one file",
                code="splits_are_made",
            )

    def title(self, config: DataConfig) -> str:
        """Name the origin of the questions."""
        return f"{config.name} from {config.source or 'the hub'}"

    def summary(self, config: DataConfig, manifest: dict[str, Any]) -> str:
        """Summarise the result in one line."""
        counts = ", ".join(
            f"{name} {split['questions']}" for name, split in manifest["splits"].items()
        )
        summary = f"questions: {counts}; corpus: {config.corpus}"
        omissions = manifest["skipped"]
        if omissions:
            summary += f"; left out {len(omissions)} records: {', '.join(omissions[:3])}"
        if len(omissions) > 3:
            summary += ", ..."
        return summary


def source_of(config: DataConfig) -> Source:
    """Return the configured data set. Raise ConfigError for an unknown one."""
    return tables.resolve("data", config.data_source, "data.name")
