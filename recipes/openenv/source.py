"""Tasks that an OpenEnv server lists: `data.name=openenv data.source=http://127.0.0.1:8000`.

In: the server's Task API (OpenEnv 0.10), which has splits of numbered tasks. Out: a row for each
task, whose `metadata` are the server's split and index. Next: `environment.py` gives both to
`reset`, which begins that task.

A server without a training split, or with nothing else, has one set of tasks. It is divided as one
file of questions is: no task is in two of train, val and test.
"""

from __future__ import annotations

import json
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from agent_r1 import (
    SPLITS,
    AgentR1Error,
    Asked,
    DataConfig,
    RecordSource,
    first_line,
    send,
)

MAX_ANSWER = 16 * 2**20
"""Bytes of the longest list of tasks that is read."""
MAX_TASKS = 100_000
"""Tasks of a split that are read."""
TIMEOUT_S = 30.0
"""Seconds for one answer."""
OUR_NAMES = {"train": "train", "validation": "val", "test": "test"}
"""A split's type, as OpenEnv calls it -> our name. A split of any other name is a validation."""


@dataclass(frozen=True)
class ListedTask:
    """One task of a server."""

    split: str
    index: int
    metadata: dict[str, Any] = field(hash=False)
    """What the server tells of it. The agent does not read it."""
    kind = None
    paragraphs = ()

    @property
    def question(self) -> str:
        return f"task {self.index} of {self.split}"

    @property
    def key(self) -> str:
        """What is equal for equal tasks. A server may list one task, by its id, in two splits."""
        if self.metadata.get("id") in (None, ""):
            return self.question
        told = {name: self.metadata[name] for name in self.metadata.keys() - {"split", "index"}}
        return json.dumps(told, sort_keys=True)


class ServerTasks(RecordSource):
    """The tasks of an OpenEnv server."""

    ability = "environment"

    def title(self, config: DataConfig) -> str:
        return f"tasks of the OpenEnv server at {config.source}"

    def local_files(self, config: DataConfig) -> dict[str, list[Path]]:
        return {}

    def check_settings(self, config: DataConfig, seed: int) -> None:
        """Ask the server for its tasks, and divide them."""
        self.make(config, seed)

    def is_one_file(self, config: DataConfig) -> bool:
        return len(_by_part(listed_tasks(config.source or ""))) == 1

    def parts(
        self, config: DataConfig, files: dict[str, list[Path]], seed: int, omissions: list[str]
    ) -> dict[str, list[ListedTask]]:
        parts = _by_part(listed_tasks(config.source or ""))
        if len(parts) < len(SPLITS):
            return parts
        return self.split_three(config, parts, seed, omissions)

    def asked(self, config: DataConfig, record: ListedTask) -> Asked:
        return Asked("", [], {"metadata": {"split": record.split, "index": record.index}})


TASKS = ServerTasks()


def _by_part(tasks: dict[str, tuple[str, list[ListedTask]]]) -> dict[str, list[ListedTask]]:
    """Return our splits in our order. Without a training split, all tasks are one part."""
    parts: dict[str, list[ListedTask]] = {}
    for split in SPLITS:
        found = [task for ours, entries in tasks.values() if ours == split for task in entries]
        if found:
            parts[split] = found
    if len(parts) > 1 and "train" in parts:
        return parts
    return {"all": [task for _, entries in tasks.values() for task in entries]}


def listed_tasks(url: str) -> dict[str, tuple[str, list[ListedTask]]]:
    """Ask a server for its splits. Return name -> our name for its type, and its tasks.

    Raises AgentR1Error for a server without a list of tasks.
    """
    [name, *_] = _ask(url, "GET", "list_environments", list) or [""]
    place = quote(str(name), safe="")
    tasks = {}
    for split in _ask(url, "GET", f"{place}/splits", list):
        its_name = str(split["name"] if isinstance(split, dict) and "name" in split else split)
        kind = split.get("type") if isinstance(split, dict) else None
        ours = OUR_NAMES.get(str(kind or its_name), "val")
        tasks[its_name] = (ours, _tasks_of(url, place, its_name))
    if not any(entries for _, entries in tasks.values()):
        raise AgentR1Error(f"data.source={url}: the server lists no task", code="no_tasks")
    return tasks


def _tasks_of(url: str, place: str, split: str) -> list[ListedTask]:
    """Return the tasks of one split. A list may be a preview, so the server's number counts."""
    body = {"split": split}
    count = _ask(url, "POST", f"{place}/num_tasks", dict, body).get("num_tasks")
    if not isinstance(count, int) or not 0 <= count <= MAX_TASKS:
        raise AgentR1Error(
            f"data.source={url}: the split {split!r} has {str(count)[:40]} tasks, and 0 to "
            f"{MAX_TASKS} are read",
            code="bad_answer",
        )
    told = _ask(url, "POST", f"{place}/tasks", dict, body).get("tasks")
    specs = told if isinstance(told, list) and len(told) == count else [{}] * count
    return [
        ListedTask(split, index, spec if isinstance(spec, dict) else {"id": spec})
        for index, spec in enumerate(specs)
    ]


def _ask(url: str, method: str, path: str, kind: type, body: Any = None) -> Any:
    """Return a server's answer, which is of this type. Raise AgentR1Error for any other."""
    import httpx

    where = f"{url.rstrip('/')}/{path}"
    try:
        answer = send(method, where, within_s=TIMEOUT_S, max_bytes=MAX_ANSWER, body=body).result()
        value = answer.json()
        if answer.status != 200 or not isinstance(value, kind):
            raise ValueError(f"HTTP {answer.status}, {answer.body[:100]!r}")
    except (httpx.HTTPError, httpx.InvalidURL, FutureTimeoutError, ValueError, TypeError) as error:
        raise AgentR1Error(
            f"data.source={url}: {where} gave {type(error).__name__} ({first_line(error)}), not a "
            "list of tasks; start an OpenEnv server whose environment has the Task API, or write "
            "the questions yourself (data.name=FILE.py:FUNCTION)",
            code="server_unreachable",
        ) from None
    return value
