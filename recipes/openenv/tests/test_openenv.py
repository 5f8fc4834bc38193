"""OpenEnv: episodes against a real server in a process of its own, and all that such a server can
do wrong."""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import time

import httpx
import pytest
from conftest import ScriptedPolicy, call, make_env_loop, question_row
from hypothesis import given
from hypothesis import strategies as st
from openenv_server import free_port, serving, started

from agent_r1 import (
    AgentR1Error,
    Sampling,
    StopReason,
    Task,
    Trajectory,
    make_env,
    run_episodes,
)
from agent_r1.tool import tool
from agent_r1_recipes.openenv.environment import BrokenError, OpenEnvSession, RefusedError, text_of
from agent_r1_recipes.openenv.settings import OpenEnvSettings
from agent_r1_recipes.tinyquest.quests import questions, solve


def told(url: str) -> dict:
    return httpx.get(f"{url}/told", trust_env=False).json()


def all_sessions_end(url: str) -> bool:
    """The server hears of it a moment later."""
    deadline = time.monotonic() + 20
    while told(url)["open"] and time.monotonic() < deadline:
        time.sleep(0.01)
    return told(url)["open"] == 0


@pytest.fixture(scope="module")
def server():
    """The address of a server that serves all tests of this file."""
    with serving() as url:
        yield url


def row(answer: str = "7", text: str = "Guess my number.", **changes) -> dict:
    return question_row(text, (answer,), agent_name="openenv", **changes)


def play(
    chat,
    url: str,
    script,
    rows=None,
    max_concurrent=None,
    tools=None,
    timeout_s: float = 20.0,
    **config,
) -> list[Trajectory]:
    """An episode of each row, side by side."""
    settings = OpenEnvSettings(
        **{"name": "openenv", "url": url, "max_turns": 9, "max_tool_calls": 99, "tool_timeout_s": 5}
        | config
    )
    policy = ScriptedPolicy(chat, script)
    loop = make_env_loop(
        policy, lambda row: make_env(row, tools or {}, settings), timeout_s=timeout_s
    )
    tasks = [Task(r, str(i), f"s{i}") for i, r in enumerate(rows or [row()])]
    return asyncio.run(run_episodes(loop, tasks, Sampling(400), max_concurrent=max_concurrent))


def results(trajectory: Trajectory) -> list[str]:
    return [c["content"] for step in trajectory.steps for c in step.info.get("tool_calls", ())]


# ------------------------------------------------------------------------------------- what it does


def test_an_action_with_fields_is_the_tool_step(chat, server):
    script = [
        call("step", number=3),
        call("step", number="x"),
        call("step", number=13),
        call("step", number=7),
    ]
    [played] = play(chat, f"{server}/guess", script)
    assert played.stop_reason is StopReason.ANSWERED and played.error is None
    assert [step.reward for step in played.steps] == [0.0, 0.0, 0.0, 1.0] and played.score == 1.0
    wrong, invalid, unlucky, right = results(played)
    assert (wrong, unlucky) == ("wrong", "error: step failed: unlucky")
    assert right == "right" and invalid.startswith(
        "error: step: argument 'number' must be integer, not 'x'"
    )
    assert played.metrics == {"tool_calls": 4, "invalid_calls": 1, "failed_calls": 1}
    prompt = chat.decode(played.steps[0].observation_ids)
    assert "Guess my number.\na number below 100" in prompt and "tools: step(number)<" in prompt


def test_the_world_is_told_of_its_task_and_a_group_begins_in_one_state(chat, server):
    mine = row(
        "41",
        "Which?",
        extra_info={"index": 5, "level": "hard", "gone": None},
        env_kwargs={"board": "round"},
    )
    play(
        chat,
        f"{server}/guess",
        ["done"],
        [mine, mine, row("41", "Which?", extra_info={"index": 6})],
    )
    first, second, other = told(server)["told"][-3:]
    assert first == second and first["seed"] != other["seed"]
    assert {k: first[k] for k in ("question", "answer", "level", "board")} == {
        "question": "Which?", "answer": "41", "level": "hard", "board": "round",
    }  # fmt: skip
    assert "gone" not in first and "tools" not in first


