"""Run episodes between a policy and an environment: in training, evaluation, chat and verl.

In: a row (one question). Out: a `Trajectory`. Next: `sampling.py` chooses the tokens of an action,
and `training_rows.py` turns the trajectory into training sequences.

Episodes are coroutines. Each waits only for its own tokens and tools, so a hundred of them
(`rollouts.py`) keep one sampler busy.

    AgentFlowBase   full control: any coroutine that returns a Trajectory (branching, several policies, ...)
    AgentEnvLoop    the generic flow: observe -> act -> step, until done

To watch an episode live, override `on_action` and `on_result` of `AgentEnvLoop` and set the
policy's `on_token`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

from agent_r1.config.settings import EnvConfig, RolloutConfig
from agent_r1.core import (
    INVALID,
    Action,
    AgentEnv,
    Observation,
    Outcome,
    Policy,
    Row,
    Sampling,
    Step,
    StepResult,
    StopReason,
    Trajectory,
    maybe_await,
)
from agent_r1.ground.errors import AgentR1Error
from agent_r1.rollout.chat_format import ChatFormat

MAX_REWARD = 1e6
"""Largest absolute reward of a step or outcome. Sums and squares of rewards then stay far below
float32's maximum."""


@dataclass(frozen=True)
class Task:
    """One episode to run."""

    row: Row
    group_id: str  # equal for samples of one prompt
    session: str  # unique among concurrent episodes; names the episode's cache in the policy
    seed: int | None = None


@dataclass(frozen=True)
class Limits:
    """The loop's own limits; an environment also limits turns and calls."""

    max_tokens_per_turn: int
    max_context: int
    timeout_s: float

    @classmethod
    def from_settings(cls, rollout: RolloutConfig, env: EnvConfig) -> Limits:
        return cls(rollout.max_tokens_per_turn, rollout.max_context, env.episode_timeout_s)


class AgentFlowBase(ABC):
    """Run a task and return its trajectory. Subclass it if `reset` and `step` cannot express your
    agent."""

    def __init__(
        self,
        policy: Policy,
        chat: ChatFormat,
        limits: Limits,
        make_env: Callable[[Row], AgentEnv] | None = None,
    ):
        """`make_env` makes the environment of a row; a user-defined flow may not need it."""
        self.policy, self.chat, self.limits, self.make_env = policy, chat, limits, make_env

    @abstractmethod
    async def run(self, task: Task, sampling: Sampling) -> Trajectory:
        """Run one episode. Let the policy's exceptions propagate; record an environment's failure
        in the trajectory."""


