"""Tools of MCP servers: a real one as a child process and one on loopback, and one that hangs,
dies, floods and lies."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import mcp_servers
import pytest
from building import called, tools_of
from conftest import ScriptedPolicy, call, question_row, task
from other_values import with_other_values

from agent_r1 import (
    AgentR1Error,
    ConfigError,
    EnvConfig,
    InvalidArgumentsError,
    RolloutConfig,
    Sampling,
    StopReason,
    load_config,
    make_loop,
    run_episodes,
)
from agent_r1_recipes.mcp import client as mcp
from agent_r1_recipes.mcp.client import HARMLESS, McpTool
from agent_r1_recipes.mcp.settings import McpSettings

SERVERS = Path(mcp_servers.__file__)
OURS = [*sys.path]


def by_hand(kind: str = "", file: str = "") -> str:
    return shlex.join(
        [sys.executable, "-S", str(SERVERS), kind or "honest", *([str(file)] if file else [])]
    )


def ask(*call, **arguments):
    return asyncio.run(called(*call, **arguments))


def gone(pid: int) -> bool:
    """Whether the process ends; it is waited for."""
    for _ in range(1000):
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.01)
    return False


def noticed(tool) -> bool:
    """Whether its session has heard of the end of its server, which takes a moment; it is waited
    for."""
    for _ in range(1000):
        if not tool.session._answers.statistics().open_send_streams:
            return True
        time.sleep(0.01)
    return False


@pytest.fixture
def opened():
    """The tools of one server by hand; its sessions end with the test."""
    made = []

    def make(kind="", file="", names=("hand",), **options):
        made.append(tools_of(*names, env=McpSettings(mcp={"hand": by_hand(kind, file)}, **options)))
        return made[-1]

    yield make
    for tools in made:
        for tool in tools.values():
            tool.session.close()


# -------------------------------------------------------------------------------- a real one, twice


@contextmanager
def served(calls: list[str], port: int):
    """The SDK's server on loopback, in a thread."""
    import uvicorn

    app = mcp_servers.sdk_server(calls).streamable_http_app()
    server = uvicorn.Server(
        uvicorn.Config(app, "127.0.0.1", port, log_level="critical", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module", params=["stdio", "http"])
def real(request, port):
    if request.param == "stdio":
        tools = tools_of(
            "files",
            env=McpSettings(mcp={"files": shlex.join([sys.executable, str(SERVERS), "sdk"])}),
        )
        yield tools
    else:
        with served([], port):
            tools = tools_of(
                "files", env=McpSettings(mcp={"files": f"http://127.0.0.1:{port}/mcp"})
            )
            yield tools
    tools["read"].session.close()


def test_all_tools_of_a_server(real):
    assert list(real) == ["read", "note", "picture", "hang", "flood"]
    schema = real["read"].schema()["function"]
    assert schema["description"].startswith("Read a file.") and schema["parameters"][
        "required"
    ] == ["name"]
    assert (
        real["read"].retries == 2 and real["note"].retries == 0
    )  # the server says which may be called twice
    # What a server says is data: the chat format, not this tool, makes sure that no control token
    # comes of it.
    assert ask(real, "read", name="a").content == "<tool_call>a\x1b[31m\n"
    assert ask(real, "read", nam="a").content.startswith(
        "error: read: missing argument 'name'; accepts: name (string,"
    )
    failed = ask(real, "read", name="none")
    assert failed.error == "invalid_arguments" and failed.content.startswith("error: read: ")
    assert ask(real, "picture").content == "[image, which cannot be shown]"


def test_one_session_lives_through_all_event_loops(real):
    first, second = ask(real, "note", text="a").content, ask(real, "note", text="b").content
    assert int(second) == int(first) + 1


def test_a_hang_is_left_to_the_deadline_and_holds_up_nobody(real):
    async def main():
        hung = asyncio.create_task(called(real, "hang", 0.3, 100))
        rest = await asyncio.gather(*(called(real, "read", 30, 100, name=str(n)) for n in range(8)))
        return [hung.done(), *rest, await hung]

    _, *rest, hung = asyncio.run(main())
    assert [result.content for result in rest] == [f"<tool_call>{n}\x1b[31m\n" for n in range(8)]
    assert hung.content == "error: hang took longer than 0.3 s and was stopped"


def test_a_flood_is_capped(real):
    assert len(ask(real, "flood", 30, size=10**6).content) == 1000
    over = ask(real, "flood", 30, size=mcp.MAX_MESSAGE_BYTES + 1)
    assert (
        len(over.content) == 1000 or "more than" in over.content
    )  # a process that we start is not bounded
    assert ask(real, "read", 30, name="b").ok


def test_a_server_over_http_that_was_started_anew(port):
    calls: list[str] = []
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with served(calls, port):
        tools = tools_of(
            "files.read", env=McpSettings(mcp={"files": f"http://127.0.0.1:{port}/mcp"})
        )
        assert list(tools) == ["read"] and ask(tools, "read", name="a").ok
    dead = ask(tools, "read", 0.5, name="b")
    assert dead.error in ("tool_error", "time_out") and "\n" not in dead.content
    with served(calls, port):
        assert ask(tools, "read", 30, name="c").ok
    assert calls == ["a", "c"]
    tools["read"].session.close()


def test_a_session_that_a_server_has_forgotten_is_opened_anew():
    sessions: set[str] = set()
    server = mcp_servers.with_sessions(sessions)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    tools = tools_of(
        "old", env=McpSettings(mcp={"old": f"http://127.0.0.1:{server.server_port}/mcp"})
    )
    assert ask(tools, "pid").ok and sessions == {"0"}
    sessions.clear()
    sessions.add("another")
    assert ask(tools, "pid").ok and sessions == {"another", "1"}
    tools["pid"].session.close()
    server.shutdown()


# -------------------------------------------------------------------------------- it dies, it hangs


def test_who_gives_up_while_a_server_starts_takes_it_from_nobody(opened):
    tools = opened()
    pid = int(ask(tools, "pid").content)
    os.kill(pid, signal.SIGKILL)
    assert gone(pid) and noticed(tools["pid"])

    async def main():
        return await asyncio.gather(
            *(called(tools, "pid", seconds, 100) for seconds in (0.001, 30))
        )

    hasty, patient = asyncio.run(main())
    assert hasty.error == "time_out" and patient.ok


def test_a_server_that_dies_is_started_again_by_the_next_call(opened):
    tools = opened()
    before = ask(tools, "pid").content
    died = ask(tools, "die")
    assert died.content == "error: die failed: MCP server 'hand': it ended (OutOfCheese: +++)"
    after = ask(tools, "pid").content
    assert after != before and gone(int(before))
    os.kill(int(after), signal.SIGKILL)  # while nobody asks
    assert gone(int(after)) and noticed(tools["pid"])
    last = ask(tools, "pid")
    assert last.ok and last.content not in (before, after)


def test_only_a_tool_that_says_it_is_safe_is_called_again(opened, tmp_path):
    tools = opened("honest", tmp_path / "died")
    assert ask(tools, "flaky").content == "at last"
    assert not ask(tools, "die").ok


def test_two_hundred_calls_of_which_ten_hang(opened):
    """Each hanging call ends at its own deadline, and no other call is lost or mixed up."""
    tools = opened(names=["hand.count", "hand.hang"])

    async def main():
        names = ["hang" if n % 20 == 7 else "count" for n in range(200)]
        deadline = {"hang": 0.5, "count": 60}
        return names, await asyncio.gather(*(called(tools, n, deadline[n], 100) for n in names))

    names, results = asyncio.run(main())
    counted = [
        int(result.content) for name, result in zip(names, results, strict=True) if name == "count"
    ]
    assert sorted(counted) == list(range(1, 191))
    assert {
        result.error for name, result in zip(names, results, strict=True) if name == "hang"
    } == {"time_out"}
    assert ask(tools, "count").content == "191"  # and the session lives on


# ----------------------------------------------------------------------------- refused at the start


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("no-list", "breaks the protocol: tools: "),
        ("array-schema", "breaks the protocol: tools.0.inputSchema.type: Input should be 'object'"),
        ("twins", "both have a tool called 'a'"),
        ("novel", "its description and schema have 2"),
        ("endless", "it lists more than 1000 tools"),
        ("same-page", "its list of tools has the page 'more' twice"),
        (
            "deep-schema",
            "tool a: parameters is not a JSON schema (JSON nested deeper than 64 levels)",
        ),
    ],
)
def test_a_server_that_lies_is_refused_before_the_run(opened, kind, says):
    with pytest.raises(AgentR1Error) as refused:
        opened(kind)
    assert (
        says in str(refused.value)
        and "hand" in str(refused.value)
        and "\n" not in str(refused.value)
    )


