"""The words of the domain: what a policy and an environment exchange, and what is recorded of it. Read this file first.

One *episode* is a conversation between a policy (the language model) and an environment. It is recorded as a
`Trajectory` of `Step`s. A step is one turn (one transition of the Markov decision process, as the field calls it):

    observation ids  ── what the policy saw (prompt, or everything so far plus the tool's reply); nobody sampled these
    action ids       ── what the policy sampled, with the log-probability of each token at sampling time
    reward           ── what the environment paid for the action

Tokens are the truth: `action_ids` are the very ids that came out of the sampler. They are decoded once, to let the
environment read them, and never encoded again, because encode(decode(ids)) need not equal ids. A model trained on
re-encoded ids is trained on actions that it never took.

Names of tensors end in their shape; `logprobs_BT` is of shape [B, T]. The letters:

    B rows of a batch            N trajectories                 V vocabulary
    T tokens of a row            L longest trajectory           D hidden width
    A action tokens of a batch,  G samples of one prompt        H attention heads
      laid end to end              (the group)                  K key-value heads
    S steps of a batch           C tokens of a chunk

At the end of a name they are sizes. In formulas A_t is an advantage, V_t a value, R_t a return, r_t a reward and pi the policy.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol

Row = dict[str, Any]
"""One task, with verl's parquet keys: data_source, prompt, ability, reward_model, extra_info, agent_name, env_kwargs."""

Message = dict[str, Any]
"""One chat message: {"role": "system" | "user" | "assistant" | "tool", "content": str}."""


class StopReason(StrEnum):
    """Why an episode ended. Every trajectory has exactly one."""

    ANSWERED = "answered"
    """The agent gave its final answer (or the environment reached its goal)."""
    NO_ANSWER = "no_answer"
    """The agent stopped acting, and its last turn holds no answer: it is empty, all thought, or without the tags."""
    MAX_TURNS = "max_turns"
    """The agent still wanted to act, but its turns were used up."""
    MAX_TOKENS = "max_tokens"
    """A turn hit its token limit. Nothing in a cut-off turn is executed, not even a call that looks complete."""
    CONTEXT_OVERFLOW = "context_overflow"
    """The next observation, or one more token after it, would not fit into the context window."""
    TOOL_BUDGET = "tool_budget"
    """The agent asked for more tool calls than it may make."""
    INVALID_CALLS = "invalid_calls"
    """Too many calls in a row could not be parsed or validated."""
    TIME_OUT = "time_out"
    """The episode's wall-clock budget ran out."""
    ERROR = "error"
    """The environment raised, or the model server was lost; the message is in `Trajectory.error`."""

    @property
    def broken_off(self) -> bool:
        """Ended by the machine or the world, which says nothing about the policy: such an episode trains nobody."""
        return self in (StopReason.TIME_OUT, StopReason.ERROR)


# ------------------------------------------------------------------------------------------------ policy side


@dataclass(frozen=True)
class Sampling:
    """How to draw tokens for one turn."""

    max_tokens: int
    """Largest number of tokens in this turn (the stop token included)."""
    temperature: float = 1.0
    """0 means greedy. Nothing is cut off the distribution (top-p, top-k): the trainer's log-probabilities know of no cut."""
    seed: int | None = None
    """Same seed, same prompt, same weights -> same tokens, whatever else is in the batch."""


@dataclass(frozen=True)
class Generation:
    """What a policy returns for one turn."""

    token_ids: list[int]
    """Sampled ids, the stop token included where one was sampled."""
    logprobs: list[float]
    """log pi(token | everything before it) at the sampling temperature, one per id (natural logarithm)."""
    finish_reason: Literal["stop", "length"]
    """`stop`: the model closed its turn. `length`: the limit cut it off."""


class Policy(Protocol):
    """The only way to a model. The sampler in this process, verl's server client and a vLLM server all implement it."""

    on_token: Callable[[str | None, list[int]], None] | None = None
    """A hook for who shows a turn as it grows: called with the session and each newly sampled stretch of ids."""

    async def generate(self, prompt_ids: list[int], sampling: Sampling, session: str | None = None) -> Generation:
        """Continue `prompt_ids`.

        `session` names an episode: calls with the same one are its turns, so a policy may keep keys and values of the
        conversation so far in a cache. None: a prompt that nothing follows.
        """
        ...

    def release(self, session: str) -> None:
        """The episode is over: whatever was kept for `session` may go. By default, nothing was."""
        ...


# ------------------------------------------------------------------------------------------- environment side


@dataclass(frozen=True)
class Action:
    """One turn of the agent, as an environment receives it."""

    text: str
    """The decoded turn, without the closing stop token. Hostile until parsed: it is model output."""
    finish_reason: Literal["stop", "length"] = "stop"


@dataclass
class Observation:
    """What the environment shows the agent next, as chat messages. The flow turns them into tokens."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    """JSON schemas of the callable tools in OpenAI's form; read from the first observation only."""
    rewrite: bool = False
    """False: `messages` are appended to all that came before. True: they replace it (context management)."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What an estimator may ask of this place, by name. `state` names it; without that, `messages` do."""


