"""Use any OpenEnv server as an `AgentEnv`: `env.name=openenv env.url=http://127.0.0.1:8000`.

In: a server's address (https://github.com/huggingface/OpenEnv, releases 0.4 to 0.10). Out: ordinary
episodes. Each has its own connection, which is a session with a separate environment on the server:

    GET /schema   JSON schema of an action: the tool `step`. If actions are tool calls, the server's
                  list of tools.
    WS  /ws       up: {"type": "reset" | "step" | "state", "data": ...}
                  down: {"type": "observation" | "state" | "error", ...}

Answers have no numbers, so only one request at a time is pending. After a missing answer the
connection cannot be trusted, and the episode is aborted. The reward of a step goes to the turn that
made it.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import time
from contextlib import suppress
from typing import Any

from agent_r1 import (
    AgentR1Error,
    BaseTool,
    Observation,
    Row,
    ToolCall,
    ToolOutput,
    ToolResult,
    WorldEnv,
    extra,
    first_line,
    send,
)
from agent_r1_recipes.openenv.settings import OpenEnvSettings

MAX_MESSAGE = 4 * 2**20
"""Bytes of the longest answer that is read; of its text the agent sees env.tool_max_chars."""
MAX_LISTED = 100_000
"""Characters of the descriptions of all tools."""
LIST_TOOLS = {"type": "list_tools"}
"""The action that lists tools, of which an action is to call one."""
STEP_TOOL = "step"
"""Name of the tool if actions are no tool calls. OpenEnv reserves this name."""
FULL = "CAPACITY_REACHED"
"""Code of the error of a server that has no free session now."""
SESSION_ENDED = (FULL, "FACTORY_ERROR", "SESSION_ERROR")
"""Codes of errors after which there is no session."""


class RefusedError(Exception):
    """Report a request that the server understood and refused; the session continues."""


class BrokenError(AgentR1Error):
    """Report a lost session, or an impossible answer."""


class FullError(BrokenError):
    """Report that the server has no free session now."""


class OpenEnv(WorldEnv):
    """Run one episode in a session of an OpenEnv server."""

    def __init__(self, tools: dict[str, BaseTool], config: OpenEnvSettings):
        super().__init__(tools, config)
        self.owner = f"the OpenEnv server at {config.url}"
        self.action = action_schema(config.url, config.tool_timeout_s)
        self.session = OpenEnvSession(config.url, config.tool_timeout_s, self.owner)

    async def reset(self, row: Row) -> Observation:
        # Half of an episode's time: an episode that waits in vain should see this cause, not an
        # episode timeout.
        await self.session.open(wait_s=self.config.episode_timeout_s / 2)
        if calls_tools(self.action):
            specs = await self._list_tools()
        else:
            specs = step_tool(self.action)
        self.add_tools(remote_tools(json.dumps(specs), self.owner), self.owner)
        try:
            first = await self.session.ask("reset", self.facts(row))
        except RefusedError as error:
            raise BrokenError(
                f"{self.owner} refused to begin an episode: {error}", code="server_refused"
            ) from None
        if first["done"]:
            raise BrokenError(
                f"{self.owner}: the episode was over before it began: {json.dumps(first)[:200]}",
                code="episode_over",
            )
        return self.first(row, text_of(first["observation"]))

    async def _list_tools(self) -> list[Any]:
        """List the tools by an action, or by an MCP message if only calls exist."""
        try:
            answer = await self.session.ask("step", LIST_TOOLS)
            tools = answer["observation"].get("tools")
        except RefusedError:
            request = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
            answer = await self.session.ask("mcp", request)
            tools = (answer.get("result") or {}).get("tools")
        if not isinstance(tools, list) or not tools:
            raise BrokenError(
                f"{self.owner}: its actions are calls of tools, and it lists none", code="no_tools"
            )
        return tools

    def process_reward(self, call: ToolCall, result: ToolResult) -> float:
        return super().process_reward(call, result) + result.data.get("reward", 0.0)

    async def close(self) -> None:
        super().close()
        await self.session.close()


class RemoteTool(BaseTool):
    """An action of the server's. Bound to the session of one episode."""

    env: OpenEnv
    foreign = True

    def __init__(self, spec: dict[str, Any], owner: str):
        self.name = spec.get("name")
        self.description = spec.get("description") or "Acts in the environment."
        self.parameters = spec.get("input_schema") or spec.get("inputSchema")
        super().__init__()

    @property
    def timeout_s(self) -> float:
        # Twice: the session's own deadline comes first, and its message says more.
        return 2 * self.env.config.tool_timeout_s

    async def execute(self, args: dict[str, Any]) -> ToolOutput:
        action = args
        if self.name != STEP_TOOL:
            action = {"type": "call_tool", "tool_name": self.name, "arguments": args}
        try:
            reply = await self.env.session.ask("step", action)
        except BrokenError as error:
            self.env.broken = str(error)
            raise
        self.env.over = reply["done"]
        return ToolOutput(text_of(reply["observation"]), {"reward": reply["reward"]})


