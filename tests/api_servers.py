"""Servers on loopback that speak OpenAI's chat completions: a scripted one, and our own model."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

from agent_r1.config import load_config
from agent_r1.rollout.episode import Limits
from agent_r1_recipes.api.client import Client
from agent_r1_recipes.api.flow import ApiFlow
from agent_r1_recipes.gateway.server import serving
from agent_r1_recipes.gateway.serving import Server


def answer(
    content: str | None = None,
    calls: list[tuple[str, str]] | None = None,
    usage: Any = (100, 10),
    finish_reason: str = "stop",
    **message: Any,
) -> dict[str, Any]:
    """The body of an answer; `calls` as (name, arguments as text)."""
    message = {"role": "assistant", "content": content} | message
    if calls:
        message["tool_calls"] = [
            {"id": f"id-{n}", "type": "function", "function": {"name": name, "arguments": text}}
            for n, (name, text) in enumerate(calls)
        ]
    body: dict[str, Any] = {"choices": [{"message": message, "finish_reason": finish_reason}]}
    if usage:
        body["usage"] = {"prompt_tokens": usage[0], "completion_tokens": usage[1]}
    return body


@dataclass
class Wrong:
    """An answer that is none."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    half: bool = False
    """The connection breaks in the middle of the body."""


@dataclass
class Api:
    """A scripted API, and what it was asked."""

    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)


Script = Callable[[dict[str, Any], int], dict[str, Any] | Wrong]


@contextmanager
def scripted_api(script: Script | list, port: int = 0) -> Iterator[Api]:
    """Serve `script(request, number)`, or the answers of a list in order."""
    api = Api()
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with lock:
                number = len(api.asked)
                api.asked.append(request)
                api.keys.append(self.headers.get("authorization"))
            reply = script(request, number) if callable(script) else script[number]
            if isinstance(reply, dict):
                reply = Wrong(body=json.dumps(reply).encode())
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(reply.body)))
            self.send_header("connection", "close")  # or this thread would outlive the server
            self.end_headers()
            self.wfile.write(reply.body[: len(reply.body) // 2] if reply.half else reply.body)

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    api.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield api
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def served_model(
    policy: Any, chat: Any, tools: dict[str, Any], config: Any, key: str = "k" * 20
) -> Iterator[tuple[str, Server]]:
    """Serve a policy as `agent-r1 serve --backend local` does; yield its address and server."""
    agent = SimpleNamespace(policy=policy, chat=chat, tools=tools, config=config, model="tiny")
    server = Server(agent, key)
    ready = threading.Event()
    state: dict[str, Any] = {}

    async def forever() -> None:
        state["over"] = asyncio.Event()
        state["loop"] = asyncio.get_running_loop()
        async with serving(server.handle, admit=server.admit) as port:
            state["port"] = port
            ready.set()
            await state["over"].wait()

    thread = threading.Thread(target=asyncio.run, args=(forever(),), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield f"http://127.0.0.1:{state['port']}/v1", server
    finally:
        state["loop"].call_soon_threadsafe(state["over"].set)
        thread.join(10)


def api_rollout(url: str, folder: Any, *overrides: str) -> Any:
    """The section `rollout` of a client of `url`."""
    settings = [f"rollout.api={url}", f"rollout.api_records={folder}", *overrides]
    return load_config("small", settings, algorithm="grpo").rollout


@contextmanager
def api_flow(
    url: str, folder: Any, chat: Any, make_env: Callable, *overrides: str, max_tokens: int = 64
) -> Iterator[ApiFlow]:
    rollout = api_rollout(url, folder, *overrides)
    client = Client("some-model", rollout)
    limits = Limits(max_tokens, 500, 60.0)
    try:
        yield ApiFlow(client, chat, limits, make_env, rollout)
    finally:
        client.ledger.close()
