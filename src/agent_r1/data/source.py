"""Where questions come from: what a data set says of itself, and what it gives.

In: `DataConfig` and a seed. Out: `Made`, questions by split and passages. Next: `build.py` writes rows and a corpus of them. A data
set is an object of a class below, named in a table of names (`tables.py`), or a function of yours (`own_rows.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from agent_r1.config import tables
from agent_r1.config.settings import DataConfig
from agent_r1.data.storage import Passage

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Asked:
    """One question of any source."""

    question: str
    answers: list[str]
    extra: dict[str, Any]
    """What is known of it to evaluations and environments, and not to the agent."""
    system: str | None = None
    """A system message of its own."""
    tools: list[str] | None = None
    """Those of env.tools that it is asked with; None: all."""


@dataclass(frozen=True)
class Made:
    """What a source gives: questions by split, passages, and what the manifest says of them."""

    splits: dict[str, list[Asked]]
    passages: Iterable[Passage]
    manifest: dict[str, Any]


class Source(ABC):
    """A data set."""

    splits: tuple[str, ...] = SPLITS
    ability: str = "question-answering"
    """What verl's rows call this kind of task."""

    @abstractmethod
    def make(self, config: DataConfig, seed: int) -> Made:
        """Make the questions and passages; the same for the same configuration, seed and files."""

    def title(self, config: DataConfig) -> str:
        """Say in a few words where the questions come from."""
        return f"{config.name} from {config.source or 'the hub'}"

    def summary(self, config: DataConfig, manifest: dict[str, Any]) -> str:
        """Say in one line what was made."""
        counts = ", ".join(f"{name} {split['questions']}" for name, split in manifest["splits"].items())
        skipped = manifest["skipped"]
        few = ", ".join(skipped[:3]) + (", ..." if len(skipped) > 3 else "")
        bad = f"; left out {len(skipped)} records: {few}" if skipped else ""
        return f"questions: {counts}; corpus: {config.corpus}{bad}"


def source_of(config: DataConfig) -> Source:
    """The data set that the configuration names. Raises ConfigError for an unknown one."""
    return tables.resolve("data", config.data_source, "data.name")
