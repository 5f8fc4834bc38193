"""Environments that forget: what stands in the context, which rows come of it, and who is
credited."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest
from building import demonstrated, row_of, trust
from conftest import ScriptedPolicy, call, make_env_loop, question_row
from runs import ROOT

from agent_r1 import (
    Action,
    AgentEnv,
    ConfigError,
    Observation,
    Sampling,
    StepResult,
    Task,
    load_config,
    make_env,
    run_episodes,
    trajectory_rows,
)
from agent_r1_recipes.long_context.context import ASK, NOTES_PREFIX, Summary
from agent_r1_recipes.long_context.settings import ContextSettings
from agent_r1_recipes.tinyquest.demonstrator import demonstrate
from agent_r1_recipes.tinyquest.quests import questions


class Counter:
    """Counts to five; how far it is, only the results say."""

    goal = 5

    def reset(self, **row) -> None:
        self.count, self.done = 0, False

    def add(self) -> str:
        """Add one."""
        self.count += 1
        self.done = self.count == self.goal
        return f"it is {self.count}"

    def get_reward(self) -> float:
        return float(self.done)


class CounterToThree(Counter):
    """The example of the README."""

    goal = 3


COUNTER, TO_THREE = f"{__file__}:Counter", f"{__file__}:CounterToThree"


def play(chat, script, name=COUNTER, **context):
    config = ContextSettings(name=name, max_turns=9, **context)
    trust(name)
    loop = make_env_loop(ScriptedPolicy(chat, script), lambda row: make_env(row, {}, config))
    [played] = asyncio.run(
        run_episodes(
            loop, [Task(question_row("Count.", (), agent_name=name), "g", "s")], Sampling(200)
        )
    )
    return played


def test_a_window_shows_the_last_results_and_every_turn_behind_it_has_a_row_of_its_own(chat):
    played = play(chat, [call("add")] * 5, context="window", window_results=2)
    seen = [chat.decode(step.observation_ids) for step in played.steps]
    said = [[n for n in range(1, 6) if f"it is {n}" in text] for text in seen]
    assert said == [[], [1], [1, 2], [2, 3], [3, 4]]
    assert all(text.count("Count.") == 1 and "tools: add()" in text for text in seen)
    rows = trajectory_rows(played, 0)
    assert [sorted({step for step in row.step_ids if step >= 0}) for row in rows] == [
        [0, 1, 2],
        [3],
        [4],
    ]
    # In a rewritten context nothing but the new turn was sampled, and the outcome sits on the very
    # last token.
    assert [sum(row.action_mask) for row in rows[1:]] == [
        len(step.action_ids) for step in played.steps[3:]
    ]
    assert [sum(row.rewards) for row in rows] == [0, 0, 1.0] and rows[-1].rewards[-1] == 1.0


def test_a_summary_is_a_turn_that_is_trained_and_comes_back_as_data(chat):
    notes = [
        *chat.encode_data("two so far <|im_end|>"),
        chat.control_ids["<tool_call>"],
        chat.turn_end_id,
    ]
    said = [call("add")] * 2 + [notes] + [call("add")] * 2 + ["four", call("add")]
    played = play(chat, said, context="summary", window_results=2)
    assert played.reward == 1.0 and len(played.steps) == 7
    asked, after, last = (chat.decode(played.steps[n].observation_ids) for n in (2, 3, 6))
    assert ASK in asked and "it is 2" in asked
    assert (
        NOTES_PREFIX in after
        and "two so far <|im_end|><tool_call>" in after
        and "it is" not in after
        and ASK not in after
    )
    assert "four" in last and "two so far" not in last
    control = [chat.control_ids[token] for token in ("<|im_end|>", "<tool_call>")]
    plain = chat.prompt_ids([{"role": "user", "content": "Count."}], None)
    forged = [played.steps[3].observation_ids.count(i) - plain.count(i) for i in control]
    assert forged == [1, 0]  # the system message with the tools has an end of its own
    rows = trajectory_rows(played, 0)
    assert [sorted({step for step in row.step_ids if step >= 0}) for row in rows] == [
        [0, 1, 2],
        [3, 4, 5],
        [6],
    ]


class Rooms(AgentEnv):
    """A world that names its states, in which nothing ever moves."""

    def reset(self, row):
        return Observation([{"role": "user", "content": "Go."}], extra={"state": "kitchen"})

    async def step(self, action):
        return StepResult(
            Observation([{"role": "tool", "content": "a wall"}], extra={"state": "kitchen"})
        )


def test_writing_notes_is_another_state_than_acting():
    """gigpo compares what was done in one state, and notes are no way out of the kitchen."""

    async def states() -> list[str]:
        env = Summary(Rooms(), 2)
        seen = [await env.reset(question_row())]
        for _ in range(6):
            seen.append((await env.step(Action("go on", "stop"))).observation)
        return [observation.extra.get("state") for observation in seen]

    notes = f"kitchen\n{ASK}"
    assert asyncio.run(states()) == [
        "kitchen",
        "kitchen",
        notes,
        "kitchen",
        "kitchen",
        notes,
        "kitchen",
    ]


@pytest.mark.parametrize(
    ("context", "results", "turns"),
    [
        ("window", 1, [call("add")] * 3),
        ("summary", 2, [call("add"), call("add"), "It is 2.", call("add")]),
    ],
)
def test_the_page_shows_the_rows(chat, context, results, turns):
    played = play(chat, turns, TO_THREE, context=context, window_results=results)
    prompt = chat.decode(played.steps[0].observation_ids).partition(
        "<|im_end|>\n<|im_start|>assistant"
    )[0]
    shown = [f"env.context={context} env.window_results={results}"]
    for number, row in enumerate(trajectory_rows(played, 0), 1):
        shown.append(f"row {number}, reward {sum(row.rewards):g}")
        for mask, tokens in itertools.groupby(
            zip(row.action_mask, row.input_ids, strict=True), key=lambda pair: pair[0]
        ):
            text = chat.decode([i for _, i in tokens]).replace(prompt, "PROMPT")
            shown.append(f"  {mask}  {text!r}")
    assert "\n".join(shown) + "\n" in (ROOT / "recipes/long_context/README.md").read_text()


def quests_played(count: int, demonstrator: str | None = None, **context) -> list:
    """Play TinyQuest's demonstrations of some quests."""
    config = load_config("tinyquest")
    rows = [row_of(quest, config.env.name) for quest in questions("train", count, random.Random(0))]
    config.env = config.env.model_copy(update=context)
    return demonstrated(config, rows, demonstrator=demonstrator)


