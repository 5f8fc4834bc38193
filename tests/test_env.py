"""Room 4, env: what the agent may write, what becomes of it, and why episodes stop."""

from __future__ import annotations

import asyncio
import json

import pytest
from conftest import ScriptedPolicy, call, cut, make_env_loop, question_row, task
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.config.settings import EnvConfig
from agent_r1.core import Action, Sampling, StepResult, StopReason, Trajectory
from agent_r1.env import AgentEnv, HermesToolEnv, make_env
from agent_r1.env.hermes import parse_call
from agent_r1.rollout.columns import PROCESS
from agent_r1.rollout.training_rows import trajectory_rows
from agent_r1.tool import BaseTool, ToolErrorKind


class Counting(BaseTool):
    """Counts how often it was executed."""

    name, description = "search", "Counts."
    parameters = {
        "type": "object",
        "properties": {"query": {"type": "string"}},
        "required": ["query"],
    }

    def __init__(self):
        super().__init__()
        self.queries = []

    async def execute(self, args):
        self.queries.append(args["query"])
        return f"result {len(self.queries)}"


@pytest.fixture
def search() -> Counting:
    return Counting()


def hermes(*tools: BaseTool, **config) -> HermesToolEnv:
    """A Hermes environment at the beginning of an episode."""
    env = HermesToolEnv({t.name: t for t in tools}, EnvConfig(**config))
    env.reset(question_row())
    return env


def step(env: AgentEnv, text: str, finish_reason="stop") -> StepResult:
    return asyncio.run(env.step(Action(text, finish_reason)))


# ---------------------------------------------------------------------------- reading what it wrote


@pytest.mark.parametrize(
    ("body", "closed", "why"),
    [
        ('{"name": "search", "arguments": {}}', False, "not closed with </tool_call>"),
        ("search(query)", True, "not valid JSON"),
        ('{"name": "a", "arguments": {}} {"name": "b", "arguments": {}}', True, "not valid JSON"),
        ("[" * 10_000, True, "not valid JSON"),
        (
            "9" * 5_000,
            True,
            "not valid JSON",
        ),  # Python refuses to read integers of that many digits
        ("[]", True, 'no "name"'),
        ('{"name": 3, "arguments": {}}', True, 'no "name"'),
        ('{"name": "search"}', True, 'no "arguments" object'),
        ('{"name": "search", "arguments": "Vexlor"}', True, 'no "arguments" object'),
    ],
)
def test_a_malformed_call_says_what_is_wrong_with_it(body, closed, why):
    parsed = parse_call(body, closed)
    assert why in parsed.error and parsed.arguments == {}


def test_several_calls_are_read_in_order_and_each_on_its_own():
    text = (
        call(query="one") + "and <tool_call>broken" + call("find", query="two") + "<tool_call>open"
    )
    names = [(c.name, c.arguments, c.error is None) for c in hermes().extract_tool_calls(text)]
    assert names == [
        ("search", {"query": "one"}, True),
        ("", {}, False),
        ("find", {"query": "two"}, True),
        ("", {}, False),
    ]


@pytest.mark.parametrize(
    "thought", ["<think>{}</think>", "<think>{}", "<think>a</think>b<think>{}</think>"]
)
def test_a_call_inside_a_thought_is_a_thought(thought):
    assert hermes().extract_tool_calls(thought.format(call(query="x"))) == []
    assert (
        len(hermes().extract_tool_calls(f"<think>{call(query='x')}</think>{call(query='y')}")) == 1
    )


TAGS = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
    "<tool_response>",
]
WORDS = [
    "{",
    "}",
    "[",
    '"',
    '{"name": "search", "arguments": {"query": ',
    '"x"}}',
    ":",
    "\n",
    " ",
    "\ud800",
    "[" * 3000,
]
WORDS += ["Oslo", "<tool_", "call>", "<answer", "<"]
model_text = st.lists(
    st.one_of(st.sampled_from(TAGS + WORDS), st.text(max_size=8)), max_size=12
).map("".join)
json_text = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda x: (
        st.lists(x, max_size=3)
        | st.dictionaries(st.sampled_from(["name", "arguments", "query"]), x, max_size=3)
    ),
    max_leaves=8,
).map(json.dumps)