@dataclass
class StepResult:
    """What `AgentEnv.step` returns. Like Gymnasium's step, except that `stop_reason` replaces `terminated` and `truncated`."""

    observation: Observation | None
    """None when `done`."""
    reward: float = 0.0
    """Process reward of this step alone; the outcome is paid once, by `AgentEnv.outcome`."""
    done: bool = False
    stop_reason: StopReason | None = None
    """Set when `done`."""
    info: dict[str, Any] = field(default_factory=dict)
    """For people and logs (tool calls, errors); never read by the algorithm."""
    paid: list[tuple[int, float]] = field(default_factory=list)
    """What `reward` is the sum of, where calls are paid: (characters of the turn up to the end of the call, its reward)."""


class ToolErrorKind(StrEnum):
    """Why a call gave no result. The environment counts these; the agent reads `ToolResult.content`."""

    MALFORMED_CALL = "malformed_call"
    """The text of the call could not be parsed."""
    UNKNOWN_TOOL = "unknown_tool"
    """There is no tool of that name."""
    INVALID_ARGUMENTS = "invalid_arguments"
    """The arguments do not fit the tool's schema, or the tool refused them."""
    TIME_OUT = "time_out"
    """The tool did not answer within its deadline."""
    TOOL_ERROR = "tool_error"
    """The tool raised an exception."""


INVALID = (ToolErrorKind.MALFORMED_CALL, ToolErrorKind.UNKNOWN_TOOL, ToolErrorKind.INVALID_ARGUMENTS)
"""Errors that the agent made, as opposed to a tool that failed or was slow."""


@dataclass
class Outcome:
    """What the whole episode was worth. Everything may be left out.

    Turns and calls need no saying: they are counted from the steps of the episode.
    """

    reward: float = 0.0
    """In addition to what the steps have paid."""
    parts: dict[str, float] = field(default_factory=dict)
    """The summands of `reward` by name; recorded as `reward/NAME`."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Measurements that are not paid for; recorded as `episode/NAME`. `sub_em` and `f1` go on the eval card too."""
    score_name: str | None = None
    """Which of `metrics` evaluations report as the score. None: `em` (0 or 1) where it is measured, and else the reward."""
    truncated: bool = False
    """The episode was cut off, and `reward` does not say how it would have ended: a critic's value stands for the rest. An
    algorithm without a critic ends the run."""


class AgentEnv(ABC):
    """One episode's world, the only one that the loop knows. A fresh object for each episode; nothing is shared but the tools.

    `reset`, `outcome` and `close` may be `async def`, where a world is far away or slow.
    """

    @abstractmethod
    def reset(self, row: Row) -> Observation | Awaitable[Observation]:
        """Begin: the first observation, with what the agent is to know of its tools."""

    @abstractmethod
    async def step(self, action: Action) -> StepResult:
        """Answer one turn of the agent. Must not raise on anything that a model can write."""

    def outcome(self, stop_reason: StopReason) -> Outcome | Awaitable[Outcome]:
        """The reward of the whole episode, beyond what `step` has paid. Called exactly once, at the end."""
        return Outcome()

    asks: str | None = None
    """A message that the agent answers with plain text, and not with a turn, where this environment sends one."""
    own_tools: Sequence[Any] = ()
    """Tools of this episode alone (`BaseTool.for_episode`); `make_env` sets them."""

    def close(self) -> Awaitable[None] | None:
        """Give back what this episode held. Called exactly once, after `outcome`, however the episode ended."""
        for tool in self.own_tools:
            tool.close()


async def awaited(value):
    """What an environment's method returned, or what its coroutine comes to."""
    return await value if inspect.isawaitable(value) else value


# --------------------------------------------------------------------------------------------- what is recorded


@dataclass
class Step:
    """One transition. `observation_ids` is the *whole* input of the model in this turn, not only its new part."""

    observation_ids: list[int]
    action_ids: list[int]
    action_logprobs: list[float]
    reward: float = 0.0
    done: bool = False
    """Whether the episode ended with it."""
    finish_reason: str = "stop"
    info: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    """What an estimator may ask of it: that of the observation, whose `state` is now a number that fits into an int64."""
    paid: list[tuple[int, float]] = field(default_factory=list)
    """What of `reward` was paid on the way: (number of the action token that earned it, reward). The rest is an outcome's."""


@dataclass
class Trajectory:
    """One finished episode."""

    steps: list[Step]
    group_id: str
    """Trajectories with one group id are samples of the same prompt (GRPO compares them with one another)."""
    stop_reason: StopReason
    row: Row
    reward_parts: dict[str, float] = field(default_factory=dict)
    """The summands of the outcome reward by name (em, format, ...)."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Measurements that are not paid for (f1, tool_calls, ...). None of them is sure to be there."""
    error: str | None = None
    """What broke the episode off, in words; None unless `stop_reason.broken_off`."""
    score_name: str | None = None
    """See `Outcome`."""
    truncated: bool = False
    """See `Outcome`."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What an estimator may ask of the episode; who plays it fills this in."""

    @property
    def reward(self) -> float:
        """The return: process rewards of all steps plus the outcome (which sits on the last action)."""
        return sum(step.reward for step in self.steps)

    @property
    def process(self) -> float:
        """What of the return was paid on the way."""
        return sum(paid for step in self.steps for _, paid in step.paid)

    @property
    def score(self) -> float:
        """What evaluations average: the environment's own score, or exact match where it measures that, else the return."""
        return self.metrics.get(self.score_name or "em", self.reward)
