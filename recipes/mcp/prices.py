"""An example: serve a price list over MCP."""

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("prices")


@server.tool()
def price(name: str) -> str:
    """Look up what something costs."""
    if " in " not in name:
        raise ToolError("name the thing and its city, such as red lamp in Oslo")
    return str(10 + sum(map(ord, name)) % 90)


if __name__ == "__main__":
    server.run()