def test_a_server_that_does_not_list_its_tools_holds_the_start_up_no_longer_than_that(
    opened, monkeypatch
):
    monkeypatch.setattr(mcp, "OPEN_S", 0.6)
    with pytest.raises(
        AgentR1Error, match=r"'hand' failed: it did not list its tools within 0.6 s"
    ):
        opened("no-answer")


def test_a_result_is_checked_within_bounds(opened):
    # Its schema's pattern would take hours, in the thread of all sessions.
    assert ask(opened(), "evil").content.startswith("x\n")


@pytest.mark.parametrize(
    ("text", "structured", "shown"),
    [
        ("see structured content", {"price": 12}, True),
        ("It costs 112 euros.", {"price": 12}, True),
        ("", {"price": 12}, True),
        ("It costs 12 euros.", {"price": 12}, False),
        ('{"price": 12}', {"price": 12}, False),
        ("3", {"result": 3}, False),
        ("lamp\nrope", {"result": ["lamp", "rope"]}, False),
        ("lamp", {"result": ["lamp", "rope"]}, True),
        ('{"names": ["K\\u00e4the \\"K\\""], "n": null, "ok": true}',
         {"names": ['Käthe "K"'], "n": None, "ok": True}, False),
        ("done", {"ok": {"all": [{"stock": 4}]}}, True),
        ("It costs 12.5 euros, or -12, or 12,000.", {"price": 12}, True),
        ("It costs 12.", {"price": 12}, False),
        ("count 2", {"count": 2, "stock": 2}, True),
        ("red, blue", {"sky": "red", "sea": "blue"}, True),
        ("sky red, sea blue", {"sky": "red", "sea": "blue"}, False),
        ('{\n  "sky": [1.0, 1.0]\n}', {"sky": [1.0, 1.0]}, False),
        ("Here they are.", {"items": []}, True),
        ("0 " * 200, {"n": [0] * 101}, True),
    ],
)  # fmt: skip
def test_a_text_that_sums_up_hides_no_structured_result(opened, text, structured, shown):
    content = ask(opened(), "shop", text=text, structured=structured).content
    appended = json.dumps(structured, ensure_ascii=False)
    assert (appended in content.splitlines()[-1] and content != text) == shown, content
    assert content.startswith(text)


