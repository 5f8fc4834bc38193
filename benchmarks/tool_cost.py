"""Measure the overhead of a tool call: function, batch, sandboxed program, MCP server, SDK.

    PYTHONPATH=src .venv/bin/python benchmarks/tool_cost.py [--calls 2000] [--at-once 64]

In: nothing. Out: a table of milliseconds per call for sequential and concurrent calls: wall time,
and processor time of this process without an MCP server's. "Asked directly" is the SDK alone, in
the thread of its session: the difference is our overhead.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from agent_r1.tool import ToolCall, call_tool, make_tools, tool
from agent_r1.tool.batch import BatchTool
from agent_r1_recipes.mcp.settings import McpSettings

SERVER = """
from mcp.server.mcpserver import MCPServer
server = MCPServer("echo")

@server.tool()
async def remote(text: str) -> str:
    \"\"\"Say it again.\"\"\"
    return text

server.run()
"""


@tool
def in_a_thread(text: str) -> str:
    """Say it again.

    Args:
        text: What.
    """
    return text


@tool
async def in_the_loop(text: str) -> str:
    """Say it again.

    Args:
        text: What.
    """
    return text


class InABatch(BatchTool):
    name = "in_a_batch"
    description = "Say it again."
    parameters = in_a_thread.parameters

    def execute_batch(self, many_args):
        return [args["text"] for args in many_args]


async def spent(
    one: Callable[[], Awaitable], calls: int, max_concurrent: int
) -> tuple[float, float]:
    """Return milliseconds per call, of wall and processor time, for calls in rounds of
    `max_concurrent`."""
    await one()  # the first call opens connections
    wall, cpu, rounds = time.perf_counter(), time.process_time(), calls // max_concurrent
    for _ in range(rounds):
        await asyncio.gather(*(one() for _ in range(max_concurrent)))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return 1000 * wall / (rounds * max_concurrent), 1000 * cpu / (rounds * max_concurrent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--at-once", type=int, default=64)
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "server.py"
        script.write_text(SERVER)
        tools = make_tools(
            ["echo"], env=McpSettings(mcp={"echo": shlex.join([sys.executable, str(script)])})
        )
        tools |= {each.name: each for each in (in_the_loop, in_a_thread, InABatch())}

        def through(name: str) -> Callable[[], Awaitable]:
            return lambda: call_tool(tools, ToolCall(name, {"text": "hello"}), 60, 1000)

        async def directly(client, max_concurrent: int) -> tuple[float, float]:
            return await spent(
                lambda: client.call_tool("remote", {"text": "hello"}), a.calls, max_concurrent
            )

        print(
            f"| ms a call | one by one | cpu | {a.max_concurrent} at once | cpu |\n| --- | --- | "
            "--- | "
            "--- | --- |"
        )
        for name in ("in_the_loop", "in_a_thread", "in_a_batch", "remote"):
            show(
                name,
                *(asyncio.run(spent(through(name), a.calls, n)) for n in (1, a.max_concurrent)),
            )
        program = ToolCall("python", {"code": "print(6 * 7)"})
        sandboxed = make_tools(["python"])
        few = max(a.max_concurrent, a.calls // 10)

        async def run() -> None:
            assert (await call_tool(sandboxed, program, 60, 1000)).content == "42"

        show(
            "python, in its sandbox",
            *(asyncio.run(spent(run, few, n)) for n in (1, a.max_concurrent)),
        )
        session = tools["remote"].session
        show(
            "asked directly",
            *(session.ask(lambda c, n=n: directly(c, n)).result() for n in (1, a.max_concurrent)),
        )


def show(name: str, alone: tuple[float, float], together: tuple[float, float]) -> None:
    print(
        f"| {name} | " + " | ".join(f"{number:.2f}" for number in (*alone, *together)) + " |",
        flush=True,
    )


if __name__ == "__main__":
    main()
