"""An agent of the `openai` client that is impatient, or dies.

PATIENCE is its time-out in seconds; it asks again up to four times. DIES=kill, exit or raise ends
every third episode in that way after its first call.
"""

import json
import os
import signal
import urllib.request

import openai

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
        },
    }
]


def search(query: str) -> str:
    address = os.environ["AGENT_R1_TOOLS_URL"] + "/search"
    request = urllib.request.Request(address, json.dumps({"query": query}).encode())
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.load(reply)["content"]


def die(task: dict) -> None:
    how = os.environ.get("DIES")
    if not how or task["index"] % 3:
        return
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        os._exit(7)
    raise RuntimeError("no luck")


def turn(client: openai.OpenAI, messages: list) -> dict:
    """Ask for a turn, streaming with STREAM=1; return it as a message."""
    streams = os.environ.get("STREAM") == "1"
    reply = client.chat.completions.create(
        model="agent", messages=messages, tools=TOOLS, stream=streams
    )
    if not streams:
        return reply.choices[0].message.model_dump(exclude_none=True)
    message: dict = {"role": "assistant", "content": "", "tool_calls": []}
    for event in reply:
        for choice in event.choices:
            message["content"] += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                message["tool_calls"].append(call.model_dump(exclude={"index"}))
    if not message["tool_calls"]:
        del message["tool_calls"]
    return message


def answer(task: dict) -> None:
    patience = float(os.environ.get("PATIENCE", "60"))
    client = openai.OpenAI(timeout=patience, max_retries=4)
    messages: list = [{"role": "user", "content": task["question"]}]
    for _ in range(4):
        messages.append(turn(client, messages))
        die(task)
        calls = messages[-1].get("tool_calls")
        if not calls:
            return
        for call in calls:
            query = json.loads(call["function"]["arguments"]).get("query", "")
            result = search(query)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
