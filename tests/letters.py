"""The smallest RL problem: an environment in which a random model learns within seconds, and runs
of the loop in it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from conftest import TrainingRecord, micro_config, question_row, random_model, run_training_loop

from agent_r1.chat.format import ChatFormat
from agent_r1.config import tables
from agent_r1.core import Action, AgentEnv, Observation, Row, StepResult, StopReason
from agent_r1.evaluation.records import training_records, write_rollouts
from agent_r1.rollout.training_rows import Batch


class LetterEnv(AgentEnv):
    """The smallest RL problem: two turns, each pays 0.5 if it begins with a letter from a to m.

    Registered as an environment by tests of the loop, where a random model is to learn something
    within seconds.
    """

    def __init__(self, tools, config):
        self.turns = 0

    def reset(self, row: Row) -> Observation:
        return Observation(list(row["prompt"]))

    async def step(self, action: Action) -> StepResult:
        self.turns += 1
        reward = 0.5 * ("a" <= action.text[:1] <= "m")
        if self.turns == 2:
            return StepResult(None, reward, done=True, stop_reason=StopReason.ANSWERED)
        return StepResult(Observation([{"role": "tool", "content": "again"}]), reward)


class SilentEnv(LetterEnv):
    """Pays nothing, to anybody."""

    async def step(self, action):
        return dataclasses.replace(await super().step(action), reward=0.0)


LETTERS = [
    "rollout.prompts_per_step=2",
    "rollout.samples_per_prompt=8",
    "rollout.max_tokens_per_turn=2",
    "actor.lr=0.01",
    "critic.lr=0.005",
    "actor.minibatches=4",
    "trainer.steps=18",
]


def letters_run(
    chat, monkeypatch, algorithm, *overrides, env=LetterEnv, model=None, count=4, **options
) -> TrainingRecord:
    monkeypatch.setitem(tables.entries("env"), "letters", {"code": env})
    questions = [question_row(f"Say {i}.", agent_name="letters") for i in range(count)]
    model = model or random_model(len(chat.tokenizer), seed=2)
    return run_training_loop(
        micro_config(algorithm, *LETTERS, *overrides), model, chat, {}, questions, **options
    )


def write_letters(path: Path, batch: Batch, chat: ChatFormat, step: int) -> None:
    """Write the rollouts file of one step."""
    write_rollouts(path, training_records(batch, chat, step))
