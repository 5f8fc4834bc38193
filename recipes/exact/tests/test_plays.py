"""The enumeration of plays, against brute force and against samples, and what it refuses."""

import asyncio
import math
import random
from itertools import product

import pytest
import torch
from conftest import fails_with

from agent_r1 import (
    AgentEnvLoop,
    LocalPolicy,
    Observation,
    Sampling,
    StepResult,
    Task,
    run_episodes,
    token_logprobs,
)
from agent_r1_recipes.exact.rare import logprobs_of, rare_chance
from agent_r1_recipes.exact.stop import TURNS, Stop, stop_agent, stop_rows, stop_trees
from agent_r1_recipes.exact.tree import Expansion, Tree, enumerate_plays, sample_rest
from agent_r1_recipes.exact.truth import (
    Truth,
    entropy,
    expectation,
    is_success,
    of_k,
    pass_all,
    pass_at,
    turn_values,
)


@pytest.fixture(scope="module")
def agent():
    return stop_agent(seed=1, clone_steps=12)


@pytest.fixture(scope="module")
def trees(agent):
    return stop_trees(agent)


def reward(trajectory):
    return trajectory.reward


def right(trajectory):
    """In Stop, whether the last word was the right one; it alone pays 1."""
    return float(trajectory.steps[-1].reward == 1)


def by_hand(agent, row):
    """Every play of Stop: words until one is not `go`, with rewards by the rules of the page."""
    words = agent.chat.tokenizer.convert_ids_to_tokens(range(agent.model.shape.vocab_size))
    answer = row["reward_model"]["ground_truth"][0]
    for turns in range(1, TURNS + 1):
        for last in words:
            if (last == "go") == (turns == TURNS) or last != "go":
                yield (
                    ["go"] * (turns - 1) + [last],
                    0.2 * (turns - 1) + (0.2 if last == "go" else float(last == answer)),
                )


def test_all_histories_are_those_of_brute_force(agent, trees):
    for row, tree in zip(stop_rows(), trees, strict=True):
        by_words = {}
        for play in tree.plays:
            ids = [token for step in play.trajectory.steps for token in step.action_ids]
            by_words[tuple(agent.chat.tokenizer.convert_ids_to_tokens(ids))] = play
        assert len(by_words) == len(tree.plays) == 103
        expected = {tuple(words): paid for words, paid in by_hand(agent, row)}
        assert by_words.keys() == expected.keys()
        for words, play in by_words.items():
            assert play.trajectory.reward == pytest.approx(expected[words])
    # The probability, by one plain pass over the whole conversation.
    for play in random.Random(0).sample(trees[4].plays, 20):
        last = play.trajectory.steps[-1]
        ids = last.observation_ids + last.action_ids
        logprobs_T = token_logprobs(agent.model, ids)
        chosen = [logprobs_T[len(step.observation_ids)] for step in play.trajectory.steps]
        assert play.logprob == pytest.approx(float(sum(chosen)), abs=1e-5)
        assert play.logprob == pytest.approx(sum(last.action_logprobs[0] for last in
                                                 play.trajectory.steps), abs=1e-6)  # fmt: skip


def test_all_plays_have_probability_one_and_nothing_leaves(trees):
    for tree in trees:
        assert tree.share == pytest.approx(1, abs=1e-6)
        assert sum(tree.exits()) == pytest.approx(0, abs=1e-6)
        truth = expectation(tree, reward, 0, 2)
        assert truth.high - truth.low < 1e-5 and truth.error == 0


def samples(agent, row, count, seed=0):
    policy = LocalPolicy(agent.model, agent.chat.stop_ids, slots=64, max_context=64)
    flow = agent.player().flow
    loop = AgentEnvLoop(policy, agent.chat, flow.limits, lambda row: Stop())
    tasks = [Task(row, "g", f"s{i}", seed * 1_000_003 + i) for i in range(count)]
    return asyncio.run(
        run_episodes(loop, tasks, Sampling(flow.limits.max_tokens_per_turn), None, 64)
    )


