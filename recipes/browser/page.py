"""Write the page that trains an agent: `agent-r1 train-page FILE`.

In: trainer.wasm, js/, the world (world.py). Out: one HTML file that works from the disk without a
network. Next: the reader presses Train.

The file's content policy allows its own scripts by their hashes, WebAssembly, and a worker made
from a text inside the file (`blob:`). It allows no request and no other script.
"""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent
PAGE_JS = HERE.parent / "page" / "js"
PLAYING = ("unpack", "tokenizer", "search", "episode")
"""Scripts of recipes/page that the worker runs."""
LEARNING = ("noise", "trainer", "quick_search", "rollout", "switches", "learn", "session")
"""Scripts of js/ that decide what is learnt."""


def learning_script() -> str:
    """Join the scripts that train: for the page's worker, for Node and for tests."""
    files = [PAGE_JS / f"{name}.js" for name in PLAYING]
    files += [HERE / "js" / f"{name}.js" for name in LEARNING]
    return "".join(file.read_text() for file in files)