def test_an_error_without_words_is_told_in_words(opened):
    result = ask(opened(), "silent")
    assert not result.ok and "the tool failed, without a word" in result.content


def test_a_command_sees_the_variables_that_the_settings_name(opened, monkeypatch):
    monkeypatch.setenv("SHOP_API_KEY", "sk-shop-4711")
    assert ask(opened(), "variable").content == "None"
    named = opened(mcp_variables=["SHOP_API_KEY"])
    assert ask(named, "variable").content == "sk-shop-4711"
    each = opened(mcp_variables=["SHOP_API_KEY"], mcp_per_episode=["hand"])["variable"]
    tool = each.for_episode({})
    assert ask({"variable": tool}, "variable").content == "sk-shop-4711"
    tool.session.close()
    monkeypatch.delenv("SHOP_API_KEY")
    with pytest.raises(AgentR1Error, match="SHOP_API_KEY, which is not set"):
        opened(mcp_variables=["SHOP_API_KEY"])


def test_a_server_that_wants_a_token(monkeypatch):
    server = mcp_servers.with_token("t-4711")
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    place = f"http://127.0.0.1:{server.server_port}/mcp"
    with pytest.raises(AgentR1Error, match="HTTP 401, .*env.mcp_tokens.shop=VARIABLE"):
        tools_of("shop", env=McpSettings(mcp={"shop": place}))
    guarded = McpSettings(mcp={"shop": place}, mcp_tokens={"shop": "SHOP_TOKEN"})
    with pytest.raises(AgentR1Error, match="SHOP_TOKEN, which is not set"):
        tools_of("shop", env=guarded)
    monkeypatch.setenv("SHOP_TOKEN", "t-wrong")
    with pytest.raises(AgentR1Error, match="it does not accept the token in SHOP_TOKEN") as error:
        tools_of("shop", env=guarded)
    assert "t-wrong" not in str(error.value)
    monkeypatch.setenv("SHOP_TOKEN", "t-4711")
    tools = tools_of("shop", env=guarded)
    assert ask(tools, "pid").content == "pid"
    tools["pid"].session.close()
    server.shutdown()


