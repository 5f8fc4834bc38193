"""Published questions from files and from the hub: rows, corpus, evidence, and corrupt records."""

from __future__ import annotations

import asyncio
import fnmatch
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from building import (
    build_data,
    corpus_passages,
    manifest_of,
    passages_in,
    rows_in,
    search_over,
    tables,
)
from conftest import ScriptedPolicy, call
from qa_files import (
    dapo_math,
    gsm8k,
    hotpotqa,
    hub_form,
    musique,
    twowiki,
    twowiki_aliases,
    write_json,
    write_jsonl,
)
from runs import tree

from agent_r1 import (
    AgentR1Error,
    ChatFormat,
    ConfigError,
    DataConfig,
    Passage,
    Sampling,
    Task,
    load_config,
    make_loop,
    run_episodes,
)
from agent_r1_recipes.math.problems import DAPO_MATH, GSM8K, Gsm8kProblem
from agent_r1_recipes.multihopqa.forms import HotpotQA, MuSiQue
from agent_r1_recipes.multihopqa.published import HOTPOTQA, HOTPOTQA_FULLWIKI, MUSIQUE, TWOWIKI

DATASETS = {
    one.name: one for one in (HOTPOTQA, HOTPOTQA_FULLWIKI, TWOWIKI, MUSIQUE, GSM8K, DAPO_MATH)
}
SIZES = {"name": "hotpotqa", "train": 40, "val": 8, "test": 12}
SMALL = {"train": 12, "val": 4, "test": 7}
RECORDS = {
    "hotpotqa": hotpotqa,
    "twowiki": twowiki,
    "musique": musique,
    "gsm8k": gsm8k,
    "dapo-math": dapo_math,
}


def made(
    tmp_path: Path, source: Path | None, folder: str = "data", seed: int = 0, **changes
) -> Path:
    config = DataConfig(**{**SIZES, "source": str(source) if source else None} | changes)
    return build_data(config, tmp_path / folder, seed)


def records_in(folder: Path) -> list[tuple[str, str, str]]:
    return [(p.id, p.title, p.text) for p in passages_in(folder)]


def written(path: Path, name: str) -> Path:
    """The records of a set in the form that it is published in."""
    return (write_json if name in ("hotpotqa", "twowiki") else write_jsonl)(path, RECORDS[name]())


@pytest.fixture
def one_file(tmp_path) -> Path:
    return written(tmp_path / "mine.json", "hotpotqa")


@pytest.fixture
def published(tmp_path) -> Path:
    """A folder as one has it after downloading; one of the two is gzipped."""
    write_json(tmp_path / "hotpot" / "hotpot_train_v1.1.json", hotpotqa()[:56])
    write_json(tmp_path / "hotpot" / "hotpot_dev_distractor_v1.json.gz", hotpotqa()[56:])
    return tmp_path / "hotpot"


# ------------------------------------------------------------------------------------------ records


def test_records_by_hand():
    record = HotpotQA.model_validate(hotpotqa()[0]).record()
    assert (record.question, record.answers) == (
        "Where was the author of Pride and Prejudice born?",
        ["Steventon"],
    )
    assert (record.kind, record.hops) == ("bridge", 2)
    assert (
        record.supporting == ["Pride and Prejudice", "Jane Austen"] and len(record.paragraphs) == 10
    )
    assert (
        "Jane Austen",
        "Jane Austen was a writer. The writer was born in Steventon.",
    ) in record.paragraphs
    four = [["A", 0], ["B", 1], ["C", 0], ["D", 2], ["A", 1]]  # 2Wiki's bridge comparison
    record = HotpotQA(
        **twowiki()[0] | {"type": "bridge_comparison", "supporting_facts": four}
    ).record()
    assert (record.kind, record.hops, record.supporting) == (
        "bridge_comparison",
        4,
        ["A", "B", "C", "D"],
    )
    record = MuSiQue(**musique()[1]).record()
    assert record.answers == ["London", "London, Earth"] and (record.kind, record.hops) == (
        "2hop",
        2,
    )
    assert record.supporting == ["Frankenstein", "Mary Shelley"] and len(record.paragraphs) == 4
    record = Gsm8kProblem(**gsm8k()[3]).record()
    assert (record.answers, record.kind, record.hops) == (
        ["1582"],
        "2-step",
        2,
    )  # 1000 + 97 * 6, published as 1,582
    assert Gsm8kProblem(**gsm8k()[4]).record().kind == "1-step"


