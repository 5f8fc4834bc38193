"""`make long`: what a part leaves behind, and the page that is made of it. The parts themselves run in `make long`."""

from __future__ import annotations

import ast
import json
import sys
from types import ModuleType

import pytest
from benchmarks.long import __main__ as long
from benchmarks.long.mutation import FAULTS, file_of, mutated


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """Three parts, of which the second fails, and a page of their own."""

    def fail():
        raise AssertionError(f"two | differ in {tmp_path}/secret/file.txt\nand more")

    for name, run in {"a": lambda: {"found": 3, "each": [1, 2]}, "b": fail, "c": dict}.items():
        module = ModuleType(name, f"What {name} shows.\n\nMore.")
        module.run = run
        monkeypatch.setitem(sys.modules, f"benchmarks.long.{name}", module)
    monkeypatch.setattr(long, "parts", lambda: ["a", "b", "c"])
    monkeypatch.setattr(long, "RESULTS", tmp_path)
    monkeypatch.setattr(long, "PAGE", tmp_path / "page.md")
    (tmp_path / "page.md").write_text(f"Above\n{long.BEGIN}\nold\n{long.END}\nBelow\n")
    return tmp_path


def test_the_page_is_made_of_the_files():
    text = long.PAGE.read_text()
    assert text == long.page(text), "run `python -m benchmarks.long --table`"


def test_every_part_says_what_it_shows_and_can_run():
    assert "mutation" in long.parts()
    for name in long.parts():
        module = __import__(f"benchmarks.long.{name}", fromlist=["run"])
        assert module.__doc__.split("\n")[0].endswith(".") and callable(module.run)


def test_a_part_that_fails_is_written_down_and_the_others_run(desk, capsys):
    assert long.main([]) == 1
    a, b, c = (json.loads((desk / f"{name}.json").read_text()) for name in "abc")
    assert (a["passed"], a["error"], a["figures"]) == (True, None, {"found": 3, "each": [1, 2]})
    assert a["shows"] == "What a shows." and a["seconds"] >= 0 and len(a["commit"]) >= 7 and "torch" in a["versions"]
    assert (b["passed"], b["error"], b["figures"]) == (False, "AssertionError: two | differ in file.txt", {})
    assert c["passed"]
    page = (desk / "page.md").read_text()
    assert page.startswith("Above\n") and page.endswith("\nBelow\n") and "old" not in page
    assert "| passed; found 3 |" in page and "**failed**: AssertionError: two \\| differ in file.txt" in page
    assert str(desk) not in page + "".join(path.read_text() for path in desk.glob("*.json"))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.area}: {fault.says}")
def test_the_text_of_every_fault_still_stands(fault):
    ast.parse(mutated(fault))
    assert all(file_of(word).is_file() for word in fault.tests.split() if word.endswith(".py"))
