"""The board lists what the records say, the lowest cost first."""

from __future__ import annotations

import json

from agent_r1_recipes.browser import board
from agent_r1_recipes.browser.tests.example_record import RECIPE, good


def test_the_board_lists_the_lowest_cost_first_and_names_copies(tmp_path):
    cheaper = good() | {"name": "short", "cost": 1280, "tried": 3}
    cheaper["recipe"] = RECIPE | {"steps": 10}
    for name, made in {"1": good(), "2": cheaper, "3": good() | {"name": "mine"}}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(made))
    _, _, first, second, third = board.board(tmp_path).splitlines()
    assert "| 1280 episodes | 0.950 (0.944) | short |" in first and first.endswith("| 3 |")
    assert "| the start (1) |" in second and second.endswith("| not told |")
    assert "| mine, a copy of the start (1) |" in third


def test_the_board_marks_a_record_of_another_binary_and_lists_it_last(tmp_path):
    old = good() | {"binary": "b" * 64, "cost": 1280, "recipe": RECIPE | {"steps": 10}}
    for name, made in {"1": old, "2": good() | {"name": "new"}}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(made))
    _, _, first, second = board.board(tmp_path).splitlines()
    assert "| 2560 episodes | 0.950 (0.944) | new |" in first
    assert "| 1280 episodes | 0.950 (0.944) | the start (1) (made with another binary) |" in second


def test_the_readme_has_the_board():
    assert board.board() in board.README.read_text(), "python -m agent_r1_recipes.browser.board"
