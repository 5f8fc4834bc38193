"""Test what the microscope draws, and compare its numbers with the lessons' tables."""

from __future__ import annotations

import html.parser
import json
import re
import subprocess

import pytest
from runs import ROOT, main

from agent_r1 import AgentR1Error
from agent_r1_recipes.page.export import read_recorded_group
from agent_r1_recipes.page.lessons import lesson_steps
from agent_r1_recipes.page.microscope import HERE, read_group, script
from agent_r1_recipes.page.tests.parity import node

LESSONS = ROOT / "docs" / "lessons"
GROUP = LESSONS / "group.jsonl"
COMPUTED = """
const { dials, steps } = JSON.parse(require("fs").readFileSync(0, "utf8"));
const answer = ({ records, settings }, changed = {}) => {
  const members = Object.fromEntries(records.map((_, i) => [`member ${i}`, "on"]));
  const all = { ...dials, ...settings, ...members, ...changed };
  return { ...computeLayers(rowsOf(records), all), here: null };
};
const layers = Object.entries(steps).map(([name, step]) => [name, answer(step)]);
const forgotten = answer(steps.masks, { forget: "on" });
const divided = answer(steps.house, { normalizeStd: true });
const without = answer(steps.four, { "member 3": undefined, "reward 2": 1 });
const authors = rowsOf(steps.masks.records).map((row) => row.authors);
const all = Object.fromEntries(layers);
console.log(JSON.stringify({ ...all, forgotten, divided, without, authors }));
"""


class Dials(html.parser.HTMLParser):
    """Initial values of the dials of microscope.html."""

    def __init__(self):
        super().__init__()
        self.values, self.select = {}, ""
        self.feed((HERE / "microscope.html").read_text())

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag == "select":
            self.select = given["name"]
        elif tag == "input" and given["type"] == "range" and "name" in given:
            self.values[given["name"]] = float(given["value"])
        elif tag == "input" and "name" in given and "checked" in given:
            self.values[given["name"]] = given.get("value", "on")

    def handle_data(self, data):
        if self.select:  # the first option
            self.values[self.select], self.select = data.strip(), ""


def test_a_recorded_group_keeps_its_numbers(computed):
    record = json.loads(GROUP.read_text().splitlines()[1])
    [row] = read_group(GROUP)[1]["rows"]
    recorded = record["rows"][0]
    assert (row["tokens"], row["action_mask"]) == (recorded["tokens"], recorded["action_mask"])
    assert (
        row["logprobs"] == pytest.approx(recorded["logprobs"], abs=1e-6)
        and row["rewards"][122] == 1
    )
    by = dict(zip(row["tokens"], computed["authors"][1], strict=True))
    assert by["user\n"] == "template" and by[" works for based?"] == "user"
    assert {
        who for who, on in zip(computed["authors"][1], row["action_mask"], strict=True) if on
    } == {"policy"}
    assert computed["authors"][1].count("policy") == 28 and computed["authors"][1][28] == "template"


@pytest.fixture(scope="module")
def computed() -> dict:
    job = {"dials": Dials().values, "steps": lesson_steps(GROUP)}
    told = subprocess.run(
        [node(), "-e", script("quantities", "microscope") + COMPUTED],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert told.returncode == 0, told.stderr
    return json.loads(told.stdout)


def column(page: str, header: str, name: str) -> list[float]:
    """Read the numbers of a column of the table that begins so."""
    (table,) = re.findall(
        rf"^\| {re.escape(header)} (?:.*\n\|)*.*", (LESSONS / page).read_text(), re.MULTILINE
    )
    names, _, *rows = (
        [cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines()
    )
    return [float(row[names.index(name)]) for row in rows]


def taken(layers: dict, name: str) -> list[float]:
    """Take the numbers of action tokens."""
    rows, mask = layers["numbers"][name], layers["batch"]["mask"]
    return [
        x
        for row, acts in zip(rows, mask, strict=True)
        for x, acted in zip(row, acts, strict=True)
        if acted
    ]


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
    assert {f"{x:.4f}" for x in taken(computed["masks"], "advantage")} == {
        "1.2076",
        "-0.7246",
    } and "1.2076" in text
    assert len(taken(computed["masks"], "mask")) == 174
    assert (
        computed["forgotten"]["batch"]["mask"][1].count(True) == 108
        and "108 tokens, 28 of them sampled" in text
    )
    assert set(taken(computed["collapsed"], "advantage")) == {0}
    weights = [-x for x in taken(computed["drift"], "gradient")]
    assert weights == pytest.approx(
        column("11-spans-steps-drift.md", "token | trainer", "capped at 2"), abs=5e-5
    )
    gigpo = [x for row in computed["divided"]["credit"]["gigpo"] for x in row]
    assert gigpo == pytest.approx(column("11-spans-steps-drift.md", HOUSE, "gigpo"), abs=2e-4)


def test_a_member_that_is_off_and_a_reward_that_is_dragged_change_the_group(computed):
    assert len(computed["without"]["batch"]["rewards"]) == 3
    assert set(taken(computed["without"], "advantage")) == {0}  # 1, 1 and the dragged 1


def test_every_microscope_has_its_place_in_a_lesson():
    named = [
        name
        for page in LESSONS.glob("*.md")
        for name in re.findall(r"<!-- microscope: (\w+) -->", page.read_text())
    ]
    assert sorted(named) == sorted(lesson_steps(GROUP))


def test_a_page_shows_a_group_of_the_first_step_with_unequal_scores(tmp_path):
    lines = GROUP.read_text().splitlines()
    agreeing = [
        json.dumps(json.loads(line) | {"group_id": "agree", "reward": 0.0}) for line in lines[:2]
    ]
    file = tmp_path / "rollouts" / "step_000001.jsonl"
    file.parent.mkdir()
    file.write_text("\n".join([*agreeing, *lines, ""]))
    found = read_recorded_group(tmp_path / "checkpoints" / "step_000002", {})
    assert len(found["records"]) == 8 and {record["group_id"] for record in found["records"]} == {
        "1-5"
    }
    assert read_recorded_group(tmp_path / "elsewhere" / "x" / "step_000002", {}) is None
    assert len(read_group(file, group="agree")) == 2
    with pytest.raises(AgentR1Error, match="has no group 'none'; its groups are agree, 1-5"):
        read_group(file, group="none")


def test_the_command_writes_a_page_of_a_recorded_group(tmp_path, capsys):
    page = tmp_path / "group.html"
    assert main("microscope", str(GROUP), "--page", str(page)) == 0
    assert "8 attempts" in capsys.readouterr().out
    step = re.search('data-step="([^"]*)"', page.read_text())[1]
    assert json.loads(html.unescape(step)) == {"records": read_group(GROUP)}
    (tmp_path / "other.jsonl").write_text('{"question": 1}\n')
    assert main("microscope", str(tmp_path / "other.jsonl"), "--page", str(page)) == 1
    assert "line 1 is not an episode (its question is '1')" in capsys.readouterr().err
