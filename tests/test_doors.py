"""Each place that reads something has a row in docs/safety.md, or reads a file of our own.

The syntax tree is searched for calls that read files, ask servers, start processes, listen or run
code. doors.yaml says what each function reads.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from runs import ROOT

DOORS = yaml.safe_load(Path(__file__).with_name("doors.yaml").read_text())
"""Row of the table -> file -> functions. OURS are no rows: no one else writes what they read."""
OURS = {"our own file", "this machine"}
METHODS = {
    "open", "read_text", "read_bytes", "safe_open", "load_file", "read_index", "ParquetFile",
    "read_table", "from_pretrained", "open_file", "read_file", "read_json", "read_yaml",
    "read_jsonl", "fetch", "exec_module", "import_module", "run_path", "run_module", "stdio_client",
    "streamable_http_client", "start_server", "urlopen", "snapshot_download",
    "create_subprocess_exec", "create_subprocess_shell",
}  # fmt: skip
CALLS = {
    "json.load", "yaml.load", "yaml.parse", "torch.load", "numpy.load", "pickle.load",
    "pickle.loads", "tomllib.load", "agent_r1.ground.bounds.send", "agent_r1.send", "input",
    "eval", "exec", "os.system", "os.popen", "websockets.asyncio.client.connect",
}  # fmt: skip
MODULES = ("subprocess", "urllib.request", "httpx", "httpx2", "requests", "socket", "zipfile",
           "tarfile", "gzip", "shelve", "marshal", "uvicorn", "sys.stdin")  # fmt: skip


def names_of(tree: ast.AST) -> dict[str, str]:
    """Local name -> dotted name, of all imports of a file."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                package = alias.name.partition(".")[0]
                names[alias.asname or package] = alias.name if alias.asname else package
        elif isinstance(node, ast.ImportFrom):
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return names


def dotted(node: ast.AST, names: dict[str, str]) -> str:
    """`np.load` as `numpy.load`; attributes of what was not imported begin with `?`."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    name = node.id if isinstance(node, ast.Name) else "?"
    parts.append(names.get(name, "?" if parts else name))
    return ".".join(reversed(parts))


def reads(node: ast.AST, names: dict[str, str]) -> bool:
    if isinstance(node, ast.Attribute):  # `for line in sys.stdin`
        return dotted(node, names) == "sys.stdin"
    if not isinstance(node, ast.Call):
        return False
    name = dotted(node.func, names)
    if name.rpartition(".")[2] in METHODS or name in CALLS:
        return True
    return any(name.startswith(f"{module}.") for module in MODULES)


def readers(text: str) -> set[str]:
    """Dotted names of the functions of a file in which something is read."""
    tree = ast.parse(text)
    names = names_of(tree)
    found = set()

    def visit(node: ast.AST, function: str) -> None:
        for child in ast.iter_child_nodes(node):
            place = function
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                place = f"{function}.{child.name}".lstrip(".")
            if reads(child, names):
                found.add(place or "module")
            visit(child, place)

    visit(tree, "")
    return found


def places() -> Iterator[tuple[str, str]]:
    for folder in ("src/agent_r1", "recipes"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            inside = file.relative_to(ROOT)
            if not {"tests", "template"} & {*inside.parts}:
                for function in sorted(readers(file.read_text())):
                    yield str(inside), function


def declared() -> list[tuple[str, str]]:
    return [
        (file, function)
        for files in DOORS.values()
        for file, functions in files.items()
        for function in functions
    ]


def test_each_reader_has_a_row():
    found, listed = set(places()), declared()
    assert sorted(found - set(listed)) == [], "a new reader: name its row in tests/doors.yaml"
    assert sorted(set(listed) - found) == [], "no longer a reader: delete it from tests/doors.yaml"
    assert len(listed) == len(set(listed)) > 150


ROW = re.compile(r"^\| \*\*(.+?)\*\* \|((?:[^|\n]*\|){6})$", re.MULTILINE)


def test_each_row_says_who_names_it_and_has_a_test():
    """A row's last cell links to test files, which are there."""
    page = (ROOT / "docs/safety.md").read_text()
    rows = {name: cells.split("|")[:6] for name, cells in ROW.findall(page)}
    assert set(DOORS) - OURS <= set(rows), "a row is missing in docs/safety.md"
    for name, cells in rows.items():
        assert all(cell.strip() for cell in cells), name
        assert re.match(" (data|code)\\b", cells[0]), name
        files = re.findall(r"\]\(\.\./([\w/.]+\.py)\)", cells[5])
        assert files and all((ROOT / file).is_file() for file in files), name


@pytest.mark.parametrize(
    "line",
    [
        "open(path)",
        "path.read_text()",
        "json.load(file)",
        "np.load(path)",
        "start(['git'])",
        "httpx.get(url)",
        "urlopen(url)",
        "safe_open(path, 'pt')",
        "send('GET', url, within_s=1, max_bytes=1)",
        "[line for line in sys.stdin]",
        "yaml.load(text, loader)",
        "torch.load(path)",
        "AutoModel.from_pretrained(path)",
        "spec.loader.exec_module(module)",
    ],
)
def test_a_planted_reader_is_found(line):
    imports = (
        "import json, httpx, sys, torch, yaml\nimport numpy as np\nfrom urllib.request import "
        "urlopen\nfrom subprocess import run as start\nfrom agent_r1 import send\n"
    )
    text = f"{imports}class A:\n    def f(self):\n        return {line}\n"
    assert readers(text) == {"A.f"}
    assert readers(text.replace(line, "requests.add(path.name) + loop.run(task)")) == set()
