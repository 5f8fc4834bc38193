"""Room 2, the search service: real sockets, 60 clients, a slow encoder, and whatever may come in
over a port."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import httpx
import pytest
import uvicorn
from conftest import fails_with
from fastapi import FastAPI, Request
from qa_files import hotpotqa, write_json
from runs import AGENT, environment, main
from serving import serving

from agent_r1.config import load_config
from agent_r1.ground.errors import AgentR1Error
from agent_r1.search import service
from agent_r1.search.index import Hit
from agent_r1.search.remote import RemoteIndex
from agent_r1.search.searcher import Searcher
from agent_r1.tool.base import ToolCall, call_tool
from agent_r1.tool.search import SearchTool
from agent_r1.workspace import Workspace


@pytest.fixture(autouse=True)
def _no_pause_between_attempts_to_connect(monkeypatch):
    monkeypatch.setattr("httpcore._async.connection.RETRIES_BACKOFF_FACTOR", 0)


class SlowIndex:
    """Stands in for a PassageIndex whose encoder takes `seconds` a batch; answers with the query
    itself."""

    def __init__(self, seconds: float = 0.0):
        self.seconds, self.batches, self.fail = seconds, [], False
        self.manifest = {
            "encoder": {"name": "slow"},
            "corpus_sha256": "c0ffee",
            "count": 3,
            "dim": 2,
            "index": "Flat",
        }

    def search(self, queries, top_k):
        self.batches.append(len(queries))
        time.sleep(self.seconds)
        if self.fail:
            raise RuntimeError("index on fire")
        return [
            [Hit(f"{query}/{rank}", query, "text", 1 / (rank + 1)) for rank in range(top_k)]
            for query in queries
        ]


@contextmanager
def running(index, port=0, **settings):
    """The service over `index` in a thread of this process; its address."""
    listener = service.open_port("127.0.0.1", port)
    http = uvicorn.Server(uvicorn.Config(service.make_app(index, **settings), log_level="critical"))
    thread = threading.Thread(target=http.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        http.should_exit = True
        thread.join(timeout=100)


def nobody() -> str:
    """An address at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def post(url: str, **options) -> httpx.Response:
    return httpx.post(f"{url}/search", timeout=100, trust_env=False, **options)


def get(url: str, path: str, **params) -> httpx.Response:
    return httpx.get(f"{url}{path}", params=params, timeout=100, trust_env=False)


# ---------------------------------------------------------------------------------- what it answers


@pytest.fixture(scope="module")
def quick():
    with running(SlowIndex()) as url:
        yield url


def test_search_and_health(quick):
    answer = post(quick, json={"queries": ["a", "b"], "top_k": 2})
    assert answer.status_code == 200
    assert [[hit["id"] for hit in hits] for hits in answer.json()["results"]] == [
        ["a/0", "a/1"],
        ["b/0", "b/1"],
    ]
    assert answer.json()["results"][0][0] == {
        "id": "a/0",
        "title": "a",
        "text": "text",
        "score": 1.0,
    }
    assert len(post(quick, json={"queries": ["c"]}).json()["results"][0]) == 3
    health = get(quick, "/health").json()
    assert health["status"] == "ok" and health["count"] == 3 and health["corpus_sha256"] == "c0ffee"


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"", 422, "body: Invalid JSON"),
        (b'{"queries": ["a"], "file": "/etc/passwd"}', 422, "file"),
        (json.dumps({"queries": ["a" * 2001]}).encode(), 422, "queries.0"),
        (json.dumps({"queries": ["a" * 2_000_000]}).encode(), 413, "larger than 1048576 bytes"),
    ],
)
def test_a_bad_body_is_refused_in_one_line_that_does_not_repeat_it(quick, body, status, says):
    answer = post(quick, content=body)
    assert (
        answer.status_code == status and says in answer.json()["detail"] and len(answer.text) < 300
    )
    assert post(quick, json={"queries": ["still there"]}).status_code == 200


