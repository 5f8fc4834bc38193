"""Room 7, the forward pass of learning: log-probabilities, entropies and values at action tokens,
and nothing elsewhere."""

from __future__ import annotations

import pytest
import torch
from conftest import random_model, trajectory_of
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1.model.decoder import causal_attention
from agent_r1.rollout.training_rows import Batch, collate, trajectory_rows
from agent_r1.training.batches import micro_batches
from agent_r1.training.forward import Critic, action_logprobs, action_values
from agent_r1.training.prefix_tree import SharedRows, micro_batches_of

VOCAB = 40


@pytest.fixture(scope="module")
def model():
    return random_model(vocab=VOCAB, seed=5, tied=False, max_position=64)


@pytest.fixture(scope="module")
def batch() -> Batch:
    """Three episodes of different lengths, one of them with two turns."""
    g = torch.Generator().manual_seed(0)

    def ids(n):
        return torch.randint(0, VOCAB, (n,), generator=g).tolist()

    prompt, action = ids(4), ids(3)
    episodes = [
        trajectory_of((prompt, action, 0.0), (prompt + action + ids(5), ids(6), 1.0)),
        trajectory_of((ids(7), ids(2), 0.0)),
        trajectory_of((ids(1), ids(9), 0.0)),
    ]
    return collate([row for i, t in enumerate(episodes) for row in trajectory_rows(t, i)])


@torch.no_grad()
def by_hand(model, batch: Batch, temperature=1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """One row at a time, without padding, all logits."""
    logprobs, entropy = torch.zeros_like(batch.mask_BT), torch.zeros_like(batch.mask_BT)
    for b in range(len(batch)):
        ids = batch.ids_BT[b, : batch.lengths_B[b]]
        hidden = model(ids[None], torch.arange(len(ids))[None], causal_attention)
        p = (model.logits(hidden)[0] / temperature).softmax(-1)
        for t in range(1, len(ids)):
            if batch.mask_BT[b, t]:
                logprobs[b, t] = p[t - 1, ids[t]].log()
                entropy[b, t] = -(p[t - 1] * p[t - 1].log()).sum()
    return logprobs, entropy


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_and_entropies_stand_at_action_tokens_alone(model, batch, temperature):
    logprobs_BT, entropy_BT = action_logprobs(model, batch, temperature, entropy=True)
    expected_logprobs, expected_entropy = by_hand(model, batch, temperature)
    torch.testing.assert_close(logprobs_BT.detach(), expected_logprobs, atol=1e-4, rtol=0)
    torch.testing.assert_close(entropy_BT.detach(), expected_entropy, atol=1e-4, rtol=0)
    assert (logprobs_BT[batch.mask_BT == 0] == 0).all() and (
        logprobs_BT[batch.mask_BT == 1] < 0
    ).all()
    assert logprobs_BT.dtype == entropy_BT.dtype == torch.float32


def test_an_entropy_is_computed_only_if_asked_for_and_can_be_trained_on(model, batch):
    assert action_logprobs(model, batch)[1] is None
    assert action_logprobs(model, batch)[0].requires_grad
    assert action_logprobs(model, batch, entropy=True)[1].requires_grad


def test_the_gradient_is_that_of_the_plain_computation(model, batch):
    action_logprobs(model, batch)[0].sum().backward()
    ours = model.embed.weight.grad.clone()
    model.zero_grad()
    B, T = batch.ids_BT.shape
    hidden = model(batch.ids_BT, torch.arange(T).expand(B, T), causal_attention)
    logprobs = (
        model.logits(hidden[:, :-1]).log_softmax(-1).gather(2, batch.ids_BT[:, 1:, None])[..., 0]
    )
    (logprobs * batch.mask_BT[:, 1:]).sum().backward()
    torch.testing.assert_close(ours, model.embed.weight.grad, atol=1e-4, rtol=1e-4)
    model.zero_grad()


def test_a_new_critic_expects_nothing(model, batch):
    assert (action_values(Critic(model), batch) == 0).all()


def test_a_value_is_of_the_state_before_the_token(model, batch):
    critic = Critic(model)
    torch.nn.init.normal_(critic.value.weight)
    torch.nn.init.constant_(critic.value.bias, 0.5)
    with torch.no_grad():
        values_BT = action_values(critic, batch)
        hidden = model(
            batch.ids_BT[:1], torch.arange(batch.ids_BT.shape[1])[None], causal_attention
        )[0]
    assert batch.mask_BT[0, 4] == 1 and batch.mask_BT[0, 3] == 0
    assert values_BT[0, 4].item() == pytest.approx(critic.value(hidden[3]).item(), abs=1e-5)
    assert (values_BT[batch.mask_BT == 0] == 0).all() and (values_BT[batch.mask_BT == 1] != 0).all()


def test_one_row_says_the_same_alone_and_in_company(model, batch):
    with torch.no_grad():
        together = action_logprobs(model, batch)[0]
        for b in range(len(batch)):
            alone = action_logprobs(model, batch[torch.tensor([b])])[0]
            torch.testing.assert_close(alone[0], together[b, : alone.shape[1]], atol=1e-5, rtol=0)


# -------------------------------------------------------------------------------------------- trees


def rows_that_begin_alike(seed: int) -> Batch:
    """Two prompts' rows over three tokens: common beginnings, equal rows, a row that begins
    another, another first token."""
    g = torch.Generator().manual_seed(seed)

    def ids(low, high):
        return torch.randint(
            1, 4, (int(torch.randint(low, high, (), generator=g)),), generator=g
        ).tolist()

    episodes = []
    for group in "ab":
        prompt = ids(6, 12)
        turns = [ids(1, 4) for _ in range(5)]
        episodes += [
            trajectory_of((prompt, turn, 0.0), (prompt + turn + [7], ids(1, 4), 1.0), group=group)
            for turn in turns
        ]
        episodes += [episodes[-1], trajectory_of((prompt, turns[-1], 0.0), group=group)]
        episodes += [trajectory_of(([9] + prompt, turns[0], 0.0), group=group)]
    return collate([row for i, t in enumerate(episodes) for row in trajectory_rows(t, i)])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("max_tokens", [70, 10_000])
def test_a_tree_has_the_rows_logprobs_values_and_gradient(model, seed, max_tokens):
    batch, critic = rows_that_begin_alike(seed), Critic(model)
    # Of its own generator: with the process's, the draw depends on the tests that ran before.
    generator = torch.Generator().manual_seed(seed)
    torch.nn.init.normal_(critic.value.weight, generator=generator)
    weights_BT = torch.randn(batch.mask_BT.shape, generator=generator)
    plain = *action_logprobs(model, batch, 0.7, entropy=True), action_values(critic, batch)
    (sum(plain) * weights_BT).sum().backward()
    expected = [p.grad.clone() for p in critic.parameters()]
    critic.zero_grad()

    seen = []
    for index_B, part in micro_batches_of(batch, max_tokens):
        assert isinstance(part, SharedRows)
        ours = *action_logprobs(model, part, 0.7, entropy=True), action_values(critic, part)
        T = part.ids_BT.shape[1]
        for mine, its in zip(ours, plain, strict=True):
            torch.testing.assert_close(mine, its[index_B, :T].detach(), atol=1e-5, rtol=1e-5)
        (sum(ours) * weights_BT[index_B, :T]).sum().backward()
        seen += index_B.tolist()
    assert sorted(seen) == list(range(len(batch)))
    for mine, gradient in zip([p.grad for p in critic.parameters()], expected, strict=True):
        torch.testing.assert_close(
            mine, gradient, atol=2e-5 * float(gradient.abs().max()) + 1e-6, rtol=1e-4
        )
    critic.zero_grad()


def test_a_tree_computes_equal_beginnings_once():
    prompt, answers = [1, 2, 3, 4, 5], [[6, 7], [6, 7], [6, 8], [9]]
    episodes = [trajectory_of((prompt, answer, 0.0), group="g") for answer in answers]
    batch = collate([row for i, t in enumerate(episodes) for row in trajectory_rows(t, i)])
    [(_, part)] = micro_batches_of(batch, 10_000)
    assert part.tree.ids_PN.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 9]]
    assert part.tree.depths_PN.tolist() == [[0, 1, 2, 3, 4, 5, 6, 6, 5]]
    assert type(part[torch.tensor([1, 3])]) is Batch  # other rows have another tree


