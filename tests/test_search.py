"""Room 2: vectors, the index and its refusals, batching and caching."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from conftest import fails_with
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.data.build import build
from agent_r1.data.storage import read_rows
from agent_r1.ground.errors import AgentR1Error
from agent_r1.search.encoders import NgramEncoder, SentenceTransformerEncoder
from agent_r1.search.index import Hit, PassageIndex, build_index, recall_at_k
from agent_r1.search.searcher import MAX_QUERY_CHARS, Searcher
from agent_r1.tool import ToolCall, ToolErrorKind, call_tool
from agent_r1.tool.search import SearchTool
from agent_r1_recipes.laptop.settings import TinyHopSettings

PASSAGES = [
    ("Vexlor", "Vexlor is a company founded by Marn in Tulo."),
    ("Marn", "Marn was born in Tulo and founded Vexlor."),
    ("Tulo", "Tulo is a city in Ostra."),
    ("Ostra", "Ostra is a country with the capital Tulo."),
    ("Drimel", "Drimel is a film by Marn."),
]


def write_corpus(path: Path, passages=PASSAGES) -> Path:
    lines = [
        json.dumps({"id": f"p{i}", "title": title, "text": text})
        for i, (title, text) in enumerate(passages)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A small TinyHop with an index over it."""
    folder = tmp_path_factory.mktemp("world")
    build(TinyHopSettings(train=300, val=20, test=100, entities=200), 0, folder / "data")
    build_index(folder / "data" / "corpus.jsonl", folder / "index", NgramEncoder(1024))
    return folder


@pytest.fixture
def built(tmp_path):
    """A folder with corpus.jsonl and an index over five passages."""
    build_index(write_corpus(tmp_path / "corpus.jsonl"), tmp_path / "index", NgramEncoder(256))
    return tmp_path


# ----------------------------------------------------------------------------------------- encoders


def fitted(dim=1024) -> NgramEncoder:
    encoder = NgramEncoder(dim)
    encoder.fit(PASSAGES)
    return encoder


ENCODER = fitted()


def test_vectors_are_float32_of_length_one_and_survive_a_file(tmp_path):
    ENCODER.save(tmp_path)
    again = NgramEncoder(1024)
    again.load(tmp_path)
    np.testing.assert_array_equal(
        again.encode_passages(PASSAGES), ENCODER.encode_passages(PASSAGES)
    )
    queries, passages = (
        again.encode_queries(["Vexlor", "\ud800 Tulo \udfff"]),
        again.encode_passages(PASSAGES),
    )
    for vectors, count in ((queries, 2), (passages, 5)):
        assert vectors.shape == (count, 1024) and vectors.dtype == np.float32
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)


def test_idf_is_the_formula_of_the_docstring():
    _, slots, _ = ENCODER._hash_grams("vexlor")  # the first gram of a word is the word itself
    assert ENCODER._df[slots[0]] == 2
    assert ENCODER._idf[slots[0]] == pytest.approx(np.log(1 + (5 - 2 + 0.5) / (2 + 0.5)))
    _, unseen, _ = ENCODER._hash_grams("qqqq")
    assert ENCODER._idf[unseen[0]] == 0


@given(st.lists(st.text(alphabet=st.characters(codec=None), max_size=60), max_size=5))
def test_any_text_encodes_alone_as_in_company(texts):
    together = ENCODER.encode_queries(texts)
    assert together.shape == (len(texts), 1024) and np.isfinite(together).all()
    for text, vector in zip(texts, together, strict=True):
        np.testing.assert_array_equal(ENCODER.encode_queries([text])[0], vector)


# -------------------------------------------------------------------------------------------- index


def test_search_returns_passages_and_scores(built):
    index = PassageIndex.load(built / "index")
    (hits,) = index.search(["Vexlor founder"], 3)
    assert [hit.id for hit in hits][0] == "p0" and len(hits) == 3
    assert (hits[0].title, hits[0].text) == PASSAGES[0]
    assert 1 >= hits[0].score >= hits[1].score >= hits[2].score >= -1
    assert sorted(hit.id for hit in index.search(["Vexlor"], 50)[0]) == [
        "p0",
        "p1",
        "p2",
        "p3",
        "p4",
    ]
    assert index.search(["?!", ""], 3) == [[], []]  # nothing to compare
    assert index.search([], 3) == []


