"""A client that means harm, and knows what it did.

It edits, trims and branches, forges control tokens, and leaves before it has read an answer.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
import socket
from dataclasses import replace
from typing import Any

from agents import SEARCH, Client, StrictEnv, gateway_flow, lenient, sampler
from conftest import MicroWorld, random_model

from agent_r1.chat.format import ChatFormat
from agent_r1.core import Observation, Sampling
from agent_r1.rollout.episode import Task
from agent_r1.rollout.rollouts import run_episodes

Messages = list[dict[str, Any]]


class HostileClient:
    """One episode of random turns."""

    def __init__(self, seed: int, chat: ChatFormat):
        self.rng = random.Random(seed)
        self.forged = list(chat.control_ids)
        self.expected_cuts = 0
        self.acts: list[str] = []
        self.branches: list[Messages] = []
        self.edited: set[str] = set()
        self.calls = 0

    def text(self) -> str:
        """Make words, often with the characters of a control token."""
        words = [self.rng.choice(["what", "Vexlor", "<think>", "é", "\u0338"]) for _ in range(3)]
        if self.rng.random() < 0.7:
            words.insert(self.rng.randrange(3), self.rng.choice(self.forged))
        return self.rng.choice([" ", ""]).join(words)

    async def play(self, client: Client, task: dict[str, Any]) -> None:
        self.branches.append([{"role": "user", "content": self.text()}])
        for _ in range(self.rng.randrange(2, 7)):
            branch = self.rng.choice(self.branches)
            acts = [self.go_on] * 4 + [
                self.half_read,
                self.edit,
                self.trim,
                self.branch,
                self.habit,
            ]
            act = self.rng.choice(acts)
            self.acts.append(act.__name__)
            await act(client, branch)

    async def ask(self, client: Client, messages: Messages, stream: bool = False) -> dict | None:
        """Ask, and count the cuts that the gateway must see. None: the context is full."""
        trimmed = messages[0].get("content", "").startswith("TRIMMED")
        for message in messages:
            if message["role"] == "assistant" and (trimmed or self.is_edited(message)):
                self.expected_cuts += 1
        body = {"messages": messages, "tools": [SEARCH], "max_tokens": self.rng.choice([4, 12])}
        reply = await client.post(body)
        self.calls += reply.status_code == 200
        if reply.status_code != 200:
            assert reply.json()["error"]["code"] == "context_length_exceeded", reply.text
            return None
        return reply.json()["choices"][0]["message"]

    async def go_on(self, client: Client, branch: Messages) -> None:
        message = await self.ask(client, branch)
        if message is not None:
            branch.append(message)
            for call in message.get("tool_calls", ()):
                result = {"role": "tool", "tool_call_id": call["id"], "content": self.text()}
                branch.append(result)
            branch.append({"role": "user", "content": self.text()})

    async def habit(self, client: Client, branch: Messages) -> None:
        """Change what clients change by habit, in all messages."""
        for message in branch:
            if message["role"] == "assistant" and not self.is_edited(message):
                message.pop("reasoning_content", None)
                text = message.get("content") or ""
                if isinstance(text, str) and text:
                    message["content"] = [{"type": "text", "text": f" {text}\n"}]
                for call in message.get("tool_calls", ()):
                    arguments = json.loads(call["function"]["arguments"])
                    call["function"]["arguments"] = json.dumps(arguments, indent=1)
        await self.go_on(client, branch)

    async def edit(self, client: Client, branch: Messages) -> None:
        """Replace the last turn of the model, with forged tokens."""
        turns = [message for message in branch if message["role"] == "assistant"]
        if turns:
            # Turns after an earlier one would then stand after a text that they never followed.
            message = turns[-1]
            message["content"] = f"EDIT {len(self.edited)} {self.text()}"
            self.edited.add(message["content"])
        await self.go_on(client, branch)

    async def trim(self, client: Client, branch: Messages) -> None:
        """Change the first message, as a summary of the history would."""
        copied = copy.deepcopy(branch)
        copied[0] = {"role": "user", "content": f"TRIMMED {len(self.branches)} {self.text()}"}
        # What follows in this branch would be answers in their place: one request only.
        await self.ask(client, copied)

    async def branch(self, client: Client, branch: Messages) -> None:
        """Go on from an earlier place in another way."""
        ends = [place for place, message in enumerate(branch) if message["role"] == "user"]
        copied = copy.deepcopy(branch[: self.rng.choice(ends) + 1])
        copied[-1] = {"role": "user", "content": f"branch {len(self.branches)} {self.text()}"}
        self.branches.append(copied)
        await self.go_on(client, copied)

    async def half_read(self, client: Client, branch: Messages) -> None:
        """Begin to read a stream, reset the connection, and ask again."""
        before = self.rng.getstate()
        limit = self.rng.choice([4, 12])
        self.rng.setstate(before)  # the same request as in `ask` below
        request = {"messages": branch, "tools": [SEARCH], "max_tokens": limit}
        if self._has_cuts(branch):
            return await self.go_on(client, branch)
        body = json.dumps(request).encode()
        host, port = client.base.split("/")[2].split(":")
        path = "/" + client.base.split("/", 3)[3]
        head = f"POST {path}/chat/completions HTTP/1.1\r\ncontent-length: {len(body)}\r\n\r\n"
        loop = asyncio.get_running_loop()
        with socket.socket() as connection:
            connection.setblocking(False)
            await loop.sock_connect(connection, (host, int(port)))
            await loop.sock_sendall(connection, head.encode() + body)
            await loop.sock_recv(connection, 1)
        await asyncio.sleep(0.01)
        await self.go_on(client, branch)

    def _has_cuts(self, branch: Messages) -> bool:
        return any(self.is_edited(message) for message in branch)

    def is_edited(self, message: dict[str, Any]) -> bool:
        content = message.get("content")
        return isinstance(content, str) and content in self.edited


class WatchedChat:
    """A chat format that compares control tokens with those of harmless texts."""

    def __init__(self, chat: ChatFormat):
        self.chat = chat
        self.controls = set(chat.control_ids.values())
        self.encoded = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.chat, name)

    def prompt_ids(self, messages: Messages, tools: Any = None) -> list[int]:
        ids = self.chat.prompt_ids(messages, tools)
        self._compare(ids, self.chat.prompt_ids(self._harmless(messages), tools))
        return ids

    def reply_ids(self, action_ids: list[int], reply: Observation) -> list[int]:
        ids = self.chat.reply_ids(action_ids, reply)
        harmless = replace(reply, messages=self._harmless(reply.messages))
        self._compare(ids, self.chat.reply_ids(action_ids, harmless))
        return ids

    def _harmless(self, messages: Messages) -> Messages:
        return [{"role": message["role"], "content": "word"} for message in messages]

    def _compare(self, ids: list[int], harmless: list[int]) -> None:
        ours, theirs = ([i for i in some if i in self.controls] for some in (ids, harmless))
        assert ours == theirs, "a control token came from a client's text"
        self.encoded += 1


def play_hostile(micro: MicroWorld, chat: ChatFormat, episodes: int, seed: int) -> dict[str, Any]:
    """Play hostile episodes against a model with random weights; return figures.

    The gateway's books check every row (`books.check_rows`), and compare with the sampler's
    counter.
    """
    watched = WatchedChat(chat)
    policy = sampler(random_model(len(chat.tokenizer), seed), chat, slots=8)
    clients: list[HostileClient] = []

    async def agent(client: Client, task: dict[str, Any]) -> None:
        hostile = HostileClient(seed + len(clients), chat)
        clients.append(hostile)
        await hostile.play(client, task)

    config = lenient(micro.config.env)
    flow = gateway_flow(policy, watched, agent, lambda row: StrictEnv(micro.tools, config))
    row = micro.rows("train")[0]
    tasks = [Task(row, str(number), f"s{number}", number) for number in range(episodes)]
    asyncio.run(run_episodes(flow, tasks, Sampling(12), max_concurrent=8))
    counts, _ = flow.take_counts()
    cuts = sum(count for name, count in counts.items() if name.startswith("gateway/cuts"))
    return {
        "conversations": episodes,
        "calls": counts["gateway/calls"],
        "cuts": cuts,
        "causes": {name: n for name, n in counts.items() if name.startswith("gateway/cuts")},
        "cuts_expected": sum(client.expected_cuts for client in clients),
        "retries": counts["gateway/retries"],
        "half_read": sum(client.acts.count("half_read") for client in clients),
        "edits": sum(len(client.edited) for client in clients),
        "encoded": watched.encoded,
        "sampled": policy.stats.decode_tokens,
        "accounted": sum(
            counts[f"gateway/{name}_tokens"]
            for name in ("trained", "undelivered", "edited", "failed")
        ),
        "failures": counts["gateway/failures"],
    }
