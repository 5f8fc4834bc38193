"""Use the microscope, and compare the numbers that it shows with training's.

In: pages with a microscope, and the records that it draws. Every layer is read after dials were
dragged with the mouse and moved with keys. Expected are the numbers of training/ and of the
recipes, in float64, for the values of the dials that the page shows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from agent_r1 import Batch
from agent_r1.training.losses import aggregate_loss, episode_tokens, loss_normalizer, policy_loss
from agent_r1.training.parts import get_estimator, get_ratios
from agent_r1_recipes.credit.settings import CreditAdvantage
from agent_r1_recipes.robustness.off_policy import truncated_weights
from lab.rehearsals._chromium import Browser

Dials = dict[str, Any]
LAYERS = ("mask", "log-probability", "gap", "reward", "value", "advantage", "gradient")
TOLERANCE = 2e-5
"""Largest difference: the page shows five decimals, and `policy_loss` computes in float32."""
DRIFT = 0.1
GROUP_ESTIMATORS = ("grpo", "rloo", "reinforce++-baseline")


def compute_layers(records: list[dict[str, Any]], dials: Dials) -> tuple[dict[str, Tensor], Tensor]:
    """Compute every layer [B, T] as training does, and the action mask.

    Members that are off have rows of zeros.
    """
    rows = [
        (number, record, row) for number, record in enumerate(records) for row in record["rows"]
    ]
    here = [b for b, (number, _, _) in enumerate(rows) if dials.get(f"member {number}")]
    T = max(len(row["tokens"]) for _, _, row in rows)

    def column(name: str, of: Any = None) -> Tensor:
        values = [row.get(name) or [0.0] * len(row["tokens"]) for _, _, row in rows]
        return torch.tensor([x + [0] * (T - len(x)) for x in (of or values)], dtype=torch.float64)[
            here
        ]

    sampled_BT = column("action_mask") > 0
    mask_BT = sampled_BT.clone()
    if dials.get("forget"):
        lengths_B = torch.tensor([len(rows[b][2]["tokens"]) for b in here])
        mask_BT |= (sampled_BT.cumsum(1) > 0) & (torch.arange(T) < lengths_B[:, None])
    rewards_BT = column("rewards")
    for i, b in enumerate(here):
        number, record, row = rows[b]
        if row is record["rows"][-1]:
            rewards_BT[i, int(sampled_BT[i].nonzero()[-1])] = dials[f"reward {number}"]
    batch = Batch(
        rewards_BT=rewards_BT,
        mask_BT=mask_BT,
        values_BT=column("values"),
        groups=[rows[b][1].get("group_id") for b in here],
        trajectory_B=torch.tensor([rows[b][0] for b in here]),
        steps_BT=column("", _steps(rows)).long(),
        truncated_B=torch.zeros(len(here), dtype=torch.bool),
        columns={
            "states_BT": column("", _states(rows)).long(),
            "baseline_B": torch.full((len(here),), torch.nan),
        },
    )
    settings = CreditAdvantage(
        gamma=dials["gamma"], lam=dials["lam"], normalize_std=bool(dials.get("normalizeStd"))
    )
    alone = (
        len(here) == 1 and dials["estimator"] in GROUP_ESTIMATORS
    )  # training refuses a group of one; the page shows zeros
    advantages_BT = (
        torch.zeros_like(rewards_BT)
        if alone
        else get_estimator(dials["estimator"])(batch, settings)[0].double()
    )
    old_BT, age = column("logprobs"), int(dials["age"])
    later = [row["later"][age - 1] for _, _, row in rows] if age and "later" in rows[0][2] else None
    if age == 0:
        gap_BT = torch.zeros_like(old_BT)
    elif later:
        gap_BT = column("", later) - old_BT
    else:
        gap_BT = age * DRIFT * advantages_BT * (1 - old_BT.exp())
    gap_BT = gap_BT * sampled_BT
    layers = {
        "mask": mask_BT.double(),
        "log-probability": old_BT,
        "gap": gap_BT,
        "reward": rewards_BT,
        "value": column("values"),
        "advantage": advantages_BT,
    }
    horizon = max(len(rows[b][2]["tokens"]) for b in here)
    layers["gradient"] = _gradient(batch, advantages_BT, gap_BT, dials, horizon)
    whole = torch.zeros(len(rows), T, dtype=torch.float64)
    return {
        name: whole.index_copy(0, torch.tensor(here), layer) for name, layer in layers.items()
    }, whole.index_copy(0, torch.tensor(here), mask_BT.double())


def _gradient(
    batch: Batch, advantages_BT: Tensor, gap_BT: Tensor, dials: Dials, horizon: int
) -> Tensor:
    """Differentiate the aggregated loss in the trainer's log-probabilities."""
    loss, mask_BT, zeros_BT = dials["loss"], batch.mask_BT, torch.zeros_like(gap_BT)
    low, high, dual = (float(dials[name]) for name in ("low", "high", "dual"))
    if loss == "truncated weights":
        advantages_BT = (
            advantages_BT * truncated_weights(zeros_BT, gap_BT, mask_BT, dials["cap"])[0]
        )
        gap_BT = zeros_BT
    if loss in ("truncated weights", "no clip"):
        low, high, dual = 1.0, float("inf"), 0.0
    ratios = get_ratios(loss.rpartition(" ")[2] if loss.startswith("clip by") else "token")
    now_BT = gap_BT.clone().requires_grad_()
    loss_BT, _ = policy_loss(now_BT, zeros_BT, advantages_BT, mask_BT, low, high, dual, ratios)
    if dials["weights"] == "each token":
        total = loss_BT.sum()
    else:
        mode, tokens_B = dials["weights"], episode_tokens(mask_BT, batch.trajectory_B)
        divisor = loss_normalizer(mask_BT, mode, horizon, batch.trajectory_B)
        total = aggregate_loss(loss_BT, mask_BT, mode, divisor, tokens_B)
    return torch.autograd.grad(total, now_BT)[0]


