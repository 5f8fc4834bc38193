"""Room 9, serving: a server of our own that starts, fails, dies and goes as it should, whatever
happens to us; and the real vLLM, where it is installed: the same tokens as in training, and OpenAI
clients with tool calls."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest
import torch
from conftest import fails_with, random_model
from runs import ROOT, environment, main, orphans
from server_processes import alive, answers, children, gone

from agent_r1.cluster.serve import VllmServer, parser_options, stop, vllm_server
from agent_r1.config import load_config
from agent_r1.core import Sampling
from agent_r1.env.hermes import HERMES
from agent_r1.evaluation.evaluate import evaluate
from agent_r1.ground.errors import AgentR1Error
from agent_r1.inference.agent import find_model, open_agent
from agent_r1.model.policies import ServerPolicy
from agent_r1.rollout.setup import make_loop
from agent_r1.training.run import write_model
from agent_r1.workspace import Workspace

FAKE = Path(__file__).with_name("fake_vllm.py")
MODEL, SMOKE = Path("some/model"), load_config("small")
GREEDY = Sampling(8, 0.0)


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """`with fake("mode", ...) as server:` is a server whose vLLM is the fake one."""
    monkeypatch.setenv("AGENT_R1_VLLM", str(FAKE))
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path))

    def make(modes: str = "", **options) -> AbstractContextManager[VllmServer]:
        monkeypatch.setenv("FAKE_VLLM", modes)
        return vllm_server(MODEL, SMOKE.rollout, SMOKE.trainer, **options)

    return make


def policy_of(server: VllmServer, **changes) -> ServerPolicy:
    settings = {
        "url": server.url,
        "api_key": server.api_key,
        "model": server.name,
        "stop_ids": (14,),
    } | changes
    return ServerPolicy(**settings, diagnose=server.diagnose)


# ---------------------------------------------------------------------------- starting and stopping


@pytest.mark.slow
@pytest.mark.parametrize("modes", ["slow,family", "stubborn,family"])
def test_it_waits_until_the_server_is_healthy_and_leaves_nothing_behind(
    fake, tmp_path, monkeypatch, capsys, modes
):
    monkeypatch.setattr("agent_r1.cluster.serve.SERVER_STOP_S", 0.5)
    with fake(modes) as server:
        assert httpx.get(f"{server.url[:-3]}/health", trust_env=False).status_code == 200
        assert server.url == f"http://127.0.0.1:{server.port}/v1" and server.diagnose() is None
        leader = server.process.pid
        assert (
            os.getpgid(leader) == leader != os.getpgrp()
        )  # Ctrl-C in the terminal is not for the server
        child = int(server.log.read_text().split("child ")[1].split()[0])
        assert alive(leader) and alive(child)
    assert f"vLLM loads {MODEL}" in capsys.readouterr().out
    assert gone(leader) and gone(child) and not answers(server.port)
    assert list((tmp_path / "logs").iterdir()) == []


def test_what_vllm_is_told(fake):
    with fake() as server:
        command = (
            Path(f"/proc/{server.process.pid}/cmdline").read_bytes().decode().replace("\0", " ")
        )
        policy = policy_of(server)
        asyncio.run(policy.generate([1, 2, 3], Sampling(8, 0.7, seed=2**64 - 1)))
        log = server.log.read_text()
    for option in (
        "--host 127.0.0.1",
        "--dtype float32",
        "--tool-call-parser hermes",
        "--enable-auto-tool-choice",
        f"--max-model-len {SMOKE.rollout.max_context}",
        "--logprobs-mode processed_logprobs",
    ):
        assert option in command
    assert server.api_key not in command and server.api_key not in log and len(server.api_key) > 30
    sent = json.loads(log.split("request ")[1].splitlines()[0])
    wanted = {
        "prompt": [1, 2, 3],
        "max_tokens": 8,
        "temperature": 0.7,
        "top_p": 1.0,
        "stop_token_ids": [14],
    }
    # Published models set these in their generation_config.json, and vLLM would follow.
    wanted |= {"repetition_penalty": 1.0, "top_k": 0, "min_p": 0.0, "return_token_ids": True}
    assert wanted.items() <= sent.items() and 0 <= sent["seed"] < 2**63


@pytest.mark.parametrize("mode", ["die", "deaf"])
def test_a_server_that_does_not_start(fake, tmp_path, monkeypatch, mode):
    monkeypatch.setattr("agent_r1.cluster.serve.SERVER_START_S", 1.0 if mode == "deaf" else 60.0)
    with fails_with("process_did_not_start") as failure, fake(mode):
        raise AssertionError("must not come this far")
    (log,) = (tmp_path / "logs").iterdir()
    assert str(log) in str(failure.value) and not answers(int(log.stem.split("-")[-1]))
    if mode == "die":  # the cause, and not the line that points to it
        assert "ValueError: no such model architecture" in str(failure.value)


def test_a_port_that_is_taken(fake):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with fails_with("port_in_use"), fake(port=port):
            pass
    with fake(port=port) as server:
        assert server.port == port


# ----------------------------------------------------------------------------------- faulty answers


@pytest.mark.parametrize(
    ("mode", "code"),
    [("refuse", "server_refused"), ("garbage", "lost_connection"), ("midway", "server_failed")],
)
def test_a_server_that_answers_badly(fake, mode, code):
    with fake(mode) as server:
        policy = policy_of(server)
        policy.on_token = lambda session, ids: None
        with fails_with(code):
            asyncio.run(policy.generate([1], GREEDY))
        assert server.diagnose() is None


def test_a_server_that_dies_in_mid_answer(fake, monkeypatch):
    seen, asked, ask = [], [], ServerPolicy._ask
    with fake("cut") as server:
        policy = policy_of(server)
        policy.on_token = lambda session, ids: seen.extend(ids)
        with pytest.raises(AgentR1Error, match="exit code 7.*the engine core has died") as failure:
            asyncio.run(policy.generate([1], GREEDY))
        assert str(server.log) in str(failure.value) and seen == [11, 12]
        monkeypatch.setattr(
            policy, "_ask", lambda *request: asked.append(1) or ask(policy, *request)
        )
        with pytest.raises(AgentR1Error, match="does not answer.*exit code 7"):
            asyncio.run(policy.generate([1], GREEDY))
        assert asked == [1]  # it stays dead: no use asking again
    assert server.log.exists(), "it has something to tell"


def test_a_server_that_is_back_in_a_moment(fake, monkeypatch):
    monkeypatch.setattr(secrets, "token_urlsafe", lambda size: "the same key")
    with fake() as server:
        policy, port = policy_of(server), server.port
        stop(server.process)

        async def run():
            asked = asyncio.create_task(policy.generate([1], GREEDY))
            await asyncio.sleep(0.2)
            again = fake(port=port)
            await asyncio.to_thread(again.__enter__)
            try:
                return await asked
            finally:
                again.__exit__(None, None, None)

        policy._diagnose = lambda: None  # somebody else's server: nobody knows why it is away
        policy.ATTEMPTS = 200  # a moment may be long on a busy machine
        assert asyncio.run(run()).token_ids == [11, 12, 13, 14]


# -------------------------------------------------------------------------------------- the command


def test_the_command_says_how_to_use_it_and_ends_on_ctrl_c(
    fake, tmp_path, monkeypatch, chat, capsys
):
    fake()
    foreign = tmp_path / "foreign"
    write_model(random_model(), chat, foreign)
    seen, logs, over = {}, tmp_path / "logs", threading.Event()

    def client() -> None:
        """What somebody does in another terminal, until Ctrl-C is pressed in this one."""
        while not (keys := list(logs.glob("*.key"))) or not keys[0].read_text():
            if over.wait(0.05):
                return
        seen.update(key=keys[0].read_text(), mode=keys[0].stat().st_mode & 0o777)
        seen["log"] = keys[0].with_suffix(".log").read_text()
        url = f"http://127.0.0.1:{keys[0].stem.split('-')[-1]}/v1/completions"
        for secret in (seen["key"], "guess"):
            headers, body = {"Authorization": f"Bearer {secret}"}, {"stream": False, "prompt": [1]}
            seen[secret] = httpx.post(url, json=body, headers=headers, trust_env=False).status_code
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(
        signal, "signal", lambda number, handler: None
    )  # this process keeps its own
    threading.Thread(target=client).start()
    code = main(
        "serve", f"--model={foreign}", "--preset=small", "rollout.max_concurrent_episodes=7"
    )
    over.set()
    assert code == 130
    assert seen["mode"] == 0o600 and (seen[seen["key"]], seen["guess"]) == (200, 401)
    longest = json.loads((foreign / "config.json").read_text())["max_position_embeddings"]
    assert "--max-num-seqs 7 " in seen["log"] and f"--max-model-len {longest} " in seen["log"]
    said = "".join(capsys.readouterr())
    assert re.search(
        r"^export OPENAI_BASE_URL=http://127\.0\.0\.1:\d+/v1 OPENAI_API_KEY=", said, re.MULTILINE
    )
    assert seen["key"] not in said and list(logs.iterdir()) == []


# ------------------------------------------------------------------------------------ the real vLLM


@pytest.fixture(scope="module")
def trained(agent_home, tmp_path_factory):
    """A copy of the shipped agent's home, which AGENT_R1_HOME names while this file runs."""
    home = tmp_path_factory.mktemp("served")
    shutil.copytree(agent_home, home, dirs_exist_ok=True)
    before = os.environ.get("AGENT_R1_HOME")
    os.environ["AGENT_R1_HOME"] = str(home)
    yield home
    os.environ.pop("AGENT_R1_HOME")
    if before is not None:
        os.environ["AGENT_R1_HOME"] = before