def test_a_body_without_an_end_is_cut_off_and_one_that_stops_gets_no_answer_from_the_others_time():
    with running(SlowIndex(), timeout_s=0.5) as url, socket.socket() as dawdler:

        def endless():  # chunked: no length is announced, so only counting helps
            while True:
                yield b"x" * 65536

        with suppress(httpx.TransportError):  # the server may hang up while we are still sending
            assert post(url, content=endless()).status_code == 413
        dawdler.settimeout(10)
        dawdler.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        dawdler.sendall(b"POST /search HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert post(url, json={"queries": ["a"]}).status_code == 200
        assert b"504" in dawdler.recv(1000)


# ---------------------------------------------------------------------------------------- the crowd


def test_60_clients_at_once_share_batches_and_health_stays_prompt():
    index = SlowIndex(seconds=0.1)
    with running(index) as url:

        async def crowd():
            limits = httpx.Limits(max_connections=61)
            async with httpx.AsyncClient(timeout=100, trust_env=False, limits=limits) as client:
                bodies = [{"queries": [f"q{i}", "common"], "top_k": 1} for i in range(60)]
                asks = [
                    asyncio.create_task(client.post(f"{url}/search", json=body)) for body in bodies
                ]
                while not index.batches:
                    await asyncio.sleep(0.01)
                health, done = await client.get(f"{url}/health"), sum(ask.done() for ask in asks)
                return await asyncio.gather(*asks), health, done

        answers, health, done = asyncio.run(crowd())
        counters = get(url, "/health").json()
    titles = [[hits[0]["title"] for hits in a.json()["results"]] for a in answers]
    assert titles == [[f"q{i}", "common"] for i in range(60)]
    assert health.status_code == 200 and done < 60  # it did not stand in line
    assert len(index.batches) <= 15  # one by one they would have been 60 batches
    assert counters["stats"]["queries"] == 120 and counters["waiting"] == 0
    assert sum(index.batches) <= 75  # "common" was searched once a batch at most


def test_an_encoder_that_hangs_is_answered_in_time_and_its_queue_is_bounded(monkeypatch):
    monkeypatch.setattr(service, "MAX_WAITING", 10)
    with running(SlowIndex(seconds=0.4), timeout_s=0.2) as url, ThreadPoolExecutor(8) as pool:
        answers = list(
            pool.map(lambda i: post(url, json={"queries": [f"{i}{j}" for j in range(4)]}), range(8))
        )
        assert {a.status_code for a in answers} == {503, 504}
        assert all("Retry-After" in a.headers for a in answers if a.status_code == 503)
        while get(url, "/health").json()[
            "waiting"
        ]:  # what was given up on is worked off, and leaves the queue
            time.sleep(0.1)


def test_an_index_that_raises_is_500_and_not_the_end():
    index = SlowIndex()
    with running(index) as url:
        index.fail = True
        answer = post(url, json={"queries": ["a"]})
        assert answer.status_code == 500 and "on fire" not in answer.text
        index.fail = False
        assert post(url, json={"queries": ["a"]}).status_code == 200


# --------------------------------------------------------------------------------------- the client


def test_the_client_gives_what_the_index_gives_and_a_searcher_over_it_asks_once_a_turn():
    index, queries = SlowIndex(), [f"q{i}" for i in range(300)]  # more than one request
    with running(index) as url:
        remote = RemoteIndex(url)
        assert (
            remote.search(queries, 2) == SlowIndex().search(queries, 2)
            and remote.search([], 2) == []
        )
        index.batches.clear()
        searcher = Searcher(remote)

        async def episodes():
            return await asyncio.gather(*(searcher.search(query, 1) for query in "abcab"))

        assert [hits[0].title for hits in asyncio.run(episodes())] == list("abcab")
        assert index.batches == [3] and searcher.stats.batches == 1


def test_a_service_that_stays_away_is_waited_for_once():
    said: list[str] = []
    index = RemoteIndex(nobody(), pause=0.01, wait_s=1.0, tell=said.append)
    for _ in range(2):
        with fails_with("server_unreachable"):
            index.search(["a"], 1)
    assert len(said) == 1 and "waiting for it, up to 1 s" in said[0]


def test_a_service_that_comes_back_with_another_index_is_refused():
    index, other, said = SlowIndex(), SlowIndex(), []
    other.manifest = index.manifest | {"corpus_sha256": "another"}
    with running(index) as url:
        remote = RemoteIndex(url, pause=0.01, wait_s=100, tell=said.append)
        remote.check("slow", "c0ffee")
    with ThreadPoolExecutor() as pool:
        found = pool.submit(remote.search, ["a"], 1)
        while not said:
            time.sleep(0.01)
        with (
            running(other, port=int(url.rpartition(":")[2])),
            pytest.raises(AgentR1Error, match="has another index"),
        ):
            found.result(timeout=100)


# ----------------------------------------------------------------------------- Search-R1's protocol


@contextmanager
def retriever(answer=None, asked=None):
    """A server of Search-R1's form that shares no code with ours; its address. `answer`: what it
    says instead; `asked`: a list that gets the bodies."""

    def found(rank, query):
        document = {"id": str(rank), "contents": f'"{query} ("a")"\nLine one.\nLine two.'}
        return {"document": document, "score": 9.5 - rank}

    app = FastAPI()

    @app.post("/retrieve")
    async def retrieve(request: Request):
        body = await request.json()
        if asked is not None:
            asked.append(body)
        return answer or {
            "result": [[found(rank, q) for rank in range(body["topk"])] for q in body["queries"]]
        }

    with serving(app) as url:
        yield url


def test_a_retriever_of_search_r1_answers_our_agents():
    asked: list[dict] = []
    with retriever(asked=asked) as url:
        said: list[str] = []
        remote = RemoteIndex(f"{url}/retrieve/", tell=said.append)
        remote.check("ngram", "c0ffee")
        assert said == [
            f"search: {url}/retrieve does not say what it searches; what it finds is taken as it "
            "comes"
        ]
        assert remote.search(["x", "y"], 2)[1] == [
            Hit("0", 'y ("a")', "Line one.\nLine two.", 9.5),
            Hit("1", 'y ("a")', "Line one.\nLine two.", 8.5),
        ]
        assert asked[-1] == {"queries": ["x", "y"], "topk": 2, "return_scores": True}
        tool = {"search": SearchTool(Searcher(remote), 1)}
        result = asyncio.run(call_tool(tool, ToolCall("search", {"query": "z"}), 10, 4000))
        assert result.content == 'z ("a"): Line one. Line two.' and result.data["titles"] == [
            'z ("a")'
        ]
        with pytest.raises(AgentR1Error, match="404.*named search.url=http://HOST:PORT/retrieve"):
            RemoteIndex(url).check("ngram", "c0ffee")


# --------------------------------------------------------------------------------- the real command


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A home with data and index of a small HotpotQA."""
    folder = tmp_path_factory.mktemp("home")
    source = write_json(folder / "mine.json", hotpotqa())
    settings = [
        "--preset=small",
        "data.name=hotpotqa",
        f"data.source={source}",
        "data.train=40",
        "data.val=8",
        "data.test=12",
        "rollout.prompts_per_step=8",
        "search.dim=512",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENT_R1_HOME", str(folder))
        assert main("data", *settings) == 0 and main("index", *settings) == 0
        yield folder, settings


@contextmanager
def command(folder, *argv, url=None):
    """`agent-r1 search-server ARGV` in a process of its own, when it answers."""
    url = url or nobody()
    argv = [AGENT, "search-server", f"--port={url.rpartition(':')[2]}", *argv]
    process = subprocess.Popen(argv, env=environment(folder), stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            try:
                assert get(url, "/health").status_code == 200
                break
            except httpx.TransportError:
                time.sleep(0.1)
        yield process, url
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_the_command_answers_as_the_index_does_and_is_waited_for_when_killed(home):
    folder, settings = home
    call, said = ToolCall("search", {"query": "author of Moby-Dick"}), []
    with command(folder, *settings) as (process, url):
        local, remote = (
            load_config("small", settings[1:]),
            load_config("small", [*settings[1:], f"search.url={url}"]),
        )
        here, there = (
            asyncio.run(call_tool(Workspace(config).load_tools(), call, 10, 4000))
            for config in (local, remote)
        )
        assert (
            here.content == there.content
            and "Moby-Dick is a novel by Herman Melville" in here.content
        )
        assert Workspace(remote).retriever.startswith("ngram")
        with retriever() as foreign:
            theirs = Workspace(
                load_config("small", [*settings[1:], f"search.url={foreign}/retrieve"])
            )
            found = asyncio.run(call_tool(theirs.load_tools(), call, 10, 4000)).content
        assert (
            found.startswith('author of Moby-Dick ("a"): Line one.')
            and theirs.retriever == f"{foreign}/retrieve, top 2"
        )
        index = Workspace(local).load_index()
        queries = [passage.title for passage in index.passages]
        assert RemoteIndex(url).search(queries, 3) == index.search(
            queries, 3
        )  # to the last bit of the scores
        assert main("index", *settings, f"search.url={url}") == 0
        with pytest.raises(AgentR1Error, match="has another index .encoder ngram"):
            RemoteIndex(url).check("ngram", "0" * 64)
        assert (
            main("search-server", f"--port={url.rpartition(':')[2]}", *settings) == 1
        )  # the port is taken
        # Its deadline would be over long before the service is there again.
        tool = SearchTool(
            Searcher(RemoteIndex(url, pause=0.01, wait_s=100, tell=said.append), cache_size=0),
            top_k=3,
        )
        before = asyncio.run(call_tool({"search": tool}, call, 0.1, 4000))
        process.kill()
        process.wait()
    with ThreadPoolExecutor() as pool:
        after = pool.submit(asyncio.run, call_tool({"search": tool}, call, 0.1, 4000))
        while not said:
            time.sleep(0.01)
        assert "does not answer; waiting for it, up to 100 s" in said[0] and not after.done()
        with command(folder, *settings, url=url) as (process, _):
            assert after.result(timeout=100).content == before.content and before.ok
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=100) == 130
    assert len(said) == 2 and said[1] == f"the search service at {url} answers again"


# ----------------------------------------------------------------------- Search-R1's form, deadline


def test_it_answers_clients_of_search_r1():
    """Our own client in their form finds the same as in ours; without scores come documents."""
    with running(SlowIndex()) as url:
        ours = RemoteIndex(url).search(["a", "b"], 2)
        assert RemoteIndex(f"{url}/retrieve").search(["a", "b"], 2) == ours
        answer = httpx.post(f"{url}/retrieve", json={"queries": ["a"], "topk": 1}).json()
        assert answer == {"result": [[{"id": "a/0", "contents": '"a"\ntext'}]]}
        body = {"queries": ["a"], "topk": None, "return_scores": True}
        assert len(httpx.post(f"{url}/retrieve", json=body).json()["result"][0]) == 3
        refused = httpx.post(f"{url}/retrieve", json={"queries": [], "topk": 1})
        assert refused.status_code == 422


def connect(address: tuple[str, int], sent: bytes) -> socket.socket:
    client = socket.create_connection(address, timeout=10)
    client.sendall(sent)
    return client


def test_headers_have_a_deadline():
    """Half-open connections are closed, also if each sends a further header line; an answer that
    takes longer than the deadline arrives."""
    listener = service.open_port("127.0.0.1", 0)
    config = uvicorn.Config(
        service.make_app(SlowIndex(1.5)),
        http=service.protocol_with_deadline(0.5),
        log_level="critical",
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    address = listener.getsockname()
    try:
        half_open = [connect(address, b"GET /health HTTP/1.1\r\nHost: x\r\n") for _ in range(20)]
        half_open += [connect(address, b"") for _ in range(5)]
        started = time.monotonic()
        slow = httpx.post(
            f"http://127.0.0.1:{address[1]}/search", json={"queries": ["a"], "top_k": 1}, timeout=30
        )
        assert slow.status_code == 200 and time.monotonic() - started > 1.5
        for client in half_open:
            with suppress(OSError):
                client.sendall(b"X-Slow: 1\r\n")
            with suppress(ConnectionError):
                assert client.recv(100) == b""  # closed by the server
            client.close()
        # A second request on the same connection has a deadline for its headers, too.
        client = connect(address, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(10_000).startswith(b"HTTP/1.1 200")
        client.sendall(b"GET /health HTTP/1.1\r\n")
        rest = b"?"
        while rest:
            rest = client.recv(10_000)
        client.close()
    finally:
        server.should_exit = True
        thread.join(timeout=30)
