"""Build the files of a data set: questions as parquet, a corpus, and a manifest.

In: `DataConfig` and a seed. Out: a folder with train, val, test (and for TinyHop cold) .parquet,
corpus.jsonl and manifest.json; the same bytes for the same seed, configuration and source. Next:
`search/` indexes corpus.jsonl; trainer and evaluation read the rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from agent_r1.config.settings import DataConfig
from agent_r1.data.prompts import messages
from agent_r1.data.source import source_of
from agent_r1.data.storage import make_folder, write_corpus, write_rows
from agent_r1.ground.errors import AgentR1Error, first_line


def build(
    config: DataConfig,
    seed: int,
    out: Path,
    agent_name: str = "hermes",
    describes_format: bool = False,
) -> dict[str, Any]:
    """Make the data set in the new folder `out`, and return its manifest.

    `agent_name` and `describes_format` belong to the dialect. Raises ConfigError for sizes that are
    impossible or that the source lacks. Raises AgentR1Error for a missing or corrupt source, or if
    `out` exists or cannot be written.
    """
    source = source_of(config)
    source.check_split_by(config)

    def write(folder: Path) -> dict[str, Any]:
        questions_by_split = source.make(config, seed)
        for split, questions in questions_by_split.splits.items():
            rows = [
                {  # verl's keys
                    "data_source": config.data_source,
                    "prompt": messages(
                        config.data_source, entry.question, entry.system, describes_format
                    ),
                    "ability": source.ability,
                    "reward_model": {"style": "rule", "ground_truth": entry.answers},
                    "extra_info": {"index": index, "split": split, **entry.extra},
                    "agent_name": agent_name,
                    "env_kwargs": {"tools": entry.tools},
                }
                for index, entry in enumerate(questions)
            ]
            try:
                write_rows(folder / f"{split}.parquet", rows)
            except pa.ArrowException as error:
                raise AgentR1Error(
                    f"the metadata of {split} have different types ({first_line(error)}); give "
                    "each key one type in all questions",
                    code="mixed_metadata",
                ) from None
        write_corpus(folder / "corpus.jsonl", questions_by_split.passages)
        return {"seed": seed, "config": config.model_dump(), **questions_by_split.manifest}

    return make_folder(
        out, write, [*(f"{split}.parquet" for split in source.splits), "corpus.jsonl"]
    )