@pytest.mark.parametrize("kind", ["echo", "strict"])
def test_tools_that_a_server_lists_are_the_agents_tools(chat, server, kind):
    @tool
    def add(a: int, b: int) -> str:
        """Add.

        Args:
            a: One.
            b: The other.
        """
        return str(a + b)

    script = [
        call("echo", message="héllo") + call("add", a=1, b=2),
        call("echo", message="boom"),
        call("echo", it=1),
        call("finish") + call("echo", message="too late"),
    ]
    [played] = play(chat, f"{server}/{kind}", script, tools={"add": add})
    said, added, boom, invalid, bye, late = results(played)
    assert (said, added, bye) == ("héllo", "3", "bye") and boom == "error: echo failed: boom it is"
    assert "missing argument 'message'" in invalid and late.startswith("error: not run")
    assert [step.reward for step in played.steps] == [
        0,
        0,
        0,
        2.5,
    ] and played.stop_reason is StopReason.ANSWERED
    [clash] = {str(error) for error in failures(chat, f"{server}/{kind}", tools={"echo": add})}
    assert "both have a tool 'echo'" in clash


def test_a_text_world_in_the_manner_of_alfworld(chat, server):
    """Commands and what is seen are plain words; four quests side by side, each along its plan."""
    quests = list(questions("train", 4, random.Random(0)))
    plans = [
        [f"{n} {a}" for n, a in solve(json.loads(house), *goal)]
        for house, *goal in (q["metadata"].values() for q in quests)
    ]
    rows = [row("", q["question"], extra_info={"metadata": q["metadata"]}) for q in quests]

    def script(session, turn, ids):
        commands = ["fly away", *plans[int(session[1:])]]
        return call("step", command=commands[turn])

    for played, plan in zip(
        play(chat, f"{server}/quest", script, rows, max_turns=20), plans, strict=True
    ):
        assert (played.stop_reason, played.score, len(played.steps)) == (
            StopReason.ANSWERED,
            1.0,
            len(plan) + 1,
        )
        heard = [json.loads(text) for text in results(played)]
        assert heard[0]["text"] == "Nothing happens." and heard[-1]["text"] == "over"
        assert all(
            command in before["admissible_commands"]
            for command, before in zip(plan, heard, strict=False)
        )
    assert "step(command)" in chat.decode(played.steps[0].observation_ids)


def test_the_call_of_the_last_turn_is_made(chat, server):
    [played] = play(
        chat, f"{server}/guess", [call("step", number=3), call("step", number=7)], max_turns=2
    )
    assert (played.stop_reason, played.reward) == (StopReason.ANSWERED, 1.0)
    [played] = play(
        chat, f"{server}/guess", [call("step", number=3), call("step", number=4)], max_turns=2
    )
    assert (played.stop_reason, results(played)) == (StopReason.MAX_TURNS, ["wrong", "wrong"])


def test_two_hundred_episodes_each_in_a_session_of_its_own(chat, server):
    def script(session, turn, ids):
        return call("step", number=100 + int(session[1:]) if turn else 1000)

    played = play(chat, f"{server}/guess", script, [row(str(100 + i)) for i in range(200)])
    assert all(
        t.stop_reason is StopReason.ANSWERED and t.reward == 1.0 and len(t.steps) == 2
        for t in played
    )
    assert all_sessions_end(server)


def test_a_full_server_is_waited_for(chat, server):
    played = play(
        chat, f"{server}/guess2", [call("step", number=1), call("step", number=7)], [row()] * 9
    )
    assert [t.reward for t in played] == [1.0] * 9


def test_a_server_that_stays_full_is_named(chat, server):
    async def both_taken() -> list[Trajectory]:
        taken = [OpenEnvSession(f"{server}/guess2", 5, "x") for _ in range(2)]
        for one in taken:
            await one.open(5)
        settings = OpenEnvSettings(name="openenv", url=f"{server}/guess2", episode_timeout_s=0.4)
        loop = make_env_loop(
            ScriptedPolicy(chat, ["done"]), lambda row: make_env(row, {}, settings)
        )
        try:
            return await loop.run(Task(row(), "g", "s"), Sampling(9))
        finally:
            for one in taken:
                await one.close()

    played = asyncio.run(both_taken())
    assert played.stop_reason is StopReason.ERROR
    assert (
        "has no session free (2 sessions active); start it with a higher max_concurrent_envs; "
        "waited 0.2 s" in played.error
    )


