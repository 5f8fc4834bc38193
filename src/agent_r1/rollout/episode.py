"""Run episodes between a policy and an environment: in training, evaluation, chat and verl.

In: a row (one question). Out: a `Trajectory`. Next: `model/sampling.py` chooses the tokens of an
action, and `training_rows.py` turns the trajectory into training sequences.

Episodes are coroutines. Each waits only for its own tokens and tools, so a hundred of them
(`rollouts.py`) keep one sampler busy.

    AgentFlowBase   full control: any coroutine that returns a Trajectory (branching, two policies)
    AgentEnvLoop    the generic flow: observe -> act -> step, until done

To watch an episode live, override `on_action` and `on_result` of `AgentEnvLoop` and set the
policy's `on_token`.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import hashlib
import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

from agent_r1.chat.format import ChatFormat
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

MAX_REWARD = 1e6
"""Largest absolute reward of a step or outcome.

Sums and squares of rewards then stay far below float32's maximum.
"""


@dataclass(frozen=True)
class Task:
    """One episode to run."""

    row: Row
    group_id: str
    """Equal for samples of one prompt."""
    session: str
    """Unique among concurrent episodes; names the episode's cache in the policy."""
    seed: int | None = None
    sample: int = 0
    """See `Trajectory.sample`."""


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
    """Run a task and return its trajectory.

    Subclass it if `reset` and `step` cannot express your agent.
    """

    def __init__(
        self,
        policy: Policy,
        chat: ChatFormat,
        limits: Limits,
        make_env: Callable[[Row], AgentEnv] | None = None,
    ):
        """`make_env` makes the environment of a row; a user-defined flow may not need it."""
        self.policy = policy
        self.chat = chat
        self.limits = limits
        self.make_env = make_env

    async def play(self, task: Task, sampling: Sampling) -> Trajectory:
        """Run one episode on a copy of its row. Every caller starts an episode here."""
        # All samples of a question have one row, and a class may keep and change a list of it.
        # Without a copy, the next sample would find an empty bag.
        own_task = replace(task, row=copy.deepcopy(task.row))
        trajectory = await self.run(own_task, sampling)
        trajectory.row = task.row  # reports and hashes compare questions, as they were asked
        # A user-defined flow need not know of samples.
        trajectory.sample = task.sample
        return trajectory

    @abstractmethod
    async def run(self, task: Task, sampling: Sampling) -> Trajectory:
        """Run one episode. Let the policy's exceptions propagate; record an environment's failure
        in the trajectory. The row is this episode's own."""


