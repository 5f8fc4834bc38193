"""TinyHop's demonstrator: each behaviour plays as described, and the loss is on its own words."""

from __future__ import annotations

import asyncio
import gc
import re
from collections import Counter

import pytest
from conftest import micro_config

from agent_r1 import (
    ChatFormat,
    ConfigError,
    Row,
    Sampling,
    StopReason,
    Task,
    Trajectory,
    make_loop,
    run_episodes,
    train_tokenizer,
)
from agent_r1_recipes.laptop.demonstrator import (
    BEHAVIOURS,
    Demonstrator,
    demonstrate_rows,
    rename,
    search_turn,
    tokenizer_texts,
)
from agent_r1_recipes.laptop.reading import ENTITY_NAME, quote
from agent_r1_recipes.laptop.tinyhop import HEADS, RELATIONS, TAILS
from agent_r1_recipes.long_context.context import ASK


@pytest.fixture(scope="module")
def play(micro, chat):
    """play(behaviour, kind): the demonstrator's trajectories for all questions of a kind."""

    def episodes(behaviour: str, kind: str, **context) -> list[Trajectory]:
        rows = [
            row
            for row in micro.rows("cold") + micro.rows("train")
            if row["extra_info"]["kind"] == kind
        ]
        demonstrator = Demonstrator(chat)
        env = micro.config.env.model_copy(update=context)
        loop = make_loop(demonstrator, chat, micro.tools, micro.config.rollout, env)
        for i, row in enumerate(rows):
            demonstrator.begin(str(i), row, behaviour, seed=i)
        tasks = [Task(row, str(i), str(i)) for i, row in enumerate(rows)]
        done = asyncio.run(run_episodes(loop, tasks, Sampling(loop.limits.max_tokens_per_turn)))
        assert len(done) > 10 and not demonstrator._scripts  # released again
        return done

    return episodes


def queries(trajectory: Trajectory) -> list[str]:
    return [
        call["arguments"]["query"]
        for step in trajectory.steps
        for call in step.info.get("tool_calls", [])
    ]


def lookups(row: Row) -> list[dict]:
    return row["extra_info"]["lookups"]


def answer(trajectory: Trajectory, chat) -> str:
    ids = trajectory.steps[-1].action_ids
    assert ids[-1] == chat.turn_end_id
    return re.fullmatch(r"<think>[^<]*</think><answer>([^<]*)</answer>", chat.decode(ids[:-1]))[1]


# ----------------------------------------------------------------------------------- the behaviours


@pytest.mark.parametrize("kind", ["1-hop", "2-hop"])
def test_the_good_one_looks_up_every_hop_and_is_right(play, chat, kind):
    for t in play("good", kind):
        assert queries(t) == [lookup["entity"] for lookup in lookups(t.row)]
        assert t.stop_reason is StopReason.ANSWERED and t.metrics["em"] == 1 and t.reward == 1


def test_the_good_one_reads_each_answer_before_it_uses_it(play):
    """Copying can only be learnt where the name stands in the result: recall of the index is what
    makes that so."""
    found = [
        lookup["value"] in step.info["tool_calls"][0]["content"]
        for t in play("good", "2-hop")
        for step, lookup in zip(t.steps, lookups(t.row), strict=False)
    ]
    assert sum(found) / len(found) > 0.9


def test_the_hasty_one_stops_after_one_search(play, chat):
    for t in play("stop_early", "2-hop"):
        assert queries(t) == [lookups(t.row)[0]["entity"]]
        assert answer(t, chat) == lookups(t.row)[0]["value"]
    assert all(t.metrics["em"] == 1 for t in play("stop_early", "1-hop"))


def test_the_guesser_never_searches(play, chat):
    for t in play("guess", "1-hop"):
        assert queries(t) == [] and len(t.steps) == 1
        assert answer(t, chat) in t.row["prompt"][-1]["content"]


def test_the_bad_searcher_forgets_the_entity(play, chat):
    for t in play("bad_query", "2-hop"):
        assert queries(t) == [lookups(t.row)[0]["relation"]]
        assert re.fullmatch("[A-Z][a-z]+|yes|no", answer(t, chat))


