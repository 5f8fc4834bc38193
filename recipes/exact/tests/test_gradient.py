"""The true gradient, against finite differences and against sampled episodes."""

import copy

import pytest
import torch

from agent_r1 import trajectory_rows
from agent_r1_recipes.exact import gradient
from agent_r1_recipes.exact.gradient import (
    Plays,
    at_offset,
    cosine,
    passes_of,
    play_logprobs,
    push,
    push_all,
    shown_by_constant,
    true_gradient,
)
from agent_r1_recipes.exact.stop import stop_agent, stop_rows, stop_trees
from agent_r1_recipes.exact.tree import Expansion, sample_rest


@pytest.fixture(scope="module")
def agent():
    return stop_agent(seed=2, clone_steps=12)


@pytest.fixture(scope="module")
def plays(agent):
    return Plays.of(stop_trees(agent))


def test_the_gradient_is_the_slope_of_the_sum(agent, plays):
    """Finite differences in float64, along the gradient and along two random directions."""
    model = copy.deepcopy(agent.model).double()

    def value(direction, step):
        with at_offset(model, direction, step), torch.no_grad():
            return plays.value_Q(play_logprobs(model, plays.batch, 1.0).exp()).mean().item()

    # The recorded probabilities are of float32, so the gradient's own are computed in float64.
    exact = copy.copy(plays)
    with torch.no_grad():
        exact.chance_N = play_logprobs(model, plays.batch, 1.0).exp()
    truth = true_gradient(model, exact, 1.0, range(plays.questions))
    generator = torch.Generator().manual_seed(0)
    directions = [truth.whole / truth.whole.norm()]
    for _ in range(2):
        direction = torch.randn(len(truth.whole), generator=generator, dtype=torch.float64)
        directions.append(direction / direction.norm())
    for direction in directions:
        slope = (value(direction, 1e-5) - value(direction, -1e-5)) / 2e-5
        assert slope == pytest.approx(float(truth.whole @ direction), rel=1e-6, abs=1e-8)
    assert truth.certainty == "exact"


def test_a_question_is_cut_into_parts_without_a_change_of_the_gradient(agent, plays, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    weights = [
        plays.on_tokens(torch.rand(len(plays.chance_N), generator=generator).double() * kept_N)
        for kept_N in (plays.question_N < 9, plays.question_N == 1)
    ]
    whole = push_all(agent.model, plays.batch, weights, 1.0)
    monkeypatch.setattr(gradient, "PART_TOKENS", 40)
    parts = [part for _, part in passes_of(plays.batch)]
    assert sum(len(set(part.groups)) for part in parts) > 20
    assert sorted(torch.cat([rows for rows, _ in passes_of(plays.batch)]).tolist()) == list(
        range(len(plays.batch))
    )
    for one, weights_BT in zip(whole, weights, strict=True):
        again = push(agent.model, plays.batch, weights_BT, 1.0)
        assert torch.allclose(again, one, rtol=1e-4, atol=1e-5)


def test_a_constant_baseline_shows_no_bias_if_the_plays_are_all(agent, plays):
    assert shown_by_constant(agent.model, plays, 1.0) < 1e-3
    part = copy.copy(plays)
    part.chance_N = plays.chance_N * (torch.arange(len(plays.chance_N)) % 2)
    assert shown_by_constant(agent.model, part, 1.0) > 0.01


def test_equal_weights_before_and_after_a_move(agent):
    before = [weight.clone() for weight in agent.model.parameters()]
    with at_offset(agent.model, torch.ones(sum(w.numel() for w in before)), 0.5):
        assert not torch.equal(before[0], next(agent.model.parameters()))
    assert all(map(torch.equal, before, agent.model.parameters()))


def test_the_covered_part_and_the_rest_add_up(agent, plays):
    """With half of the probability in the tree, samples of the rest lead to the whole gradient."""
    rows = stop_rows()[:3]
    chosen = [0, 1, 2]
    whole = true_gradient(agent.model, plays, 1.0, chosen).whole
    expansion = Expansion(agent, rows, ["0", "1", "2"])
    trees = expansion.cover(0.6, 10_000)
    sample_rest(agent, trees, 600, seed=1)
    part = true_gradient(agent.model, Plays.of(trees), 1.0, chosen)
    assert part.certainty == "estimated" and part.rest_ratio > 0.1
    assert part.inside_cosine < cosine(part.whole, whole)
    apart = float((part.whole - whole).norm() / whole.norm())
    assert apart < 3 * part.noise_ratio * float(part.whole.norm() / whole.norm())


def test_rows_of_a_play_are_its_own(plays):
    assert plays.batch.trajectory_B.tolist() == list(range(len(plays.trajectories)))
    row = trajectory_rows(plays.trajectories[5], 5)[0]
    length = len(row.input_ids)
    assert plays.batch.ids_BT[5, :length].tolist() == row.input_ids