@pytest.fixture(scope="module")
def begun() -> float:
    """When `served` was started."""
    return time.time()


@pytest.fixture(scope="module")
def served(trained, begun):
    """The trained agent behind the real vLLM."""
    model, config = find_model("laptop-grpo")
    with vllm_server(model, config.rollout, config.trainer) as server:
        yield server


@pytest.mark.slow
@pytest.mark.cluster
def test_training_serving_and_transformers_see_the_same_tokens(served, trained):
    """Whole conversations, greedily: the ids of every turn, and their log-probabilities."""
    from agent_r1.model.policies import load_transformers, token_logprobs

    model, config = find_model("laptop-grpo")
    rows = Workspace(config).load_rows("test")[:24]
    with open_agent(model, config, "local") as agent:
        plays = []
        for policy in (agent.policy, policy_of(served, stop_ids=agent.chat.stop_ids)):
            loop = make_loop(policy, agent.chat, agent.tools, config.rollout, config.env)
            plays.append(evaluate(loop, rows, temperature=0.0, seed=0))
    assert sum(len(t.steps) for t in plays[0]) > 2 * len(rows)
    reader = load_transformers(model)
    for mine, theirs in zip(*plays, strict=True):
        assert [s.observation_ids for s in mine.steps] == [s.observation_ids for s in theirs.steps]
        assert [s.action_ids for s in mine.steps] == [s.action_ids for s in theirs.steps]
        for a, b in zip(mine.steps, theirs.steps, strict=True):
            again = token_logprobs(reader, a.observation_ids + a.action_ids)[
                len(a.observation_ids) :
            ].tolist()
            assert b.action_logprobs == pytest.approx(a.action_logprobs, abs=1e-4)
            assert again == pytest.approx(a.action_logprobs, abs=1e-4)
            assert a.finish_reason == b.finish_reason


