"""The module computes PyTorch's numbers, by itself, and its bits cannot depend on the machine."""

from __future__ import annotations

import hashlib
import json
import re

import numpy as np
import pytest
import torch

from agent_r1 import standardize
from agent_r1_recipes.browser import build
from agent_r1_recipes.browser.node import module_bytes, run_node
from agent_r1_recipes.browser.page import HERE, learning_script
from agent_r1_recipes.browser.tests import reference, wasm_file
from agent_r1_recipes.browser.tests.reference import LOSS
from agent_r1_recipes.browser.tests.small_world import array

CLOSE = 1e-4
"""Largest relative L2 difference of a tensor."""
ROWS = [2, 3, 320, 57, 90, 8]
"""Tokens of the rows: of a single action, of the whole context, and of lengths between."""


# ------------------------------------------------------------------------- the same bits everywhere


def test_the_binary_is_what_the_sources_gave():
    assert json.loads((HERE / "trainer.json").read_text()) == build.hashes()


def test_the_module_imports_nothing_and_has_no_relaxed_instruction():
    module = module_bytes()
    assert wasm_file.import_count(module) == 0
    counts = wasm_file.instructions(module)
    simd = {code - wasm_file.SIMD: n for code, n in counts.items() if code >= wasm_file.SIMD}
    assert simd[230] > 50 and simd[228] > 50  # f32x4.mul and f32x4.add
    assert max(simd) < 0x100
    threads = [code for code in counts if code == 0xFE]
    assert not threads
    assert {"read", "differentiate", "update", "sha256"} <= wasm_file.export_names(module)


def test_the_module_has_no_folder_of_the_machine():
    assert not re.search(rb"/(home|root|work|tmp|usr)/", module_bytes())


def test_a_planted_relaxed_instruction_is_found():
    """f32x4.relaxed_madd, FD 85 02, in place of three instructions of a function with no effect."""
    body = bytes([0, 0xFD, 0x85, 0x02, 0x0B])
    code = bytes([1, len(body)]) + body
    module = b"\0asm\1\0\0\0" + bytes([wasm_file.CODE, len(code)]) + code
    assert max(wasm_file.instructions(module)) == wasm_file.SIMD + 0x105


FORBIDDEN = re.compile(
    r"Math\.(?!sqrt|fround|imul|floor|round|min|max|abs\b|LN2)\w+|\*\*(?!/)|Date|performance|random\("
)


def without_comments(script: str) -> str:
    return re.sub(r"/\*.*?\*/|(?<!:)//[^\n]*", "", script, flags=re.S)


def test_the_scripts_compute_with_exact_functions_only():
    """`runEpisode`, of recipes/page, draws at random; training never calls it."""
    script = without_comments(learning_script())
    before, name, rest = script.partition("async function runEpisode(")
    assert name and rest.count("\n}\n") >= 2
    rest = rest.partition("\n}\n")[2]
    assert not FORBIDDEN.findall(before + rest) and "runEpisode" not in before + rest


@pytest.mark.parametrize("planted", ["Math.exp(x)", "x ** 2", "Math.log1p(x)", "Math.random()"])
def test_a_planted_inexact_function_is_found(planted):
    assert FORBIDDEN.findall(without_comments(f"const y = {planted}; // why"))


# -------------------------------------------------------------------------------- PyTorch's numbers

DIFFERENTIATE = """
const trainer = await Trainer.open(bytesOf(job.module), 1);
trainer.setWeights(numbersOf(job.weights));
for (const { rows, loss } of job.tasks) {
  const found = trainer.differentiate(rows, loss);
  tell({ ...found, gradient: base64Of(trainer.takeGradient()) });
}
"""


@pytest.fixture(scope="module")
def start():
    return reference.start_model()


@pytest.fixture(scope="module")
def weights(start):
    import base64

    named = dict(start.named_parameters())
    order = reference.by_tensor(reference.padded(np.zeros(start.parameter_count)), start)
    flat = np.concatenate([named[name].detach().numpy().ravel() for name in order])
    return base64.b64encode(reference.padded(flat).astype(np.float32).tobytes()).decode()


CASES = {
    "on-policy": (0.0, {}),
    "clipped": (0.5, {}),
    "dual clip": (1.5, {}),
    "no dual clip": (0.8, {"clipDual": 0.0}),
    "temperature": (0.1, {"temperature": 0.7}),
    "KL": (0.3, {"kl": 0.2}),
    "imitation": (0.0, {"imitate": True}),
}


@pytest.fixture(scope="module")
def tasks(start):
    made = {}
    for number, (name, (spread, changes)) in enumerate(CASES.items()):
        rows = reference.made_rows(ROWS, number)
        rows = reference.with_old_logprobs(start, rows, spread, number)
        made[name] = {"rows": rows, "loss": LOSS | changes}
    return made


