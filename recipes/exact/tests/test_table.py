"""Rows of estimators in the world Stop, where the true direction is known."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from conftest import fails_with
from runs import ROOT, main

from agent_r1 import Estimator, load_config
from agent_r1_recipes.exact import frozen
from agent_r1_recipes.exact.frozen import STEPS_OF, load_frozen, truth_of
from agent_r1_recipes.exact.gradient import (
    Plays,
    at_offset,
    cosine,
    play_logprobs,
    push,
    token_logprobs_of,
)
from agent_r1_recipes.exact.rows import Sampler, kind_cosines, kl_directions, kl_rows, step_gain
from agent_r1_recipes.exact.stop import Stop, stop_rows, stop_trees
from agent_r1_recipes.exact.table import (
    Entry,
    draw,
    entries_named,
    latex,
    make_world,
    row_of,
    stop_world,
    write_records,
)
from agent_r1_recipes.exact.tree import Play
from agent_r1_recipes.exact.truth import turn_values


@pytest.fixture(scope="module")
def world():
    return stop_world("stop-middle")


@pytest.fixture(scope="module")
def rows(world):
    entries = entries_named(["rloo", "return-to-go", "turn-index", "ppo-.95-exact-V"])
    return {one.name: row_of(world, one, 160, seed=0) for one in entries}


def test_the_frozen_truth_is_that_of_the_weights():
    for name, steps in STEPS_OF.items():
        agent, facts = load_frozen(name)
        _, now = truth_of(agent)
        assert facts["steps"] == steps
        for key, value in now.items():
            assert value == pytest.approx(facts[key], abs=1e-4), key
    assert (
        facts["reward"]
        > 1.2 * json.loads((frozen.FOLDER / "stop-start.json").read_text())["reward"]
    )


def test_changed_weights_are_refused(tmp_path, monkeypatch):
    for file in frozen.FOLDER.iterdir():
        shutil.copy(file, tmp_path)
    monkeypatch.setattr(frozen, "FOLDER", tmp_path)
    with (tmp_path / "stop-start.safetensors").open("ab") as file:
        file.write(b"x")
    with fails_with("damaged_model", "stop-start.safetensors is not the frozen checkpoint"):
        load_frozen("stop-start")


def test_exact_values_are_those_of_the_turns(world):
    """In Stop a turn is one token, so V before a token is V of the state."""
    plays = world.plays
    first = (plays.question_N == 0).nonzero()[:, 0].tolist()
    values, _ = turn_values(
        [Play(plays.trajectories[n], math.log(plays.chance_N[n])) for n in first]
    )
    for n in first[:30]:
        turns = tuple(tuple(step.action_ids) for step in plays.trajectories[n].steps)
        places = plays.batch.mask_BT[n].nonzero()[:, 0].tolist()
        for number, place in enumerate(places):
            value = values[turns[:number]].value
            assert float(world.exact_BT[n, place]) == pytest.approx(value, abs=1e-5)


def test_a_batch_holds_groups_of_the_questions_plays(world):
    sampler = Sampler(world, entries_named(["rloo"])[0].estimator, world.critic_BT, seed=0)
    batch, index_B = sampler.draw()
    assert {len(members) for members in batch.members().values()} == {8}
    questions = world.plays.question_N[world.plays.batch.trajectory_B[index_B]]
    assert [str(int(q)) for q in questions] == batch.groups
    assert torch.equal(
        batch.ids_BT[3], world.plays.batch.ids_BT[index_B[3], : batch.ids_BT.shape[1]]
    )


def test_estimators_without_bias_have_none_and_the_planted_one_is_found(rows):
    for name in ("rloo", "return-to-go"):
        assert rows[name].verdict == "no bias seen", rows[name]
        assert rows[name].mean_cosine > 0.9
    assert rows["turn-index"].verdict != "no bias seen"
    assert rows["turn-index"].mean_cosine < rows["rloo"].mean_cosine - 0.1
    assert rows["turn-index"].gains["all"][0] < rows["rloo"].gains["all"][0]


def test_a_direction_is_compared_by_kind_and_not_within_the_noise(world, rows, monkeypatch):
    least = {name: min(row.kind_cosines.values()) for name, row in rows.items()}
    assert least["rloo"] > 0.9 and least["turn-index"] < least["rloo"] - 0.1, least
    monkeypatch.setattr(world, "noise_of", {"clue-1": 0.6, "clue-2": 0.4})
    found = kind_cosines(world, world.truth_Q)
    assert math.isnan(found["clue-1"])
    assert [found["clue-2"], found["clue-3"]] == pytest.approx([1, 1], abs=1e-4)


def test_a_right_critic_has_no_bias_at_any_lambda(rows):
    assert rows["ppo-.95-exact-V"].mean_cosine > 0.9
    assert rows["ppo-.95-exact-V"].variance < rows["rloo"].variance


def test_with_two_returns_the_division_only_weighs():
    """Then grpo's update of a question is proportional to the true gradient.

    Dr. GRPO's claim is about the weight alone.
    """
    agent, _ = load_frozen("stop-start")
    agent.make_env = lambda row: Stop(pay=0.0)
    trees = stop_trees(agent)
    world = make_world("two returns", agent, Plays.of(trees), [tree.row for tree in trees])
    row = row_of(world, entries_named(["grpo"])[0], 160, seed=1)
    assert not row.is_biased, row
    assert row.mean_cosine > 0.9


def test_one_step_has_the_gain_of_its_slope(world):
    """Along the true gradient it is above 0, against it below."""
    gain = step_gain(world, world.truth)
    assert gain["all"] > 0 and gain["all"] == pytest.approx(
        sum(gain[kind] for kind in set(world.plays.kinds)) / 3
    )
    down = step_gain(world, -world.truth)
    assert down["all"] < 0
    assert step_gain(world, torch.zeros_like(world.truth))["all"] == 0


def test_which_estimators_of_the_kl_have_its_gradient(world):
    """k1 belongs into the reward; in the loss it has no expected gradient."""
    reference, _ = load_frozen("stop-start")
    found = kl_rows(world, reference.model)
    assert found["k1 reward"] == (pytest.approx(1, abs=1e-3), pytest.approx(1, abs=1e-2))
    assert found["k1 loss"][1] < 0.01


def test_the_gradients_of_the_kl_are_slopes():
    """Finite differences in float64. A reward moves the plays alone, a loss moves the numbers."""
    agent, _ = load_frozen("stop-middle")
    other, _ = load_frozen("stop-start")
    plays = Plays.of(stop_trees(agent, stop_rows()[:2]))
    model, reference = agent.model.double(), other.model.double()
    index_B = plays.batch.trajectory_B

    def numbers() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            logprob_N = play_logprobs(model, plays.batch, 1.0)
            return logprob_N.exp(), token_logprobs_of(model, plays.batch, 1.0)

    plays.chance_N, now_BT = numbers()
    with torch.no_grad():
        then_BT = token_logprobs_of(reference, plays.batch, 1.0)
    kinds = {
        "k1": lambda d: d,
        "k2": lambda d: d**2 / 2,
        "k3": lambda d: torch.exp(-d) - 1 + d,
    }
    found = kl_directions(model, reference, plays, 1.0)

    def on_plays(kl_BT: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(plays.chance_N)).double().index_add(0, index_B, kl_BT.sum(1))

    def values(step: float, direction: torch.Tensor) -> dict[str, float]:
        with at_offset(model, direction, step):
            chance_N, moved_BT = numbers()
        out = {"truth": float(chance_N @ on_plays(moved_BT - then_BT))}
        for name, kl in kinds.items():
            out[f"{name} reward"] = float(chance_N @ on_plays(kl(now_BT - then_BT)))
            out[f"{name} loss"] = float(plays.chance_N @ on_plays(kl(moved_BT - then_BT)))
        return out

    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(len(found["truth"]), generator=generator, dtype=torch.float64)
    direction /= direction.norm()
    up, down = (values(step, direction) for step in (1e-5, -1e-5))
    for name, gradient in found.items():
        slope = (up[name] - down[name]) / 2e-5
        assert slope == pytest.approx(float(gradient @ direction), rel=1e-5, abs=1e-7), name
    assert float(found["truth"] @ direction) != pytest.approx(0, abs=1e-4)


def test_a_zero_direction_is_no_error(world):
    nothing = torch.zeros_like(world.plays.batch.mask_BT)
    assert float(push(world.model, world.plays.batch, nothing, 1.0).norm()) == 0
    assert math.isnan(cosine(world.truth, torch.zeros_like(world.truth)))


# -------------------------------------------------------------------------------------- your own


@pytest.mark.parametrize(
    ("name", "code", "text"),
    [
        ("nothing", "unknown_name", "one of grpo, "),
        ("missing.py:mine", "missing_attribute", "there is no file missing.py"),
        ("mine.py:other", "missing_attribute", "has no function 'other'"),
        ("broken.py:mine", "wrong_code", "ZeroDivisionError"),
    ],
)
def test_an_estimator_that_is_missing_is_refused(tmp_path, monkeypatch, name, code, text):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def mine(batch, advantage): ...\n")
    Path("broken.py").write_text("1 / 0\n")
    with fails_with(code, text):
        entries_named([name])


def test_numbers_that_are_not_finite_are_refused(world):
    def credit(batch, advantage):
        return batch.mask_BT / 0, batch.mask_BT

    one = Entry("infinite", Estimator(credit), load_config("small").advantage)
    with fails_with("bad_advantages", "not finite"):
        row_of(world, one, 8, seed=0)


def test_a_table_in_latex_and_as_a_figure(rows, tmp_path):
    text = latex({"stop-middle": list(rows.values())})
    assert text.count(r"\\") == 1 + len(rows) and "undefined" not in text
    for number in range(2):
        draw({"stop-middle": list(rows.values())}, tmp_path / f"{number}.svg")
    first, second = (tmp_path / f"{number}.svg" for number in range(2))
    assert first.read_bytes() == second.read_bytes() and b"turn-index" in first.read_bytes()


@pytest.mark.slow
def test_the_page_is_followed_literally(tmp_path, monkeypatch, capsys):
    """docs/answer-key.md: the file as it is printed there, and both commands."""
    page = (ROOT / "docs/answer-key.md").read_text()
    section = page.split("## Add yours in twenty lines")[1]
    [program] = re.findall(r"```python\n# mine\.py\n(.*?)```", section, re.DOTALL)
    [commands] = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    assert program.count("\n") <= 20
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(program)
    for line in commands.splitlines():
        # Fewer batches than the page's, to save time.
        assert main(*line.split()[1:], "--batches", "16") in (0, 1)
    shown = capsys.readouterr().out
    assert shown.count("mine.py:mine") >= 4
    assert Path("table.tex").stat().st_size and Path("table.svg").stat().st_size


def rows_of_unequal_groups(batch) -> torch.Tensor:
    """Rows whose group has two scores. In float32 verl's mean of equal scores is off by its
    rounding. Divided by verl's epsilon of 1e-6, that is an advantage of .1; ours is 0."""
    scores = batch.rewards_BT.sum(dim=1)
    spread = {}
    for group, score in zip(batch.groups, scores.tolist(), strict=True):
        low, high = spread.get(group, (score, score))
        spread[group] = (min(low, score), max(high, score))
    return torch.tensor([spread[group][1] - spread[group][0] > 1e-4 for group in batch.groups])