@given(st.one_of(st.text(), model_text, json_text), st.booleans())
def test_parsing_never_raises(body, closed):
    parsed = parse_call(body, closed)
    assert isinstance(parsed.name, str) and isinstance(parsed.arguments, dict)
    assert parsed.error is None or "\n" not in parsed.error


@given(
    st.lists(
        st.one_of(
            st.text(max_size=20), model_text, json_text.map("<tool_call>{}</tool_call>".format)
        ),
        max_size=4,
    )
)
def test_no_episode_raises_whatever_the_agent_writes(turns):
    """Neither a step nor the outcome; and what is recorded of a call can be written to a rollouts
    file."""
    env = hermes(Counting())
    for text in turns:
        result = step(env, text)
        assert isinstance(json.dumps(result.info), str)
        if result.done:
            assert result.stop_reason in StopReason and result.observation is None
            break
    outcome = env.outcome(StopReason.ANSWERED)
    assert outcome.reward == pytest.approx(sum(outcome.parts.values()))


@pytest.mark.parametrize("depth", [10, 950, 5000])
def test_what_could_be_parsed_can_be_recorded(search, depth):
    """A rollouts file holds the arguments as JSON: nesting that can be read must not be too deep to
    be written."""
    body = '{"name": "search", "arguments": {"query": ' + "[" * depth + "]" * depth + "}}"
    result = step(hermes(search), f"<tool_call>{body}</tool_call>")
    assert not result.done and search.queries == []
    json.dumps({"steps": [{"info": result.info}]})


# ------------------------------------------------------------------------------ what comes of calls


def test_results_come_back_one_message_a_call_in_order(search):
    result = step(
        hermes(search), call(query="one") + call("find", query="two") + call(query="three")
    )
    roles, texts = zip(
        *((m["role"], m["content"]) for m in result.observation.messages), strict=True
    )
    assert roles == ("tool",) * 3
    assert (
        texts[0] == "result 1"
        and "unknown tool 'find'; available: search" in texts[1]
        and texts[2] == "result 2"
    )


def test_calls_of_one_turn_run_concurrently():
    """A handshake, not a stop-watch: the first call ends only when the second has run."""

    class Meet(BaseTool):
        name, description = "meet", "Waits for the other call."
        parameters = {
            "type": "object",
            "properties": {"wait": {"type": "boolean"}},
            "required": ["wait"],
        }

        async def execute(self, args):
            await event.wait() if args["wait"] else event.set()
            return "met"

    async def episode():
        nonlocal event
        event = asyncio.Event()
        return await env.step(Action(call("meet", wait=True) + call("meet", wait=False)))

    event, env = None, hermes(Meet(), tool_timeout_s=5.0)
    assert [m["content"] for m in asyncio.run(episode()).observation.messages] == ["met", "met"]


def test_a_call_in_a_turn_that_was_cut_off_is_never_executed(search):
    """It looks complete, and may still miss what the agent meant to add. (TRL 1.16 executes it.)"""
    env = hermes(search)
    result = step(env, call(query="x"), finish_reason="length")
    assert (result.done, result.stop_reason) == (True, StopReason.MAX_TOKENS)
    assert search.queries == [] and env.tool_calls == 0


def test_the_last_turn_cannot_call_because_nobody_would_read_the_result(search):
    result = step(hermes(search, max_turns=1), call(query="x"))
    assert result.stop_reason is StopReason.MAX_TURNS and search.queries == []


def test_exactly_as_many_calls_as_allowed_are_run(search):
    """The last allowed call runs, alone or with others of its turn; one more ends the episode."""
    env = hermes(search, max_turns=20, max_tool_calls=3)
    assert not step(env, call(query="a")).done
    assert not step(env, call(query="b") + call(query="c")).done
    assert (search.queries, env.tool_calls) == (["a", "b", "c"], 3)
    assert step(env, call(query="d")).stop_reason is StopReason.TOOL_BUDGET
    assert search.queries == ["a", "b", "c"]


