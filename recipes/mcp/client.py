"""Use the tools of an MCP server (Model Context Protocol).

In: a command line or a URL. Out: `BaseTool`s.

    env.mcp.files="python server.py"            a child process; we talk through its standard input
                                                and output
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
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
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
MAX_SEARCHED = 100
"""Values of a structured result that are searched in the text. More are appended as they are."""
OPEN_S = 60.0
"""Until a server is ready, and then lists its tools; `npx` and `uvx` download it first."""
EXIT_S = 5.0
"""For all servers to end at our end. The SDK closes their input, and terminates them after 2 s."""
HTTP_CAUSES = {
    404: ", nothing answers at this address",
    405: ", this address takes no messages",
    429: ", too many calls at once",
}
"""Causes of a refusal by its status. Others say enough by their number."""

HARMLESS = {
    "_meta": "for programs",
    "annotations": "for a user's screen",
    "icons": "for a user's screen",
    "mimeType": "the kind of a text or file",
    "size": "of a linked file",
    "data": "a picture or sound: the agent reads that it cannot be shown",
    "uri": "of an embedded text, which is shown itself",
    "blob": "a file that is no text: the agent reads that it cannot be shown",
}
"""Keys of a tool's result whose values the agent does not read -> what they are."""

T = TypeVar("T")


class McpTool(BaseTool):
    """Call one tool of a server.

    In per-episode sessions, the tools of one server share the session.
    """

    body = None  # its code is elsewhere
    foreign = True

    def __init__(self, session: McpSession, remote: types.Tool, session_an_episode: bool):
        self.session = session
        self.remote_name = remote.name
        self.session_an_episode = session_an_episode
        # The server may use any name. Models are trained with letters, digits, _ and -.
        self.name = re.sub(r"[^A-Za-z0-9_-]", "_", remote.name)[:64]
        self.description = remote.description or remote.title or remote.name
        self.parameters = remote.input_schema
        hints = remote.annotations
        self.retries = 0
        if hints and (hints.read_only_hint or hints.idempotent_hint):
            self.retries = 2  # a second call cannot do anything twice
        try:
            super().__init__()
        except ConfigError as error:
            raise ConfigError(f"{session}: {error}", code=error.code) from None

    async def execute(self, args: dict[str, Any]) -> ToolOutput:
        result = await asyncio.wrap_future(
            self.session.ask(lambda client: client.call_tool(self.remote_name, args))
        )
        if getattr(result, "result_type", "complete") != "complete":
            raise InvalidArgumentsError(f"the server wants more: {result.result_type}")
        texts = [_text(part) for part in result.content]
        json_content = result.structured_content
        if json_content is not None and not _holds(texts, json_content):
            texts.append(json.dumps(json_content, ensure_ascii=False))
        text = "\n".join(texts)
        if result.is_error:  # by the protocol the agent reads this, to correct itself
            raise InvalidArgumentsError(text if text.strip() else "the tool failed, without a word")
        return ToolOutput(text)

    def for_episode(self, shared: dict[Any, Any]) -> BaseTool:
        if not self.session_an_episode:
            return self
        tool = copy.copy(self)
        if self.session not in shared:
            old = self.session
            shared[old] = McpSession(old.name, old.place, old.variables, old.token)
        tool.session = shared[self.session]
        return tool

    def close(self) -> None:
        self.session.close()


def servers(env: McpSettings) -> dict[str, Callable[[str], list[BaseTool]]]:
    """Find what opens each server of `env.mcp`, by name; see `mcp_tools`."""
    openers = {}
    for name, place in env.mcp.items():
        per_episode = name in env.mcp_per_episode
        openers[name] = functools.partial(
            mcp_tools,
            name,
            place,
            session_an_episode=per_episode,
            variables=env.mcp_variables,
            token=env.mcp_tokens.get(name),
        )
    return openers


