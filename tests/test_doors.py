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
    "open", "fdopen", "read_text", "read_bytes", "safe_open", "load_file", "read_index",
    "ParquetFile", "read_table", "read_parquet", "read_csv", "from_pretrained", "from_file",
    "open_file", "read_file", "read_json", "read_yaml", "read_jsonl", "fetch", "exec_module",
    "import_module", "run_module", "stdio_client", "streamable_http_client",
    "sse_client", "start_server", "start_unix_server", "create_server", "open_connection",
    "create_connection", "urlopen", "urlretrieve", "snapshot_download", "hf_hub_download",
    "load_dataset", "create_subprocess_exec", "create_subprocess_shell", "subprocess_exec",
    "subprocess_shell", "recv", "recv_bytes", "communicate", "readline", "readlines", "readexactly",
    "copyfile", "copyfileobj", "unpack_archive", "safe_load", "safe_load_all", "full_load",
    "unsafe_load", "load_all", "load_state_dict_from_url", "fromfile", "memmap", "open_memmap",
    "loadtxt", "genfromtxt", "CDLL", "LoadLibrary", "stdout",
}  # fmt: skip
"""Last names of functions and methods, wherever they come from."""
CALLS = {
    "json.load", "yaml.load", "yaml.parse", "torch.load", "torch.jit.load", "numpy.load",
    "pickle.load", "pickle.loads", "tomllib.load", "agent_r1.ground.bounds.send", "agent_r1.send",
    "input", "eval", "exec", "os.system", "os.read", "shutil.copy", "shutil.copy2",
    "shutil.copytree", "__import__", "sys.stdin", "zlib.decompress", "zlib.decompressobj",
}  # fmt: skip
"""Whole names."""
MODULES = (
    "subprocess", "urllib.request", "urllib3", "http.client", "http.server", "httpx", "httpx2",
    "requests", "aiohttp", "websocket", "websockets", "socket", "socketserver", "ftplib", "ssl",
    "zipfile", "tarfile", "gzip", "bz2", "lzma", "shelve", "marshal", "dbm", "sqlite3",
    "mmap", "pty", "runpy", "multiprocessing", "uvicorn", "pandas", "csv", "plistlib",
    "configparser", "fileinput", "linecache", "xml", "joblib", "cloudpickle", "dill", "orjson",
)  # fmt: skip
"""Modules of which any call reads."""


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
    """Return whether a node reads, or hands a function that reads to another one."""
    if isinstance(node, ast.Call):
        return _is_reader(dotted(node.func, names), called=True)
    if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load):
        return _is_reader(dotted(node, names), called=False)
    return False


def _is_reader(name: str, called: bool) -> bool:
    """`called`: otherwise a plain name such as `input` may be a variable."""
    if called and any(name.startswith(f"{module}.") for module in MODULES):
        return True
    if not called and "." not in name:
        return name == "open"
    if name == "sys.stdout":
        return False
    return name in CALLS or name.rpartition(".")[2] in METHODS


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


READERS = [
    "open(path)",
    "path.read_text()",
    "os.read(descriptor, 1)",
    "os.fdopen(descriptor)",
    "mmap.mmap(descriptor, 0)",
    "linecache.getlines(path)",
    "shutil.copytree(path, target)",
    "json.load(file)",
    "json.load(urlopen(url))",
    "yaml.load(text, loader)",
    "yaml.safe_load(file)",
    "list(yaml.safe_load_all(file))",
    "configparser.ConfigParser()",
    "ElementTree.parse(path)",
    "csv.reader(file)",
    "np.load(path)",
    "np.fromfile(path)",
    "np.memmap(path)",
    "pandas.read_csv(path)",
    "torch.load(path)",
    "safe_open(path, 'pt')",
    "AutoModel.from_pretrained(path)",
    "Tokenizer.from_file(path)",
    "load_dataset('json')",
    "tarfile.open(path)",
    "zlib.decompress(data)",
    "sqlite3.connect(path)",
    "pickle.loads(data)",
    "start(['git'])",
    "process.stdout.read()",
    "[line for line in process.stdout]",
    "process.communicate()",
    "loop.subprocess_exec(protocol, 'git')",
    "[line for line in sys.stdin]",
    "input()",
    "httpx.get(url)",
    "urlopen(url)",
    "requests.get(url)",
    "HTTPConnection(host)",
    "asyncio.open_connection(host, 1)",
    "asyncio.start_unix_server(handle)",
    "loop.create_server(protocol)",
    "connect_websocket(url)",
    "connection.recv(1)",
    "reader.readline()",
    "send('GET', url, within_s=1, max_bytes=1)",
    "spec.loader.exec_module(module)",
    "__import__(name)",
    "eval(text)",
    "ctypes.CDLL(path)",
    # A function that is handed on reads as one that is called.
    "map(open, paths)",
    "asyncio.to_thread(path.read_text)",
    "list(map(Path.read_bytes, paths))",
    "functools.partial(json.load, file)",
    "pool.submit(np.load, path)",
]


@pytest.mark.parametrize("line", READERS)
def test_a_planted_reader_is_found(line):
    imports = (
        "import asyncio, configparser, csv, ctypes, functools, json, httpx, linecache, mmap, os, "
        "pandas, pickle, requests, shutil, sqlite3, sys, tarfile, torch, yaml, zlib\n"
        "import numpy as np\n"
        "from http.client import HTTPConnection\n"
        "from pathlib import Path\n"
        "from urllib.request import urlopen\n"
        "from subprocess import run as start\n"
        "from websockets.asyncio.client import connect as connect_websocket\n"
        "from xml.etree import ElementTree\n"
        "from agent_r1 import send\n"
    )
    text = f"{imports}class A:\n    def f(self):\n        return {line}\n"
    assert readers(text) == {"A.f"}
    harmless = "waiting.add(path.name) + loop.run(task) + input + self.run_path + sys.stdout"
    assert readers(text.replace(line, harmless)) == set()
    assert readers(text.replace(line, "json.loads(text) + zlib.crc32(text)")) == set()
