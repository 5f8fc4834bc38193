"""Room 5, the engine: its cache against a full forward pass, its noise against its neighbours, its
slots, its failures."""

from __future__ import annotations

import asyncio
import math
import random
import time

import pytest
import torch
from conftest import random_model
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1.core import Generation, Sampling
from agent_r1.model.decoder import causal_attention
from agent_r1.model.sampler import LocalPolicy
from agent_r1.model.sampling import sample_tokens
from agent_r1.rollout.episode import Task, derive_seed
from agent_r1.rollout.rollouts import run_episodes
from agent_r1.rollout.setup import make_loop
from agent_r1.rollout.training_rows import collate, trajectory_rows
from agent_r1.search.index import Hit
from agent_r1.search.searcher import Searcher
from agent_r1.training.forward import action_logprobs

VOCAB, STOP = 60, 0
GREEDY = Sampling(max_tokens=12, temperature=0.0)


@pytest.fixture(scope="module")
def model():
    return random_model(vocab=VOCAB, seed=3, max_position=128, tied=False)


def make_policy(model, slots=8, max_context=128, stop=(STOP,)) -> LocalPolicy:
    return LocalPolicy(model, stop, slots=slots, max_context=max_context)


def prompt(seed: int, length: int = 10) -> list[int]:
    return random.Random(seed).choices(range(1, VOCAB), k=length)


@torch.no_grad()
def next_logprobs(model, ids: list[int]) -> torch.Tensor:
    """log pi(. | ids) by one plain pass over everything."""
    ids_BT = torch.tensor([ids])
    hidden = model(ids_BT, torch.arange(len(ids))[None], causal_attention)
    return model.logits(hidden)[0, -1].log_softmax(-1)


def greedy_by_hand(
    model, ids: list[int], max_tokens: int, stop=(STOP,)
) -> tuple[list[int], list[float]]:
    """A full forward pass for each token."""
    tokens, logprobs = [], []
    for _ in range(max_tokens):
        row = next_logprobs(model, ids + tokens)
        tokens.append(int(row.argmax()))
        logprobs.append(row.max().item())
        if tokens[-1] in stop:
            break
    return tokens, logprobs


def assert_greedy(model, ids, generation: Generation, max_tokens=12, stop=(STOP,)) -> None:
    tokens, logprobs = greedy_by_hand(model, ids, max_tokens, stop)
    assert generation.token_ids == tokens
    assert generation.logprobs == pytest.approx(logprobs, abs=1e-4)


def assert_logprobs(model, ids, generation: Generation, temperature=1.0) -> None:
    """Recorded log-probs are those of a full pass, whatever was sampled."""
    ids = list(ids)
    for token, logprob in zip(generation.token_ids, generation.logprobs, strict=True):
        row = (next_logprobs(model, ids) / temperature).log_softmax(-1)
        assert logprob == pytest.approx(row[token].item(), abs=1e-4)
        ids.append(token)


# ------------------------------------------------------------------------ the cache tells the truth


@pytest.mark.parametrize("slots", [8, 3])
def test_decoding_over_several_turns_equals_a_full_forward_pass(model, slots):
    """Five episodes of different lengths, four turns each, tool results of different lengths in
    between, and a slot for each of them, or not."""

    async def episode(policy, number):
        ids = prompt(number, 5 + 7 * number)
        for turn in range(4):
            generation = await policy.generate(ids, GREEDY, f"s{number}")
            done.append((list(ids), generation))
            for _ in range(number):
                await asyncio.sleep(0)  # tools take their time
            ids = ids + generation.token_ids + prompt(100 + turn, 1 + (number + turn) % 5)
        policy.release(f"s{number}")

    async def main():
        await asyncio.gather(*(episode(policy, number) for number in range(5)))

    done, policy = [], make_policy(model, slots=slots)
    asyncio.run(main())
    assert len(done) == 20
    for ids, generation in done:
        assert_greedy(model, ids, generation)
    assert not policy._slot_of and not policy._running and not policy._waiting