def mcp_tools(
    name: str,
    place: str,
    tool_name: str = "",
    session_an_episode: bool = False,
    variables: Sequence[str] = (),
    token: str | None = None,
) -> list[BaseTool]:
    """Return all tools of the server at `place`, or only `tool_name`.

    `place` is a command line, which sees these `variables`, or a URL, which gets the bearer token
    in the variable `token`. Raises AgentR1Error if it cannot be reached, and ConfigError
    for a missing tool or a wrong schema.
    """
    with extra("mcp", "env.mcp"):
        import mcp  # noqa: F401
    session = McpSession(name, place, variables, token)
    try:
        remote_tools = session.ask(_list_tools).result()
        if not remote_tools:
            raise ConfigError(f"{session} has no tools; remove it from env.tools", code="no_tools")
        tools: list[BaseTool] = []
        for remote in remote_tools:
            if tool_name in ("", remote.name):
                tools.append(McpTool(session, remote, session_an_episode))
        if not tools:
            names = [f"{name}.{remote.name}" for remote in remote_tools]
            raise ConfigError.unknown("env.tools", f"{name}.{tool_name}", names)
        return tools
    except AgentR1Error:
        session.close()
        raise


async def _list_tools(client: Client) -> list[types.Tool]:
    try:
        async with asyncio.timeout(OPEN_S):
            page = await client.list_tools()
            tools = page.tools
            cursors: set[str] = set()
            while page.next_cursor and len(tools) <= MAX_TOOLS:
                if page.next_cursor in cursors:
                    raise ValueError(
                        f"its list of tools has the page {page.next_cursor!r:.40} twice"
                    )
                cursors.add(page.next_cursor)
                page = await client.list_tools(cursor=page.next_cursor)
                tools += page.tools
    except TimeoutError:
        raise ValueError(f"it did not list its tools within {OPEN_S:g} s") from None
    if len(tools) > MAX_TOOLS:
        raise ValueError(f"it lists more than {MAX_TOOLS} tools")
    return tools


async def _skip_check(name: str, result: types.CallToolResult) -> None:
    """Skip the SDK's check of structured results: agents read text."""


def _text(part: types.ContentBlock) -> str:
    """Return the readable text of a part of an answer."""
    if part.type == "text":
        return part.text
    if part.type == "resource":
        text = getattr(part.resource, "text", None)
        if text is not None:
            return text
        return f"[{part.resource.uri}, which cannot be shown]"
    if part.type == "resource_link":
        words = [part.name, part.title, part.description, str(part.uri)]
        return ": ".join(word for word in words if word)
    return f"[{part.type}, which cannot be shown]"


def _holds(texts: list[str], json_content: Any) -> bool:
    """Return whether the texts of a result say what its structured result says.

    Servers are advised to write it as JSON. Other texts must have each value, as often as it is
    there. With several values they must have the keys, too, because values alone do not say whose
    they are.
    """
    for text in texts:
        with contextlib.suppress(ValueError, RecursionError):
            if json.loads(text) == json_content:
                return True
    if isinstance(json_content, dict) and json_content.keys() == {"result"}:
        json_content = json_content["result"]  # the SDK's key around what is no object
    keys: set[str] = set()
    counts: Counter[str] = Counter()
    queue = [json_content]
    while queue:
        value = queue.pop()
        if isinstance(value, dict):
            keys.update(value)
            queue += value.values()
        elif isinstance(value, list):
            queue += value
        elif value != "":
            counts[json.dumps(value, ensure_ascii=False)] += 1
    if counts.total() > MAX_SEARCHED:
        return False
    whole = "\n".join(texts)
    has_keys = counts.total() == 1 or all(_count_words(whole, key) for key in keys)
    return has_keys and all(_count_words(whole, *_forms(n)) >= counts[n] for n in counts)


def _forms(json_value: str) -> set[str]:
    """Return the forms of a value in a text: JSON, JSON without quotes, and Python."""
    value = json.loads(json_value)
    if isinstance(value, str):
        return {value, json_value[1:-1], json.dumps(value)[1:-1]}
    return {json_value, str(value)}


def _count_words(text: str, *forms: str) -> int:
    """Count a word in a text, in the form that is there most often."""
    most = 0
    for form in forms:
        count = 0
        start = text.find(form)
        while start >= 0:
            end = start + len(form)
            count += _is_word(form, text[max(0, start - 2) : start], text[end : end + 2])
            start = text.find(form, end)
        most = max(most, count)
    return most


def _is_word(form: str, before: str, after: str) -> bool:
    """Return whether nothing continues a word: 12 is not in 112, 12.5 or -12."""
    if re.search(r"\w\Z", before) or re.match(r"\w", after):
        return False
    is_number = form[-1:].isdigit()
    return not is_number or not (
        before.endswith("-") or re.search(r"\d[.,]\Z", before) or re.match(r"[.,]\d", after)
    )


