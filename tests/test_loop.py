"""Room 7, the local loop: gradients do not depend on how work is cut, runs repeat to the bit, and
something is learnt."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import Counter
from functools import partial

import pytest
import torch
from conftest import (
    TrainingRecord,
    fails_with,
    learner_of,
    micro_config,
    question_row,
    random_model,
    run_training_loop,
    tiny_model,
    trajectory_of,
)
from devices import CreatedWithDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from letters import LETTERS, LetterEnv, SilentEnv, letters_run

from agent_r1.cold_start.clone import Lesson, Phase, clone
from agent_r1.config import ALGORITHMS
from agent_r1.core import SAMPLER_GAP, Observation, StepResult, StopReason, Trajectory
from agent_r1.env import make_env
from agent_r1.ground.errors import ConfigError
from agent_r1.rollout import rollouts
from agent_r1.rollout.rollouts import prompts_of_step
from agent_r1.rollout.setup import make_loop
from agent_r1.rollout.training_rows import Batch, collate, trajectory_rows
from agent_r1.search.searcher import Searcher
from agent_r1.training import loop
from agent_r1.training import run as training_run
from agent_r1.training.batches import minibatches
from agent_r1.training.forward import Critic, action_logprobs, action_values
from agent_r1.training.learner import Learner, linear_decay
from agent_r1.training.loop import update_actor, update_critic
from agent_r1.training.losses import token_ratios
from agent_r1.training.metrics import explained_variance
from agent_r1.training.parts import get_ratios, make_parts
from agent_r1.training.run import validation

FP32 = torch.float32


# -------------------------------------------------------------------------- one batch of experience


@pytest.fixture(scope="module")
def sampled() -> Batch:
    """A batch as it comes out of step 4: multi-turn rows of many lengths, some with advantage zero,
    with a reference."""
    rng = torch.Generator().manual_seed(0)

    def ids(low, high):
        n = int(torch.randint(low, high, (), generator=rng))
        return torch.randint(0, 50, (n,), generator=rng).tolist()

    episodes = []
    for i in range(12):
        prompt, action = ids(3, 9), ids(2, 8)
        steps = [(prompt, action, 0.0)]
        if i % 3:
            steps.append((prompt + action + ids(2, 12), ids(2, 8), 0.0))
        if i % 4 == 0:
            steps.append((ids(3, 9), ids(2, 6), 0.0))  # the context was rewritten: a second row
        episodes.append(trajectory_of(*steps, group=f"g{i // 4}"))
    rows = [row for i, t in enumerate(episodes) for row in trajectory_rows(t, i)]
    batch = collate(rows)
    with torch.no_grad():
        batch.logprobs_BT = action_logprobs(actor(), batch)[0]
        # A policy that has moved a little since it sampled: ratios are not 1, some are clipped.
        batch.logprobs_BT += 0.2 * torch.randn(batch.mask_BT.shape, generator=rng) * batch.mask_BT
    advantage_N = torch.randn(len(episodes), generator=rng)
    advantage_N[::4] = 0
    batch.advantages_BT = advantage_N[batch.trajectory_B][:, None] * batch.mask_BT
    batch.values_BT = 0.1 * torch.randn(batch.mask_BT.shape, generator=rng) * batch.mask_BT
    batch.returns_BT = torch.randn(batch.mask_BT.shape, generator=rng) * batch.mask_BT
    return batch


def actor():
    return random_model(vocab=50, seed=7, tied=False, max_position=128)


def with_reference(batch: Batch) -> Batch:
    with torch.no_grad():
        reference = action_logprobs(
            random_model(vocab=50, seed=8, tied=False, max_position=128), batch
        )[0]
    return dataclasses.replace(batch, ref_logprobs_BT=reference)


def gradient(batch: Batch, update=update_actor, **overrides) -> torch.Tensor:
    """The gradient that one optimiser step follows: plain SGD with learning rate 1 moves the
    weights by just that."""
    given = {
        "actor.minibatches": 1,
        "critic.minibatches": 1,
        "actor.grad_clip": 1e9,
        "critic.grad_clip": 1e9,
    }
    given |= {
        "trainer.max_tokens_per_microbatch": 10**6,
        "actor.lr": 1.0,
        "critic.lr": 1.0,
        "actor.lr_final": 1.0,
    }
    given |= {key.replace("__", "."): value for key, value in overrides.items()}
    config = micro_config("ppo", *(f"{key}={value}" for key, value in given.items()))
    torch.manual_seed(0)
    model = actor() if update is update_actor else Critic(actor())
    if update is update_critic:
        torch.nn.init.normal_(model.value.weight)
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    learner = Learner(model, sgd) if update is update_actor else Learner(None, None, model, sgd)
    if update is update_actor:
        update(learner, batch, config, 1, FP32, get_ratios(config.actor.ratio_level))
    else:
        update(learner, batch, config, 1, FP32)
    return before - torch.cat([p.detach().flatten() for p in model.parameters()])


def assert_same_gradient(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.abs().max() > 1e-3
    assert (a - b).abs().max() < 1e-4 * a.abs().max()


AGGREGATIONS = [
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(
    "terms",
    [{}, {"actor__entropy_coef": 0.1, "actor__kl_coef": 0.3}],
    ids=["surrogate", "entropy and KL"],
)
def test_micro_batches_give_the_gradient_of_the_whole(sampled, aggregation, terms):
    """However a minibatch is cut. Averages of averages would not pass this."""
    batch = with_reference(sampled) if terms else sampled
    whole = gradient(batch, actor__loss_aggregation=aggregation, **terms)
    for micro_tokens in (1, 100):
        parts = gradient(
            batch,
            actor__loss_aggregation=aggregation,
            trainer__max_tokens_per_microbatch=micro_tokens,
            **terms,
        )
        assert_same_gradient(whole, parts)


def test_micro_batches_give_the_critics_gradient_too(sampled):
    whole = gradient(sampled, update_critic)
    for micro_tokens in (1, 100):
        assert_same_gradient(
            whole, gradient(sampled, update_critic, trainer__max_tokens_per_microbatch=micro_tokens)
        )


def test_the_actors_gradient_is_the_textbooks(sampled):
    """-1/N sum_t d/dw min(r A, clip(r) A), written down without any of the loop's machinery."""
    model, batch = actor(), sampled
    ratio = (action_logprobs(model, batch)[0] - batch.logprobs_BT).exp()
    A = sampled.advantages_BT
    surrogate = torch.minimum(ratio * A, ratio.clamp(0.8, 1.28) * A)
    (-(surrogate * batch.mask_BT).sum() / batch.mask_BT.sum()).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert_same_gradient(expected, gradient(sampled, actor__clip_dual=0.0))