def test_equal_conversations_are_computed_once_until_they_part(model, monkeypatch):
    """Eight samples of a prompt, two turns each: every log-probability is that of a full pass, from
    far fewer tokens."""
    computed, forward = [], type(model).forward

    def counted(self, ids_BT, *rest):
        computed.append(ids_BT.numel())
        return forward(self, ids_BT, *rest)

    async def episode(number):
        # A low temperature, so that samples agree for a while and then part.
        sampling = Sampling(max_tokens=8, temperature=0.05, seed=number)
        first = await policy.generate(prompt(1), sampling, f"s{number}")
        ids = prompt(1) + first.token_ids + prompt(2, 5)
        return first, ids, await policy.generate(ids, sampling, f"s{number}")

    async def main():
        return await asyncio.gather(*(episode(number) for number in range(8)))

    policy = make_policy(model)
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "forward", counted)
        episodes = asyncio.run(main())
    assert 1 < len({tuple(second.token_ids) for _, _, second in episodes}) < 8
    for first, ids, second in episodes:
        assert_logprobs(model, prompt(1), first, 0.05)
        assert_logprobs(model, ids, second, 0.05)
    assert sum(computed) < 0.7 * sum(
        len(ids) + len(second.token_ids) for _, ids, second in episodes
    )


def test_only_new_tokens_are_read(model):
    """Turn two reads the tool's tokens and the last sampled one, which was never fed to the
    model."""

    async def main():
        first = await policy.generate(prompt(0, 20), GREEDY, "s")
        assert policy.stats.prefill_tokens == 20
        ids = prompt(0, 20) + first.token_ids + prompt(1, 4)
        second = await policy.generate(ids, GREEDY, "s")
        assert policy.stats.prefill_tokens == 20 + 1 + 4
        return ids, second

    policy = make_policy(model)
    assert_greedy(model, *asyncio.run(main()))


def test_a_rewritten_context_reads_what_differs(model):
    async def main():
        await policy.generate(prompt(0, 20), GREEDY, "s")
        policy.stats.prefill_tokens = 0
        rewritten = prompt(0, 20)[:15] + prompt(2, 9)
        generation = await policy.generate(rewritten, GREEDY, "s")
        assert policy.stats.prefill_tokens == 9
        shorter = rewritten[
            :18
        ]  # a prefix of what is cached: its last token is read again, for its hidden state
        again = await policy.generate(shorter, GREEDY, "s")
        assert policy.stats.prefill_tokens == 9 + 1
        return (rewritten, generation), (shorter, again)

    policy = make_policy(model)
    for ids, generation in asyncio.run(main()):
        assert_greedy(model, ids, generation)


def test_samples_of_one_prompt_read_it_once(model):
    async def main():
        samplings = [Sampling(12, 1.0, seed=i) for i in range(6)]
        calls = [policy.generate(prompt(0, 20), s, f"s{i}") for i, s in enumerate(samplings)]
        calls.append(policy.generate(prompt(1, 9), samplings[0], "other"))
        return await asyncio.gather(*calls)

    policy = make_policy(model)
    *group, other = asyncio.run(main())
    assert policy.stats.prefill_tokens == 20 + 9
    assert len({tuple(g.token_ids) for g in group}) == 6
    for generation in group:
        assert_logprobs(model, prompt(0, 20), generation)
    assert_logprobs(model, prompt(1, 9), other)


