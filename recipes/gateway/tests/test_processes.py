"""Agents as processes: what they get, how they end, and that nothing of them stays."""

from __future__ import annotations

import asyncio
import os
import sys
import textwrap
import time
from pathlib import Path

import pytest
from agents import gateway_flow
from conftest import ScriptedPolicy, fails_with, question_row

from agent_r1 import Hermes, HermesToolEnv, Sampling, StopReason, Task, run_episodes
from agent_r1_recipes.gateway.agents import Agents

pytestmark = [pytest.mark.slow, pytest.mark.cluster]  # openai comes with vLLM

CALL = """
import json, os, sys, urllib.request
def ask(text):
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    with urllib.request.urlopen(request, timeout=20) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]
"""


def written(folder: Path, body: str) -> Path:
    file = folder / "own_agent.py"
    file.write_text(CALL + textwrap.dedent(body))
    return file


def played(micro, chat, agent: str, episodes: int = 1, timeout_s: float = 20.0, *overrides):
    policy = ScriptedPolicy(chat, lambda session, turn, ids: "<answer>Marn</answer>")
    flow = gateway_flow(
        policy,
        chat,
        None,
        lambda row: HermesToolEnv(micro.tools, micro.config.env),
        *overrides,
        timeout_s=timeout_s,
    )
    flow.agents = Agents(agent, None, [])
    tasks = [Task(question_row(), str(n), f"s{n}", n) for n in range(episodes)]
    try:
        return asyncio.run(run_episodes(flow, tasks, Sampling(40))), flow
    finally:
        flow.agents.stop()


def test_a_function_has_fresh_state_in_each_episode(micro, chat, tmp_path, monkeypatch):
    monkeypatch.setenv("OTHER_API_KEY", "secret")
    monkeypatch.setenv("ANTHROPIC_BASE_URL", "http://elsewhere")
    file = written(
        tmp_path,
        """
        seen = []
        def play(task):
            assert not seen and set(task) == {"question", "messages", "data_source", "index"}
            seen.append(task)
            assert not {"OTHER_API_KEY", "ANTHROPIC_BASE_URL"} & set(os.environ)
            key = os.environ["OPENAI_API_KEY"]
            assert key in os.environ["OPENAI_BASE_URL"] and key not in " ".join(sys.argv)
            print('{"reward": 1000}')
            os.write(3, b'{"reward": 1000}\\n')  # our environment scores, so this is ignored
            return ask(task["question"])
        """,
    )
    trajectories, flow = played(micro, chat, f"{file}:play", episodes=3)
    assert [trajectory.reward for trajectory in trajectories] == [1.0] * 3
    assert flow.counts["gateway/calls"] == flow.counts["gateway/ignored_reward"] == 3


def test_a_command_gets_the_task(micro, chat, tmp_path):
    file = written(
        tmp_path,
        """
        task = json.loads(sys.stdin.readline())
        assert sys.argv[1:] == [task["question"], "x"] and "Marn" not in json.dumps(task)
        ask(task["question"])
        os.write(3, b'{"answer": "Marn"}\\n')
        """,
    )
    trajectories, _ = played(micro, chat, f"{sys.executable} {file} {{question}} x", episodes=2)
    assert [trajectory.reward for trajectory in trajectories] == [1.0] * 2


def test_a_reward_on_descriptor_3(micro, chat, tmp_path):
    file = written(
        tmp_path,
        """
        def play(task):
            ask("x")
            os.write(3, b'{"reward": 0.25}\\n{"reward": 1}\\n')
        """,
    )
    setting = "rollout.agent_reward=agent"
    [trajectory], flow = played(micro, chat, f"{file}:play", 1, 20.0, setting)
    assert flow.counts["gateway/refused_reward"] == 1  # the second one
    assert trajectory.reward == 0.25


def test_a_model_may_name_a_tool_in_any_letters(micro, chat, tmp_path):
    """The agent of recipes/support once died of a name that no address can have."""
    file = written(
        tmp_path,
        """
        from agent_r1_recipes.support.agent import run

        def play(task):
            name = "se\\ufffdrch/../ä?x"
            said = run(name, "{}")
            assert name in said, said
            return ask(task["question"])
        """,
    )
    [trajectory], _ = played(micro, chat, f"{file}:play")
    assert trajectory.reward == 1.0


def test_the_last_line_of_a_crash_is_shown(micro, chat, tmp_path):
    file = written(
        tmp_path,
        """
        def play(task):
            ask("x")
            raise RuntimeError("no such luck")
        """,
    )
    with fails_with("episodes_failed", match="exit code 1.*no such luck"):
        played(micro, chat, f"{file}:play")


