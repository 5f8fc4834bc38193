"""An agent of openai-agents, with its tracing off and chat completions on. STREAM=1 streams.

HISTORY=trimmed leaves the instructions out of a longer conversation.
"""

import json
import os
import urllib.request

import agents
from agents import Agent, Runner, function_tool

agents.set_tracing_disabled(True)
agents.set_default_openai_api("chat_completions")


@function_tool
def search(query: str) -> str:
    """Search for passages about a query.

    Args:
        query: What to look for.
    """
    address = os.environ["AGENT_R1_TOOLS_URL"] + "/search"
    request = urllib.request.Request(address, json.dumps({"query": query}).encode())
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.load(reply)["content"]


def shortened(data: agents.run.CallModelData) -> agents.run.ModelInputData:
    """Return what the model is shown of the conversation."""
    items = list(data.model_data.input)
    instructions = data.model_data.instructions
    if os.environ.get("HISTORY") == "trimmed":
        instructions = "Search first." if len(items) == 1 else None
    return agents.run.ModelInputData(items, instructions)


async def answer(task: dict) -> str | None:
    agent = Agent(name="searcher", model="agent", tools=[search])
    config = agents.RunConfig(call_model_input_filter=shortened)
    try:
        if os.environ.get("STREAM") == "1":
            result = Runner.run_streamed(agent, task["question"], max_turns=5, run_config=config)
            async for _ in result.stream_events():
                pass
        else:
            await Runner.run(agent, task["question"], max_turns=5, run_config=config)
    except (agents.MaxTurnsExceeded, agents.ModelBehaviorError):
        # The second: a turn was cut off inside its thought, so it has no text. If the agent died
        # of it, training would never see what such a turn costs.
        pass
    return None
