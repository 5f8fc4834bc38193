"""The page imitates the demonstrations that Python plays, from weights that look like Python's."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from agent_r1 import load_chat
from agent_r1_recipes.browser import world
from agent_r1_recipes.browser.node import run_node
from agent_r1_recipes.browser.tests import reference
from agent_r1_recipes.browser.tests.small_world import (
    array,
    small_config,
    small_plays,
    small_world,
)
from agent_r1_recipes.laptop.demonstrator import RENAMES
from agent_r1_recipes.laptop.settings import DEMO_AGENT
from agent_r1_recipes.laptop.shown import count, read_play

TEACH = """
const { trainer, agent } = session;
const plays = await unpackPlays(job.plays);
const begin = (switches = []) =>
  new ColdStart(trainer, agent, plays, 1, { steps: 12, tokens: 400, switches });
const start = begin();
tell(base64Of(trainer.weights()));
const rows = plays.plays.map((play) => start.rowOf(play));
tell(rows.map(({ ids, actions }) => [ids, actions.map(({ place }) => place)]));
const copies = [0, 0, 1].map((copy) => start.rename(rows[0].ids, 0, copy));
tell({ copies, syllables: plays.syllables, renames: plays.renames });
const losses = [];
let state = null;
for (let found = {}; !found.done; ) {
  found = start.takeStep();
  losses.push(found.loss);
  if (found.step === 5) state = start.state();
}
tell(losses);
const hash = trainer.weightsHash();
const next = begin();
next.restore(state);
while (!next.takeStep().done);
tell([hash, trainer.weightsHash()]);
const broken = begin(["stop-token-untrained"]);
tell(plays.plays.map((play) => broken.rowOf(play)).map(({ ids, actions }) =>
  actions.filter(({ place }) => agent.chat.stopIds.has(ids[place])).length));
"""


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENT_R1_HOME", str(tmp_path_factory.mktemp("home")))
        _, data = small_world()
        plays = base64.b64encode(small_plays()).decode()
        yield run_node(TEACH, {"plays": plays}, data)


def test_demonstrations_have_the_tokens_and_the_mask_of_python(taught, tmp_path, monkeypatch):
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path))
    _, rows = world.play_demonstrations(small_config())
    assert len(taught[1]) == len(rows) > 3
    for (ids, places), row in zip(taught[1], rows, strict=True):
        assert ids == row.input_ids
        assert places == [t for t, acted in enumerate(row.action_mask) if acted]


def test_no_demonstration_solves_two_or_three_searches(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path))
    questions, rows = world.play_demonstrations(small_config())
    chat = load_chat(DEMO_AGENT)
    plays = [(read_play(chat.decode(row.input_ids)), questions[row.trajectory]) for row in rows]
    kinds = count(plays)["by_kind"]
    assert kinds["1-hop"]["right"] > 0
    for kind in ("2-hop", "3-hop"):
        assert kinds[kind]["plays"] > 0
        assert kinds[kind]["right"] == kinds[kind]["whole_chain"] == 0


def test_names_are_exchanged_one_to_one_and_nothing_else(taught):
    (first, again, other), syllables = taught[2]["copies"], taught[2]["syllables"]
    ids = taught[1][0][0]
    assert first == again != other
    assert taught[2]["renames"] == RENAMES
    for renamed in (first, other):
        new_id = dict(zip(ids, renamed, strict=True))
        assert [new_id[token] for token in ids] == renamed  # a token always becomes the same one
        assert len(set(new_id.values())) == len(new_id)
        for before, after in new_id.items():
            [part] = [part for part in syllables if before in part] or [[before]]
            assert after in part
        assert renamed != ids


DEVIATIONS = {"embed": 0.1, "qkv": 128**-0.5, "gate_up": 128**-0.5, "down": 0.2 * 256**-0.5}
"""Of random weights, as `init_weights` of cold_start/tiny_model.py draws them."""


def test_random_weights_are_drawn_as_in_python(taught):
    ours = reference.by_tensor(array(taught[0]), reference.start_model())
    for name, weight in ours.items():
        part = name.split(".")[-2]
        if "norm" in part:
            assert (weight == 1).all()
        elif part in DEVIATIONS and weight.ndim == 2:
            # The heads that copy have other scales.
            usual = weight[64:128] if part == "qkv" else weight
            assert usual.std() == pytest.approx(DEVIATIONS[part], rel=0.03), name
            assert abs(usual.mean()) < 0.03 * usual.std(), name
    # Query and key of a head that looks back agree best where the key is one or two tokens back.
    bias = ours["blocks.0.qkv.bias"]
    frequencies = 10000 ** (-np.arange(16) / 16)
    for head, distance in enumerate((1, 2)):
        query = bias[32 * head : 32 * (head + 1)]
        angles = distance * frequencies
        back = np.concatenate([6 * np.cos(angles), -6 * np.sin(angles)])
        np.testing.assert_allclose(query, back, atol=4e-6)
        key = bias[128 + 32 * head : 128 + 32 * (head + 1)]
        np.testing.assert_allclose(key, [6] * 16 + [0] * 16)
    assert not bias[64:128].any() and not bias[192:].any()
    assert not ours["blocks.1.qkv.bias"].any()
    first, second = (ours[f"blocks.{layer}.qkv.weight"] for layer in range(2))
    output = ours["blocks.0.o.weight"]
    np.testing.assert_allclose(output[:, 64:], 0.2 * first[256 + 64 :].T, rtol=1e-6)
    # The first pair of heads compares the current token, the second one the token before it.
    before, two_before = output[:, :32].T / 0.2, output[:, 32:64].T / 0.2
    assert abs(np.corrcoef(before.ravel(), two_before.ravel())[0, 1]) < 0.1
    np.testing.assert_array_equal(first[256 + 32 : 256 + 64], first[256 : 256 + 32])
    np.testing.assert_allclose(second[:32], 2 * first[256 : 256 + 32], rtol=1e-6)
    np.testing.assert_allclose(second[128:160], 2 * before, rtol=1e-6)
    np.testing.assert_allclose(second[32:64], 0.5 * before, rtol=1e-6)
    np.testing.assert_allclose(second[160:192], 2 * two_before, rtol=1e-6)


def test_the_loss_falls_and_another_worker_can_go_on(taught):
    losses, hashes = taught[3], taught[4]
    assert len(losses) == 12 and losses[0] > 5 and losses[-1] < losses[0] - 1
    assert len(set(hashes)) == 1


def test_the_switch_of_the_stop_token_reaches_the_cold_start(taught):
    assert set(taught[5]) == {0}