def test_pairs_of_twins_that_keep_beginnings_of_different_length(model):
    """Two pairs of equal prompts, read together: one pair keeps 15 tokens, the other 3.

    While twins sample the same tokens, only the first one's cache is read. A second turn, in which
    they differ, reads all four.
    """

    async def ask(prompts):
        calls = [policy.generate(ids, GREEDY, name) for name, ids in prompts.items()]
        return dict(zip(prompts, await asyncio.gather(*calls), strict=True))

    async def main():
        for name in ("a", "b"):
            await policy.generate(prompt(0, 20), GREEDY, name)
        for name in ("c", "d"):
            await policy.generate(prompt(1, 20), GREEDY, name)
        long = prompt(0, 20)[:15] + prompt(2, 8)
        short = prompt(1, 20)[:3] + prompt(3, 20)
        first = {"a": long, "b": long, "c": short, "d": short}
        turns = await ask(first)
        second = {}
        for seed, name in enumerate(first):
            second[name] = first[name] + turns[name].token_ids + prompt(seed, 5)
        return [(first, turns), (second, await ask(second))]

    policy = make_policy(model)
    for prompts, turns in asyncio.run(main()):
        for name, ids in prompts.items():
            assert_greedy(model, ids, turns[name])


def test_recorded_logprobs_are_what_the_trainer_recomputes(micro, chat, cloned_model):
    """Whole episodes in TinyHop, tools and all, sampled at a temperature that is not 1."""
    config = micro.config
    policy = LocalPolicy(
        cloned_model, chat.stop_ids, slots=6, max_context=config.rollout.max_context
    )
    loop = make_loop(policy, chat, micro.tools, config.rollout, config.env)
    tasks = [
        Task(row, str(i), str(i), derive_seed(0, i)) for i, row in enumerate(micro.rows("val") * 2)
    ]
    trajectories = asyncio.run(run_episodes(loop, tasks, Sampling(48, temperature=0.7)))
    batch = collate([row for i, t in enumerate(trajectories) for row in trajectory_rows(t, i)])
    assert max(len(t.steps) for t in trajectories) > 1 and batch.mask_BT.sum() > 300
    with torch.no_grad():
        logprobs_BT, _ = action_logprobs(cloned_model, batch, temperature=0.7)
    assert (logprobs_BT - batch.logprobs_BT).abs().max() < 1e-4


# --------------------------------------------------------------------- noise belongs to the request


def test_the_same_seed_gives_the_same_tokens_alone_and_in_company(model):
    wanted, sampling = prompt(5, 11), Sampling(12, 1.0, seed=42)

    def alone():
        return asyncio.run(make_policy(model).generate(wanted, sampling, "s"))

    async def company():
        policy = make_policy(model, slots=5)
        others = [policy.generate(prompt(i, 3 + i), Sampling(3 + i, 1.3, seed=i)) for i in range(9)]
        *_, mine = await asyncio.gather(*others, policy.generate(wanted, sampling, "s"))
        return mine

    first, second, third = alone(), alone(), asyncio.run(company())
    assert first.token_ids == second.token_ids == third.token_ids
    assert first.logprobs == second.logprobs == pytest.approx(third.logprobs, abs=1e-4)
    another = asyncio.run(make_policy(model).generate(wanted, Sampling(12, 1.0, seed=43), "s"))
    assert another.token_ids != first.token_ids


# ------------------------------------------------------------------------------------------- limits


def test_a_turn_ends_with_the_stop_token_or_at_its_limit(model):
    wanted = prompt(0)
    tokens, _ = greedy_by_hand(model, wanted, 12, stop=())
    assert len(set(tokens)) > 4  # a text with some variety
    stop = tokens[5]
    until = tokens.index(stop) + 1
    stopped = asyncio.run(make_policy(model, stop=(stop, 59)).generate(wanted, GREEDY, "s"))
    assert (stopped.token_ids, stopped.finish_reason) == (
        tokens[:until],
        "stop",
    )  # the stop token included
    cut = asyncio.run(
        make_policy(model, stop=(stop,)).generate(wanted, Sampling(until - 1, 0.0), "s")
    )
    assert (cut.token_ids, cut.finish_reason) == (tokens[: until - 1], "length")
    one = asyncio.run(make_policy(model, stop=(stop,)).generate(wanted, Sampling(1, 0.0), "s"))
    assert one.token_ids == tokens[:1]
    exact = asyncio.run(
        make_policy(model, stop=(stop,)).generate(wanted, Sampling(until, 0.0), "s")
    )
    assert exact.finish_reason == "stop"  # a turn that ends with its last token was not cut off


