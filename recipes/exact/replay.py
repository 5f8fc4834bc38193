"""Play an episode with known turns, up to where it branches.

In: known turns. Out: the loop's `Trajectory`, or the next prompt, at which `Replay` stops the loop.
The loop is that of training (`AgentEnvLoop`, or a flow of the user), so prompts, limits, rewards
and stop reasons are its own. Next: `tree.py` branches at each prompt.

An episode cannot be copied while it runs, so each branch plays its turns again. That costs the
environment's time, and it is also the check that enumeration requires: equal turns have to give
equal prompts.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from agent_r1 import (
    AgentFlowBase,
    ConfigError,
    Generation,
    LocalPolicy,
    Policy,
    Row,
    Sampling,
    Task,
    Trajectory,
)


@dataclass(frozen=True)
class Turn:
    """A turn that is known: what the agent read, and what it sampled."""

    prompt_ids: list[int]
    generation: Generation


@dataclass(frozen=True)
class Prompt:
    """What the agent reads before an unknown turn, and the limits of that turn."""

    ids: list[int]
    sampling: Sampling


@dataclass
class Script:
    """The known turns of one episode, and how far the episode is."""

    turns: Sequence[Turn]
    opening: Generation | None = None
    """The beginning of the turn after them, if the episode is to go on by sampling."""
    position: int = 0


class Stopped(Exception):
    """The episode has no further known turn. `prompt` is what the agent reads next."""

    def __init__(self, prompt: Prompt):
        super().__init__()
        self.prompt = prompt


@dataclass
class Replay(Policy):
    """`Policy` that plays known turns, then goes on with `sampler`, or stops the episode."""

    sampler: LocalPolicy | None = None
    scripts: dict[str, Script] = field(default_factory=dict)

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, session: str | None = None
    ) -> Generation:
        """Return the next known turn. Raise ConfigError if its prompt is not the recorded one."""
        script = self.scripts.get(session or "")
        if script is None:
            raise ConfigError(
                "the flow asks the policy in a session of its own, so its turns cannot be "
                "replayed; enumerate with the generic loop (unset rollout.flow)",
                code="unfit_flow",
            )
        number = script.position
        script.position += 1
        if number < len(script.turns):
            turn = script.turns[number]
            if turn.prompt_ids != prompt_ids:
                raise ConfigError(
                    f"equal turns led to two prompts before turn {number + 1}: the environment's "
                    "replies are not a function of the history, so its plays cannot be "
                    "enumerated; give it a fixed seed, or evaluate it by samples",
                    code="random_environment",
                )
            return turn.generation
        if self.sampler is None:
            raise Stopped(Prompt(list(prompt_ids), sampling))
        if number == len(script.turns) and script.opening is not None:
            return await self._finish(prompt_ids, sampling, session, script.opening)
        return await self.sampler.generate(prompt_ids, sampling, session)

    async def _finish(
        self, prompt_ids: list[int], sampling: Sampling, session: str | None, opening: Generation
    ) -> Generation:
        """Sample the rest of a turn that has opening."""
        assert self.sampler is not None, "without one, `generate` stops the episode"
        ids = opening.token_ids
        reason = finish_reason(ids, sampling, self.sampler.stop_ids)
        if reason is not None:
            return replace(opening, finish_reason=reason)
        ends = sampling.is_turn_end
        rest_sampling = replace(
            sampling,
            max_tokens=sampling.max_tokens - len(ids),
            is_turn_end=None if ends is None else lambda more: ends(ids + more),
        )
        rest = await self.sampler.generate(prompt_ids + ids, rest_sampling, session)
        return Generation(
            ids + rest.token_ids, opening.logprobs + rest.logprobs, rest.finish_reason
        )

    def release(self, session: str) -> None:
        """Forget the episode."""
        self.scripts.pop(session, None)
        if self.sampler is not None:
            self.sampler.release(session)


def finish_reason(ids: list[int], sampling: Sampling, stop_ids: frozenset[int]) -> str | None:
    """Return why a turn ends after these sampled ids; None: it goes on."""
    if ids[-1] in stop_ids or (sampling.is_turn_end is not None and sampling.is_turn_end(ids)):
        return "stop"
    return "length" if len(ids) == sampling.max_tokens else None


@dataclass
class Player:
    """Plays episodes of known turns, many at a time."""

    flow: AgentFlowBase
    """Its policy is a `Replay`."""
    temperature: float
    max_tokens: int
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def play(
        self, jobs: Sequence[tuple[Row, str, Script]], seeds: Sequence[int] | None = None
    ) -> list[Trajectory | Prompt]:
        """Play each script in the environment of its row; the text is the question's name.

        Raises ConfigError if an environment fails, because a failure has no reward.
        """

        async def play_all() -> list[Trajectory | Prompt]:
            tasks = []
            for place, (row, question, script) in enumerate(jobs):
                seed = None if seeds is None else seeds[place]
                tasks.append(self._play_one(row, question, script, seed))
            return await asyncio.gather(*tasks)

        return asyncio.run(play_all())

    def play_whole(
        self, jobs: Sequence[tuple[Row, str, Script]], seeds: Sequence[int] | None = None
    ) -> list[Trajectory]:
        """Play each script to the end of its episode. The policy has a sampler."""
        trajectories: list[Trajectory] = []
        for result in self.play(jobs, seeds):
            assert not isinstance(result, Prompt), "only a policy without a sampler stops"
            trajectories.append(result)
        return trajectories

    async def _play_one(
        self, row: Row, question: str, script: Script, seed: int | None
    ) -> Trajectory | Prompt:
        replay = self.flow.policy
        session = f"replay-{next(self._numbers)}"
        replay.scripts[session] = script
        sampling = Sampling(self.max_tokens, self.temperature)
        try:
            trajectory = await self.flow.play(Task(row, question, session, seed), sampling)
        except Stopped as stop:
            return stop.prompt
        finally:
            replay.release(session)
        if trajectory.stop_reason.failed:
            raise ConfigError(
                f"the environment failed in an episode ({trajectory.error}), and a failure has no "
                "reward to add up; fix the environment or its tools first",
                code="environment_failed",
            )
        return trajectory
