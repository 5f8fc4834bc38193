"""What PyTorch computes where js/trainer.js calls the module: losses, gradients, updates.

In: rows of tokens with actions. Out: the same numbers as the module's, by public functions of
agent_r1.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agent_r1 import Decoder, TrainingRow, action_logprobs, collate, policy_loss
from agent_r1_recipes.browser import world

Rows = list[dict[str, Any]]
WORDS, PADDED_WORDS, WIDTH = 757, 760, 128
"""Rows and columns of the module's embedding, whose last rows are zeros."""
LOSS = {
    "clipLow": 0.2,
    "clipHigh": 0.28,
    "clipDual": 3.0,
    "temperature": 1.0,
    "kl": 0.0,
    "imitate": False,
}


def made_rows(lengths: list[int], seed: int) -> Rows:
    """Rows of random tokens. About a third are actions, in runs, with random advantages."""
    rng = random.Random(seed)
    rows = []
    for length in lengths:
        ids = [rng.randrange(WORDS) for _ in range(length)]
        acting, actions = False, []
        for place in range(1, length):
            acting = rng.random() < (0.85 if acting else 0.08)
            if acting or (place == length - 1 and not actions):
                actions.append({"place": place, "advantage": rng.gauss(0, 1), "weight": 0.01})
        rows.append({"ids": ids, "actions": actions})
    return rows


def with_old_logprobs(model: Decoder, rows: Rows, spread: float, seed: int) -> Rows:
    """Set the sampler's and the reference's log-probabilities: the model's, moved at random.

    A spread of 0.5 moves ratios beyond both clips, and some of them beyond the dual clip.
    """
    rng = random.Random(seed)
    with torch.no_grad():
        now = logprobs_of(model, rows, 1.0).tolist()
    actions = [action for row in rows for action in row["actions"]]
    for action, logprob in zip(actions, now, strict=True):
        action["old"] = float(np.float32(logprob + rng.gauss(0, spread)))
        action["reference"] = float(np.float32(logprob + rng.gauss(0, 0.3)))
    return rows


def logprobs_of(model: Decoder, rows: Rows, temperature: float) -> Tensor:
    """Log-probabilities of all actions, in order."""
    padded = []
    for number, row in enumerate(rows):
        nothing = [0.0] * len(row["ids"])
        mask = [0] * len(row["ids"])
        for action in row["actions"]:
            mask[action["place"]] = 1
        padded.append(TrainingRow(number, "g", row["ids"], mask, nothing, nothing, mask))
    batch = collate(padded)
    logprobs_BT, _ = action_logprobs(model, batch, temperature)
    return logprobs_BT[batch.mask_BT.bool()]


def loss_of(model: Decoder, rows: Rows, loss: dict[str, Any]) -> Tensor:
    """The weighted loss of all actions, whose gradient the module computes."""
    actions = [action for row in rows for action in row["actions"]]

    def column(name: str) -> Tensor:
        return torch.tensor([action[name] for action in actions])

    now = logprobs_of(model, rows, loss["temperature"])
    if loss["imitate"]:
        return -(now * column("advantage") * column("weight")).sum()
    value, _ = policy_loss(
        now,
        column("old"),
        column("advantage"),
        torch.ones(len(now)),
        loss["clipLow"],
        loss["clipHigh"],
        loss["clipDual"],
    )
    difference = column("reference") - now
    value = value + loss["kl"] * (difference.exp() - difference - 1)
    return (value * column("weight")).sum()


class Muon:
    """Muon as agent_r1/cold_start/muon.py describes it, written once more, in float64."""

    def __init__(self, matrices: list[Tensor], lr: float, decay: float):
        self.matrices, self.lr, self.decay = matrices, lr, decay
        self.momenta = [torch.zeros_like(matrix, dtype=torch.float64) for matrix in matrices]

    def step(self) -> None:
        for matrix, momentum in zip(self.matrices, self.momenta, strict=True):
            assert matrix.grad is not None
            gradient = matrix.grad.double()
            momentum.mul_(0.95).add_(0.05 * gradient)
            step = 0.95 * momentum + 0.05 * gradient  # Nesterov's look ahead
            left, values, right = torch.linalg.svd(step, full_matrices=False)
            values = values / values.norm()
            for _ in range(5):
                values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
            length = 0.2 * max(matrix.shape) ** 0.5
            with torch.no_grad():
                matrix.mul_(1 - self.lr * self.decay)
                matrix.sub_(self.lr * length * (left * values) @ right)


def optimizers(model: Decoder, lr: float, beta2: float, decay: float, muon: float) -> list[Any]:
    """AdamW, and with a learning rate `muon` above 0 Muon for the layers' matrices."""
    matrices = [w for w in model.blocks.parameters() if muon and w.ndim == 2]
    taken = {id(weight) for weight in matrices}
    others = [weight for weight in model.parameters() if id(weight) not in taken]
    adamw = torch.optim.AdamW(others, lr=lr, betas=(0.9, beta2), weight_decay=decay)
    return [adamw, Muon(matrices, muon, decay)] if muon else [adamw]


def padded(flat: np.ndarray) -> np.ndarray:
    """Put the embedding's rows of zeros into a vector of all parameters."""
    end = WORDS * WIDTH
    return np.concatenate([flat[:end], np.zeros((PADDED_WORDS - WORDS) * WIDTH), flat[end:]])


def by_tensor(flat: np.ndarray, model: Decoder) -> dict[str, np.ndarray]:
    """Cut a vector in the module's order into the model's parameters.

    The embedding's rows without a word must be zeros.
    """
    parameters = dict(model.named_parameters())
    start, end = WORDS * WIDTH, PADDED_WORDS * WIDTH
    assert not flat[start:end].any()
    flat = np.delete(flat, slice(start, end))
    order = ["embed.weight"]
    for layer in range(2):
        for name in (
            "input_norm.weight",
            "qkv.weight",
            "qkv.bias",
            "o.weight",
            "post_norm.weight",
            "gate_up.weight",
            "down.weight",
        ):
            order.append(f"blocks.{layer}.{name}")
    order.append("norm.weight")
    found, place = {}, 0
    for name in order:
        size = parameters[name].numel()
        found[name] = flat[place : place + size].reshape(parameters[name].shape)
        place += size
    assert place == len(flat) and found.keys() == parameters.keys()
    return found


def largest_difference(ours: dict[str, np.ndarray], theirs: dict[str, Tensor]) -> tuple[float, str]:
    """The largest relative L2 difference of a tensor, and its name."""
    differences = []
    for name, tensor in theirs.items():
        expected = tensor.detach().double().numpy()
        norm = np.linalg.norm(expected)
        differences.append((np.linalg.norm(ours[name].astype(np.float64) - expected) / norm, name))
    return max(differences)


def start_model() -> Decoder:
    return world.start_model()