def test_search_agrees_with_plain_dot_products(world):
    index = PassageIndex.load(world / "index")
    rng = random.Random(0)
    queries = [
        f"{p.title} {rng.choice(['founder', 'mayor', 'author'])}"
        for p in rng.sample(index.passages, 40)
    ]
    pairs = [(p.title, p.text) for p in index.passages]
    scores = index.encoder.encode_queries(queries) @ index.encoder.encode_passages(pairs).T
    for row, hits in zip(scores, index.search(queries, 3), strict=True):
        np.testing.assert_allclose([hit.score for hit in hits], np.sort(row)[::-1][:3], atol=2e-5)


def test_result_does_not_depend_on_the_batch(world):
    index = PassageIndex.load(world / "index")
    queries = [
        f"{passage.title} {word}" for passage in index.passages[:40] for word in ("founder", "city")
    ]
    together = index.search(queries, 3)
    assert together == [index.search([query], 3)[0] for query in queries]
    assert together == index.search(queries[::-1], 3)[::-1]


def test_equal_scores_come_in_the_order_of_the_corpus(tmp_path):
    twins = [("Marn", "the same")] * 20 + [("Tulo", "another")]
    build_index(
        write_corpus(tmp_path / "corpus.jsonl", twins), tmp_path / "index", NgramEncoder(256)
    )
    first, second = PassageIndex.load(tmp_path / "index").search(["Tulo", "Marn"], 20)
    assert first[0].id == "p20" and [hit.id for hit in second] == [f"p{i}" for i in range(20)]


def test_recall_on_tinyhop(world):
    index = PassageIndex.load(world / "index")
    rows = [
        row for split in ("train", "test") for row in read_rows(world / "data" / f"{split}.parquet")
    ]
    name_only = [
        [{**lookup, "relation": ""} for lookup in row["extra_info"]["lookups"]] for row in rows
    ]
    for asked in (rows, [{"extra_info": {"lookups": lookups}} for lookups in name_only]):
        # 0.997 and more is measured.
        assert recall_at_k(index, asked, 3) >= 0.98


def test_recall_by_hand(built):
    index = PassageIndex.load(built / "index")
    right = {"entity": "Vexlor", "relation": "founder", "value": "Marn", "passage_id": "p0"}
    wrong = {**right, "passage_id": "p4"}
    assert recall_at_k(index, [{"extra_info": {"lookups": [right, wrong]}}], 1) == 0.5


def test_an_index_that_is_there_is_left_alone_and_half_a_build_is_not_in_the_way(built):
    with fails_with("already_exists"):
        build_index(built / "corpus.jsonl", built / "index", NgramEncoder(128))
    assert PassageIndex.load(built / "index").search(["Tulo"], 1)[0][0].id == "p2"
    (built / "again").mkdir()
    (built / "again" / "vectors.faiss").write_text("half")
    build_index(built / "corpus.jsonl", built / "again", NgramEncoder(128))
    assert PassageIndex.load(built / "again").search(["Tulo"], 1)[0][0].id == "p2"
    assert sorted(path.name for path in built.glob("[!.]*")) == ["again", "corpus.jsonl", "index"]


def cut(path: Path, bytes_left: int) -> None:
    path.write_bytes(path.read_bytes()[:bytes_left])


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda folder: shutil.rmtree(folder / "index"), "missing_index"),
        (lambda folder: cut(folder / "index/manifest.json", 20), "damaged_index"),
        (lambda folder: cut(folder / "index/vectors.faiss", 2000), "damaged_index"),
        (lambda folder: cut(folder / "index/encoder.npz", 300), "damaged_index"),
        (
            lambda folder: write_corpus(folder / "corpus.jsonl", PASSAGES[::-1]),
            "index_of_other_corpus",
        ),
    ],
    ids=["no index", "manifest", "vectors", "encoder", "corpus"],
)
def test_a_damaged_index_is_refused_with_a_remedy(built, damage, code):
    damage(built)
    with fails_with(code, "agent-r1 "):
        PassageIndex.load(built / "index")


