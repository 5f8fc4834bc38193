"""Rows of Harbor tasks: `data.name=harbor data.source=FOLDER`.

In: a folder with tasks. Out: a row for each task that runs here; the others are counted with their
reasons. Next: `env.py` plays a row. `python -m agent_r1_recipes.harbor.source FOLDER` lists them.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from agent_r1 import Asked, ConfigError, DataConfig, Made, Source
from agent_r1_recipes.harbor.tasks import HarborFolder, Refused, read_task, task_folders


class HarborTasks(Source):
    """The tasks of a folder, in splits of `data.train`, `data.val` and `data.test`."""

    ability = "environment"

    def title(self, config: DataConfig) -> str:
        return f"Harbor tasks from {config.source}"

    def make(self, config: DataConfig, seed: int) -> Made:
        place = Path(config.source or "")
        folders = task_folders(place)
        tasks: list[HarborFolder] = []
        refusals: list[str] = []
        for folder in folders:
            try:
                tasks.append(read_task(folder))
            except Refused as reason:
                refusals.append(f"{folder.name}: {reason}")
        if not tasks:
            reasons = "; ".join(refusals[:3]) or "there is no task.toml"
            raise ConfigError(
                f"data.source={place}: none of {len(folders)} Harbor tasks runs without Docker "
                f"({reasons})",
                code="no_tasks",
            )
        questions = [
            Asked(task.instruction.strip(), [], {"metadata": {"task": str(task.folder.resolve())}})
            for task in tasks
        ]
        random.Random(f"{seed}/harbor").shuffle(questions)
        splits = {}
        sizes = {}
        start = 0
        for split in self.splits:
            count = getattr(config, split)
            part = questions[start : start + count]
            start += len(part)
            # One task may be all there is: then each split has it.
            splits[split] = part or questions[:1]
            sizes[split] = {"questions": len(splits[split]), "kinds": {}}
        return Made(splits, [], {"sources": {}, "skipped": refusals, "splits": sizes})


TASKS = HarborTasks()


def main(place: str) -> None:
    """Print which tasks run here, and why the others do not."""
    runs = 0
    folders = task_folders(Path(place))
    for folder in folders:
        try:
            read_task(folder)
            runs += 1
            print(f"{folder.name}: runs")
        except Refused as reason:
            print(f"{folder.name}: {reason}")
    print(f"{runs} of {len(folders)} tasks run here")


if __name__ == "__main__":
    main(sys.argv[1])
