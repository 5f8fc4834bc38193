"""Play on real OpenEnv servers (0.4 and the newest): tools, custom fields, 64 episodes.

The package has no environment, so this module defines two with its library: one whose action has a
field, one with MCP tools. They are served with create_app and uvicorn, as their authors do.
"""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from agent_r1.core import Action, Row, maybe_await
from agent_r1.env import make_env
from agent_r1_recipes.openenv.settings import OpenEnvSettings

VERSIONS = ("0.4.2", "0.10.0")
APP = '''
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class GuessAction(Action):
    """Guess the number."""

    number: int


class GuessObservation(Observation):
    hint: str = ""


class Guess(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, answer="0", **rest):
        self.number = int(answer)
        return GuessObservation(hint="a number below 100")

    def step(self, action, timeout_s=None, **rest):
        right = action.number == self.number
        return GuessObservation(hint="right" if right else "wrong", reward=float(right), done=right)

    @property
    def state(self):
        return State()


class Echo(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("echo")

        @server.tool
        def echo(message: str) -> str:
            """Say it again."""
            return message

        @server.tool
        def length(message: str) -> dict:
            """Count."""
            if not message:
                raise ValueError("nothing to count")
            return {"length": len(message)}

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **rest):
        return Observation(metadata={"status": "ready"})

    def _step_impl(self, action, timeout_s=None, **rest):
        return Observation()

    @property
    def state(self):
        return State()


guess = create_app(Guess, GuessAction, GuessObservation, env_name="guess", max_concurrent_envs=64)
few = create_app(Guess, GuessAction, GuessObservation, env_name="few", max_concurrent_envs=4)
echo = create_app(Echo, CallToolAction, CallToolObservation, env_name="echo", max_concurrent_envs=8)
'''


def run() -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for version in VERSIONS:
        with tempfile.TemporaryDirectory() as folder:
            figures |= {
                f"{name}_{version}": value for name, value in _one(version, Path(folder)).items()
            }
    return figures


def _one(version: str, folder: Path) -> dict[str, Any]:
    print(f"  openenv {version}: installing", flush=True)
    python = folder / "venv" / "bin" / "python"
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", f"openenv=={version}"], check=True)
    install_s = time.perf_counter() - began
    (folder / "app.py").write_text(APP)
    with _serving(python, folder, "guess") as url:
        seconds = asyncio.run(_games(url, 64))
    with _serving(python, folder, "few") as url:
        asyncio.run(_games(url, 16))
    with _serving(python, folder, "echo") as url:
        tools = asyncio.run(_talk(url))
    return {
        "install_s": round(install_s), "episodes": 64 + 16, "tools": tools,
        "step_ms_alone": round(1000 * seconds[0], 2), "step_ms_of_64": round(1000 * seconds[1], 2),
    }  # fmt: skip


@contextmanager
def _serving(python: Path, folder: Path, app: str):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [
        python,
        "-m",
        "uvicorn",
        f"app:{app}",
        "--host=127.0.0.1",
        f"--port={port}",
        "--log-level=critical",
    ]
    server = subprocess.Popen(command, cwd=folder)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 120
    try:
        while True:
            try:
                assert httpx.get(f"{url}/health", trust_env=False).json() == {"status": "healthy"}
                break
            except httpx.TransportError:
                if server.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError(f"the server {app} did not start") from None
                time.sleep(0.1)
        yield url
    finally:
        server.kill()
        server.wait()


def _call(name: str, **arguments: Any) -> Action:
    return Action(f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>")


def _row(answer: int) -> Row:
    return {
        "agent_name": "openenv", "prompt": [{"role": "user", "content": "Find it."}],
        "reward_model": {"ground_truth": [str(answer)]}, "extra_info": {"index": answer},
    }  # fmt: skip


async def _game(url: str, answer: int) -> list[float]:
    """Make ten wrong guesses and a right one; return the seconds of each."""
    config = OpenEnvSettings(
        name="openenv", url=url, max_turns=99, max_tool_calls=99, tool_timeout_s=60
    )
    env, seconds = make_env(_row(answer), {}, config), []
    observation = await maybe_await(env.reset(_row(answer)))
    assert observation.messages[-1]["content"] == "Find it.\na number below 100"
    for guess in [1000] * 10 + [answer]:
        began = time.perf_counter()
        result = await env.step(_call("step", number=guess))
        seconds.append(time.perf_counter() - began)
        assert (result.done, result.reward) == (guess == answer, float(guess == answer)), result
    await maybe_await(env.close())
    return seconds


async def _games(url: str, count: int) -> tuple[float, float]:
    """Return a step's median seconds, for one episode alone and for `count` concurrent ones."""
    alone = await _game(url, 0)
    together = await asyncio.gather(*(_game(url, answer) for answer in range(count)))
    return statistics.median(alone), statistics.median(s for game in together for s in game)


async def _talk(url: str) -> int:
    """Check every kind of answer of MCP tools; return the number of tools."""
    env = make_env(
        _row(0),
        {},
        OpenEnvSettings(
            name="openenv", url=url, max_turns=99, max_tool_calls=99, tool_timeout_s=60
        ),
    )
    observation = await maybe_await(env.reset(_row(0)))
    assert {tool["function"]["name"] for tool in observation.tools} == {"echo", "length"}
    contents = {}
    for call in (
        _call("echo", message="hällo"),
        _call("length", message="abc"),
        _call("length", message=""),
    ):
        [record] = (await env.step(call)).info["tool_calls"]
        contents[json.dumps(record["arguments"])] = record["content"]
    assert list(contents.values())[0] == "hällo" and json.loads(list(contents.values())[1]) == {
        "length": 3
    }, contents
    assert (
        list(contents.values())[2].startswith("error: length failed: ")
        and "nothing to count" in list(contents.values())[2]
    )
    await maybe_await(env.close())
    return len(observation.tools)