@pytest.mark.parametrize(
    ("kind", "error", "told"),
    [
        ("http", 403, "HTTP 403, the server asks for authorisation"),
        ("http", 405, "HTTP 405, this address takes no messages"),
        ("http", 429, "HTTP 429, too many calls at once"),
        ("http", 500, "HTTP 500"),
        ("data", {"code": -32603, "message": "", "data": "disk full"}, ': "disk full"'),
        ("data", {"code": -32603, "message": ""}, "error -32603, without a word"),
        ("data", {"code": -32602, "message": "bad", "data": ["x"]}, 'bad: ["x"]'),
        ("data", {"code": -32602, "message": "Unknown tool: pid"}, "Unknown tool: pid"),
    ],
)
def test_a_failed_call_is_told_with_its_cause(kind, error, told):
    """... also of a tool that has gone since the server listed it."""
    server = mcp_servers.with_failing_calls(kind, error)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    place = f"http://127.0.0.1:{server.server_port}/mcp"
    tools = tools_of("shop", env=McpSettings(mcp={"shop": place}))
    result = ask(tools, "pid")
    assert not result.ok and told in result.content, result.content
    tools["pid"].session.close()
    server.shutdown()


def test_a_server_that_does_not_come_up(opened, monkeypatch):
    with pytest.raises(
        AgentR1Error,
        match=r"MCP server 'x' \(nowhere --at all\) cannot be used: No such file.*: nowhere",
    ):
        tools_of("x", env=McpSettings(mcp={"x": "nowhere --at all"}))
    failing = shlex.join([sys.executable, "-S", "-c", "import nonsense"])
    with pytest.raises(
        AgentR1Error, match=r"it ended \(ModuleNotFoundError: No module named 'nonsense'\)"
    ):
        tools_of("x", env=McpSettings(mcp={"x": failing}))
    with pytest.raises(AgentR1Error, match="cannot be used: .*connect"):
        tools_of("x", env=McpSettings(mcp={"x": "http://127.0.0.1:9/mcp"}))
    monkeypatch.setattr(mcp, "OPEN_S", 0.5)
    with pytest.raises(AgentR1Error, match="cannot be used: it was not ready within 0.5 s"):
        opened("mute")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (['env.mcp.f="python \'x"'], "No closing quotation"),
        (["env.mcp.f=''"], "give the command that starts the server, or its URL"),
        (["env.mcp.two words=python"], "env.mcp"),
        (["env.mcp_per_episode=[f]"], "names 'f', which env.mcp lacks; it has no servers"),
        (["env.mcp_tokens.f=TOKEN"], "names 'f', which env.mcp lacks; it has no servers"),
        (["env.mcp.f=python", "env.mcp_variables=[sk-4711]"], "name of an environment variable"),
    ],
)
def test_settings_that_make_no_sense(overrides, says):
    with pytest.raises(ConfigError) as refused:
        load_config("smoke", overrides)
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_servers_are_named_in_the_settings():
    config = load_config(
        "smoke", ['env.mcp.f="python server.py"', "env.mcp.web=http://127.0.0.1:9/mcp"]
    )
    assert config.env.mcp == {"f": "python server.py", "web": "http://127.0.0.1:9/mcp"}
    with pytest.raises(
        ConfigError, match="unknown tool 'g'; choose from calculator, f, .*, shuffled_search, web"
    ):
        tools_of("g", env=config.env)


# ---------------------------------------------------------------------- episodes, and the end of it


