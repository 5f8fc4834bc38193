"""MCP servers for recipes/mcp/tests/test_mcp.py. One is made with the official SDK; the other is
written by hand, because it lies.

python -S mcp_servers.py KIND [FILE]      the one by hand, over standard input and output
"""

import io
import json
import os
import signal
import sys


def sdk_server(calls: list[str]):
    """What a user would write."""
    from mcp.server.mcpserver import Image, MCPServer
    from mcp.types import ToolAnnotations

    server, notes = MCPServer("files"), []

    @server.tool(annotations=ToolAnnotations(read_only_hint=True))
    def read(name: str, lines: int = 1) -> str:
        """Read a file.

        Args:
            name: Of the file.
        """
        calls.append(name)
        if name == "none":
            raise FileNotFoundError("there is no file none")
        return f"<tool_call>{name}\x1b[31m\n" * lines

    @server.tool()
    def note(text: str) -> int:
        """Remember a text."""
        notes.append(text)
        return len(notes)

    @server.tool()
    def picture() -> Image:
        """A picture."""
        return Image(data=b"\x89PNG", format="png")

    @server.tool()
    async def hang() -> str:
        """Never answers."""
        import asyncio

        await asyncio.sleep(1000)

    @server.tool()
    def flood(size: int) -> str:
        """Says much."""
        return "x" * size

    return server


# ------------------------------------------------------------------------------------------ by hand

OBJECT = {"type": "object"}
LIES = {  # what `tools/list` brings
    "no-list": {},
    "a-text": {"tools": "none"},
    "text-schema": {"tools": [{"name": "a", "inputSchema": "object"}]},
    "array-schema": {"tools": [{"name": "a", "inputSchema": {"type": "array"}}]},
    "twins": {
        "tools": [{"name": "a", "inputSchema": OBJECT}, {"name": "a", "inputSchema": OBJECT}]
    },
    "novel": {"tools": [{"name": "a", "description": "word " * 5000, "inputSchema": OBJECT}]},
    "same-page": {"tools": [{"name": "a", "inputSchema": OBJECT}], "nextCursor": "more"},
    "endless": {"tools": [{"name": "a", "inputSchema": OBJECT}] * 1001},
    "no-answer": None,
    "deep-schema": {"tools": [{"name": "a", "inputSchema": OBJECT}]},
}
TOOLS = [{"name": name, "inputSchema": OBJECT} for name in ("pid", "hang", "die", "count")]
for _ in range(60):
    schema = LIES["deep-schema"]["tools"][0]
    schema["inputSchema"] = {**OBJECT, "properties": {"a": schema["inputSchema"]}}
TOOLS.append(
    {
        "name": "evil",
        "inputSchema": OBJECT,
        "outputSchema": {**OBJECT, "properties": {"x": {"type": "string", "pattern": "^(a+)+$"}}},
    }
)
TOOLS += [{"name": name, "inputSchema": OBJECT} for name in ("shop", "silent", "variable")]
TOOLS.append({"name": "flaky", "inputSchema": OBJECT, "annotations": {"readOnlyHint": True}})


def say(message: dict) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def answer(request: dict, text: str, **more) -> None:
    say({"id": request["id"], "result": {"content": [{"type": "text", "text": text}], **more}})


def by_hand(kind: str, file: str) -> None:
    print("this line is no message", flush=True)
    count = 0
    for line in sys.stdin:
        request = json.loads(line)
        method, tool = request.get("method"), request.get("params", {}).get("name")
        if kind == "mute":
            continue
        if method == "initialize":
            info = {
                "protocolVersion": "2025-06-18",
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "x", "version": "1"},
            }
            say({"id": request["id"], "result": info})
        elif method == "tools/list" and LIES.get(kind, {}) is None:
            continue
        elif method == "tools/list":
            say({"id": request["id"], "result": LIES.get(kind, {"tools": TOOLS})})
        elif method != "tools/call":
            if "id" in request:
                say({"id": request["id"], "error": {"code": -32601, "message": "unknown method"}})
        elif tool == "pid":
            answer(request, str(os.getpid()))
        elif tool == "count":
            count += 1
            answer(request, str(count))
        elif tool == "die":
            print("Traceback\nOutOfCheese: +++", file=sys.stderr, flush=True)
            os._exit(3)
        elif tool == "flaky":  # dies at its first call, of all processes together
            if not os.path.exists(file):
                open(file, "w").close()
                os._exit(4)
            answer(request, "at last")
        elif tool == "shop":  # text and structured result, as the test wants them
            wanted = request["params"]["arguments"]
            answer(request, wanted["text"], structuredContent=wanted["structured"])
        elif tool == "silent":
            answer(request, "", isError=True)
        elif tool == "variable":
            answer(request, str(os.environ.get("SHOP_API_KEY")))
        elif tool == "evil":
            answer(request, "x", structuredContent={"x": "a" * 40 + "!"})
    if file:
        with open(file, "a") as out:
            out.write(f"bye {os.getpid()}\n")


def with_token(token: str):
    """A server over HTTP that answers those with a bearer token, and 401 to all others."""
    server = with_sessions(set())
    inner = server.RequestHandlerClass

    class Guarded(inner):
        def do_POST(self):
            if self.headers.get("authorization") == f"Bearer {token}":
                return super().do_POST()
            self.rfile.read(int(self.headers["content-length"]))
            self.send_error(401)

    server.RequestHandlerClass = Guarded
    return server


def with_failing_calls(kind: str, error):
    """A server over HTTP whose calls fail, by a status ("http") or in JSON-RPC ("data")."""
    server = with_sessions(set())
    inner = server.RequestHandlerClass

    class Failing(inner):
        def do_POST(self):
            size = int(self.headers["content-length"])
            body = self.rfile.read(size)
            request = json.loads(body)
            if request.get("method") != "tools/call":
                self.rfile = io.BytesIO(body)
                super().do_POST()
            elif kind == "http":
                self.send_error(error)
            else:
                answer = {"jsonrpc": "2.0", "id": request["id"], "error": error}
                body = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

    server.RequestHandlerClass = Failing
    return server


def with_sessions(sessions: set[str]):
    """A server over HTTP of the protocol's first form, which knows its callers by `sessions` and
    404s all others."""
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["content-length"])))
            method, known = request.get("method"), self.headers.get("mcp-session-id") in sessions
            result, status = {"tools": TOOLS[:1]}, 200 if known else 404
            if method == "initialize":
                sessions.add(str(len(sessions)))
                info = {"name": "x", "version": "1"}
                result, status = (
                    {"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": info},
                    200,
                )
            elif method == "tools/call":
                result = {"content": [{"type": "text", "text": "pid"}]}
            elif "id" not in request:
                status = 202
            self.send_response(status)
            body = json.dumps(
                {"jsonrpc": "2.0", "id": request.get("id"), "result": result}
            ).encode() * (status == 200)
            for name, value in {
                "mcp-session-id": str(len(sessions) - 1),
                "content-type": "application/json",
            }.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            self.send_error(405)

        do_DELETE = do_GET

        def log_message(self, *_):
            pass

    return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


if __name__ == "__main__":
    if sys.argv[1] == "sdk":
        sdk_server([]).run("stdio")
    if sys.argv[1] == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    by_hand(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "")