def test_the_context_is_a_limit_too(model):
    policy = make_policy(model, max_context=16, stop=())
    generation = asyncio.run(policy.generate(prompt(0, 10), GREEDY, "s"))
    assert (len(generation.token_ids), generation.finish_reason) == (6, "length")
    assert_greedy(model, prompt(0, 10), generation, max_tokens=6, stop=())
    brim = asyncio.run(policy.generate(prompt(1, 15), GREEDY, "t"))
    assert_greedy(model, prompt(1, 15), brim, max_tokens=1, stop=())


def test_a_full_neighbour_is_left_in_peace(model):
    """An episode whose context is full rides along in its slot while others decode: nothing of it
    may be overwritten."""

    async def main():
        full = await policy.generate(prompt(0, 20), Sampling(12, 0.0), "full")
        await policy.generate(prompt(1, 4), Sampling(12, 0.0), "other")  # decodes past the full one
        shorter = (prompt(0, 20) + full.token_ids)[:25]
        return shorter, await policy.generate(shorter + [7], Sampling(3, 0.0), "full")

    policy = make_policy(model, max_context=32, stop=())
    shorter, generation = asyncio.run(main())
    assert_greedy(model, [*shorter, 7], generation, max_tokens=3, stop=())


# -------------------------------------------------------------------------------------------- slots


@pytest.fixture
def delays(monkeypatch):
    """What the engine and its episodes sleep."""
    noted, sleep = [], asyncio.sleep

    async def noting(delay):
        noted.append(delay)
        await sleep(delay)

    monkeypatch.setattr(asyncio, "sleep", noting)
    return noted


async def visit_a_tool(policy, number: int, seconds: float) -> None:
    first = await policy.generate(prompt(number), GREEDY, f"s{number}")
    await asyncio.sleep(seconds)
    await policy.generate(prompt(number) + first.token_ids + [9, 8], GREEDY, f"s{number}")
    policy.release(f"s{number}")


@pytest.mark.parametrize("slots", [2, 8])
def test_no_clock_decides_who_shares_a_batch(model, delays, slots):
    """All episodes are at their tool at once, and some wait for a slot: the machine's speed must
    not change a bit."""

    async def main():
        await asyncio.gather(*(visit_a_tool(policy, number, 0) for number in range(5)))

    policy = make_policy(model, slots=slots)
    asyncio.run(main())
    assert set(delays) == {0}


class SlowIndex:
    """An index in which some searches take longer, as a busy machine decides."""

    def __init__(self, seconds):
        self.seconds = seconds

    def search(self, queries, top_k):
        time.sleep(self.seconds.random() * 0.02 if self.seconds else 0)
        return [[Hit(query, query, "", 1.0)] for query in queries]


def batches_beside(model, seconds) -> list[list[str]]:
    """Episodes that generate and search, each in its own rhythm: who decoded beside whom, pass by
    pass."""

    async def episode(number):
        ids = prompt(number, 5 + number)
        for turn in range(4):
            said = await policy.generate(
                ids, Sampling(3 + (number + turn) % 4, temperature=0.0), f"s{number}"
            )
            hits = await searcher.search(f"{number % 5}.{turn}", 1)
            ids = ids + said.token_ids + prompt(len(hits), 2 + number % 2)
        policy.release(f"s{number}")

    async def main():
        await asyncio.gather(*(episode(number) for number in range(9)))

    def noting():
        batches.append([request.session for request in policy._running.values()])
        decode()

    batches, policy, searcher = [], make_policy(model, slots=5), Searcher(SlowIndex(seconds))
    decode, policy._decode = policy._decode, noting
    asyncio.run(main())
    assert searcher.stats.batches > 5
    return batches


