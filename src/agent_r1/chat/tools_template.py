"""Read chat_tools.j2, the chat template for models whose own template shows no tools."""

from importlib import resources


def tools_template() -> str:
    """Return a chat template with the tools' schemas and an example of a call."""
    return resources.files("agent_r1.chat").joinpath("chat_tools.j2").read_text(encoding="utf-8")
