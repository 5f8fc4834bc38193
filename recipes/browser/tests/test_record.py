"""A record is run again and must give its hashes; everything else is refused in one sentence."""

from __future__ import annotations

import copy
import json

import pytest

from agent_r1 import AgentR1Error
from agent_r1_recipes.browser import record
from agent_r1_recipes.browser.tests.example_record import RECIPE, good
from agent_r1_recipes.browser.tests.small_world import small_world


def read(tmp_path, text):
    file = tmp_path / "record.json"
    file.write_text(text) if isinstance(text, str) else file.write_bytes(text)
    return record.read_record(file)


def test_a_record_of_the_right_form_is_read(tmp_path):
    assert read(tmp_path, json.dumps(good())) == good()


def changed(**changes):
    made = good()
    for path, value in changes.items():
        *parents, last = path.split("__")
        place = made
        for key in parents:
            place = place[int(key) if key.isdigit() else key]
        place[last] = value
    return json.dumps(made)


TEXTS = {
    "stands there twice": json.dumps(good())[:-1] + ', "cost": 1}',
    "bytes follow its end": json.dumps(good()) + "{}",
    "more than 4096 bytes": json.dumps(good()) + " " * 4096,
    "letters beyond ASCII": changed().replace("the start", "thé start").encode(),
    "not JSON": "{",
    "nested too deeply": "[" * 4000,
    "not an object": "[]",
    "no one chooses them": changed(seeds=[1, 2, 3, 4, 5]),
    "no one chooses it": changed(world="mine"),
    "a record has no such key": changed(url="http://x.invalid/"),
    "lacks the key 'cost'": json.dumps({k: v for k, v in good().items() if k != "cost"}),
    "format is not 1": changed(format=2),
    "its format is not 1": changed(format=True),
    "its name is not": changed(name="x" * 41),
    "its name is not 1": changed(name="<img src=x>"),
    "track is not one of": changed(track="fastest"),
    "its track is not one of": changed(track=["episodes"]),
    "learningRate is off the grid": changed(recipe__learningRate=3.1e-4),
    "steps is off the grid": changed(recipe__steps=401),
    "steps is off the grid; choose 1 to 400": changed(recipe__steps=True),
    "its recipe has the key": changed(recipe__switches=["sign-flipped"]),
    "CPU seconds, above 600": changed(recipe__steps=400),
    "binary is not a SHA-256": changed(binary="../../trainer.wasm"),
    "does not have 5 runs": changed(runs=[]),
    "weights of a run are not": changed(runs__0__weights="NaN"),
    "not a number of its questions": changed(runs__0__right=1001),
    "cost is not a whole number": changed(cost=-1),
    "tried is not a number of recipes": changed(tried="few"),
}


@pytest.mark.parametrize("reason", TEXTS)
def test_a_file_of_another_form_is_refused_before_anything_runs(tmp_path, monkeypatch, reason):
    monkeypatch.setattr(record, "run_node", None)
    with pytest.raises(AgentR1Error, match="the record is refused: ") as refused:
        read(tmp_path, TEXTS[reason])
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


def test_seeds_follow_from_the_recipe():
    seeds = record.seeds_of(good())
    assert len(set(seeds)) == 5 and seeds == record.seeds_of(good())
    other = good()
    other["recipe"]["learningRate"] = 5e-4
    assert not set(seeds) & set(record.seeds_of(other))
    written_otherwise = good()
    written_otherwise["recipe"] |= {"steps": 20.0, "questions": 16.0, "largestNorm": 1}
    assert record.seeds_of(written_otherwise) == seeds
    renamed = good() | {"name": "other", "runs": [], "cost": 1}
    assert record.seeds_of(renamed) == seeds


def test_the_bound_is_wilsons():
    assert record.lower_bound(90, 100) == pytest.approx(0.8256, abs=1e-4)
    assert record.lower_bound(0, 10) == pytest.approx(0, abs=1e-12)


