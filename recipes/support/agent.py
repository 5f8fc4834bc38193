"""Answer a customer's complaint: an ordinary agent with the `openai` client.

Nothing here is about training. The client reads OPENAI_BASE_URL and OPENAI_API_KEY, as always.
"""

import json
import os
import re
import urllib.request
from typing import Any
from urllib.parse import quote

import openai

MAX_TURNS = 5
POLICY = """\
You work for a shop. Look up the order, act, then answer.
Broken: refund if delivered this week, replace if delivered last year.
Not liked: refund if delivered this week, else nothing.
Never came: replace if lost, else nothing.
Refund the price. Answer: refunded the ITEM, replaced the ITEM, or sorry for the ITEM."""


def tool(name: str, description: str, **parameters: str) -> Any:
    """Describe a tool whose arguments are whole numbers."""
    properties = {key: {"type": "integer", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


TOOLS = [
    tool("look_up", "Look up an order.", order="Its number."),
    tool("refund", "Pay an order back.", order="Its number.", amount="Dollars to pay back."),
    tool("replace", "Send the item of an order again.", order="Its number."),
]


def run(name: str, arguments: str) -> str:
    """Run a tool of the shop."""
    # The model may name a tool that does not exist, in any letters.
    address = f"{os.environ['AGENT_R1_TOOLS_URL']}/{quote(name, safe='')}"
    request = urllib.request.Request(address, arguments.encode())
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.load(reply)["content"]


def answer(task: dict[str, Any]) -> str:
    """Answer one customer."""
    client = openai.OpenAI()
    messages: list[Any] = [
        {"role": "system", "content": POLICY},
        {"role": "user", "content": task["question"]},
    ]
    for _ in range(MAX_TURNS):
        reply = client.chat.completions.create(model="agent", messages=messages, tools=TOOLS)
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            match = re.search(r"<answer>(.*?)</answer>", message.content or "", re.DOTALL)
            return match[1].strip() if match else ""
        for call in message.tool_calls:
            if call.type == "function":
                result = run(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""