def test_the_aliases_of_2wiki_lie_in_a_file_of_their_own(tmp_path):
    folder = tmp_path / "2wiki"
    write_json(folder / "train.json", twowiki()[:16])
    write_json(folder / "dev.json", twowiki()[16:])
    sizes = {"name": "twowiki", "train": 12, "val": 4, "test": 0}
    (plain,) = {
        len(row["reward_model"]["ground_truth"])
        for row in rows_in(made(tmp_path, folder, **sizes))["test"]
    }
    write_jsonl(folder / "id_aliases.json", twowiki_aliases())
    made_of = made(tmp_path, folder, "named", **sizes)
    answers = [list(row["reward_model"]["ground_truth"]) for row in rows_in(made_of)["test"]]
    assert plain == 1 and sorted(map(len, answers)) == [1] * 4 + [3] * 4
    assert ["Mondovi", "Mondovi (town)", "Mondovier"] in answers
    assert len(manifest_of(made_of)["sources"]) == 3
    assert {row["extra_info"]["kind"] for row in rows_in(made_of)["test"]} == {"compositional"}
    write_jsonl(folder / "id_aliases.json", [{"id": "Q1"}])
    with pytest.raises(AgentR1Error, match="not 2WikiMultihopQA's file of aliases"):
        made(tmp_path, folder, "broken", **sizes)


def test_one_file_becomes_three_splits_without_overlap_and_a_corpus(
    chat: ChatFormat, tmp_path, one_file
):
    folder = made(tmp_path, one_file, train=50, val=10, test=12)
    rows, passages, manifest = rows_in(folder), records_in(folder), manifest_of(folder)
    ids = [row["extra_info"]["id"] for found in rows.values() for row in found]
    assert {split: len(found) for split, found in rows.items()} == {
        "train": 50,
        "val": 10,
        "test": 12,
    }
    assert len(ids) == len(set(ids)) == 72
    assert (
        len(passages)
        == 48
        == len({title for _, title, _ in passages})
        == len({name for name, _, _ in passages})
    )
    row = rows["test"][3]
    assert row["data_source"] == "hotpotqa" and row["env_kwargs"] == {"tools": None}
    truth = {record["question"]: record for record in hotpotqa()}[row["prompt"][-1]["content"]]
    assert row["reward_model"] == {"style": "rule", "ground_truth": [truth["answer"]]}
    assert row["extra_info"]["index"] == 3 and row["extra_info"]["id"] == truth["_id"]
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    text = chat.tokenizer.decode(chat.prompt_ids(row["prompt"], []))
    assert all(message["content"] in text for message in row["prompt"])
    assert (
        manifest["seed"] == 0
        and manifest["skipped"] == []
        and list(manifest["sources"]) == [str(one_file)]
    )
    assert set(manifest["files"]) == {
        "train.parquet",
        "val.parquet",
        "test.parquet",
        "corpus.jsonl",
    }
    assert manifest["splits"]["train"]["questions"] == 50


def test_published_files_train_val_from_one_and_the_whole_other_as_test(tmp_path, published):
    rows = rows_in(made(tmp_path, published, test=0))
    ids = {split: [row["extra_info"]["id"] for row in found] for split, found in rows.items()}
    assert ids["test"] == [record["_id"] for record in hotpotqa()[56:]]
    learnt = {*ids["train"], *ids["val"]}
    assert len(learnt) == 48 and not learnt & set(ids["test"])
    assert len(rows_in(made(tmp_path, published, "sample", test=5))["test"]) == 5


