"""`make long` without its parts: the page of their results, and the text of each fault."""

from __future__ import annotations

import ast
from importlib import import_module

import pytest
from benchmarks.long import __main__ as long
from benchmarks.long.mutation import FAULTS, file_of, mutated


def test_the_page_is_made_of_the_files():
    text = long.PAGE.read_text()
    assert text == long.page(text), "run `python -m benchmarks.long --table`"


def test_every_part_can_run():
    assert "mutation" in long.parts()
    assert all(callable(import_module(f"benchmarks.long.{name}").run) for name in long.parts())


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.area}: {fault.says}")
def test_the_text_of_every_fault_still_stands(fault):
    ast.parse(mutated(fault))
    assert all(file_of(word).is_file() for word in fault.tests.split() if word.endswith(".py"))
