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

from agent_r1.chat import renderer
from agent_r1.data import json_files
from agent_r1.ground import bounds
from agent_r1.search import remote
from agent_r1.search import service as search
from agent_r1_recipes.api import client
from agent_r1_recipes.browser import record
from agent_r1_recipes.code import sandbox
from agent_r1_recipes.envcheck import command as envcheck
from agent_r1_recipes.gateway import server as gateway
from agent_r1_recipes.gateway import wire
from agent_r1_recipes.harbor import env as harbor
from agent_r1_recipes.harbor import tasks
from agent_r1_recipes.judge import service as judge
from agent_r1_recipes.mcp import client as mcp
from agent_r1_recipes.openenv import environment as openenv
from agent_r1_recipes.openenv import source as tasks_of_server
from agent_r1_recipes.pictures import files

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


def megabytes(count: int) -> str:
    return f"{count >> 20} MB"


def bounds_of_rows() -> dict[str, list[str]]:
    """Row -> bounds as the code has them."""
    levels = f"{bounds.MAX_JSON_DEPTH} levels"
    a_file = megabytes(bounds.MAX_FILE)
    headers_s, body_s = gateway.HEADERS_S, gateway.BODY_S
    return {
        "questions, corpora, episodes": [
            f"{megabytes(json_files.MAX_RECORD)} a line",
            f"gzip to {megabytes(json_files.ALWAYS)}, or {json_files.MAX_RATIO} times its size",
        ],
        "presets and settings": [a_file, f"{levels}, {bounds.MAX_ALIASES} aliases"],
        "config.json and weights": [f"JSON {a_file}", levels],
        "chat template": [
            f"memory {renderer.MEMORY_BYTES >> 30} GB, answer {megabytes(renderer.TEXT_BYTES)}",
            f"{renderer.RENDER_S} s of CPU",
        ],
        "data folder and index": [f"manifest {a_file}", levels],
        "run folder, card, rollouts": [f"{a_file} a JSON file", levels],
        "record of the board": [f"{record.LARGEST_FILE >> 10} kB", f"{record.CPU_SECONDS} CPU s"],
        "model server": [f"{megabytes(client.MAX_BYTES)} from an API"],
        "judge, retriever, SandboxFusion": [
            f"{judge.MAX_ANSWER_BYTES >> 10} KB judge and reward model",
            f"{megabytes(remote.MAX_RESPONSE_BYTES)} retriever",
            f"{megabytes(16 * sandbox.MAX_OUTPUT)} SandboxFusion",
            levels,
            f"{judge.SCORE_TIMEOUT_S:.0f} judge, {search.TIMEOUT_S:.0f} retriever",
        ],
        "MCP server": [
            f"{megabytes(mcp.MAX_MESSAGE_BYTES)} over HTTP",
            f"{mcp.OPEN_S:.0f} to start",
        ],
        "OpenEnv server": [
            f"{megabytes(openenv.MAX_MESSAGE)} a message",
            f"{megabytes(tasks_of_server.MAX_ANSWER)} a list of tasks",
            f"{tasks_of_server.TIMEOUT_S:.0f} a list of tasks",
        ],
        "request of a client": [
            f"{gateway.MAX_BODY // 10**6} MB and {wire.MOST_VALUES:,} values gateway and `serve`",
            f"{megabytes(search.MAX_BODY)} search; {gateway.MAX_CONNECTIONS:,} connections",
            f"{headers_s:.0f} headers, {body_s:.0f} body (gateway)",
            f"{search.HEADERS_S:.0f}, {search.TIMEOUT_S:.0f} (search)",
        ],
        "program of a model": [
            f"{megabytes(sandbox.MEMORY)} memory, {megabytes(sandbox.DISK)} files, "
            f"{sandbox.MAX_OUTPUT >> 10} KB output"
        ],
        "task folder": [f"{megabytes(tasks.MAX_TEXT)} a text", f"{harbor.COMMAND_S:.0f} a command"],
        "environment class": [megabytes(envcheck.MAX_OUTPUT), f"{envcheck.SETUP_S:.0f} to start"],
        "picture": [
            f"{megabytes(files.MAX_BYTES)}, {files.MAX_PIXELS // 10**6} million pixels, "
            f"{files.MAX_SCANS} scans"
        ],
    }


def test_bounds_of_the_table_are_those_of_the_code():
    page = (ROOT / "docs/safety.md").read_text()
    rows = dict(ROW.findall(page))
    for name, texts in bounds_of_rows().items():
        for text in texts:
            assert text in rows[name], f"{name}: the code says {text}"


def test_security_md_counts_what_safety_md_promises():
    """A broken bound of the table is a fault there, and both pages link to each other."""
    security = (ROOT / "SECURITY.md").read_text()
    assert (
        "docs/safety.md#what-comes-in" in security
        and "SECURITY.md" in (ROOT / "docs/safety.md").read_text()
    )
    counted = re.search(r"\*\*What counts\.\*\*.*?\n\n(.*?)\n\n", security, re.DOTALL)[1]
    for words in ("sandbox", "control token", "key or a password", "runs code when it is opened",
                  "writes outside", "terminal", "other than its setting"):  # fmt: skip
        assert words in counted, words


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