def test_same_seed_same_bytes_and_another_seed_another_sample(tmp_path, published):
    first, again, other = (
        made(tmp_path, published, name, seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert tree(first) == tree(again)
    assert tree(first)["train.parquet"] != tree(other)["train.parquet"]


def test_a_source_that_changed_is_noticed_and_one_that_is_gone_is_not_missed(tmp_path, one_file):
    folder = made(tmp_path, one_file)
    write_json(one_file, hotpotqa()[:61])
    with pytest.raises(AgentR1Error, match="mine.json has changed since .*delete that folder"):
        manifest_of(folder)
    one_file.unlink()
    manifest_of(folder)


# ---------------------------------------------------------------------------------- what is corrupt


GONE = object()


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("hotpotqa", {"answer": GONE}, "no answer"),
        (
            "hotpotqa",
            {"type": GONE, "context": GONE},
            "no type, no context",
        ),  # all that is missing is said at once
        (
            "hotpotqa",
            {"context": {"title": ["A"], "sentences": [["x"], ["y"]]}},
            "context: value error, zip",
        ),
        ("hotpotqa", {"_id": "5a" + "0" * 22}, "the id 5a0+ a second time"),
        ("gsm8k", {"answer": "It is 12."}, "no #### before the answer"),
        (
            "dapo-math",
            {"extra_info": {"index": f"{0:08x}-0000-4000-8000-000000000000"}},
            "the id 0+-.* a second time",
        ),
        ("musique", {"answerable": False}, "without an answer; use MuSiQue-Ans"),
    ],
)
def test_a_corrupt_record_is_named_and_left_out_only_when_asked(tmp_path, name, change, reason):
    records = RECORDS[name]()
    records[16] = {key: value for key, value in (records[16] | change).items() if value is not GONE}
    source = write_json(tmp_path / "mine.json", records)
    sizes, said = (
        {"name": name, **SMALL},
        rf"1 of {len(records)} records are corrupt: record 17 \(.*{reason}",
    )
    with pytest.raises(AgentR1Error, match=f"{said}.*docs/data.md.*data.skip_bad=true") as refused:
        made(tmp_path, source, **sizes)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.json"] and "\n" not in str(
        refused.value
    )
    (skipped,) = manifest_of(made(tmp_path, source, skip_bad=True, **sizes))["skipped"]
    assert skipped.startswith(f"{source}: record 17 (")


def test_a_question_for_which_a_retriever_found_nothing_is_asked_all_the_same(tmp_path):
    records = hotpotqa()
    records[16]["context"] = []
    rows = rows_in(
        made(tmp_path, write_json(tmp_path / "mine.json", records), train=50, val=10, test=12)
    )
    assert records[16]["_id"] in {
        row["extra_info"]["id"] for found in rows.values() for row in found
    }


@pytest.mark.parametrize("name", ["gsm8k", "hotpotqa"])
def test_the_same_question_is_never_in_two_splits(tmp_path, name):
    """GSM8K has no ids; 40 equal questions went into train, val and test."""
    records = RECORDS[name]()
    again = [
        r | {"_id": f"again{i}", "question": f" {r['question']}  "}
        for i, r in enumerate(records[:8])
    ]
    held_out = {"gsm8k": "test", "hotpotqa": "validation"}[name]
    write = write_jsonl if name == "gsm8k" else write_json
    write(tmp_path / "d" / DATASETS[name].files["train"], [*records[:16], *again[:4]])
    write(tmp_path / "d" / DATASETS[name].files[held_out], [*records[16:], *again[4:]])
    sizes = {"name": name, "train": 10, "val": 2}
    one_file = made(
        tmp_path, write(tmp_path / "all.json", [*records, *again]), "one", test=4, **sizes
    )
    two_files = made(tmp_path, tmp_path / "d", "two", test=0, **sizes)
    for folder in (one_file, two_files):
        asked = {
            split: {row["prompt"][-1]["content"].strip() for row in found}
            for split, found in rows_in(folder).items()
        }
        assert len(asked["train"]) == 10 and len(set.union(*asked.values())) == sum(
            map(len, asked.values())
        )
        assert (
            len(skipped := manifest_of(folder)["skipped"]) == 8 and "is asked twice" in skipped[0]
        )
    assert (
        len(rows_in(two_files)["test"]) == len(records) - 16 + 4
    )  # the published validation set, whole
    with pytest.raises(ConfigError, match="the source has 12 questions and train and val take 13"):
        made(tmp_path, tmp_path / "d", "three", test=0, **sizes | {"train": 11})