def test_demonstrations_are_played_in_the_context_that_is_set():
    episodes = quests_played(3, context="window", window_results=2)
    roles = ["".join(message["role"][0] for message in episode.messages) for episode in episodes]
    assert set(roles) == {"uatata", "utta"} and roles.count("uatata") == 3
    whole = quests_played(3)
    turns = [
        sum(m["role"] == "assistant" for e in some for m in e.messages)
        for some in (episodes, whole)
    ]
    assert turns[0] == turns[1] and len(whole) == 3


def test_tinyquest_can_be_taught_with_notes():
    """The demonstrator writes notes where it is asked for them, and plays the same quest as
    without."""
    whole, noted = quests_played(12), quests_played(12, context="summary", window_results=2)

    def said(episodes, notes: bool) -> list[str]:
        pairs = (
            pair
            for e in episodes
            for pair in itertools.pairwise(e.messages)
            if pair[1]["role"] == "assistant"
        )
        return [turn["content"] for asked, turn in pairs if (asked["content"] == ASK) is notes]

    assert said(noted, notes=False) == said(whole, notes=False) and len(noted) > 2 * len(whole)
    notes = said(noted, notes=True)
    assert len(notes) == len(noted) - len(whole) and not any("<" in text for text in notes)
    first = [e for e in noted if NOTES_PREFIX not in e.messages[0]["content"]]
    assert [e.score for e in first] == [e.score for e in whole]


def deaf(row, history):
    return demonstrate(
        row, [message for message in history if message["content"] != ASK], random.Random(0)
    )


def test_a_demonstrator_that_takes_the_request_for_a_turn_is_refused():
    with pytest.raises(ConfigError, match=r"was asked for plain text and returned '<tool_call>"):
        quests_played(2, f"{__file__}:deaf", context="summary", window_results=2)