def test_an_episode_that_is_called_off_gives_its_session_back(chat, server):
    async def called_off():
        entered = asyncio.Event()

        async def script(session, turn, ids):
            entered.set()
            await asyncio.sleep(1000)

        settings = OpenEnvSettings(name="openenv", url=f"{server}/guess")
        loop = make_env_loop(
            ScriptedPolicy(chat, lambda *a: script(*a)), lambda row: make_env(row, {}, settings)
        )
        running = asyncio.create_task(loop.run(Task(row(), "g", "s"), Sampling(9)))
        await entered.wait()
        before = told(server)["open"]
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return before

    assert asyncio.run(called_off()) == 1 and all_sessions_end(server)


# ---------------------------------------------------------------------------------- what goes wrong


def in_a_moment(turns: list[str]):
    """A script that takes its time, as a model does: what a server sends unasked has arrived when
    the next turn is due."""

    async def script(session: str, turn: int, prompt_ids: list[int]) -> str:
        await asyncio.sleep(0.05)
        return turns[turn]

    return script


def failures(chat, url: str, count: int = 1, **config) -> list[Exception]:
    """What a run of nothing but such episodes ends with."""
    with pytest.raises(AgentR1Error) as caught:
        play(chat, url, in_a_moment([call("step", number=1)] * 9), [row()] * count, **config)
    return [caught.value]


SAID = {
    "hang": r"did not answer 'step' within 0\.3 s \(env\.tool_timeout_s\)",
    "slow-reset": r"did not answer 'reset' within 0\.3 s",
    "hang-up": "hung up at 'step'",
    "flood": r"sent b?'\{\"type\": \"observation\".* unasked, and 'observation' is due",
    "huge": r"hung up at 'step' \(.*1009",
    "refuse": "refused to begin an episode: no such task",
    "over": "the episode was over before it began",
    "factory": r"lost the session: 0 sessions active",
    "lost": "lost the session: no longer",
} | dict.fromkeys(["no-json", "deep", "nan"], "is due")
"""What else may come instead of an answer: `test_whatever_a_server_sends_is_read_or_refused`."""
LISTED = {
    "tools-none": "its actions are calls of tools, and it lists none",
    "tools-words": "lists something that is not a tool: ",
    "tools-many": r"lists tools of \d{6} characters, and every prompt would carry them",
    "tools-twice": "both have a tool 'echo'",
    "schema-none": "lists something that is not a tool: tool step: parameters is not a JSON schema",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*SAID, *LISTED])
def test_what_a_server_does_wrong_breaks_off_its_episode_in_one_line_and_the_others_run(
    chat, server, kind
):
    short, wanted = (
        {"tool_timeout_s": 0.3 if kind in ("hang", "slow-reset") else 20},
        (SAID | LISTED)[kind],
    )
    [error] = failures(chat, f"{server}/bad-{kind}", count=3, **short)
    assert re.search(wanted, str(error)) and "\n" not in str(error) and len(str(error)) < 600, error
    assert str(error).startswith(
        "3 of 3 episodes failed, the first: "
    ) and f"{server}/bad-{kind}" in str(error)

    def env(r):
        url = f"{server}/{r['extra_info']['kind']}"
        return make_env(r, {}, OpenEnvSettings(name="openenv", url=url, max_turns=9, **short))

    kinds = ["guess", f"bad-{kind}", "guess"]
    loop = make_env_loop(
        ScriptedPolicy(chat, in_a_moment([call("step", number=1), call("step", number=7)])), env
    )
    tasks = [Task(row(extra_info={"kind": k}), str(i), f"s{i}") for i, k in enumerate(kinds)]
    good, bad, also_good = asyncio.run(run_episodes(loop, tasks, Sampling(400)))
    assert good.reward == also_good.reward == 1.0
    assert bad.stop_reason is StopReason.ERROR and re.search(wanted, bad.error)
    assert all_sessions_end(server)


def test_a_long_first_observation_is_cut_and_made_whole(chat, server):
    settings = OpenEnvSettings(name="openenv", url=f"{server}/bad-long", tool_max_chars=50)

    async def first() -> str:
        env = make_env(row(), {}, settings)
        observation = await env.reset(row())
        await env.close()
        return observation.messages[0]["content"]

    assert asyncio.run(first()) == f"Guess my number.\n{'x' * 50} [cut off: 100001 characters]"


