"""Many connections to a model server at once: as many as an evaluation on eight GPUs opens, and
some that break."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from conftest import make_env_loop, question_row, task
from runs import ROOT

from agent_r1.config.settings import EnvConfig
from agent_r1.core import Sampling, StopReason
from agent_r1.env import HermesToolEnv
from agent_r1.evaluation.evaluate import eval_card, score_line
from agent_r1.model.policies import ServerPolicy
from agent_r1.rollout.rollouts import run_episodes


@contextmanager
def model_server(
    wanted: int = 1, ids: tuple[int, ...] = (5,), break_off: frozenset[int] = frozenset()
) -> Iterator[str]:
    """A server on the loopback that answers once `wanted` requests are there together, or after
    three seconds.

    The requests numbered in `break_off` get no answer.
    """
    waiting, ready, everybody = [0], threading.Event(), asyncio.Event()
    choice = {
        "token_ids": ids,
        "logprobs": {"token_logprobs": [-0.1] * len(ids)},
        "finish_reason": "stop",
    }
    body = json.dumps({"choices": [choice]}).encode()

    async def answer(reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        await reader.readexactly(int(head.partition("content-length:")[2].split()[0]))
        waiting[0] += 1
        number = waiting[0]
        if number == wanted:
            everybody.set()
        with suppress(TimeoutError):
            await asyncio.wait_for(everybody.wait(), 3)
        if number not in break_off:
            writer.write(
                b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
                + body
            )
        writer.close()

    async def serve():
        server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=1024)
        address.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")
        ready.set()
        async with server:
            await stop.wait()

    address, loop, stop = [], asyncio.new_event_loop(), asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    assert ready.wait(10)
    yield address[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join(10)


ASK = """
import asyncio, collections, sys
from agent_r1.app.cli import main
main(["doctor", "--suggest-preset"])
from agent_r1.model.policies import ServerPolicy
from agent_r1.core import Sampling
async def ask():
    policy = ServerPolicy(sys.argv[1], "k", "agent", (5,))
    asked = [policy.generate([1, 2, 3], Sampling(16, 1.0), str(i)) for i in range(300)]
    return await asyncio.gather(*asked, return_exceptions=True)
print(collections.Counter(type(answer).__name__ for answer in asyncio.run(ask())))
"""


@pytest.mark.slow
def test_a_login_shells_limit_of_open_files_is_no_limit_of_requests():
    """As bash at login has 1,024, and an evaluation on four GPUs opens as many connections; here a
    quarter of both."""
    with model_server(wanted=300) as url:
        command = [
            "bash",
            "-c",
            'ulimit -Sn 256 && exec "$0" -c "$1" "$2"',
            sys.executable,
            ASK,
            url,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "Counter({'Generation': 300})", done.stdout + done.stderr


def play(chat, url: str, episodes: int, diagnose=None):
    policy = ServerPolicy(
        url, "k", "agent", (chat.tokenizer.convert_tokens_to_ids("<|im_end|>"),), diagnose
    )
    policy.chat = chat
    loop = make_env_loop(policy, lambda row: HermesToolEnv({}, EnvConfig()))
    tasks = [task(question_row(), session=str(i), group=str(i)) for i in range(episodes)]
    return asyncio.run(run_episodes(loop, tasks, Sampling(400)))


@pytest.fixture
def answer_ids(chat) -> tuple[int, ...]:
    return tuple(chat.tokenizer.encode("<answer>Marn</answer><|im_end|>"))


def test_a_connection_that_breaks_costs_one_episode_and_is_counted(chat, answer_ids):
    with model_server(40, answer_ids, frozenset({7})) as url:
        episodes = play(chat, url, 40)
    (lost,) = [t for t in episodes if t.stop_reason is StopReason.ERROR]
    assert "broke off" in lost.error and lost.steps == []
    card = eval_card(episodes, model="m", split="test", seed=0, retriever="none", start_time=0.0)
    assert card["stop_reasons"] == {"answered": 39, "error": 1} and card["n"] == 40
    assert "episodes that failed, and counted as wrong: 1" in score_line(card)