def test_the_critics_gradient_is_the_textbooks(sampled):
    torch.manual_seed(0)
    model, batch = Critic(actor()), sampled
    torch.nn.init.normal_(model.value.weight)
    error = (action_values(model, batch) - sampled.returns_BT).square() * batch.mask_BT
    (0.5 * error.sum() / batch.mask_BT.sum()).backward()
    # The trunk's vocabulary matrix has no part in a value.
    expected = torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()]
    )
    assert_same_gradient(expected, gradient(sampled, update_critic, critic__value_clip=1e9))


def test_a_critics_minibatch_is_divided_by_its_own_tokens(sampled, monkeypatch):
    """The gradient of each of two minibatches, against a sum over its tokens; no step is taken."""
    found, dealt = [], []

    def keep_gradient(model, *words):
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        found.append(torch.cat([grad.flatten() for grad in grads]))
        model.zero_grad(set_to_none=True)
        return 1.0

    def deal(*words):
        dealt.extend(minibatches(*words))
        return dealt

    monkeypatch.setattr("agent_r1.training.loop.optimize", keep_gradient)
    monkeypatch.setattr("agent_r1.training.loop.minibatches", deal)
    gradient(sampled, update_critic, critic__minibatches=2, critic__value_clip=1e9)
    torch.manual_seed(0)
    model = Critic(actor())
    torch.nn.init.normal_(model.value.weight)
    assert len(found) == len(dealt) == 2
    for rows_B, gradient_of_minibatch in zip(dealt, found, strict=True):
        model.zero_grad()
        error_BT = action_values(model, sampled) - sampled.returns_BT
        mask_BT = sampled.mask_BT[rows_B]
        (0.5 * (error_BT[rows_B].square() * mask_BT).sum() / mask_BT.sum()).backward()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        assert_same_gradient(torch.cat([g.flatten() for g in grads]), gradient_of_minibatch)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_skipping_rows_without_advantage_changes_nothing(sampled, aggregation, monkeypatch):
    passes = []

    def counting(model, part, *args, **options):
        if torch.is_grad_enabled():  # a pass that is only looked at moves nothing
            passes.append(len(part))
        return action_logprobs(model, part, *args, **options)

    monkeypatch.setattr(loop, "action_logprobs", counting)
    skipping = gradient(sampled, actor__loss_aggregation=aggregation)
    skipped_rows = len(sampled) - sum(passes)
    # With a KL weight, however small, every row has a gradient and none may be left out. (No
    # reference: no KL term.)
    everything = gradient(sampled, actor__loss_aggregation=aggregation, actor__kl_coef=1e-30)
    assert skipped_rows > 0 and sum(passes[1:]) == len(sampled)
    assert_same_gradient(skipping, everything)


@pytest.mark.parametrize("aggregation", AGGREGATIONS[1:])
@pytest.mark.parametrize(
    "terms",
    [{}, {"actor__entropy_coef": 0.1, "actor__kl_coef": 0.3}],
    ids=["surrogate", "entropy and KL"],
)
def test_an_episode_has_one_vote_whatever_else_is_in_its_minibatch(sampled, aggregation, terms):
    """Episodes of 1, 2 and 4 rows: the gradient of a minibatch is the mean of its episodes'
    gradients."""
    batch = with_reference(sampled)
    batch.advantages_BT = (batch.trajectory_B - 3.0)[:, None] * batch.mask_BT
    rows = {i: (batch.trajectory_B == i).nonzero()[:, 0] for i in (1, 4, 8)}
    rows[8] = rows[8].repeat(2)  # the same two rows once more: one more rewrite each
    alone = {
        i: gradient(batch[index], actor__loss_aggregation=aggregation, **terms)
        for i, index in rows.items()
    }
    for others in ([1, 4], [1, 8], [1, 4, 8]):
        minibatch = batch[torch.cat([rows[i] for i in others])]
        expected = sum(alone[i] for i in others) / len(others)
        assert_same_gradient(
            expected, gradient(minibatch, actor__loss_aggregation=aggregation, **terms)
        )
    once = gradient(batch[rows[8][:2]], actor__loss_aggregation=aggregation, **terms)
    assert_same_gradient(alone[8], once * (1 if aggregation == "seq-mean-token-mean" else 2))