def test_a_server_that_refuses_what_its_schema_allows_ends_the_run(chat, server):
    [error] = failures(chat, f"{server}/bad-lies", count=3)
    assert re.fullmatch(
        r"\d+ of \d+ tool calls failed, .*'error: step failed: Invalid message.*; fix the tool",
        str(error),
    )


@pytest.mark.parametrize(
    "kind", ["schema-html", "schema-empty", "schema-404", "schema-endless", "schema-deep"]
)
def test_what_is_no_openenv_server_is_said_before_anything_runs(server, kind):
    with pytest.raises(
        AgentR1Error, match=f"no OpenEnv server answers at env.url={server}/bad-{kind}: "
    ) as caught:
        make_env(row(), {}, OpenEnvSettings(name="openenv", url=f"{server}/bad-{kind}"))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_a_server_that_is_killed_and_comes_back(chat):
    """Its episodes are broken off; those that begin while it is away wait for it."""
    port = free_port()
    process, url = started(port), f"http://127.0.0.1:{port}/guess"
    settings = OpenEnvSettings(name="openenv", url=url, episode_timeout_s=100)
    processes = [process]

    async def killed() -> tuple[Trajectory, Trajectory]:
        async def script(session, turn, ids):
            if session == "first" and turn == 1:
                process.send_signal(signal.SIGKILL)
                process.wait()
            return call("step", number=7 if turn else 1)

        loop = make_env_loop(
            ScriptedPolicy(chat, lambda *a: script(*a)),
            lambda r: make_env(r, {}, settings),
            timeout_s=100,
        )
        first = await loop.run(Task(row(), "g", "first"), Sampling(400))
        waiting = asyncio.create_task(loop.run(Task(row(), "g", "second"), Sampling(400)))
        await asyncio.sleep(0.1)
        processes.append(await asyncio.to_thread(started, port))
        return first, await waiting

    try:
        first, second = asyncio.run(killed())
    finally:
        for each in processes:
            each.kill()
            each.wait()
    assert first.stop_reason is StopReason.ERROR and "hung up at 'step'" in first.error
    assert (second.stop_reason, second.reward) == (StopReason.ANSWERED, 1.0)


# ----------------------------------------------------------------------------------- whatever comes


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(
            st.text()
            | st.sampled_from(
                [
                    "type",
                    "data",
                    "observation",
                    "reward",
                    "done",
                    "tool_name",
                    "result",
                    "content",
                    "error",
                    "code",
                    "errors",
                    "loc",
                ]
            ),
            inner,
        )
    ),
    max_leaves=20,
)
MESSAGES = st.fixed_dictionaries(
    {"type": st.sampled_from(["observation", "error", "state", 3]), "data": JSON}
)


@given(st.binary() | st.text() | JSON.map(json.dumps) | MESSAGES.map(json.dumps), st.booleans())
def test_whatever_a_server_sends_is_read_or_refused(raw, unasked):
    try:
        data = OpenEnvSession("http://x", 1, "the server")._read("step", raw, unasked)
    except (BrokenError, RefusedError) as error:
        assert len(str(error).splitlines()) <= 1 or isinstance(error, RefusedError)
    else:
        assert isinstance(data["reward"], float) and isinstance(data["done"], bool)
        try:
            assert isinstance(text_of(data["observation"]), str)
        except RefusedError:
            assert "tool_name" in data["observation"]


@given(st.dictionaries(st.text(), st.none() | st.text(min_size=1) | st.integers(), max_size=3))
def test_an_observation_of_one_text_is_shown_as_it_is(observation):
    said = [
        value for name, value in observation.items() if value is not None and name != "metadata"
    ]
    if len(said) == 1 and isinstance(said[0], str):
        assert text_of(observation) == said[0]
    elif said:
        assert set(json.loads(text_of(observation)).values()) >= set(said)
    else:
        assert text_of(observation) == ""


def test_the_text_of_an_embedded_resource_is_text():
    parts = [
        {"type": "text", "text": "downloaded"},
        {"type": "resource", "resource": {"uri": "file:///a.txt", "text": "THE BODY"}},
        {"type": "resource", "resource": {"uri": "file:///a.png", "blob": "iVBO"}},
        {"type": "image", "data": "iVBO"},
    ]
    observation = {"tool_name": "get", "result": {"content": parts}}
    assert text_of(observation) == (
        "downloaded\nTHE BODY\n[resource, which cannot be shown]\n[image, which cannot be shown]"
    )