def test_a_late_agent_and_its_children_are_killed(micro, chat, tmp_path):
    file = written(
        tmp_path,
        f"""
        import subprocess, time
        def play(task):
            child = subprocess.Popen(["sleep", "60"])
            open({str(tmp_path / "child")!r}, "w").write(str(child.pid))
            ask("x")
            while True:  # a blocking agent never stops the sampler
                pass
        """,
    )
    begin = time.monotonic()
    with fails_with("episodes_failed", match="exceeded 2 s"):
        played(micro, chat, f"{file}:play", timeout_s=2.0)
    assert time.monotonic() - begin < 20
    child = int((tmp_path / "child").read_text())
    for _ in range(100):
        if not os.path.exists(f"/proc/{child}") or "Z" in Path(f"/proc/{child}/stat").read_text():
            return
        time.sleep(0.05)
    pytest.fail("the agent's child is alive")


@pytest.mark.parametrize(
    ("body", "cause"),
    [("import nothing_here", "nothing_here"), ("def other(): pass", "play"), ("exit(3)", "3")],
)
def test_an_agent_that_cannot_be_imported(micro, chat, tmp_path, body, cause):
    file = written(tmp_path, body)
    with fails_with("agent_not_started", match=cause):
        played(micro, chat, f"{file}:play")


def test_a_client_made_at_import_is_named(micro, chat, tmp_path):
    file = written(
        tmp_path,
        """
        address = os.environ["OPENAI_BASE_URL"]
        def play(task):
            os.environ["OPENAI_BASE_URL"] = address
            ask("x")
        """,
    )
    with fails_with("episodes_failed", match="inside the function, not at import"):
        played(micro, chat, f"{file}:play")
    assert StopReason.ERROR.failed


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux hands orphans to the worker")
@pytest.mark.parametrize("runs_program", [True, False])
def test_a_child_in_a_session_of_its_own_is_ended(micro, chat, tmp_path, runs_program):
    """A daemon would work on, and could call, after its episode's reward."""
    file = written(
        tmp_path,
        f"""
        import time
        def play(task):
            if os.fork() == 0:
                os.setsid()
                if os.fork():
                    os._exit(0)
                open({str(tmp_path)!r} + f"/daemon-{{task['index']}}", "w").write(str(os.getpid()))
                if {runs_program}:
                    os.execvp("sleep", ["sleep", "60"])
                time.sleep(60)
            while not os.path.exists({str(tmp_path)!r} + f"/daemon-{{task['index']}}"):
                time.sleep(.01)
            return ask("x")
        """,
    )
    trajectories, _ = played(micro, chat, f"{file}:play")
    assert trajectories[0].reward == 1.0
    [place] = tmp_path.glob("daemon-*")
    assert not os.path.exists(f"/proc/{place.read_text()}")


def test_threads_of_one_agent_are_conversations_of_their_own(micro, chat, tmp_path):
    """Four threads ask at once; each call is a row, and no token is lost."""
    file = written(
        tmp_path,
        """
        from concurrent.futures import ThreadPoolExecutor
        def play(task):
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(ask, ["one", "two", "three", "four"]))
            return ask(task["question"])
        """,
    )
    trajectories, flow = played(micro, chat, f"{file}:play", episodes=3)
    assert [len(trajectory.steps) for trajectory in trajectories] == [5] * 3
    for trajectory in trajectories:
        prompts = [chat.decode(step.observation_ids) for step in trajectory.steps]
        assert sum("founded" in prompt for prompt in prompts) == 1
        assert sum(step.reward for step in trajectory.steps) == trajectory.reward == 1.0
    assert flow.counts["gateway/trained_tokens"] == 15 * len(
        chat.turn_ids("<answer>Marn</answer>", Hermes())
    )
    assert not any(name.startswith("gateway/cuts") for name in flow.counts)


def test_a_reward_after_the_end_is_not_used(micro, chat, tmp_path):
    """A daemon posts it when the agent has ended: the daemon is ended first, or the key is void."""
    file = written(
        tmp_path,
        """
        import time
        def play(task):
            ask("x")
            if os.fork() == 0:
                os.setsid()
                time.sleep(0.5)
                request = urllib.request.Request(
                    os.environ["AGENT_R1_REWARD_URL"], b'{"reward": 1}',
                    {"authorization": "Bearer " + os.environ["AGENT_R1_REWARD_KEY"]},
                )
                urllib.request.urlopen(request, timeout=20)
                os._exit(0)
        """,
    )
    with fails_with("episodes_failed", match="no reward was reported"):
        played(micro, chat, f"{file}:play", 1, 20.0, "rollout.agent_reward=agent")
