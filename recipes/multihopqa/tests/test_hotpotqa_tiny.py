"""Files in HotpotQA's format, end to end with the tiny model: the question set in hotpotqa_tiny/,
demonstrations under other names, and `speedrun-nodocker.sh` from these files to an agent that has
learned; killed in every stage as well."""

from __future__ import annotations

import asyncio
import json
import random
import re

import pytest
import torch
from building import (
    build_data,
    chat_of,
    model_of,
    passages_in,
    rows_in,
    search_over,
    start_model_of,
    write_model,
)
from conftest import random_model
from hotpotqa_tiny import make
from runs import TINY, curve, killed_at, leftovers, main, rollouts, speedrun, steps, tree, weights

from agent_r1 import (
    ChatFormat,
    Sampling,
    Task,
    Workspace,
    load_config,
    make_loop,
    run_episodes,
    train_tokenizer,
)
from agent_r1_recipes.laptop.demonstrator import Demonstrator, lookups_of
from agent_r1_recipes.multihopqa import entity_renaming
from agent_r1_recipes.multihopqa.entity_renaming import (
    WORLD,
    OtherNames,
    RenamedSearch,
    make_demonstrations,
    names_in,
    texts_for_tokenizer,
)

# --------------------------------------------------------------------------------- the question set


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hotpotqa")
    make.write(folder)
    return folder


def supporting(record: dict) -> list[str]:
    """The supporting sentences, in the order of supporting_facts."""
    context = dict(record["context"])
    return [context[title][sentence] for title, sentence in record["supporting_facts"]]


@pytest.mark.parametrize(("split", "least"), [("train", 1000), ("validation", 250)])
def test_each_record_is_as_hotpotqa_publishes_them(files, split, least):
    records = json.loads((files / make.FILES[split]).read_text())
    assert len(records) >= least and len({record["_id"] for record in records}) == len(records)
    for record in records:
        assert set(record) == {
            "_id",
            "question",
            "answer",
            "type",
            "level",
            "supporting_facts",
            "context",
        }
        assert (
            len(dict(record["context"])) == 10
            and len({title for title, _ in record["supporting_facts"]}) == 2
        )
        first, second = supporting(record)
        if (
            record["type"] == "bridge"
        ):  # the second title is in the first passage, the answer in the second only
            assert record["supporting_facts"][1][0] in first and record["answer"] in second
            assert not re.search(rf"\b{record['answer']}\b", f"{first} {record['question']}")
        else:
            assert record["answer"] in ("yes", "no") or record["answer"] in record["question"]
            assert all(title in record["question"] for title, _ in record["supporting_facts"])
    assert {record["type"] for record in records} == {"bridge", "comparison"}


def test_an_answer_by_hand(files):
    records = {r["question"]: r for r in json.loads((files / make.FILES["validation"]).read_text())}
    record = records["In which city was the writer of Ulysses born?"]
    assert record["answer"] == "Dublin"
    assert supporting(record) == [
        "Ulysses is a novel by James Joyce.",
        "James Joyce was a writer born in Dublin.",
    ]


# ----------------------------------------------------------------------------------- demonstrations


@pytest.fixture(scope="module")
def world(files, tmp_path_factory):
    """Configuration, training sequences, passages and tools of a data set of 160 questions."""
    sizes = [
        "data.train=120",
        "data.val=8",
        "data.test=32",
        "data.cold=240",
        "rollout.max_context=512",
    ]
    config, folder = (
        load_config("hotpotqa-tiny", [f"data.source={files}", *sizes]),
        tmp_path_factory.mktemp("world"),
    )
    data = build_data(config.data, folder / "data")
    tools = search_over(data, top_k=2, dim=config.search.dim)
    return config, rows_in(data)["train"], [passage.text for passage in passages_in(data)], tools