def test_sampled_episodes_agree_with_the_sum(agent, trees):
    row = stop_rows()[4]
    rewards = torch.tensor([t.reward for t in samples(agent, row, 600)], dtype=torch.float64)
    truth = expectation(trees[4], reward, 0, 2)
    assert abs(float(rewards.mean()) - truth.estimate) < 3 * float(rewards.std()) / math.sqrt(600)


@pytest.fixture(scope="module")
def long_turns(agent):
    """Turns of up to two tokens, so that a turn may also end by its stop token. A tree of nine
    tenths, and one that leaves next to nothing out."""
    agent.config.rollout.max_tokens_per_turn = 2
    rows = [stop_rows()[4]]
    [small] = enumerate_plays(agent, rows, 0.5, samples=400, seed=3)
    [large] = enumerate_plays(agent, rows, 0.97, max_tokens=60_000)
    # Other tests of this file share the agent.
    agent.config.rollout.max_tokens_per_turn = 1
    return small, large


def test_the_sampled_rest_has_no_bias(long_turns):
    small, large = long_turns
    assert 0.5 <= small.share < 0.8 and large.share > small.share
    assert sum(small.exits()) == pytest.approx(small.rest, abs=1e-5)
    logprobs = {play.logprob for play in small.plays}
    for measure in (reward, right):
        wide = expectation(small, measure, 0, 2)
        narrow = expectation(large, measure, 0, 2)
        assert wide.low <= narrow.low + 1e-9 and narrow.high <= wide.high + 1e-9
        assert narrow.low - 3 * wide.error < wide.estimate < narrow.high + 3 * wide.error
    assert not logprobs & {play.logprob for play in small.rest_plays}


def test_a_sampled_play_has_the_probability_that_a_pass_computes(agent, long_turns):
    small, _ = long_turns
    plays = small.rest_plays[:20] + small.plays[:20]
    for play, logprob in zip(
        plays, logprobs_of(agent, [play.trajectory for play in plays]), strict=True
    ):
        assert play.logprob == pytest.approx(logprob, abs=1e-4)


def test_the_budget_of_tokens_ends_the_expansion(agent):
    [tree] = enumerate_plays(agent, [stop_rows()[0]], 1.0, max_tokens=20)
    assert tree.tokens >= 20 and tree.share < 1


# ----------------------------------------------------------------------------------------- measures


def test_pass_at_k_and_pass_all_k_are_those_of_k_independent_plays():
    chance = 0.3
    for k in (1, 2, 3):
        outcomes = list(product((0, 1), repeat=k))
        weight = {o: math.prod(chance if x else 1 - chance for x in o) for o in outcomes}
        assert pass_at(k, chance) == pytest.approx(sum(weight[o] for o in outcomes if any(o)))
        assert pass_all(k, chance) == pytest.approx(sum(weight[o] for o in outcomes if all(o)))
    assert pass_at(64, 1e-9) == pytest.approx(64e-9)  # 1 - (1 - p)^k would round
    wide = of_k([Truth(0.2, 0.4, 0.3, 0.01), Truth(1, 1, 1, 0)], pass_at, 2)
    assert (wide.low, wide.high) == (pytest.approx((0.36 + 1) / 2), pytest.approx((0.64 + 1) / 2))
    assert wide.estimate == pytest.approx((0.51 + 1) / 2)
    assert wide.error == pytest.approx(2 * 0.7 * 0.01 / 2)  # d/dp (1 - (1-p)^2) = 2 (1 - p)


def test_entropy_over_plays(trees):
    chances = [math.exp(play.logprob) for play in trees[0].plays]
    truth = entropy(trees[0])
    assert truth.estimate == pytest.approx(-sum(p * math.log(p) for p in chances))
    cut = Tree(trees[0].row, "cut", trees[0].plays[:60])
    assert entropy(cut).low <= truth.estimate < entropy(cut).high == math.inf


def test_values_and_choices_by_hand(trees):
    values, choices = turn_values(trees[0].plays)
    mean = expectation(trees[0], reward, 0, 2).estimate
    assert values[()].value == pytest.approx(mean, abs=1e-6)
    # Bellman: V is the mean of Q, and Q of `go` is its pay and the V after it.
    first = {key: choice for key, choice in choices.items() if len(key) == 1}
    assert sum(c.chance * c.value for c in first.values()) == pytest.approx(mean, abs=1e-6)
    [go] = {key[:1] for key in choices if len(key) == 2}
    assert choices[go].value == pytest.approx(0.2 + values[go].value, abs=1e-6)


