"""What a tool of one's own may do and do wrong: results, retries, batches, state of one episode;
and the page about it."""

from __future__ import annotations

import asyncio
import re
import runpy
import shlex
import sys
import threading
from pathlib import Path

import pytest
from conftest import ScriptedPolicy, call, make_env_loop, question_row, task
from runs import ROOT

from agent_r1.config.settings import EnvConfig
from agent_r1.core import Sampling, StopReason
from agent_r1.env import make_env
from agent_r1.ground.errors import AgentR1Error
from agent_r1.rollout.rollouts import run_episodes
from agent_r1.tool import BaseTool, ToolCall, ToolErrorKind, ToolOutput, call_tool, tool
from agent_r1.tool.batch import BatchTool


def make(execute, base=BaseTool, /, **attributes):
    """A tool named `it` around `execute(args)` (or, with base=BatchTool,
    `execute_batch(many_args)`)."""
    method = "execute_batch" if base is BatchTool else "execute"
    body = {
        "name": "it",
        "description": "It.",
        "parameters": {"type": "object"},
        method: lambda self, a: execute(a),
    }
    return type("It", (base,), body | attributes)()


async def ask(tool_, timeout_s=5.0, max_chars=1000, **arguments):
    return await call_tool(
        {tool_.name: tool_}, ToolCall(tool_.name, arguments), timeout_s, max_chars
    )


# ------------------------------------------------------------------------------------------ results


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (lambda: 1 // 0, "integer division or modulo by zero"),
        (lambda: None, "it returned NoneType, and an agent reads text; return a str"),
        (lambda: iter_of_one(), "it returned generator, and an agent reads text; return a str"),
    ],
    ids=["raises", "nothing", "a generator"],
)
def test_a_run_that_ends_because_of_a_tool_names_file_and_line(chat, result, says):
    @tool
    def broken(x: int) -> str:
        """Break.

        Args:
            x: Anything.
        """
        return result()

    line = (
        result if "zero" in says else broken.function
    ).__code__.co_firstlineno  # what raised, or what returned it
    policy = ScriptedPolicy(chat, [call("broken", x=1)] * 4 + ["<answer>a</answer>"])
    loop = make_env_loop(policy, lambda row: make_env(row, {"broken": broken}, EnvConfig()))
    with pytest.raises(AgentR1Error) as ended:
        asyncio.run(run_episodes(loop, [task(session=str(n)) for n in range(2)], Sampling(64)))
    assert f"error: broken failed: {says} ({__file__}:{line})" in str(
        ended.value
    ) and "\n" not in str(ended.value)
    assert __file__ not in chat.decode(policy.seen[-1][1])  # the agent is told nothing of our files


def test_a_failed_call_is_made_again_only_where_that_is_safe():
    for retries, error in ((0, ToolErrorKind.TOOL_ERROR), (1, ToolErrorKind.TOOL_ERROR), (2, None)):
        tries = iter([OSError("one"), OSError("two"), "three"])

        def execute(args, tries=tries):
            if isinstance(value := next(tries), Exception):
                raise value
            return value

        assert asyncio.run(ask(make(execute, retries=retries))).error == error
    # All tries share one deadline.
    assert (
        asyncio.run(ask(make(lambda args: 1 / 0, retries=10**6), timeout_s=0.3)).error
        is ToolErrorKind.TIME_OUT
    )


def iter_of_one():
    yield 1


# ------------------------------------------------------------------------------------------ batches


def test_calls_of_one_moment_share_a_batch_and_each_has_its_own_result():
    batches = []

    def execute_batch(many_args):
        batches.append(len(many_args))
        return [
            ZeroDivisionError("by zero") if args["x"] == 0 else ToolOutput(str(1 / args["x"]))
            for args in many_args
        ]

    it = make(execute_batch, BatchTool)

    async def main():
        return await asyncio.gather(*(ask(it, x=x) for x in (1, 2, 0, 1)))

    results = asyncio.run(main())
    assert [result.content for result in results] == [
        "1.0",
        "0.5",
        "error: it failed: by zero",
        "1.0",
    ] and batches == [4]
    assert [result.content for result in asyncio.run(main())][:2] == [
        "1.0",
        "0.5",
    ]  # in another event loop