@pytest.fixture(scope="module")
def play(world, chat):
    """play(behaviour, other): trajectories of the demonstrator over all rows, in a world of other
    names if given."""
    config, rows, _, tools = world

    def episodes(behaviour: str, other: OtherNames | None = None):
        demonstrator = Demonstrator(chat)
        there = {"search": RenamedSearch(tools["search"], other)} if other else tools
        config = load_config("hotpotqa-tiny", ["rollout.max_context=1000"])
        loop = make_loop(demonstrator, chat, there, config.rollout, config.env)
        tasks = []
        for i, row in enumerate(rows):
            tasks.append(Task(other.row(row) if other else row, str(i), str(i)))
            demonstrator.begin(str(i), tasks[-1].row, behaviour, seed=i)
        return asyncio.run(run_episodes(loop, tasks, Sampling(200)))

    return episodes


def calls(trajectory) -> list[dict]:
    return [call for step in trajectory.steps for call in step.info.get("tool_calls", [])]


def row_of(question: str, titles: list[str], answer: str) -> dict:
    return {
        "prompt": [{"role": "user", "content": question}],
        "reward_model": {"ground_truth": [answer]},
        "extra_info": {"supporting": titles},
    }


@pytest.mark.parametrize(
    ("question", "titles", "answer", "expected"),
    [
        ("Where was the author of Dracula born?", ["Bram Stoker", "Dracula"], "Clontarf",
         [("Dracula", "Bram Stoker"), ("Bram Stoker", "Clontarf")]),
        ("Is Faust older than Medea?", ["Medea (play)", "Faust (opera)"], "no",
         [("Faust (opera)", "Medea (play)"), ("Medea (play)", "no")]),
        ("Which river runs by the town of the maker of "
            "Zebra?", ["Zebra", "Vasarely", "Pecs"], "Drava",
         [("Zebra", "Vasarely"), ("Vasarely", "Pecs"), ("Pecs", "Drava")]),
    ],
)  # fmt: skip
def test_what_to_look_up_begins_with_what_the_question_names(question, titles, answer, expected):
    assert [
        (step["entity"], step["value"]) for step in lookups_of(row_of(question, titles, answer))
    ] == expected


def test_the_good_one_reads_the_answer_before_it_gives_it(play):
    done = play("good")
    assert all(t.metrics["em"] == 1 and t.reward == 1 and len(calls(t)) == 2 for t in done)
    for t in done:
        first, second = lookups_of(t.row)
        assert [call["arguments"]["query"] for call in calls(t)] == [
            first["entity"],
            second["entity"],
        ]
    chains = [t for t in done if t.row["extra_info"]["kind"] == "bridge"]
    found = [
        lookups_of(t.row)[i]["value"] in calls(t)[i]["content"] for t in chains for i in (0, 1)
    ]
    assert len(chains) > 60 and sum(found) / len(found) > 0.95


@pytest.mark.parametrize("behaviour", ["stop_early", "guess", "bad_query", "wrong_entity"])
def test_the_others_are_mostly_wrong_and_always_answer(play, behaviour):
    done = play(behaviour)
    assert {t.stop_reason for t in done} == {"answered"}
    assert sum(t.metrics["em"] for t in done) / len(done) < 0.5


def test_a_preset_for_gpus_warms_its_model_up_on_supporting_titles(
    files, chat, tmp_path, monkeypatch, capsys
):
    """A pretrained model's stand-in gets the demonstrations, and RL starts from what came of it."""
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path))
    write_model(random_model(max_position=2048), chat, tmp_path / "base")
    words = [
        "grpo",
        "--preset=hotpotqa-1x24gb",
        f"data.source={files}",
        f"model.path={tmp_path / 'base'}",
        *FEW,
    ]
    for stage in ("data", "index", "cold-start"):
        assert main(stage, *words) == 0
    assert re.search(r"16 demonstrations, loss [\d.]+ -> [\d.]+", capsys.readouterr().out)
    config = load_config("hotpotqa-1x24gb", words[2:], algorithm="grpo")
    start = start_model_of(config)
    assert not torch.equal(model_of(start).embed.weight, model_of(tmp_path / "base").embed.weight)
    _, _, rows = entity_renaming.teach(Workspace(config), chat_of(start))
    titles = {
        r["prompt"][-1]["content"]: set(r["extra_info"]["supporting"])
        for r in Workspace(config).load_rows("train")
    }
    for text in (chat.decode(row.input_ids) for row in rows):
        (asked,) = [question for question in titles if question in text]
        assert set(re.findall(r'"query": "([^"]+)"', text)) == titles[asked] and "<answer>" in text


