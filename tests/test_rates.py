"""Names stay plain: how many participles and empty shortenings there are (.ci/names.py)."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST = {"variables": 15.0, "functions": 15.0}
"""Per 10,000 lines, and per 1,000 functions: the rates of src. Parameters and fields may be public
names, which stay."""


@pytest.fixture(scope="module")
def names():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / ".ci"))
        patch.delitem(sys.modules, "names", raising=False)
        spec = importlib.util.spec_from_file_location("ci_names", ROOT / ".ci" / "names.py")
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


@pytest.mark.parametrize("folder", ["src", "recipes", "lab"])
def test_few_names_are_participles(names, folder):
    poor, rates = names.count(ROOT / folder, ROOT)
    for kind, most in MOST.items():
        assert rates[kind] <= most, "\n".join(poor[kind])


def test_participles_and_shortenings_are_found(names, tmp_path):
    lines = [
        "def _tried(asked):",
        "    kept_BT, tmp = asked",
        "    for seen in kept_BT:",
        "        merged_config, is_closed = seen, f'{(res := tmp)}'",
        "    return merged_config, is_closed, res",
    ]
    (tmp_path / "poor.py").write_text("\n".join(lines) + "\n")
    poor, rates = names.count(tmp_path, tmp_path)
    found = {kind: [place.split()[-1] for place in places] for kind, places in poor.items()}
    assert sorted(found["variables"]) == ["kept_BT", "res", "seen", "tmp"]
    assert found["signatures"] == ["asked"]
    assert found["functions"] == ["_tried()"]
    assert rates == {"variables": 8_000, "signatures": 2_000, "functions": 1_000}


# ------------------------------------------------------------------------------ where lines break

LEAST = 25
"""Columns of the last line of a docstring's first paragraph."""
UNFINISHED = {
    "src/agent_r1/cluster/plan.py": 2,
    "src/agent_r1/cluster/settings.py": 5,
    "src/agent_r1/config/settings.py": 12,
    "src/agent_r1/training/settings.py": 3,
    "recipes/code/settings.py": 1,
    "recipes/credit/settings.py": 2,
    "recipes/laptop/settings.py": 3,
    "recipes/robustness/settings.py": 2,
}
"""Texts that pages print, so they are reworded with the pages."""


def texts_of(tree):
    """Yield docstrings, and the strings below a field or a constant."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            value = getattr(statement, "value", None)
            bare = isinstance(statement, ast.Expr) and isinstance(value, ast.Constant)
            if bare and isinstance(value.value, str):
                yield statement.lineno, value.value


def short_ends(text: str) -> list[int]:
    """Return the lines of docstrings whose first paragraph ends in a few letters."""
    found = []
    for line, docstring in texts_of(ast.parse(text)):
        rows = docstring.split("\n\n")[0].rstrip().splitlines()
        if len(rows) > 1 and len(rows[-1].strip()) < LEAST:
            found.append(line)
    return found


@pytest.mark.parametrize("folder", ["src", "recipes", "lab"])
def test_the_first_paragraph_of_a_docstring_fills_its_lines(names, folder):
    for file in names.python_files(ROOT / folder):
        name = str(file.relative_to(ROOT))
        lines = short_ends(file.read_text())
        assert len(lines) <= UNFINISHED.get(name, 0), f"{name}: {lines}"


def test_short_ends_are_found():
    long = (
        "Return a value that was read from a file, and None where the file does not have\n    it."
    )
    assert short_ends(f'def f():\n    """{long}"""\n') == [2]
    assert short_ends(f'x = 1\n"""{long}\n\nMore.\n"""\n') == [2]
    assert short_ends('def f():\n    """Return it.\n\n    More.\n    """\n') == []


@pytest.mark.parametrize("folder", ["src", "recipes", "lab"])
def test_lists_have_no_groups(names, folder):
    for file in names.python_files(ROOT / folder):
        assert not re.search(r"^ +\*\($", file.read_text(), re.MULTILINE), file