def _steps(rows: list[Any]) -> list[list[int]]:
    """Return the rows' steps. Without records of them, each run of action tokens is one."""
    returns = []
    for _, _, row in rows:
        mask = row["action_mask"]
        runs = [
            sum(1 for i in range(t + 1) if mask[i] and not (i and mask[i - 1])) - 1
            for t in range(len(mask))
        ]
        returns.append([max(step, 0) for step in row.get("step_ids") or runs])
    return returns


def _states(rows: list[Any]) -> list[list[int]]:
    """Assign numbers to states: what the environment recorded, or all tokens before a step."""
    numbers: dict[Any, int] = {}
    ids = []
    for (_, record, row), steps in zip(rows, _steps(rows), strict=True):
        first = [
            next(t for t, s in enumerate(steps) if s == step and row["action_mask"][t])
            for step in steps
        ]
        states_of_step = [
            record["steps"][step].get("state") if step < len(record["steps"]) else None
            for step in steps
        ]
        prefixes = [tuple(row["tokens"][:start]) for start in first]
        states = [
            before if state is None else ("state", state)
            for state, before in zip(states_of_step, prefixes, strict=True)
        ]
        ids.append([numbers.setdefault(state, len(numbers)) for state in states])
    return ids


# ----------------------------------------------------------------------------------- in the browser