@pytest.mark.slow
@pytest.mark.cluster
def test_verls_functions_give_our_advantages():
    world = stop_world("stop-start")  # later most groups agree, and a batch may have no other
    ours = {one.name: one for one in entries_named([])}
    pairs = [(name, name.removeprefix("verl ")) for name in ours if name.startswith("verl")]
    assert len(pairs) == 6
    for theirs, name in pairs:
        own = ours[name.replace("gae", "ppo")]
        batch, _ = Sampler(world, own.estimator, world.critic_BT, seed=4).draw()
        expected, _ = own.estimator(batch, own.advantage)
        found, _ = ours[theirs].estimator(batch, ours[theirs].advantage)
        unequal_B = rows_of_unequal_groups(batch)
        assert unequal_B.any()
        apart = (found - expected)[unequal_B].abs().max()
        if name == "remax":
            # verl's compares the return-to-go, not the score, with the greedy episode's score.
            assert apart > 0.1
        else:
            assert apart < 1e-4, name


def test_the_numbers_of_a_table_are_written_without_nan(tmp_path):
    write_records(tmp_path / "table.json", {"rows": [{"gains": {"all": (math.nan, 0.5)}}]})
    found = json.loads((tmp_path / "table.json").read_text(), parse_constant=pytest.fail)
    assert found == {"rows": [{"gains": {"all": [None, 0.5]}}]}