@pytest.fixture(scope="module")
def differentiated(tasks, weights):
    job = {"weights": weights, "tasks": list(tasks.values())}
    return dict(zip(tasks, run_node(DIFFERENTIATE, job), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_pytorch(start, tasks, differentiated, case):
    rows, loss = tasks[case]["rows"], tasks[case]["loss"]
    found = differentiated[case]
    start.zero_grad()
    expected = reference.loss_of(start, rows, loss)
    expected.backward()
    expected = expected.item()
    logprobs = reference.logprobs_of(start, rows, loss["temperature"]).detach().numpy()
    # Random tokens have log-probabilities down to -18, and float32 has seven digits.
    difference = np.abs(np.array(found["logprobs"]) - logprobs) / np.maximum(1, -logprobs)
    assert float(difference.max()) < 1e-5
    assert found["loss"] == pytest.approx(expected, rel=1e-4, abs=1e-5)
    gradients = {name: p.grad for name, p in start.named_parameters()}
    ours = reference.by_tensor(array(found["gradient"]), start)
    difference, name = reference.largest_difference(ours, gradients)
    assert difference < CLOSE, name


def test_the_cases_reach_both_clips(start, tasks):
    """Otherwise a missing clip would pass."""
    rows = tasks["dual clip"]["rows"]
    actions = [action for row in rows for action in row["actions"]]
    now = reference.logprobs_of(start, rows, 1.0).tolist()
    moves = [(a["advantage"], np.exp(n - a["old"])) for a, n in zip(actions, now, strict=True)]
    assert any(advantage > 0 and ratio > 1.28 for advantage, ratio in moves)
    assert any(advantage < 0 and ratio < 0.8 for advantage, ratio in moves)
    assert any(advantage < 0 and ratio > 3 for advantage, ratio in moves)


UPDATE = """
const trainer = await Trainer.open(bytesOf(job.module), 1);
trainer.setWeights(numbersOf(job.weights));
for (let step = 1; step <= 20; step++) {
  for (const shard of shardsOf(job.rows)) {
    if (shard.length) trainer.differentiate(shard, job.loss);
    trainer.addShard();
  }
  const norm = trainer.update(3e-4, 1, job.optimizer);
  if (step === 1 || step === 20) tell({ norm, weights: base64Of(trainer.weights()) });
}
"""


@pytest.mark.parametrize(
    ("beta2", "decay", "muon"), [(0.999, 0.0, 0.0), (0.98, 0.01, 0.0), (0.98, 0.01, 2e-3)]
)
def test_one_update_and_twenty_are_those_of_adamw_and_muon(start, weights, beta2, decay, muon):
    """AdamW with the constants of RL, and of the cold start, and Muon for the layers' matrices."""
    rows = reference.made_rows(ROWS, 11)
    for action in (action for row in rows for action in row["actions"]):
        action["weight"] = 0.05  # a gradient whose norm is clipped
    rows = reference.with_old_logprobs(start, rows, 0.2, 11)
    job = {"weights": weights, "rows": rows, "loss": LOSS}
    found = run_node(UPDATE, job | {"optimizer": {"beta2": beta2, "decay": decay, "muon": muon}})
    model = reference.start_model()
    optimizers = reference.optimizers(model, 3e-4, beta2, decay, muon)
    clipped = False
    for step in range(1, 21):
        model.zero_grad()
        reference.loss_of(model, rows, LOSS).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        clipped |= norm > 1
        for optimizer in optimizers:
            optimizer.step()
        if step not in (1, 20):
            continue
        ours = found[0 if step == 1 else 1]
        assert ours["norm"] == pytest.approx(norm, rel=1e-3)
        tensors = reference.by_tensor(array(ours["weights"]), model)
        difference, name = reference.largest_difference(tensors, dict(model.named_parameters()))
        assert difference < CLOSE, (step, name)
    assert clipped


# ------------------------------------------------------------------------------------ smaller parts

PARTS = """
const trainer = await Trainer.open(bytesOf(job.module), 1);
tell(job.rewards.map(standardize));
tell(job.texts.map((text) => trainer.sha256(new TextEncoder().encode(text))));
tell(job.texts.map((text) => [trainer.blake2b(text), blake2b64(text)]));
tell(Array.from({ length: 4096 }, (_, i) => uniformAt(1, 3, i)));
tell(shuffled([...job.texts.keys()], 5, 1));
"""
REWARDS = [[1, 1, 0, -0.2], [0.8] * 7, [1, 0], [0, 0, 0, 1, 1, -0.2, 1, 1]]
TEXTS = ["", "abc", "piece:<So", "x" * 55, "x" * 56, "x" * 64, "x" * 119, "x" * 129, "é" * 300]


def test_advantages_hashes_and_noise():
    advantages, sha, blake, noise, order = run_node(PARTS, {"rewards": REWARDS, "texts": TEXTS})
    for rewards, found in zip(REWARDS, advantages, strict=True):
        expected = standardize(torch.tensor(rewards, dtype=torch.float64), True)
        assert found == pytest.approx(expected.tolist(), abs=1e-12)
    assert sha == [hashlib.sha256(text.encode()).hexdigest() for text in TEXTS]
    for text, (quick, slow) in zip(TEXTS, blake, strict=True):
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        expected = [int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")]
        assert quick == slow == expected
    # 4,096 uniform numbers: a mean within 4 standard errors, and hardly a value twice.
    assert abs(np.mean(noise) - 0.5) < 4 * (1 / 12 / 4096) ** 0.5
    assert np.histogram(noise, bins=16, range=(0, 1))[0].min() > 190
    assert len(set(noise[:1000])) > 990 and min(noise) >= 0 and max(noise) < 1
    assert sorted(order) == list(range(len(TEXTS))) != order