def test_the_first_release_of_dapo_math_gives_each_problem_once(tmp_path):
    words = (
        "Solve the following math problem step by step. The last line of your response should be "
        "of the form Answer: $Answer "
        "(without quotes) where $Answer is the answer to the problem.\n\n{}\n\n"
        'Remember to put your answer on its own line after "Answer:".'
    )
    first = [
        {key: r[key] for key in ("data_source", "ability", "reward_model", "extra_info")}
        | {"prompt": [{"role": "user", "content": words.format(r["prompt"])}]}
        for r in dapo_math()
    ]
    sizes = {"name": "dapo-math", **SMALL}
    second = rows_in(made(tmp_path, write_json(tmp_path / "second.json", dapo_math()), **sizes))
    pq.write_table(pa.Table.from_pylist(3 * first), tmp_path / "dapo-math-17k.parquet")
    assert rows_in(made(tmp_path, tmp_path / "dapo-math-17k.parquet", "first", **sizes)) == second
    assert {row["ability"] for row in second["train"]} == {"math"}
    first[3] = first[3] | {"prompt": [{"role": "user", "content": "Another."}]}
    with pytest.raises(
        AgentR1Error,
        match="2 of 48 records are corrupt: .*the id .* a second time|1 of 48 records are corrupt",
    ):
        made(
            tmp_path,
            write_json(tmp_path / "mixed.json", first[:4] + dapo_math() + first[4:]),
            "mixed",
            **sizes,
        )


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"[" + b'{"_id": "1"}, ' * 10, "truncated, damaged or not JSON.*get the file again"),
        (b'[{"_id": "\xff"}]', "truncated, damaged or not JSON.*get the file again"),
        (b"\x1f\x8b half a gzip", "truncated, damaged or not JSON.*get the file again"),
        (b"[]", "no usable record; is it the right file"),
        (b"hello\n", "no usable record; is it the right file"),
    ],
)
def test_half_a_download_and_a_file_of_something_else_are_refused(tmp_path, content, says):
    (tmp_path / "mine.json").write_bytes(content)
    with pytest.raises(AgentR1Error, match=says):
        made(tmp_path, tmp_path / "mine.json", skip_bad=True)


# ------------------------------------------------------------------------------------------ the hub


def publish(folder: Path, config: str | None, **splits: list[dict]) -> None:
    """A repository of the hub as its copy on disk: a table of each split, and the README that names
    the configuration."""
    part = folder / (config or "data")
    part.mkdir(parents=True, exist_ok=True)
    for split, records in splits.items():
        pq.write_table(pa.Table.from_pylist(records), part / f"{split}-00000-of-00001.parquet")
    files = [{"split": split, "path": f"{part.name}/{split}-*"} for split in splits]
    named = {"configs": [{"config_name": config or "default", "data_files": files}]}
    (folder / "README.md").write_text(f"---\n{json.dumps(named)}\n---\n")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The package `datasets` without a network. It takes a folder called OWNER/NAME here for the
    repository of that name; as many records count as published as are made."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for name, dataset in DATASETS.items():
        monkeypatch.setitem(dataset.counts, "train", 56 if "hotpotqa" in name else 16)
        monkeypatch.setitem(dataset.counts, "validation", 16 if "hotpotqa" in name else 8)
    records = [hub_form(record) for record in hotpotqa()]
    publish(tmp_path / HOTPOTQA.hub, "distractor", train=records[:56], validation=records[56:])
    return tmp_path


