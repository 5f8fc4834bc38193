"""Use the tools of an MCP server (Model Context Protocol). In: a command line or a URL. Out:
`BaseTool`s.

    env.mcp.files="python server.py"            a child process; we talk through its standard input and output
    env.mcp.files=http://127.0.0.1:9000/mcp     a running server (streamable HTTP)
    env.tools=[search,files]                    all of its tools; files.read is one of them

The official SDK (`mcp`) speaks the protocol. This module adds robustness: whatever a server does, a
run continues, or stops with one line. A hanging server meets the call's deadline, and a dead server
is restarted by the next call. A wrong schema is refused before the run.

Rollouts call `asyncio.run` repeatedly, and a session must outlive that; also, the task that entered
one of the SDK's cancel scopes must leave it. So all sessions live in one thread with its own event
loop, one task each. A training loop passes its calls to that loop and awaits the answers.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import copy
import functools
import json
import logging
import os
import re
import shlex
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import IO, TYPE_CHECKING, Any, TypeVar

from agent_r1 import (
    AgentR1Error,
    BaseTool,
    ConfigError,
    InvalidArgumentsError,
    ToolOutput,
    __version__,
    extra,
    first_line,
)
from agent_r1_recipes.mcp.settings import McpSettings

if TYPE_CHECKING:  # the SDK takes a second to import
    import httpx2
    from mcp import Client, types

MAX_MESSAGE_BYTES = 4 * 2**20
"""Of one answer over HTTP. A program that we start is as trusted as its command."""
MAX_TOOLS = 1000
OPEN_S = 60.0
"""Within which a server must be ready, and then list its tools; `npx` and `uvx` download it
first."""
EXIT_S = 5.0
"""For all servers to end at our end. The SDK closes their input, and terminates them after 2 s."""

T = TypeVar("T")


class McpTool(BaseTool):
    """Call one tool of a server. In per-episode sessions, the tools of one server share the
    session."""

    body = None  # its code is elsewhere
    foreign = True

    def __init__(self, session: McpSession, listed: types.Tool, session_an_episode: bool):
        self.session, self.remote_name, self.session_an_episode = (
            session,
            listed.name,
            session_an_episode,
        )
        self.name = re.sub(r"[^A-Za-z0-9_-]", "_", listed.name)[:64]
        self.description = listed.description or listed.title or listed.name
        self.parameters = listed.input_schema
        hints = listed.annotations
        self.retries = 2 if hints and (hints.read_only_hint or hints.idempotent_hint) else 0
        try:
            super().__init__()
        except ConfigError as error:
            raise ConfigError(f"{session}: {error}", code=error.code) from None

    async def execute(self, args: dict[str, Any]) -> ToolOutput:
        result = await asyncio.wrap_future(
            self.session.ask(lambda client: client.call_tool(self.remote_name, args))
        )
        text = "\n".join(map(_text, result.content))
        if not result.content and result.structured_content is not None:
            text = json.dumps(result.structured_content, ensure_ascii=False)
        if result.is_error:  # by the protocol the agent reads this, to correct itself
            raise InvalidArgumentsError(text)
        return ToolOutput(text)

    def for_episode(self, shared: dict[Any, Any]) -> BaseTool:
        if not self.session_an_episode:
            return self
        mine = copy.copy(self)
        if self.session not in shared:
            shared[self.session] = McpSession(self.session.name, self.session.place)
        mine.session = shared[self.session]
        return mine

    def close(self) -> None:
        self.session.close()


def servers(env: McpSettings) -> dict[str, Callable[[str], list[BaseTool]]]:
    """Find what opens each server of `env.mcp`, by name; see `mcp_tools`."""
    return {
        name: functools.partial(
            mcp_tools, name, place, session_an_episode=name in env.mcp_per_episode
        )
        for name, place in env.mcp.items()
    }


def mcp_tools(
    name: str, place: str, wanted: str = "", session_an_episode: bool = False
) -> list[BaseTool]:
    """Return all tools of the server at `place`, or the `wanted` one.

    `place` is a command line or a URL. Raises AgentR1Error if it cannot be reached, and ConfigError
    for a missing tool or a wrong schema.
    """
    with extra("mcp", "env.mcp"):
        import mcp  # noqa: F401
    session = McpSession(name, place)
    try:
        listed = session.ask(_list_tools).result()
        names = [tool.name for tool in listed]
        if not names:
            raise ConfigError(f"{session} has no tools; remove it from env.tools", code="no_tools")
        if wanted and wanted not in names:
            raise ConfigError.unknown(
                "env.tools", f"{name}.{wanted}", [f"{name}.{known}" for known in names]
            )
        return [
            McpTool(session, tool, session_an_episode)
            for tool in listed
            if wanted in ("", tool.name)
        ]
    except AgentR1Error:
        session.close()
        raise


async def _list_tools(client: Client) -> list[types.Tool]:
    try:
        async with asyncio.timeout(OPEN_S):
            page = await client.list_tools()
            tools = page.tools
            while page.next_cursor and len(tools) <= MAX_TOOLS:
                page = await client.list_tools(cursor=page.next_cursor)
                tools += page.tools
    except TimeoutError:
        raise ValueError(f"it did not list its tools within {OPEN_S:g} s") from None
    if len(tools) > MAX_TOOLS:
        raise ValueError(f"it lists more than {MAX_TOOLS} tools")
    return tools


async def _unchecked(name: str, result: types.CallToolResult) -> None:
    """Skip the SDK's check of structured results: agents read text."""


