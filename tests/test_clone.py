"""Cloning: the loss is that of action tokens, runs repeat, and the model learns enough for RL to
begin."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import clone_steps, fails_with, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1 import load_config
from agent_r1.cold_start import clone
from agent_r1.cold_start.clone import Lesson, Phase
from agent_r1.cold_start.stage import CLONED_ROWS, keep_cloned_rows
from agent_r1.core import StopReason
from agent_r1.evaluation.evaluate import evaluate
from agent_r1.model.sampler import LocalPolicy
from agent_r1.rollout.setup import make_loop
from agent_r1.rollout.training_rows import collate
from agent_r1.training.forward import action_logprobs


def test_cloning_lowers_the_loss_and_repeats_exactly(micro, chat, demonstrations):
    def run():
        model = tiny_model(micro.config.model, len(chat.tokenizer))
        return clone_steps(model, demonstrations, steps=15), model.state_dict()

    (losses, weights), (again, same) = run(), run()
    assert losses == again and all(torch.equal(weights[name], same[name]) for name in weights)
    assert losses[0] == pytest.approx(6, abs=0.7) and losses[-1] < 4  # from log(384) = 5.95


def test_the_loss_is_the_mean_cross_entropy_of_action_tokens(micro, chat, demonstrations):
    model = tiny_model(micro.config.model, len(chat.tokenizer))
    batch = collate(demonstrations[:1])
    with torch.no_grad():
        expected = -action_logprobs(model, batch)[0].sum() / batch.mask_BT.sum()
    [loss] = clone_steps(model, demonstrations[:1], steps=1)
    assert loss == pytest.approx(expected.item(), rel=1e-5)


def test_a_phase_of_no_steps_changes_nothing(micro, chat, demonstrations):
    """cold_start.copy_steps=0 leaves the first phase out."""
    model = tiny_model(micro.config.model, len(chat.tokenizer))
    before = model.embed.weight.clone()
    assert clone_steps(model, demonstrations, steps=0) == []
    assert torch.equal(model.embed.weight, before)


def test_nothing_is_learnt_of_what_a_tool_said(micro, chat, demonstrations):
    """Other words behind the last action change no gradient: with the same masks as in RL, only
    actions count."""
    row = demonstrations[0]
    first_action = row.action_mask.index(1)
    half = type(row)(
        0, "g", row.input_ids[:], [0] * len(row.input_ids), row.logprobs, row.rewards, row.step_ids
    )
    half.action_mask[first_action] = 1
    seen = row.input_ids[: first_action + 1]
    changed = type(row)(**vars(half) | {"input_ids": seen + [5] * (len(row.input_ids) - len(seen))})
    models = [tiny_model(micro.config.model, len(chat.tokenizer)) for _ in range(2)]
    for model, rows in zip(models, ([half], [changed]), strict=True):
        clone_steps(model, rows, steps=1)
    assert torch.equal(models[0].blocks[0].qkv.weight, models[1].blocks[0].qkv.weight)


@settings(deadline=None, max_examples=12)
@given(st.integers(0, 1000), st.integers(200, 2000))
def test_an_epoch_of_cloning_sees_every_row_once(demonstrations, seed, tokens):
    batch = collate(demonstrations)
    batches, seen = clone._endless_batches(batch, tokens, seed), []
    while len(seen) < len(batch):
        seen += next(batches).tolist()
    assert sorted(seen) == list(range(len(batch)))


def test_the_cloned_model_plays_the_task_badly(micro, chat, cloned_model):
    """What RL needs to begin with: well-formed calls and answers in most episodes, and right
    answers in few."""
    policy = LocalPolicy(
        cloned_model, chat.stop_ids, slots=16, max_context=micro.config.rollout.max_context
    )
    done = evaluate(
        make_loop(policy, chat, micro.tools, micro.config.rollout, micro.config.env),
        micro.rows("train"),
        temperature=1.0,
        seed=0,
    )
    answered = sum(t.stop_reason is StopReason.ANSWERED for t in done) / len(done)
    calls = sum(t.metrics["tool_calls"] for t in done)
    # Wide bounds: which episodes fail depends on the last bit of float32, hence on the machine.
    # Untrained, both are 0.
    assert answered > 0.35 and calls / len(done) > 0.2
    assert sum(t.metrics["invalid_calls"] for t in done) < 0.5 * calls
    assert sum(t.metrics["em"] for t in done) / len(done) < 0.8


def test_muon_steps_equally_far_in_each_direction_of_a_matrix(micro, chat, demonstrations):
    """The largest singular value of AdamW's first step is a multiple of the median, Muon's is not.
    A weight moves by .2 learning rates in a step of Muon, as in AdamW's later steps. AdamW's first
    step is a sign, and moves it by 1."""
    spans = {}
    lengths = {}
    for muon in (False, True):
        model = tiny_model(micro.config.model, len(chat.tokenizer))
        before = {name: weight.clone() for name, weight in model.named_parameters()}
        phase = Phase("copy", Lesson(demonstrations), 1, 1024, 1e-3, muon=muon)
        clone.clone(model, phase, 0, lambda step, loss: None)
        changes = {
            name: weight.detach() - before[name] for name, weight in model.named_parameters()
        }
        values = torch.linalg.svdvals(changes["blocks.1.down.weight"])
        spans[muon] = (values[0] / values[len(values) // 2]).item()
        length = changes["blocks.1.down.weight"].pow(2).mean().sqrt().item()
        lengths[muon] = length / (1e-3 / 20)  # the first of 20 steps of warm-up
    assert spans[True] < 1.5 < 3 < spans[False]
    assert lengths[True] == pytest.approx(0.2, rel=0.2)
    assert lengths[False] == pytest.approx(1, rel=0.01)


@pytest.mark.parametrize("muon", [False, True])
def test_each_weight_has_one_optimizer(micro, chat, muon):
    model = tiny_model(micro.config.model, len(chat.tokenizer))
    optimizers = clone.make_optimizers(model, Phase("copy", Lesson([]), 1, 1024, 1e-3, muon=muon))
    weights = [
        weight
        for optimizer in optimizers
        for group in optimizer.param_groups
        for weight in group["params"]
    ]
    assert sorted(map(id, weights)) == sorted(map(id, model.parameters()))
    assert [type(optimizer).__name__ for optimizer in optimizers] == ["AdamW", "Muon"][: 1 + muon]


def test_embeddings_have_a_learning_rate_of_their_own(micro, chat, demonstrations):
    """After one step, which is a sign, AdamW has moved each weight by its learning rate, and Muon
    the matrices by .2 of theirs."""
    model = tiny_model(micro.config.model, len(chat.tokenizer))
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    phase = Phase("copy", Lesson(demonstrations), 1, 1024, 1e-3, 0.0, True, 5e-3)
    clone.clone(model, phase, 0, lambda step, loss: None)
    changes = {name: weight.detach() - before[name] for name, weight in model.named_parameters()}
    warmup = 1 / 20  # the first of 20 steps
    assert changes["norm.weight"].abs().median().item() == pytest.approx(5e-3 * warmup, rel=0.01)
    assert changes["embed.weight"].abs().max().item() == pytest.approx(5e-3 * warmup, rel=0.01)
    matrix = changes["blocks.1.down.weight"].pow(2).mean().sqrt().item()
    assert matrix == pytest.approx(0.2e-3 * warmup, rel=0.2)


def test_a_learning_rate_that_nothing_reads_is_refused():
    with fails_with("unused_embedding_lr"):
        load_config("discover", ["cold_start.copy_optimizer=auto"])


def test_the_rows_that_were_cloned_are_kept_with_what_had_a_loss(demonstrations, tmp_path):
    rows = demonstrations[:5]
    phases = [Phase("copy", Lesson(rows), 3, 1024, 1e-3), Phase("mix", Lesson(rows), 0, 1024, 1e-3)]
    keep_cloned_rows(phases, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / CLONED_ROWS).read_text().splitlines()]
    # A phase of no steps has cloned nothing.
    assert [line["phase"] for line in lines] == ["copy"] * 5
    for row, line in zip(rows, lines, strict=True):
        assert (line["episode"], line["input_ids"]) == (row.group_id, row.input_ids)
        mask = [0] * len(row.input_ids)
        for start, end in line["actions"]:
            mask[start:end] = [1] * (end - start)
        assert mask == row.action_mask