def test_invalid_calls_count_in_a_row_only(search):
    env = hermes(search, max_turns=20, max_tool_calls=20, max_invalid_calls=2)
    for text in ("<tool_call>x</tool_call>", call(query="fine"), call("find"), call(query="fine")):
        assert not step(env, text).done
    assert not step(env, call("find")).done
    assert step(env, call(wrong="argument")).stop_reason is StopReason.INVALID_CALLS
    assert (env.tool_calls, env.turns) == (6, 6)


def test_invalid_calls_of_one_turn_are_in_a_row_too(search):
    """A valid call behind them begins a new row, and does not undo the old one."""
    env = hermes(search, max_turns=20, max_tool_calls=20, max_invalid_calls=2)
    assert not step(env, call("find") + call(query="fine") + call("find")).done
    both = step(env, call(query="fine") + call("find") + call("find") + call(query="fine"))
    assert both.stop_reason is StopReason.INVALID_CALLS


# --------------------------------------------------------------------------- why an episode stopped

GOOD = "<think>done</think><answer>Marn</answer>"


class Crashing(HermesToolEnv):
    async def step(self, action):
        raise KeyError("a bug in an environment")


class Broken(Counting):
    async def execute(self, args):
        raise OSError(5, "Input/output error")


class Hanging(Counting):
    async def execute(self, args):
        await asyncio.Event().wait()


ENDINGS = {
    StopReason.ANSWERED: {"script": [call(query="x"), GOOD]},
    StopReason.NO_ANSWER: {"script": [call(query="x"), "I give up"]},
    StopReason.MAX_TURNS: {
        "script": [call(query=q) for q in "abcdefghi"],
        "config": {"max_turns": 3},
    },
    StopReason.MAX_TOKENS: {"script": [call(query="x"), ("cut", call(query="y"))]},
    StopReason.CONTEXT_OVERFLOW: {
        "script": [call(query=q) for q in "abcdefghi"],
        "config": {"max_turns": 9},
        "max_context": 150,
    },
    StopReason.TOOL_BUDGET: {
        "script": [call(query="x"), call(query="x") * 2],
        "config": {"max_tool_calls": 2},
    },
    StopReason.INVALID_CALLS: {"script": ["<tool_call>x"] * 9, "config": {"max_invalid_calls": 3}},
    StopReason.TIME_OUT: {"script": [call(query="x")], "tool": Hanging, "timeout_s": 0.05},
    StopReason.ERROR: {"script": [call(query="x")], "env": Crashing},
}


def run_to_the_end(
    chat, script, config=None, tool=Counting, env=HermesToolEnv, **limits
) -> tuple[Trajectory, BaseTool]:
    used = tool()
    policy = ScriptedPolicy(
        chat,
        lambda s, turn, ids: (
            cut(chat, script[turn][1]) if script[turn][0] == "cut" else script[turn]
        ),
    )
    settings = EnvConfig(**({"tool_timeout_s": 60.0, "call_reward": 0.1} | (config or {})))
    loop = make_env_loop(policy, lambda row: env({"search": used}, settings), **limits)
    return asyncio.run(loop.run(task(), Sampling(400))), used


@pytest.mark.parametrize("reason", StopReason, ids=str)
def test_every_stop_reason_is_reached_and_pays_on_the_last_action(chat, reason):
    """Also when the episode was cut off behind a tool result: the outcome never sits on a masked
    token."""
    trajectory, _ = run_to_the_end(chat, **ENDINGS[reason])
    assert trajectory.stop_reason is reason
    assert (trajectory.error is not None) == reason.failed
    good = reason is StopReason.ANSWERED
    outcome = 1.0 if good else -EnvConfig().format_penalty
    assert sum(trajectory.reward_parts.values()) == pytest.approx(outcome)
    last = trajectory.steps[-1]
    assert last.done and last.action_ids
    [row] = trajectory_rows(trajectory, 0)
    ends = [
        i for i, mask in enumerate(row.action_mask) if mask and not (row.action_mask + [0])[i + 1]
    ]
    assert row.rewards[ends[-1]] == pytest.approx(outcome)
    assert sum(row.rewards) == pytest.approx(trajectory.reward)
    assert [i for i, r in enumerate(row.rewards) if r and not row.action_mask[i]] == []
    for step in trajectory.steps:
        process = sum(0.1 if c["ok"] else -0.1 for c in step.info.get("tool_calls", []))
        assert step.reward == pytest.approx(process + outcome * (step is last))


