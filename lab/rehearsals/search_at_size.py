"""Query the search service over 250,000 and a million vectors, and kill it during runs.

640 queries run concurrently. Index kind and width are those of the preset hotpotqa-4xh100. The
vectors are drawn (a topic plus noise), because encoding a million passages takes this machine
hours. FAISS, re-ranking and HTTP service are a run's code. So the times exclude the encoder.
Figures for 5.2 million passages are extrapolated from the two sizes.

Before that, a small run of each engine loses its service after the first step and gets it back
later. The run must report that it waits, make no step, and continue without a failed search.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from benchmarks.search_load import client

from agent_r1.cluster.plan import index_memory, passage_count
from agent_r1.config import load_config
from agent_r1.search.encoders import Encoder
from agent_r1.search.index import PassageIndex, build_index
from agent_r1.search.service import open_port, serve_search

ROOT = Path(__file__).parents[2]
PRESET = load_config("hotpotqa-4xh100")
SIZES, FULL = (250_000, 1_000_000), passage_count(PRESET)
DIM, TOPICS, CLIENTS, ROUNDS, STEPS = 384, 4096, 640, 4, 4
SMALL = [
    "--preset=small",
    "data.train=120",
    "data.val=8",
    "data.test=8",
    "data.cold=400",
    "trainer.threads=1",
    "cold_start.copy_steps=60",
    "cold_start.mix_steps=40",
    "rollout.prompts_per_step=4",
    "trainer.eval_every=0",
    *(f"trainer.steps={STEPS}", "trainer.loggers=[]"),
]
AGENT = [sys.executable, "-m", "agent_r1.app.cli"]
AWAY_S = 12
"""Seconds without the service: longer than a search tool's deadline of 10 seconds."""


class Drawn(Encoder):
    """Replace a neural encoder of width 384. A passage's title is its number; a query names it."""

    name, chunk, dim = "drawn", 50_000, DIM
    settings = {"name": "drawn", "topics": TOPICS}

    def __init__(self, vectors: np.ndarray):
        self.vectors = vectors
        """float32 [passages, DIM]: filled by `encode_passages`, or those of an index."""

    def encode_passages(self, passages: list[tuple[str, str]]) -> np.ndarray:
        first = int(passages[0][0])
        centres = np.random.default_rng(0).standard_normal((TOPICS, DIM), dtype=np.float32)
        topics = centres[np.arange(first, first + len(passages)) % TOPICS]
        noise = np.random.default_rng([1, first]).standard_normal(
            (len(passages), DIM), dtype=np.float32
        )
        self.vectors[first : first + len(passages)] = _unit(topics + 0.7 * noise)
        return self.vectors[first : first + len(passages)]

    def encode_queries(self, queries: list[str]) -> np.ndarray:
        numbers = [int(re.findall(r"\d+", query)[0]) for query in queries]
        noise = [
            np.random.default_rng([2, n]).standard_normal(DIM, dtype=np.float32) for n in numbers
        ]
        return _unit(self.vectors[numbers] + 0.02 * np.stack(noise))


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def run(sizes: tuple[int, ...] = SIZES) -> dict[str, Any]:
    """Return figures for each size, extrapolated to all abstracts, and of the runs."""
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="agent-r1-killed-") as folder:
        figures["killed"] = kill_the_service(Path(folder))
    for size in sizes:
        print(f"  {size:,} passages ...", flush=True)
        with tempfile.TemporaryDirectory(prefix="agent-r1-size-") as folder:
            figures[f"{size}"] = measure(Path(folder), size)
        print(f"  {figures[f'{size}']}", flush=True)
    last, factor = figures[f"{sizes[-1]}"], FULL / sizes[-1]
    plan_gib = index_memory(PRESET) / FULL * sizes[-1] / 2**30
    figures["plan_gib"] = round(plan_gib, 2)
    figures["plan_to_measured"] = round(plan_gib / last["resident_gib"], 2)
    figures["extrapolated_gib_5.2M"] = round(last["resident_gib"] * factor, 1)
    figures["extrapolated_build_hours_5.2M"] = round(last["build_s"] * factor / 3600, 1)
    if not 0.85 < figures["plan_to_measured"] < 1.15:
        raise AssertionError(
            f"the plan's index takes {plan_gib:.2f} GiB, the real one {last['resident_gib']} GiB"
        )
    return figures


# ----------------------------------------------------------------------------------------- the size


