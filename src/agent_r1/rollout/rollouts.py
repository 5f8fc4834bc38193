"""Run many episodes at once, and stop if most of them fail.

In: tasks, or the number of a training step. Out: trajectories, or `Played`: the episodes for the
batch and the metrics.
Next: `training_rows.py`. `Rollouts` plays each prompt several times; a wrapper has an inner
`Rollouts` and changes its result (`Greedy`, and `Refilled` in recipes/credit).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from agent_r1.config.settings import RolloutConfig
from agent_r1.core import INVALID, Row, Sampling, StopReason, Trajectory
from agent_r1.ground.errors import AgentR1Error, LostConnection
from agent_r1.model.sampler import LocalPolicy
from agent_r1.rollout.episode import AgentFlowBase, Task, derive_seed

MAX_LOST_SHARE = 0.05
"""Share of an evaluation's episodes that may lose their connection.

They count as wrong, so this bounds the error.
"""


async def run_episodes(
    flow: AgentFlowBase,
    tasks: Iterable[Task],
    sampling: Sampling,
    on_done: Callable[[Trajectory], None] | None = None,
    max_concurrent: int | None = None,
) -> list[Trajectory]:
    """Run tasks concurrently, and return their trajectories in the same order.

    At most `max_concurrent` run at a time. This keeps thousands of episodes from reaching their
    deadline while they wait for the policy.

    A lost connection to a model server ends one episode; any other exception of a policy is raised
    unchanged. Raises AgentR1Error if most episodes failed through no fault of the agent.
    """
    tasks = list(tasks)
    connection_errors = []
    run = asyncio.current_task()
    is_ending = False
    gate = asyncio.Semaphore(max_concurrent) if max_concurrent else contextlib.nullcontext()

    async def play(task: Task) -> Trajectory:
        try:
            return await flow.play(task, sampling)
        except asyncio.CancelledError:
            # A tool or an environment may cancel its own episode. Only if another one failed or the
            # run is stopped, the run ends.
            if is_ending or run.cancelling():
                raise
            cause = "the episode was cancelled by its own code, such as a tool"
        except LostConnection as error:
            connection_errors.append(str(error))
            refuse_lost(connection_errors, len(tasks))
            cause = str(error)
        return Trajectory(
            [], task.group_id, StopReason.ERROR, task.row, error=cause, sample=task.sample
        )

    async def one(task: Task) -> Trajectory:
        nonlocal is_ending
        try:
            async with gate:
                trajectory = await play(task)
        except BaseException:
            is_ending = True
            raise
        if on_done is not None:
            on_done(trajectory)
        return trajectory

    try:
        async with asyncio.TaskGroup() as group:  # cancels the others if one raises
            jobs = [group.create_task(one(task)) for task in tasks]
    except (
        ExceptionGroup
    ) as failures:  # the first cause is enough, and the command line expects a plain error
        raise failures.exceptions[0] from None
    trajectories = [job.result() for job in jobs]
    refuse_failures(trajectories)
    return trajectories


@dataclass
class Played:
    """The episodes of a step."""

    chosen: list[Trajectory]  # for learning
    played: list[Trajectory]  # for metrics
    metrics: dict[str, float] = field(default_factory=dict)


class Rollouts:
    """Episodes of a step: each prompt `rollout.samples_per_prompt` times."""

    def __init__(
        self,
        flow: AgentFlowBase,
        policy: LocalPolicy,
        tasks: Callable[[int, int], list[Task]],
        rollout: RolloutConfig,
    ):
        """`tasks(step, again)` lists a step's episodes; `again` counts rounds of new prompts.

        The episodes come prompt by prompt.
        """
        self.flow = flow
        self.policy = policy
        self.tasks = tasks
        self.rollout = rollout

    def play(self, step: int) -> Played:
        batch_episodes, all_episodes, metrics = self.choose(step)
        return Played(batch_episodes, all_episodes, metrics | self.policy.stats.mean_entropy())

    def choose(self, step: int) -> tuple[list[Trajectory], list[Trajectory], dict[str, float]]:
        """Return the episodes to learn from, all that were played, and measurements.

        By default, all are learned from.
        """
        episodes = self.episodes(step)
        return episodes, episodes, {}

    def episodes(
        self,
        step: int,
        again: int = 0,
        prompts: int | None = None,
        *,
        samples: int | None = None,
        greedy: bool = False,
    ) -> list[Trajectory]:
        """Play the first `prompts` of a round; only the first `samples` of each."""
        r = self.rollout
        G = r.samples_per_prompt
        tasks = self.tasks(step, again)
        chosen_tasks: list[Task] = []
        for i, task in enumerate(tasks):
            prompt, sample = divmod(i, G)
            if prompt < (prompts or len(tasks)) and sample < (samples or G):
                chosen_tasks.append(task)
        sampling = Sampling(r.max_tokens_per_turn, 0.0 if greedy else r.temperature)
        return asyncio.run(
            run_episodes(
                self.flow, chosen_tasks, sampling, max_concurrent=r.max_concurrent_episodes
            )
        )


def tasks_of_step(
    questions: list[Row], step: int, rollout: RolloutConfig, seed: int, again: int = 0
) -> list[Task]:
    """List the episodes of a step, prompt by prompt.

    `again` counts the rounds that replace groups (recipes/credit/dynamic_sampling.py). An episode's
    randomness depends only on (seed, step, prompt, sample), so a resumed run repeats it.
    """
    n = len(questions)
    per_step = rollout.prompts_per_step
    places = _places(n, step, per_step, seed)
    if again:  # asking a question twice in a step would make two groups with two baselines
        places_before = set(places)
        order = epoch_order(n, step, derive_seed(seed, "again"))
        other_places = [place for place in order if place not in places_before]
        places = other_places[(again - 1) * per_step : again * per_step]
    tasks: list[Task] = []
    for p, place in enumerate(places, start=again * per_step):
        for g in range(rollout.samples_per_prompt):
            noise_seed = derive_seed(seed, "rollout", step, p, g)
            tasks.append(Task(questions[place], f"{step}-{p}", f"{step}-{p}-{g}", noise_seed))
    return tasks


def prompts_of_step(questions: list[Row], step: int, per_step: int, seed: int) -> list[Row]:
    """Return the questions of one step. Each epoch is shuffled anew; a step may span two epochs."""
    return [questions[place] for place in _places(len(questions), step, per_step, seed)]


def _places(n: int, step: int, per_step: int, seed: int) -> list[int]:
    positions = (divmod(position, n) for position in range((step - 1) * per_step, step * per_step))
    return [epoch_order(n, epoch, seed)[place] for epoch, place in positions]


@functools.lru_cache(maxsize=4)
def epoch_order(n: int, epoch: int, seed: int) -> list[int]:
    g = torch.Generator().manual_seed(derive_seed(seed, "epoch", epoch) % 2**63)
    return torch.randperm(n, generator=g).tolist()


GREEDY = "greedy_score"
"""Key of `Trajectory.extra`: the reward of the prompt's greedy episode; NaN if it failed."""


