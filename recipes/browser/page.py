"""Write the page that trains an agent: `agent-r1 train-page FILE`.

In: trainer.wasm, js/, the world (world.py). Out: one HTML file that works from the disk without a
network. Next: the reader presses Train.

The file's content policy allows its own scripts by their hashes, WebAssembly, and a worker made
from a text inside the file (`blob:`). It allows no request and no other script.
"""

from __future__ import annotations

import base64
import html
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from agent_r1 import command, option
from agent_r1_recipes.page.microscope import script, write_html

HERE = Path(__file__).parent
PAGE_JS = HERE.parent / "page" / "js"
PLAYING = ("unpack", "tokenizer", "search", "episode")
"""Scripts of recipes/page that the worker runs."""
LEARNING = (
    "noise",
    "trainer",
    "quick_search",
    "rollout",
    "switches",
    "crew",
    "learn",
    "cold_start",
    "session",
)
"""Scripts of js/ that decide what is learnt."""
POLICY = " 'wasm-unsafe-eval'; worker-src blob:"
"""The page compiles WebAssembly, and starts a worker from its own text."""


def learning_script() -> str:
    """Join the scripts that train: for the page's worker, for Node and for tests."""
    files = [PAGE_JS / f"{name}.js" for name in PLAYING]
    files += [HERE / "js" / f"{name}.js" for name in LEARNING]
    return "".join(file.read_text() for file in files)


def own_script(name: str) -> str:
    """Read a script of js/."""
    return (HERE / "js" / f"{name}.js").read_text()


def recorded() -> dict[str, Any]:
    """Return what the page draws next to its own runs.

    From measured.json the healthy runs by seed: rewards, right answers by kind, final hash. From
    staircase.json the greedy scores of the canonical run of `discover`.
    """
    file = HERE / "measured.json"
    runs = json.loads(file.read_text()) if file.is_file() else {}
    healthy = {}
    for name, run in runs.items():
        switch, _, seed = name.partition("/")
        if switch == "healthy":  # and not `healthy@random`
            healthy[seed] = {key: run[key] for key in ("reward", "hops", "hash")}
    return {"healthy": healthy, "validation": json.loads((HERE / "staircase.json").read_text())}


def table_html() -> str:
    """Return README.md's table of the switches as HTML."""
    text = (HERE / "README.md").read_text()
    lines = text.partition("<!-- table -->")[2].partition("<!-- end of table -->")[0].split("\n")
    rows = [line.strip("|").split("|") for line in lines if line.startswith("| ")]
    rows_of_table = []
    for number, cells in enumerate(rows):
        tag = "td" if number else "th"
        inside = "".join(f"<{tag}>{html.escape(cell.strip())}</{tag}>" for cell in cells)
        rows_of_table.append(f"<tr>{inside}</tr>")
    return "\n".join(rows_of_table)


def write_page(file: Path, world_bytes: bytes, plays: bytes) -> int:
    """Write the page with a packed world and packed demonstrations. Return its length."""
    module = (HERE / "trainer.wasm").read_bytes()
    blocks = {
        "DATA": base64.b64encode(world_bytes).decode(),
        "PLAYS": base64.b64encode(plays).decode(),
        "MODULE": base64.b64encode(module).decode(),
        "WORKER": learning_script() + own_script("worker"),
        "RECORDED": json.dumps(recorded()),
        "TABLE": table_html(),
    }
    program = script("quantities", "microscope") + own_script("train_page")
    facts = {"KILOBYTES": round(len(module) / 1000)}
    return write_html(file, HERE / "train.html", program, facts, blocks, POLICY)


@command(
    "train-page", "write one HTML page in which the reader trains an agent",
    ["train.html"],
    option("file", type=Path, metavar="PAGE", help="the page to write"),
)  # fmt: skip
def write_train_page(a: Namespace) -> None:
    """Write the page."""
    from agent_r1_recipes.browser import world  # PyTorch comes with it

    plays = world.pack_plays(world.describe_plays())
    length = write_page(a.file, world.pack(world.header()), plays)
    print(f"train-page: {length / 1e6:.2f} MB, in {a.file}; open it in a browser and press Train")