FEW = [
    "data.train=16",
    "data.val=4",
    "data.test=8",
    "data.corpus=contexts",
    "search.encoder=ngram",
    "search.top_k=1",
    "rollout.prompts_per_step=16",
    "rollout.max_context=2048",
    "trainer.device=cpu",
    "trainer.max_tokens_per_microbatch=2048",
    "cold_start.warm_steps=2",
    "cold_start.mix_tokens=2048",
    "cold_start.lr=0.01",
]


# -------------------------------------------------------------------------------------- other names


@pytest.fixture(scope="module")
def other(world) -> OtherNames:
    return OtherNames(names_in(world[2], world[1][0]["prompt"][0]["content"]), random.Random(0))


def test_names_are_names(world):
    names = set(names_in(world[2], world[1][0]["prompt"][0]["content"]))
    assert {"Lisbon", "Oscar Wilde", "Saint Petersburg"} & names
    assert not {"It", "Its", "In", "The", "Who"} & names and len(names) > 200


def test_renaming_can_be_undone_and_leaves_no_name(world, other):
    names = set(names_in(world[2], world[1][0]["prompt"][0]["content"]))
    for text in world[2]:
        assert other.restore(other.rename(text)) == text != other.rename(text)
    assert len({other.rename(name) for name in names}) == len(names)
    assert {other.rename(name) for name in names} == names, (
        "dealt out anew, not made up: each is spelled as it is known"
    )


def test_a_name_behind_the_word_that_a_question_begins_with():
    names = OtherNames(["Oscar Wilde", "Porto"], random.Random(1))
    there = {names.rename("Porto"), names.rename("Oscar Wilde")}
    assert there == {"Porto", "Oscar Wilde"}
    assert names.rename("Were Oscar Wilde and he in Porto?") == (
        f"Were {names.rename('Oscar Wilde')} and he in {names.rename('Porto')}?"
    )


def test_the_game_is_the_same_under_entity_renaming(play, other):
    """The same searches find the same passages, and the good one is right: only all the names are
    others."""
    here, there = play("good"), play("good", other)
    assert all(t.metrics["em"] == 1 for t in there)
    for a, b in zip(here, there, strict=True):
        assert [other.rename(call["content"]) for call in calls(a)] == [
            call["content"] for call in calls(b)
        ]


def demonstrations(config, rows, passages, tools):
    """As stages.py makes them."""
    names, search = (
        names_in(passages, rows[0]["prompt"][0]["content"]),
        RenamedSearch(tools["search"]),
    )
    chat = ChatFormat(
        train_tokenizer(texts_for_tokenizer(rows, passages, names), config.model.vocab_size)
    )
    loop = make_loop(Demonstrator(chat), chat, {"search": search}, config.rollout, config.env)
    behaviours, count = config.cold_start.behaviours, config.data.cold
    return chat, *make_demonstrations(rows, names, search, loop, behaviours, count, config.seed)


def test_no_demonstration_shows_a_fact(world):
    """A question of the training set under its own names never stands beside its own answer."""
    rows = world[1]
    chat, copy, mix = demonstrations(*world)
    assert len(copy) == len(mix) == 2 * WORLD
    answers = {row["prompt"][-1]["content"]: row["reward_model"]["ground_truth"][0] for row in rows}
    assert not any(
        f"{question}<|im_end|>" in text and f"<answer>{answer}</answer>" in text
        for text in (chat.decode(row.input_ids) for row in copy)
        for question, answer in answers.items()
        if answer not in ("yes", "no")
    )
    for name in ("Saint Petersburg", "Virginia Woolf"):  # one spelling, wherever it stands
        ids = chat.encode_data(name)
        for place in (
            f'{{"query": "{name}"}}',
            f"\n{name} is a city in",
            f"Were {name} and",
            f"born in {name}.",
        ):
            text = chat.encode_data(place)
            assert any(text[i : i + len(ids)] == ids for i in range(len(text))), place


