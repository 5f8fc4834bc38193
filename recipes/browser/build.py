"""Compile c/ to trainer.wasm: `python recipes/browser/build.py`.

In: the C files, and the package `ziglang` (a C compiler of 100 MB, version COMPILER). Out:
trainer.wasm and trainer.json, which has the hashes of binary and sources. Both are committed:
readers, tests and commands need no compiler. Next: js/trainer.js calls the module.

`make long PART=browser` compiles again, and must get the same SHA-256. `make test` compares the
committed files with trainer.json, so a change of the C files without a new binary fails there.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
COMPILER = "ziglang==0.17.1"
FLAGS = (
    "-target",
    "wasm32-freestanding",
    "-O3",
    "-msimd128",
    "-mno-relaxed-simd",  # relaxed instructions may round differently on another processor
    "-ffp-contract=off",  # a * b + c keeps both roundings
    "-nostdlib",
    "-fno-builtin",  # no call of memset or exp, which would be an import
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wl,--no-entry",
    "-Wl,--strip-all",  # no names and no folders of this machine
)
SOURCES = ("c/trainer.c", "c/hashes.c")


def compile_to(out: Path, python: str = sys.executable, folder: Path = HERE) -> None:
    """Compile the sources in `folder` to `out`, with the ziglang of the interpreter `python`."""
    command = [python, "-m", "ziglang", "cc", *FLAGS, "-o", str(out), *SOURCES]
    subprocess.run(command, cwd=folder, check=True)


def sha256(*files: Path) -> str:
    """Hash the contents of files, one after the other."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def hashes() -> dict[str, str]:
    """Return the hashes of the binary and of its sources as they lie here."""
    return {
        "binary": sha256(HERE / "trainer.wasm"),
        "sources": sha256(*(HERE / name for name in SOURCES)),
        "compiler": COMPILER,
    }


if __name__ == "__main__":
    compile_to(HERE / "trainer.wasm")
    (HERE / "trainer.json").write_text(json.dumps(hashes(), indent=2) + "\n")
    print((HERE / "trainer.json").read_text(), end="")