LOGGED = ("actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl")


def logged(batch: Batch, *overrides: str) -> dict[str, float]:
    """What an update of four optimiser steps logs about its tokens."""
    config = micro_config(
        "ppo", "actor.minibatches=4", "actor.lr=0.02", "actor.clip_dual=1.1", *overrides
    )
    model = actor()
    learner = Learner(model, torch.optim.SGD(model.parameters(), lr=0.02))
    metrics = update_actor(learner, batch, config, 1, FP32, token_ratios)
    return {name: metrics[name] for name in LOGGED}


def test_logged_means_are_over_all_action_tokens_skipped_or_not(sampled, monkeypatch):
    everything = logged(
        sampled, "actor.kl_coef=1e-30"
    )  # no reference: no KL, but nothing is skipped either
    assert all(everything.values())
    skipping = logged(sampled)
    assert all(skipping[name] == pytest.approx(everything[name], abs=1e-6) for name in LOGGED[:2])
    monkeypatch.setattr("agent_r1.training.loop.KL_ROW_STRIDE", 1)
    assert logged(sampled) == pytest.approx(everything, abs=1e-5)


def test_entropy_pulls_where_it_should(sampled):
    """A step down the gradient of -entropy raises it. (tests/test_kl.py has the KL.)"""
    batch = dataclasses.replace(sampled, advantages_BT=torch.zeros_like(sampled.advantages_BT))

    @torch.no_grad()
    def entropy(step: torch.Tensor | None = None) -> float:
        model = actor()
        if step is not None:
            flat = torch.nn.utils.parameters_to_vector(model.parameters())
            torch.nn.utils.vector_to_parameters(
                flat - 0.01 * step / step.norm(), model.parameters()
            )
        return action_logprobs(model, batch, entropy=True)[1][batch.mask_BT.bool()].mean().item()

    assert entropy(gradient(batch, actor__entropy_coef=1.0)) > entropy()


# -------------------------------------------------------------------------------------- minibatches


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=20),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(0, 2**64 - 1),
)
def test_minibatches_deal_out_whole_trajectories(rows_each, count, epochs, seed):
    trajectories = [
        trajectory_of(*[([i, k], [k], 0.0) for k in range(n)]) for i, n in enumerate(rows_each)
    ]
    batch = collate([row for i, t in enumerate(trajectories) for row in trajectory_rows(t, i)])
    parts = [part.tolist() for part in minibatches(batch, count, epochs, seed)]
    assert Counter(row for part in parts for row in part) == dict.fromkeys(
        range(len(batch)), epochs
    )
    per_epoch = len(parts) // epochs
    assert per_epoch == min(count, len(rows_each)) and len(parts) == per_epoch * epochs
    owner = batch.trajectory_B.tolist()
    for epoch in range(epochs):
        homes = [
            {owner[row] for row in part}
            for part in parts[epoch * per_epoch : (epoch + 1) * per_epoch]
        ]
        assert sum(len(home) for home in homes) == len(rows_each)  # no trajectory in two of them
        assert max(map(len, homes)) - min(map(len, homes)) <= 1
    assert parts == [part.tolist() for part in minibatches(batch, count, epochs, seed)]


def test_minibatches_are_shuffled_anew_in_each_epoch_and_step():
    batch = collate(
        [row for i in range(16) for row in trajectory_rows(trajectory_of(([i], [1], 0.0)), i)]
    )
    halves = [tuple(p.tolist()) for seed in (5, 6) for p in minibatches(batch, 2, 2, seed)]
    assert len(set(halves)) == 8


# ----------------------------------------------------------------------------- prompts and schedule


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 30), st.integers(1, 12), st.integers(0, 5))
def test_steps_cover_each_epoch_exactly_once(n, per_step, seed):
    questions = [question_row(str(i)) for i in range(n)]
    steps = math.ceil(3 * n / per_step)
    asked = [
        row["prompt"][0]["content"]
        for step in range(1, steps + 1)
        for row in prompts_of_step(questions, step, per_step, seed)
    ]
    for epoch in range(3):
        assert sorted(asked[epoch * n : (epoch + 1) * n], key=int) == [str(i) for i in range(n)]


def test_epochs_are_shuffled_differently_and_by_the_seed():
    questions = [question_row(str(i)) for i in range(50)]

    def epoch(number, seed):
        return [row["prompt"][0]["content"] for row in prompts_of_step(questions, number, 50, seed)]

    assert epoch(1, 0) == epoch(1, 0)
    assert len({tuple(epoch(number, seed)) for number in (1, 2) for seed in (0, 1)}) == 4


def test_the_learning_rate_by_hand():
    assert [linear_decay(step, 11, 0, 0.5) for step in (1, 6, 11, 99)] == pytest.approx(
        [1.0, 0.75, 0.5, 0.5]
    )
    assert [linear_decay(step, 11, 4, 0.5) for step in (1, 2, 4, 6)] == pytest.approx(
        [0.25, 0.5 * 0.95, 0.85, 0.75]
    )
    assert linear_decay(1, 1, 0, 0.5) == 1.0


