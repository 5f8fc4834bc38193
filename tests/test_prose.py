"""The checker of the English (.ci/prose.py): it finds old sentences, passes good ones, and its allowance only falls."""

import runpy
import shutil
import subprocess
import sys

import pytest
from runs import ROOT

FINDINGS = runpy.run_path(str(ROOT / ".ci/prose.py"))["findings"]
WORD, LONG = "Nobody mends it.", "a " * 25 + "sentence."
AT_MOST = "A " + "b " * 23 + "c."


@pytest.mark.parametrize(
    ("kind", "text", "lines"),
    [
        (".md", f"# Title\n\nThe rows are\nheld against the table. {AT_MOST} {AT_MOST}", [3]),
        (".md", f"`nobody` runs behind a proxy.\n\n```\n{WORD}\n```\n| {LONG} |\n- {AT_MOST}\n- {AT_MOST}", []),
        (".md", f"- one\n- {LONG}\n\n| a cell beside it |", [2, 4]),
        (".py", f'"""Print a row."""\n\nx = "{WORD}"\n"""{WORD}"""\n\n# beside\n\ny = 1  # {LONG}', [4, 4, 6, 8]),
        (".py", 'def f():\n    """Add `a` to b, e.g. 1.5.\n\n        x = nobody\n\n    It is a sum.\n    """', []),
        (".py", 'def f():\n    """Returns a sum."""\n\n\ndef g():\n    """What it costs."""', [1, 5]),
        (".py", f'"""{"word " * 16}."""\n', [1]),
        (".sh", f"#!/bin/bash\n# {WORD}\necho nobody", [2, 2]),
    ],
)
def test_findings(kind, text, lines):
    assert [int(found.split(":")[0]) for found in FINDINGS(text, kind)] == lines


def test_the_allowance_only_falls(tmp_path):
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/prose.py", tmp_path / ".ci")
    todo, page = tmp_path / ".ci/prose-todo.txt", tmp_path / "README.md"

    def run(*given: str) -> int:
        return subprocess.run([sys.executable, tmp_path / ".ci/prose.py", *given], capture_output=True).returncode

    todo.write_text("2 README.md\n")
    page.write_text(f"{WORD} {LONG}\n")
    assert run() == 1 and run("--write") == 1 and todo.read_text() == "2 README.md\n"  # three findings
    page.write_text(f"{LONG}\n")
    assert run() == 0 and run("README.md") == 1 and run("--write") == 0 and todo.read_text() == "1 README.md\n"
    page.write_text("The page is clean.\n")
    assert run("--write") == 0 and todo.read_text() == ""
