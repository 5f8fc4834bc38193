"""Answers from outside: one helper bounds their seconds, bytes and nesting, for everybody who asks
a server."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from conftest import ScriptedPolicy, make_env_loop
from serving import HOSTILE, hostile

from agent_r1.config.settings import EnvConfig
from agent_r1.core import Outcome, Sampling
from agent_r1.env import make_env
from agent_r1.env.hermes import HermesToolEnv
from agent_r1.ground import bounds
from agent_r1.ground.errors import AgentR1Error
from agent_r1.rollout.episode import Task
from agent_r1.rollout.rollouts import run_episodes
from agent_r1.search.remote import RemoteIndex
from agent_r1_recipes.code.python import SandboxFusion
from agent_r1_recipes.judge import judge
from agent_r1_recipes.judge import service as scores
from agent_r1_recipes.openenv.settings import OpenEnvSettings

pytestmark = pytest.mark.timeout(30)
"""The deadlines in these tests are of about half a second, and what they guard against never
ends."""


def refusal(call, *args) -> str:
    with pytest.raises(AgentR1Error) as refused:
        call(*args)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400
    return str(refused.value)


@pytest.mark.parametrize("kind", HOSTILE)
def test_one_helper_bounds_seconds_bytes_and_nesting(kind):
    says = {
        "flood": "more than 100000 bytes",
        "gzip": "compresses",
        "deep": "nested deeper than 64",
    }
    with hostile(kind) as url, pytest.raises((TimeoutError, ValueError)) as refused:
        bounds.fetch("GET", url, within_s=0.3, max_bytes=100_000).json()
    assert says.get(kind, "no whole answer within 0.3 s") in str(refused.value)


@pytest.mark.parametrize("kind", ["drip", "flood", "gzip", "deep"])
def test_a_hostile_retriever_costs_one_search_its_deadline(kind):
    with hostile(kind) as url:
        # Only the drip is stopped by its deadline: a busy machine may need more than 0.3 s to read
        # the others' bytes.
        remote = RemoteIndex(f"{url}/retrieve", timeout_s=0.3 if kind == "drip" else 10)
        said = refusal(remote.search, ["a"], 3)
    says = {
        "drip": "does not answer (no whole answer within 0.3 s)",
        "deep": "refused /retrieve (200: [[[[",
    }
    assert says.get(kind, "is it a search service?") in said


@pytest.mark.parametrize("kind", ["drip", "flood", "gzip", "deep"])
def test_a_hostile_sandbox_ends_its_own_call(kind):
    with hostile(kind) as url:
        fusion = SandboxFusion(url)
        if kind in ("drip", "flood"):  # a second is added, for the way
            assert fusion.run("print(1)", -0.7).ended == ("output" if kind == "flood" else "time")
        else:
            assert "is it a SandboxFusion server?" in refusal(fusion.run, "print(1)", 1)


@pytest.mark.parametrize("kind", ["drip", "flood", "gzip"])
def test_a_hostile_environment_is_refused_before_it_is_entered(kind):
    row = {"prompt": [{"role": "user", "content": "?"}], "agent_name": "openenv"}
    with hostile(kind) as url:
        said = refusal(
            make_env, row, {}, OpenEnvSettings(name="openenv", url=url, tool_timeout_s=0.3)
        )
    assert "no OpenEnv server answers" in said


# ------------------------------------------------------------------------------------------ rewards


@contextmanager
def judge_of(answers: dict[str, list[bytes]]):
    """A judge that gives full marks, but to answers with one of these words in them what a hostile
    server says instead."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
            pieces = next((pieces for word, pieces in answers.items() if word in asked), None)
            if pieces is None:
                said = json.dumps({"choices": [{"message": {"content": "10"}}]}).encode()
                pieces = [b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + said]
            try:
                for piece in pieces:
                    self.wfile.write(piece)
                    time.sleep(0.2 if len(pieces) > 1 else 0)
            except OSError:
                pass

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def test_a_bad_verdict_costs_its_own_episode_and_not_the_batch(monkeypatch):
    monkeypatch.setattr(scores, "SCORE_TIMEOUT_S", 0.7)
    kinds = ["deep", "gzip", "flood", "drip"]
    answers = [f"about a {kind}" for kind in kinds] + ["honest", "later"]
    order = []

    async def score(one: judge.Judge, answer: str, after: float = 0):
        await asyncio.sleep(after)
        try:
            return await one.score("Where?", ["Bumvel"], answer)
        except AgentR1Error as error:
            return str(error)
        finally:
            order.append(answer)

    async def batch(one: judge.Judge):
        return await asyncio.gather(
            *(score(one, answer, 0.1 * (answer == "later")) for answer in answers)
        )

    with judge_of({f"a {kind}": HOSTILE[kind] for kind in kinds}) as url:
        *bad, honest, later = asyncio.run(batch(judge.Judge(url, "wise")))
    assert honest == later == 1.0 and order[-1] == "about a drip", (
        "neither waits for the verdict that drips"
    )
    for verdict, says in zip(
        bad, ["nested deeper", "compresses", "more than 65536", "within 0.7 s"], strict=True
    ):
        assert "gives no verdict: " in verdict and says in verdict


class Paid(HermesToolEnv):
    """Its reward does not come for the question "slow", and it does not let go of "clingy"."""

    async def outcome(self, stop_reason):
        if self.row["prompt"][-1]["content"] == "slow":
            await asyncio.sleep(60)
        return Outcome(1.0)

    async def close(self):
        if self.row["prompt"][-1]["content"] == "clingy":
            await asyncio.sleep(60)


def test_a_reward_that_does_not_come_costs_its_episode_alone(chat):
    policy = ScriptedPolicy(chat, ["<answer>x</answer>"])
    loop = make_env_loop(policy, lambda row: Paid({}, EnvConfig()), timeout_s=0.4)
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in ("slow", "clingy", "plain")]
    tasks = [Task(row, str(i), str(i)) for i, row in enumerate(rows)]
    slow, clingy, plain = asyncio.run(run_episodes(loop, tasks, Sampling(400)))
    assert clingy.reward == plain.reward == 1.0
    assert (
        slow.reward == 0 and slow.error == "outcome: no result after 0.4 s (env.episode_timeout_s)"
    )
