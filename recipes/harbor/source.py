"""Rows of Harbor tasks: `data.name=harbor data.source=FOLDER`.

In: a folder with tasks. Out: a row for each task that runs here; the others are counted with their
reasons. Next: `env.py` plays a row. `python -m agent_r1_recipes.harbor.source FOLDER` lists them.

A folder has few tasks, so they are shared out: no task is in two of train, val and test. The split
`all` has every task, for models that were trained on none of them.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any, cast

from agent_r1 import (
    SPLITS,
    Asked,
    ConfigError,
    DataConfig,
    Made,
    Source,
    describe_counts,
    say,
    share_out,
)
from agent_r1_recipes.harbor.docker import Engine, find_program
from agent_r1_recipes.harbor.packages import Refused
from agent_r1_recipes.harbor.settings import HarborSettings
from agent_r1_recipes.harbor.tasks import HARMLESS, HarborFolder, read_task, task_folders


class HarborTasks(Source):
    """The tasks of a folder, in splits of at most `data.train`, `data.val` and `data.test`."""

    splits = (*SPLITS, "all")
    ability = "environment"

    def title(self, config: DataConfig) -> str:
        return f"Harbor tasks from {config.source}"

    def check_settings(self, config: HarborSettings, seed: int) -> None:
        """Read the folder, and refuse one that is too small to train on."""
        reason = self.make(config, seed).manifest.get("untrainable")
        if reason:
            raise ConfigError(reason, code="too_few_questions")

    def make(self, config: HarborSettings, seed: int) -> Made:
        place = Path(config.source or "")
        tasks, refusals = read_tasks(place, config.harbor_engine)
        if not tasks:
            reasons = "; ".join(refusals[:3]) or "there is no task.toml"
            raise ConfigError(
                f"data.source={place}: none of {len(refusals)} Harbor tasks runs here ({reasons})",
                code="no_tasks",
            )
        not_read: Counter[str] = Counter()
        for task in tasks:
            not_read.update(task.not_read)
        if not_read:
            line = f"  {place.name}, task.toml: {describe_counts(not_read, HARMLESS)}"
            say(line)
        questions = [
            Asked(
                task.instruction.strip(),
                [],
                {"metadata": {"task": str(task.folder.resolve()), "engine": config.harbor_engine}},
            )
            for task in tasks
        ]
        random.Random(f"{seed}/harbor").shuffle(questions)
        manifest: dict[str, Any] = {"sources": {}, "skipped": refusals}
        counts = {split: getattr(config, split) for split in SPLITS if getattr(config, split)}
        sizes = share_out(len(questions), counts)
        if sizes is None:
            manifest["untrainable"] = (
                f"data.source={place}: {len(questions)} Harbor task(s) cannot be split into "
                f"{', '.join(counts)} without a common one; add tasks, or with two take data.test=0"
            )
            sizes = dict.fromkeys(counts, len(questions))
        splits = {"all": questions}
        start = 0
        for split, size in sizes.items():
            splits[split] = questions[start : start + size]
            if "untrainable" not in manifest:
                start += size
        # data.test=0: no task is kept from the curve of training.
        splits.setdefault("test", splits["val"])
        manifest["splits"] = {
            split: {"questions": len(splits[split]), "kinds": {}} for split in self.splits
        }
        return Made({split: splits[split] for split in self.splits}, [], manifest)


TASKS = HarborTasks()


def read_tasks(place: Path, engine: Engine) -> tuple[list[HarborFolder], list[str]]:
    """Return the different tasks that run here, and why the others do not."""
    with_docker = find_program(engine) is not None
    tasks: list[HarborFolder] = []
    refusals: list[str] = []
    names: dict[str, str] = {}
    for folder in task_folders(place):
        try:
            task = read_task(folder, with_docker)
        except Refused as reason:
            refusals.append(f"{folder.name}: {reason}")
            continue
        first = names.setdefault(_key(task), folder.name)
        if first != folder.name:
            refusals.append(f"{folder.name}: the same task as {first}")
            continue
        tasks.append(task)
    return tasks, refusals


def _key(task: HarborFolder) -> str:
    """Return what is equal for equal tasks: instruction and files of the agent."""
    digest = hashlib.sha256(task.instruction.encode())
    folder = task.folder / "environment"
    for path in sorted(folder.rglob("*")):
        digest.update(f"\0{path.relative_to(folder)}\0".encode("utf-8", "surrogateescape"))
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()


def main(place: str, engine: str = "auto") -> None:
    """Print which tasks run here, and why the others do not."""
    # A word of the command line: `find_program` raises for one that is no engine here.
    tasks, refusals = read_tasks(Path(place), cast(Engine, engine))
    for task in tasks:
        say(f"{task.folder.name}: runs")
    for refusal in refusals:
        say(refusal)
    say(f"{len(tasks)} of {len(tasks) + len(refusals)} tasks run here")


if __name__ == "__main__":
    main(*sys.argv[1:])
