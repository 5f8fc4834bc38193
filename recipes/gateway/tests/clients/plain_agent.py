"""Answer questions by searching, with Python's own HTTP client: no package is needed."""

import json
import os
import re
import urllib.request

PARAMETERS = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
SEARCH = {"name": "search", "description": "Search the corpus.", "parameters": PARAMETERS}


def post(url, body, headers=()):
    request = urllib.request.Request(url, json.dumps(body).encode(), dict(headers))
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.load(reply)


def answer(task):
    messages = [{"role": "user", "content": task["question"]}]
    key = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    tools = [{"type": "function", "function": SEARCH}]
    for _ in range(5):
        body = {"model": "agent", "messages": messages, "tools": tools}
        reply = post(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, key)
        message = reply["choices"][0]["message"]
        messages.append({name: value for name, value in message.items() if value is not None})
        if not message.get("tool_calls"):
            found = re.search(r"<answer>(.*?)</answer>", message.get("content") or "", re.DOTALL)
            return found[1].strip() if found else ""
        for call in message["tool_calls"]:
            query = json.loads(call["function"]["arguments"]).get("query", "")
            result = post(f"{os.environ['AGENT_R1_TOOLS_URL']}/search", {"query": query})
            told = {"role": "tool", "tool_call_id": call["id"], "content": result["content"]}
            messages.append(told)
    return ""