def _text(part: types.ContentBlock) -> str:
    """Return the readable text of a part of an answer."""
    return part.text if part.type == "text" else f"[{part.type}, which cannot be shown]"


# ----------------------------------------------------------------------------------------- sessions


class McpSession:
    """Keep a conversation with a server. The first call opens it, and a call after its end reopens
    it."""

    def __init__(self, name: str, place: str):
        self.name, self.place = name, place
        self.closed = False
        self._client: asyncio.Future[Client] | None = None
        self._over = asyncio.Event()
        self._answers: Any = None
        """The stream of a process's messages, which is closed at its end; None over HTTP."""
        self._complaints: IO[str] | None = None
        self._said = ""

    def __str__(self) -> str:
        return f"the MCP server {self.name!r} ({self.place})"

    def ask(self, what: Callable[[Client], Awaitable[T]]) -> Any:
        """Run `what` in the thread of the sessions. Cancelling the returned future cancels the
        call."""
        return asyncio.run_coroutine_threadsafe(self._ask(what), _thread())

    def close(self) -> None:
        """End the session for good, without waiting."""
        self.closed = True
        _thread().call_soon_threadsafe(lambda: self._over.set())

    async def _ask(self, what: Callable[[Client], Awaitable[T]], again: bool = True) -> T:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, INVALID_PARAMS
        from pydantic import ValidationError

        client = await self._open()
        try:
            return await what(client)
        except ValidationError as error:
            found = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, found["loc"]))
            raise AgentR1Error(
                f"MCP server {self.name!r} breaks the protocol: {where}: {found['msg']}",
                code="bad_answer",
            ) from None
        except (ValueError, RuntimeError) as error:  # the result does not match its declaration
            raise AgentR1Error(
                f"MCP server {self.name!r} failed: {first_line(error)}", code="bad_answer"
            ) from None
        except MCPError as error:
            if error.code == INVALID_PARAMS:
                raise InvalidArgumentsError(error.message) from None
            lost = (
                error.message == "Session terminated"
            )  # a server over HTTP was started anew, and has done nothing yet
            said = self._last_words() if error.code == CONNECTION_CLOSED else ""
            if lost or error.code == CONNECTION_CLOSED:
                self._over.set()
                self._client = None
            if lost and again:
                return await self._ask(what, again=False)
            raise AgentR1Error(
                f"MCP server {self.name!r}: {said or error.message}", code="server_failed"
            ) from None

    def _open(self) -> Awaitable[Client]:
        if self.closed:
            raise AgentR1Error(
                f"MCP server {self.name!r}: the session is over", code="session_lost"
            )
        if (
            self._client is not None
            and self._answers
            and not self._answers.statistics().open_send_streams
        ):
            self._over.set()  # the process has ended meanwhile
            self._client = None
        if self._client is None:
            self._answers, self._complaints, self._said = None, None, ""
            self._client, self._over = asyncio.get_running_loop().create_future(), asyncio.Event()
            self._client.add_done_callback(
                lambda client: client.cancelled() or client.exception()
            )  # one is read by all
            task = asyncio.create_task(self._live(self._client, self._over))
            OPEN[task] = self
            task.add_done_callback(OPEN.pop)
        return asyncio.shield(
            self._client
        )  # a caller who gives up must not take it from the others

    async def _live(self, opened: asyncio.Future[Client], over: asyncio.Event) -> None:
        """Open, serve and close the session in one task."""
        from mcp import Client
        from mcp.types import Implementation

        transport, fault = self._http() if re.match("https?://", self.place) else self._stdio(), ""
        try:
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(OPEN_S):
                    info = Implementation(name="agent-r1", version=__version__)
                    client = await stack.enter_async_context(Client(transport, client_info=info))
                # A server's pattern may take hours to match, in the thread of all sessions.
                client.session.validate_tool_result = _unchecked
                opened.set_result(client)
                await over.wait()
        except (Exception, BaseExceptionGroup, asyncio.CancelledError) as error:
            fault = (
                f"it was not ready within {OPEN_S:g} s"
                if isinstance(error, TimeoutError)
                else self._why(error)
            )
        finally:
            if not opened.done():
                opened.set_exception(
                    AgentR1Error(f"{self} cannot be used: {fault}", code="server_unreachable")
                )
            if self._client is opened:
                self._client = None

    @contextlib.asynccontextmanager
    async def _http(self) -> AsyncIterator[Any]:
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        async def bound(response: httpx2.Response) -> None:
            body: Any = response.stream

            class Bounded(httpx2.AsyncByteStream):
                async def __aiter__(self) -> AsyncIterator[bytes]:
                    got = 0
                    async for piece in body:
                        if (got := got + len(piece)) > MAX_MESSAGE_BYTES:
                            raise httpx2.StreamError(
                                f"the answer has more than {MAX_MESSAGE_BYTES} bytes"
                            )
                        yield piece

                async def aclose(self) -> None:
                    await body.aclose()

            if (
                response.headers.get("content-encoding", "identity") != "identity"
            ):  # few bytes may unfold to gigabytes
                raise httpx2.StreamError(
                    "the server compresses its answers, although this was not requested"
                )
            response.stream = Bounded()

        plain, hooks = {"Accept-Encoding": "identity"}, {"response": [bound]}
        patience = httpx2.Timeout(30, read=300)
        async with (
            httpx2.AsyncClient(headers=plain, timeout=patience, event_hooks=hooks) as http,
            streamable_http_client(self.place, http_client=http) as streams,
        ):
            yield streams

    @contextlib.asynccontextmanager
    async def _stdio(self) -> AsyncIterator[Any]:
        """Start a process, and keep its standard error for `_last_words`."""
        from mcp.client.stdio import StdioServerParameters, stdio_client

        command, *arguments = shlex.split(self.place)
        with tempfile.TemporaryFile("w+") as self._complaints:
            started = StdioServerParameters(command=command, args=arguments)
            async with stdio_client(started, self._complaints) as streams:
                self._answers = streams[0]
                try:
                    yield streams
                finally:
                    self._last_words()

    def _last_words(self) -> str:
        """Return what a process that ended wrote last on standard error; nothing over HTTP."""
        if self._complaints is None or self._complaints.closed:
            return self._said
        file = self._complaints.fileno()
        # Not `read`, which would move the place at which the process goes on writing.
        said = (
            os.pread(file, 2000, max(0, os.fstat(file).st_size - 2000))
            .decode(errors="replace")
            .split("\n")
        )
        self._said = f"it ended ({next((line.strip() for line in reversed(said) if line.strip()), 'it said nothing')})"
        return self._said

    def _why(self, error: BaseException) -> str:
        """Return the first real cause in a line."""
        from mcp.types import CONNECTION_CLOSED

        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, FileNotFoundError | PermissionError):
            return f"{error.strerror}: {error.filename}"
        return (getattr(error, "code", None) == CONNECTION_CLOSED and self._said) or first_line(
            error
        )


OPEN: dict[asyncio.Task[None], McpSession] = {}
"""The sessions that are open or opening."""


@functools.cache
def _thread() -> asyncio.AbstractEventLoop:
    """Start the event loop of all sessions, in a thread."""
    logging.getLogger("mcp").setLevel(logging.CRITICAL)  # tracebacks of what we report in one line
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="mcp", daemon=True).start()

    async def end() -> None:
        for session in OPEN.values():
            session.close()
        if OPEN:
            await asyncio.wait(list(OPEN), timeout=EXIT_S)

    atexit.register(lambda: asyncio.run_coroutine_threadsafe(end(), loop).result(2 * EXIT_S))
    return loop
