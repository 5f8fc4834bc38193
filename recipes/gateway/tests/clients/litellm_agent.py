"""A loop with LiteLLM; STREAM=1 makes it stream."""

import json
import os
import urllib.request

import litellm

SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
    },
}


def search(query: str) -> str:
    address = os.environ["AGENT_R1_TOOLS_URL"] + "/search"
    request = urllib.request.Request(address, json.dumps({"query": query}).encode())
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.load(reply)["content"]


def answer(task: dict) -> str | None:
    messages: list = [{"role": "user", "content": task["question"]}]
    for _ in range(4):
        reply = litellm.completion(
            "openai/agent", messages=messages, tools=[SEARCH], num_retries=2,
            api_base=os.environ["OPENAI_BASE_URL"], stream=os.environ.get("STREAM") == "1",
        )  # fmt: skip
        if os.environ.get("STREAM") == "1":
            reply = litellm.stream_chunk_builder(list(reply), messages=messages)
        message = reply.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            query = json.loads(call.function.arguments).get("query", "")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": search(query)})
    return None