@pytest.mark.slow
def test_each_episode_may_have_a_session_of_its_own(opened, chat):
    """Two episodes side by side count for themselves, in processes that end with them, also when
    one is cut off."""
    tools = opened(names=["hand.count", "hand.pid", "hand.hang"], mcp_per_episode=["hand"])

    def script(session, turn, prompt_ids):
        if session == "slow" and turn == 2:
            return call("hang")
        return [call("pid"), call("count"), call("count"), "<answer>x</answer>"][turn]

    env = EnvConfig(episode_timeout_s=3, tool_timeout_s=60)
    loop = make_loop(
        ScriptedPolicy(chat, script),
        chat,
        tools,
        RolloutConfig(max_tokens_per_turn=64, max_context=1000),
        env,
    )
    tasks = [task(question_row(), session) for session in ("a", "b", "slow")]
    done = asyncio.run(run_episodes(loop, tasks, Sampling(64)))
    said = [
        [c["content"] for step in t.steps for c in step.info.get("tool_calls", ())] for t in done
    ]
    assert [heard[1:] for heard in said] == [["1", "2"], ["1", "2"], ["1"]]
    assert done[2].stop_reason is StopReason.TIME_OUT
    pids = [int(heard[0]) for heard in said]
    assert len(set(pids)) == 3 and all(map(gone, pids))


PARENT = """
import asyncio, os, signal, sys
sys.path[:0] = {path}
from agent_r1 import Workspace, load_config
from building import called
tools = Workspace(load_config("smoke", ["env.tools=[hand.pid]", {server!r}])).load_tools()
print(asyncio.run(called(tools, "pid", 30, 100)).content, flush=True)
if {killed}:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("killed", [False, True])
def test_no_server_outlives_us(tmp_path, killed):
    """It hears of our end by the end of its input."""
    command = by_hand("honest", tmp_path / "bye")
    parent = PARENT.format(path=OURS, server=f"env.mcp.hand={json.dumps(command)}", killed=killed)
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True)
    assert done.returncode == (-signal.SIGKILL if killed else 0) and done.stderr == ""
    pid = int(done.stdout)
    assert gone(pid) and (tmp_path / "bye").read_text() == f"bye {pid}\n"


def test_the_text_of_an_embedded_resource_is_text():
    from mcp import types

    from agent_r1_recipes.mcp.client import _text

    text = types.TextResourceContents(uri="file:///a.txt", mimeType="text/plain", text="THE BODY")
    blob = types.BlobResourceContents(uri="file:///a.png", mimeType="image/png", blob="iVBO")
    link = types.ResourceLink(type="resource_link", name="a.txt", uri="file:///a.txt")
    assert _text(types.EmbeddedResource(type="resource", resource=text)) == "THE BODY"
    assert (
        _text(types.EmbeddedResource(type="resource", resource=blob))
        == "[file:///a.png, which cannot be shown]"
    )
    assert _text(link) == "a.txt: file:///a.txt"


PUBLISHED = {
    "_meta": {"a": "b"},
    "isError": False,
    "resultType": "complete",
    "structuredContent": {"price": 12, "note": {"of": ["x"]}},
    "content": [
        {"type": "text", "text": "t", "annotations": {"priority": 1.0}, "_meta": {"a": "b"}},
        {"type": "image", "data": "aGk=", "mimeType": "image/png"},
        {"type": "audio", "data": "aGk=", "mimeType": "audio/wav"},
        {"type": "resource", "resource": {"uri": "f:///t", "text": "b", "mimeType": "text/plain"}},
        {"type": "resource", "resource": {"uri": "f:///b", "blob": "aGk=", "mimeType": "a/b"}},
        {"type": "resource_link", "name": "n", "title": "l", "description": "d", "uri": "f:///l",
         "size": 3, "mimeType": "text/plain", "icons": [{"src": "f:///i"}]},
    ],
}  # fmt: skip
"""Every key of a result, as the protocol has them."""


def read_result(body: dict) -> str:
    """Return what an agent reads of a result, errors included."""
    import mcp.types as types

    session = SimpleNamespace(ask=lambda call: future)
    future: Future = Future()
    future.set_result(types.CallToolResult.model_validate(body))
    tool = SimpleNamespace(session=session)
    try:
        return asyncio.run(McpTool.execute(tool, {})).content
    except InvalidArgumentsError as error:
        return f"error: {error}"


def test_each_value_of_a_result_is_read_refused_or_harmless():
    before = read_result(PUBLISHED)
    named = set()
    for name, other in with_other_values(PUBLISHED):
        key = next((word for word in name.split(".") if word in HARMLESS), None)
        try:
            seen = read_result(other) != before
        except ValueError:  # the SDK refuses a part of an unknown type
            seen = True
        assert seen or key, name
        named.add(key)
    assert named - {None} == set(HARMLESS)