class AgentEnvLoop(AgentFlowBase):
    """The generic flow between a policy and an `AgentEnv`."""

    async def run(self, task: Task, sampling: Sampling) -> Trajectory:
        env = self.make_env(task.row)
        try:
            return await self._run_in(env, task, sampling)
        finally:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.limits.timeout_s):
                    await maybe_await(env.close())

    async def _run_in(self, env: AgentEnv, task: Task, sampling: Sampling) -> Trajectory:
        steps, error = [], None
        try:
            async with asyncio.timeout(self.limits.timeout_s) as deadline:
                stop = await self._converse(env, task, sampling, steps)
        except TimeoutError:
            if not deadline.expired():  # the policy's own timeout on the way to its model
                raise
            stop, error = (
                StopReason.TIME_OUT,
                f"episode exceeded {self.limits.timeout_s:g} s (env.episode_timeout_s)",
            )
        except EnvironmentFailure as failure:
            stop, error = StopReason.ERROR, str(failure)
        finally:
            self.policy.release(task.session)
        try:
            # A fresh limit, so that an episode that timed out also gets its outcome.
            async with asyncio.timeout(self.limits.timeout_s) as deadline:
                outcome = await maybe_await(env.outcome(stop))
            finite(outcome.reward)
        except Exception as failure:  # for example, `reset` failed and the environment has no row
            outcome, stop = Outcome(), StopReason.ERROR
            late = f"no result after {self.limits.timeout_s:g} s (env.episode_timeout_s)"
            error = error or f"outcome: {late if deadline.expired() else _error_text(failure)}"
        if steps:
            # Only actions get credit, so the outcome goes to the last one, even if a tool result
            # came after it.
            steps[-1].reward += outcome.reward
            steps[-1].done = True
        metrics = outcome.metrics | count_calls(steps)
        return Trajectory(
            steps,
            task.group_id,
            stop,
            task.row,
            outcome.parts,
            metrics,
            error,
            outcome.score_name,
            outcome.truncated,
        )

    async def _converse(
        self, env: AgentEnv, task: Task, sampling: Sampling, steps: list[Step]
    ) -> StopReason:
        """Run turns until the end. Steps are appended immediately, so that a timeout keeps them."""
        try:
            observation = await maybe_await(env.reset(task.row))
        except Exception as failure:
            raise EnvironmentFailure(_error_text(failure)) from failure
        tools = observation.tools
        while True:
            ids = self.observe(steps, observation)
            room = self.limits.max_context - len(ids)
            if room < 1:
                return StopReason.CONTEXT_OVERFLOW
            turn = replace(
                sampling,
                max_tokens=min(self.limits.max_tokens_per_turn, room),
                seed=None if task.seed is None else derive_seed(task.seed, len(steps)),
            )
            generation = await self.policy.generate(ids, turn, task.session)
            if not all(map(math.isfinite, generation.logprobs)):
                raise AgentR1Error(
                    "the model's log-probabilities are not finite: its weights are corrupt. Use an "
                    "earlier checkpoint, or "
                    "train again with a smaller learning rate",
                    code="broken_weights",
                )
            state = (
                derive_seed(observation.extra.get("state") or str(observation.messages)) >> 1
            )  # fits into an int64
            step = Step(
                ids,
                generation.token_ids,
                generation.logprobs,
                finish_reason=generation.finish_reason,
            )
            step.extra = observation.extra | {"state": state}
            steps.append(step)
            # The only place where sampled ids become text: the environment reads it, and it is
            # never encoded again.
            action = Action(self.chat.turn_text(generation.token_ids), generation.finish_reason)
            self.on_action(action)
            try:
                result = await env.step(action)
                step.reward, step.info = finite(result.reward), result.info
                step.token_rewards = self.locate_rewards(step, result)
            except Exception as failure:
                raise EnvironmentFailure(_error_text(failure)) from failure
            self.on_result(result)
            if result.done:
                cut_by_context = (
                    generation.finish_reason == "length" and room < self.limits.max_tokens_per_turn
                )
                return StopReason.CONTEXT_OVERFLOW if cut_by_context else result.stop_reason
            observation = result.observation
            if not observation.rewrite:
                # The template that showed the tools also writes their results: Hermes-3 has another
                # one for conversations without tools.
                observation = replace(observation, tools=tools)

    def observe(self, steps: list[Step], observation: Observation) -> list[int]:
        """Return the prompt ids of the next turn. Sampled ids are carried over unchanged."""
        if not steps or observation.rewrite:
            return self.chat.prompt_ids(observation.messages, observation.tools)
        last = steps[-1]
        reply = self.chat.reply_ids(
            last.action_ids, observation.messages, observation.calls, observation.tools
        )
        return last.observation_ids + last.action_ids + reply

    def locate_rewards(self, step: Step, result: StepResult) -> list[tuple[int, float]]:
        """Compute `Step.token_rewards`, the rewards of action tokens.

        A call's reward goes to the call's last token, and other rewards to the turn's last token.
        On the step that ends the episode, only call rewards are included here. The rest counts as
        outcome.
        """

        def length(token: int) -> int:
            return len(self.chat.turn_text(step.action_ids[: token + 1]))

        last = len(step.action_ids) - 1
        rewards = result.call_rewards or ([] if result.done else [(math.inf, result.reward)])
        return [
            (bisect_left(range(last), end, key=length), finite(r))
            for end, r in rewards
            if r and last >= 0
        ]

    def on_action(self, action: Action) -> None:
        """Hook: called with a turn of the agent, before the environment processes it."""

    def on_result(self, result: StepResult) -> None:
        """Hook: called with the environment's result of a turn."""


class EnvironmentFailure(Exception):
    """An environment's exception. The episode ends with StopReason.ERROR and this text."""


def finite(reward: float) -> float:
    """Return `reward` as a float. Raise ValueError if it is not finite or too large: it would
    corrupt the weights."""
    if not math.isfinite(reward):
        raise ValueError(f"a reward must be a finite number, and the environment returned {reward}")
    if abs(reward) > MAX_REWARD:
        raise ValueError(
            f"a reward must lie between {-MAX_REWARD:g} and {MAX_REWARD:g}, and the environment "
            f"returned {reward:g}"
        )
    return float(reward)


def count_calls(steps: list[Step]) -> dict[str, int]:
    """Count all tool calls, the agent's invalid ones, and those that a tool failed."""
    errors = [call["error"] for step in steps for call in step.info.get("tool_calls", ())]
    invalid = sum(error in INVALID for error in errors)
    failed = sum(error is not None for error in errors) - invalid
    return {"tool_calls": len(errors), "invalid_calls": invalid, "failed_calls": failed}


def derive_seed(*parts: int | str) -> int:
    """Derive a 64-bit seed from a path such as (run seed, step, group, sample, turn)."""
    return int.from_bytes(
        hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest(), "little"
    )


def _error_text(failure: Exception) -> str:
    """Describe a failure; exceptions other than our own need the name of their class."""
    return (
        str(failure)
        if isinstance(failure, AgentR1Error)
        else f"{type(failure).__name__}: {failure}"
    )