def measure(root: Path, size: int) -> dict[str, Any]:
    """Build an index, serve it in a separate process, and query it."""
    corpus, index = root / "corpus.jsonl", root / "index"
    words = ("alpha", "beta", "gamma", "delta", "of", "the", "and", "in")
    with corpus.open("w") as file:
        for i in range(size):
            text = " ".join(
                words[(i + k) % len(words)] for k in range(60)
            )  # as long as an abstract of HotpotQA's
            file.write(json.dumps({"id": str(i), "title": str(i), "text": text}) + "\n")
    kind = (
        "HNSW32" if PRESET.search.index == "auto" else PRESET.search.index
    )  # the kind that `auto` chooses if memory allows
    began = time.monotonic()
    manifest = build_index(corpus, index, Drawn(np.empty((size, DIM), np.float32)), kind)
    figures = {
        "kind": kind,
        "build_s": round(time.monotonic() - began),
        "recall_at_10": manifest["recall_at_10"],
    }
    service = subprocess.Popen(
        [sys.executable, "-m", "lab.rehearsals.search_at_size", index],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert service.stdout
        port = int(service.stdout.readline())
        return (
            figures
            | asyncio.run(ask(port, size, PRESET.search.top_k))
            | {"resident_gib": resident(service.pid)}
        )
    finally:
        service.kill()
        service.wait()


async def ask(port: int, size: int, top_k: int) -> dict[str, Any]:
    """Run CLIENTS concurrent agents, with one new query per request."""
    url, seconds = f"http://127.0.0.1:{port}", []
    places = np.random.default_rng(1).choice(size, (ROUNDS + 1) * CLIENTS, replace=False)
    first, rest = places[:CLIENTS], places[CLIENTS:]
    await asyncio.gather(
        *(client(url, [[f"passage {i}"]], top_k, []) for i in first)
    )  # loads pages into memory
    requests = [[f"passage {i}"] for i in rest]
    began = time.perf_counter()
    await asyncio.gather(*(client(url, requests, top_k, seconds) for _ in range(CLIENTS)))
    wall = time.perf_counter() - began
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        queries = [f"passage {i}" for i in first[:200]]
        answer = (
            await http.post(f"{url}/search", json={"queries": queries, "top_k": top_k})
        ).json()
    hits_of_own = sum(
        str(i) in [hit["title"] for hit in hits]
        for i, hits in zip(first, answer["results"], strict=False)
    )
    return {
        "queries_per_s": round(len(seconds) / wall),
        "p50_ms": round(1000 * statistics.median(seconds)),
        "p99_ms": round(1000 * statistics.quantiles(seconds, n=100)[98]),
        "own_passage_found": hits_of_own / 200,
    }


def resident(pid: int) -> float:
    """Return the GiB of memory of a process, without droppable pages of files."""
    status = Path(f"/proc/{pid}/status").read_text()
    match = re.search(r"RssAnon:\s+(\d+)", status)
    assert match, "Linux writes it for every process"
    return round(int(match[1]) / 2**20, 2)


# ----------------------------------------------------------------------------------------- the kill


def kill_the_service(home: Path) -> dict[str, Any]:
    """Run each engine, and return the seconds of its slowest step.

    Raises if it did not wait, or did not continue.
    """
    environment = os.environ | {
        "AGENT_R1_HOME": str(home), "COLUMNS": "200",
        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
    }  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for stage in ("data", "index", "cold-start"):
        subprocess.run(
            [*AGENT, stage, *SMALL], env=environment, check=True, stdout=subprocess.DEVNULL
        )
    return {engine: one_run(home, environment, port, engine) for engine in ("local", "verl")}


def one_run(home: Path, environment: dict[str, str], port: int, engine: str) -> dict[str, Any]:
    """Train; kill the service after the first step; restart it after AWAY_S of waiting."""
    print(f"  {engine}: a run, and its service killed ...", flush=True)
    log, metrics = home / f"{engine}.log", home / "runs" / engine / "metrics.jsonl"
    service = start_service(environment, port)
    options = [
        f"--run={engine}",
        f"--engine={engine}",
        "--plain",
        f"search.url=http://127.0.0.1:{port}",
    ]
    with log.open("w") as file:
        command = [*AGENT, "train", "grpo", *SMALL, *options]
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
    try:
        until(lambda: lines(metrics), process, log)
        service.kill()
        service.wait()
        until(lambda: "does not answer; waiting for it" in log.read_text(), process, log)
        done = len(lines(metrics))
        time.sleep(AWAY_S)
        if len(lines(metrics)) != done:
            raise AssertionError(f"{engine}: the run made a step without its searches")
        service = start_service(environment, port)
        process.wait(timeout=300)
    finally:
        process.terminate()
        process.wait()
        service.kill()
        service.wait()
    steps = [json.loads(line) for line in lines(metrics)]
    failures = sum(step["tool_calls/failed_rate"] for step in steps)
    if (
        process.returncode
        or len(steps) != STEPS
        or failures
        or "answers again" not in log.read_text()
    ):
        raise AssertionError(
            f"{engine}: exit code {process.returncode}, {len(steps)} steps, failed searches "
            f"{failures}"
        )
    seconds = sorted(step["timing_s/step"] for step in steps)
    return {
        "killed_after_step": done,
        "failed_searches": failures,
        "away_s": AWAY_S,
        "slowest_step_s": round(seconds[-1], 1),
        "median_step_s": round(statistics.median(seconds), 1),
    }


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def start_service(environment: dict[str, str], port: int) -> subprocess.Popen[bytes]:
    """Start the real command, and return when it answers."""
    command = [*AGENT, "search-server", *SMALL, f"--port={port}"]
    service = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    for _ in range(600):
        try:
            httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).raise_for_status()
            return service
        except httpx.TransportError:
            time.sleep(0.2)
    raise RuntimeError("the search service did not start")


def until(condition: Callable[[], Any], process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for the condition. Raises if the process ends first."""
    while not condition():
        if process.poll() is not None:
            raise RuntimeError(f"the run ended with {process.returncode}: {log.read_text()[-500:]}")
        time.sleep(0.1)


if __name__ == "__main__":  # the service, in a separate process
    encoder = Drawn(np.empty((0, DIM), np.float32))
    loaded = PassageIndex.load(Path(sys.argv[1]), encoder=encoder)
    encoder.vectors = loaded.vectors
    listener = open_port("127.0.0.1", 0)
    print(listener.getsockname()[1], flush=True)
    serve_search(loaded, listener)