def test_the_time_that_a_search_takes_changes_no_batch(model):
    assert batches_beside(model, None) == batches_beside(model, random.Random(1))


def test_slots_of_finished_episodes_are_closed_up(model):
    """When gaps open, live conversations move to the front: their caches must move with them."""

    async def main():
        firsts = await asyncio.gather(
            *(policy.generate(prompt(i, 6 + i), GREEDY, f"s{i}") for i in range(8))
        )
        for i in (0, 1, 2, 4, 6):
            policy.release(f"s{i}")
        seconds = []
        for i in (3, 5, 7):
            ids = prompt(i, 6 + i) + firsts[i].token_ids + [5]
            seconds.append((ids, await policy.generate(ids, GREEDY, f"s{i}")))
        assert sorted(policy._slot_of.values()) == [0, 1, 2]
        return seconds

    policy = make_policy(model)
    before = policy.stats
    for ids, generation in asyncio.run(main()):
        assert_greedy(model, ids, generation)
    assert before.prefill_tokens == sum(6 + i for i in range(8)) + 3 * 2  # moved, not read again


def test_a_session_can_be_released_in_mid_flight(model):
    """One slot: its owner is cancelled while it decodes, another one while it waits in line; the
    third gets the slot."""

    async def main():
        doomed = asyncio.create_task(policy.generate(prompt(1), Sampling(60, 0.0), "doomed"))
        queued = asyncio.create_task(policy.generate(prompt(2), GREEDY, "queued"))
        fine = asyncio.create_task(policy.generate(prompt(3), GREEDY, "fine"))
        while not policy._running:
            await asyncio.sleep(0)
        for task, session in ((queued, "queued"), (doomed, "doomed")):
            task.cancel()
            policy.release(session)
        return await asyncio.wait_for(fine, 20)

    policy = make_policy(model, slots=1, stop=())
    assert_greedy(model, prompt(3), asyncio.run(main()), stop=())
    assert list(policy._slot_of) == ["fine"]


def test_one_engine_serves_one_event_loop_after_another(model):
    """The trainer calls `asyncio.run` once a step; a loop that was broken off must not hang the
    next one."""
    policy = make_policy(model)
    assert_greedy(model, prompt(0), asyncio.run(policy.generate(prompt(0), GREEDY, "a")))

    async def broken_off():
        task = asyncio.create_task(policy.generate(prompt(1), Sampling(60, 0.0), "b"))
        while not policy._running:
            await asyncio.sleep(0)
        task.cancel()
        policy.release("b")
        raise KeyError("elsewhere")

    with pytest.raises(KeyError):
        asyncio.run(broken_off())
    assert_greedy(
        model, prompt(2), asyncio.run(asyncio.wait_for(policy.generate(prompt(2), GREEDY, "c"), 20))
    )


def test_new_weights_are_taken_over():
    ours, theirs = (random_model(vocab=VOCAB, seed=seed, tied=False) for seed in (1, 2))
    policy = make_policy(ours)
    policy.stats.decode_tokens = 5
    policy.sync(theirs)
    assert policy.stats.decode_tokens == 0
    assert_greedy(theirs, prompt(0), asyncio.run(policy.generate(prompt(0), GREEDY)))
    policy.sync(ours)  # one model for both: nothing to copy
    assert_greedy(theirs, prompt(0), asyncio.run(policy.generate(prompt(0), GREEDY)))


