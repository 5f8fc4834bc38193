"""Run the parts of `make long` and record results.

`python -m lab.rehearsals [--table] [PART ...]`

A part is a module of this folder with a function `run() -> dict`. It returns figures (name to
number, text or something nested; the table shows the flat ones) and raises if something is wrong.
The first line of the module's docstring says what the part shows. A part prints its own progress,
without paths or hosts. In: names of parts (default: all). Out: `docs/lab/long/PART.json`, and the
table of `docs/lab/long.md` from these files; exit code 1 if a part failed.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import pkgutil
import platform
import re
import subprocess
import sys
import time
import traceback
from importlib import metadata
from pathlib import Path
from typing import Any

from agent_r1.ground.files import write_whole
from agent_r1.ground.machine import describe_machine

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "docs" / "lab" / "long", ROOT / "docs" / "lab" / "long.md"
BEGIN, END = "<!-- make long: begin -->", "<!-- make long: end -->"
PACKAGES = ("torch", "transformers", "verl", "vllm")


def parts() -> list[str]:
    return sorted(
        m.name
        for m in pkgutil.iter_modules([str(Path(__file__).parent)])
        if not m.name.startswith("_")
    )


def commit() -> str:
    """Return the commit, with a plus if tracked files other than the results differ."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", ROOT, *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    changes = git("status", "--porcelain", "--untracked-files=no", ".", ":!docs/lab")
    return git("rev-parse", "--short", "HEAD") + ("+" if changes else "")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed PACKAGES."""
    version_of = {
        d.name.lower(): d.version for d in metadata.distributions(path=sys.path) if d.name
    }
    return {"python": platform.python_version()} | {
        name: version_of[name] for name in PACKAGES if name in version_of
    }


def run_part(name: str) -> dict[str, Any]:
    """Run one part. A failure becomes a result: its kind and first line, without folders."""
    began, figures, error = time.perf_counter(), {}, None
    where = {
        "commit": commit(),
        "date": str(datetime.date.today()),
        "versions": versions(),
        "machine": describe_machine(),
    }
    shows = ""
    try:
        module = importlib.import_module(f"lab.rehearsals.{name}")
        shows = (module.__doc__ or "").partition("\n")[0]
        figures = module.run()
    except (Exception, SystemExit) as problem:
        traceback.print_exc()
        first = next(iter(str(problem).splitlines()), "")
        error = f"{type(problem).__name__}: " + re.sub(r"/\S*/", "", first)[:300]
    seconds = round(time.perf_counter() - began, 1)
    return {
        "part": name,
        "shows": shows,
        "passed": error is None,
        "error": error,
        "seconds": seconds,
        **where,
        "figures": figures,
    }


def table(results: list[dict[str, Any]]) -> str:
    """Format the results in Markdown, one line per part."""
    lines = [
        "| part | what it shows | result | seconds | commit, date | machine |",
        "|---|---|---|---|---|---|",
    ]
    for r in results:
        flat = [f"{k} {v}" for k, v in r["figures"].items() if not isinstance(v, dict | list)]
        summary = "; ".join(
            ["passed" if r["passed"] else f"**failed**: {r['error']}", *flat]
        ).replace("|", "\\|")
        link = f"[{r['part']}](long/{r['part']}.json)"
        lines.append(
            f"| {link} | {r['shows']} | {summary} | {r['seconds']:.0f} | "
            f"{r['commit']}, {r['date']} | {r['machine']} |"
        )
    return "\n".join(lines)


def page(text: str) -> str:
    """Put the table of the files into `text` of docs/lab/long.md."""
    rows = table([json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))])
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{rows}\n{END}{rest.split(END)[1]}"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lab.rehearsals", description="checks that take minutes to hours"
    )
    parser.add_argument(
        "--table",
        action="store_true",
        help="run nothing; only make the table of docs/lab/long.md again",
    )
    parser.add_argument("part", nargs="*", help=f"which (all): {', '.join(parts())}")
    arguments, failures = parser.parse_args(argv), []
    if strangers := set(arguments.part) - set(parts()):
        parser.error(f"no part {', '.join(sorted(strangers))}; there are {', '.join(parts())}")
    for name in [] if arguments.table else arguments.part or parts():
        print(f"{name} ...", flush=True)
        result = run_part(name)
        RESULTS.mkdir(exist_ok=True)
        write_whole(RESULTS / f"{name}.json", json.dumps(result, indent=1) + "\n")
        write_whole(PAGE, page(PAGE.read_text()))
        print(
            f"{name}: {'passed' if result['passed'] else result['error']}, {result['seconds']:.0f} "
            "s",
            flush=True,
        )
        failures += [] if result["passed"] else [name]
    if arguments.table:
        write_whole(PAGE, page(PAGE.read_text()))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
