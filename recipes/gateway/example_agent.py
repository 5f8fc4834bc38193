"""Answer questions by searching: an ordinary agent with the `openai` client.

Nothing here is about training. The client reads OPENAI_BASE_URL and OPENAI_API_KEY, as always.
"""

import json
import os
import re
import urllib.request
from typing import Any

import openai

MAX_TURNS = 5
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the corpus. Returns the passages that match the query best.",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string"}},
                "required": ["query"],
            },
        },
    }
]


def search(query: str) -> str:
    """Ask the search service for passages."""
    request = urllib.request.Request(
        os.environ["AGENT_R1_TOOLS_URL"] + "/search", json.dumps({"query": query}).encode()
    )
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.load(reply)["content"]


def answer(task: dict[str, Any]) -> str:
    """Answer one question."""
    client = openai.OpenAI()
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    for _ in range(MAX_TURNS):
        reply = client.chat.completions.create(model="agent", messages=messages, tools=TOOLS)
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            match = re.search(r"<answer>(.*?)</answer>", message.content or "", re.DOTALL)
            return match[1].strip() if match else ""
        for call in message.tool_calls:
            if call.type != "function":  # no other kind is in TOOLS
                continue
            result = search(json.loads(call.function.arguments).get("query", ""))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""
