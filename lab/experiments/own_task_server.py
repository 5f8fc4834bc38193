"""Serve the price list of own_task_worlds.py over MCP; with `broken`, each call fails."""

from __future__ import annotations

import sys

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("prices")


@server.tool()
def price(name: str) -> str:
    """Look up what something costs."""
    if "broken" in sys.argv[1:]:
        # Any other exception is a crash for the SDK: it writes a traceback for .8 CPU seconds.
        raise ToolError("the price list is gone")
    total = sum(ord(letter) * (place + 1) for place, letter in enumerate(name))
    return str(11 + total % 39)


if __name__ == "__main__":
    server.run()
