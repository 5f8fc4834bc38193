"""A plain class as an environment: what it may do, what it is paid, and each way of getting the
contract wrong."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sqlite3
import threading
import time
from typing import Literal

import pytest
from conftest import ScriptedPolicy, call, fails_with, make_env_loop, question_row

from agent_r1.cold_start.demonstrate import play_demonstrations
from agent_r1.config import plugins
from agent_r1.config.settings import EnvConfig, RolloutConfig
from agent_r1.core import AgentEnv, Sampling, StopReason, Trajectory
from agent_r1.env.class_env import as_environment
from agent_r1.env.hermes import Hermes
from agent_r1.env.stateful_env import WorldEnv
from agent_r1.evaluation.evaluate import scores, wilson_interval
from agent_r1.ground.errors import AgentR1Error
from agent_r1.rollout.episode import Task
from agent_r1.rollout.rollouts import run_episodes
from agent_r1.tool import tool


class Counter:
    """A counter that is to reach the number that the question names."""

    def reset(self, answer, **row) -> str:
        self.goal, self.count, self.seen = int(answer), 0, row
        return f"The counter stands at {self.count}."

    def add(self, step: int, sign: Literal["+", "-"] = "+") -> int:
        """Move the counter.

        Args:
            step: How far.
            sign: Up or down.
        """
        self.count += step if sign == "+" else -step
        return self.count

    def get_reward(self) -> float:
        return float(self.count == self.goal)


def play(
    chat, cls, script, rows=None, tools=None, timeout_s: float = 20.0, **config
) -> list[Trajectory]:
    settings = EnvConfig(**{"max_turns": 9, "tool_timeout_s": 20} | config)
    make = as_environment(cls, "my.py:It")
    loop = make_env_loop(
        ScriptedPolicy(chat, script), lambda row: make(tools or {}, settings), timeout_s=timeout_s
    )
    tasks = [Task(r, str(i), f"s{i}") for i, r in enumerate(rows or [question_row("Go.", ("7",))])]
    return asyncio.run(run_episodes(loop, tasks, Sampling(400)))


def results(trajectory: Trajectory) -> list[str]:
    return [c["content"] for step in trajectory.steps for c in step.info.get("tool_calls", ())]


def failure(chat, cls, script=("done",), **options) -> str:
    """What a run of nothing but such episodes ends with."""
    with pytest.raises(AgentR1Error) as caught:
        play(chat, cls, list(script), **options)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix("1 of 1 episodes failed, the first: ")


# ------------------------------------------------------------------------------------- what it does


def test_methods_are_tools_and_the_object_remembers(chat):
    script = [
        call("add", step=10) + call("add", step=1, sign="-"),
        call("add", step=2, sign="-"),
        "I am done.",
    ]
    [played] = play(chat, Counter, script)
    assert results(played) == ["10", "9", "7"]
    assert (played.stop_reason, played.reward, played.score) == (StopReason.ANSWERED, 1.0, 1.0)
    assert [step.reward for step in played.steps] == [0.0, 0.0, 1.0]
    assert "em" not in played.metrics and scores([played])["score_name"] == "reward"
    prompt = chat.decode(played.steps[0].observation_ids)
    assert "Go.\nThe counter stands at 0." in prompt and "add(step, sign)" in prompt


def test_what_a_row_says_arrives_by_name(chat):
    told = []

    class Told:
        reward = 0.0

        def reset(self, question, level, board=None, **row):
            told.append((question, level, board, row))

    class Few:
        reward = 0.0

        def reset(self, seed, answers):
            told.append((seed, answers))

    row = question_row(
        "Q?",
        ("a", "b"),
        extra_info={"index": 3, "metadata": {"level": "hard"}, "gone": None},
        env_kwargs={"board": "round", "tools": None},
    )
    play(chat, Told, ["done"], [row])
    play(chat, Few, ["done"], [row])
    assert "answer" not in WorldEnv.facts(question_row("Q?", ()))
    question, level, board, rest = told[0]
    assert (question, level, board) == ("Q?", "hard", "round")
    assert (
        rest["answer"] == "a"
        and rest["prompt"] == row["prompt"]
        and "gone" not in rest
        and "tools" not in rest
    )
    assert told[1] == (WorldEnv.facts(row)["seed"], ["a", "b"])


class Bag:
    """Take what is in the bag. The class keeps the list that `reset` gives it, and changes it."""

    def reset(self, items, nested, **row) -> str:
        self.items = items
        self.shelf = nested["shelf"]
        self.right = 0.0
        return "The bag has: " + ", ".join(self.items)

    def take(self, thing: str) -> str:
        """Take a thing.

        Args:
            thing: The thing.
        """
        if thing not in self.items:
            return f"There is no {thing}."
        self.items.remove(thing)
        self.shelf.append(thing)
        self.right = float(len(self.items) == 0 and len(self.shelf) == 2)
        return f"You have {thing}."

    def get_reward(self) -> float:
        return self.right


def bag_row() -> dict:
    metadata = {"items": ["lamp", "rope"], "nested": {"shelf": []}}
    return question_row("Empty the bag.", (), extra_info={"index": 0, "metadata": metadata})


EMPTY_THE_BAG = [call("take", thing="lamp"), call("take", thing="rope"), "I am done."]


def test_every_episode_has_its_own_copy_of_its_row(chat):
    row = bag_row()
    episodes = play(chat, Bag, EMPTY_THE_BAG, [row] * 4)
    assert [episode.reward for episode in episodes] == [1.0] * 4
    assert row == bag_row() and all(episode.row is row for episode in episodes)


def test_a_demonstrator_may_change_its_row(monkeypatch):
    """... and its environment's row is another one."""

    def cross_off(row, history, rng):
        items = row["extra_info"]["metadata"]["items"]
        return Hermes.call("take", thing=items.pop(0)) if items else "I am done."

    monkeypatch.setattr(
        plugins,
        "load_trusted",
        lambda name, setting: cross_off if setting == "cold_start.demonstrator" else Bag,
    )
    row = bag_row()
    env = EnvConfig(name="own_bag.py:Bag")
    monkeypatch.setitem(row, "agent_name", env.name)
    played = play_demonstrations("own_bag.py:f", [row] * 3, {}, RolloutConfig(), env, 0)
    assert [demonstration.score for demonstration in played] == [1.0] * 3


