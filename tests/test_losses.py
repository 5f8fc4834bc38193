"""Room 7: losses by hand, by property, and against verl."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1.config.settings import LossAggregation
from agent_r1.training.losses import (
    KL_ESTIMATORS,
    aggregate_loss,
    episode_tokens,
    kl_penalty,
    loss_normalizer,
    policy_loss,
    value_loss,
)
from agent_r1_recipes.credit.spans import sequence_ratios, step_ratios

SEEDS = st.integers(0, 10**6)
MODES = get_args(LossAggregation)
GARBAGE = st.sampled_from([float("nan"), float("inf"), 1e30, -1e30, 3.0])
CLIP = dict(clip_low=0.2, clip_high=0.28, clip_dual=3.0)


def random_batch(seed: int, B: int = 6, T: int = 7):
    """(generator, mask with one empty row and an action in every other)."""
    g = torch.Generator().manual_seed(seed)
    mask_BT = torch.rand(B, T, generator=g) < 0.5
    mask_BT[:, 0] = True
    mask_BT[B - 1] = False
    return g, mask_BT


# -------------------------------------------------------------------------------------- aggregation

LOSS = torch.tensor([[1.0, 2.0, 9.0, 3.0], [9.0, 4.0, 9.0, 9.0], [9.0, 9.0, 9.0, 9.0]])
MASK = torch.tensor([[1, 1, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0]])


@pytest.mark.parametrize(
    "mode, expected",
    [
        ("token-mean", 10 / 4),  # (1 + 2 + 3 + 4) / 4 tokens
        (
            "seq-mean-token-mean",
            (6 / 3 + 4 / 1) / 2,
        ),  # the third row has no action and does not count
        ("seq-mean-token-sum", (6 + 4) / 2),
        ("seq-mean-token-sum-norm", (6 + 4) / 2 / 4),  # horizon: T = 4
    ],
)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int64])
def test_aggregation_by_hand(mode, expected, dtype):
    assert aggregate_loss(LOSS, MASK.to(dtype), mode).item() == pytest.approx(expected)


def test_normalizers_by_hand():
    assert [loss_normalizer(MASK, mode) for mode in MODES] == [4.0, 2.0, 2.0, 8.0]
    assert loss_normalizer(MASK, "seq-mean-token-sum-norm", horizon=10) == 20.0
    # A normaliser of one's own: all four tokens in the loss, divided by the three of another mask
    # (the ablation)
    assert aggregate_loss(LOSS, MASK, "token-mean", normalizer=3.0).item() == pytest.approx(10 / 3)


@pytest.mark.parametrize("mode", MODES)
def test_an_episode_of_several_rows_has_one_vote_in_the_loss(mode):
    """Laid out in one row or in three, an episode weighs as much."""
    losses = torch.arange(1.0, 9.0)  # six tokens of the first episode, two of the second
    one, three = (
        torch.tensor([[1] * 6, [1, 1, 0, 0, 0, 0]]),
        torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 0]]),
    )

    def laid_out(mask_BT: torch.Tensor, trajectories: list[int]) -> float:
        loss_BT = torch.zeros(mask_BT.shape).masked_scatter(mask_BT.bool(), losses)
        normalizer = loss_normalizer(mask_BT, mode, 6, torch.tensor(trajectories))
        tokens_B = episode_tokens(mask_BT, torch.tensor(trajectories))
        return aggregate_loss(loss_BT, mask_BT, mode, normalizer, tokens_B).item()

    by_hand = {
        "token-mean": 36 / 8,
        "seq-mean-token-mean": (21 / 6 + 15 / 2) / 2,
        "seq-mean-token-sum": 36 / 2,
    }
    assert (
        laid_out(one, [0, 1])
        == laid_out(three, [0, 0, 0, 1])
        == pytest.approx(by_hand.get(mode, 36 / 2 / 6))
    )


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("rows", [3, 4, 5, 8])
def test_a_vote_does_not_depend_on_the_rows_of_other_episodes(mode, rows):
    """Two episodes in a minibatch, of one row and of `rows` - 1: half of the loss each, and not .83
    or .31."""
    mask_BT, trajectory_B = (
        torch.ones(rows, 2, dtype=torch.bool),
        torch.tensor([0] + [1] * (rows - 1)),
    )
    loss_BT = torch.ones(rows, 2, requires_grad=True)
    normalizer = loss_normalizer(mask_BT, mode, 2, trajectory_B)
    aggregate_loss(
        loss_BT, mask_BT, mode, normalizer, episode_tokens(mask_BT, trajectory_B)
    ).backward()
    of_first, of_second = loss_BT.grad[0].sum().item(), loss_BT.grad[1:].sum().item()
    sums = {"seq-mean-token-mean": (0.5, 0.5), "seq-mean-token-sum": (1.0, rows - 1.0)}
    assert (of_first, of_second) == pytest.approx(sums.get(mode, (0.5, (rows - 1) / 2)))


@pytest.mark.parametrize("mode", MODES)
def test_no_action_token_at_all_is_zero_loss(mode):
    loss = LOSS.clone().requires_grad_()
    total = aggregate_loss(loss, torch.zeros(3, 4), mode)
    total.backward()
    assert total.item() == 0.0 and torch.equal(loss.grad, torch.zeros(3, 4))


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=30, deadline=None)
@given(seed=SEEDS, garbage=GARBAGE)
def test_micro_batches_sum_to_the_whole_minibatch(mode, seed, garbage):
    """Losses and gradients, for micro-batches of unequal size that are cut to their own longest
    row."""
    g, mask_BT = random_batch(seed)
    values = torch.randn(6, 7, generator=g).masked_fill(~mask_BT, garbage)
    whole, parts = values.clone().requires_grad_(), values.clone().requires_grad_()
    full = aggregate_loss(whole, mask_BT, mode, loss_normalizer(mask_BT, mode, horizon=20))
    full.backward()

    micro = torch.randperm(6, generator=g).split([1, 2, 3])
    widths = [
        int((mask_BT[rows].any(dim=0) * torch.arange(1, 8)).max().clamp(min=1)) for rows in micro
    ]
    pieces = list(zip(micro, widths, strict=True))
    normalizer = sum(loss_normalizer(mask_BT[rows, :T], mode, horizon=20) for rows, T in pieces)
    total = 0.0
    for rows, T in pieces:
        loss = aggregate_loss(parts[rows, :T], mask_BT[rows, :T], mode, normalizer)
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(full.item(), abs=1e-6)
    torch.testing.assert_close(parts.grad, whole.grad)
    assert torch.equal(whole.grad != 0, mask_BT)


# ------------------------------------------------------------------------------------------- policy


def per_token(ratio: float, advantage: float, **clip) -> tuple[float, float, dict]:
    """(loss, d loss / d logprob, metrics) of one token whose probability changed by `ratio` since
    it was sampled."""
    logprob = torch.tensor([math.log(ratio)], requires_grad=True)
    loss, metrics = policy_loss(
        logprob, torch.zeros(1), torch.tensor([advantage]), torch.ones(1), **{**CLIP, **clip}
    )
    loss.sum().backward()
    return loss.item(), logprob.grad.item(), metrics


@pytest.mark.parametrize(
    "ratio, advantage, loss, gradient",
    [
        # d(-A r)/d logprob = -A r, as dr/d logprob = r
        (1.0, 2.0, -2.0, -2.0),  # on-policy: minus the advantage, the policy gradient
        (1.1, 2.0, -2.2, -2.2),  # inside the clip
        (1.27, 2.0, -2.54, -2.54),  # above 1 + clip_low, inside 1 + clip_high
        (1.5, 2.0, -2.56, 0.0),  # clipped: -2 * 1.28; likely enough already
        (0.5, 2.0, -1.0, -1.0),  # moved the wrong way: never clipped, max(-1, -1.6)
        (0.5, -2.0, 1.6, 0.0),  # clipped: 2 * 0.8; unlikely enough already
        (1.5, -2.0, 3.0, 3.0),  # moved the wrong way: max(3, 2.56)
        (5.0, -2.0, 6.0, 0.0),  # dual clip: min(10, 2 * 3)
        (5.0, 2.0, -2.56, 0.0),  # dual clip is for negative advantages only
        (5.0, 0.0, 0.0, 0.0),
    ],
)
def test_policy_loss_by_hand(ratio, advantage, loss, gradient):
    assert per_token(ratio, advantage)[:2] == pytest.approx((loss, gradient), abs=1e-5)


@pytest.mark.parametrize("off", [1.0, 0.0])
def test_dual_clip_can_be_off(off):
    loss, gradient, metrics = per_token(5.0, -2.0, clip_dual=off)
    assert (loss, gradient) == pytest.approx((10.0, 10.0), abs=1e-4) and metrics[
        "actor/pg_clipfrac_lower"
    ] == 0.0


def test_policy_metrics_by_hand():
    # Ratios 1.5, 5, 1, (masked). Clipped from above: the first (A > 0). Dual clip: the second (A <
    # 0, 5 > 3).
    logprobs = torch.tensor([[math.log(1.5), math.log(5.0), 0.0, 7.0]])
    _, metrics = policy_loss(
        logprobs,
        torch.zeros(1, 4),
        torch.tensor([[1.0, -1.0, 1.0, 1.0]]),
        torch.tensor([[1, 1, 1, 0]]),
        **CLIP,
    )
    assert metrics == pytest.approx(
        {
            "actor/pg_clipfrac": 1 / 3,
            "actor/pg_clipfrac_lower": 1 / 3,
            "actor/ppo_kl": -(math.log(1.5) + math.log(5.0)) / 3,  # mean of old - new
        }
    )


@settings(max_examples=50, deadline=None)
@given(SEEDS)
def test_policy_gradient_is_zero_exactly_where_clipped(seed):
    g, mask_BT = random_batch(seed)
    logprobs_BT = torch.randn(6, 7, generator=g).requires_grad_()
    old_BT, advantages_BT = torch.randn(6, 7, generator=g), torch.randn(6, 7, generator=g)
    loss_BT, metrics = policy_loss(logprobs_BT, old_BT, advantages_BT, mask_BT, **CLIP)
    loss_BT.sum().backward()
    ratio_BT = (logprobs_BT - old_BT).exp().detach()
    high = (advantages_BT > 0) & (ratio_BT > 1.28)
    low = (advantages_BT < 0) & (ratio_BT < 0.8)
    dual = (advantages_BT < 0) & (ratio_BT > 3.0)
    expected_BT = torch.where(high | low | dual | ~mask_BT, 0.0, -advantages_BT * ratio_BT)
    torch.testing.assert_close(logprobs_BT.grad, expected_BT)
    assert metrics["actor/pg_clipfrac"] == pytest.approx(
        (high | low)[mask_BT].float().mean().item()
    )
    assert metrics["actor/pg_clipfrac_lower"] == pytest.approx(dual[mask_BT].float().mean().item())
    assert (loss_BT <= 3.0 * advantages_BT.abs() + 1e-5).all()  # what dual clip is for


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [1e4, -1e4, 100.0, -100.0])
def test_policy_loss_survives_absurd_ratios(log_ratio, advantage):
    logprobs = torch.tensor([log_ratio], requires_grad=True)
    for clip_dual in (3.0, 1.0):
        loss, metrics = policy_loss(
            logprobs, torch.zeros(1), torch.tensor([advantage]), torch.ones(1), 0.2, 0.28, clip_dual
        )
        (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
        assert torch.isfinite(loss).all() and torch.isfinite(gradient).all()
        assert metrics["actor/ppo_kl"] == pytest.approx(-math.copysign(20.0, log_ratio))  # clamped


@settings(max_examples=50, deadline=None)
@given(SEEDS, GARBAGE)
def test_masked_tokens_reach_neither_loss_nor_gradient(seed, garbage):
    g, mask_BT = random_batch(seed)
    clean = [torch.randn(6, 7, generator=g).masked_fill(~mask_BT, 0.0) for _ in range(3)]
    dirty = [x.masked_fill(~mask_BT, garbage) for x in clean]
    for function, options in ((policy_loss, CLIP), (value_loss, {"value_clip": 0.5})):
        results = []
        for tensors in (clean, dirty):
            leaf = tensors[0].clone().requires_grad_()
            loss_BT, metrics = function(leaf, tensors[1], tensors[2], mask_BT, **options)
            loss_BT.sum().backward()
            results.append((loss_BT.detach(), leaf.grad, metrics))
        assert torch.equal(results[0][0], results[1][0]) and torch.equal(
            results[0][1], results[1][1]
        )
        assert results[0][2] == results[1][2]
        assert not results[1][0][~mask_BT].any() and not results[1][1][~mask_BT].any()


def test_the_ratio_of_a_step_is_the_geometric_mean_of_its_tokens():
    # Two steps of two tokens, ratios 2, 8 and 1, 4: means 4 and 2. A = 1, clip at 1 + 2: 3 and 2.
    # One step of a sequence: the mean of 2, 8, 1, 4 is 64^(1/4) = 2.83.
    now = torch.tensor([[2.0, 8.0, 99.0, 1.0, 4.0]]).log().requires_grad_()
    mask = torch.tensor([[1, 1, 0, 1, 1]])
    old, one = torch.zeros(1, 5), torch.ones(1, 5)
    loss_BT, _ = policy_loss(now, old, one, mask, 0.5, 2.0, 0.0, step_ratios)
    torch.testing.assert_close(loss_BT, torch.tensor([[-3.0, -3, 0, -2, -2]]))
    loss_BT.sum().backward()
    torch.testing.assert_close(
        now.grad, torch.tensor([[0.0, 0, 0, -2, -2]])
    )  # the first step is clipped as a whole
    loss_BT, _ = policy_loss(now, old, one, mask, 0.5, 2.0, 0.0, sequence_ratios)
    torch.testing.assert_close(loss_BT, -(64**0.25) * mask)


# ------------------------------------------------------------------------------------------- critic


@pytest.mark.parametrize(
    "value, old, target, loss, gradient, clipped",
    [
        # gradient of 0.5 (V - R)^2 is V - R
        (0.2, 0.0, 1.0, 0.5 * 0.8**2, -0.8, 0.0),  # inside the clip
        (
            0.8,
            0.0,
            1.0,
            0.5 * 0.5**2,
            0.0,
            1.0,
        ),  # moved 0.8 towards R: judged at V_old + 0.5, no gradient
        (-0.8, 0.0, 1.0, 0.5 * 1.8**2, -1.8, 0.0),  # moved away from R: the larger error counts
        (2.0, 0.0, 1.9, 0.5 * 1.4**2, 0.0, 1.0),  # overshot, but V_old + 0.5 = 0.5 is further off
    ],
)
def test_value_loss_by_hand(value, old, target, loss, gradient, clipped):
    values = torch.tensor([value], requires_grad=True)
    loss_B, metrics = value_loss(
        values, torch.tensor([old]), torch.tensor([target]), torch.ones(1), value_clip=0.5
    )
    loss_B.sum().backward()
    assert (loss_B.item(), values.grad.item()) == pytest.approx((loss, gradient), abs=1e-6)
    assert metrics == {"critic/vf_clipfrac": clipped}


# ----------------------------------------------------------------------------------- regularisation


def test_kl_by_hand():
    # pi = 0.5, ref = 0.25 at the sampled token: d = log 2
    logprob, ref = torch.tensor(0.5).log(), torch.tensor(0.25).log()
    assert kl_penalty(logprob, ref, "k1").item() == pytest.approx(math.log(2))
    assert kl_penalty(logprob, ref, "k2").item() == pytest.approx(0.5 * math.log(2) ** 2)
    assert kl_penalty(logprob, ref, "k3").item() == pytest.approx(0.5 - 1 + math.log(2))


def exact_kl(p_logits, q_logits):
    p, q = torch.log_softmax(p_logits, -1), torch.log_softmax(q_logits, -1)
    return (p.exp() * (p - q)).sum()


@settings(max_examples=30, deadline=None)
@given(SEEDS)
def test_kl_biases_and_gradients_are_as_documented(seed):
    """Exact expectations over a vocabulary of five: sum over x of pi(x) times the estimator at
    x."""
    g = torch.Generator().manual_seed(seed)
    theta = torch.randn(5, generator=g).requires_grad_()
    ref_logits = (
        torch.randn(5, generator=g) * 0.3 + theta.detach() * 0.7
    )  # near enough for k3's clamp to stay open
    logp, ref = torch.log_softmax(theta, -1), torch.log_softmax(ref_logits, -1)
    pi = logp.detach().exp()
    kl = exact_kl(theta, ref_logits)
    (right,) = torch.autograd.grad(kl, theta)
    (other_direction,) = torch.autograd.grad(exact_kl(ref_logits, theta), theta)
    expected_gradient = {"k1": torch.zeros(5), "k2": right, "k3": other_direction}
    for name in KL_ESTIMATORS:
        value = (pi * kl_penalty(logp, ref, name)).sum()
        (gradient,) = torch.autograd.grad(value, theta, retain_graph=True)
        torch.testing.assert_close(gradient, expected_gradient[name], atol=1e-5, rtol=1e-4)
        if name != "k2":
            assert value.item() == pytest.approx(kl.item(), abs=1e-5)  # unbiased
    # k1 in the reward: the score function weighted by d has the right gradient
    (score,) = torch.autograd.grad((pi * kl_penalty(logp, ref, "k1").detach() * logp).sum(), theta)
    torch.testing.assert_close(score, right, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("d", "moves"), [(-20.0, False), (-2.7, False), (-2.5, True), (10.9, True), (11.1, False)]
)
def test_k3_has_no_gradient_beyond_its_bound_on_either_side(d, moves):
    logprob = torch.tensor(d, requires_grad=True)
    kl_penalty(logprob, torch.tensor(0.0), "k3").backward()
    assert (logprob.grad != 0) == moves


@settings(max_examples=50, deadline=None)
@given(st.floats(-1e4, 1e4), st.floats(-1e4, 1e4))
def test_k3_is_never_negative_and_bounded(logprob, ref):
    x = torch.tensor(logprob, requires_grad=True)
    k3 = kl_penalty(x, torch.tensor(ref), "k3")
    k3.backward()
    assert 0.0 <= k3.item() <= 10.0 and torch.isfinite(x.grad)


# -------------------------- verl as the reference (its policy loss: tests/test_verl_equivalence.py)


@pytest.fixture(scope="module")
def core_algos():
    from verl.trainer.ppo import core_algos

    return core_algos


@pytest.mark.cluster
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(3))
def test_aggregation_equals_verl(core_algos, mode, seed):
    g, mask_BT = random_batch(seed)
    loss_BT = torch.randn(6, 7, generator=g)
    expected = core_algos.agg_loss(loss_BT, mask_BT.float(), mode)
    torch.testing.assert_close(aggregate_loss(loss_BT, mask_BT, mode), expected)
    # As micro-batch of a minibatch with 40 action tokens, 11 rows and a horizon of 20
    expected = core_algos.agg_loss(
        loss_BT,
        mask_BT.float(),
        mode,
        batch_num_tokens=40,
        global_batch_size=11,
        loss_scale_factor=20,
    )
    normalizer = {"token-mean": 40.0, "seq-mean-token-sum-norm": 11.0 * 20}.get(mode, 11.0)
    torch.testing.assert_close(aggregate_loss(loss_BT, mask_BT, mode, normalizer), expected)


@pytest.mark.cluster
@pytest.mark.parametrize("seed", range(3))
def test_value_loss_and_kl_equal_verl(core_algos, seed):
    g, mask_BT = random_batch(seed)
    values, old, returns = (torch.randn(6, 7, generator=g) for _ in range(3))
    loss_BT, metrics = value_loss(values, old, returns, mask_BT, value_clip=0.5)
    expected, clipfrac = core_algos.compute_value_loss(
        values, returns, old, mask_BT.float(), cliprange_value=0.5
    )
    torch.testing.assert_close(aggregate_loss(loss_BT, mask_BT, "token-mean"), expected)
    assert metrics["critic/vf_clipfrac"] == pytest.approx(clipfrac.item())
    for name in KL_ESTIMATORS:
        torch.testing.assert_close(
            kl_penalty(values, old * 9, name), core_algos.kl_penalty(values, old * 9, name)
        )
