"""Published question sets, read from local files or from the Hugging Face hub, and checked.

In: a local file in a published form (forms.py), or a data set on the hub. Out: `Record`s, the same
whichever it was. Next: the core makes rows of them. A set of the same kind is a `Dataset`, a name
in a recipe.toml, and a form if it has one of its own.

A downloaded file is not trusted: every record is checked, and one that does not fit is counted and
named. It is left out only where the user asked for that. `datasets` reads what it has written
itself, on the hub or in a local copy of it. `json_files.py` reads JSON: one corrupt line, and
datasets 5.2.0 refuses the whole file without saying which record it was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from agent_r1 import (
    AgentR1Error,
    Asked,
    DataConfig,
    Made,
    RecordSource,
    first_line,
    json_records,
)
from agent_r1_recipes.multihopqa.forms import HotpotQA, MuSiQue, Record, TwoWiki

RECORD_KEYS = ("kind", "hops", "id", "supporting")
"""What evaluations and environments get to know of a published question."""


@dataclass(frozen=True)
class Dataset(RecordSource):
    """Describe a published question set: its place, its size, and the form of a record."""

    name: str
    """As in `data.name`."""
    hub: str
    """owner/name on the Hugging Face hub."""
    config: str | None
    revision: str | None
    """Commit on the hub; None takes the newest."""
    files: dict[str, str]
    """Split -> name of the published file: the one to train on, and the held-out one, if any."""
    counts: dict[str, int]
    """Split -> published number of records. Fewer are half a download."""
    form: type[BaseModel]
    """Its method `record` makes a `Record`."""
    ability: str = "multi-hop-qa"
    """What verl's rows call this kind of task."""
    aliases: str | None = None
    """Name of a file next to the published ones, with other names of the answers by their ids."""

    def local_files(self, config: DataConfig) -> dict[str, list[Path]]:
        """Find the files of `data.source` by split.

        Returns {} for the hub, one file for `all` splits, or those of each split in a folder. A
        folder has the published files (and the aliases, if there), or a hub copy's parquet files.
        Raises AgentR1Error if they are missing.
        """
        if config.source is None:
            return {}
        source = Path(config.source)
        if source.is_file():
            return {"all": [source]}
        if not source.is_dir():
            raise AgentR1Error(
                f"data.source={source.absolute()} does not exist; give a published file, or the "
                "folder of the published files",
                code="missing_source",
            )
        aliases: list[Path] = []
        if self.aliases and (source / self.aliases).is_file():
            aliases.append(source / self.aliases)
        files = {}
        for split, name in self.files.items():
            if (source / name).is_file():
                files[split] = [source / name, *aliases]
            elif (source / f"{name}.gz").is_file():
                files[split] = [source / f"{name}.gz", *aliases]
            else:
                files[split] = sorted(source.glob(f"{self.config or '*'}/{split}-*.parquet"))
            if not files[split]:
                raise AgentR1Error(
                    f"{source} has no {name} (or {name}.gz); {self.name} is published under that "
                    "name",
                    code="missing_source",
                )
        return files

    def parts(
        self, config: DataConfig, files: dict[str, list[Path]], seed: int, omissions: list[str]
    ) -> dict[str, list[Record]]:
        if "all" in files:
            return {"all": self.records(config, "all", files["all"], omissions)}
        parts = {}
        for split in self.files:
            parts[split] = self.records(config, split, files.get(split, []), omissions)
        if len(parts) == 1:
            # Only training questions are published: the core takes the other splits from them.
            [records] = parts.values()
            return {"all": records}
        return parts

    def asked(self, config: DataConfig, record: Record) -> Asked:
        facts = {name: getattr(record, name) for name in RECORD_KEYS}
        return Asked(record.question, record.answers, facts, config.system)

    def make(self, config: DataConfig, seed: int) -> Made:
        dataset = super().make(config, seed)
        dataset.manifest["dataset"] = None
        if not config.source:
            dataset.manifest["dataset"] = {"hub": self.hub, "revision": self.revision}
        return dataset

    def records(
        self, config: DataConfig, split: str, files: list[Path], omissions: list[str]
    ) -> list[Record]:
        """Read the records of a split; those that are left out are named in `omissions`.

        Raises AgentR1Error for corrupt ones.
        """
        records: dict[str, Record] = {}
        aliases: dict[str, list[str]] = {}
        where = f"{self.hub}, {split}"
        if files:
            where = str(files[0])
        if not files or files[0].suffix == ".parquet":
            values = from_datasets(self, split, files)
        else:
            values = json_records(files[0])
            if len(files) > 1:
                aliases = read_aliases(files[1])

        def parse(value: Any) -> Record | None:
            form = self.form.model_validate(value)
            record = form.record()
            others = aliases.get(getattr(form, "answer_id", None), [])
            answers = list(dict.fromkeys([*record.answers, *others]))
            record = dataclasses.replace(record, answers=answers)
            if not record.id:
                return record
            first = records.setdefault(record.id, record)
            if first is record:
                return record
            if first == record:  # word for word, as in the first release of DAPO-Math
                return None
            # In two splits, it would train on the test.
            raise ValueError(f"the id {record.id} a second time")

        return list(self.checked(values, parse, where, config.skip_bad, omissions))