def test_another_encoder_is_refused(built):
    for encoder in (NgramEncoder(512), SentenceTransformerEncoder("intfloat/e5-base-v2")):
        with fails_with("index_of_other_encoder"):
            PassageIndex.load(built / "index", encoder=encoder)
    assert PassageIndex.load(built / "index", built / "corpus.jsonl", NgramEncoder(256)).search(
        ["Tulo"], 1
    )


# ----------------------------------------------------------------------------------------- searcher


class CountingIndex:
    """Stands in for a PassageIndex: answers with the query itself, and remembers what it was asked.
    Raises `fail`."""

    def __init__(self, fail: Exception | None = None):
        self.calls: list[list[str]] = []
        self.fail = fail

    def search(self, queries, top_k):
        self.calls.append(queries)
        if self.fail:
            raise self.fail
        return [
            [Hit(f"{query}/{rank}", query, "", 1 / (rank + 1)) for rank in range(top_k)]
            for query in queries
        ]


def ask(searcher: Searcher, *asked: tuple[str, int]) -> list:
    """Answers, or what was raised, of queries that line up in one turn of a new event loop."""

    async def main():
        return await asyncio.gather(
            *(searcher.search(*each) for each in asked), return_exceptions=True
        )

    return asyncio.run(main())


def one_each(queries: str) -> list[tuple[str, int]]:
    return [(query, 1) for query in queries]


def test_the_first_query_of_an_episode_decides_how_many_passages_its_results_have():
    def passages(tool, queries):
        results = [asyncio.run(tool.execute({"query": query})) for query in queries]
        return [len(result.content.split("\n")) for result in results]

    varied = SearchTool.over(CountingIndex(), top_k=6, min_k=2)
    # "a" is code point 97: 2 + 97 % 5 = 4.
    assert [passages(varied.for_episode({}), [letter]) for letter in "abcde"] == [
        [4], [5], [6], [2], [3]
    ]  # fmt: skip
    assert passages(varied.for_episode({}), [" b ", "a", "b"]) == [5, 5, 5]
    episode: dict = {}
    assert passages(varied.for_episode(episode), "a") == [4]
    assert passages(varied.for_episode(episode), "b") == [4]
    assert passages(varied, "ab") == [4, 5]
    fixed = SearchTool.over(CountingIndex(), 3)
    assert fixed.for_episode({}) is fixed and passages(fixed, "abcde") == [3] * 5


def test_one_turn_one_batch_and_equal_queries_asked_once():
    index = CountingIndex()
    searcher = Searcher(index, cache_size=100)
    results = ask(searcher, *((query, 2) for query in "abcab"))
    assert index.calls == [["a", "b", "c"]]
    assert [[hit.id for hit in hits] for hits in results] == [[f"{q}/0", f"{q}/1"] for q in "abcab"]
    assert vars(searcher.stats) == {"queries": 5, "cache_hits": 0, "searched": 3, "batches": 1}
    assert [len(hits) for hits in ask(searcher, ("d", 1), ("d", 3), ("e", 2))] == [1, 3, 2] and len(
        index.calls
    ) == 2


def test_cache_over_several_event_loops_that_nobody_can_spoil():
    index = CountingIndex()
    searcher = Searcher(index, cache_size=2)
    for query in "abaca":
        (hits,) = ask(searcher, (query, 1))
        assert hits[0].title == query
        hits.clear()
    assert index.calls == [["a"], ["b"], ["c"]] and searcher.stats.cache_hits == 2
    ask(searcher, ("b", 1))  # a was used more recently than b, so c pushed b out
    assert index.calls[-1] == ["b"] and len(index.calls) == 4
    without = Searcher(index, cache_size=0)
    ask(without, ("a", 1)), ask(without, ("a", 1))
    assert index.calls[4:] == [["a"]] * 2


