"""The explorer: it sees no solution, and no cloned play shows one."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace

import pytest
from lab.experiments.plan_order import exchange_plan, order_questions
from lab.experiments.quotes import count_quotes

from agent_r1 import (
    AgentR1Error,
    ChatFormat,
    ConfigError,
    ToolCall,
    load_config,
    make_loop,
    save_tokenizer,
    train_tokenizer,
)
from agent_r1_recipes.laptop import cloned
from agent_r1_recipes.laptop.demonstrator import (
    EXPLORERS,
    RENAMES,
    Demonstrator,
    check_behaviours,
    demonstrations,
    mixture_questions,
    tokenizer_texts,
)
from agent_r1_recipes.laptop.explorer import DONE, Explorer, SentenceExplorer
from agent_r1_recipes.laptop.reading import read_facts, read_question
from agent_r1_recipes.laptop.shown import (
    Play,
    count,
    margins_of_next_item,
    shows_solution,
)
from agent_r1_recipes.laptop.tinyhop import make_questions, make_world

PASSAGES = """Sosnum is a book by Dospax from Bumvel.
Bumvel in Landir was founded by Ranran."""
QUESTION = "In which city is the publisher of Sosnum based?"


@pytest.fixture(scope="module")
def world():
    return make_world(random.Random(0), 300, set())


def test_every_chain_question_and_every_passage_is_read_as_it_was_written(world):
    mix = {"1-hop": 1, "2-hop": 1, "3-hop": 2}
    passages = {passage.title: passage.text for passage in world.passages()}
    for question in make_questions(world, random.Random(1), 400, mix):
        relations = [lookup.relation for lookup in question.lookups]
        assert read_question(question.text) == (question.lookups[0].entity, relations)
        for lookup in question.lookups:
            facts = read_facts(passages[lookup.entity], lookup.entity)
            assert facts[lookup.relation] == lookup.value


def test_a_comparison_is_no_chain():
    with pytest.raises(ValueError, match="has 0 readings"):
        read_question("Were Sosnum and Bumvel founded by the same person?")


class Choices(random.Random):
    """Draws that a test has written down."""

    def __init__(self, *choices: str):
        super().__init__()
        self.choices_left = list(choices)

    def choice(self, options):
        assert self.choices_left[0] in options
        return self.choices_left.pop(0)


@pytest.mark.parametrize("result", [PASSAGES, "\n".join(reversed(PASSAGES.splitlines()))])
@pytest.mark.parametrize(
    ("explorer_class", "quotes"),
    [
        (Explorer, (" from Bumvel", " in Landir")),
        (SentenceExplorer, ("Sosnum is a book by Dospax from Bumvel", "Bumvel in Landir")),
    ],
)
def test_an_explorer_writes_the_plan_and_quotes_what_the_drawn_item_names(
    explorer_class, quotes, result
):
    explorer = explorer_class(QUESTION, Choices("publisher", "headquarters"))
    call, thought = explorer.turn("")
    assert call == ToolCall("search", {"query": "Sosnum"})
    assert thought == "plan/publisher/headquarters/answer: plan/publisher"
    call, thought = explorer.turn(result)
    assert call == ToolCall("search", {"query": "Bumvel"})
    assert thought == f"{quotes[0]}/publisher/headquarters"
    # All items but the last are used, so nothing is left to draw from.
    explorer.rng = random.Random(0)
    assert explorer.turn(result) == ("Landir", f"{quotes[1]}/headquarters/answer")


def test_an_item_that_the_passage_lacks_gives_another_fact():
    explorer = Explorer(QUESTION, Choices("headquarters", "author", DONE))
    explorer.turn("")
    answer, thought = explorer.turn(PASSAGES)
    assert (answer, thought) == ("Dospax", " is a book by Dospax/author/answer")


def test_what_was_quoted_by_chance_is_done():
    explorer = Explorer(QUESTION, Choices("headquarters", "publisher", DONE))
    explorer.turn("")
    _, thought = explorer.turn(PASSAGES)
    assert thought == " from Bumvel/publisher/answer"
    # Each relation is drawn once for each time that it stands in the plan.
    explorer = Explorer("Who is the spouse of the spouse of Sosnum?", Choices("spouse", "spouse"))
    explorer.turn("")
    _, thought = explorer.turn("Sosnum from Landir works for Bumvel and married Dospax.")
    assert thought == " and married Dospax/spouse/spouse"


def test_the_order_of_the_plan_does_not_influence_the_draws():
    """Two questions with the same relations in another order: the same items come next."""
    for seed in range(20):
        items = []
        for relations in (["spouse", "employer"], ["employer", "spouse"]):
            explorer = Explorer("Who is the spouse of Sosnum?", random.Random(seed))
            explorer.plan, explorer.items_left = relations, sorted(relations)
            explorer.turn("")
            first = explorer.item
            explorer.turn("")
            items.append((first, explorer.item))
        assert items[0] == items[1]


def play(
    items: list[str], queries: list[str], answer: str, quoted: list[str] | None = None
) -> Play:
    plan = ["publisher", "headquarters", DONE]
    return Play(QUESTION, plan, items, items[:-1] if quoted is None else quoted, queries, answer)


ROW = {
    "prompt": [{"role": "user", "content": QUESTION}],
    "reward_model": {"ground_truth": ["Landir"]},
    "extra_info": {
        "kind": "2-hop",
        "hops": 2,
        "lookups": [
            {"entity": "Sosnum", "relation": "publisher", "value": "Bumvel"},
            {"entity": "Bumvel", "relation": "headquarters", "value": "Landir"},
        ],
    },
}


@pytest.mark.parametrize(
    ("one", "shows"),
    [
        (play(["publisher", "headquarters", DONE], ["Sosnum", "Bumvel"], "Landir"), True),
        (play(["headquarters", DONE], ["Sosnum"], "Landir"), True),  # right by luck
        (play(["publisher", "headquarters", DONE], ["Sosnum", "Bumvel"], "Ranran"), True),
        (play(["headquarters", "publisher", DONE], ["Sosnum", "Bumvel"], "Ranran"), True),
        (play(["publisher", DONE], ["Sosnum"], "Bumvel"), False),
        (play(["headquarters", "publisher", DONE], ["Sosnum", "Dospax"], "Ranran"), False),
    ],
)
def test_what_is_right_or_has_the_whole_chain_shows_a_solution(one, shows):
    assert shows_solution(one, ROW) is shows
    one_hop = ROW | {"extra_info": ROW["extra_info"] | {"hops": 1}}
    assert not shows_solution(one, one_hop)


@pytest.mark.parametrize("before", ["", "Observation: "])
def test_it_quotes_the_passage_of_what_it_searched_for_wherever_that_stands(before):
    """`Bumvel` stands in an earlier passage, too, after other words. `react` writes a word before
    a result."""
    other = "Kelnir in Bumvel was founded by Dosfar."
    explorer = Explorer(QUESTION, random.Random(0))
    while explorer.item != "publisher":
        explorer = Explorer(QUESTION, random.Random(explorer.rng.random()))
        explorer.turn("")
    for result in (f"{other}\n{before}{PASSAGES}", f"{before}{PASSAGES}\n{other}"):
        _, thought = copy.deepcopy(explorer).turn(result)
        assert thought.startswith(" from Bumvel/publisher/")


def test_margins_are_counted_by_hand():
    # Two options at first, and the next item is drawn: 1. Then two are left, and the next one is
    # not drawn: -1. The third has one option, and no margin.
    assert margins_of_next_item(play(["publisher", DONE], [], "")) == [1.0, -1.0]
    # `headquarters` first: -1. After it comes `answer` in the plan, and `publisher` was drawn: -1.
    assert margins_of_next_item(play(["headquarters", "publisher", DONE], [], "")) == [-1.0, -1.0]
    # It looked for `headquarters` (-1) and read `publisher`: one option is left, and no margin.
    assert margins_of_next_item(play(["headquarters", DONE], [], "", ["publisher"])) == [-1.0]
    # It looked for `headquarters` (-1) and read something that is not in its plan: nothing is next.
    assert margins_of_next_item(play(["headquarters", DONE], [], "", ["author"])) == [-1.0]
    twice = replace(play([DONE], [], ""), plan=["spouse", "spouse", DONE])
    assert margins_of_next_item(twice) == []


def test_a_drawn_order_has_no_margin_and_a_followed_plan_has_one():
    plan = ["publisher", "headquarters", DONE]
    rng = random.Random(0)

    def drawn() -> Play:
        items = [rng.choice(plan[:2])]
        while items[-1] != DONE:
            items.append(rng.choice([item for item in plan if item not in items]))
        return play(items, [], "")

    low, high = count((drawn(), ROW) for _ in range(400))["next_item"]["ci95"]
    assert low < 0 < high
    followed = [(play(plan, ["Sosnum", "Bumvel"], "Landir"), ROW)] * 50
    counts = count(followed)
    assert counts["by_kind"] == {"2-hop": {"plays": 50, "right": 50, "whole_chain": 50}}
    assert counts["next_item"]["ci95"][0] > 0.9


# ----------------------------------------------------------------------------- the cloned rows


@pytest.fixture(scope="module", params=EXPLORERS)
def explored(micro, request):
    """The chat format and the cloned rows of an explorer."""
    mix = {"1-hop": 0.25, "2-hop": 0.5, "3-hop": 0.25}
    chat = ChatFormat(train_tokenizer(tokenizer_texts(mix, 0, with_plans=True), 1024))
    loop = make_loop(Demonstrator(chat), chat, micro.tools, micro.config.rollout, micro.config.env)
    rows, _ = demonstrations(micro.rows("cold"), loop, {request.param: 1.0}, 0)
    return chat, rows


class Cold:
    """A workspace with these cold-start questions."""

    def __init__(self, rows):
        self.config = load_config("discover", seed=0)
        self.rows = rows

    def load_rows(self, split):
        assert split == "cold"
        return self.rows


@pytest.fixture
def folder(explored, tmp_path):
    chat, rows = explored
    save_tokenizer(chat.tokenizer, tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": chat.stop_ids[0]}))
    lines = []
    for row in rows:
        line = {"phase": "copy", "episode": row.group_id, "input_ids": row.input_ids}
        lines.append(json.dumps(line) + "\n")
    (tmp_path / "cloned.jsonl").write_text("".join(lines))
    return tmp_path


def test_the_rows_that_are_cloned_show_no_solution(micro, explored, folder):
    """Read back from the file, renamed rows included, and compared with the questions' words."""
    counts = cloned.count_cloned(Cold(micro.rows("cold")), folder)
    questions = mixture_questions(micro.rows("cold"))
    one_hop = [row for row in questions if row["extra_info"]["kind"] == "1-hop"]
    kinds = counts["by_kind"]
    # One-hop plays have one item to draw: all are right, all are kept.
    plays = RENAMES * len(one_hop)
    assert kinds["1-hop"] == {"plays": plays, "right": plays, "whole_chain": plays}
    assert kinds["2-hop"]["right"] == kinds["2-hop"]["whole_chain"] == 0
    assert 0 < kinds["2-hop"]["plays"] < RENAMES * (len(questions) - len(one_hop))
    assert counts["next_item"]["ci95"][0] <= 0
    assert sum(numbers["plays"] for numbers in kinds.values()) == len(explored[1])


