"""A conversation with an agent: the training episode loop, asked one question after another.

In: an `Agent` (agent.py) and a person's questions. Out: `Exchange`s, and word of what happens to a `Listener` while it
happens. Next: `render.py` shows them, `chat.py` reads the next question.

A question is one episode, under the turn, token and tool budgets of training. A follow-up is an episode whose first
observation continues the ids of the last one: nothing that was sampled is ever encoded again, also not after `save`
and `load`, which keep ids. So a conversation is what the model would have seen, had it been trained on such.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agent_r1.data.prompts import messages
from agent_r1.errors import AgentR1Error, ConfigError
from agent_r1.files import write_whole
from agent_r1.inference.agent import Agent, made_from_nothing
from agent_r1.rollout.episode import AgentEnvLoop, Task, derive_seed, make_loop
from agent_r1.tool import BaseTool, tool
from agent_r1.types import Action, Observation, Row, Sampling, Step, StepResult, StopReason, Trajectory


class Listener:
    """What a conversation tells while it goes on. This one shows nothing; `render.Screen` does."""

    def stream(self, text: str) -> None:
        """The turn so far, each time that tokens came."""

    def turn(self, text: str, closed: bool) -> None:
        """A whole turn. If it calls tools, they run now. `closed` is False when the token limit cut it off."""

    def results(self, calls: list[dict[str, Any]]) -> None:
        """What the tools of that turn answered: name, arguments, ok, error, seconds, content."""

    def note(self, text: str) -> None:
        """Something that the person should know."""


@dataclass
class Exchange:
    """One question and the episode that it set off."""

    question: str
    trajectory: Trajectory
    seconds: float
    known: bool
    """Whether the right answer is known, so that the reward means something."""
    start: int
    """Tokens of the conversation before this question: what the episode began with, and did not bring itself. 0: it
    began anew."""


def same_context(exchanges: list[Exchange]) -> list[Exchange]:
    """The exchanges that the model still sees: those since it last began anew."""
    begun = [number for number, exchange in enumerate(exchanges) if exchange.start == 0]
    return exchanges[begun[-1] :] if begun else exchanges


class Conversation:
    """Asks the agent and remembers. `known` are questions with answers; they get their own row, and so a reward."""

    def __init__(self, agent: Agent, known: list[Row], seed: int = 0, listener: Listener | None = None):
        self.agent, self.listener = agent, listener or Listener()
        self.exchanges: list[Exchange] = []
        self.temperature = agent.config.rollout.temperature
        self.memory = not made_from_nothing(agent.chat, agent.config)
        """Whether a question goes on with the conversation, or begins a new one."""
        self._known = {row["prompt"][-1]["content"]: row for row in known}
        # What stands before the question in training (a system message, if the task has one) stands there here too.
        as_trained = known[0]["prompt"] if known else messages(agent.config.data.name, "")
        self._lead = as_trained[:-1] if agent.lead is None else agent.lead
        self._seed, self._asked, self._session = seed, 0, ""
        self._turn_ids: list[int] = []
        c = agent.config
        self._loop: _ChatLoop = make_loop(agent.policy, agent.chat, agent.tools, c.rollout, c.env, flow=_ChatLoop)
        self._loop.conversation = self
        agent.policy.on_token = self._on_token

    async def ask(self, question: str, again: bool = False) -> Exchange:
        """One question, or the last one `again` in place of its answer. Raises what the policy raised, and AgentR1Error
        for a question that no context could hold; then the conversation is as it was."""
        self._refuse_too_long(question)
        before = self.exchanges[:-1] if again else self.exchanges
        past = same_context(before) if self.memory else []
        exchange = await self._episode(question, past)
        if past and exchange.trajectory.stop_reason is StopReason.CONTEXT_OVERFLOW:
            size = self.agent.config.rollout.max_context
            self.listener.note(
                f"the conversation no longer fits into the model's {size} tokens; a new one begins with this question"
            )
            exchange = await self._episode(question, [])
        self.exchanges = [*before, exchange] if exchange.trajectory.steps else before
        return exchange

    async def _episode(self, question: str, past: list[Exchange]) -> Exchange:
        self._asked += 1
        self._session, self._turn_ids = f"chat-{self._asked}", []
        history = [step for exchange in past for step in exchange.trajectory.steps]
        seed = derive_seed(self._seed, "chat", self._asked)
        r, begun = self.agent.config.rollout, time.perf_counter()
        sampling = Sampling(max_tokens=r.max_tokens_per_turn, temperature=self.temperature, top_p=r.top_p)
        row = self._row(question, follow_up=bool(past))
        self._loop.history = history
        trajectory = await self._loop.run(Task(row, "chat", self._session, seed), sampling)
        start = len(history[-1].observation_ids + history[-1].action_ids) if history else 0
        return Exchange(question, trajectory, time.perf_counter() - begun, question in self._known, start)

    def _row(self, question: str, follow_up: bool) -> Row:
        """The row of a question; one that nobody knows the answer to has no ground truth."""
        unknown = {
            "data_source": "chat",
            "ability": "chat",
            "reward_model": {"style": "rule", "ground_truth": []},
            "extra_info": {"index": 0, "split": "chat"},
            "agent_name": self.agent.config.env.name,
        }
        row = self._known.get(question, unknown)
        prompt = ([] if follow_up else self._lead) + [{"role": "user", "content": question}]
        return row | {"prompt": prompt, "env_kwargs": (row.get("env_kwargs") or {}) | {"tools": list(self.agent.tools)}}

    def _refuse_too_long(self, question: str) -> None:
        """Before a running conversation is given up for a question that would not fit into a new one either."""
        schemas = [t.schema() for t in self.agent.tools.values()]
        n = len(self.agent.chat.prompt_ids(self._row(question, follow_up=False)["prompt"], schemas))
        if n >= self.agent.config.rollout.max_context:
            raise AgentR1Error(
                f"the question alone takes {n} tokens and the model's context holds {self.agent.config.rollout.max_context}; "
                "ask something shorter"
            )

    def _on_token(self, session: str | None, ids: list[int]) -> None:
        if session == self._session:
            self._turn_ids += ids
            # A character may take several tokens; until the last of them is there, it decodes to U+FFFD.
            self.listener.stream(self.agent.chat.turn_text(self._turn_ids).rstrip("\ufffd"))

    # ----------------------------------------------------------------------------------------------- save and load

    def save(self, path: Path) -> None:
        """Write the conversation with its ids. Replaces a saved conversation, and no other file."""
        if path.exists() and not path.read_bytes()[: len(_MARK)] == _MARK:
            raise AgentR1Error(f"{path} exists and is no conversation; choose another name")
        record = {
            "agent_r1_conversation": 1,
            "model": str(self.agent.model),
            "tokenizer": tokenizer_hash(self.agent),
            "exchanges": [_exchange_record(exchange) for exchange in self.exchanges],
        }
        write_whole(path, json.dumps(record, indent=1) + "\n")

    def load(self, path: Path) -> None:
        """Restore a saved conversation with its ids. Raises AgentR1Error, and changes nothing, if it is not a sound one
        or if another tokenizer made its ids."""
        from jsonschema import Draft202012Validator
        from jsonschema.exceptions import best_match

        if not path.is_file():
            raise AgentR1Error(f"{path} is not a file; `/save FILE` writes one")
        try:
            record = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise AgentR1Error(f"{path} is not JSON ({error}); `/save FILE` writes what can be loaded") from None
        wrong = best_match(Draft202012Validator(_schema(len(self.agent.chat.tokenizer))).iter_errors(record))
        if wrong is not None:
            raise AgentR1Error(f"{path} is no saved conversation: {wrong.json_path}: {wrong.message[:200]}")
        if record["tokenizer"] != tokenizer_hash(self.agent):
            raise AgentR1Error(
                f"{path} was made with another tokenizer ({record['model'][:200]}); chat with that model"
            )
        steps = [step for exchange in record["exchanges"] for step in exchange["steps"]]
        if any(len(step["action_ids"]) != len(step["action_logprobs"]) for step in steps):
            raise AgentR1Error(f"{path} is no saved conversation: a token lacks its log-probability")
        self.exchanges = [self._restore(exchange) for exchange in record["exchanges"]]

    def _restore(self, record: dict[str, Any]) -> Exchange:
        question = record["question"]
        trajectory = Trajectory(
            [Step(**step) for step in record["steps"]],
            group_id="chat",
            stop_reason=StopReason(record["stop_reason"]),
            row=self._row(question, follow_up=record["start"] > 0),
            reward_parts=record["reward_parts"],
            metrics=record["metrics"],
            error=record["error"],
        )
        return Exchange(question, trajectory, record["seconds"], question in self._known, record["start"])


class _ChatLoop(AgentEnvLoop):
    """The loop of training, which a conversation watches. A question may go on with the steps before it."""

    conversation: Conversation
    history: list[Step]
    """Their ids are kept as they are; the trajectory holds the new steps only."""

    def observe(self, steps: list[Step], observation: Observation) -> list[int]:
        return super().observe(self.history + steps, observation)

    def on_action(self, action: Action) -> None:
        self.conversation.listener.turn(action.text, action.finish_reason == "stop")

    def on_result(self, result: StepResult) -> None:
        self.conversation.listener.results(result.info.get("tool_calls", []))
        self.conversation._turn_ids = []


# ----------------------------------------------------------------------------------------------------------- files

_MARK = b'{\n "agent_r1_conversation"'


def tokenizer_hash(agent: Agent) -> str:
    """Equal where equal ids mean equal text."""
    vocabulary = json.dumps(sorted(agent.chat.tokenizer.get_vocab().items()))
    return hashlib.sha256(vocabulary.encode()).hexdigest()[:16]


def _exchange_record(exchange: Exchange) -> dict[str, Any]:
    t = exchange.trajectory
    return {
        "question": exchange.question,
        "seconds": exchange.seconds,
        "start": exchange.start,
        "stop_reason": t.stop_reason.value,
        "reward_parts": t.reward_parts,
        "metrics": t.metrics,
        "error": t.error,
        "steps": [asdict(step) for step in t.steps],
    }


def _schema(vocabulary: int) -> dict[str, Any]:
    """What `load` believes. A conversation file may come from anywhere, and its ids go straight into the model."""

    def listed(item: dict) -> dict:
        return {"type": "array", "items": item}

    def closed(**properties: dict) -> dict:
        return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}

    text, number, truth = {"type": "string"}, {"type": "number"}, {"type": "boolean"}
    maybe_text, numbers = {"type": ["string", "null"]}, {"type": "object", "additionalProperties": {"type": "number"}}
    ids = listed({"type": "integer", "minimum": 0, "maximum": vocabulary - 1})
    call = closed(name=text, arguments={"type": "object"}, ok=truth, error=maybe_text, seconds=number, content=text)
    step = closed(
        observation_ids=ids | {"minItems": 1}, action_ids=ids, action_logprobs=listed(number), reward=number, done=truth,
        finish_reason={"enum": ["stop", "length"]}, info={"type": "object", "properties": {"tool_calls": listed(call)}},
    )  # fmt: skip
    exchange = closed(
        question=text, seconds=number, start={"type": "integer", "minimum": 0}, reward_parts=numbers, metrics=numbers,
        stop_reason={"enum": [reason.value for reason in StopReason]}, error=maybe_text,
        steps=listed(step) | {"minItems": 1},
    )  # fmt: skip
    return closed(agent_r1_conversation={"const": 1}, model=text, tokenizer=text, exchanges=listed(exchange))


# ----------------------------------------------------------------------------------------------------- your own tools


def user_tools(names: list[str]) -> dict[str, BaseTool]:
    """The tools named `module:attribute`: a BaseTool, or a typed and documented function, which becomes one.

    The module is imported, from the working directory too: whoever names it chooses to run it.
    """
    if "" not in sys.path and names:
        sys.path.insert(0, "")
    tools: dict[str, BaseTool] = {}
    for name in names:
        module, _, attribute = name.partition(":")
        if not module or not attribute:
            raise ConfigError(f"--tools {name!r}: give module:function, for example my_tools:weather")
        try:
            found = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"--tools {name}: {error}; it is imported from the working directory or the venv"
            ) from None
        made = found if isinstance(found, BaseTool) else tool(found) if callable(found) else None
        if made is None:
            raise ConfigError(f"--tools {name} is a {type(found).__name__}; give a function or a BaseTool")
        tools[made.name] = made
    return tools