def test_explained_variance_by_hand():
    mask = torch.tensor([[0, 1, 1, 1, 1]])
    returns = torch.tensor([[9, 0, 1, 2, 3.0]])
    assert explained_variance(returns.clone(), returns, mask) == pytest.approx(1)
    assert explained_variance(torch.full_like(returns, 5), returns, mask) == pytest.approx(
        0
    )  # a constant knows nothing
    assert explained_variance(-returns, returns, mask) == pytest.approx(1 - 4)
    half = returns * torch.tensor([[1, 0.5, 0.5, 0.5, 0.5]])
    assert explained_variance(half, returns, mask) == pytest.approx(1 - 0.25)
    assert math.isfinite(
        explained_variance(half, torch.ones_like(returns), mask)
    )  # all returns alike


def test_only_ppo_has_a_critic_and_it_starts_from_the_policys_trunk():
    model = actor()
    assert learner_of(micro_config("grpo"), model).critic is None
    learner = learner_of(micro_config("ppo"), model)
    assert torch.equal(learner.critic.trunk.embed.weight, model.embed.weight)
    assert learner.critic.trunk is not model


# -------------------------------------------------------------------- whole runs in the micro world


def micro_run(micro, chat, model, algorithm="grpo", *overrides: str, **options) -> TrainingRecord:
    config = micro_config(algorithm, *overrides)
    return run_training_loop(config, model, chat, micro.tools, micro.rows("train"), **options)


def curve(record: TrainingRecord) -> list[dict[str, float]]:
    """The metrics without what a clock says."""
    return [
        {k: v for k, v in m.items() if not k.startswith(("timing_s", "perf"))}
        for m in record.metrics
    ]


def assert_equal_weights(a: TrainingRecord, b: TrainingRecord) -> None:
    assert [name for name in a.weights if not torch.equal(a.weights[name], b.weights[name])] == []


STRAIGHT = (
    "trainer.save_every=1",
    "trainer.eval_every=2",
    "critic.warmup_steps=1",
    "actor.lr=1e-3",
)


@pytest.fixture(scope="module")
def straight(micro, chat, cloned_weights) -> dict[str, TrainingRecord]:
    """Three steps of each algorithm, and an evaluation in between."""
    made = {}
    for algorithm in ("grpo", "ppo"):
        model = tiny_model(micro.config.model, len(chat.tokenizer))
        model.load_state_dict(cloned_weights)
        options = {"evaluate": lambda policy: {"val-core/tinyhop/acc/mean@1": 0.5}}
        made[algorithm] = micro_run(micro, chat, model, algorithm, *STRAIGHT, **options)
    return made


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_an_interrupted_run_goes_on_to_the_same_weights_and_curve(
    micro, chat, cloned_model, straight, algorithm
):
    """Everything that a run depends on is in the learner: what a checkpoint holds is enough."""
    config, start, straight = (
        micro_config(algorithm, *STRAIGHT),
        cloned_model.state_dict(),
        straight[algorithm],
    )
    half = learner_of(config, copy.deepcopy(cloned_model))

    class PullThePlugError(Exception):
        pass

    def pull_the_plug(policy):
        raise PullThePlugError

    with pytest.raises(PullThePlugError):
        run_training_loop(
            config, half, chat, micro.tools, micro.rows("train"), evaluate=pull_the_plug
        )
    assert half.step == 2
    parts = [
        p
        for p in ("actor", "actor_optimizer", "critic", "critic_optimizer")
        if getattr(half, p) is not None
    ]
    resumed = learner_of(config, copy.deepcopy(cloned_model))
    for part in parts:
        getattr(resumed, part).load_state_dict(copy.deepcopy(getattr(half, part).state_dict()))
    resumed.step = 2
    evaluate = {"evaluate": lambda policy: {"val-core/tinyhop/acc/mean@1": 0.5}}
    rest = run_training_loop(config, resumed, chat, micro.tools, micro.rows("train"), **evaluate)
    assert_equal_weights(straight, rest)
    assert curve(straight)[2:] == curve(rest) and (straight.saved, rest.saved) == ([1, 2, 3], [3])
    assert not torch.equal(straight.weights["embed.weight"], start["embed.weight"])
    assert all(math.isfinite(v) for m in straight.metrics for v in m.values())
    other = micro_run(micro, chat, cloned_model, algorithm, *STRAIGHT, "seed=1", "trainer.steps=2")
    assert curve(other)[0] != curve(straight)[0]


def test_a_warm_search_cache_changes_no_bit(micro, chat, cloned_model):
    """A resumed run starts with an empty cache. Were remembered queries answered sooner than new
    ones, episodes would rejoin the sampler in another order, log-probs would differ in their last
    digits, and the two runs would part."""
    searcher = micro.tools["search"].searcher
    tools = {
        "search": type(micro.tools["search"])(Searcher(searcher.index), micro.config.search.top_k)
    }
    config, questions = micro_config("grpo", "trainer.steps=2"), micro.rows("train")
    cold, warm = (
        run_training_loop(config, copy.deepcopy(cloned_model), chat, tools, questions)
        for _ in range(2)
    )
    stats = tools["search"].searcher.stats
    assert stats.cache_hits >= stats.searched > 10  # the second run has asked nothing new
    assert_equal_weights(cold, warm)
    assert curve(cold) == curve(warm)