# ----------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("part", ["decode", "read"])
def test_a_failure_of_the_engine_reaches_everyone_who_waits(model, part):
    async def main():
        calls = [
            policy.generate(prompt(i), GREEDY, f"s{i}") for i in range(6)
        ]  # two of them get no slot
        return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 20)

    def fail(*args):
        raise RuntimeError("out of memory")

    policy = make_policy(model, slots=4)
    works = getattr(policy.cache, part)
    setattr(policy.cache, part, fail)
    errors = asyncio.run(main())
    assert [str(e) for e in errors] == ["out of memory"] * 6
    setattr(policy.cache, part, works)  # and it is of use again
    for i in range(6):
        policy.release(f"s{i}")
    assert_greedy(model, prompt(0), asyncio.run(policy.generate(prompt(0), GREEDY)))


# ------------------------------------------------------------------------------------ sample_tokens


def draw(logits, uniform, temperature=1.0):
    """`sample_tokens` of one distribution at many uniform numbers."""
    uniform = torch.as_tensor(uniform, dtype=torch.float32)
    B = len(uniform)
    logits_BV = torch.as_tensor(logits, dtype=torch.float32).expand(B, -1)
    return sample_tokens(logits_BV, torch.full((B, 1), temperature), uniform)


PROBS = torch.tensor([0.4, 0.0, 0.3, 0.2, 0.06, 0.04])


def test_the_uniform_number_picks_by_the_cumulative_distribution():
    tokens, logprobs, _ = draw(
        PROBS.log(), [0.0, 0.39, 0.41, 0.69, 0.71, 0.89, 0.91, 0.959, 0.961, 0.9999999]
    )
    assert tokens.tolist() == [0, 0, 2, 2, 3, 3, 4, 4, 5, 5]
    assert logprobs.tolist() == pytest.approx(
        [math.log(PROBS[t]) for t in tokens.tolist()], abs=1e-5
    )
    for tail in ([], [-math.inf] * 5):
        assert (
            draw([0.1] * 1000 + tail, [1 - 2**-24])[0].item() == 999
        )  # the largest number below one


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_samples_follow_the_distribution(temperature):
    """Chi-square at a fixed seed; 4 degrees of freedom, so 18.5 is exceeded once in a thousand
    seeds."""
    expected = (PROBS.log() / temperature).softmax(-1)
    n = 20_000
    uniform = torch.rand(n, generator=torch.Generator().manual_seed(0))
    tokens, logprobs, entropies = draw(PROBS.log(), uniform, temperature)
    counts, support = tokens.bincount(minlength=6).float(), expected > 0
    assert counts[~support].sum() == 0
    chi_square = ((counts - n * expected)[support] ** 2 / (n * expected[support])).sum()
    assert chi_square < 18.5
    assert logprobs.tolist() == pytest.approx(expected.log()[tokens].tolist(), abs=1e-4)
    assert entropies.tolist() == pytest.approx(
        [-sum(p * math.log(p) for p in expected.tolist() if p)] * n, abs=1e-4
    )


def test_a_batch_may_mix_temperatures_and_zero_takes_the_most_likely_token():
    logits = PROBS.log().expand(3, -1)
    temperature = torch.tensor([[0.0], [1.0], [0.25]])
    tokens, logprobs, _ = sample_tokens(logits, temperature, torch.full((3,), 0.95))
    assert tokens.tolist() == [0, 4, 2]
    sharp = (PROBS.log() / 0.25).log_softmax(-1)[2].item()
    assert logprobs.tolist() == pytest.approx([math.log(0.4), math.log(0.06), sharp], abs=1e-5)


@settings(deadline=None)
@given(
    st.lists(st.floats(-40, 40), min_size=2, max_size=30),
    st.floats(0, 1, exclude_max=True, width=32),
    st.sampled_from([0.0, 0.3, 1.0, 3.0]),
)
def test_a_token_of_probability_zero_is_never_drawn(logits, uniform, temperature):
    banned = len(logits)
    tokens, logprobs, entropies = draw([-math.inf, *logits, -math.inf], [uniform], temperature)
    assert 1 <= tokens[0] <= banned and math.isfinite(logprobs[0])
    assert 0 <= entropies[0] <= math.log(banned) + 1e-5