def _variable(name: str, setting: str) -> str:
    """Return a variable of the environment. Raise AgentR1Error if there is none."""
    value = os.environ.get(name)
    if not value:
        raise AgentR1Error(
            f"{setting} names the environment variable {name}, which is not set; export it",
            code="no_variable",
        )
    return value


# ----------------------------------------------------------------------------------------- sessions


class McpSession:
    """Keep a conversation with a server.

    The first call opens it, and a call after its end reopens it.
    """

    def __init__(
        self, name: str, place: str, variables: Sequence[str] = (), token: str | None = None
    ):
        self.name = name
        self.place = place
        self.variables = variables
        self.token = token
        self._refusal = ""
        """Why the last answer over HTTP was a refusal, in words; "" if it was none."""
        self.is_closed = False
        self._client: asyncio.Future[Client] | None = None
        self._over = asyncio.Event()
        self._answers: Any = None
        """The stream of a process's messages, which is closed at its end; None over HTTP."""
        self._stderr: IO[str] | None = None
        self._last_message = ""

    def __str__(self) -> str:
        return f"the MCP server {self.name!r} ({self.place})"

    def ask(self, what: Callable[[Client], Awaitable[T]]) -> Any:
        """Run `what` in the thread of the sessions.

        Cancelling the returned future cancels the call.
        """
        return asyncio.run_coroutine_threadsafe(self._ask(what), _thread())

    def close(self) -> None:
        """End the session for good, without waiting."""
        self.is_closed = True
        # Looked up in the other thread: `_open` may have set a new event meanwhile.
        _thread().call_soon_threadsafe(lambda: self._over.set())

    async def _ask(self, what: Callable[[Client], Awaitable[T]], again: bool = True) -> T:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, INVALID_PARAMS
        from pydantic import ValidationError

        client = await self._open()
        try:
            return await what(client)
        except ValidationError as error:
            first_error = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first_error["loc"])
            raise AgentR1Error(
                f"MCP server {self.name!r} breaks the protocol: {where}: {first_error['msg']}",
                code="bad_answer",
            ) from None
        except (ValueError, RuntimeError) as error:  # the result does not match its declaration
            raise AgentR1Error(
                f"MCP server {self.name!r} failed: {first_line(error)}", code="bad_answer"
            ) from None
        except MCPError as error:
            told = error.message
            if error.data:
                told = f"{told}: {json.dumps(error.data, ensure_ascii=False)}".removeprefix(": ")
            if error.code == INVALID_PARAMS:
                raise InvalidArgumentsError(told) from None
            # A server over HTTP was started anew. It has done nothing yet, so asking again is safe.
            server_is_new = error.message == "Session terminated"
            reason = self._refusal or told or f"error {error.code}, without a word"
            if error.code == CONNECTION_CLOSED:
                reason = self._read_last_message() or error.message
            if server_is_new or error.code == CONNECTION_CLOSED:
                self._over.set()
                self._client = None
            if server_is_new and again:
                return await self._ask(what, again=False)
            raise AgentR1Error(
                f"MCP server {self.name!r}: {reason}", code="server_failed"
            ) from None

    def _open(self) -> Awaitable[Client]:
        if self.is_closed:
            raise AgentR1Error(
                f"MCP server {self.name!r}: the session is over", code="session_lost"
            )
        if self._client is not None and self._answers:
            writers = self._answers.statistics().open_send_streams
            if not writers:  # the process has ended meanwhile
                self._over.set()
                self._client = None
        if self._client is None:
            self._answers = None
            self._stderr = None
            self._last_message = ""
            self._over = asyncio.Event()
            self._client = asyncio.get_running_loop().create_future()
            # Read once here: asyncio warns of an exception that no caller was left to read.
            self._client.add_done_callback(lambda client: client.cancelled() or client.exception())
            task = asyncio.create_task(self._live(self._client, self._over))
            OPEN[task] = self
            task.add_done_callback(OPEN.pop)
        # Shielded: a caller who gives up must not take it from the others.
        return asyncio.shield(self._client)

    async def _live(self, client_future: asyncio.Future[Client], over: asyncio.Event) -> None:
        """Open, serve and close the session in one task."""
        from mcp import Client
        from mcp.types import Implementation

        is_url = re.match("https?://", self.place)
        transport = self._http() if is_url else self._stdio()
        fault = ""
        try:
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(OPEN_S):
                    info = Implementation(name="agent-r1", version=__version__)
                    client = await stack.enter_async_context(Client(transport, client_info=info))
                # A server's pattern may take hours to match, in the thread of all sessions.
                client.session.validate_tool_result = _skip_check
                client_future.set_result(client)
                await over.wait()
        except TimeoutError:
            fault = f"it was not ready within {OPEN_S:g} s"
        except (Exception, BaseExceptionGroup, asyncio.CancelledError) as error:
            fault = self._first_cause(error)
        finally:
            if not client_future.done():
                client_future.set_exception(
                    AgentR1Error(f"{self} cannot be used: {fault}", code="server_unreachable")
                )
            if self._client is client_future:
                self._client = None

    @contextlib.asynccontextmanager
    async def _http(self) -> AsyncIterator[Any]:
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        async def bound(response: httpx2.Response) -> None:
            if response.request.method == "POST":  # a GET asks for a stream, which few servers have
                self._refusal = self._why_refused(response.status_code)
            body: Any = response.stream

            class Bounded(httpx2.AsyncByteStream):
                async def __aiter__(self) -> AsyncIterator[bytes]:
                    size = 0
                    async for piece in body:
                        size += len(piece)
                        if size > MAX_MESSAGE_BYTES:
                            raise httpx2.StreamError(
                                f"the answer has more than {MAX_MESSAGE_BYTES} bytes"
                            )
                        yield piece

                async def aclose(self) -> None:
                    await body.aclose()

            # Few compressed bytes may unfold to gigabytes.
            if response.headers.get("content-encoding", "identity") != "identity":
                raise httpx2.StreamError(
                    "the server compresses its answers, although this was not requested"
                )
            response.stream = Bounded()

        headers = {"Accept-Encoding": "identity"}
        if self.token:
            headers["Authorization"] = f"Bearer {_variable(self.token, 'env.mcp_tokens')}"
        http_client = httpx2.AsyncClient(
            headers=headers,
            timeout=httpx2.Timeout(30, read=300),
            event_hooks={"response": [bound]},
        )
        async with (
            http_client,
            streamable_http_client(self.place, http_client=http_client) as streams,
        ):
            yield streams

    def _why_refused(self, status: int) -> str:
        """Return why an answer over HTTP is a refusal, in words; "" if it is none."""
        if status < 400:
            return ""
        if status not in (401, 403):
            return f"HTTP {status}{HTTP_CAUSES.get(status, '')}"
        remedy = f"export a bearer token and name it: env.mcp_tokens.{self.name}=VARIABLE"
        if self.token:
            remedy = f"it does not accept the token in {self.token}"
        return f"HTTP {status}, the server asks for authorisation; {remedy}"

    @contextlib.asynccontextmanager
    async def _stdio(self) -> AsyncIterator[Any]:
        """Start a process, and keep its standard error for `_read_last_message`."""
        from mcp.client.stdio import StdioServerParameters, stdio_client

        command, *arguments = shlex.split(self.place)
        environment = {name: _variable(name, "env.mcp_variables") for name in self.variables}
        with tempfile.TemporaryFile("w+") as self._stderr:
            parameters = StdioServerParameters(command=command, args=arguments, env=environment)
            async with stdio_client(parameters, self._stderr) as streams:
                self._answers = streams[0]
                try:
                    yield streams
                finally:
                    self._read_last_message()

    def _read_last_message(self) -> str:
        """Return what a process that ended wrote last on standard error; nothing over HTTP."""
        if self._stderr is None or self._stderr.closed:
            return self._last_message
        file = self._stderr.fileno()
        # Not `read`, which would move the place at which the process goes on writing.
        end = os.pread(file, 2000, max(0, os.fstat(file).st_size - 2000))
        last_line = "it said nothing"
        for line in end.decode(errors="replace").split("\n"):
            if line.strip():
                last_line = line.strip()
        self._last_message = f"it ended ({last_line})"
        return self._last_message

    def _first_cause(self, error: BaseException) -> str:
        """Return the first real cause in a line."""
        from mcp.types import CONNECTION_CLOSED

        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, FileNotFoundError | PermissionError):
            return f"{error.strerror}: {error.filename}"
        if getattr(error, "code", None) == CONNECTION_CLOSED and self._last_message:
            return self._last_message
        return self._refusal or first_line(error)


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