def test_what_is_recorded_of_a_step(straight):
    record = straight["ppo"]
    assert ["val-core/tinyhop/acc/mean@1" in m for m in record.metrics] == [
        False,
        True,
        True,
    ]  # and at the last step
    m, trajectories, batch = record.metrics[1], record.trajectories[1], record.batches[1]
    assert len(trajectories) == 16 and len({t.group_id for t in trajectories}) == 4
    for key, values in {
        "critic/score/mean": [t.reward for t in trajectories],
        "reward/em": [t.metrics["em"] for t in trajectories],
        "episode/f1": [t.metrics["f1"] for t in trajectories],
        "tool_calls/mean": [t.metrics["tool_calls"] for t in trajectories],
        "response_length/mean": [float(batch.mask_BT.sum()) / 16],
    }.items():
        assert m[key] == pytest.approx(sum(values) / len(values)), key
    paid = {key for key in m if key.startswith("reward/")}
    assert paid == {"reward/em", "reward/format"}  # what nobody is paid for has another name
    assert sum(m[key] for key in paid) == pytest.approx(m["critic/score/mean"])
    assert m["rollout/decode_tokens"] == batch.mask_BT.sum()
    # The sampler's log-probabilities are the trainer's: both are at the sampling temperature.
    assert m["training/rollout_logprobs_diff_mean"] < 1e-4
    assert sum(v for k, v in m.items() if k.startswith("stop/")) == pytest.approx(1)
    assert {
        "actor/entropy",
        "actor/pg_loss",
        "actor/grad_norm",
        "actor/lr",
        "critic/vf_loss",
    } <= m.keys()
    laps = ("gen", "values", "adv", "update_critic", "update_actor", "other")
    assert sum(m[f"timing_s/{lap}"] for lap in laps) == pytest.approx(m["timing_s/step"])


def test_the_entropy_that_is_logged_is_of_all_tokens_before_the_update(micro, chat, cloned_model):
    start = copy.deepcopy(cloned_model)
    record = micro_run(
        micro,
        chat,
        cloned_model,
        "grpo",
        "trainer.steps=1",
        "rollout.temperature=0.8",
        "actor.lr=1e-3",
    )
    batch, m = record.batches[0], record.metrics[0]
    assert 0 < m["groups/zero_advantage"] < 1  # some rows were skipped
    with torch.no_grad():
        entropy_BT = action_logprobs(start, batch, 0.8, entropy=True)[1]
    assert m["actor/entropy"] == pytest.approx(
        (entropy_BT.sum() / batch.mask_BT.sum()).item(), abs=1e-4
    )


def test_the_samples_of_a_group_are_of_one_prompt(straight):
    trajectories, batch = straight["grpo"].trajectories[0], straight["grpo"].batches[0]
    for group in {t.group_id for t in trajectories}:
        numbers = [i for i, t in enumerate(trajectories) if t.group_id == group]
        members = [trajectories[i] for i in numbers]
        assert len(members) == 4 and len({tuple(t.steps[0].observation_ids) for t in members}) == 1
        assert (
            len({tuple(t.steps[0].action_ids) for t in members}) > 1
            or not batch.advantages_BT[numbers].any()
        )


def test_the_critic_learns_alone_at_first(micro, chat, cloned_model):
    start = copy.deepcopy(cloned_model.state_dict())
    # The configuration of a run refuses this: nothing would be trained.
    config = micro_config("ppo", "trainer.steps=2", "critic.warmup_steps=1")
    trainer = config.trainer.model_copy(update={"steps": 1})
    config = config.model_copy(update={"trainer": trainer})
    record = run_training_loop(config, cloned_model, chat, micro.tools, micro.rows("train"))
    assert all(torch.equal(start[name], record.weights[name]) for name in start)
    assert (record.learner.critic.value.weight != 0).any()
    assert all("actor/pg_loss" not in m for m in record.metrics)


def test_bfloat16_runs_on_a_cpu(micro, chat, cloned_model):
    start = copy.deepcopy(cloned_model.state_dict())
    evaluated = []

    def evaluate(policy):
        evaluated.append(copy.deepcopy(policy.model.state_dict()))
        return {}

    settings = ("trainer.dtype=bfloat16", "trainer.steps=1", "trainer.eval_every=1")
    record = micro_run(micro, chat, cloned_model, "ppo", *settings, evaluate=evaluate)
    for name, weight in evaluated[0].items():  # a copy, of the weights after the update
        assert torch.equal(weight, record.weights[name].to(weight.dtype)), name
    assert {weight.dtype for weight in evaluated[0].values()} == {torch.bfloat16}
    assert {t.dtype for t in record.weights.values()} == {torch.float32}  # the master weights stay
    assert not torch.equal(start["embed.weight"], record.weights["embed.weight"])
    assert all(math.isfinite(v) for m in record.metrics for v in m.values())
    batch = record.batches[0]
    # The sampler's log-probabilities are the old ones: the first ratios correct for its rounding,
    # and are near 1.
    sampled = [
        logprob for t in batch.trajectories for step in t.steps for logprob in step.action_logprobs
    ]
    assert batch.logprobs_BT[batch.mask_BT.bool()].tolist() == pytest.approx(sampled)
    assert (
        0 < record.metrics[0][SAMPLER_GAP] < 0.1
        and record.metrics[0].get("actor/pg_clipfrac", 0) < 0.2
    )