def test_the_hub_gives_the_same_rows_as_the_files_and_as_a_copy_of_it(tmp_path, published, hub):
    folder = made(tmp_path, None, test=0)
    assert manifest_of(folder)["dataset"] == {
        "hub": "hotpotqa/hotpot_qa",
        "revision": HOTPOTQA.revision,
    }
    assert rows_in(folder) == rows_in(made(tmp_path, published, "of files", test=0))
    copied = made(tmp_path, tmp_path / HOTPOTQA.hub, "of a copy", test=0)
    assert rows_in(folder) == rows_in(copied)
    assert [Path(name).parent.name for name in manifest_of(copied)["sources"]] == ["distractor"] * 2


MATHS = {
    "gsm8k": {"train": "train", "test": "test"},
    "dapo-math": {"train": "train"},  # published as one
}


@pytest.mark.parametrize("name", MATHS)
def test_mathematics_from_the_hub_and_from_files(hub, name, monkeypatch):
    dataset, records = DATASETS[name], RECORDS[name]()
    parts = {"train": records[:16], "test": records[16:]} if name == "gsm8k" else {"train": records}
    for split, part in parts.items():
        monkeypatch.setitem(dataset.counts, split, len(part))
    publish(hub / dataset.hub, dataset.config, **parts)
    folder = made(hub, None, name=name, **SMALL, system="Use your head.")
    rows = rows_in(folder)
    assert rows == rows_in(
        made(hub, hub / dataset.hub, "of a copy", name=name, **SMALL, system="Use your head.")
    )
    asked = {
        split: {row["prompt"][-1]["content"] for row in found} for split, found in rows.items()
    }
    assert not asked["test"] & (asked["train"] | asked["val"]) and records_in(folder) == []
    assert rows["test"][0]["prompt"][0] == {"role": "system", "content": "Use your head."}
    known = {r.get("question") or r["prompt"]: r.get("answer") or r["solution"] for r in records}
    for row in rows[
        "train"
    ]:  # the answer, and nothing of a solution, wherever the agent or its tools could read it
        said = known[row["prompt"][-1]["content"]].rpartition("#### ")[2].replace(",", "")
        assert row["reward_model"]["ground_truth"] == [said]
        assert "=" not in json.dumps([row["prompt"][-1], row["extra_info"], row["env_kwargs"]])
    if name == "gsm8k":
        for split, part in parts.items():
            write_jsonl(hub / "files" / dataset.files[split], part)
        assert (
            rows_in(
                made(hub, hub / "files", "from-files", name=name, **SMALL, system="Use your head.")
            )
            == rows
        )


