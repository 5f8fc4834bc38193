"""Bound data from outside: files, answers over HTTP, JSON and YAML.

In: a file, a request, or a text. Out: an answer or a value within its bounds, or a one-line error.
Every file that may come from others is opened by `open_file`. `fetch` queries judges, retrievers,
SandboxFusion and OpenEnv servers.

httpx limits the time of a single read, so a server that sends a byte per second never exceeds it.
Therefore requests run in an event loop, where one deadline covers the connection, the header and
the body.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import json
import os
import re
import stat
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import yaml

from agent_r1.ground.errors import first_line

if TYPE_CHECKING:
    import httpx

MAX_JSON_DEPTH = 64
"""Nesting of lists and objects in JSON; a schema of a tool has about ten levels."""

MAX_ALIASES = 20
"""Of a YAML text."""
MAX_FILE = 64 << 20
"""Bytes of a file that is read at once."""


def is_local_host(host: str) -> bool:
    """Return whether a Host header is an IP address, `localhost` or missing, with any port.

    A web page whose own name was pointed at 127.0.0.1 sends its name (DNS rebinding).
    """
    name = re.sub(r":\d*$", "", host.strip())
    if name.lower() in ("", "localhost"):
        return True
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


class TooLongError(ValueError):
    """Report a body with more bytes than its reader accepts."""


# -------------------------------------------------------------------------------------------- files


def open_file(path: Path, most_bytes: int | None = MAX_FILE) -> BinaryIO:
    """Open a regular file of at most so many bytes, which may come from others.

    A named pipe would block for ever, and a device has no end. The type is looked up after opening,
    so that nothing can be swapped in between. Raises OSError and ValueError.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path.name} is not a regular file")
        if most_bytes is not None and status.st_size > most_bytes:
            raise TooLongError(f"{path.name} has more than {most_bytes} bytes")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_file(path: Path, most_bytes: int = MAX_FILE) -> bytes:
    """Read a file as `open_file` opens it. Raises OSError and ValueError."""
    with open_file(path, most_bytes) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:  # it grew meanwhile, or tells no size, as files of /proc
        raise TooLongError(f"{path.name} has more than {most_bytes} bytes")
    return data


# ------------------------------------------------------------------------------------ JSON and YAML


def parse_json(text: str | bytes, unique: bool = False) -> Any:
    """Read JSON whose nesting is bounded. `unique`: also refuse repeated keys. Raises ValueError.

    Of a key that is there twice, Python keeps the last value and says nothing.
    """
    try:
        value = json.loads(text, object_pairs_hook=unique_keys if unique else None)
    except RecursionError:
        raise ValueError(f"JSON nested deeper than {MAX_JSON_DEPTH} levels") from None
    check_depth(value)
    return value


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of a JSON parser's pairs. Raise ValueError for a key that is there twice."""
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {max(keys, key=keys.count)!r} is there twice")
    return value


def check_depth(value: Any) -> None:
    """Raise ValueError for lists and objects that are nested deeper than `MAX_JSON_DEPTH`."""
    level = [value]
    for _ in range(MAX_JSON_DEPTH + 1):
        level = [inner for inner in level if isinstance(inner, dict | list)]
        if not level:
            return
        next_level: list[Any] = []
        for outer in level:
            next_level.extend(outer.values() if isinstance(outer, dict) else outer)
        level = next_level
    raise ValueError(f"JSON nested deeper than {MAX_JSON_DEPTH} levels")


def parse_yaml(text: str) -> Any:
    """Read plain YAML whose nesting and repetition are bounded.

    Raises ValueError and yaml.YAMLError.
    """
    # The C loader, if built, is ten times as fast, and each setting on a command line is parsed by
    # itself. Many brackets can crash its stack, which a short text cannot do. Nine lines of aliases
    # of aliases are a billion values.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    if len(text) <= 1000 and "*" not in text:
        return yaml.load(text, loader)
    depth = 0
    aliases = 0
    for event in yaml.parse(text, Loader=loader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        aliases += isinstance(event, yaml.AliasEvent)
        if depth > MAX_JSON_DEPTH or aliases > MAX_ALIASES:
            raise ValueError(
                f"YAML with more than {MAX_JSON_DEPTH} levels or {MAX_ALIASES} aliases"
            )
    return yaml.load(text, loader)


def read_json(path: Path) -> Any:
    """Read a small file, such as a model's config.json. Raises ValueError and OSError."""
    return parse_json(read_file(path))


def read_yaml(path: Path) -> Any:
    """Read a small file of plain YAML. Raises ValueError, yaml.YAMLError and OSError."""
    return parse_yaml(read_file(path).decode())


# --------------------------------------------------------------------------------------------- HTTP


@dataclass(frozen=True)
class Response:
    """Hold a complete response."""

    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    """Names in lower case."""

    def json(self) -> Any:
        """Parse the body with `parse_json`."""
        return parse_json(self.body)


def fetch(method: str, url: str, **request: Any) -> Response:
    """Make a request as `send` does, and wait for its answer."""
    return send(method, url, **request).result()


def send(
    method: str,
    url: str,
    *,
    within_s: float,
    max_bytes: int,
    body: Any = None,
    headers: dict[str, str] | None = None,
    retries: int = 0,
) -> Future[Response]:
    """Make one request in the thread of all requests; the future gets the whole answer.

    A connection that fails is tried `retries` times more. Raises TimeoutError after `within_s`
    seconds in all, TooLongError beyond `max_bytes`, ValueError for a compressed body or an
    impossible address, and what httpx raises.
    """
    request = _request(method, url, within_s, max_bytes, body, headers or {}, retries)
    return asyncio.run_coroutine_threadsafe(request, _loop())


async def _request(
    method: str,
    url: str,
    within_s: float,
    max_bytes: int,
    body: Any,
    headers: dict[str, str],
    retries: int,
) -> Response:
    whole_body = bytearray()
    headers = {"Accept-Encoding": "identity", **headers}
    try:
        async with (
            asyncio.timeout(within_s) as deadline,
            _client(retries).stream(method, url, json=body, headers=headers) as response,
        ):
            # Few bytes may unfold to gigabytes.
            if response.headers.get("content-encoding", "identity") != "identity":
                raise ValueError(
                    "the server compresses its answers, although this was not requested"
                )
            async for piece in response.aiter_raw():
                whole_body += piece
                if len(whole_body) > max_bytes:
                    raise TooLongError(f"the answer has more than {max_bytes} bytes")
            # httpx joins repeated headers, and its names are in lower case.
            return Response(response.status_code, bytes(whole_body), dict(response.headers))
    except TimeoutError:
        if not deadline.expired():
            raise
        raise TimeoutError(f"no whole answer within {within_s:g} s") from None
    except ExceptionGroup as failures:  # an address that no socket takes, such as port 99999999
        raise ValueError(first_line(failures.exceptions[0])) from None


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """Start the event loop of all requests, in a daemon thread."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="requests", daemon=True).start()
    return loop


@functools.cache
def _client(retries: int) -> httpx.AsyncClient:
    import httpx

    # No bound on connections: a server that answers none of them must not block the others.
    # `trust_env`: no proxy belongs between a run and its servers.
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(
        transport=httpx.AsyncHTTPTransport(retries=retries, limits=limits, trust_env=False),
        timeout=httpx.Timeout(None, connect=5.0),
        trust_env=False,
    )
