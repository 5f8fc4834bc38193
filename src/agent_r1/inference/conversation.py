"""Hold a conversation with an agent: the training episode loop, one question after another.

In: an `Agent` (agent.py) and questions. Out: an `Exchange` for each; a watcher is called while it
happens. Next: `chat.py`.

A question is one episode, with the turn, token and tool budgets of training. A follow-up is an
episode whose first observation continues the ids of the last one: sampled tokens are never encoded
again. So the conversation is what the model would read if it were trained on conversations.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from agent_r1.config.settings import EnvConfig
from agent_r1.core import (
    Action,
    Message,
    Observation,
    Row,
    Sampling,
    Step,
    StepResult,
    StopReason,
    Trajectory,
)
from agent_r1.data.prompts import messages
from agent_r1.env import INVALID, brings_tools, dialect_of, make_env
from agent_r1.ground.errors import AgentR1Error
from agent_r1.rollout.agent import Agent
from agent_r1.rollout.episode import AgentEnvLoop, Limits, Task, derive_seed
from agent_r1.rollout.training_rows import trajectory_rows


class Watcher:
    """Define the callbacks of one episode.

    The base class ignores them; `screen.Screen` shows them.
    """

    def stream(self, text: str) -> None:
        """Receive the text of the turn so far, each time that tokens arrive."""

    def turn(self, action: Action) -> None:
        """Receive a complete turn. Its tool calls run next."""

    def results(self, result: StepResult) -> None:
        """Receive the result of the turn."""

    def note(self, text: str) -> None:
        """Receive a message for the person."""


@dataclass
class Exchange:
    """Hold one question and its episode."""

    question: str
    trajectory: Trajectory
    seconds: float
    known: bool
    """Whether the right answer is known, so that the reward has a meaning."""
    start: int
    """Tokens of the conversation before this question; 0 for a new conversation.

    The episode started with them.
    """


class Conversation(AgentEnvLoop):
    """Ask the agent and remember. `known` questions keep their rows, and so get a reward."""

    def __init__(
        self, agent: Agent, known_rows: list[Row], seed: int = 0, watcher: Watcher | None = None
    ):
        r = agent.config.rollout
        env = agent.config.env
        super().__init__(
            agent.policy,
            agent.chat,
            Limits.from_settings(r, env),
            lambda row: make_env(row, agent.tools, env),
        )
        self.agent = agent
        self.watcher = watcher or Watcher()
        self.exchanges: list[Exchange] = []
        self.temperature = r.temperature
        self.memory = not agent.starts_from_nothing
        """Whether a question continues the conversation, or begins a new one."""
        self._rows_by_question = {row["prompt"][-1]["content"]: row for row in known_rows}
        # The same messages before the question as in training: a system message, if the task has
        # one.
        if agent.leading_messages is not None:
            self._leading_messages = agent.leading_messages
        elif known_rows:
            self._leading_messages = known_rows[0]["prompt"][:-1]
        else:
            describes_format = dialect_of(env).describes_format
            prompt = messages(agent.config.data.data_source, "", describes_format=describes_format)
            self._leading_messages = prompt[:-1]
        self._seed = seed
        self._questions = 0  # asked so far; numbers the episodes
        self._history: list[Step] = []
        """The exchanges that the running episode continues."""
        self._turn_ids: list[int] = []
        if watcher is not None:
            agent.policy.on_token = self._on_token

    async def ask(self, question: str) -> Exchange:
        """Ask one question.

        Raises the policy's errors, and AgentR1Error for a question that no context can hold; then
        the conversation is unchanged.
        """
        first = dialect_of(self.agent.config.env).first_observation(
            self._row(question)["prompt"], self.agent.tools
        )
        n = len(self.chat.prompt_ids(first.messages, first.tools))
        room = self.limits.max_context
        if n >= room:
            raise AgentR1Error(
                f"the question alone takes {n} tokens, and the model's context has {room}; ask a "
                "shorter question",
                code="prompt_too_long",
            )
        past = same_context(self.exchanges) if self.memory else []
        exchange = await self._episode(question, past)
        if past and exchange.trajectory.stop_reason is StopReason.CONTEXT_OVERFLOW:
            self.watcher.note(
                f"the conversation no longer fits into the model's {room} tokens; a new one begins "
                "with this question"
            )
            exchange = await self._episode(question, [])
        if exchange.trajectory.steps:
            self.exchanges.append(exchange)
        return exchange

    async def _episode(self, question: str, past: list[Exchange]) -> Exchange:
        self._questions += 1
        self._turn_ids = []
        self._history = []
        for exchange in past:
            self._history += exchange.trajectory.steps
        start = 0
        if self._history:
            last = self._history[-1]
            start = len(last.observation_ids) + len(last.action_ids)
        seed = derive_seed(self._seed, "chat", self._questions)
        begin = time.perf_counter()
        sampling = Sampling(self.limits.max_tokens_per_turn, self.temperature)
        task = Task(
            self._row(question, follow_up=bool(past)), "chat", f"chat-{self._questions}", seed
        )
        trajectory = await self.play(task, sampling)
        return Exchange(
            question,
            trajectory,
            time.perf_counter() - begin,
            question in self._rows_by_question,
            start,
        )

    def _row(self, question: str, follow_up: bool = False) -> Row:
        """Make the row of a question; without a known answer it has no ground truth."""
        new_row = {
            "data_source": "chat",
            "ability": "chat",
            "reward_model": {"style": "rule", "ground_truth": []},
            "extra_info": {"index": 0, "split": "chat"},
            "agent_name": self.agent.config.env.name,
        }
        row = self._rows_by_question.get(question, new_row)
        prompt: list[Message] = [{"role": "user", "content": question}]
        if not follow_up:
            prompt = self._leading_messages + prompt
        return row | {
            "prompt": prompt,
            "env_kwargs": (row.get("env_kwargs") or {}) | {"tools": list(self.agent.tools)},
        }

    # -------------------------------------------------------------------- hooks of the episode loop

    def observe(self, steps: list[Step], observation: Observation) -> list[int]:
        if self._history and not steps:  # a follow-up: the tools were described before
            unread = [m for m in observation.messages if m["role"] != "system"]
            observation = replace(observation, messages=unread)
        return super().observe(self._history + steps, observation)

    def _on_token(self, session: str | None, ids: list[int]) -> None:
        if session == f"chat-{self._questions}":
            self._turn_ids += ids
            # A character may need several tokens; until the last of them arrives, it decodes to
            # U+FFFD.
            self.watcher.stream(self.chat.turn_text(self._turn_ids).rstrip("\ufffd"))

    def on_action(self, action: Action) -> None:
        self._turn_ids = []
        self.watcher.turn(action)

    def on_result(self, result: StepResult) -> None:
        self.watcher.results(result)


def same_context(exchanges: list[Exchange]) -> list[Exchange]:
    """Return the exchanges that the model still sees: those since its last new start."""
    first = 0
    for number, exchange in enumerate(exchanges):
        if exchange.start == 0:
            first = number
    return exchanges[first:]


# ------------------------------------------------------------------------------------------ results


def read_turn(env: EnvConfig, text: str, whole: bool) -> list[tuple[str, str]]:
    """Split a turn into (kind, text) parts, in the dialect of `env`; never raises.

    Of a streaming turn (`whole` False) the parts only grow. In a complete turn without call or
    answer, the plain text is the answer. A model that was not trained to mark answers writes so,
    and such a turn ends the episode.
    """
    dialect = dialect_of(env)
    if not whole:
        text = dialect.partial_tag.sub("", text)
    parts = [(part.kind, part.text.strip()) for part in dialect.parts(text) if part.text.strip()]
    if not whole or {"tool_call", "answer"} & {kind for kind, _ in parts}:
        return parts
    answer = dialect.answer_in(text)[0]
    if answer:  # it is within the text
        return [*parts, ("answer", answer)]
    return [("answer" if kind == "text" else kind, text) for kind, text in parts]


def final_answer(exchange: Exchange, agent: Agent) -> str | None:
    """Return the agent's answer, or None. In a conversation a plain text is an answer, too."""
    if exchange.trajectory.stop_reason not in (StopReason.ANSWERED, StopReason.NO_ANSWER):
        return None
    env = agent.config.env
    text = agent.chat.turn_text(exchange.trajectory.steps[-1].action_ids)
    answer = dialect_of(env).answer_in(text)[0]
    if answer:
        return answer
    parts = [part for kind, part in read_turn(env, text, True) if kind == "answer"]
    return " ".join(parts) or None