def test_a_batch_that_hangs_keeps_the_deadlines_of_its_calls():
    let_go = threading.Event()
    it = make(lambda many_args: [let_go.wait(60)] * len(many_args), BatchTool)

    async def main():
        return await asyncio.gather(*(ask(it, 0.2) for _ in range(5)))

    assert {result.error for result in asyncio.run(main())} == {ToolErrorKind.TIME_OUT}
    let_go.set()
    assert asyncio.run(ask(it, 30)).content == "true"


# ----------------------------------------------------------------------------- state of one episode


class Counter(BaseTool):
    name = "count"
    description = "Counts."
    parameters = {"type": "object"}

    def __init__(self, ended):
        super().__init__()
        self.ended, self.count = ended, 0

    def for_episode(self, shared):
        shared["counters"] = shared.get("counters", 0) + 1
        return Counter(self.ended)

    async def execute(self, args):
        self.count += 1
        if self.count == 2:
            await asyncio.sleep(args.get("wait", 0))
        return str(self.count)

    def close(self):
        self.ended.append(self.count)


@pytest.mark.parametrize("end", ["answered", "time_out", "error", "cancelled"])
def test_an_episode_has_its_own_tool_which_is_closed_however_it_ends(chat, end):
    ended: list[int] = []
    shared_tool = Counter(ended)

    def script(session, turn, prompt_ids):
        if turn == 1 and end == "error":
            raise AgentR1Error("the policy is gone")
        return [
            call("count"),
            call("count", wait=0 if end == "answered" else 60),
            "<answer>x</answer>",
        ][turn]

    timeout = 0.3 if end == "time_out" else 20
    loop = make_env_loop(
        ScriptedPolicy(chat, script),
        lambda row: make_env(row, {"count": shared_tool}, EnvConfig(tool_timeout_s=50)),
        timeout_s=timeout,
    )

    async def main():
        running = run_episodes(
            loop, [task(question_row(), session) for session in "ab"], Sampling(64)
        )
        return await (asyncio.wait_for(running, 0.3) if end == "cancelled" else running)

    expected = {"error": AgentR1Error, "cancelled": TimeoutError, "time_out": AgentR1Error}.get(end)
    if expected:
        with pytest.raises(expected):
            asyncio.run(main())
    else:
        assert {t.stop_reason for t in asyncio.run(main())} == {StopReason.ANSWERED}
    assert sorted(ended) == ([1, 1] if end == "error" else [2, 2]) and shared_tool.count == 0


# ----------------------------------------------------------------------------------------- the page


def test_the_page_does_what_it_says(tmp_path, monkeypatch, capsys):
    """docs/tutorial/your-own-tool.md in an empty folder: its files are written, its commands run,
    its outputs compared."""
    page = (ROOT / "docs/tutorial/your-own-tool.md").read_text()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    before = set(sys.modules)
    parts = re.finditer(
        r"^`(?P<file>\w+\.py)`:\n\n```python\n(?P<code>.*?)```|^```console\n(?P<console>.*?)```",
        page,
        re.S | re.M,
    )
    ran = []
    try:
        for part in parts:
            if part["file"]:
                (tmp_path / part["file"]).write_text(part["code"])
                continue
            command, _, output = part["console"].partition("\n")
            _, python, script = shlex.split(command)
            assert python == "python"
            runpy.run_path(script, run_name="__main__")
            assert capsys.readouterr().out == output
            ran.append(script)
    finally:
        for name in set(sys.modules) - before:
            if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
                del sys.modules[name]
    assert ran == ["try_it.py", "try_all.py", "try_mcp.py"]
    assert page.count("```python") == len(list(tmp_path.glob("*.py")))