def test_kl_in_the_reward_is_taken_from_each_action_token(micro, chat, cloned_model):
    reference = random_model(vocab=len(chat.tokenizer), seed=1)
    overrides = [
        "actor.kl_coef=0.01",
        "actor.kl_in=reward",
        "actor.kl_estimator=k1",
        "trainer.steps=1",
    ]
    record = micro_run(
        micro,
        chat,
        cloned_model,
        "ppo",
        *overrides,
        "advantage.normalize_std=false",
        reference=reference,
    )
    batch, mask = record.batches[0], record.batches[0].mask_BT
    with torch.no_grad():
        ref = action_logprobs(reference, batch)[0]
    earned_BT = collate(
        [row for i, t in enumerate(batch.trajectories) for row in trajectory_rows(t, i)]
    ).rewards_BT
    paid = earned_BT - 0.01 * (batch.logprobs_BT - ref) * mask
    # With gamma = lam = 1 the return at the first action token is the sum of everything paid, per
    # trajectory.
    for i in range(len(batch)):
        first = int(mask[i].nonzero()[0, 0])
        assert batch.returns_BT[i, first].item() == pytest.approx(paid[i].sum().item(), abs=1e-3)
    assert "actor/kl_loss" not in record.metrics[0]


class PaysNanEnv(LetterEnv):
    """Divides by zero now and then: in a turn's reward, or in the outcome."""

    count, every = 0, 5
    at_the_end = False

    async def step(self, action):
        PaysNanEnv.count += 1
        result = await super().step(action)
        bad = not self.at_the_end and PaysNanEnv.count % self.every == 0
        return dataclasses.replace(result, reward=math.nan) if bad else result

    def outcome(self, stop_reason):
        PaysNanEnv.count += 1
        bad = self.at_the_end and PaysNanEnv.count % self.every == 0
        return dataclasses.replace(super().outcome(stop_reason), reward=math.inf if bad else 0.0)


@pytest.mark.parametrize("at_the_end", [False, True])
def test_a_reward_that_is_no_number_is_refused_where_it_enters(chat, monkeypatch, at_the_end):
    monkeypatch.setattr(PaysNanEnv, "at_the_end", at_the_end)
    record = letters_run(chat, monkeypatch, "grpo", "trainer.steps=2", env=PaysNanEnv)
    assert all(tensor.isfinite().all() for tensor in record.weights.values())
    broken = [t for t in record.trajectories[0] if t.stop_reason is StopReason.ERROR]
    assert broken and all(
        "a reward must be a finite number, and the environment returned" in t.error for t in broken
    )
    assert not any(
        t.stop_reason is StopReason.ERROR for batch in record.batches for t in batch.trajectories
    )
    monkeypatch.setattr(PaysNanEnv, "every", 1)
    with fails_with("episodes_failed"):
        letters_run(chat, monkeypatch, "grpo", "trainer.steps=1", env=PaysNanEnv)


def test_a_model_with_broken_weights_is_not_sampled_from(chat, monkeypatch):
    model = random_model(len(chat.tokenizer), seed=2)
    with torch.no_grad():
        model.embed.weight[5, 3] = math.nan
    with fails_with("broken_weights"):
        letters_run(chat, monkeypatch, "grpo", "trainer.steps=1", model=model)


@pytest.mark.parametrize("who", ["policy", "critic"])
def test_no_step_is_taken_along_a_gradient_that_is_no_number(sampled, who):
    batch = dataclasses.replace(
        sampled, advantages_BT=sampled.advantages_BT.clone(), returns_BT=sampled.returns_BT.clone()
    )
    at = tuple(batch.mask_BT.nonzero()[-1])
    batch.advantages_BT[at] = batch.returns_BT[at] = math.nan
    learner = learner_of(micro_config("ppo"), actor())
    update, network = {
        "policy": (partial(update_actor, ratios=token_ratios), learner.actor),
        "critic": (update_critic, learner.critic),
    }[who]
    before = copy.deepcopy(network.state_dict())
    config = micro_config("ppo", "actor.minibatches=1", "critic.minibatches=1")
    with fails_with("broken_gradient"):
        update(learner, batch, config, 7, FP32)
    assert all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items())


def test_no_two_episodes_of_a_run_draw_the_same_noise(micro, chat, cloned_model, monkeypatch):
    seeds, run_episodes = [], rollouts.run_episodes

    def listening(flow, tasks, *arguments, **options):
        seeds.extend(task.seed for task in tasks)
        return run_episodes(flow, tasks, *arguments, **options)

    monkeypatch.setattr(rollouts, "run_episodes", listening)
    micro_run(micro, chat, cloned_model, "grpo", "trainer.steps=2")
    assert len(set(seeds)) == len(seeds) == 2 * 4 * 4  # steps, prompts, samples


# ---------------------------------------------------------------------- environments of other kinds


