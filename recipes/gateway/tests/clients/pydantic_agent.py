"""A pydantic-ai agent with a tool; with TYPED=1 its answer is a model's fields."""

import json
import os
import urllib.request

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel


class Town(BaseModel):
    """The answer."""

    name: str


def search(query: str) -> str:
    """Search for passages about a query."""
    address = os.environ["AGENT_R1_TOOLS_URL"] + "/search"
    request = urllib.request.Request(address, json.dumps({"query": query}).encode())
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.load(reply)["content"]


def answer(task: dict) -> str:
    typed = os.environ.get("TYPED") == "1"
    agent = Agent(
        OpenAIChatModel("agent"), output_type=Town if typed else str, tools=[search], retries=2
    )
    output = agent.run_sync(task["question"]).output
    return output.name if typed else output