def test_a_row_of_another_question_is_an_error(micro, folder):
    lines = (folder / "cloned.jsonl").read_text().splitlines(keepends=True)
    (folder / "cloned.jsonl").write_text("".join([lines[1], lines[0], *lines[2:]]))
    with pytest.raises(AgentR1Error, match="is not the question of its data"):
        cloned.count_cloned(Cold(micro.rows("cold")), folder)


def test_an_explorer_plays_alone(micro):
    with pytest.raises(ConfigError, match="explore shows no solution, and the others do"):
        check_behaviours({"explore": 0.5, "good": 0.5}, micro.rows("cold"))
    check_behaviours({"explore": 0.5, "good": 0.0}, micro.rows("cold"))


# --------------------------------------------------------------------------- the order of a plan


def test_a_plan_with_its_items_exchanged(explored):
    chat, _ = explored

    def ids(text: str) -> list[int]:
        return chat.tokenizer.encode(text, add_special_tokens=False)

    turn = ids("plan/spouse/employer/answer: plan/spouse")
    assert chat.decode(exchange_plan(turn, chat)) == "plan/employer/spouse/answer"
    for other in ("plan/spouse/answer", "plan/spouse/spouse/answer", "plan/spouse/employer"):
        assert exchange_plan(ids(f"{other}: plan/spouse"), chat) is None


