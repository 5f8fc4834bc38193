"""Measure queries per second of `agent-r1 search-server`, and a query's waiting time.

In: a running service and a file of questions. Out: one line: queries/s, median and 99th percentile
of a request.

    agent-r1 search-server --preset lab/laptop.yaml &
    python benchmarks/search_load.py --rows artifacts/tinyhop-*/train.parquet --clients 64

Each client sends its next request after the answer to the last, as episodes do. Every query is
asked once, so the service's cache does not answer.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from pathlib import Path

import httpx

from agent_r1.data.storage import read_rows


async def client(url: str, requests: list[list[str]], top_k: int, seconds: list[float]) -> None:
    """Send one agent's requests, one after the other, each with its own connection.

    A shared pool would dominate the measurement. It checks all its connections at every request,
    and with 64 of them that takes longer than the search.
    """
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False, verify=False) as http:
        while requests:
            queries = requests.pop()
            start = time.perf_counter()
            response = await http.post("/search", json={"queries": queries, "top_k": top_k})
            response.raise_for_status()
            seconds.append(time.perf_counter() - start)


async def measure(arguments: argparse.Namespace) -> None:
    queries = list(dict.fromkeys(row["prompt"][-1]["content"] for row in read_rows(arguments.rows)))
    size, url = arguments.batch, arguments.url
    requests = [queries[start : start + size] for start in range(0, len(queries), size)]
    seconds: list[float] = []
    health = httpx.get(f"{url}/health", trust_env=False).json()
    start, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(
        *(client(url, requests, arguments.top_k, seconds) for _ in range(arguments.clients))
    )
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    p99 = statistics.quantiles(seconds, n=100)[98]
    print(
        f"{health['count']} passages, {health['index']}, {health['encoder']['name']} (dim "
        f"{health['dim']}): "
        f"{arguments.clients} clients x {size} queries a request: {len(queries) / wall:.0f} "
        "queries/s, "
        f"p50 {1000 * statistics.median(seconds):.0f} ms, p99 {1000 * p99:.0f} ms, {len(queries)} "
        "queries "
        f"(this side was busy {cpu / wall:.0%} of the time)"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8100")
    parser.add_argument("--rows", type=Path, required=True, help="train.parquet of any data set")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1, help="queries in one request")
    parser.add_argument("--top-k", type=int, default=3)
    asyncio.run(measure(parser.parse_args()))
