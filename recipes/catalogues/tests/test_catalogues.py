"""Shop and papers: pages and actions, the published rewards by hand, disjoint splits, an expert
that reaches the optimum, and chance that does not."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from statistics import fmean

import pytest
from building import row_of, trust
from conftest import ScriptedPolicy, call, make_env_loop

from agent_r1 import Sampling, StopReason, Task, load_config, make_env, run_episodes
from agent_r1_recipes.catalogues import demonstrator, papers, products
from agent_r1_recipes.catalogues.matching import Ranking, ratio, token_set_ratio
from agent_r1_recipes.catalogues.pages import ACTION, NO, Pages
from agent_r1_recipes.catalogues.products import Product, purchase_reward, type_reward

WORLDS = {"webshop-tiny": products, "papers-tiny": papers}


def split(world, name: str, count: int, seed: int = 0) -> list[dict]:
    return list(world.questions(name, count, random.Random(seed)))


def opened(question: dict) -> Pages:
    pages = Pages()
    pages.reset(question["question"], **question["metadata"])
    return pages


def act(pages: Pages, action: str) -> str:
    name, argument = ACTION.fullmatch(action).groups()
    return getattr(pages, name)(argument)


# ----------------------------------------------------------------------------- words and rankings


@pytest.mark.parametrize(
    ("a", "b", "similarity"),
    [
        ("cool powder snow", "powder snow", 1.0),  # all words of one text
        ("essential oil", "essential oils", 2 * 13 / 27),
        ("grey", "gray", 0.75),
        ("x-large", "large", 1.0),  # as in thefuzz: a hyphen is a blank
        ("blue", "", 0.0),
        # common "soft": "soft" with "soft lamp" is 8/13, "soft lamp" with "soft rug" 10/17.
        ("soft lamp", "rug soft", 8 / 12),
    ],
)
def test_sets_of_words_are_compared_as_in_thefuzz(a, b, similarity):
    assert token_set_ratio(a, b) == pytest.approx(similarity) == token_set_ratio(b, a)


def test_a_ratio_counts_the_longest_common_subsequence():
    assert ratio("abcd", "acbd") == 2 * 3 / 8
    assert ratio("", "") == 1.0 and ratio("a", "") == 0.0


def test_bm25_by_hand():
    ranking = Ranking({"a": "red lamp", "b": "lamp lamp lamp lamp", "c": "blue chair"})
    # "red" is in one of three texts, so it is worth more than any number of lamps.
    assert ranking.search("red lamp", 5) == ["a", "b"]
    assert ranking.search("lamp", 1) == ["b"] and ranking.search("table", 5) == []


# -------------------------------------------------------------------------------- the reward

GOAL_PRODUCT = Product(
    "G", "soft steel lamp", 34.0, ("soft", "steel"), query="lamp", category="Home › Lamps › Desk"
)
GOAL = {"code": "G", "attributes": ["soft", "steel"], "options": ["red", "small"], "highest": 40.0}


@pytest.mark.parametrize(
    ("changes", "chosen", "reward"),
    [
        ({}, {"color": "red", "size": "small"}, 1.0),
        ({}, {"color": "red"}, 4 / 5),
        ({}, {}, 3 / 5),
        ({"price": 41.0}, {"color": "red", "size": "small"}, 4 / 5),
        ({"attributes": ("soft",), "name": "soft lamp"}, {"color": "blue"}, 2 / 5),
        # An attribute that only the text has counts, too.
        ({"attributes": (), "description": "Of Steel, and SOFT"}, {}, 3 / 5),
        # Nothing in common with the name: no reward, whatever else is right.
        ({"name": "woollen hat"}, {"color": "red", "size": "small"}, 0.0),
    ],
)
def test_the_reward_of_a_purchase_by_hand(changes, chosen, reward):
    bought = replace(GOAL_PRODUCT, code="B", **changes)
    assert purchase_reward(bought, chosen, GOAL_PRODUCT, GOAL)["reward"] == pytest.approx(reward)


@pytest.mark.parametrize(
    ("name", "query", "category", "share"),
    [
        ("one two three x x", "other", "A › B", 1.0),  # three of ten words
        ("one x", "other", "A › B", 0.5),  # one of ten
        ("one x", "lamp", "A › B", 1.0),  # the same query
        ("one x", "other", "Home › Lamps › Wall", 1.0),  # two equal shelves
        ("x", "lamp", "Home › Lamps › Desk", 0.0),
    ],
)
def test_the_type_of_a_purchase(name, query, category, share):
    goal = replace(GOAL_PRODUCT, name="one two three four five six seven eight nine ten")
    assert type_reward(replace(goal, name=name, query=query, category=category), goal) == share
    long = replace(goal, name=" ".join(f"w{n}" for n in range(20)))
    few = replace(long, name="w1 x", query="other", category="A")
    assert type_reward(few, long) == 0.1  # one of twenty


@pytest.mark.parametrize(
    ("kept", "precision", "recall", "f1"),
    [(2, 1.0, 1.0, 1.0), (1, 1.0, 0.5, 2 / 3), (0, 0.0, 0.0, 0.0), (5, 0.4, 1.0, 0.8 / 1.4)],
)
def test_a_list_of_papers_by_hand(kept, precision, recall, f1):
    catalogue = papers.make_papers()
    (question,) = split(papers, "train", 1)
    goal = json.loads(question["metadata"]["goal"])
    wanted = catalogue.wanted(goal)
    others = [code for code in catalogue.links(goal["code"]).values() if code not in wanted]
    parts = catalogue.reward(goal, None, {}, [*wanted, *others][:kept])
    assert parts == pytest.approx({"reward": f1, "precision": precision, "recall": recall})


# -------------------------------------------------------------------------------- the catalogues


def test_the_catalogues_have_the_size_that_the_page_says():
    assert len(products.make_products().items) == 2000
    assert len(papers.make_papers().items) == 1000
    for paper in papers.make_papers().items.values():
        # No two names on a page begin in the same way.
        assert len({name[:3] for name in (paper.code, *paper.cites)}) == 6


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
def test_splits_share_no_goal_and_a_seed_gives_the_same_goals_again(world):
    goals = {
        name: {json.loads(q["metadata"]["goal"])["code"] for q in split(world, name, 200)}
        for name in ("train", "val", "test")
    }
    assert not goals["train"] & goals["test"] and not goals["train"] & goals["val"]
    assert not goals["val"] & goals["test"]
    assert split(world, "test", 30) == split(world, "test", 30) != split(world, "test", 30, seed=1)
    config = load_config(next(name for name in WORLDS if WORLDS[name] is world))
    questions = {
        name: {q["question"] for q in split(world, name, getattr(config.data, name))}
        for name in ("train", "test")
    }
    assert config.data.test == 200 and len(questions["train"]) > 600
    assert not questions["train"] & questions["test"]


# -------------------------------------------------------------------------------- the pages


def test_what_a_page_does_not_show_cannot_be_clicked():
    pages = opened(split(products, "train", 1)[0])
    assert NO in pages.click("Buy Now") and not pages.done
    first = pages.search("soft lamp")
    assert "no search box" in pages.search("hat") and pages.query == "soft lamp"
    code = pages.results[0]
    other = next(name for name in pages.catalogue.items if name not in pages.results)
    before = pages.state
    assert NO in pages.click(other) and NO in pages.click("Description") and pages.state == before
    assert pages.click(f" {code.upper()} ").splitlines()[1].startswith(code)
    assert pages.click("< Prev") == first


def test_pages_of_results_and_of_a_product():
    pages = opened(split(products, "train", 1)[0])
    first = pages.search("lamp")
    assert first.splitlines()[1] == "Page 1 (Total results: 50)" and "[< Prev]" not in first
    second = pages.click("Next >")
    assert second.splitlines()[1].startswith("Page 2") and "[< Prev]" in second
    for _ in range(8):
        last = pages.click("next >")
    assert last.splitlines()[1].startswith("Page 10") and "[Next >]" not in last
    code = pages.results[45]
    colour, other, _ = pages.catalogue.options(code)["color"]
    page = pages.click(code)
    assert page.splitlines()[2] == f"Price: ${pages.catalogue.items[code].price:g}"
    pages.click(colour)
    assert f"color: {colour}, ({other})" in pages.click(other) and pages.chosen == {"color": other}
    assert "none" in pages.click("Features") and pages.chosen == {"color": other}
    assert f"({other})" in pages.click("< Prev")
    # A new search forgets the choices, as in WebShop.
    assert pages.click("Back to Search").endswith("[Search]") and pages.chosen == {}


def test_links_of_papers_lead_on_and_back():
    question = split(papers, "train", 1)[0]
    pages = opened(question)
    source = pages.goal["code"]
    pages.search(source)
    pages.click(source)
    target = pages.catalogue.items[source].cites[0]
    deeper = pages.catalogue.items[target].cites[1]
    topics = {code: pages.catalogue.items[code].topic for code in (source, target, deeper)}
    page = pages.click(f"On {topics[target]}, by {target}")
    # The page of a cited paper says through which papers it was reached.
    assert page.splitlines()[1] == f"{source} > {target} on {topics[target]} cites"
    link = f"On {topics[deeper]}, by {deeper}"
    # A click on a name that is no link shows the same page again, without a word.
    assert pages.click(deeper) == page and link in page.splitlines()
    pages.click(link)
    assert pages.click("Add to List").splitlines()[1].startswith(f"(listed) {source} > {target}")
    pages.click("Add to List")
    assert pages.kept == [deeper] and pages.trail == [source, target, deeper]
    # What is listed is no link any more.
    page = pages.click("< Prev")
    assert f"(listed) {deeper}" in page.splitlines() and pages.click(link) == page
    assert pages.click("< Prev").splitlines()[1].startswith(source)
    assert pages.click("Back to Search").endswith("[Search]") and pages.kept == [deeper]


def test_two_ways_into_one_state_meet_there():
    question = split(products, "train", 1)[0]
    one, other = opened(question), opened(question)
    for pages, actions in (
        (one, ["click[{0}]", "click[{1}]", "click[{2}]"]),
        (other, ["click[Next >]", "click[< Prev]", "click[{0}]", "click[{2}]", "click[{1}]"]),
    ):
        act(pages, "search[lamp]")
        code = pages.results[0]
        options = pages.catalogue.options(code)
        for action in actions:
            act(pages, action.format(code, options["color"][0], options["size"][0]))
    assert one.state == other.state
    other.click("< Prev")
    assert one.state != other.state


# ------------------------------------------------------------------------------ experts and chance


@pytest.fixture(scope="module")
def played(chat):
    """Episodes of a player in a preset's environment."""

    def play(preset: str, player, count: int, by_tools: bool = False):
        # Generous deadlines: a busy machine must not decide about an episode.
        config = load_config(preset, ["env.tool_timeout_s=300"])
        trust(config.env.name)
        rows = [row_of(q, config.env.name) for q in split(WORLDS[preset], "test", count)]
        histories: dict[str, list] = {}

        def script(session, turn, ids):
            history = histories.setdefault(session, [])
            text = player(rows[int(session)], history, random.Random(f"{session} {turn}"))
            history.append({"role": "assistant", "content": text})
            match = ACTION.fullmatch(text)
            if by_tools:
                argument = {"search": "query", "click": "link"}[match[1]]
                return call(match[1], **{argument: match[2]})
            return text

        loop = make_env_loop(
            ScriptedPolicy(chat, script),
            lambda row: make_env(row, {}, config.env),
            max_context=10**6,
            timeout_s=900,
        )
        tasks = [Task(row, str(i), str(i)) for i, row in enumerate(rows)]
        return asyncio.run(run_episodes(loop, tasks, Sampling(400)))

    return play


