"""Use any OpenEnv server as an `AgentEnv`: `env.name=openenv env.url=http://127.0.0.1:8000`.

In: a server's address (https://github.com/huggingface/OpenEnv, protocol version 0.4). Out: ordinary
episodes. Each has its own connection, which is a session with a separate environment on the server:

    GET /schema   JSON schema of an action: the tool `step`. If actions are tool calls, the server's list of tools.
    WS  /ws       {"type": "reset" | "step" | "state", "data": ...} up; {"type": "observation" | "state" | "error",
    ...} down

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
LISTED = {"type": "list_tools"}
"""The action that lists tools, of which an action is to call one."""
STEP_TOOL = "step"
"""Name of the tool if actions are no tool calls. OpenEnv reserves this name."""
FULL, SESSION_ENDED = "CAPACITY_REACHED", ("CAPACITY_REACHED", "FACTORY_ERROR", "SESSION_ERROR")
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
        specs = await self._listed() if calls_tools(self.action) else step_tool(self.action)
        self.add_tools(remote_tools(json.dumps(specs), self.owner), self.owner)
        try:
            data = await self.session.ask("reset", self.facts(row))
        except RefusedError as error:
            raise BrokenError(
                f"{self.owner} refused to begin an episode: {error}", code="server_refused"
            ) from None
        if data["done"]:
            raise BrokenError(
                f"{self.owner}: the episode was over before it began: {json.dumps(data)[:200]}",
                code="episode_over",
            )
        return self.first(row, text_of(data["observation"]))

    async def _listed(self) -> list[Any]:
        """List the tools by an action, or by an MCP message if only calls exist."""
        try:
            found = (await self.session.ask("step", LISTED))["observation"].get("tools")
        except RefusedError:
            request = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
            answer = await self.session.ask("mcp", request)
            found = (answer.get("result") or {}).get("tools")
        if not isinstance(found, list) or not found:
            raise BrokenError(
                f"{self.owner}: its actions are calls of tools, and it lists none", code="no_tools"
            )
        return found

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
        self.name, self.description = (
            spec.get("name"),
            spec.get("description") or "Acts in the environment.",
        )
        self.parameters = spec.get("input_schema") or spec.get("inputSchema")
        super().__init__()

    @property
    def timeout_s(self) -> float:
        return (
            2 * self.env.config.tool_timeout_s
        )  # the session's own deadline comes first, and says more

    async def execute(self, args: dict[str, Any]) -> ToolOutput:
        action = (
            args
            if self.name == STEP_TOOL
            else {"type": "call_tool", "tool_name": self.name, "arguments": args}
        )
        try:
            data = await self.env.session.ask("step", action)
        except BrokenError as error:
            self.env.broken = str(error)
            raise
        self.env.over = data["done"]
        return ToolOutput(text_of(data["observation"]), {"reward": data["reward"]})


# ----------------------------------------------------------------------------------- what it offers


@functools.lru_cache(maxsize=16)
def action_schema(url: str, timeout_s: float) -> dict[str, Any]:
    """Return the JSON schema of an action, asked for once.

    Raises AgentR1Error where no server answers, or one with another protocol.
    """
    import httpx

    where = f"{url.rstrip('/')}/schema"
    try:
        answer = send("GET", where, within_s=timeout_s, max_bytes=MAX_MESSAGE).result()
        found = answer.json()["action"]
        if answer.status != 200 or not isinstance(found.get("properties"), dict):
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
            f"({first_line(error)}), not the "
            "schema of an action with its properties; start the server, or correct the address",
            code="server_unreachable",
        ) from None
    return found


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
    said = {
        name: value
        for name, value in observation.items()
        if name != "metadata" and value not in (None, "", [], {})
    }
    values = list(said.values())
    return (
        ""
        if not said
        else values[0]
        if len(said) == 1 and isinstance(values[0], str)
        else _json(said)
    )


def _result(observation: dict[str, Any]) -> str:
    """Return a called tool's result, plain or in FastMCP's wrapper."""
    if error := observation.get("error"):
        raise RefusedError(error.get("message") if isinstance(error, dict) else _json(error))
    result = observation["result"]
    if isinstance(result, dict) and isinstance(result.get("content"), list):
        texts = [str(part.get("text", "")) for part in result["content"] if isinstance(part, dict)]
        if result.get("is_error") or result.get("isError"):
            raise RefusedError(" ".join(texts))
        return "\n".join(texts)
    return result if isinstance(result, str) else _json(result)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# -------------------------------------------------------------------------------------- the session


class OpenEnvSession:
    """Keep one connection, with one request at a time, each within `timeout_s`."""

    def __init__(self, url: str, timeout_s: float, owner: str):
        self.url, self.timeout_s, self.owner = (
            "ws" + url.rstrip("/").removeprefix("http") + "/ws",
            timeout_s,
            owner,
        )
        self.socket = None

    async def open(self, wait_s: float) -> None:
        """Connect and get a session. A full or restarting server gets `wait_s` seconds."""
        deadline, pause = time.monotonic() + wait_s, 0.02
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
            # No proxy between an agent and its environment. Our deadlines end a silence, not pings.
            options = {
                "proxy": None,
                "compression": None,
                "ping_timeout": None,
                "close_timeout": 1.0,
            }
            self.socket = await connect(
                self.url, max_size=MAX_MESSAGE, open_timeout=self.timeout_s, **options
            )
        except (OSError, WebSocketException) as error:  # a TimeoutError is an OSError
            said = f"{self.owner} takes no connection at {self.url} ({first_line(error)})"
            if isinstance(error, InvalidStatus):
                raise BrokenError(said, code="server_refused") from None
            raise FullError(said, code="server_unreachable") from None
        with suppress(RefusedError):
            await self.ask("state")  # a full server accepts, says so, and hangs up

    async def ask(self, kind: str, data: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the answer's data. Raises RefusedError for a refusal, BrokenError for a
        failure."""
        from websockets.exceptions import ConnectionClosed

        message = {"type": kind} if data is None else {"type": kind, "data": data}
        try:
            async with asyncio.timeout(self.timeout_s):
                unasked = await self._waiting()
                if unasked is None:
                    with suppress(
                        ConnectionClosed
                    ):  # what it said before it hung up can still be read
                        await self.socket.send(json.dumps(message, default=str))
                answer = unasked or await self.socket.recv()
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
        return self._read(kind, answer, unasked is not None)

    async def _waiting(self) -> str | bytes | None:
        """Return a message that came unasked, if any."""
        with suppress(TimeoutError):
            async with asyncio.timeout(0):
                return await self.socket.recv()
        return None

    def _read(self, kind: str, raw: str | bytes, unasked: bool) -> dict[str, Any]:
        wanted = {"reset": "observation", "step": "observation"}.get(kind, kind)
        try:
            message = json.loads(raw)
            found, data = message["type"], message["data"]
            if found == "error":
                raise self._error(data)
            if unasked or found != wanted or not isinstance(data, dict):
                raise ValueError
            return self._checked(data) if wanted == "observation" else data
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            when = "unasked" if unasked else f"in answer to {kind!r}"
            raise BrokenError(
                f"{self.owner} sent {raw[:100]!r} {when}, and {wanted!r} is due", code="bad_answer"
            ) from None

    def _error(self, data: dict[str, Any]) -> Exception:
        details = data.get("errors") or []
        where = "".join(
            f"; {'.'.join(map(str, e.get('loc', ())))}: {e.get('msg')}" for e in details[:3]
        )
        code, said = data.get("code"), f"{data.get('message')}{where}"
        if code == FULL:
            return FullError(
                f"{self.owner} has no session free ({said[:200]}); start it with a higher "
                "max_concurrent_envs",
                code="server_full",
            )
        return (
            BrokenError(f"{self.owner} lost the session: {said[:200]}", code="session_lost")
            if code in SESSION_ENDED
            else RefusedError(said)
        )

    @staticmethod
    def _checked(data: dict[str, Any]) -> dict[str, Any]:
        """Check an observation, and its reward's type (none: 0)."""
        observation, reward, done = data["observation"], data.get("reward"), data.get("done", False)
        if not isinstance(observation, dict) or not isinstance(done, bool):
            raise TypeError
        reward = 0.0 if reward is None else reward
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            raise TypeError
        return {"observation": observation, "reward": float(reward), "done": done}

    async def close(self) -> None:
        if self.socket is not None:
            await self.socket.close()