class AgentEnvLoop(AgentFlowBase):
    """The generic flow between a policy and an `AgentEnv`."""

    async def run(self, task: Task, sampling: Sampling) -> Trajectory:
        env = self.make_env(task.row)
        try:
            return await self._run_in(env, task, sampling)
        finally:
            # Also after Ctrl-C: an environment may hold a browser or a sandbox.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.limits.timeout_s):
                    await maybe_await(env.close())

    async def _run_in(self, env: AgentEnv, task: Task, sampling: Sampling) -> Trajectory:
        steps: list[Step] = []
        error: str | None = None
        try:
            async with asyncio.timeout(self.limits.timeout_s) as deadline:
                stop = await self._converse(env, task, sampling, steps)
        except TimeoutError:
            # The policy's own timeout, on the way to its model, is not the episode's: pass it on.
            if not deadline.expired():
                raise
            stop = StopReason.TIME_OUT
            error = f"episode exceeded {self.limits.timeout_s:g} s (env.episode_timeout_s)"
        except EnvironmentFailure as failure:
            stop = StopReason.ERROR
            error = str(failure)
        finally:
            self.policy.release(task.session)
        outcome, failed = await self._ask_outcome(env, stop)
        if failed:
            stop = StopReason.ERROR
            # What stopped the episode first is the better explanation, so it is kept.
            error = error or failed
        if steps:
            # Only actions get credit, so the outcome goes to the last one, even if a tool result
            # came after it. On a result's token it would be masked out, and running out of turns
            # would cost nothing (lesson 4).
            steps[-1].reward += outcome.reward
            steps[-1].done = True
        return Trajectory(
            steps,
            task.group_id,
            stop,
            task.row,
            reward_parts=outcome.parts,
            metrics=outcome.metrics | count_calls(steps),
            error=error,
            score_name=outcome.score_name,
            truncated=outcome.truncated,
        )

    async def _ask_outcome(self, env: AgentEnv, stop: StopReason) -> tuple[Outcome, str | None]:
        """Ask once for the outcome. Return an empty one and the reason if the environment fails.

        It may fail because `reset` did, so that it has no row to score.
        """
        # A fresh limit, so that an episode that timed out also gets its outcome.
        deadline = asyncio.timeout(self.limits.timeout_s)
        try:
            async with deadline:
                outcome = await maybe_await(env.outcome(stop))
            check_reward(outcome.reward)
        except Exception as failure:
            late = f"no result after {self.limits.timeout_s:g} s (env.episode_timeout_s)"
            reason = late if deadline.expired() else _error_text(failure)
            return Outcome(), f"outcome: {reason}"
        return outcome, None

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
            # The prompt and everything so far count: 71 tokens in the second turn of lesson 2.
            room = self.limits.max_context - len(ids)
            if room < 1:
                return StopReason.CONTEXT_OVERFLOW
            max_tokens = min(self.limits.max_tokens_per_turn, room)
            # Each turn has its own seed: with the episode's, every turn would draw the same noise.
            seed = None if task.seed is None else derive_seed(task.seed, len(steps))
            turn = replace(sampling, max_tokens=max_tokens, seed=seed)
            generation = await self.policy.generate(ids, turn, task.session)
            # Stop here: training on NaN would make every weight NaN in one step.
            if not all(math.isfinite(logprob) for logprob in generation.logprobs):
                raise AgentR1Error(
                    "the model's log-probabilities are not finite: its weights are corrupt. Use an "
                    "earlier checkpoint, or train again with a smaller learning rate",
                    code="broken_weights",
                )
            step = Step(
                ids,
                generation.token_ids,
                generation.logprobs,
                finish_reason=generation.finish_reason,
                extra=observation.extra | {"state": number_of_state(observation)},
            )
            steps.append(step)
            # The only place where sampled ids become text: the environment reads it, and it is
            # never encoded again. Encoding may give other ids: a toy tokenizer turns the sampled
            # "a", "b" into one token "ab", which the policy never chose (lesson 2).
            action = Action(self.chat.turn_text(generation.token_ids), generation.finish_reason)
            self.on_action(action)
            try:
                result = await env.step(action)
                step.reward = check_reward(result.reward)
                step.info = result.info
                step.token_rewards = self.locate_rewards(step, result)
            except Exception as failure:
                raise EnvironmentFailure(_error_text(failure)) from failure
            self.on_result(result)
            if result.done:
                # The environment sees a turn that was cut off, and not by which limit. If the
                # context had less room than a turn may take, it was the context.
                small_room = room < self.limits.max_tokens_per_turn
                if generation.finish_reason == "length" and small_room:
                    return StopReason.CONTEXT_OVERFLOW
                return result.stop_reason
            if result.observation is None:
                raise EnvironmentFailure("step returned no observation, and the episode goes on")
            observation = result.observation
            if not observation.rewrite:
                # The template that showed the tools also writes their results: Hermes-3 has another
                # one for conversations without tools.
                observation = replace(observation, tools=tools)

    def observe(self, steps: list[Step], observation: Observation) -> list[int]:
        """Return the prompt ids of the next turn. Sampled ids are carried over unchanged."""
        if not steps or observation.rewrite:
            # A rewritten context starts a new training row: see the row rule in training_rows.py.
            return self.chat.prompt_ids(observation.messages, observation.tools)
        last = steps[-1]
        # A turn that was cut off lacks its end token. The format adds it, as part of the
        # observation: the policy did not sample it, so its mask is 0 (lesson 3).
        reply = self.chat.reply_ids(last.action_ids, observation)
        return last.observation_ids + last.action_ids + reply

    def locate_rewards(self, step: Step, result: StepResult) -> list[tuple[int, float]]:
        """Compute `Step.token_rewards`, the rewards of action tokens.

        A call's reward goes to the call's last token, and other rewards to the turn's last token.
        On the step that ends the episode, only call rewards are included here. The rest counts as
        outcome.
        """
        if not step.action_ids:
            return []
        last = len(step.action_ids) - 1
        rewards: list[tuple[int, float]] = []
        if result.call_rewards:
            for end, reward in result.call_rewards:
                if reward:
                    rewards.append((self._token_at(step.action_ids, end), check_reward(reward)))
        elif result.reward and not result.done:
            rewards.append((last, check_reward(result.reward)))
        return rewards

    def _token_at(self, action_ids: list[int], end: int) -> int:
        """Return the first token at which the turn's text has `end` characters.

        An environment read text, so it tells where a call ends in characters, and credit needs a
        token. No table maps one to the other, because a token may be part of a character.
        """

        def text_length(token: int) -> int:
            return len(self.chat.turn_text(action_ids[: token + 1]))

        # The text grows with its tokens, so bisection finds the token: a turn of 64 tokens needs 6
        # decoded prefixes, not 64.
        return bisect_left(range(len(action_ids) - 1), end, key=text_length)

    def on_action(self, action: Action) -> None:
        """Process a turn of the agent before the environment does (a hook)."""

    def on_result(self, result: StepResult) -> None:
        """Process the environment's result of a turn (a hook)."""


class EnvironmentFailure(Exception):
    """An environment's exception. The episode ends with StopReason.ERROR and this text."""


def check_reward(reward: float) -> float:
    """Return `reward` as a float. Raise ValueError if it would corrupt the weights.

    It would if it is not finite, or too large."""
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
    # Three numbers, because each has another remedy: teach the agent the format, or fix the tool.
    errors: list[str | None] = []
    for step in steps:
        errors += [call["error"] for call in step.info.get("tool_calls", ())]
    invalid_calls = sum(error in INVALID for error in errors)
    failed_calls = sum(error is not None for error in errors) - invalid_calls
    return {"tool_calls": len(errors), "invalid_calls": invalid_calls, "failed_calls": failed_calls}


def derive_seed(*parts: int | str) -> int:
    """Derive a 64-bit seed from a path such as (run seed, step, group, sample, turn)."""
    # Not `hash()`, which differs from process to process. Not a sum, which would give step 1, group
    # 2 the noise of step 2, group 1.
    path = "/".join(str(part) for part in parts)
    digest = hashlib.blake2b(path.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def number_of_state(observation: Observation) -> int:
    """Return an int64 that equal states share, for estimators that compare them (gigpo)."""
    state = observation.extra.get("state")  # 0 is a state
    if state is None:
        state = str(observation.messages)
    # Half of a 64-bit hash fits into an int64.
    return derive_seed(state) >> 1


def _error_text(failure: Exception) -> str:
    """Describe a failure; exceptions other than our own need the name of their class."""
    if isinstance(failure, AgentR1Error):
        return str(failure)
    return f"{type(failure).__name__}: {failure}"