# -------------------------------------------------------------------------------------- rare events


def test_a_guide_finds_what_is_rare(agent, trees):
    """The successes that a small tree lacks, one of them known from the guide."""
    whole = trees[2]
    truth = expectation(whole, right, 0, 1).estimate
    expansion = Expansion(agent, [whole.row], ["0"])
    [small] = expansion.cover(0.3, 10_000)
    assert expectation(small, right, 0, 1).low < truth
    successes = [play for play in whole.plays if right(play.trajectory)]
    rarest = min(successes, key=lambda play: play.logprob)
    known = Tree(whole.row, "0", [rarest])
    found = rare_chance(agent, agent, small, known, right, samples=400, seed=5)
    assert found.bound < truth
    assert found.plays == 1 + sum(right(play.trajectory) for play in small.plays)
    assert abs(found.estimate - truth) < 3 * found.error
    assert found.relative_error == pytest.approx(found.error / found.estimate)


def test_a_success_is_a_score_of_one_or_of_the_threshold(trees):
    best = max(trees[0].plays, key=lambda play: play.trajectory.reward).trajectory
    assert best.score == pytest.approx(2.0)
    assert is_success(None)(best) == is_success(1.5)(best) == 1
    assert is_success(2.5)(best) == 0


def test_an_unknown_range_bounds_nothing_but_a_whole_tree(trees):
    whole = expectation(trees[0], reward, -math.inf, math.inf)
    assert whole.low == whole.high == whole.estimate
    cut = expectation(Tree(trees[0].row, "cut", trees[0].plays[:60]), reward, -math.inf, math.inf)
    assert (cut.low, cut.high) == (-math.inf, math.inf)


# ---------------------------------------------------------------------------------- what is refused


class RandomReply(Stop):
    async def step(self, action):
        result = await super().step(action)
        if result.observation is not None:
            result.observation.messages[0]["content"] = random.choice(("nothing", "one", "two"))
        return result


class RandomReward(Stop):
    async def step(self, action):
        result = await super().step(action)
        result.reward += random.random()
        return result


class EndsOnce(Stop):
    """Ends each history once; the next time, it goes on there."""

    ends: set[tuple[str, ...]] = set()

    def reset(self, row):
        self.words = [row["prompt"][0]["content"]]
        return super().reset(row)

    async def step(self, action):
        result = await super().step(action)
        self.words.append(action.text)
        history = tuple(self.words)
        if result.observation is None and history in self.ends:
            return StepResult(Observation([{"role": "tool", "content": "nothing"}]), result.reward)
        if result.observation is None:
            self.ends.add(history)
        return result


class Broken(Stop):
    async def step(self, action):
        raise OSError("no disk")


@pytest.mark.parametrize(
    ("world", "code", "text"),
    [
        (RandomReply, "random_environment", "replies are not a function of the history"),
        (RandomReward, "random_environment", "outcome is not a function of the history"),
        (EndsOnce, "random_environment", "ended an episode, and then they did not"),
        (Broken, "environment_failed", "no disk"),
    ],
)
def test_a_world_that_cannot_be_enumerated_is_refused(agent, monkeypatch, world, code, text):
    monkeypatch.setattr(agent, "make_env", lambda row: world())
    with fails_with(code, text):
        stop_trees(agent, stop_rows()[:2])


def test_a_flow_with_sessions_of_its_own_is_refused(agent):
    with fails_with("unfit_flow", "a session of its own"):
        asyncio.run(agent.player().flow.policy.generate([1], Sampling(1), "another"))


def test_no_samples_means_no_rest(agent):
    expansion = Expansion(agent, [stop_rows()[0]], ["0"])
    trees = expansion.cover(0.3, 10_000)
    sample_rest(agent, trees, 0, seed=0)
    assert not trees[0].rest_plays
    assert math.isnan(expectation(trees[0], reward, 0, 2).error)