def test_nothing_is_executed_beyond_the_budget(chat):
    _, used = run_to_the_end(chat, **ENDINGS[StopReason.TOOL_BUDGET])
    assert len(used.queries) == 1  # the two calls that would have made three are not even begun


def test_a_turn_cut_by_the_end_of_the_context_is_an_overflow_and_not_a_long_turn(chat):
    """The same cut has two causes; which limit it was decides what a user should raise."""
    prompt = len(chat.prompt_ids(question_row()["prompt"], [Counting().schema()]))
    script = [("cut", "word word")]
    roomy, _ = run_to_the_end(chat, script, max_context=prompt + 50, max_tokens_per_turn=50)
    tight, _ = run_to_the_end(chat, script, max_context=prompt + 49, max_tokens_per_turn=50)
    assert (roomy.stop_reason, tight.stop_reason) == (
        StopReason.MAX_TOKENS,
        StopReason.CONTEXT_OVERFLOW,
    )


def test_a_prompt_that_fills_the_context_ends_without_a_step(chat):
    trajectory, _ = run_to_the_end(chat, [GOOD], max_context=10)
    assert (trajectory.stop_reason, trajectory.steps, trajectory.reward) == (
        StopReason.CONTEXT_OVERFLOW,
        [],
        0,
    )
    assert trajectory_rows(trajectory, 0) == []


# ------------------------------------------------------------------------------------------ rewards


def test_process_rewards_sit_on_the_last_token_of_their_call(chat):
    script = [call(query="x"), call("find"), call(query="y") + call(query="z"), GOOD]
    trajectory, _ = run_to_the_end(chat, script)
    assert [s.reward for s in trajectory.steps] == pytest.approx([0.1, -0.1, 0.2, 1.0])
    assert trajectory.process == pytest.approx(0.2)
    [row] = trajectory_rows(trajectory, 0, [PROCESS])
    paid = {i: reward for i, reward in enumerate(row.rewards) if reward}
    assert list(paid.values()) == pytest.approx([0.1, -0.1, 0.1, 0.1, 1.0])
    *calls, outcome = paid
    assert {i: reward for i, reward in enumerate(row.columns["process_BT"]) if reward} == {
        i: paid[i] for i in calls
    }
    said = [chat.decode(row.input_ids[row.step_ids.index(row.step_ids[i]) : i + 1]) for i in calls]
    assert said == [
        call(query="x"),
        call("find"),
        call(query="y"),
        call(query="y") + call(query="z"),
    ]
    assert outcome == max(
        i for i, mask in enumerate(row.action_mask) if mask
    )  # its turn's last token


def test_calls_that_end_the_episode_are_paid_on_the_way(chat):
    trajectory, _ = run_to_the_end(chat, [call("find"), call("find")])
    assert trajectory.stop_reason is StopReason.INVALID_CALLS
    assert [len(s.token_rewards) for s in trajectory.steps] == [
        1,
        1,
    ] and trajectory.process == pytest.approx(-0.2)


def test_a_tool_that_fails_is_not_the_agents_fault(chat):
    """It pays nothing, costs nothing, and does not count as an invalid call."""
    trajectory, _ = run_to_the_end(
        chat, [call(query="x"), GOOD], {"max_invalid_calls": 1}, tool=Broken
    )
    assert trajectory.stop_reason is StopReason.ANSWERED and trajectory.steps[0].reward == 0.0
    assert trajectory.steps[0].info["tool_calls"][0]["error"] == ToolErrorKind.TOOL_ERROR
    assert trajectory.metrics["failed_calls"] == 1 and trajectory.metrics["invalid_calls"] == 0


# ------------------------------------------------------------------------------------------ by name


def test_a_row_chooses_its_environment_and_its_tools(search):
    other = Counting()
    other.name = "other"
    tools = {"search": search, "other": other}
    for silent in ({}, {"tools": None}, None):
        assert list(make_env(question_row(env_kwargs=silent), tools, EnvConfig()).tools) == [
            "search",
            "other",
        ]
    only = make_env(question_row(env_kwargs={"tools": ["other"]}), tools, EnvConfig())
    assert isinstance(only, HermesToolEnv) and list(only.tools) == ["other"]
