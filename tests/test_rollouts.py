"""The episodes of a step: the greedy ones of remax, and what a further round asks."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import question_row
from hypothesis import given, settings
from hypothesis import strategies as st
from letters import letters_run

from agent_r1.config.settings import RolloutConfig
from agent_r1.core import Sampling, Step, StopReason, Trajectory
from agent_r1.model.sampler import SamplerStats
from agent_r1.rollout.episode import AgentFlowBase, Task
from agent_r1.rollout.rollouts import GREEDY, Greedy, Rollouts, run_episodes, tasks_of_step
from agent_r1.rollout.training_rows import collate, trajectory_rows
from agent_r1_recipes.credit.estimators import BASELINE


class Recorded(Rollouts):
    """Two prompts of two samples; the greedy ones are given."""

    def __init__(self, greedy: list[Trajectory]):
        self.greedy, self.policy = greedy, LocalPolicyStats()

    def episodes(self, step, again=0, prompts=None, *, samples=None, greedy=False):
        if greedy:
            assert samples == 1
            return self.greedy
        return [
            Trajectory([Step([1], [2], [-1.0])], group, StopReason.ANSWERED, {}) for group in "aabb"
        ]


class LocalPolicyStats:
    stats = SamplerStats()


def test_the_greedy_baseline_is_what_the_episode_was_paid_less_its_penalty():
    """Right and malformed: EM 1, and a reward of 0.8, which is what the samples are paid by. The
    other was broken off."""
    greedy = [
        Trajectory(
            [Step([1], [2], [-1.0], 0.8)],
            "a",
            StopReason.ANSWERED,
            {},
            metrics={"em": 1.0},
            score_name="em",
        ),
        Trajectory([Step([1], [2], [-1.0], 0.5)], "b", StopReason.TIME_OUT, {}),
    ]
    assert greedy[0].score == 1.0
    played = Greedy(Recorded(greedy)).play(1)
    assert [t.extra[GREEDY] for t in played.chosen] == pytest.approx(
        [0.8, 0.8, np.nan, np.nan], nan_ok=True
    )
    assert greedy[0] not in played.played
    rows = [row for n, t in enumerate(played.chosen) for row in trajectory_rows(t, n, [BASELINE])]
    baseline_B = collate(rows, columns=[BASELINE]).columns["baseline_B"]
    torch.testing.assert_close(baseline_B, torch.tensor([0.8, 0.8, np.nan, np.nan]), equal_nan=True)


def test_the_entropy_is_that_of_sampled_episodes(chat, monkeypatch):
    """remax also plays greedy episodes, and from one start model both algorithms sample the same
    ones."""
    remax, rloo = (
        letters_run(chat, monkeypatch, name, "trainer.steps=1").metrics[0]
        for name in ("remax", "rloo")
    )
    assert (
        remax["actor/entropy"] == rloo["actor/entropy"]
        and remax["rollout/decode_tokens"] > rloo["rollout/decode_tokens"]
    )


@settings(max_examples=30, deadline=None)
@given(st.integers(4, 40), st.integers(1, 30), st.integers(0, 3))
def test_the_rounds_of_a_step_ask_different_questions_under_different_names(n, step, seed):
    rollout = RolloutConfig(prompts_per_step=4, samples_per_prompt=2)
    questions = [question_row(f"Say {i}.") for i in range(n)]
    rounds = [tasks_of_step(questions, step, rollout, seed, again) for again in range(4)]
    first, *later = [[task.row["prompt"][0]["content"] for task in tasks] for tasks in rounds]
    asked = [text for texts in later for text in texts[::2]]
    assert len(set(asked)) == len(asked) == min(12, n - len(set(first))) and not set(asked) & set(
        first
    )
    tasks = sum(rounds, [])
    groups = {task.group_id: task.row["prompt"][0]["content"] for task in tasks}
    assert len(groups) == len(tasks) // 2 and all(
        groups[t.group_id] == t.row["prompt"][0]["content"] for t in tasks
    )
    assert len({task.session for task in tasks}) == len({task.seed for task in tasks}) == len(tasks)
    assert rounds == [tasks_of_step(questions, step, rollout, seed, again) for again in range(4)]


class Own(AgentFlowBase):
    """An episode of a question that says what its tool does."""

    def __init__(self):
        pass

    async def run(self, task, sampling):
        if task.row["does"] == "cancels itself":
            asyncio.current_task().cancel()
        if task.row["does"] == "raises":
            await asyncio.sleep(0.01)
            raise ValueError("a bug of ours")
        await asyncio.sleep(0.02)
        return Trajectory([], task.group_id, StopReason.ANSWERED, task.row)


def own_episodes(*deeds):
    tasks = [Task({"does": deed}, str(n), f"s{n}") for n, deed in enumerate(deeds)]
    return run_episodes(Own(), tasks, Sampling(9))


def test_a_tool_that_cancels_its_own_episode_costs_this_episode():
    played = asyncio.run(own_episodes("plays", "cancels itself", "plays", "plays"))
    assert [t.stop_reason.value for t in played] == ["answered", "error", "answered", "answered"]
    assert "cancelled by its own code" in played[1].error


def test_a_bug_and_a_cancelled_run_end_all_episodes():
    with pytest.raises(ValueError, match="a bug of ours"):
        asyncio.run(own_episodes("plays", "cancels itself", "raises", "plays"))

    async def stopped():
        run = asyncio.ensure_future(own_episodes("plays", "plays"))
        await asyncio.sleep(0.005)
        run.cancel()
        await run

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(stopped())


def test_ctrl_c_ends_a_run_whose_tool_swallows_cancellation():
    code = """
import asyncio, sys, time
from agent_r1.core import Sampling, StopReason, Trajectory
from agent_r1.rollout.episode import AgentFlowBase, Task
from agent_r1.rollout.rollouts import run_episodes
from agent_r1.tool import BaseTool, ToolCall, call_tool
class Deaf(BaseTool):
    name, description, parameters = "deaf", "Hears nothing.", {"type": "object"}
    async def execute(self, args):
        print("running", flush=True)
        try:
            await asyncio.sleep(60)
        except BaseException:
            return "I go on"
class Flow(AgentFlowBase):
    def __init__(self): pass
    async def run(self, task, sampling):
        for _ in range(100):
            await call_tool({"deaf": Deaf()}, ToolCall("deaf"), 100, 100)
asyncio.run(run_episodes(Flow(), [Task({}, "0", "s0")], Sampling(9)))
"""
    run = subprocess.Popen(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert run.stdout.readline() == "running\n"
    run.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in run.communicate(timeout=60)[1] and run.returncode != 0