# ---------------------------------------------------------------------------------- the whole of it


@pytest.fixture(scope="module")
def trained(files, tmp_path_factory):
    """Home of a shortened `speedrun-nodocker.sh grpo --preset hotpotqa-tiny` over the files, and
    what it said."""
    home = tmp_path_factory.mktemp("tiny")
    argv = [
        "grpo",
        "--preset",
        "hotpotqa-tiny",
        f"data.source={files}",
        "trainer.threads=1",
        *SHORTER,
    ]
    done = speedrun(home, *argv, timeout=800)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return home / "runs" / "hotpotqa-tiny-grpo", done.stdout


SHORTER = [
    "data.cold=4000",
    "cold_start.copy_steps=350",
    "cold_start.mix_steps=180",
    "trainer.steps=12",
    "data.test=60",
]


@pytest.mark.slow
def test_from_files_to_an_agent_that_has_learned(trained):
    run, said = trained
    for stage in (
        "data",
        "index",
        "cold start",
        "evaluate before RL",
        "train",
        "evaluate after RL",
        "report",
    ):
        assert f"\n{stage}:" in said, stage
    assert (run / "report.html").stat().st_size > 20_000 and leftovers(run.parents[1]) == []
    before, after = (
        json.loads((run / name).read_text()) for name in ("eval_before.json", "eval.json")
    )
    assert before["dataset"] == "hotpotqa" and before["n"] == 60
    assert after["em"] >= before["em"] + 0.2
    assert after["mean_tool_calls"] > before["mean_tool_calls"] + 0.4
    learned = [record["reward/em"] for record in curve(run)]
    assert sum(learned[-4:]) / 4 > sum(learned[:4]) / 4 + 0.05


# ---------------------------------------------------------------------------- killed in every stage

STAGES = {
    "data": ("open", "corpus.jsonl"),
    "index": ("open", "manifest.json"),
    "cold-start": ("open", "config.json"),
    "eval --before": ("os.rename", "eval_before.json"),
    "train": ("open", "metrics.jsonl"),
    "eval": ("os.rename", "eval.json"),
}
"""Stage -> the event in its middle at which it is killed."""
TIMELESS = [
    "em",
    "f1",
    "sampled",
    "by_kind",
    "stop_reasons",
    "mean_tool_calls",
    "prompt_hash",
    "data_hash",
    "model_hash",
]


@pytest.mark.long
def test_killed_in_every_stage_and_started_again(files, tmp_path, monkeypatch):
    """kill -9 in the middle of each stage, then the stage again: the files, cards and weights of a
    run in peace."""
    settings = [
        "grpo",
        *TINY,
        "data.name=hotpotqa",
        f"data.source={files}",
        "data.cold=120",
        "model.vocab_size=1024",
        "rollout.max_context=512",
        "trainer.steps=4",
    ]
    peace, war = tmp_path / "peace", tmp_path / "war"
    for home in (peace, war):
        monkeypatch.setenv("AGENT_R1_HOME", str(home))
        for stage, (event, path) in STAGES.items():
            command = [*stage.split(), *settings]
            if home is war:
                killed_at(home, event, path, 3 if stage == "train" else 1, *command)
                command += ["--resume"] * (stage == "train")
            assert main(*command) == 0
    assert tree(peace / "artifacts") == tree(war / "artifacts")
    runs = [next((home / "runs").iterdir()) for home in (peace, war)]
    for name in ("eval_before.json", "eval.json"):
        one, two = ({k: json.loads((run / name).read_text())[k] for k in TIMELESS} for run in runs)
        assert one == two
    assert weights(runs[0]) == weights(runs[1]) and curve(runs[0]) == curve(runs[1])
    assert rollouts(runs[0]) == rollouts(runs[1]) and steps(runs[0]) == steps(runs[1])
    assert leftovers(war) == []
