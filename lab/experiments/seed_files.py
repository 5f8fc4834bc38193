"""Read and write docs/lab's files of figures by seed, to which several processes may add."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from agent_r1 import write_whole


def read_seeds(file: Path) -> dict[str, Any]:
    """Return what a file of figures has, by seed."""
    return json.loads(file.read_text())["seeds"] if file.is_file() else {}


def keep_seed(
    file: Path, about: dict[str, Any], number: int | str, figures: dict[str, Any]
) -> None:
    """Add a seed's figures to a file. It is read again: another process may have added one."""
    content = about | {"seeds": read_seeds(file) | {str(number): figures}}
    write_whole(file, json.dumps(content, indent=1, sort_keys=True) + "\n")


def run_arms(
    description: str,
    arms: Iterable[str],
    measure: Callable[[str, int], dict[str, Any]],
    file: Path,
    table: Callable[[dict[str, Any]], str],
) -> None:
    """Measure an arm's seeds, keep them, and print the table of all arms.

    The command line names arm and seeds. The file has arm -> seed -> what `measure` returns.
    """
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("arm", nargs="?", choices=list(arms))
    parser.add_argument("seeds", type=int, nargs="*")
    parser.add_argument("--table", action="store_true", help="only print the table")
    arguments = parser.parse_args()
    for seed in () if arguments.table else arguments.seeds:
        figures = measure(arguments.arm, seed)
        seeds_of_arm = read_seeds(file).get(arguments.arm, {})
        keep_seed(file, {}, arguments.arm, seeds_of_arm | {str(seed): figures})
        print(arguments.arm, seed, json.dumps(figures), flush=True)
    print(table(read_seeds(file)))
