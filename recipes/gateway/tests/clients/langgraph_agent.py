"""A LangGraph agent: a model, a tool, and the usual two nodes. STREAM=1 makes it stream.

HISTORY=trimmed leaves the instructions out of a longer conversation; HISTORY=summarised sends one
message with the question and all that was found.
"""

import json
import os
import urllib.request

from langchain_core.messages import HumanMessage, SystemMessage, trim_messages
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def search(query: str) -> str:
    """Search for passages about a query."""
    address = os.environ["AGENT_R1_TOOLS_URL"] + "/search"
    request = urllib.request.Request(address, json.dumps({"query": query}).encode())
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.load(reply)["content"]


def shortened(messages: list) -> list:
    """Return what the model is shown of the conversation."""
    mode = os.environ.get("HISTORY")
    if mode == "trimmed":
        return trim_messages(
            [SystemMessage("Search first."), *messages],
            max_tokens=3,
            token_counter=len,
            strategy="last",
        )
    if mode == "summarised" and len(messages) > 1:
        found = " ".join(message.content for message in messages if message.type == "tool")
        return [HumanMessage(f"{messages[0].content} {found[:300]}")]
    return messages


def answer(task: dict) -> str | None:
    streams = os.environ.get("STREAM") == "1"
    model = ChatOpenAI(model="agent", streaming=streams, temperature=0.3).bind_tools([search])

    def think(state: MessagesState) -> dict:
        return {"messages": [model.invoke(shortened(state["messages"]))]}

    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_node("tools", ToolNode([search]))
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", tools_condition)
    graph.add_edge("tools", "think")
    asked = {"messages": [("user", task["question"])]}
    # The limit counts nodes: five turns of the model.
    try:
        graph.compile().invoke(asked, {"recursion_limit": 9})
    except Exception as error:
        if type(error).__name__ != "GraphRecursionError":
            raise
    return None