def no_answer(exchange: Exchange, agent: Agent) -> str | None:
    """Explain in a sentence why there is no answer.

    None if there is one, or if the environment ended the episode without needing one.
    """
    env = agent.config.env
    rollout = agent.config.rollout
    t = exchange.trajectory
    # A call may have ended the episode.
    done = t.stop_reason is StopReason.ANSWERED and t.steps[-1].info.get("tool_calls")
    if done or final_answer(exchange, agent) is not None:
        return None
    foreign = ""
    if not exchange.known and brings_tools(env.name):
        foreign = (
            "; only questions of the test set have what this environment needs: type 1 for one of "
            "them"
        )
    return {
        StopReason.ANSWERED: "no answer: its last turn is empty",
        StopReason.NO_ANSWER: "no answer: its last turn is empty",
        StopReason.MAX_TURNS: f"no answer: its {env.max_turns} turns are used up",
        StopReason.MAX_TOKENS: f"cut off: a turn has {rollout.max_tokens_per_turn} tokens",
        StopReason.CONTEXT_OVERFLOW: f"no answer: the context of {rollout.max_context} tokens is "
        "full",
        StopReason.TOOL_BUDGET: f"no answer: it asked for more than {env.max_tool_calls} tool "
        "calls",
        StopReason.INVALID_CALLS: f"no answer: {env.max_invalid_calls} invalid calls in a row"
        f"{_invalid_calls(exchange.trajectory, env.max_invalid_calls)}",
        StopReason.TIME_OUT: f"no answer within {env.episode_timeout_s:g} s",
        StopReason.ERROR: "no answer: the environment failed "
        f"({exchange.trajectory.error}){foreign}",
    }[exchange.trajectory.stop_reason]


