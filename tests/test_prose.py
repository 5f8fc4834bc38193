"""The checker of the English (.ci/prose.py): it finds old sentences and passes good ones."""

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
        (
            ".md",
            f"`nobody` runs behind a proxy.\n\n```\n{WORD}\n```\n| {LONG} |\n- {AT_MOST}\n- "
            f"{AT_MOST}",
            [],
        ),
        (".md", f"- one\n- {LONG}\n\n| a cell beside it |", [2, 4]),
        (
            ".py",
            f'"""Print a row."""\n\nx = "{WORD}"\n"""{WORD}"""\n\n# beside\n\ny = 1  # {LONG}',
            [4, 4, 6, 8],
        ),
        (
            ".py",
            'def f():\n    """Add `a` to b, e.g. 1.5.\n\n        x = nobody\n\n'
            '    It is a sum.\n    """',
            [],
        ),
        (
            ".py",
            'def f():\n    """Returns a sum."""\n\n\ndef g():\n    """What it costs."""',
            [1, 5],
        ),
        (".py", f'"""{"word " * 16}."""\n', [1]),
        (".sh", f"#!/bin/bash\n# {WORD}\necho nobody", [2, 2]),
    ],
)
def test_findings(kind, text, lines):
    assert [int(found.split(":")[0]) for found in FINDINGS(text, kind)] == lines


def test_the_command_fails_on_an_old_sentence(tmp_path):
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/prose.py", tmp_path / ".ci")
    (tmp_path / "README.md").write_text(f"{WORD}\n")
    done = subprocess.run(
        [sys.executable, tmp_path / ".ci/prose.py"], capture_output=True, text=True
    )
    assert done.returncode == 1 and done.stdout.startswith("README.md:1: ")