def test_questions_whose_order_the_passages_do_not_show(world):
    """Each has one answer, and both of its relations are facts of the first person."""
    passages = {passage.title: passage.text for passage in world.passages()}
    questions = make_questions(world, random.Random(2), 40, {"2-hop": 1})
    rows = []
    for question in questions:
        lookups = [vars(lookup) for lookup in question.lookups]
        rows.append(ROW | {"extra_info": {"kind": "2-hop", "hops": 2, "lookups": lookups}})
    made = order_questions(rows, passages)
    assert len(made) > 20
    for row in made:
        entity, relations = read_question(row["prompt"][-1]["content"])
        assert set(relations) < read_facts(passages[entity], entity).keys()
        first, second = row["extra_info"]["lookups"]
        assert world.value(entity, relations[0]) == first["value"] == second["entity"]
        assert [world.value(first["value"], relations[1])] == row["reward_model"]["ground_truth"]


@pytest.mark.parametrize(
    ("quote", "wrong"),
    [
        ("Sosnum is a book by Dospax", 0),
        ("Bumvel in Landir", 0),
        ("Sosnum is a book by Landir", 1),
        (" is a book by Dospax", 1),
    ],
)
def test_a_quote_is_right_if_a_passage_begins_with_it(quote, wrong):
    turns = [
        "<think>plan/author/answer: plan/author</think><tool_call>...</tool_call><|im_end|>",
        f"<|im_start|>user\n<tool_response>\n{PASSAGES}\n</tool_response><|im_end|>",
        f"<|im_start|>assistant\n<think>{quote}/author/answer</think><answer>Dospax</answer>",
    ]
    assert count_quotes("\n".join(turns)) == (wrong, 1)