def _invalid_calls(trajectory: Trajectory, count: int) -> str:
    """Name the last `count` invalid calls: a valid one between their turns may stand last."""
    names: list[str] = []
    for step in trajectory.steps:
        for call in step.info.get("tool_calls", ()):
            if call["error"] in INVALID:
                names.append(f"{call['name'] or 'no name'}: {call['error'].replace('_', ' ')}")
    return f" ({'; '.join(names[-count:])})" if names else ""


def exchange_record(exchange: Exchange, agent: Agent) -> dict[str, Any]:
    """Make one line of `--json`.

    `token_ids` and `action_mask` are those of the whole conversation; if the context was rewritten,
    those of the last context, and `rows` has all.
    """
    t = exchange.trajectory
    rows: list[dict[str, list[int]]] = []
    for row in trajectory_rows(t, 0):
        rows.append({"token_ids": row.input_ids, "action_mask": row.action_mask})
    calls: list[dict[str, Any]] = []
    for step in t.steps:
        calls += step.info.get("tool_calls", [])
    record = {
        "question": exchange.question,
        "answer": final_answer(exchange, agent),
        "stop_reason": t.stop_reason.value,
        "error": t.error,
        "turns": [agent.chat.turn_text(step.action_ids) for step in t.steps],
        "tool_calls": calls,
        "tokens_before": exchange.start,
        "sampled_tokens": sum(len(step.action_ids) for step in t.steps),
        "seconds": round(exchange.seconds, 3),
        **(rows[-1] if rows else {"token_ids": [], "action_mask": []}),
    }
    if len(rows) > 1:
        record["rows"] = rows
    if exchange.known:
        record |= {"reward": t.reward, "reward_parts": t.reward_parts, "metrics": t.metrics}
    return record