HOTPOTQA = Dataset(
    name="hotpotqa",
    hub="hotpotqa/hotpot_qa",
    config="distractor",
    revision="1908d6afbbead072334abe2965f91bd2709910ab",
    files={"train": "hotpot_train_v1.1.json", "validation": "hotpot_dev_distractor_v1.json"},
    counts={"train": 90447, "validation": 7405},
    form=HotpotQA,
)
HOTPOTQA_FULLWIKI = dataclasses.replace(
    HOTPOTQA,
    name="hotpotqa-fullwiki",
    config="fullwiki",
    files=HOTPOTQA.files | {"validation": "hotpot_dev_fullwiki_v1.json"},
)
TWOWIKI = dataclasses.replace(
    HOTPOTQA,
    name="twowiki",
    hub="framolfese/2WikiMultihopQA",
    config=None,
    revision="fe713bfbd1afbca1a65246741a75890405d56a3a",
    files={"train": "train.json", "validation": "dev.json"},
    counts={"train": 167454, "validation": 12576},
    form=TwoWiki,
    aliases="id_aliases.json",
)
MUSIQUE = Dataset(
    name="musique",
    hub="dgslibisey/MuSiQue",
    config=None,
    revision=None,
    files={"train": "musique_ans_v1.0_train.jsonl", "validation": "musique_ans_v1.0_dev.jsonl"},
    counts={"train": 19938, "validation": 2417},
    form=MuSiQue,
)


# ------------------------------------------------------------------------------------------ the hub


def from_datasets(dataset: Dataset, split: str, files: list[Path]) -> Iterator[tuple[str, Any]]:
    """Yield (place, value) of a split's records on the hub, or in local parquet files.

    `all` is the only split of one file. Raises AgentR1Error without network, or if records are
    missing.
    """
    is_whole = split == "all"  # how many records it should have is not known
    name = next(iter(dataset.files.values())) if is_whole else dataset.files[split]
    remedy = f"or download {name} yourself and name its folder with data.source=DIR"
    if is_whole:
        where = files[0]
    elif files:
        where = files[0].parent
    else:
        where = dataset.hub
    try:
        from datasets import DownloadConfig, load_dataset  # takes seconds
    except ImportError:
        raise AgentR1Error(
            f"reading {where} needs datasets: pip install 'agent-r1[qa]', {remedy}",
            code="missing_extra",
        ) from None
    table: Any
    try:
        if files:
            data_files = {"train": [str(path) for path in files]}
            table = load_dataset("parquet", data_files=data_files, split="train")
        else:
            table = load_dataset(
                dataset.hub,
                dataset.config,
                split=split,
                revision=dataset.revision,
                download_config=DownloadConfig(max_retries=4),
            )
    except Exception as error:
        # No network, no such revision, no space: `datasets` has a dozen classes for them.
        reason = f"({type(error).__name__}: {first_line(error)})"
        if files:
            raise AgentR1Error(
                f"cannot read {where} {reason}; get it again, {remedy}", code="damaged_source"
            ) from None
        raise AgentR1Error(
            f"cannot fetch {where} {reason}; fix the network, {remedy}", code="download_failed"
        ) from None
    if not is_whole and len(table) != dataset.counts[split]:
        raise AgentR1Error(
            f"{where} has {len(table)} of {dataset.counts[split]} published records in {split}; "
            f"delete its copy in the cache of `datasets` and fetch it again, {remedy}",
            code="incomplete_download",
        )
    number = 0
    # Row by row takes three times as long: minutes for DAPO's 1.8 million.
    for batch in table.iter(1000):
        for values in zip(*batch.values(), strict=True):
            number += 1
            yield f"{split} record {number}", dict(zip(table.column_names, values, strict=True))


def read_aliases(path: Path) -> dict[str, list[str]]:
    """Map an id in Wikidata to other names.

    Raises AgentR1Error for a line that is none of 2WikiMultihopQA's.
    """
    aliases = {}
    try:
        for _, entry in json_records(path):
            aliases[entry["Q_id"]] = [*entry["aliases"], *entry["demonyms"]]
        return aliases
    except (KeyError, TypeError):
        raise AgentR1Error(
            f"{path} is not 2WikiMultihopQA's file of aliases; download it again, or move it "
            "elsewhere",
            code="damaged_source",
        ) from None
