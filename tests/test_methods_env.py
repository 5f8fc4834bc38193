"""A plain class as an environment: what it may do, what it is paid, and each way of getting the contract wrong."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import threading
import time
from abc import ABC, abstractmethod
from types import SimpleNamespace
from typing import Literal

import pytest
from conftest import ScriptedPolicy, call, make_env_loop, question_row
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.config import load_config
from agent_r1.config.settings import EnvConfig
from agent_r1.core import Sampling, StopReason, Trajectory
from agent_r1.env import AgentEnv, BaseToolEnv, HermesToolEnv
from agent_r1.env.class_env import as_environment
from agent_r1.env.stateful_env import WorldEnv
from agent_r1.ground.errors import AgentR1Error, ConfigError
from agent_r1.inference.chat import Repl
from agent_r1.inference.conversation import Exchange, no_answer
from agent_r1.rollout.episode import Task, run_episodes
from agent_r1.rollout.evaluate import scores, wilson_interval
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


def play(chat, cls, script, rows=None, tools=None, timeout_s: float = 20.0, **config) -> list[Trajectory]:
    settings = EnvConfig(**{"max_turns": 9, "tool_timeout_s": 20} | config)
    make = as_environment(cls, "my.py:It")
    loop = make_env_loop(ScriptedPolicy(chat, script), lambda row: make(tools or {}, settings), timeout_s=timeout_s)
    tasks = [Task(r, str(i), f"s{i}") for i, r in enumerate(rows or [question_row("Go.", ("7",))])]
    return asyncio.run(run_episodes(loop, tasks, Sampling(400)))


def results(trajectory: Trajectory) -> list[str]:
    return [c["content"] for step in trajectory.steps for c in step.info.get("tool_calls", ())]


def failure(chat, cls, script=("done",), **options) -> str:
    """What a run of nothing but such episodes ends with."""
    with pytest.raises(AgentR1Error) as caught:
        play(chat, cls, list(script), **options)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix("1 of 1 episodes were broken off, the first: ")


# ------------------------------------------------------------------------------------------------------ what it does


def test_methods_are_tools_and_the_object_remembers(chat):
    script = [call("add", step=10) + call("add", step=1, sign="-"), call("add", step=2, sign="-"), "I am done."]
    [played] = play(chat, Counter, script)
    assert results(played) == ["10", "9", "7"]
    assert (played.stop_reason, played.reward, played.score) == (StopReason.ANSWERED, 1.0, 1.0)
    assert [step.reward for step in played.steps] == [0.0, 0.0, 1.0]
    assert "em" not in played.metrics and scores([played])["score_name"] == "reward"
    prompt = chat.decode(played.steps[0].observation_ids)
    assert "Go.\nThe counter stands at 0." in prompt and "add(step, sign)" in prompt


def test_the_schema_is_that_of_a_tool():
    env = as_environment(Counter, "x")({}, EnvConfig())
    assert [t.schema()["function"] for t in env.tools.values()] == [{
        "name": "add", "description": "Move the counter.", "parameters": {
            "type": "object", "required": ["step"], "additionalProperties": False, "properties": {
                "step": {"type": "integer", "description": "How far."},
                "sign": {"type": "string", "enum": ["+", "-"], "description": "Up or down."}}}}]  # fmt: skip


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

    row = question_row("Q?", ("a", "b"), extra_info={"index": 3, "metadata": {"level": "hard"}, "gone": None},
                       env_kwargs={"board": "round", "tools": None})  # fmt: skip
    play(chat, Told, ["done"], [row])
    play(chat, Few, ["done"], [row])
    assert "answer" not in WorldEnv.facts(question_row("Q?", ()))
    question, level, board, rest = told[0]
    assert (question, level, board) == ("Q?", "hard", "round")
    assert rest["answer"] == "a" and rest["prompt"] == row["prompt"] and "gone" not in rest and "tools" not in rest
    assert told[1] == (WorldEnv.facts(row)["seed"], ["a", "b"])


def test_a_class_that_makes_its_own_tasks_needs_nothing_of_the_row(chat):
    """Every episode of a question is begun with one seed, so that a group is compared on one task."""

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
    assert len(played.steps) == 1 and played.reward == 2.0 and played.stop_reason is StopReason.ANSWERED
    assert results(played)[:2] == ["opened"] * 2 and [r[:14] for r in results(played)[2:]] == ["error: not run"] * 2
    assert played.metrics == {"tool_calls": 4, "invalid_calls": 0, "failed_calls": 0}


def test_the_call_of_the_last_turn_is_made(chat):
    [played] = play(chat, Counter, [call("add", step=3), call("add", step=4)], max_turns=2)
    assert (played.stop_reason, played.reward, results(played)) == (StopReason.MAX_TURNS, 1.0, ["3", "7"])


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
    assert two.reward == pytest.approx(-0.2) and two.metrics["solved"] == two.score == 1.0 and one.score == 0.0
    card = scores([one, two])
    assert (card["score"], card["score_name"]) == (0.5, "solved") and card["score_ci95"] == wilson_interval(0.5, 2)
    # What was paid stands next to it: -0.1 and -0.2, with a standard error of 0.05.
    assert card["reward"] == pytest.approx(-0.15) and card["reward_ci95"] == pytest.approx([-0.248, -0.052])


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


@pytest.mark.parametrize(
    ("named", "said"),
    [(None, "reward +0.96:  outcome +0.96"), ({"right": 1.0}, "reward +0.96:  right +1.00  price -0.04")],
)
def test_why_shows_the_parts_of_a_reward_as_the_class_names_them(chat, named, said):
    """Of a class without names all of the reward was called `calls`, although calls cost it something."""
    [played] = play(
        chat, type("Named", (Desk,), {"named": named}), [call("look"), call("look"), "<answer>Marn</answer>"]
    )
    lines = []
    last = SimpleNamespace(trajectory=played, known=True)
    Repl.why(
        SimpleNamespace(last=lambda: last, screen=SimpleNamespace(say=lambda text, *style: lines.append(text))), ""
    )
    assert said in lines


def test_a_part_of_a_reward_has_a_name_of_its_own(chat):
    taken = type("Taken", (Desk,), {"named": {"em": 1.0}})
    assert "reward_parts['em'] has a name that means something else" in failure(chat, taken)


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

    played = play(chat, Table, [call("insert", x=1) * 2, call("insert", x=2), "done"], [question_row()] * 20)
    assert {(t.reward, *results(t)) for t in played} == {(4.0, "1", "2", "3")}
    deadline = time.monotonic() + 20
    while any(thread.name == "environment" for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "a thread outlived its episode"


def test_tools_of_the_configuration_stand_beside_the_methods(chat):
    @tool
    def half(x: float) -> float:
        """Halve.

        Args:
            x: A number.
        """
        return x / 2

    [played] = play(chat, Counter, [call("half", x=14.0), call("add", step=7), "ok"], tools={"half": half})
    assert results(played) == ["7.0", "7"] and played.reward == 1.0
    half.name = "add"
    with pytest.raises(ConfigError, match="environment my.py:It and env.tools both have a tool 'add'"):
        play(chat, Counter, ["done"], tools={"add": half})


def test_classes_of_ours_are_taken_as_they_are():
    assert as_environment(HermesToolEnv, "x") is HermesToolEnv


# ------------------------------------------------------------------------------------------------- what goes wrong


class Faulty(Counter):
    def fail(self, how: str) -> str:
        """Fail.

        Args:
            how: In which way.
        """
        raise {"value": ValueError("no such move"), "stop": StopIteration(), "exit": SystemExit(1)}[how]


def test_a_method_that_raises_is_read_by_the_agent_and_the_episode_goes_on(chat):
    script = [*(call("fail", how=how) for how in ("value", "stop", "exit")), call("fail"), call("add", step=7),
              *[call("add", step=0)] * 3, "done"]  # fmt: skip
    [played] = play(chat, Faulty, script, max_turns=20, max_tool_calls=20)
    assert results(played)[0] == "error: fail failed: no such move" and played.reward == 1.0
    assert [r.startswith("error: fail") for r in results(played)] == [True] * 4 + [False] * 4
    assert played.metrics["invalid_calls"] == 1 and played.metrics["failed_calls"] == 3


def test_a_method_that_hangs_breaks_off_its_episode_and_no_other(chat):
    """Five in a hundred hang; the others keep their objects and their rewards."""

    class Slow(Counter):
        def add(self, step: int) -> int:
            """Move the counter.

            Args:
                step: How far.
            """
            if self.goal % 20 == 0:
                time.sleep(60)
            return super().add(step)

    def script(session, turn, ids):
        return call("add", step=int(session[1:])) if turn == 0 else "done"

    rows = [question_row("Go.", (str(i),)) for i in range(200)]
    played = play(chat, Slow, script, rows, tool_timeout_s=1.0)
    for i, t in enumerate(played):
        if i % 20 == 0:
            assert t.stop_reason is StopReason.ERROR and t.reward == 0.0
            assert t.error == "add took longer than 1 s (env.tool_timeout_s)"
        else:
            assert t.stop_reason is StopReason.ANSWERED and t.reward == 1.0


class NoReward:
    def reset(self, **row):
        pass


class Words(Counter):
    def get_reward(self):
        return "much"


class Infinite(Counter):
    def get_reward(self):
        return float("inf")


class Giant(Counter):
    def get_reward(self):
        return -1e300


class Sleeper(Counter):
    def get_reward(self):
        time.sleep(60)


class Wants(Counter):
    def reset(self, colour, **row):
        pass


class Speaks(Counter):
    def reset(self, **row):
        return ["a", "list"]


class Hides(Counter):
    def reset(self, **row):
        self.add = 3


class Breaks(Counter):
    def __init__(self):
        raise OSError("no display")


class ScoreOfWords(Counter):
    score = "high"


AT_RUN = {
    NoReward: "pays nothing; write get_reward(self), or set self.reward in reset",
    Words: "get_reward returned 'much' (str), and must be a number",
    Infinite: "a reward must be a finite number, and the environment paid inf",
    Giant: "a reward must lie within -1e+06 and 1e+06, and the environment paid -1e+300",
    Sleeper: "get_reward took longer than 0.5 s (env.tool_timeout_s)",
    Wants: "reset wants 'colour', which the row lacks; it has data_source, prompt",
    Speaks: "reset returned ['a', 'list'] (list); it returns text for the agent, or None",
    Hides: "the attribute add=3 hides the method; rename it",
    Breaks: "OSError: no display",
    ScoreOfWords: "score is 'high' (str), and must be a number",
}


@pytest.mark.parametrize("cls", AT_RUN, ids=lambda cls: cls.__name__)
def test_what_only_an_episode_can_show_ends_the_run_in_one_line(chat, cls):
    assert AT_RUN[cls] in failure(chat, cls, tool_timeout_s=0.5)


class NoReset:
    def move(self, to: str) -> str:
        """Move.

        Args:
            to: Where.
        """


class NoDocstring(Counter):
    def move(self, to: str) -> str:
        pass


class NoTypes(Counter):
    def move(self, to):
        """Move.

        Args:
            to: Where.
        """


class NoArgs(Counter):
    def move(self, to: str):
        """Move."""


class OddType(Counter):
    def move(self, to: complex):
        """Move.

        Args:
            to: Where.
        """


class Done(Counter):
    def done(self) -> bool:
        """Whether it is over."""


class Needs(Counter):
    def __init__(self, url):
        pass


class Em(Counter):
    score_name = "em"


class Paid(Counter):
    def get_reward(self, completion):
        return 0.0


class Abstract(ABC, Counter):
    @abstractmethod
    def hook(self):
        """Write it."""


class HalfEnv(BaseToolEnv):
    def extract_tool_calls(self, text):
        return []


class OddEnv(AgentEnv):
    def __init__(self):
        pass

    def reset(self, row):
        pass

    async def step(self, action):
        pass


@tool
def a_tool() -> str:
    """A tool."""


BEFORE = {
    NoReset: r"NoReset has no method reset \(its public methods: move\); .* begins an episode with reset\(self, \*\*row\)",
    NoDocstring: "method move: .*docstring",
    NoTypes: r"method move: parameter 'to' has no type; annotate it \(for example to: str\)",
    NoArgs: "method move: .*a line 'name: ...' for each parameter",
    OddType: "method move: parameter 'to' has the type .*complex.*, which has no JSON form",
    Done: "done is a method, which would be offered to the agent as a tool; make it an attribute or a property",
    Needs: r"Needs\(...\) missing a required argument: 'url'; wanted is a constructor that needs no arguments",
    Em: "score_name='em' cannot name a user-defined score",
    Paid: r"get_reward takes no argument, or `answer`, not \(completion\)",
    Abstract: "Abstract has no hook; it needs them",
    HalfEnv: "HalfEnv has no format_tool_response; it needs them",
    OddEnv: r"OddEnv\(...\) too many positional arguments; wanted is a constructor that takes \(tools, config\)",
    Counter(): r"is not a class but <.*Counter object.*> \(Counter\)|is not a class but .*\(Counter\); name a class",
    play: r"is not a class but <function play.*\(function\); name a class, of which each episode makes one object",
    a_tool: "is the tool 'a_tool'; put it into env.tools",
    7: r"is not a class but 7 \(int\)",
}


@pytest.mark.parametrize("found", BEFORE, ids=lambda found: getattr(found, "__name__", type(found).__name__))
def test_a_broken_contract_is_said_before_the_run(found):
    with pytest.raises(ConfigError, match=BEFORE[found]) as caught:
        as_environment(found, "my.py:It")
    assert str(caught.value).startswith("environment my.py:It") and "\n" not in str(caught.value)


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


WRITTEN = st.dictionaries(
    st.sampled_from(["step", "sign", "other"]), st.none() | st.integers() | st.text() | st.floats()
)


@given(st.lists(WRITTEN, max_size=3))
def test_whatever_an_agent_writes_is_answered(calls):
    from agent_r1.core import Action

    async def episode():
        env = as_environment(Counter, "x")({}, EnvConfig(max_invalid_calls=99))
        await env.reset(question_row("Go.", ("7",)))
        result = await env.step(Action("".join(call("add", **arguments) for arguments in calls)))
        env.close()
        return result

    result = asyncio.run(episode())
    assert result.done == (not calls) and len(result.info.get("tool_calls", ())) == len(calls)


def test_a_chat_waits_for_no_answer_where_a_call_has_ended_the_episode(chat):
    class Quick(Counter):
        @property
        def done(self):
            return getattr(self, "count", 0) == 7

    world = load_config("smoke", ["env.name=openenv", "env.url=http://127.0.0.1:1"])
    broken = Trajectory([], "g", StopReason.ERROR, question_row(), error="reset wants 'number', which the row lacks")
    said = no_answer(Exchange("Go.", broken, 0.0, False, 0), SimpleNamespace(chat=chat, config=world))
    assert said.endswith("; only questions of the test set have what this environment needs: type 1 for one of them")
    agent = SimpleNamespace(chat=chat, config=load_config("smoke"))
    for script, why in (([call("add", step=7)], None), ([""], "no answer: its last turn is empty")):
        (trajectory,) = play(chat, Quick, script)
        assert trajectory.stop_reason is StopReason.ANSWERED
        assert no_answer(Exchange("Go.", trajectory, 0.0, True, 0), agent) == why
