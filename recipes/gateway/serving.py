"""Serve a trained model to its agent: `agent-r1 serve --backend local`.

In: an opened model. Out: chat completions and the run's tools on 127.0.0.1, until Ctrl-C. The
requests are read, encoded and matched by the code of training (`wire.py`, `matching.py`), so the
model reads the same ids.

What differs from training: the client's `temperature` and `seed` are honoured, a full server keeps
only the newest conversations, and nothing is counted for rows.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import secrets
import signal
from collections import OrderedDict
from pathlib import Path
from typing import Any

from agent_r1 import AgentR1Error, ConfigError, Generation, Hermes, Sampling, Task, make_env, say
from agent_r1_recipes.gateway.episode import GatewayEpisode
from agent_r1_recipes.gateway.matching import Answer
from agent_r1_recipes.gateway.server import Reply, Request, serving
from agent_r1_recipes.gateway.wire import Refusal, read_call

MOST_CONVERSATIONS = 1000
"""Kept beginnings of conversations. The oldest is forgotten: its turns become data."""
MOST_ANSWERS = 500
"""Of one beginning, such as a question that is asked again and again."""


class ServedConversations(GatewayEpisode):
    """All conversations that begin with the same messages and tools."""

    def __init__(self, server: Server, sampling: Sampling, seed: int | None):
        row = {"agent_name": server.config.env.name, "env_kwargs": {}}
        super().__init__(
            Task(row, "", "served", seed),
            sampling,
            server.agent.policy,
            server.agent.chat,
            server.dialect,
            server.config.rollout.max_context,
            None,
        )
        self.conversations.newest_wins = True

    async def _generate(self, answer: Answer, turn: Sampling) -> Generation:
        # Without a session: a client never says that its conversation is over.
        generation = await self.policy.generate(answer.prompt_ids, turn, None)
        self.generations.clear()  # kept for the books of training
        return generation


class Server:
    """The handler of all requests."""

    def __init__(self, agent: Any, key: str):
        """Take an opened agent (policy, chat, tools, config). Raise ConfigError for a dialect
        that the gateway cannot read."""
        self.agent = agent
        self.config = agent.config
        self.key = key
        self.env = make_env({"agent_name": self.config.env.name}, agent.tools, self.config.env)
        self.dialect = getattr(self.env, "dialect", None)
        if not isinstance(self.dialect, Hermes):
            raise ConfigError(
                "--backend local serves environments in the Hermes dialect, such as "
                "env.name=hermes; use --backend vllm",
                code="agent_needs_hermes",
            )
        self.kept: OrderedDict[str, ServedConversations] = OrderedDict()

    def _path(self, request: Request) -> str:
        """Return a request's path after its key. Raise Refusal for a wrong key."""
        words = request.words
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        if words[0] == "key" and len(words) > 1:  # for clients that send no header
            key = words[1]
            words = words[2:]
        if not hmac.compare_digest(key.encode(), self.key.encode()):
            raise Refusal("wrong key", 401, "invalid_api_key")
        return "/".join(words[1:] if words[:1] == ["v1"] else words)

    def admit(self, request: Request) -> Reply | None:
        """Refuse a request without the key before its body is read."""
        try:
            self._path(request)
        except Refusal as refusal:
            return Reply.of(refusal.body(), refusal.status)
        return None

    async def handle(self, request: Request) -> Reply:
        """Answer one request."""
        try:
            return await self._answer(request, self._path(request))
        except Refusal as refusal:
            return Reply.of(refusal.body(), refusal.status)
        except asyncio.CancelledError:
            raise
        except RecursionError:
            return Reply.of(Refusal("the body is nested too deeply").body(), 400)
        except Exception as error:  # of the sampler; the client gets an answer all the same
            return Reply.of(Refusal(f"{type(error).__name__}: {error}", 500).body(), 500)

    async def _answer(self, request: Request, path: str) -> Reply:
        if request.method == "GET" and path == "models":
            return Reply.of({"object": "list", "data": [{"id": "agent", "object": "model"}]})
        if request.method != "POST":
            raise Refusal("use POST", 405)
        if path == "chat/completions":
            return await self._conversations(request).complete(request)
        if path.startswith("tools/"):
            conversations = ServedConversations(self, Sampling(1), None)
            conversations.env = self.env
            return await conversations.run_tool(path.removeprefix("tools/"), request.body)
        raise Refusal(f"there is no {path[:60]!r}: this server speaks chat completions", 404)

    def _conversations(self, request: Request) -> ServedConversations:
        """Return the conversations that begin as this one, sampled as this request says."""
        call = read_call(request.body)
        begin: list[Any] = []
        for message in call.messages:
            if message["role"] == "assistant":
                break
            begin.append(message)
        rollout = self.config.rollout
        values = json.loads(request.body)
        temperature = number_of(values, "temperature", rollout.temperature)
        seed = values.get("seed")
        if type(seed) is not int or abs(seed) >= 2**63:
            seed = None
        sampling = Sampling(rollout.max_tokens_per_turn, temperature)
        made_of = json.dumps([begin, call.tools, temperature, seed], sort_keys=True)
        name = hashlib.blake2b(made_of.encode(), digest_size=16).hexdigest()
        conversations = self.kept.get(name)
        if conversations is None or len(conversations.conversations.answers) > MOST_ANSWERS:
            conversations = ServedConversations(self, sampling, seed)
            self.kept[name] = conversations
        self.kept.move_to_end(name)
        while len(self.kept) > MOST_CONVERSATIONS:
            self.kept.popitem(last=False)
        return conversations


def number_of(values: dict[str, Any], name: str, default: float) -> float:
    """Return a number of a request. Raise Refusal if it is none from 0 to 100."""
    value = values.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 100:
        raise Refusal(f"{name} must be a number from 0 to 100")
    return float(value)


def serve(agent: Any, port: int | None) -> None:
    """Serve until Ctrl-C. The key is in a file that only its owner can read."""
    key = secrets.token_urlsafe(24)
    server = Server(agent, key)
    folder = Path(os.environ.get("AGENT_R1_HOME") or ".") / "runs"
    folder.mkdir(parents=True, exist_ok=True)

    async def forever() -> None:
        over = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the key is deleted, too
            asyncio.get_running_loop().add_signal_handler(number, over.set)
        async with serving(server.handle, port or 0, server.admit) as number:
            file = folder / f"serve-{number}.key"
            file.unlink(missing_ok=True)
            file.touch(mode=0o600)
            file.write_text(key)
            say(f"serving {agent.model}; stop with Ctrl-C\n")
            base = f"http://127.0.0.1:{number}"
            name = file.resolve()
            words = [f"OPENAI_BASE_URL={base}/v1", f'OPENAI_API_KEY="$(cat {name})"']
            words.append(f'AGENT_R1_TOOLS_URL="{base}/key/$(cat {name})/tools"')
            say("export " + " ".join(words))
            try:
                await over.wait()
            finally:
                file.unlink(missing_ok=True)

    try:
        asyncio.run(forever())
    except OSError as error:
        raise AgentR1Error(
            f"port {port} cannot be used ({error.strerror}); choose another --port",
            code="port_taken",
        ) from None
