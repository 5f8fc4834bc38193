"""Define what a policy and an environment exchange, and the record of an episode.

Start here. Next: `chat/format.py`, which turns chat messages into observation ids.

An *episode* is a conversation between a policy (the language model) and an environment, recorded as
a `Trajectory`. Each of its `Step`s is one turn, a transition of the Markov decision process:

    observation ids   the policy's input: the prompt, or all tokens so far plus the tool's reply
    action ids        the tokens that the policy sampled, with their log-probabilities then
    reward            the environment's reward for the action

`action_ids` are exactly the sampled ids. They are decoded once, for the environment, and never
encoded again. Encoding the text again may give different ids, which would train the model on
actions that it never took.

Names of tensors end in their shape: `logprobs_BT` has shape [B, T].

    B rows of a batch            N trajectories                 V vocabulary
    T tokens of a row            L most action tokens of        D hidden width
    A action tokens of a batch,    any trajectory               H attention heads
      concatenated               G samples of one prompt        K key-value heads
    S steps of a batch             (the group)                  C tokens of a chunk

In formulas, A_t is an advantage, V_t a value, R_t a return, r_t a reward and pi the policy.

What stands below a line "Skip at first" is for the users that the line names. The words above it
are enough to follow an episode.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol

Row = dict[str, Any]
"""One task, with verl's parquet keys.

They are data_source, prompt, ability, reward_model, extra_info, agent_name and env_kwargs.
"""

Message = dict[str, Any]
"""One chat message: {"role": "system" | "user" | "assistant" | "tool", "content": str}.

With recipes/pictures, a content may be a list of {"type": "text", "text": ...} and
{"type": "image", "image": ...}."""


class StopReason(StrEnum):
    """Why an episode ended. Every trajectory has exactly one."""

    ANSWERED = "answered"  # the agent gave its final answer, or the environment reached its goal
    NO_ANSWER = "no_answer"  # the last turn has neither a call nor an answer
    MAX_TURNS = "max_turns"  # the last allowed turn still called a tool
    MAX_TOKENS = "max_tokens"
    """A turn reached its token limit; no call in a cut-off turn is executed."""
    CONTEXT_OVERFLOW = "context_overflow"
    """The next observation, or one more token after it, does not fit."""
    TOOL_BUDGET = "tool_budget"  # the agent asked for more tool calls than allowed
    INVALID_CALLS = "invalid_calls"  # too many consecutive calls could not be parsed or validated
    TIME_OUT = "time_out"  # the episode's wall-clock budget ran out
    ERROR = "error"  # the environment raised, or the model server was lost: see `Trajectory.error`

    @property
    def failed(self) -> bool:
        """Return whether a failure outside the policy, such as a timeout, ended the episode.

        Training excludes it.
        """
        return self in (StopReason.TIME_OUT, StopReason.ERROR)


# -------------------------------------------------------------------------------------- policy side


@dataclass(frozen=True)
class Sampling:
    """How to sample the tokens of one turn."""

    max_tokens: int  # including the stop token
    temperature: float = 1.0
    """0 is greedy.

    There is no top-p or top-k, because the trainer's log-probabilities assume the whole
    distribution.
    """
    seed: int | None = None
    """Equal seed, prompt and weights give equal tokens, regardless of the rest of the batch."""
    # Skip at first (recipes/gateway).
    is_turn_end: Callable[[list[int]], bool] | None = None
    """Whether the turn ends after these sampled ids, for stop strings.

    `LocalPolicy` asks it after each token.
    """


@dataclass(frozen=True)
class Generation:
    """What a policy returns for one turn."""

    token_ids: list[int]
    """Including the stop token, if one was sampled."""
    logprobs: list[float]
    """log pi(token | all tokens before it) at the sampling temperature, in nats."""
    finish_reason: Literal["stop", "length"]
    """A stop token ended the turn, or the limit cut it off."""


class Policy(Protocol):
    """The only interface to a model.

    The local sampler, verl's server client and a vLLM client implement it.
    """

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, session: str | None = None
    ) -> Generation:
        """Continue `prompt_ids`.

        Calls with the same `session` are turns of one episode, so a policy may cache the keys and
        values of the conversation so far. `session=None` means that this is the only turn.
        """
        ...

    def release(self, session: str) -> None:
        """Free what the policy keeps for `session`: its episode is over."""
        ...

    # Skip at first (chat and dashboard).
    on_token: Callable[[str | None, list[int]], None] | None = None
    """Called with the session and each new stretch of ids, to show a turn while it grows."""


# --------------------------------------------------------------------------------- environment side


@dataclass(frozen=True)
class Action:
    """One turn of the agent, as an environment receives it."""

    text: str  # decoded, without the stop token; untrusted model output
    finish_reason: Literal["stop", "length"] = "stop"


@dataclass
class Observation:
    """The environment's next chat messages to the agent. The episode loop encodes them."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    """JSON schemas of the tools in OpenAI's form; only the first observation's are read."""
    rewrite: bool = False
    """False: append `messages` to the context. True: replace the context with them."""
    # Skip at first (templates of some model families; gigpo in recipes/credit).
    calls: Sequence[str] = ()
    """Names of the calls that `messages` answer, for templates that write a result with them."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Values for estimators, by name.

    `state` identifies the agent's state; its default is `messages`.
    """


@dataclass
class StepResult:
    """What `AgentEnv.step` returns.

    Gymnasium's `terminated` and `truncated` are one `stop_reason` here.
    """

    observation: Observation | None  # None when `done`
    reward: float = 0.0  # of this step alone; `AgentEnv.outcome` returns the outcome reward
    done: bool = False
    stop_reason: StopReason | None = None  # set when `done`
    info: dict[str, Any] = field(default_factory=dict)
    """For humans and logs (tool calls, errors); the algorithm never reads it."""
    # Skip at first (worlds that reward single calls).
    call_rewards: list[tuple[int, float]] = field(default_factory=list)
    """Summands of `reward`, if calls are rewarded: (characters up to the call's end, reward).

    The characters are those of the turn.
    """


