"""A small server that speaks OpenEnv, written from the protocol's description and not from our
client.

What it keeps to is in https://github.com/huggingface/OpenEnv: docs/source/guides (concepts, MCP
lifecycle) and the message types that docs/source/reference/core.md lists. One process holds many
environments, each under a path of its own:

    /guess      an action with a field: guess a number; 1 is paid for it
    /guess2     the same, with room for two sessions only
    /echo       MCP: tools are listed by an action and called by another
    /strict     MCP: takes calls only, lists by message
    /quest      a text world in ALFWorld's manner: a command in words, what one sees in words, 1
                when the task is done
    /tasks-KIND  the game of /guess, with a list of tasks, see `SPLITS`
    /bad-KIND   does what its kind says, see `Bad`

`GET /told` says what each session was told and how many are open. Run it: `python openenv_server.py
PORT`.
"""

from __future__ import annotations

import json
import socket as socket_module
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from agent_r1_recipes.tinyquest.env import TinyQuest

OPEN: Counter[str] = Counter()
TOLD: list[dict[str, Any]] = []
METADATA = {"type": "object", "additionalProperties": True}
ROOM = {"guess2": 2}


def action_of(**fields: Any) -> dict[str, Any]:
    return {
        "title": "TheAction",
        "description": "Guess the number.",
        "type": "object",
        "additionalProperties": False,
        "properties": {"metadata": METADATA, **fields},
        "required": list(fields),
    }


CALL = action_of(
    type={"const": "call_tool", "default": "call_tool", "type": "string"},
    tool_name={"type": "string"}, arguments={"type": "object"},
) | {"required": ["tool_name"]}  # fmt: skip
GUESS = action_of(number={"type": "integer"})
COMMAND = action_of(command={"type": "string"})
TOOLS = [
    {"name": "echo", "description": "Say it again.", "input_schema": {
        "type": "object", "properties": {"message": {"type": "string"}}, "required": ["message"]}},
    {"name": "finish", "description": "End.", "input_schema": {"type": "object", "properties": {}}},
]  # fmt: skip


class Refused(Exception):
    """An error message of this code; the session goes on."""

    def __init__(self, code: str, message: str, **more: Any):
        self.data = {"message": message, "code": code, **more}


def observed(reward: Any = None, done: Any = False, **observation: Any) -> dict[str, Any]:
    data = {"observation": {"metadata": {}, **observation}, "reward": reward, "done": done}
    return {"type": "observation", "data": data}