@pytest.fixture(scope="module")
def learnt(chat) -> dict[str, list[float]]:
    """The score of each step, from noise."""
    with pytest.MonkeyPatch.context() as patch:
        runs = {algorithm: letters_run(chat, patch, algorithm) for algorithm in ALGORITHMS}
    return {
        algorithm: [m["critic/score/mean"] for m in run.metrics] for algorithm, run in runs.items()
    }


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_small_problem_is_learnt(learnt, algorithm):
    """From noise to nearly always the right letters, in a second or two: all of the loop has the
    right sign."""
    score = learnt[algorithm]
    assert sum(score[:2]) / 2 < 0.45 and sum(score[-3:]) / 3 > 0.85


def test_the_reference_is_read_at_the_temperature_of_the_policy(chat, monkeypatch):
    """Before the first update the two are one model, so the KL is 0 at any temperature."""
    same = random_model(len(chat.tokenizer), seed=2)
    hot = [
        "rollout.temperature=1.7",
        "actor.kl_coef=0.1",
        "actor.minibatches=1",
        "actor.epochs=1",
        "trainer.steps=1",
    ]
    [metrics] = letters_run(chat, monkeypatch, "grpo", *hot, reference=same).metrics
    assert abs(metrics["actor/kl_loss"]) < 1e-6


class RewritingEnv(LetterEnv):
    """Shows a new prompt in each turn, so that every episode has two rows."""

    async def step(self, action):
        result = await super().step(action)
        if not result.done:
            result = StepResult(
                Observation([{"role": "user", "content": "now this"}], rewrite=True), result.reward
            )
        return result


def test_rewards_on_the_way_are_brought_to_the_outcomes_size(chat, monkeypatch):
    """LetterEnv's first turn is paid 0.5 or nothing on the way, its last one as an outcome."""
    record, scales = (
        letters_run(chat, monkeypatch, "ppo", "advantage.process_weight=2", "trainer.steps=4"),
        [],
    )
    for metrics, batch, trajectories in zip(
        record.metrics, record.batches, record.trajectories, strict=True
    ):
        paid_N = batch.rewards_BT.new_zeros(len(trajectories)).index_add_(
            0, batch.trajectory_B, batch.rewards_BT.sum(1)
        )
        scales.append(metrics["reward/process_scale"])
        expected = [scales[-1] * t.steps[0].reward + t.steps[1].reward for t in trajectories]
        torch.testing.assert_close(paid_N, torch.tensor(expected), atol=1e-5, rtol=0)
        process = sum(t.steps[0].reward for t in trajectories) / len(trajectories)
        assert metrics.get("reward/process", 0) == pytest.approx(process)
    assert max(scales) == pytest.approx(2 / 0.5, rel=1e-5) and {
        round(scale, 3) for scale in scales
    } <= {0.0, 4.0}
    with pytest.raises(
        ConfigError, match="remax compares with a greedy episode, whose rewards are not scaled"
    ):
        micro_config("remax", "advantage.process_weight=1")


def test_rewritten_contexts_are_learnt_from(chat, monkeypatch):
    record = letters_run(chat, monkeypatch, "ppo", env=RewritingEnv)
    assert {len(batch) for batch in record.batches} == {32}
    assert sum(m["critic/score/mean"] for m in record.metrics[-3:]) / 3 > 0.8


class FragileEnv(LetterEnv):
    """Now and then loses its connection."""

    count = 0

    async def step(self, action):
        FragileEnv.count += 1
        if FragileEnv.count % 5 == 0:
            return self.fail()
        return await super().step(action)

    def fail(self):
        raise ConnectionError("lost")


class SlowEnv(FragileEnv):
    """Now and then finds that its time is up, as the loop does by the clock."""

    def fail(self):
        return StepResult(None, done=True, stop_reason=StopReason.TIME_OUT)


class WordyEnv(LetterEnv):
    """Now and then shows a question that fills the context: such an episode samples no token."""

    count = 0

    def reset(self, row):
        WordyEnv.count += 1
        return super().reset(
            row | {"prompt": [{"role": "user", "content": "x" * 2000}]}
            if WordyEnv.count % 5 == 0
            else row
        )


@pytest.mark.parametrize(
    ("algorithm", "env"), [("grpo", FragileEnv), ("ppo", SlowEnv), ("grpo", WordyEnv)]
)
def test_episodes_that_say_nothing_about_the_policy_are_left_out(chat, monkeypatch, algorithm, env):
    """Broken off by an error or a time-out, or without a token. Also where that leaves a sample of
    a group alone, which grpo can learn nothing from."""
    overrides = [
        "rollout.prompts_per_step=8",
        "rollout.samples_per_prompt=2",
        "trainer.steps=2",
        "data.train=24",
    ]
    FragileEnv.count = WordyEnv.count = 0
    record = letters_run(chat, monkeypatch, algorithm, *overrides, env=env)
    for trajectories, batch in zip(record.trajectories, record.batches, strict=True):
        broken = [t for t in trajectories if t.stop_reason is not StopReason.ANSWERED]
        assert broken and all(t.stop_reason is StopReason.ANSWERED for t in batch.trajectories)
        sizes = Counter(t.group_id for t in batch.trajectories)
        assert (
            (min(sizes.values()) == 2)
            if algorithm == "grpo"
            else (len(batch.trajectories) + len(broken) == 16)
        )
        owners = batch.trajectory_B.tolist()
        assert owners == sorted(owners) and len(set(owners)) == len(batch.trajectories)