# ----------------------------------------------------------------------------------- what it offers


@functools.lru_cache(maxsize=16)
def action_schema(url: str, timeout_s: float) -> dict[str, Any]:
    """Return the JSON schema of an action; the server is asked once.

    Raises AgentR1Error where no server answers, or one with another protocol.
    """
    import httpx

    where = f"{url.rstrip('/')}/schema"
    try:
        answer = send("GET", where, within_s=timeout_s, max_bytes=MAX_MESSAGE).result()
        schema = answer.json()["action"]
        if answer.status != 200 or not isinstance(schema.get("properties"), dict):
            raise ValueError(f"HTTP {answer.status}, {answer.body[:100]!r}")
    except (
        httpx.HTTPError,
        httpx.InvalidURL,
        TimeoutError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
    ) as error:
        raise AgentR1Error(
            f"no OpenEnv server answers at env.url={url}: {where} gave {type(error).__name__} "
            f"({first_line(error)}), not the schema of an action with its properties; start the "
            "server, or correct the address",
            code="server_unreachable",
        ) from None
    return schema


def calls_tools(action: dict[str, Any]) -> bool:
    """Return whether actions are tool calls (MCP) or have no fields: then list the tools."""
    fields = action["properties"].keys() - {"metadata"}
    return not fields or fields == {"type", "tool_name", "arguments"}


def step_tool(action: dict[str, Any]) -> list[dict[str, Any]]:
    """Make the single tool of an environment whose actions have their own fields."""
    fields = {name: schema for name, schema in action["properties"].items() if name != "metadata"}
    parameters = action | {"properties": fields}
    return [
        {"name": STEP_TOOL, "description": action.get("description"), "input_schema": parameters}
    ]


@functools.lru_cache(maxsize=256)
def remote_tools(specs: str, owner: str) -> list[RemoteTool]:
    """Make the tools that the server lists. Raises AgentR1Error for an invalid list.

    `specs` is JSON, so that the same list is checked once.
    """
    if len(specs) > MAX_LISTED:
        raise BrokenError(
            f"{owner} lists tools of {len(specs)} characters, and every prompt would carry them",
            code="schema_too_long",
        )
    try:
        return [RemoteTool(spec, owner) for spec in json.loads(specs)]
    except (AgentR1Error, TypeError, AttributeError) as error:
        raise BrokenError(
            f"{owner} lists something that is not a tool: {first_line(error)}", code="bad_schema"
        ) from None


def text_of(observation: dict[str, Any]) -> str:
    """Return the text for the agent: the only informative field, or all as JSON.

    Metadata is not shown.
    """
    if "tool_name" in observation and "result" in observation:
        return _result(observation)
    fields = {}
    for name, value in observation.items():
        if name != "metadata" and value not in (None, "", [], {}):
            fields[name] = value
    if not fields:
        return ""
    values = list(fields.values())
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return _json(fields)


def _result(observation: dict[str, Any]) -> str:
    """Return a called tool's result, plain or in FastMCP's wrapper."""
    error = observation.get("error")
    if error:
        raise RefusedError(error.get("message") if isinstance(error, dict) else _json(error))
    result = observation["result"]
    if isinstance(result, dict) and isinstance(result.get("content"), list):
        texts = [_part_text(part) for part in result["content"] if isinstance(part, dict)]
        if result.get("is_error") or result.get("isError"):
            raise RefusedError(" ".join(texts))
        return "\n".join(texts)
    if isinstance(result, str):
        return result
    return _json(result)


def _part_text(part: dict[str, Any]) -> str:
    """Return the text of a part of a result, also of an embedded resource."""
    resource = part.get("resource")
    if isinstance(resource, dict) and "text" in resource:
        return str(resource["text"])
    if "text" in part:
        return str(part["text"])
    if part.get("type") == "resource_link":
        return f"{part.get('name', '')}: {part.get('uri', '')}"
    return f"[{part.get('type', 'a part')}, which cannot be shown]"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# -------------------------------------------------------------------------------------- the session