def test_the_flops_of_a_run_by_hand(monkeypatch):
    """Two FLOPs a parameter and played token, six a learnt one."""
    told = iter([[{"hash": "a" * 64, "weights": "", "played": 1000, "learned": 300}], [7]])
    monkeypatch.setattr(record, "run_node", lambda *words: next(told))
    header, _ = small_world()
    run = record.run_once(good() | {"track": "flops"}, 1, header)
    assert run == {"weights": "a" * 64, "right": 7, "flops": 425_984 * (2000 + 1800)}


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """A small record of each track in a small world, made and checked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENT_R1_HOME", str(tmp_path_factory.mktemp("home")))
        patch.setattr(record, "RUNS", 1)
        patch.setattr(record, "TRACKS", {"episodes": 16, "flops": 16})
        patch.setattr(record, "THRESHOLD", 0.0)
        header, _ = small_world()
        recipe = RECIPE | {"steps": 1, "questions": 4, "samples": 4}
        blank = good() | {"recipe": recipe}
        yield header, record.fill(blank, header), record.fill(blank | {"track": "flops"}, header)


def test_a_record_holds_where_its_hashes_are_right(played):
    header, episodes, flops = played
    assert episodes["cost"] == 16 and flops["cost"] > 1e9
    assert "at a cost of 16" in record.check(episodes, header)


def run_as(monkeypatch, honest):
    """Give what the honest record has, instead of running it again: that takes seconds."""
    run = honest["runs"][0] | {"flops": honest["cost"]}
    monkeypatch.setattr(record, "run_once", lambda *_: dict(run))
    monkeypatch.setattr(record, "start_hash", lambda _: honest["start"])


CHANGES = {
    "other weights": lambda made: made["runs"][0].update(weights="b" * 64),
    "EM raised": lambda made: made["runs"][0].update(right=made["runs"][0]["right"] + 1),
    "fewer episodes": lambda made: made.update(cost=made["cost"] - 1),
    "another binary": lambda made: made.update(binary="b" * 64),
    "another start": lambda made: made.update(start="b" * 64),
}
SENTENCES = {
    "other weights": "run 1 ends with the weights",
    "EM raised": "run 1 claims",
    "fewer episodes": "and its recipe plays 16",
    "another binary": "made with another binary",
    "another start": "began with other start weights",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_claim_that_does_not_hold_is_refused(played, monkeypatch, change):
    header, honest, _ = played
    run_as(monkeypatch, honest)
    made = copy.deepcopy(honest)
    CHANGES[change](made)
    with pytest.raises(AgentR1Error, match=SENTENCES[change]):
        record.check(made, header)


def test_fewer_flops_and_a_low_score_are_refused(played, monkeypatch):
    header, episodes, flops = played
    run_as(monkeypatch, flops)
    fewer = flops | {"cost": flops["cost"] - 1}
    with pytest.raises(AgentR1Error, match="and its runs need"):
        record.check(fewer, header)
    raised = copy.deepcopy(flops)
    raised["runs"][0]["right"] += 1
    with pytest.raises(AgentR1Error, match="run 1 claims"):
        record.check(raised, header)
    run_as(monkeypatch, episodes)
    monkeypatch.setattr(record, "THRESHOLD", 0.9)
    with pytest.raises(AgentR1Error, match="is not above 0.9"):
        record.check(episodes, header)


def test_a_copy_is_found_by_its_recipe(tmp_path):
    (tmp_path / "first.json").write_text(json.dumps(good()))
    assert record.copies_of(good() | {"name": "mine"}, tmp_path) == ["the start (1)"]
    assert record.copies_of(good(), tmp_path) == []


NAN = """
session.trainer.setWeights(session.start.map((x, i) => (i === 7 ? NaN : x)));
const learner = new Learner(session.trainer, session.agent, session.header.train,
  { steps: 1, questions: 4, samples: 4 }, 1);
learner.credit = (episodes) => episodes.forEach((one, i) => (one.advantage = i % 2 ? 1 : -1));
await learner.takeStep();
"""


def test_a_run_that_is_no_longer_a_number_ends(played):
    from agent_r1_recipes.browser import world

    with pytest.raises(AgentR1Error, match="no longer a number"):
        record.run_node(NAN, {}, world.pack(played[0]))