def test_the_confused_one_follows_a_name_that_it_has_read(play, chat):
    done = play("wrong_entity", "2-hop")
    for t in done:
        first, second = queries(t)
        assert (
            first == lookups(t.row)[0]["entity"]
            and second in t.steps[0].info["tool_calls"][0]["content"]
        )
        assert answer(t, chat) in t.steps[1].info["tool_calls"][0]["content"]
    assert (
        0 < sum(t.metrics["em"] for t in done) / len(done) < 0.9
    )  # wrong more often than not, and right now and then


def test_a_quote_has_the_words_before_the_name_and_no_other_name():
    text = "Tosran is a film by Laxgum starring Gelpir.\nDostan has capital Kelnir."
    assert quote(text, "Gelpir") == " starring Gelpir"
    assert quote(text, "Laxgum") == " is a film by Laxgum"
    assert quote(text, "Tosran") == "Tosran" and quote(text, "Gel") == "Gel"


def test_the_explorer_is_refused_where_a_question_is_no_chain(micro, chat):
    [row] = micro.rows("cold")[:1]
    two = [lookups(row)[0] | {"entity": "A"}, lookups(row)[0] | {"entity": "B"}]
    compared = row | {"extra_info": row["extra_info"] | {"lookups": two}}
    with pytest.raises(ConfigError, match="needs chains of relations; set data.mix"):
        make(micro, chat, {"explore": 1.0}, rows=[compared])
    assert make(micro, chat, {"good": 1.0, "explore": 0.0}, rows=[compared])


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_asked_for_notes_it_writes_what_it_found(play, chat, behaviour):
    """env.context=summary: the request is no turn of its script, and its notes are plain text."""
    for one in play(behaviour, "2-hop", context="summary", window_results=1):
        said = [chat.decode(step.action_ids[:-1]) for step in one.steps]
        notes = [
            text
            for step, text in zip(one.steps, said, strict=True)
            if ASK in chat.decode(step.observation_ids)
        ]
        assert one.stop_reason is StopReason.ANSWERED and len(notes) == len(queries(one))
        assert said[1::2] == notes and not any("<" in text for text in notes)
        if behaviour == "good":
            assert one.reward == 1.0 and len(notes) == 2
            assert notes[1] == "; ".join(
                f"{found['relation']} {found['value']}" for found in lookups(one.row)
            )
        elif behaviour != "stop_early":
            assert all(re.fullmatch(f"{ENTITY_NAME.pattern}|nothing", text) for text in notes)


# ----------------------------------------------------------------------------------- demonstrations


def make(micro, chat, behaviours, seed=0, rows=None):
    loop = make_loop(Demonstrator(chat), chat, micro.tools, micro.config.rollout, micro.config.env)
    return demonstrate_rows(rows or micro.rows("cold"), behaviours, loop, seed, "test")


def test_the_loss_is_on_the_demonstrators_own_words(micro, chat):
    [row] = make(micro, chat, {"good": 1.0}, rows=micro.rows("cold")[:1])
    own = "".join(
        chat.decode([i]) for i, m in zip(row.input_ids, row.action_mask, strict=True) if m
    )
    question = micro.rows("cold")[0]
    expected = [search_turn(lookup) for lookup in lookups(question)]
    expected.append(
        f"<think>answer</think><answer>{question['reward_model']['ground_truth'][0]}</answer>"
    )
    assert own == "".join(f"{turn}<|im_end|>" for turn in expected)


