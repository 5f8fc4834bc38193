"""The search service over 250,000 and a million vectors: build time, memory, p50 and p99 under 640 queries at once.

Index kind and width are those of the preset hotpotqa-4xh100. The vectors are drawn, not encoded (a topic plus noise), since
encoding a million passages takes this machine hours; the rest (FAISS, re-ranking, HTTP service) is the code of a run. So
these times are without the encoder's. What is said of 5.2 million passages is extrapolated from the two sizes.
"""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from agent_r1.config import load_config
from agent_r1.search.index import PassageIndex, build_index
from agent_r1.search.server import open_port, serve
from benchmarks.search_load import client

SIZES, FULL = (250_000, 1_000_000), 5_233_329
DIM, TOPICS, CLIENTS, ROUNDS = 384, 4096, 640, 4


class Drawn:
    """Stands in for a neural encoder of width 384. A passage's title is its number; a query names one and is near it."""

    name, chunk, dim = "drawn", 50_000, DIM
    settings = {"name": "drawn", "topics": TOPICS}

    def __init__(self, vectors: np.ndarray):
        self.vectors = vectors
        """float32 [passages, DIM]: filled by `encode_passages`; of an index that exists, its own."""

    def fit(self, passages) -> None: ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...

    def encode_passages(self, passages: list[tuple[str, str]]) -> np.ndarray:
        first = int(passages[0][0])
        centres = np.random.default_rng(0).standard_normal((TOPICS, DIM), dtype=np.float32)
        topics = centres[np.arange(first, first + len(passages)) % TOPICS]
        noise = np.random.default_rng([1, first]).standard_normal((len(passages), DIM), dtype=np.float32)
        self.vectors[first : first + len(passages)] = _unit(topics + 0.7 * noise)
        return self.vectors[first : first + len(passages)]

    def encode_queries(self, queries: list[str]) -> np.ndarray:
        numbers = [int(re.search(r"\d+", query).group()) for query in queries]
        noise = [np.random.default_rng([2, n]).standard_normal(DIM, dtype=np.float32) for n in numbers]
        return _unit(self.vectors[numbers] + 0.02 * np.stack(noise))


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def run(sizes: tuple[int, ...] = SIZES) -> dict[str, Any]:
    """Figures for each size, and what they say about the whole of Wikipedia's abstracts."""
    figures: dict[str, Any] = {}
    for size in sizes:
        print(f"  {size:,} passages ...", flush=True)
        with tempfile.TemporaryDirectory(prefix="agent-r1-size-") as folder:
            figures[f"{size}"] = measure(Path(folder), size)
        print(f"  {figures[f'{size}']}", flush=True)
    last = figures[f"{sizes[-1]}"]
    grown = FULL / sizes[-1]
    figures["extrapolated_gib_5.2M"] = round(last["resident_gib"] * grown, 1)
    figures["extrapolated_build_hours_5.2M"] = round(last["build_s"] * grown / 3600, 1)
    return figures


def measure(root: Path, size: int) -> dict[str, Any]:
    """Build, serve in a process of its own, ask."""
    corpus, index = root / "corpus.jsonl", root / "index"
    words = ("alpha", "beta", "gamma", "delta", "of", "the", "and", "in")
    with corpus.open("w") as file:
        for i in range(size):
            text = " ".join(words[(i + k) % len(words)] for k in range(60))  # as long as an abstract of HotpotQA's
            file.write(json.dumps({"id": str(i), "title": str(i), "text": text}) + "\n")
    config = load_config("hotpotqa-4xh100")
    kind = "HNSW32" if config.search.index == "auto" else config.search.index  # what `auto` is where memory allows
    began = time.monotonic()
    manifest = build_index(corpus, index, Drawn(np.empty((size, DIM), np.float32)), kind)
    figures = {"kind": kind, "build_s": round(time.monotonic() - began), "recall_at_10": manifest["recall_at_10"]}
    service = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.long.search_at_size", index], stdout=subprocess.PIPE, text=True
    )
    try:
        port = int(service.stdout.readline())
        return figures | asyncio.run(ask(port, size, config.search.top_k)) | {"resident_gib": resident(service.pid)}
    finally:
        service.kill()
        service.wait()


async def ask(port: int, size: int, top_k: int) -> dict[str, Any]:
    """CLIENTS agents at once, one query a request, every query a new one."""
    url, seconds = f"http://127.0.0.1:{port}", []
    places = np.random.default_rng(1).choice(size, (ROUNDS + 1) * CLIENTS, replace=False)
    first, rest = places[:CLIENTS], places[CLIENTS:]
    await asyncio.gather(*(client(url, [[f"passage {i}"]], top_k, []) for i in first))  # pages come into memory
    requests = [[f"passage {i}"] for i in rest]
    began = time.perf_counter()
    await asyncio.gather(*(client(url, requests, top_k, seconds) for _ in range(CLIENTS)))
    wall = time.perf_counter() - began
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        queries = [f"passage {i}" for i in first[:200]]
        answer = (await http.post(f"{url}/search", json={"queries": queries, "top_k": top_k})).json()
    found = sum(str(i) in [hit["title"] for hit in hits] for i, hits in zip(first, answer["results"], strict=False))
    return {
        "queries_per_s": round(len(seconds) / wall),
        "p50_ms": round(1000 * statistics.median(seconds)),
        "p99_ms": round(1000 * statistics.quantiles(seconds, n=100)[98]),
        "own_passage_found": found / 200,
    }


def resident(pid: int) -> float:
    """GiB of memory that a process holds, without pages of files that the kernel may drop."""
    status = Path(f"/proc/{pid}/status").read_text()
    return round(int(re.search(r"RssAnon:\s+(\d+)", status).group(1)) / 2**20, 2)


if __name__ == "__main__":  # the service, in a process of its own
    drawn = Drawn(np.empty((0, DIM), np.float32))
    loaded = PassageIndex.load(Path(sys.argv[1]), encoder=drawn)
    drawn.vectors = loaded.vectors
    listener = open_port("127.0.0.1", 0)
    print(listener.getsockname()[1], flush=True)
    serve(loaded, listener)
