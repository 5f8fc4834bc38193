"""The page imitates the demonstrations that Python plays, from weights that look like Python's."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from agent_r1_recipes.browser import world
from agent_r1_recipes.browser.node import run_node
from agent_r1_recipes.browser.tests import reference
from agent_r1_recipes.browser.tests.small_world import (
    array,
    small_config,
    small_plays,
    small_world,
)

TEACH = """
const { trainer, agent } = session;
const plays = await unpackPlays(job.plays);
const begin = (switches = []) => {
  const phases = [{ name: "copy", steps: 3, tokens: 400 }, { name: "mix", steps: 9, tokens: 400 }];
  return new ColdStart(trainer, agent, plays, 1, { phases, switches });
};
const start = begin();
tell(base64Of(trainer.weights()));
for (const name of ["copy", "mix"]) {
  tell(plays[name].map((play) => start.rowOf(play)).map(({ ids, actions }) =>
    [ids, actions.map(({ place }) => place)]));
}
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
tell(plays.mix.map((play) => broken.rowOf(play)).map(({ ids, actions }) =>
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
    _, phases = world.play_demonstrations(small_config())
    for found, name in zip(taught[1:3], ("copy", "mix"), strict=True):
        rows = [row for _, row in phases[name]]
        assert len(found) == len(rows) > 3
        for (ids, places), row in zip(found, rows, strict=True):
            assert ids == row.input_ids
            assert places == [t for t, acted in enumerate(row.action_mask) if acted]


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
            usual = weight[32:128] if part == "qkv" else weight
            assert usual.std() == pytest.approx(DEVIATIONS[part], rel=0.03), name
            assert abs(usual.mean()) < 0.03 * usual.std(), name
    # Query and key of the previous-token head agree best where the key is one token back.
    bias = ours["blocks.0.qkv.bias"]
    frequencies = 10000 ** (-np.arange(16) / 16)
    back = np.concatenate([6 * np.cos(frequencies), -6 * np.sin(frequencies)])
    np.testing.assert_allclose(bias[:32], back, atol=2e-6)
    np.testing.assert_allclose(bias[128:160], [6] * 16 + [0] * 16)
    assert not bias[160:].any() and not ours["blocks.1.qkv.bias"].any()
    first, second = (ours[f"blocks.{layer}.qkv.weight"] for layer in range(2))
    output = ours["blocks.0.o.weight"]
    np.testing.assert_allclose(output[:, 32:], 0.2 * first[256 + 32 :].T, rtol=1e-6)
    np.testing.assert_allclose(second[:32], 2 * first[256 : 256 + 32], rtol=1e-6)
    np.testing.assert_allclose(second[128:160], 2 * output[:, :32].T / 0.2, rtol=1e-6)


def test_the_loss_falls_and_another_worker_can_go_on(taught):
    losses, hashes = taught[3], taught[4]
    assert len(losses) == 12 and losses[0] > 5 and losses[-1] < losses[0] - 1
    assert len(set(hashes)) == 1


def test_the_switch_of_the_stop_token_reaches_the_cold_start(taught):
    assert set(taught[5]) == {0}