@pytest.mark.parametrize(
    ("error", "asked"),
    [(RuntimeError("index on fire"), 3), (AgentR1Error("the service is down; start it"), 1)],
)
def test_a_failed_batch_raises_in_every_waiter_and_is_not_remembered(error, asked):
    """A batch that failed is asked again query by query, unless a service has said what is
    wrong."""
    index = CountingIndex(error)
    searcher = Searcher(index)
    assert ask(searcher, *one_each("aab")) == [error] * 3 and len(index.calls) == asked
    index.fail = None
    assert [hits[0].title for hits in ask(searcher, *one_each("aab"))] == ["a", "a", "b"]


# ----------------------------------------------------------- an index that hangs, or takes its time


class HangingIndex(CountingIndex):
    """Hangs in queries for "hang" until it is let go; gives up by itself, so that a failing test
    ends."""

    def __init__(self):
        super().__init__()
        self.let_go, self.begun, self.hangs = threading.Event(), False, False

    def search(self, queries, top_k):
        if "hang" in queries:
            self.begun = self.hangs = True
            self.let_go.wait(3)
            self.hangs = False
        return super().search(queries, top_k)


@pytest.fixture
def hanging():
    index = HangingIndex()
    yield index
    index.let_go.set()


async def search_call(searcher: Searcher, query: str, timeout_s: float = 5.0):
    return await call_tool(
        {"search": SearchTool(searcher, 1)}, ToolCall("search", {"query": query}), timeout_s, 4000
    )


def test_a_search_that_hangs_ends_at_its_deadline_and_stops_nobody_else(hanging):
    searcher = Searcher(hanging)

    async def main():
        before = await search_call(searcher, "a")
        hung = asyncio.create_task(search_call(searcher, "hang", timeout_s=0.3))
        while not hanging.begun:
            await asyncio.sleep(0.01)
        others = [
            await search_call(searcher, "a"),  # remembered
            await search_call(
                searcher, "b", timeout_s=0.1
            ),  # new: the index has one caller at a time
        ]
        still = hanging.hangs
        result = await hung
        at_deadline, _ = hanging.hangs, hanging.let_go.set()
        return before, others, still, result, at_deadline, await search_call(searcher, "c")

    before, (remembered, new), still, result, at_deadline, after = asyncio.run(main())
    assert still and at_deadline  # all of that while the index hung
    assert remembered == dataclasses.replace(before, seconds=remembered.seconds)
    assert [r.error for r in (result, new)] == [ToolErrorKind.TIME_OUT] * 2
    assert after.ok and hanging.calls == [["a"], ["hang"], ["c"]]  # nobody waits for b any more


def test_many_lines_share_the_next_batch_while_the_index_works(hanging):
    """What comes in meanwhile, from however many turns, is one batch."""
    searcher = Searcher(hanging)

    async def main():
        first = searcher.ask("hang", 1)
        await asyncio.sleep(0.01)
        rest = []
        for query in "abcab":
            rest.append(searcher.ask(query, 1))
            await asyncio.sleep(0)
        waiting = searcher.waiting
        hanging.let_go.set()
        return waiting, [(await future)[0].title for future in [first, *rest]]

    assert asyncio.run(main()) == (6, ["hang", *"abcab"])
    assert hanging.calls == [["hang"], ["a", "b", "c"]]


# ------------------------------------------------------------------------------ what a query may be


class TokenizingIndex(CountingIndex):
    """Reads its queries with a fast tokenizer, as a neural encoder does."""

    def __init__(self, tokenizer):
        super().__init__()
        self.tokenizer = tokenizer

    def search(self, queries, top_k):
        self.tokenizer(queries)
        return super().search(queries, top_k)


def test_the_tool_cleans_and_bounds_what_it_asks(tokenizer):
    index = TokenizingIndex(tokenizer)

    async def main():
        queries = ["a", "half of a pair: \ud83c", "x" * 1_000_000, " " * 5000]
        return await asyncio.gather(*(search_call(Searcher(index), query) for query in queries))

    *fine, blank = asyncio.run(main())
    assert all(result.ok for result in fine) and blank.error is ToolErrorKind.INVALID_ARGUMENTS
    assert sorted(q for queries in index.calls for q in queries) == [
        "a",
        "half of a pair: ?",
        "x" * MAX_QUERY_CHARS,
    ]
