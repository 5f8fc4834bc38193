"""Muon: its steps next to PyTorch's, and next to a singular value decomposition."""

from __future__ import annotations

import pytest
import torch

from agent_r1.cold_start.muon import Muon, orthogonalize

SHAPES = [(24, 8), (16, 16), (8, 24)]


@pytest.mark.parametrize("shape", SHAPES)
def test_steps_are_those_of_pytorch(shape):
    """PyTorch's Muon rounds to bfloat16, with 8 bits: each entry may be 5 % of a step away."""
    generator = torch.Generator().manual_seed(0)
    begin = torch.randn(shape, generator=generator)
    ours = torch.nn.Parameter(begin.clone())
    theirs = torch.nn.Parameter(begin.clone())
    optimizer = Muon([ours], lr=1e-2, weight_decay=0.1)
    reference = torch.optim.Muon(
        [theirs], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    for _ in range(4):
        ours.grad = torch.randn(shape, generator=generator)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        reference.step()
    difference = (ours - theirs).norm() / (theirs - begin).norm()
    assert 0 < difference < 0.05


@pytest.mark.parametrize("shape", SHAPES)
def test_directions_stay_and_lengths_become_about_one(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    new = left.T @ orthogonalize(matrix) @ right.T
    off_diagonal = new - torch.diag(new.diagonal())
    assert values.max() > 3 and off_diagonal.abs().max() < 1e-4
    assert new.diagonal().min() > 0.6 and new.diagonal().max() < 1.25


def test_a_direction_without_gradient_gets_no_step():
    """Its singular value is 0, and 0 is a fixed point of the polynomial."""
    matrix = torch.outer(torch.arange(1.0, 5.0), torch.arange(1.0, 4.0))
    values = torch.linalg.svdvals(orthogonalize(matrix))
    assert values[0] > 0.6 and values[1:].max() < 1e-3


def test_a_matrix_without_gradient_stays():
    weight = torch.nn.Parameter(torch.ones(2, 2))
    Muon([weight], lr=1.0, weight_decay=0.5).step()
    assert weight.tolist() == [[1.0, 1.0], [1.0, 1.0]]