class ToolErrorKind(StrEnum):
    """Why a call gave no result.

    The environment counts the kinds; the agent reads `ToolResult.content`.
    """

    MALFORMED_CALL = "malformed_call"  # the call could not be parsed
    UNKNOWN_TOOL = "unknown_tool"  # the agent made a name up, or env.tools lacks the tool
    INVALID_ARGUMENTS = "invalid_arguments"
    """The arguments do not fit the schema, or the tool refused them."""
    TIME_OUT = "time_out"  # the tool missed its deadline
    TOOL_ERROR = "tool_error"  # the tool raised an exception


INVALID = (
    ToolErrorKind.MALFORMED_CALL,
    ToolErrorKind.UNKNOWN_TOOL,
    ToolErrorKind.INVALID_ARGUMENTS,
)
"""The agent's errors; the other kinds are failures of a tool."""


@dataclass
class Outcome:
    """Result of a whole episode. The loop adds the counts of turns and calls to its metrics."""

    reward: float = 0.0  # in addition to the steps' rewards
    parts: dict[str, float] = field(default_factory=dict)
    """Summands of `reward` by name; recorded as `reward/NAME`."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Unrewarded measurements; recorded as `episode/NAME`.

    `sub_em` and `f1` also go on the evaluation card.
    """
    # Skip at first (worlds whose score is not exact match; recipes/gym).
    score_name: str | None = None
    """The metric that evaluations report. None: `em` (0 or 1) if measured, otherwise the reward."""
    truncated: bool = False
    """The episode was cut off before its outcome was known. A critic's value replaces the rest of
    the return; an estimator without a critic raises ConfigError."""


class AgentEnv(ABC):
    """The world of one episode. Each episode gets a new object; only tools are shared.

    `reset`, `outcome` and `close` may be `async def`.
    """

    @abstractmethod
    def reset(self, row: Row) -> Observation | Awaitable[Observation]:
        """Return the first observation, which also describes the tools."""

    @abstractmethod
    async def step(self, action: Action) -> StepResult:
        """Process one turn of the agent. Must not raise, whatever the model wrote."""

    def outcome(self, stop_reason: StopReason) -> Outcome | Awaitable[Outcome]:
        """Return the episode's outcome, beyond the steps' rewards.

        Called exactly once, at the end.
        """
        return Outcome()

    def close(self) -> Awaitable[None] | None:
        """Release the episode's resources.

        Called exactly once, after `outcome`, however the episode ended.
        """
        for tool in self.episode_tools:
            tool.close()

    # Skip at first (recipes/long_context; tools with a state).
    plain_request: str | None = None
    """A user message that asks for an answer in plain text; None: no such message.

    The model then writes no turn with tags.
    """
    episode_tools: Sequence[Any] = ()
    """Tools of this episode alone (`BaseTool.for_episode`); `make_env` sets them."""


async def maybe_await(value):
    """Return `value`, or its result if it is awaitable."""
    return await value if inspect.isawaitable(value) else value


# --------------------------------------------------------------------------------- what is recorded


@dataclass
class Step:
    """One transition."""

    observation_ids: list[int]  # the *whole* input of the model in this turn, not only its new part
    action_ids: list[int]
    action_logprobs: list[float]
    reward: float = 0.0
    done: bool = False  # whether the episode ended with this step
    finish_reason: str = "stop"
    info: dict[str, Any] = field(default_factory=dict)
    # Skip at first (gigpo in recipes/credit; rewards on the way).
    extra: dict[str, Any] = field(default_factory=dict)
    """`Observation.extra`, with `state` as a number that fits into an int64."""
    token_rewards: list[tuple[int, float]] = field(default_factory=list)
    """Process rewards within `reward`: (index of the action token that earned it, reward).

    The rest is outcome.
    """


@dataclass
class Trajectory:
    """One finished episode."""

    steps: list[Step]
    group_id: str
    """Equal for samples of one prompt, which GRPO compares with one another."""
    stop_reason: StopReason
    row: Row
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Summands of the outcome reward by name (em, format, ...)."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Unrewarded measurements (f1, tool_calls, ...); any of them may be missing."""
    error: str | None = None
    """The error that ended the episode; None unless `stop_reason.failed`."""
    # Skip at first (see `Outcome`; recipes/credit; evaluation).
    score_name: str | None = None  # see `Outcome`
    truncated: bool = False  # see `Outcome`
    extra: dict[str, Any] = field(default_factory=dict)
    """Values for estimators, by name; set after the episode."""
    sample: int = 0
    """Number of this sample among those of its question, in an evaluation."""

    @property
    def reward(self) -> float:
        """The return: all process rewards plus the outcome.

        The outcome is in the last step's `reward`.
        """
        return sum(step.reward for step in self.steps)

    @property
    def process(self) -> float:
        """The sum of the process rewards: the return without the outcome."""
        total = 0
        for step in self.steps:
            for _, reward in step.token_rewards:
                total += reward
        return total

    @property
    def score(self) -> float:
        """The figure that evaluations average: `score_name`, else exact match, else the return."""
        return self.metrics.get(self.score_name or "em", self.reward)


SAMPLER_GAP = "training/rollout_logprobs_diff_mean"
"""Key in metrics.jsonl: mean absolute difference of trainer and sampler in a sampled token's
log-probability, before any update. Rounding in bfloat16 gives .01 to .02."""