class Microscope:
    """One microscope of a page: the expression `element`, and the records that it draws."""

    def __init__(self, browser: Browser, element: str, records: list[dict[str, Any]]):
        self.browser, self.element, self.records = browser, element, records
        self.numbers = 0  # that were compared

    def one(self, selector: str) -> str:
        return f"{self.element}.querySelector({selector!r})"

    def named(self, name: str) -> str:
        return self.one(f'[name="{name}"]')

    def dials(self) -> Dials:
        """Return the dials as they stand."""
        fields = self.browser.js(f"Object.fromEntries(new FormData({self.one('form')}))")
        return {
            name: float(value) if _is_number(value) else value for name, value in fields.items()
        }

    def compare(self) -> None:
        """Compare each number that the present layer shows, in words of the page for minus.

        Raises AssertionError.
        """
        dials = self.dials()
        layers, mask_BT = compute_layers(self.records, dials)
        layer = dials["layer"]
        numbers = "s => [...s.querySelectorAll('.token')].map(t => t.dataset.number)"
        script = f"[...{self.element}.querySelectorAll('section')].map({numbers})"
        for b, row in enumerate(self.browser.js(script)):
            for t, text in enumerate(row):
                is_exact = dials.get(f"member {self.number_of(b)}") and (
                    layer == "mask" or mask_BT[b, t]
                )
                if not is_exact:
                    assert text == "", (layer, b, t, text)
                    continue
                assert text, (layer, dials, b, t)
                right, on_page = float(layers[layer][b, t]), float(text.replace("−", "-"))
                assert abs(right - on_page) <= TOLERANCE * max(1.0, abs(right)), (
                    layer,
                    dials,
                    b,
                    t,
                    on_page,
                    right,
                )
                self.numbers += 1

    def number_of(self, b: int) -> int:
        return [number for number, record in enumerate(self.records) for _ in record["rows"]][b]

    def each_layer(self) -> None:
        """Go through the layers with the arrow key, and compare each."""
        self.browser.js(f"{self.one('[name=layer][value=author]')}.click()")
        self.browser.js(f"{self.one('[name=layer]:checked')}.focus()")
        for layer in LAYERS:
            self.browser.press("ArrowRight")
            assert self.dials()["layer"] == layer
            texts = "form > p[data-for]:not([hidden])"
            sentence = f"[...{self.element}.querySelectorAll('{texts}')].map(p => p.innerText)"
            assert self.browser.js(sentence)[0].split("Lesson ")[1].strip().isdigit(), layer
            self.compare()

    def key(self, name: str, *keys: str) -> None:
        """Press keys on a control. It must change."""
        before = self.dials()
        self.browser.js(f"{self.named(name)}.focus()")
        self.browser.press(*keys)
        assert self.dials() != before, f"{keys} on {name!r} change nothing"

    def drag(self, name: str, share: float) -> None:
        """Drag a dial. It must change."""
        before = self.dials()
        self.browser.drag(self.named(name), share)
        assert self.dials()[name] != before[name], f"dragging {name!r} changes nothing"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def look(scope: Microscope) -> int:
    """Drag a reward, forget the mask, and compare all layers each time.

    Return the count of numbers.
    """
    scope.each_layer()
    scope.drag("reward 0", 0.9)
    scope.each_layer()
    scope.key("forget", "Space")
    scope.each_layer()
    return scope.numbers


def use(scope: Microscope) -> int:
    """Move every dial by mouse or keys, and compare what is shown after each change.

    Return the count of numbers.
    """
    scope.each_layer()
    scope.drag("reward 0", 0.9)
    scope.compare()
    scope.key("age", "ArrowRight")
    scope.each_layer()
    for dial, share in (
        ("low", 0.02),
        ("high", 0.03),
        ("dual", 0.05),
        ("lam", 0.6),
        ("gamma", 0.8),
    ):
        scope.drag(dial, share)
        scope.compare()
    for name in ("loss", "weights", "estimator"):
        for _ in range(scope.browser.js(f"{scope.one(f'[name={name}]')}.options.length") - 1):
            scope.key(name, "ArrowDown")
            scope.compare()
    scope.key("cap", "ArrowLeft")
    scope.compare()
    scope.key("normalizeStd", "Space")
    scope.each_layer()
    scope.key("forget", "Space")
    scope.each_layer()
    if len(scope.records) > 1:
        scope.key("member 1", "Space")
        scope.each_layer()
    return scope.numbers


FAULTS = {
    "(values.length - 1)": "values.length",  # quantities.js
    "Math.min(Math.max(ratio[t], 1 - clip.low)": "Math.min(Math.max(ratio[t], 1 - clip.high)",
    "acted || t > row.indexOf(true)": "acted",  # microscope.js: the mask is not forgotten
    # dials do nothing
    "form.oninput = () => {": "form.onchange = form.oninput = () => {\n    if (layers) return;",
    "state[`member ${trajectory}`]": "true",
    "(state[`reward ${trajectory}`] ?? reward)": "reward",
}