def test_a_class_that_makes_its_own_tasks_needs_nothing_of_the_row(chat):
    """Every episode of a question is begun with one seed, so that a group is compared on one
    task."""

    class Own:
        def reset(self, seed, **row) -> str:
            self.target = random.Random(seed).randrange(10**9)
            return f"Say {self.target}."

        def get_reward(self, answer: str) -> float:
            return float(answer == str(self.target))

    def script(session, turn, ids):
        return f"<answer>{chat.decode(ids).rpartition('Say ')[2].partition('.')[0]}</answer>"

    rows = [question_row("", ("",), extra_info={"index": i // 2}) for i in range(6)]
    played = play(chat, Own, script, rows)
    texts = [chat.decode(t.steps[0].observation_ids) for t in played]
    assert texts[0] == texts[1] and len(set(texts)) == 3 and [t.reward for t in played] == [1.0] * 6


@pytest.mark.parametrize(("turn", "heard"), [
    ("<think>7?</think>It is <answer> 7 </answer>", "7"), ("<think>so</think> Seven. ", "Seven."),
    ("<answer>1</answer>" + call("add", step=1), "1"), ("", ""),
])  # fmt: skip
def test_the_answer_is_what_was_said_in_the_end(chat, turn, heard):
    class Heard(Counter):
        def get_reward(self, answer):
            assert self.count == 0
            return 0.5 if answer == heard else -1

    assert [t.reward for t in play(chat, Heard, [turn])] == [0.5]


def test_done_ends_the_episode_in_the_middle_of_a_turn(chat):
    class Door:
        def reset(self, **row):
            self.opened, self.done = 0, False

        def open(self) -> str:
            """Open the door."""
            self.opened += 1
            self.done = self.opened == 2
            return "opened"

        def get_reward(self) -> int:
            return self.opened

    [played] = play(chat, Door, [call("open") * 4, "never said"])
    assert (
        len(played.steps) == 1
        and played.reward == 2.0
        and played.stop_reason is StopReason.ANSWERED
    )
    assert (
        results(played)[:2] == ["opened"] * 2
        and [r[:14] for r in results(played)[2:]] == ["error: not run"] * 2
    )
    assert played.metrics == {"tool_calls": 4, "invalid_calls": 0, "failed_calls": 0}


def test_reward_as_an_attribute_and_a_score_of_its_own(chat):
    class Solver:
        score_name = "solved"

        def reset(self, **row):
            self.reward, self.tries = 0.0, 0

        def attempt(self, word: str) -> str:
            """Try.

            Args:
                word: A word.
            """
            self.tries += 1
            self.reward -= 0.1
            return "no"

        @property
        def score(self) -> bool:
            return self.tries == 2

    [two] = play(chat, Solver, [call("attempt", word="a"), call("attempt", word="b"), "done"])
    [one] = play(chat, Solver, [call("attempt", word="a"), "done"])
    assert (
        two.reward == pytest.approx(-0.2)
        and two.metrics["solved"] == two.score == 1.0
        and one.score == 0.0
    )
    card = scores([one, two])
    assert (card["score"], card["score_name"]) == (0.5, "solved") and card[
        "score_ci95"
    ] == wilson_interval(0.5, 2)
    # What was paid stands next to it: -0.1 and -0.2, with a standard error of 0.05.
    assert card["reward"] == pytest.approx(-0.15) and card["reward_ci95"] == pytest.approx(
        [-0.248, -0.052]
    )


class Desk:
    """What it pays has two parts; `named` says whether it tells them."""

    named: dict | None = None

    def reset(self, **row):
        self.calls = 0

    def look(self) -> str:
        """Look it up."""
        self.calls += 1
        return "Marn"

    def get_reward(self, answer) -> float:
        if self.named:
            self.reward_parts = self.named | {"price": -0.02 * self.calls}
        return float(answer == "Marn") - 0.02 * self.calls


def test_a_class_names_the_parts_of_its_reward(chat):
    script = [call("look"), call("look"), "<answer>Marn</answer>"]
    [played] = play(chat, type("Named", (Desk,), {"named": {"right": 1.0}}), script)
    assert played.reward == pytest.approx(0.96) and played.reward_parts == {
        "right": 1.0,
        "price": -0.04,
    }


def test_methods_may_be_coroutines_and_so_may_reset_and_get_reward(chat):
    class Late(Counter):
        async def reset(self, **row):
            await asyncio.sleep(0)
            return super().reset(**row)

        async def add(self, step: int) -> int:
            """Move the counter.

            Args:
                step: How far.
            """
            await asyncio.sleep(0)
            return super().add(step)

        async def get_reward(self):
            await asyncio.sleep(0)
            return super().get_reward()

    [played] = play(chat, Late, [call("add", step=7), "done"])
    assert played.reward == 1.0


def test_everything_of_one_object_runs_in_one_thread(chat):
    """SQLite refuses a connection that another thread has made."""

    class Table:
        def __init__(self):
            self.base = sqlite3.connect(":memory:")

        def reset(self, **row):
            self.base.execute("create table t (x)")

        def insert(self, x: int) -> int:
            """Insert.

            Args:
                x: A number.
            """
            self.base.execute("insert into t values (?)", (x,))
            return self.base.execute("select count(*) from t").fetchone()[0]

        def get_reward(self):
            return self.base.execute("select sum(x) from t").fetchone()[0]

    played = play(
        chat, Table, [call("insert", x=1) * 2, call("insert", x=2), "done"], [question_row()] * 20
    )
    assert {(t.reward, *results(t)) for t in played} == {(4.0, "1", "2", "3")}
    deadline = time.monotonic() + 20
    while any(thread.name == "environment" for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "a thread outlived its episode"


# ---------------------------------------------------------------------------------- what goes wrong


class Faulty(Counter):
    def fail(self, how: str) -> str:
        """Fail.

        Args:
            how: In which way.
        """
        raise {"value": ValueError("no such move"), "stop": StopIteration(), "exit": SystemExit(1)}[
            how
        ]


def test_a_method_that_raises_is_read_by_the_agent_and_the_episode_goes_on(chat):
    script = [
        *(call("fail", how=how) for how in ("value", "stop", "exit")),
        call("fail"),
        call("add", step=7),
        *[call("add", step=0)] * 3,
        "done",
    ]
    [played] = play(chat, Faulty, script, max_turns=20, max_tool_calls=20)
    assert results(played)[0] == "error: fail failed: no such move" and played.reward == 1.0
    assert [r.startswith("error: fail") for r in results(played)] == [True] * 4 + [False] * 4
    assert played.metrics["invalid_calls"] == 1 and played.metrics["failed_calls"] == 3


def test_a_method_that_hangs_breaks_off_its_episode_and_no_other(chat):
    """One in five hangs; the others keep their objects and their rewards."""

    class Slow(Counter):
        def add(self, step: int) -> int:
            """Move the counter.

            Args:
                step: How far.
            """
            if self.goal % 5 == 0:
                time.sleep(60)
            return super().add(step)

    def script(session, turn, ids):
        return call("add", step=int(session[1:])) if turn == 0 else "done"

    rows = [question_row("Go.", (str(i),)) for i in range(20)]
    played = play(chat, Slow, script, rows, tool_timeout_s=0.5)
    for i, t in enumerate(played):
        if i % 5 == 0:
            assert t.stop_reason is StopReason.ERROR and t.reward == 0.0
            assert t.error == "add took longer than 0.5 s (env.tool_timeout_s)"
        else:
            assert t.stop_reason is StopReason.ANSWERED and t.reward == 1.0


def counter(base=Counter, **members) -> type:
    """A Counter in which `members` are other than they should be."""
    return type("It", (base,), members)


def documented(function):
    function.__doc__ = "Move.\n\nArgs:\n    to: Where."
    return function


class NoReward:
    def reset(self, **row):
        pass


AT_RUN = {
    "no reward": (NoReward, "has no reward; write get_reward"),
    "words": (counter(get_reward=lambda self: "much"), "get_reward returned 'much'"),
    "infinite": (counter(get_reward=lambda self: float("inf")), "must be a finite number"),
    "giant": (counter(get_reward=lambda self: -1e300), "must lie between"),
    "hangs": (counter(get_reward=lambda self: time.sleep(60)), "env.tool_timeout_s"),
    "wants": (
        counter(reset=lambda self, colour, **row: None),
        "requires 'colour', which the row lacks",
    ),
    "speaks": (counter(reset=lambda self, **row: ["a", "list"]), "reset returned ['a', 'list']"),
    "hides": (counter(reset=lambda self, **row: setattr(self, "add", 3)), "add=3 hides the method"),
    "breaks": (counter(__init__=lambda self: 1 / 0), "division by zero"),
    "score": (counter(score="high"), "score is 'high'"),
    "part": (type("Taken", (Desk,), {"named": {"em": 1.0}}), "reward_parts['em']"),
}


@pytest.mark.parametrize(("cls", "says"), AT_RUN.values(), ids=AT_RUN)
def test_what_only_an_episode_can_show_ends_the_run_in_one_line(chat, cls, says):
    assert says in failure(chat, cls, tool_timeout_s=0.2)


@tool
def a_tool() -> str:
    """A tool."""


BEFORE = {
    "no reset": (type("NoReset", (), {}), "missing_method"),
    "no docstring": (counter(move=lambda self, to: 0), "bad_annotation"),
    "no types": (counter(move=documented(lambda self, to: 0)), "bad_annotation"),
    "a method done": (counter(done=lambda self: True), "method_for_attribute"),
    "constructor": (counter(__init__=lambda self, url: None), "wrong_signature"),
    "score name": (counter(score_name="em"), "name_taken"),
    "get_reward": (counter(get_reward=lambda self, completion: 0.0), "wrong_signature"),
    "half an environment": (counter(AgentEnv, step=None), "missing_method"),
    "an object": (Counter(), "wrong_code"),
    "a tool": (a_tool, "wrong_code"),
}


@pytest.mark.parametrize(("found", "code"), BEFORE.values(), ids=BEFORE)
def test_a_broken_contract_is_said_before_the_run(found, code):
    with fails_with(code, "^environment my.py:It"):
        as_environment(found, "my.py:It")


def test_what_is_no_tool_is_not_offered():
    class Helper(Counter):
        limit = 3
        Inner = Counter

        @staticmethod
        def helper(x):
            return x

        @property
        def state(self):
            raise AssertionError("a property is not looked at")

        def _private(self, x):
            return x

    assert list(as_environment(Helper, "x")({}, EnvConfig()).tools) == ["add"]


# ----------------------------------------------------------------------------------------- the end


class Browser:
    """It is open from its construction to `close`."""

    closed: list[str] = []
    reward = 0.0

    def reset(self, question, **row):
        if question == "no reset":
            raise ValueError("no page")

    def wait(self, seconds: float) -> str:
        """Wait.

        Args:
            seconds: How long.
        """
        time.sleep(seconds)
        return "waited"

    def close(self):
        self.closed.append(threading.current_thread().name)


@pytest.mark.parametrize(
    ("question", "turns"),
    [
        ("go", ["done"]),
        ("go", [call("wait", seconds=0.0), "done"]),
        ("go", [call("wait", seconds="x")] * 3),
        ("no reset", []),
        ("go", [call("wait", seconds=1.0), "done"]),
    ],
    ids=["at once", "after a call", "after bad calls", "after a failed reset", "after a time-out"],
)
def test_close_is_called_once_in_the_thread_of_the_object(chat, question, turns):
    Browser.closed.clear()
    with contextlib.suppress(AgentR1Error):  # most of its one episode failed
        play(chat, Browser, turns, [question_row(question)], tool_timeout_s=0.5)
    deadline = time.monotonic() + 20
    while not Browser.closed:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert Browser.closed == ["environment"]


def test_close_is_no_tool_and_may_fail(chat, capsys):
    class Bad(Browser):
        def close(self):
            raise OSError("gone")

    [played] = play(chat, Bad, [call("close"), "done"])
    assert results(played)[0].startswith("error: unknown tool 'close'; available: wait")
    assert "close failed (OSError: gone)" in capsys.readouterr().err
    with fails_with("wrong_signature"):
        as_environment(type("Needs", (Browser,), {"close": lambda self, how: None}), "x.py:It")


@pytest.mark.parametrize(
    "error", [asyncio.CancelledError(), GeneratorExit(), BaseExceptionGroup("x", [GeneratorExit()])]
)
def test_what_a_method_raises_besides_exceptions_is_its_failure(chat, error):
    class Odd(Counter):
        def fail(self) -> str:
            """Fail."""
            raise error

        async def fail_later(self) -> str:
            """Fail."""
            raise error

    script = [call("fail"), call("fail_later"), *[call("add", step=1)] * 7, "done"]
    [played] = play(chat, Odd, script, max_turns=20, max_tool_calls=20)
    assert [text.startswith("error: fail") for text in results(played)] == [True] * 2 + [False] * 7
    assert played.reward == 1.0


def test_an_end_by_a_limit_of_the_class(chat):
    class Limited(Counter):
        def add(self, step: int) -> int:
            """Move the counter once.

            Args:
                step: How far.
            """
            self.done = self.truncated = True
            return super().add(step)

    [played] = play(chat, Limited, [call("add", step=7)])
    assert played.stop_reason is StopReason.MAX_TURNS and played.reward == 1.0
