"""The plan of the house, held against the code: four storeys, arrows only down, no circles, no file that outgrew its name.

Imports are read with `ast`, also those inside functions and those for type checkers: an import there hides a circle, it
does not open it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "agent_r1"

STOREYS = {
    "ground": (
        "types",
        "config",
        "settings",
        "renamed",
        "choices",
        "errors",
        "files",
        "bounds",
        "ui",
        "device",
        "sizes",
        "hub",
        "packages",
        "own",
        "tables",
    ),
    "task": ("data", "search", "tool", "env", "reward", "worlds", "workspace"),
    "learner": ("rollout", "training"),
    "around": ("verl_engine", "inference", "inspect", "conditions"),
    "shell": ("stages", "doctor", "gpu_check", "plan", "plan_local", "command_line", "cli"),
}
"""From the ground up. A room may import from its own storey and from those below."""
MOST_LINES = 400


@dataclass(frozen=True)
class Arrow:
    """`source` imports `target` (both dotted, below agent_r1) in that line."""

    source: str
    target: str
    line: int


def modules(package: Path) -> dict[str, Path]:
    """Dotted names below the package, without `__init__`; the package's own `__init__` and `__main__` are left out."""
    names = {path: path.relative_to(package).with_suffix("").parts for path in package.rglob("*.py")}
    return {
        ".".join(p[:-1] if p[-1] == "__init__" else p): path
        for path, p in names.items()
        if p not in (("__init__",), ("__main__",))
    }


def arrows(package: Path) -> Iterator[Arrow]:
    known = modules(package)
    for source, path in known.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert not node.level, f"{path}:{node.lineno}: write imports in full, `from agent_r1...`"
                wanted = [(f"{node.module}.{alias.name}", node.module) for alias in node.names]
            elif isinstance(node, ast.Import):
                wanted = [(alias.name, alias.name) for alias in node.names]
            else:
                continue
            for full, module in wanted:
                found = next(
                    (n.removeprefix("agent_r1.") for n in (full, module) if n.removeprefix("agent_r1.") in known), None
                )
                if found and full.startswith("agent_r1.") and found != source:
                    yield Arrow(source, found, node.lineno)


def storey(module: str) -> int:
    room = module.split(".")[0]
    return next(i for i, rooms in enumerate(STOREYS.values()) if room in rooms)


def upward(package: Path) -> list[str]:
    names = list(STOREYS)
    return [
        f"{a.source.replace('.', '/')}.py:{a.line}: {names[storey(a.source)]} imports {a.target}, "
        f"which lies above ({names[storey(a.target)]})"
        for a in arrows(package)
        if storey(a.target) > storey(a.source)
    ]


def circle(package: Path) -> list[str]:
    """The modules of one import circle, or nothing."""
    sorter = TopologicalSorter()
    for arrow in arrows(package):
        sorter.add(arrow.source, arrow.target)
    try:
        sorter.prepare()
    except CycleError as error:
        return error.args[1]
    return []


DOORS = {
    "workspace": "names what is on disk by everything that it was made of",
    "training.cold_start": "teaches with the questions and tools of the run",
    "training.other_names": "teaches with the questions and tools of the run",
    "training.loop": "the algorithm box, where all sections meet",
    "training.run": "opens a run folder, and says what changed since",
    "verl_engine.agent_loop": "opens the run again inside a worker",
    "verl_engine.checkpoints": "a checkpoint carries its run's fingerprint",
    "verl_engine.compose": "translates every section into verl's words",
    "verl_engine.launch": "opens the run for verl",
    "verl_engine.trainer": "opens the run again inside a worker",
    "conditions": "opens the index and tools of an evaluation",
    "inference.agent": "opens whatever was trained",
    "inference.chat": "opens a second agent beside the first",
    "inference.compare": "opens two agents one after the other",
    "inference.export": "writes the settings beside the weights",
    "inference.provenance": "says what a figure was made with",
}
"""Below the shell, only who opens a room takes the whole configuration; everybody else takes one section or an object."""


def test_only_the_doors_take_the_whole_configuration():
    shell = STOREYS["shell"]
    takers = {a.source for a in arrows(PACKAGE) if a.target == "config" and a.source.split(".")[0] not in shell}
    assert takers == set(DOORS)


def test_every_room_has_a_storey():
    rooms = {name.split(".")[0] for name in modules(PACKAGE)}
    assert rooms == {room for rooms in STOREYS.values() for room in rooms}


def test_no_arrow_runs_up():
    assert not (found := upward(PACKAGE)), "a room imports from its own storey and below:\n" + "\n".join(found)


def test_no_circle():
    assert not (found := circle(PACKAGE)), "these import one another: " + " -> ".join(found)


def test_no_file_outgrows_its_name():
    lines = {str(p.relative_to(PACKAGE)): len(p.read_text().splitlines()) for p in PACKAGE.rglob("*.py")}
    assert not {name: n for name, n in lines.items() if n > MOST_LINES}


@pytest.mark.parametrize("world", sorted(path.parent.name for path in PACKAGE.glob("worlds/*/__init__.py")))
def test_a_world_is_one_folder_that_nothing_else_names(world):
    """But for presets, and the list of the worlds."""
    named = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.*")
        if path.suffix in (".py", ".yaml", ".j2") and re.search(rf"\b{world}\b", path.read_text(), re.IGNORECASE)
    }
    assert f"presets/{world}.yaml" in named
    assert {name for name in named if not name.startswith(("presets/", f"worlds/{world}/"))} == {"worlds/__init__.py"}


def test_the_picture_shows_what_is_there():
    """The tree of docs/architecture.md names every room and file of the package's first level, and nothing else."""
    text = (PACKAGE.parents[1] / "docs/architecture.md").read_text()
    tree = re.search(r"^src/agent_r1/\n(?P<tree>(?:  .*\n)+)", text, re.MULTILINE)["tree"]
    shown = set(re.findall(r"(?<![\w./])(?:\w+\.py|\w+/)(?=[\s,]|$)", tree))
    there = {p.name + "/" * p.is_dir() for p in PACKAGE.iterdir() if p.is_dir() or p.suffix == ".py"}
    there -= {"__init__.py", "__main__.py", "__pycache__/"}
    assert shown == there


@pytest.mark.parametrize("inside", ["", "def later():\n    "], ids=["at the top", "in a function"])
def test_what_it_would_say(tmp_path, inside):
    """An arrow up and a circle are found, with file and line, also inside a function."""
    for name, text in {
        "types.py": "import os\n" + inside + "from agent_r1.training.loop import train\n",
        "training/__init__.py": "",
        "training/loop.py": "from agent_r1 import types\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    line = 3 if inside else 2
    assert upward(tmp_path) == [f"types.py:{line}: ground imports training.loop, which lies above (learner)"]
    assert set(circle(tmp_path)) == {"types", "training.loop"}