def test_a_gradient_of_shared_beginnings_repeats_to_the_bit_with_two_threads(model):
    """Hundreds of actions share a parent, so that the threads add to the same states."""
    g = torch.Generator().manual_seed(0)
    episodes = []
    for answer in torch.randint(0, VOCAB, (700, 3), generator=g).tolist():
        episodes.append(trajectory_of(([1, 2, 3, 4, 5], answer, 0.0), group="g"))
    batch = collate([row for i, t in enumerate(episodes) for row in trajectory_rows(t, i)])
    [(_, part)] = micro_batches_of(batch, 10_000)
    assert isinstance(part, SharedRows)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    gradients = set()
    try:
        for _ in range(20):
            model.zero_grad()
            action_logprobs(model, part)[0].sum().backward()
            gradients.add(model.embed.weight.grad.numpy().tobytes())
    finally:
        torch.set_num_threads(threads)
        model.zero_grad()
    assert len(gradients) == 1


def test_rows_without_common_beginnings_stay_rows(batch):
    assert not any(isinstance(part, SharedRows) for _, part in micro_batches_of(batch, 10_000))


# ------------------------------------------------------------------------------------ micro-batches


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 200))
def test_micro_batches_are_a_partition_that_fits(lengths, max_tokens):
    lengths_B = torch.tensor(lengths)
    parts = list(micro_batches(lengths_B, max_tokens))
    assert sorted(i for part in parts for i in part.tolist()) == list(range(len(lengths)))
    for part in parts:
        assert len(part) == 1 or len(part) * int(lengths_B[part].max()) <= max_tokens
    longest = [int(lengths_B[part].max()) for part in parts]
    assert longest == sorted(longest, reverse=True)  # rows of similar length stand together


def test_micro_batches_of_some_rows_hold_these_rows():
    lengths_B = torch.tensor([5, 9, 5, 7, 5])
    parts = list(micro_batches(lengths_B, 14, rows=torch.tensor([4, 1, 3])))
    assert [part.tolist() for part in parts] == [[1], [3, 4]]
    assert list(micro_batches(lengths_B, 14, rows=torch.tensor([], dtype=torch.long))) == []