def test_a_step_without_any_token_says_how_its_episodes_ended(chat, monkeypatch):
    with fails_with("nothing_to_learn"):
        letters_run(chat, monkeypatch, "grpo", "rollout.max_context=8")


class CrowdEnv(LetterEnv):
    """Counts how many episodes are under way."""

    now = most = 0

    def reset(self, row):
        CrowdEnv.now += 1
        CrowdEnv.most = max(CrowdEnv.most, CrowdEnv.now)
        return super().reset(row)

    def outcome(self, stop_reason):
        CrowdEnv.now -= 1
        return super().outcome(stop_reason)


def test_sampled_validation_is_at_the_temperature_of_training(monkeypatch):
    """Else the curve shows another policy than the one that learns."""
    asked = []

    def played(loop, rows, *, temperature, **_):
        asked.append(temperature)
        return [
            Trajectory([], "g", StopReason.ANSWERED, {}, metrics={"em": float(temperature > 0)})
        ]

    monkeypatch.setattr(training_run, "evaluate", played)
    found = validation(
        None, [question_row()], micro_config("grpo", "rollout.temperature=1.7").rollout, 0
    )
    assert asked == [0.0, 1.7] and found == {
        "val-core/test/acc/mean@1": 0.0,
        "val-core/test/sampled_acc": 1.0,
    }


def test_episodes_in_line_for_a_slot_have_not_begun(chat, monkeypatch):
    """Their deadline would run while they wait. Sampling and validation, 16 episodes over 3
    slots."""
    CrowdEnv.now = CrowdEnv.most = 0
    few, crowds = "rollout.max_concurrent_episodes=3", []

    def evaluate(policy):
        crowds.append(CrowdEnv.most)
        CrowdEnv.most = 0
        rows = [question_row(f"Say {i}.", agent_name="letters") for i in range(16)]
        config = micro_config("grpo", *LETTERS, few)
        episodes = make_loop(policy, chat, {}, config.rollout, config.env)
        found = validation(episodes, rows, config.rollout, 0)
        crowds.append(CrowdEnv.most)
        return found

    letters_run(
        chat,
        monkeypatch,
        "grpo",
        few,
        "trainer.steps=1",
        "trainer.eval_every=1",
        env=CrowdEnv,
        evaluate=evaluate,
    )
    assert crowds == [3, 3]


def test_a_batch_in_which_all_groups_agree_changes_nothing(chat, monkeypatch):
    model = random_model(len(chat.tokenizer), seed=2)
    start = copy.deepcopy(model.state_dict())
    record = letters_run(chat, monkeypatch, "grpo", "trainer.steps=2", env=SilentEnv, model=model)
    assert all(torch.equal(start[name], record.weights[name]) for name in start)
    assert [m["groups/zero_advantage"] for m in record.metrics] == [1.0, 1.0]


# -------------------------------------------------------------------- trainer.device=cuda, a choice


def one_step(micro, chat, model, algorithm: str, *overrides: str) -> int:
    """Train one step by the rule; the operations that were looked at."""
    small = (
        "actor.minibatches=1",
        "critic.minibatches=1",
        "rollout.prompts_per_step=2",
        "rollout.samples_per_prompt=3",
        "rollout.max_tokens_per_turn=24",
    )
    config = micro_config(
        algorithm, "trainer.steps=1", "trainer.dtype=bfloat16", *small, *overrides
    )
    reference = copy.deepcopy(model) if config.actor.kl_coef else None
    with CreatedWithDevice() as mode:
        learner = learner_of(config, model)
        loop.train(
            config,
            make_parts(
                config,
                learner.actor,
                chat,
                partial(make_env, tools=micro.tools, config=config.env),
                micro.rows("train"),
            ),
            learner,
            lambda *_: None,
            lambda policy: {},
            lambda learner: None,
            reference,
        )
    return mode.operations


IN_REWARD = (
    "actor.kl_coef=0.01",
    "actor.kl_in=reward",
    "actor.kl_estimator=k1",
    "advantage.process_weight=0.5",
)
CASES = [
    ("ppo", IN_REWARD),
    ("grpo", ("actor.kl_coef=0.01", "actor.entropy_coef=0.001", "trainer.recompute=true")),
    ("gigpo", ("rollout.mismatch={bf16: true, top_p: 0.9, steps_old: 1, tis_cap: 2}",)),
    ("remax", ("actor.loss_aggregation=seq-mean-token-mean",)),
]


@pytest.mark.parametrize(("algorithm", "overrides"), CASES, ids=[name for name, _ in CASES])
def test_a_step_reads_only_tensors_of_the_models_device(
    micro, chat, cloned_model, algorithm, overrides
):
    assert one_step(micro, chat, cloned_model, algorithm, *overrides) > 1000


def test_cloning_reads_only_tensors_of_the_models_device(demonstrations, cloned_model):
    with CreatedWithDevice() as mode:
        phase = Phase("copy", Lesson(demonstrations), 2, 1024, 1e-3)
        clone(cloned_model, phase, 0, lambda step, loss: None, torch.bfloat16)
    assert mode.operations > 100, "hardly anything was looked at"


def test_a_planted_fault_is_caught(micro, chat, cloned_model, monkeypatch):
    monkeypatch.setattr(Batch, "to", lambda self, device: self)
    with pytest.raises(AssertionError, match="takes tensors of host and GPU"):
        one_step(micro, chat, cloned_model, "ppo")