class OpenEnvSession:
    """Keep one connection, with one request at a time, each within `timeout_s`."""

    def __init__(self, url: str, timeout_s: float, owner: str):
        self.url = "ws" + url.rstrip("/").removeprefix("http") + "/ws"  # https: becomes wss:
        self.timeout_s = timeout_s
        self.owner = owner
        self.socket: Any = None

    async def open(self, wait_s: float) -> None:
        """Connect and get a session. A full or restarting server gets `wait_s` seconds."""
        deadline = time.monotonic() + wait_s
        pause = 0.02
        while True:
            try:
                return await self._connect()
            except FullError as error:
                await self.close()
                if time.monotonic() + pause > deadline:
                    raise BrokenError(f"{error}; waited {wait_s:g} s", code=error.code) from None
            await asyncio.sleep(pause)
            pause = min(2 * pause, 1.0)

    async def _connect(self) -> None:
        with extra("openenv", "env.name=openenv"):
            from websockets.asyncio.client import connect
            from websockets.exceptions import InvalidStatus, WebSocketException

        try:
            self.socket = await connect(
                self.url,
                max_size=MAX_MESSAGE,
                open_timeout=self.timeout_s,
                close_timeout=1.0,
                proxy=None,  # none between an agent and its environment
                compression=None,
                ping_timeout=None,  # our own deadlines end a silence
            )
        except (OSError, WebSocketException) as error:  # a TimeoutError is an OSError
            message = f"{self.owner} takes no connection at {self.url} ({first_line(error)})"
            if isinstance(error, InvalidStatus):
                raise BrokenError(message, code="server_refused") from None
            raise FullError(message, code="server_unreachable") from None
        with suppress(RefusedError):
            await self.ask("state")  # a full server accepts, says so, and hangs up

    async def ask(self, kind: str, payload: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the answer's data.

        Raises RefusedError for a refusal, BrokenError for a failure.
        """
        from websockets.exceptions import ConnectionClosed

        message: dict[str, Any] = {"type": kind}
        if payload is not None:
            message["data"] = payload
        try:
            async with asyncio.timeout(self.timeout_s):
                # Answers have no numbers: a message that waits already is not the answer to this.
                early_message = await self._read_waiting_message()
                if early_message is None:
                    # What the server said before it hung up can still be read.
                    with suppress(ConnectionClosed):
                        await self.socket.send(json.dumps(message, default=str))
                answer = early_message or await self.socket.recv()
        except TimeoutError:
            raise BrokenError(
                f"{self.owner} did not answer {kind!r} within {self.timeout_s:g} s "
                "(env.tool_timeout_s)",
                code="timed_out",
            ) from None
        except ConnectionClosed as error:
            raise BrokenError(
                f"{self.owner} hung up at {kind!r} ({first_line(error)})", code="session_lost"
            ) from None
        return self._read(kind, answer, early_message is not None)

    async def _read_waiting_message(self) -> str | bytes | None:
        """Return a message that came unasked, if any."""
        with suppress(TimeoutError):
            async with asyncio.timeout(0):
                return await self.socket.recv()
        return None

    def _read(self, kind: str, raw: str | bytes, is_early: bool) -> dict[str, Any]:
        expected_type = {"reset": "observation", "step": "observation"}.get(kind, kind)
        try:
            message = json.loads(raw)
            payload = message["data"]
            if message["type"] == "error":
                raise self._error(payload)
            if is_early or message["type"] != expected_type or not isinstance(payload, dict):
                raise ValueError
            if expected_type == "observation":
                return self._check_observation(payload)
            return payload
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            when = "unasked" if is_early else f"in answer to {kind!r}"
            raise BrokenError(
                f"{self.owner} sent {raw[:100]!r} {when}, and {expected_type!r} is due",
                code="bad_answer",
            ) from None

    def _error(self, payload: dict[str, Any]) -> Exception:
        message = str(payload.get("message"))
        details = payload.get("errors") or []
        for detail in details[:3]:
            where = ".".join(str(part) for part in detail.get("loc", ()))
            message += f"; {where}: {detail.get('msg')}"
        code = payload.get("code")
        if code == FULL:
            return FullError(
                f"{self.owner} has no session free ({message[:200]}); start it with a higher "
                "max_concurrent_envs",
                code="server_full",
            )
        if code in SESSION_ENDED:
            return BrokenError(
                f"{self.owner} lost the session: {message[:200]}", code="session_lost"
            )
        return RefusedError(message)

    @staticmethod
    def _check_observation(payload: dict[str, Any]) -> dict[str, Any]:
        """Check an observation, and its reward's type (none: 0)."""
        observation = payload["observation"]
        done = payload.get("done", False)
        if not isinstance(observation, dict) or not isinstance(done, bool):
            raise TypeError
        reward = payload.get("reward")
        if reward is None:
            reward = 0.0
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            raise TypeError
        return {"observation": observation, "reward": float(reward), "done": done}

    async def close(self) -> None:
        if self.socket is not None:
            await self.socket.close()