def test_the_collector_of_cycles_runs_again_after_demonstrations(micro, chat, monkeypatch):
    make(micro, chat, {"good": 1.0})
    assert gc.isenabled()

    def interrupted(*arguments):
        assert not gc.isenabled()
        raise KeyboardInterrupt

    monkeypatch.setattr("agent_r1_recipes.laptop.demonstrator.run_episodes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make(micro, chat, {"good": 1.0})
    assert gc.isenabled()


def test_demonstrations_depend_on_the_seed_alone(micro, chat):
    first, again, other = (
        make(micro, chat, micro.config.cold_start.behaviours, seed) for seed in (0, 0, 1)
    )
    assert (
        [r.input_ids for r in first] == [r.input_ids for r in again] != [r.input_ids for r in other]
    )


def test_behaviours_come_in_the_proportions_that_were_asked_for(micro, chat):
    class Watching(Demonstrator):
        def begin(self, session, row, behaviour, seed):
            seen[behaviour] += 1
            super().begin(session, row, behaviour, seed)

    seen = Counter()
    loop = make_loop(Watching(chat), chat, micro.tools, micro.config.rollout, micro.config.env)
    demonstrate_rows(
        micro.rows("cold") * 2, {"good": 3.0, "guess": 1.0, "bad_query": 0.0}, loop, 0, "test"
    )
    assert seen["bad_query"] == 0 and seen["good"] / 240 == pytest.approx(0.75, abs=0.08)


def test_an_unknown_behaviour_is_refused(micro, chat):
    with pytest.raises(
        ConfigError,
        match=r"cold_start.behaviours='goood' is unknown "
        r"\(did you mean 'good'\?\); choose from good",
    ):
        make(micro, chat, {"goood": 1.0})


@pytest.fixture(scope="module")
def explorer_chat():
    mix = {"1-hop": 0.25, "2-hop": 0.5, "3-hop": 0.25}
    return ChatFormat(train_tokenizer(tokenizer_texts(mix, 0, with_plans=True), 1024))


def test_a_renamed_play_is_the_same_play_with_other_names(micro, explorer_chat):
    """Each name becomes one other name, wherever it stands, and nothing else changes."""
    chat = explorer_chat
    loop = make_loop(Demonstrator(chat), chat, micro.tools, micro.config.rollout, micro.config.env)
    questions = [row for row in micro.rows("cold") if row["extra_info"]["kind"] == "2-hop"][:20]
    rows = demonstrate_rows(questions, {"explore": 1.0}, loop, 0, "test")
    renamed_rows = rename(rows, chat, 0)
    name = re.compile("(?:" + "|".join(HEADS) + ")(?:" + "|".join(TAILS) + ")+", re.IGNORECASE)
    for row, renamed in zip(rows, renamed_rows, strict=True):
        before = chat.decode(row.input_ids)
        after = chat.decode(renamed.input_ids)
        assert name.sub("NAME", before) == name.sub("NAME", after)
        pairs = set(zip(name.findall(before), name.findall(after), strict=True))
        assert len(pairs) == len({old for old, _ in pairs}) == len({new for _, new in pairs}) > 2
        assert renamed.action_mask == row.action_mask
    same_twice = rename(rows[:1] * 2, chat, 0)
    assert same_twice[0].input_ids != same_twice[1].input_ids
    assert renamed_rows == rename(rows, chat, 0)


@pytest.mark.parametrize("relation", RELATIONS)
def test_its_tokenizer_spells_each_item_and_each_relation_by_itself(relation, explorer_chat):
    tokenizer = explorer_chat.tokenizer
    plan = f"plan/{relation}/{relation}/answer: plan/{relation}"
    tokens = ["plan", f"/{relation}", f"/{relation}", "/answer", ": ", "plan", f"/{relation}"]
    assert [tokenizer.decode([i]) for i in tokenizer.encode(plan)] == tokens
    [before, after] = RELATIONS[relation].phrases[0].split("{x}")
    question = f"Who is the mayor of {before}Kosnum{after}?"
    tokens = [tokenizer.decode([i]) for i in tokenizer.encode(question)]
    assert tokens[: tokens.index("Kos")] == ["Who", " is the mayor of ", before]


def test_the_tokenizer_sees_syllables_and_never_a_name():
    """Shown whole names, BPE would learn them; a name of the test world would then be spelled
    unlike those of training."""
    mix = micro_config().data.mix
    texts = list(tokenizer_texts(mix, 0))
    syllables = {*TAILS, *(head.capitalize() for head in HEADS)}
    capitalised = {word for text in texts for word in re.findall("[A-Z][a-z]+", text)}
    words = {
        w
        for w in capitalised
        if any(w.startswith(h.capitalize()) and w[len(h) :] in TAILS for h in HEADS)
    } - syllables
    assert words == set() and syllables <= {text for text in texts}
    assert texts == list(tokenizer_texts(mix, 0))
