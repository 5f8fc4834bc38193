"""A smolagents ToolCallingAgent as its users write it, with one tool."""

import json
import os
import urllib.request

from smolagents import OpenAIServerModel, Tool, ToolCallingAgent


class Search(Tool):
    """Search the passages."""

    name = "search"
    description = "Search for passages about a query."
    inputs = {"query": {"type": "string", "description": "What to look for."}}
    output_type = "string"

    def forward(self, query: str) -> str:
        address = os.environ["AGENT_R1_TOOLS_URL"] + "/search"
        request = urllib.request.Request(address, json.dumps({"query": query}).encode())
        with urllib.request.urlopen(request, timeout=30) as reply:
            return json.load(reply)["content"]


def answer(task: dict) -> str:
    model = OpenAIServerModel(
        "agent", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
    )
    agent = ToolCallingAgent([Search()], model, max_steps=4, verbosity_level=0)
    return str(agent.run(task["question"]))
