"""Muon, an optimiser that looks at a matrix of weights as a whole.

In: gradients of matrices. Out: steps whose singular values are all about 1. Used by `clone.py`,
because rare directions are then learned as fast as frequent ones (K. Jordan et al. 2024,
kellerjordan.github.io/posts/muon; scaled as in 2502.16982, section 2.2).

Next: `loop.py`, where RL begins.

PyTorch has `torch.optim.Muon`, which multiplies in bfloat16. On a CPU without bfloat16
instructions its step takes 360 ms for the tiny model. In float32 it takes
14 ms (one thread of an AMD EPYC with AVX2). So this one is ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

MOMENTUM = 0.95
"""Of the mean of gradients: it remembers about the last 20."""
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of Jordan's quintic. It rises steeply at 0, so that small singular values grow soonest. In
return they end between about .6 and 1.2, and not at 1."""
ITERATIONS = 5
"""Of the quintic. A singular value of .001 has then become .47, and one of .005 1.15."""
LENGTH = 0.2
"""Root mean square of a step in learning rates, as AdamW's usually is. So one rate fits both."""


def orthogonalize(matrix_RC: Tensor) -> Tensor:
    """Return a matrix with the same singular vectors, and singular values of about 1.

    If X = U S V^T, then (X X^T) X = U S^3 V^T. So the polynomial a X + b (X X^T) X + c (X X^T)^2 X
    keeps U and V. Its singular values are a s + b s^3 + c s^5. Products alone push all of S towards
    1, and products are what processors do best.
    """
    if matrix_RC.size(0) > matrix_RC.size(1):  # X X^T is then the smaller of the two products
        return orthogonalize(matrix_RC.T).T
    a, b, c = COEFFICIENTS
    # No singular value exceeds the norm. The polynomial converges from at most 1.
    x_RC = matrix_RC / matrix_RC.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        squares_RR = x_RC @ x_RC.T
        x_RC = a * x_RC + (b * squares_RR + c * squares_RR @ squares_RR) @ x_RC
    return x_RC


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal. Only for matrices: embeddings, gains and biases need AdamW."""

    def __init__(self, matrices: Iterable[Tensor], lr: float, weight_decay: float):
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # PyTorch's has a loss
        """Move each matrix that has a gradient."""
        for group in self.param_groups:
            for weight_RC in group["params"]:
                if weight_RC.grad is not None:
                    self._move(weight_RC, weight_RC.grad, group["lr"], group["weight_decay"])

    def _move(self, weight_RC: Tensor, gradient_RC: Tensor, lr: float, decay: float) -> None:
        state = self.state[weight_RC]
        if not state:
            state["momentum"] = torch.zeros_like(weight_RC)
        momentum_RC = state["momentum"].lerp_(gradient_RC, 1 - MOMENTUM)
        # Nesterov's look ahead: the newest gradient counts once more.
        step_RC = orthogonalize(gradient_RC.lerp(momentum_RC, MOMENTUM))
        # An orthogonal matrix of R rows and C columns has entries of 1/sqrt(max(R, C)).
        length = LENGTH * math.sqrt(max(weight_RC.shape))
        weight_RC.mul_(1 - lr * decay)
        weight_RC.sub_(step_RC, alpha=lr * length)