class Guess:
    number = 0

    def reset(self, data: dict[str, Any]) -> dict[str, Any]:
        TOLD.append(data)
        self.number = int(data.get("answer", 0))
        return observed(hint="a number below 100")

    async def step(self, data: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(data.get("number"), int):
            raise Refused(
                "VALIDATION_ERROR",
                "Invalid message",
                errors=[{"loc": ["number"], "msg": "an integer, please"}],
            )
        if data["number"] == 13:
            raise Refused("EXECUTION_ERROR", "unlucky")
        right = data["number"] == self.number
        return observed(float(right), right, hint="right" if right else "wrong", rest=None)

    def mcp(self, data: dict[str, Any]) -> dict[str, Any]:
        return {"error": {"code": -32603, "message": "Environment does not support MCP"}}


SPLITS = {
    "one": {"hard": 10},
    "two": {"train": 8, "test": 3},
    "three": {"train": 8, "validation": 2, "test": 3},
    "shared": {"train": 8, "validation": 4, "test": 3},
    "none": {},
    "empty": {"train": 0},
    "many": {"train": 10**9},
}
"""Kind of a server with tasks -> its splits and their numbers of tasks. `shared` lists its tests
again in its validation."""


class Tasks(Guess):
    """A game whose number is that of its task."""

    def reset(self, data: dict[str, Any]) -> dict[str, Any]:
        return super().reset(data | {"answer": data["index"]})


async def environments(request: Request) -> Response:
    return JSONResponse([request.path_params["kind"]])


async def splits(request: Request) -> Response:
    known = SPLITS[request.path_params["kind"]]
    types = ("train", "validation", "test")
    return JSONResponse(
        [{"name": name, "type": name if name in types else "validation"} for name in known]
    )


async def tasks(request: Request) -> Response:
    kind, split = request.path_params["kind"], (await request.json())["split"]
    count = SPLITS[kind][split]
    if request.path_params["what"] == "num_tasks":
        return JSONResponse({"num_tasks": count})
    name = "test" if kind == "shared" and split == "validation" else split
    listed = [{"id": f"{name}-{index}", "index": index} for index in range(min(count, 100))]
    return JSONResponse({"tasks": listed, "env_name": kind})


class Quest:
    def reset(self, data: dict[str, Any]) -> dict[str, Any]:
        self.world = TinyQuest()
        return self.seen(self.world.reset(**data))

    async def step(self, data: dict[str, Any]) -> dict[str, Any]:
        name, _, noun = data["command"].partition(" ")
        if (name, noun) not in self.world._legal():
            return self.seen("Nothing happens.")
        return self.seen(getattr(self.world, name)(noun))

    def seen(self, text: str) -> dict[str, Any]:
        commands = [" ".join(words) for words in self.world._legal()]
        return observed(
            self.world.get_reward(), self.world.done, text=text, admissible_commands=commands
        )

    mcp = Guess.mcp


class Echo:
    def reset(self, data: dict[str, Any]) -> dict[str, Any]:
        return observed()

    async def step(self, data: dict[str, Any]) -> dict[str, Any]:
        if data == {"type": "list_tools"}:
            return observed(tools=TOOLS)
        if data.get("type") != "call_tool":
            raise Refused("VALIDATION_ERROR", "Invalid message")
        name, arguments = data["tool_name"], data.get("arguments", {})
        if name == "finish":
            return observed(2.5, True, tool_name=name, result="bye", error=None)
        if arguments["message"] == "boom":
            error = {"error_type": "execution_error", "message": "boom it is"}
            return observed(tool_name=name, result=None, error=error)
        content = [
            {"type": "text", "text": arguments["message"], "annotations": None, "meta": None}
        ]
        result = {
            "content": content,
            "structured_content": None,
            "data": arguments["message"],
            "is_error": False,
        }
        return observed(tool_name=name, result=result, error=None)

    def mcp(self, data: dict[str, Any]) -> dict[str, Any]:
        listed = [{**tool, "inputSchema": tool["input_schema"]} for tool in TOOLS]
        return {
            "result": {
                "tools": [{k: v for k, v in tool.items() if k != "input_schema"} for tool in listed]
            }
        }


class Strict(Echo):
    async def step(self, data: dict[str, Any]) -> dict[str, Any]:
        if data.get("type") != "call_tool":
            raise Refused(
                "VALIDATION_ERROR",
                "Invalid message",
                errors=[{"loc": ["tool_name"], "msg": "Field required"}],
            )
        return await super().step(data)


ANSWERS = {
    "no-json": "Bad Gateway", "deep": "[" * 100_000,
    "nan": '{"type": "observation", "data": {"observation": {}, "reward": NaN}}',
    "lost": '{"type": "error", "data": {"code": "SESSION_ERROR", "message": "no longer"}}',
}  # fmt: skip
"""Answers to a step that are none."""
SCHEMAS = {
    "schema-html": "<html>a wiki</html>",
    "schema-empty": "{}",
    "schema-deep": '{"action":' * 100_000,
    "schema-none": '{"action": {"type": "object", "properties": {"x": {"type": "colour"}}}}',
}
LISTS = {
    "tools-none": [], "tools-words": ["echo"], "tools-twice": [TOOLS[0], TOOLS[0]],
    "tools-many": [{**TOOLS[0], "name": f"echo{n}"} for n in range(1000)],
}  # fmt: skip


class Bad(Guess):
    """hang, hang-up, flood, huge: at a step; slow-reset, refuse, over: at reset; lies: refuses what
    its schema allows."""

    def __init__(self, kind: str, socket: WebSocket):
        self.kind, self.socket = kind, socket

    def reset(self, data: dict[str, Any]) -> Any:
        if self.kind == "refuse":
            raise Refused("EXECUTION_ERROR", "no such task")
        if self.kind == "slow-reset":
            return None
        return observed(
            done=self.kind == "over", hint="x" * (100_000 if self.kind == "long" else 1) + "\ud800"
        )

    async def step(self, data: dict[str, Any]) -> Any:
        if data == {"type": "list_tools"}:
            return observed(tools=LISTS.get(self.kind))
        if self.kind == "hang":
            return None
        if self.kind == "hang-up":
            await self.socket.close()
        elif self.kind == "lies":
            raise Refused("VALIDATION_ERROR", "Invalid message")
        elif self.kind == "flood":
            for _ in range(1000):
                await self.socket.send_text(json.dumps(observed(hint="more")))
        elif self.kind == "huge":
            return observed(hint="x" * 5_000_000)
        elif self.kind in ANSWERS:
            await self.socket.send_text(ANSWERS[self.kind])
            return None
        return await super().step(data)


def environment(kind: str, socket: WebSocket) -> Any:
    known = {"guess": Guess, "guess2": Guess, "echo": Echo, "strict": Strict, "quest": Quest}
    if kind.startswith("tasks-"):
        return Tasks()
    return known[kind]() if kind in known else Bad(kind.removeprefix("bad-"), socket)


async def told(request: Request) -> Response:
    return JSONResponse({"open": sum(OPEN.values()), "told": TOLD})


async def schema(request: Request) -> Response:
    kind = request.path_params["kind"].removeprefix("bad-")
    if kind == "schema-404":
        return JSONResponse({"detail": "Not Found"}, status_code=404)
    if kind == "schema-endless":
        return StreamingResponse(b"x" * 65536 for _ in range(1000))
    if kind in SCHEMAS:
        return Response(SCHEMAS[kind], media_type="application/json")
    calls = kind in ("echo", "strict") or kind.startswith("tools-")
    state = {"type": "object", "properties": {}}
    action = CALL if calls else COMMAND if kind == "quest" else GUESS
    return JSONResponse({"action": action, "observation": {"type": "object"}, "state": state})


async def session(socket: WebSocket) -> None:
    kind = socket.path_params["kind"]
    await socket.accept()
    if OPEN[kind] >= ROOM.get(kind, 10_000) or kind == "bad-factory":
        code = "FACTORY_ERROR" if kind == "bad-factory" else "CAPACITY_REACHED"
        full = {"message": f"{OPEN[kind]} sessions active", "code": code}
        await socket.send_text(json.dumps({"type": "error", "data": full}))
        await socket.close()
        return
    OPEN[kind] += 1
    try:
        await talk(socket, environment(kind, socket))
    except (WebSocketDisconnect, RuntimeError):
        pass
    finally:
        OPEN[kind] -= 1


async def talk(socket: WebSocket, env: Any) -> None:
    while True:
        message = json.loads(await socket.receive_text())
        try:
            match message:
                case {"type": "reset", "data": dict(data), **rest} if not rest:
                    answer = env.reset(data)
                case {"type": "step", "data": dict(data), **rest} if not rest:
                    answer = await env.step(data)
                case {
                    "type": "mcp",
                    "data": {"jsonrpc": "2.0", "method": "tools/list", "id": number},
                }:
                    answer = {
                        "type": "mcp",
                        "data": {"jsonrpc": "2.0", "id": number, **env.mcp(message["data"])},
                    }
                case {"type": "state", **rest} if not rest:
                    answer = {"type": "state", "data": {"episode_id": None, "step_count": 0}}
                case {"type": "close"}:
                    return
                case _:
                    raise Refused("UNKNOWN_TYPE", f"Unknown message type: {message.get('type')}")
        except Refused as refusal:
            answer = {"type": "error", "data": refusal.data}
        if answer is not None:
            await socket.send_text(json.dumps(answer))


app = Starlette(
    routes=[
        Route("/told", told),
        Route("/tasks-{kind}/list_environments", environments),
        Route("/tasks-{kind}/{name}/splits", splits),
        Route("/tasks-{kind}/{name}/{what}", tasks, methods=["POST"]),
        Route("/{kind}/schema", schema),
        WebSocketRoute("/{kind}/ws", session),
    ]
)


def free_port() -> int:
    with socket_module.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def started(port: int) -> subprocess.Popen:
    """This server in a process of its own, when it answers."""
    process = subprocess.Popen([sys.executable, __file__, str(port)])
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        try:
            httpx.get(f"http://127.0.0.1:{port}/told", trust_env=False)
            return process
        except httpx.TransportError:
            time.sleep(0.05)
    raise AssertionError("the server did not start")


@contextmanager
def serving() -> Iterator[str]:
    """Its address, while the block runs."""
    port = free_port()
    process = started(port)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="critical")
