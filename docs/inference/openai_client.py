"""Any OpenAI client can drive the agent. In one terminal `agent-r1 serve`; in another its `export` line, and then

python docs/inference/openai_client.py "In which city is the publisher of Sosnum based?"
"""

import asyncio
import json
import sys

from openai import OpenAI

from agent_r1.inference.agent import find_model, make_tools_of
from agent_r1 import ToolCall, call_tool

client, tools = OpenAI(), make_tools_of(find_model()[1])  # the newest run's tools; yours can be any functions
messages = [{"role": "user", "content": sys.argv[1]}]
for _ in range(5):
    schemas = [tool.schema() for tool in tools.values()]
    reply = client.chat.completions.create(model="agent", messages=messages, tools=schemas, temperature=0)
    messages.append(reply.choices[0].message)
    for call in messages[-1].tool_calls or []:
        print(call.function.name, call.function.arguments)
        asked = ToolCall(call.function.name, json.loads(call.function.arguments))
        result = asyncio.run(call_tool(tools, asked, 10.0, 4000))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result.content})
    if not reply.choices[0].message.tool_calls:
        break
print(messages[-1].content)