@pytest.mark.parametrize("preset", WORLDS)
def test_the_expert_reaches_the_optimum_and_the_demonstrator_does_not(played, preset):
    flawless = played(preset, demonstrator.expert, 40)
    assert fmean(t.score for t in flawless) >= 0.98
    assert {t.stop_reason for t in flawless} == {StopReason.ANSWERED}
    assert {t.score_name for t in flawless} == {"solved"}
    assert all(t.reward == 1.0 for t in flawless)
    assert 0.15 < fmean(t.score for t in played(preset, demonstrator.demonstrate, 80)) < 0.45


def test_actions_may_be_calls_of_tools(played):
    texts = played("webshop-tiny", demonstrator.expert, 4)
    calls = played("webshop-tiny", demonstrator.expert, 4, by_tools=True)
    assert [t.reward for t in calls] == [t.reward for t in texts] == [1.0] * 4
    assert {part for t in texts for part in t.reward_parts} == {
        "type",
        "attributes",
        "options",
        "price",
    }


@pytest.mark.parametrize("preset", WORLDS)
def test_chance_and_an_agent_without_actions_solve_nearly_nothing(played, preset):
    def random_clicks(row, history, rng):
        pages = demonstrator.replay(row, history)
        if pages.query is None:
            return f"search[{rng.choice(row['prompt'][-1]['content'].split())}]"
        return f"click[{rng.choice(pages._links())}]"

    assert fmean(t.score for t in played(preset, random_clicks, 60)) < 0.2
    silent = played(preset, lambda row, history, rng: "search[]", 5)
    assert [t.reward for t in silent] == [0.0] * 5


def test_a_turn_without_an_action_is_told_so(played):
    (episode,) = played("webshop-tiny", lambda row, history, rng: "I would like a lamp", 1)
    assert episode.reward == 0 and episode.stop_reason is StopReason.INVALID_CALLS