class Greedy(Rollouts):
    """Rollouts with an extra greedy episode per prompt, for comparison only."""

    def __init__(self, inner: Rollouts):
        self.inner = inner
        self.episodes = inner.episodes

    def play(self, step: int) -> Played:
        episodes = self.inner.play(step)
        scores = {t.group_id: greedy_score(t) for t in self.episodes(step, samples=1, greedy=True)}
        for trajectory in episodes.chosen:
            trajectory.extra[GREEDY] = scores[trajectory.group_id]
        return episodes


def greedy_score(greedy: Trajectory) -> float:
    """Return the reward of a greedy episode; NaN if it failed."""
    return float("nan") if greedy.stop_reason.failed else greedy.reward


# ---------------------------------------------------------------- failures that are not the agent's


def refuse_failures(trajectories: list[Trajectory]) -> None:
    """Raise AgentR1Error if more than half of the episodes or tool calls failed.

    Then a tool, a service or a deadline is wrong, and the remaining episodes are a biased sample.
    """
    failed_episodes = [t for t in trajectories if t.stop_reason.failed]
    if len(failed_episodes) * 2 > len(trajectories):
        cause = failed_episodes[0].error or failed_episodes[0].stop_reason
        raise AgentR1Error(
            f"{len(failed_episodes)} of {len(trajectories)} episodes failed, the first: {cause}",
            code="episodes_failed",
        )
    calls = sum(t.metrics.get("tool_calls", 0) for t in trajectories)
    failed_calls = sum(t.metrics.get("failed_calls", 0) for t in trajectories)
    examples = [first_failed_call(t) for t in trajectories]
    refuse_broken_tools(calls, failed_calls, next((text for text in examples if text), ""))


def refuse_lost(causes: list[str], episodes: int) -> None:
    """Raise AgentR1Error if more than MAX_LOST_SHARE of the episodes got no answer."""
    if len(causes) > max(1, MAX_LOST_SHARE * episodes):
        raise AgentR1Error(
            f"{len(causes)} of {episodes} episodes got no answer of the model server, the first: "
            f"{causes[0]}",
            code="server_gone",
        )


def refuse_broken_tools(calls: float, failed_calls: float, example: str) -> None:
    """Raise AgentR1Error if most of many tool calls failed through no fault of the agent."""
    if failed_calls > max(4, calls / 2):  # a few may always fail
        raise AgentR1Error(
            f"{failed_calls:.0f} of {calls:.0f} tool calls failed, the first with {example!r}; fix "
            "the tool",
            code="tools_failed",
        )


def first_failed_call(trajectory: Trajectory) -> str | None:
    """Return the message of the first tool failure, or None.

    An invalid call is the agent's fault and not counted.
    """
    for step in trajectory.steps:
        for call in step.info.get("tool_calls", ()):
            if call["error"] and call["error"] not in INVALID:
                place = f" ({call['at']})" if call.get("at") else ""
                return call["content"] + place
    return None