@pytest.mark.slow
@pytest.mark.cluster
def test_sampled_log_probabilities_are_those_of_the_trainer(served, trained):
    """At another temperature than 1, streamed: recomputed by the model that training uses."""
    from agent_r1.model import files as model_files
    from agent_r1.rollout.training_rows import TrainingRow, collate
    from agent_r1.training.forward import action_logprobs

    model, config = find_model("laptop-grpo")
    with open_agent(model, config) as agent:
        prompts = [
            agent.chat.prompt_ids(row["prompt"]) for row in Workspace(config).load_rows("test")[:8]
        ]
        policy = policy_of(served, stop_ids=agent.chat.stop_ids)
    streamed: list[int] = []
    policy.on_token = lambda session, ids: streamed.extend(ids)
    trainer = model_files.load_model(model)
    for seed, prompt in enumerate(prompts):
        streamed.clear()
        g = asyncio.run(policy.generate(prompt, Sampling(40, 1.7, seed=seed)))
        assert streamed == g.token_ids
        T = len(prompt) + len(g.token_ids)
        row = TrainingRow(
            0,
            "",
            prompt + g.token_ids,
            [0] * len(prompt) + [1] * len(g.token_ids),
            [0.0] * T,
            [0.0] * T,
            [0] * T,
        )
        with torch.inference_mode():
            again = action_logprobs(trainer, collate([row]), temperature=1.7)[0][
                0, len(prompt) :
            ].tolist()
        assert g.logprobs == pytest.approx(again, abs=1e-4)


@pytest.mark.slow
@pytest.mark.cluster
def test_the_example_of_the_documentation(served, trained):
    model, config = find_model("laptop-grpo")
    row = Workspace(config).load_rows("test")[0]
    keys = {"OPENAI_BASE_URL": served.url, "OPENAI_API_KEY": served.api_key}
    done = subprocess.run(
        [sys.executable, ROOT / "docs/inference/openai_client.py", row["prompt"][-1]["content"]],
        env=environment(trained) | keys, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, *_, last = done.stdout.strip().splitlines()
    assert first.startswith("search {") and "<answer>" in last


@pytest.mark.slow
@pytest.mark.cluster
def test_a_real_engine_that_is_killed(served, begun):
    """The last test of `served`: it does not answer any more."""
    pid = served.process.pid
    family = [pid, *children(pid)]
    assert len(family) > 1
    # Held before it is asked, it cannot have finished when it dies, however late this process reads
    # its tokens.
    os.kill(family[-1], signal.SIGSTOP)
    threading.Timer(1.0, os.kill, (family[-1], signal.SIGKILL)).start()
    with pytest.raises(AgentR1Error, match="model server"):
        asyncio.run(policy_of(served, stop_ids=()).generate([5, 6, 7], Sampling(200, 1.0)))
    assert all(gone(p, 20) for p in family) and not answers(served.port)
    assert orphans(begun) == []


@pytest.mark.parametrize(
    ("template", "names"),
    [
        ("{{ messages[0].content }}", False),
        ("{{ messages[0].reasoning_content }}{{ messages[0].content }}", True),
    ],
)
def test_thoughts_leave_the_text_only_if_the_template_writes_them_back(tmp_path, template, names):
    (tmp_path / "chat_template.jinja").write_text(template)
    assert ("--reasoning-parser" in parser_options(tmp_path, HERMES)) == names