def test_half_a_download_no_network_and_no_package_are_one_line_with_the_way_around(
    tmp_path, hub, monkeypatch
):
    monkeypatch.setitem(HOTPOTQA.counts, "train", 57)
    with pytest.raises(AgentR1Error, match="56 of 57 published records in train.*data.source=DIR"):
        made(tmp_path, None)
    shutil.rmtree(tmp_path / "hotpotqa")
    with pytest.raises(
        AgentR1Error,
        match=r"cannot fetch hotpotqa/hotpot_qa \(\w+: .*; fix.*hotpot_train_v1.1.json",
    ):
        made(tmp_path, None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(AgentR1Error, match=r"pip install 'agent-r1\[qa\]'.*data.source=DIR"):
        made(tmp_path, None)


# ------------------------------------------------------------------------------------ other corpora


@pytest.fixture
def beir(tmp_path, monkeypatch):
    """The hub's copy of BEIR's corpus: 50 passages in two files, in the form and under the names
    that it has there."""
    place = tmp_path / "server" / "corpus" / "corpus"
    place.mkdir(parents=True)
    for number, start in enumerate((0, 30)):
        rows = [
            {"_id": str(i), "title": f"T{i}", "text": "" if i == 7 else "x"}
            for i in range(start, 50)[:30]
        ]
        pq.write_table(pa.Table.from_pylist(rows), place / f"{number:04d}.parquet")
    asked = []

    def snapshot_download(repo_id, *, repo_type, revision, allow_patterns) -> str:
        asked.append((repo_id, repo_type, revision, allow_patterns))
        return str(tmp_path / "server")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    facts = tables.entries("corpus")["beir-hotpotqa"]
    monkeypatch.setitem(facts, "passages", 50)
    return SimpleNamespace(place=place, asked=asked, facts=facts)


def passages() -> list[Passage]:
    return list(corpus_passages("beir-hotpotqa", [], False, []))


def test_beirs_corpus_comes_from_the_hub(tmp_path, beir, one_file, monkeypatch):
    found = records_in(made(tmp_path, one_file, corpus="beir-hotpotqa"))
    assert found == [(str(i), f"T{i}", "" if i == 7 else "x") for i in range(50)]
    ((name, kind, revision, patterns),) = beir.asked
    assert (name, kind, revision) == ("BeIR/hotpotqa", "dataset", "refs/convert/parquet")
    assert all(
        fnmatch.fnmatch(str(p.relative_to(tmp_path / "server")), patterns[0])
        for p in beir.place.iterdir()
    )


def test_a_copy_on_the_hub_that_is_not_whole(beir, monkeypatch):
    with (
        monkeypatch.context() as more,
        pytest.raises(AgentR1Error, match="has 50 of 51 published passages"),
    ):
        more.setitem(beir.facts, "passages", 51)
        passages()
    second = beir.place / "0001.parquet"
    second.write_bytes(second.read_bytes()[:-100])
    with pytest.raises(AgentR1Error, match="server cannot be read .*delete it"):
        passages()

    def offline(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(
        AgentR1Error, match=r"ConnectionError: no route.*or the folder, with data.corpus=PATH"
    ):
        passages()


# ----------------------------------------------------------------------------------- evidence found


def play(
    folder: Path, chat: ChatFormat, searches: list[list[str]], answer: str | None, *settings: str
) -> list:
    """Trajectories of one episode for each list of queries, all of the same first training
    question, and its answer."""
    tools = search_over(folder)
    config = load_config("hotpotqa-tiny", ["rollout.max_context=1000", *settings])
    row = rows_in(folder)["train"][0]
    said = [
        [call(query=q) for q in queries] + [f"<answer>{answer}</answer>"] for queries in searches
    ]
    policy = ScriptedPolicy(chat, lambda session, turn, ids: said[int(session)][turn])
    tasks = [Task(row, "g", str(i)) for i in range(len(said))]
    return asyncio.run(
        run_episodes(
            make_loop(policy, chat, tools, config.rollout, config.env), tasks, Sampling(200)
        )
    )


@pytest.mark.parametrize("name", ["hotpotqa", "twowiki", "musique"])
def test_evidence_is_the_share_of_the_supporting_titles_that_searches_brought(tmp_path, chat, name):
    folder = made(tmp_path, written(tmp_path / "x.json", name), name=name, **SMALL)
    first, second = rows_in(folder)["train"][0]["extra_info"]["supporting"]
    other = next(p.title for p in passages_in(folder) if p.title not in (first, second))
    searches = [[], [other], [first], [first, first, other], [second, other, first]]
    done = play(folder, chat, searches, "nobody knows")
    assert [t.metrics["evidence"] for t in done] == [0, 0, 0.5, 0.5, 1]
    assert {t.reward for t in done} == {0} and all(
        "evidence_reward" not in t.reward_parts for t in done
    )


def test_evidence_is_paid_by_choice_and_beside_the_answer(tmp_path, chat, one_file):
    folder = made(tmp_path, one_file)
    row = rows_in(folder)["train"][0]
    titles, answer = row["extra_info"]["supporting"], row["reward_model"]["ground_truth"][0]
    wrong = play(folder, chat, [[], titles[:1], titles], "nobody knows", "env.evidence_reward=0.3")
    assert [t.reward for t in wrong] == pytest.approx([0, 0.15, 0.3])
    (right,) = play(folder, chat, [titles], answer, "env.evidence_reward=0.3")
    assert right.reward == pytest.approx(1.3) == sum(right.reward_parts.values())
    # Paid to the last action, like the rest of the outcome; and once, however often a title came
    # up.
    (again,) = play(folder, chat, [[titles[0]] * 3], answer, "env.evidence_reward=0.3")
    assert again.reward == pytest.approx(1.15) == again.steps[-1].reward
