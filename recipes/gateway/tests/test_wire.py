"""What the gateway reads, refuses and counts."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import socket

import httpx
import pytest
from agents import SEARCH, gateway_flow, lenient
from conftest import ScriptedPolicy, call, cut, question_row
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from other_values import is_harmless, with_other_values

from agent_r1 import (
    Hermes,
    HermesToolEnv,
    Outcome,
    Sampling,
    StopReason,
    Task,
    WorldEnv,
    run_episodes,
    trajectory_rows,
)
from agent_r1_recipes.gateway.wire import HARMLESS, Refusal, read_call

ANSWER = "<think>short</think><answer>Marn</answer>"


def world(micro):
    def make_env(row):
        return HermesToolEnv(micro.tools, lenient(micro.config.env))

    return make_env


def play(micro, chat, script, agent, *overrides, policy=None, tasks=1, **limits):
    """Play one episode, or more, with a scripted policy; return trajectories and the flow."""
    policy = policy or ScriptedPolicy(chat, script)
    flow = gateway_flow(policy, chat, agent, world(micro), *overrides, **limits)
    row = question_row()
    episodes = [Task(row, str(i), f"s{i}", 5) for i in range(tasks)]
    return asyncio.run(run_episodes(flow, episodes, Sampling(48))), flow


USER = [{"role": "user", "content": "Who founded Vexlor?"}]


def test_an_answer_has_thought_calls_and_content(micro, chat):
    seen = []

    async def agent(client, task):
        choice = await client.ask(USER, tools=[SEARCH])
        seen.append(choice)
        message = choice["message"]
        results = await client.results(message)
        seen.append(await client.ask([*USER, message, *results], tools=[SEARCH]))
        return "Marn"

    script = [f"<think>look</think>{call(query='Vexlor')}{call(query='Marn')}", ANSWER]
    [trajectory], flow = play(micro, chat, script, agent)
    first = seen[0]["message"]
    assert first["reasoning_content"] == "look" and first["content"] is None
    arguments = [json.loads(c["function"]["arguments"]) for c in first["tool_calls"]]
    assert arguments == [{"query": "Vexlor"}, {"query": "Marn"}]
    assert [choice["finish_reason"] for choice in seen] == ["tool_calls", "stop"]
    assert seen[1]["message"]["content"] == "<answer>Marn</answer>"
    assert trajectory.stop_reason is StopReason.ANSWERED and trajectory.reward == 1.0
    [row] = trajectory_rows(trajectory, 0)
    assert sum(row.action_mask) == sum(len(step.action_ids) for step in trajectory.steps)


REFUSED = {
    "n": {"n": 2},
    "logit_bias": {"logit_bias": {"5": 1}},
    "response_format": {"response_format": {"type": "json_object"}},
    "logprobs": {"logprobs": True},
    "tool_choice": {"tool_choice": "required"},
    "role": {"messages": [{"role": "robot", "content": "x"}]},
    "tool id": {"messages": [*USER, {"role": "tool", "tool_call_id": "x", "content": "y"}]},
    "image": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    "no messages": {"messages": []},
    "max_tokens": {"max_tokens": 0},
    "stream": {"stream": "yes"},
    "stream_options": {"stream_options": "usage"},
    "n as a truth": {"n": True},
    "schema": {"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]},
    "properties": {
        "tools": [
            {"type": "function", "function": {"name": "f", "parameters": {"properties": ["a"]}}}
        ]
    },
    "id in a list": {"messages": [*USER, {"role": "tool", "tool_call_id": ["x"], "content": "y"}]},
}


def test_what_cannot_be_honoured_is_refused_and_costs_no_row(micro, chat):
    refused = {}

    async def agent(client, task):
        for name, change in REFUSED.items():
            reply = await client.post({"model": "m", "messages": USER} | change)
            refused[name] = (reply.status_code, reply.json()["error"]["message"])
        reply = await client.http.post(f"{client.base}/chat/completions", content=b"{")
        refused["JSON"] = (reply.status_code, reply.json()["error"]["message"])
        await client.ask(USER)
        return "Marn"

    [trajectory], flow = play(micro, chat, [ANSWER], agent)
    assert {status for status, _ in refused.values()} == {400}
    assert all(message for _, message in refused.values())
    assert flow.counts["gateway/refused_400"] == len(REFUSED) + 1
    assert trajectory.reward == 1.0 and len(trajectory.steps) == 1


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from(["", "x", "\ud800", "user", "tool"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["type", "function", "name", "content", "text", "role"]), inner
        )
    ),
    max_leaves=4,
)
VALID = {
    "messages": [
        {"role": "system", "content": "s", "name": "n"},
        {"role": "user", "content": [{"type": "text", "text": "t"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "i", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "i", "content": "r"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "stop": ["x"],
    "max_tokens": 5,
    "stream": True,
    "stream_options": {"include_usage": True},
    "n": 1,
    "tool_choice": "auto",
    "response_format": {"type": "text"},
}


PUBLISHED = VALID | {
    "messages": [
        *VALID["messages"],
        {"role": "assistant", "content": "c", "reasoning_content": "t",
         "annotations": [{"a": "b"}]},
        {"role": "user", "name": "n", "content": [{"type": "text", "text": "t",
         "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant",
         "content": [{"type": "text", "text": "t", "annotations": [{"a": "b"}]}],
         "tool_calls": [{"index": 0, "id": "j", "type": "function",
                         "function": {"name": "f", "arguments": "{}"}}]},
    ],
    "model": "m", "temperature": 0.5, "top_p": 0.9, "seed": 1, "user": "u", "metadata": {"a": "b"},
    "safety_identifier": "s", "store": True, "service_tier": "auto", "prompt_cache_key": "k",
    "prompt_cache_retention": "24h", "reasoning_effort": "low", "verbosity": "low",
    "parallel_tool_calls": True, "modalities": ["text"],
    "stream_options": {"include_usage": True, "include_obfuscation": False},
}  # fmt: skip
"""The fields of OpenAI's form that published clients send."""


def test_each_value_is_read_refused_or_harmless():
    """... or overridden by the run, and counted."""
    before = read_call(json.dumps(PUBLISHED).encode())
    named = set()
    for name, other in with_other_values(PUBLISHED):
        try:
            call = read_call(json.dumps(other).encode())
            seen = call != before or name in call.overridden_names
        except Refusal:
            seen = True
        assert seen or is_harmless(name, HARMLESS), name
        named.update(key for key in HARMLESS if is_harmless(name, [key]))
    assert named == set(HARMLESS)
    assert set(before.ignored_names) == {name.replace(".", "_") for name in HARMLESS}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"guided_json": {"type": "object"}}, "'guided_json'"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "'chat_template_kwargs'"),
        ({"min_tokens": 5}, "'min_tokens'"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice"),
        ({"messages": [*USER, {"role": "assistant", "refusal": "I will not."}]}, "refusal"),
        ({"messages": [{"role": "user", "content": [{"type": "x", "text": "t"}]}]}, "only text"),
        (
            {"messages": [*USER, {"role": "assistant", "reasoning": "a", "thinking": "b"}]},
            "two different thoughts",
        ),
    ],
)
def test_a_field_that_would_change_a_turn_is_refused_by_name(change, words):
    with pytest.raises(Refusal, match=words):
        read_call(json.dumps({"messages": USER} | change).encode())


def test_an_object_of_nothing_is_no_value():
    """LiteLLM sends one back with each answer of an assistant."""
    answer = {"role": "assistant", "content": "a", "provider_specific_fields": {"refusal": None}}
    assert len(read_call(json.dumps({"messages": [*USER, answer, *USER]}).encode()).messages) == 3
    answer["provider_specific_fields"] = {"refusal": None, "citations": [["x"]]}
    with pytest.raises(Refusal, match="citations"):
        read_call(json.dumps({"messages": [*USER, answer, *USER]}).encode())


def test_the_thought_of_an_example_is_shown(micro, chat):
    """Of a turn that the model sampled, the ids have it; of another one, the text."""
    prompts = []

    async def agent(client, task):
        example = {"role": "assistant", "content": "Tulo", "reasoning_content": "look first"}
        await client.ask([*USER, example, *USER])
        return "Marn"

    def script(session, turn, ids):
        prompts.append(chat.decode(ids))
        return ANSWER

    play(micro, chat, script, agent)
    [prompt] = prompts
    assert "<think>look first</think>Tulo" in prompt


def places(value, path=()):
    """List the paths of all parts of a JSON value."""
    yield path
    items: list = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    for key, inner in items:
        yield from places(inner, (*path, key))


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from([path for path in places(VALID) if path]), JSON)
def test_any_change_of_a_body_is_read_or_refused(path, value):
    """A fault of a client is status 400 with a sentence, never a failure of ours."""
    body = copy.deepcopy(VALID)
    inner = body
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    try:
        read_call(json.dumps(body).encode())
    except Refusal as refusal:
        assert refusal.status == 400 and str(refusal)


def test_a_deep_body_is_read_or_refused(micro, chat):
    """A schema that Python's parser just reads may be too deep for its writer."""
    statuses = set()

    async def agent(client, task):
        for depth in range(100, 1000, 30):
            schema = '{"a": ' * depth + "1" + "}" * depth
            tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {schema}}}}}'
            body = f'{{"messages": [{{"role": "user", "content": "?"}}], "tools": [{tool}]}}'
            reply = await client.http.post(f"{client.base}/chat/completions", content=body)
            statuses.add(reply.status_code)

    script = lambda session, turn, ids: ANSWER  # noqa: E731
    play(micro, chat, script, agent)
    assert statuses == {200, 400}


def test_what_a_message_has_besides_its_text_is_counted(micro, chat):
    async def agent(client, task):
        await client.ask([{"role": "user", "name": "bob", "content": "Who founded Vexlor?"}])

    _, flow = play(micro, chat, [ANSWER], agent)
    assert flow.counts["gateway/ignored_messages_name"] == 1


def test_a_tool_without_a_schema_takes_no_arguments(micro, chat):
    async def agent(client, task):
        tool = {"type": "function", "function": {"name": "now"}}
        choice = await client.ask(USER, tools=[tool])
        assert choice["finish_reason"] == "stop"

    play(micro, chat, [ANSWER], agent)


def test_half_of_a_surrogate_pair_reaches_a_client_as_an_escape(micro, chat):
    """A client that writes UTF-8 could not send such a character back."""

    async def agent(client, task):
        message = (await client.ask(USER, tools=[SEARCH]))["message"]
        [one] = message["tool_calls"]
        assert one["function"]["arguments"].isascii()
        assert json.loads(one["function"]["arguments"]) == {"query": "\ud800"}
        messages = [*USER, message, {"role": "tool", "tool_call_id": one["id"], "content": "x"}]
        await client.ask(messages, tools=[SEARCH])

    script = ['<tool_call>\n{"name": "search", "arguments": {"query": "\\ud800"}}\n</tool_call>']
    [trajectory], flow = play(micro, chat, [*script, ANSWER], agent)
    assert len(trajectory_rows(trajectory, 0)) == 1 and not flow.counts["gateway/cuts_edited"]


def test_duplicate_keys_of_a_call_have_one_meaning(micro, chat):
    """The client gets the arguments that a parser keeps. Its own duplicates match nothing."""

    async def agent(client, task):
        message = (await client.ask(USER, tools=[SEARCH]))["message"]
        [one] = message["tool_calls"]
        assert one["function"]["arguments"] == '{"query": "second"}'
        one["function"]["arguments"] = '{"query": "first", "query": "second"}'
        messages = [*USER, message, {"role": "tool", "tool_call_id": one["id"], "content": "x"}]
        await client.ask(messages, tools=[SEARCH])

    turn = '{"name": "search", "arguments": {"query": "first", "query": "second"}}'
    script = [f"<tool_call>\n{turn}\n</tool_call>", ANSWER]
    _, flow = play(micro, chat, script, agent, "rollout.agent_losses=1")
    assert flow.counts["gateway/cuts_edited"] == 1


def test_a_client_that_waits_for_100_continue_gets_it(micro, chat):
    """curl waits a second for it before a long body."""

    async def agent(client, task):
        body = json.dumps({"messages": USER}).encode()
        host, port = client.base.split("/")[2].split(":")
        path = "/" + client.base.split("/", 3)[3]
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {path}/chat/completions HTTP/1.1\r\ncontent-length: {len(body)}\r\n"
        writer.write(head.encode() + b"Expect: 100-continue\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 100")
        writer.write(body)
        await reader.readline()
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        await reader.read(2000)
        writer.close()

    play(micro, chat, [ANSWER], agent)


def test_unknown_and_ended_keys(micro, chat):
    statuses = []

    async def agent(client, task):
        root = client.base.partition("/episode/")[0]
        for key in ("nobody", client.variables["OPENAI_API_KEY"]):
            reply = await client.http.post(
                f"{root}/v1/chat/completions",
                json={"messages": USER},
                headers={"authorization": f"Bearer {key}"},
            )
            statuses.append(reply.status_code)
        agent.address = f"{client.base}/chat/completions"
        hard_coded = {"authorization": "Bearer sk-hard-coded"}
        reply = await client.http.post(agent.address, json={"messages": USER}, headers=hard_coded)
        statuses.append(reply.status_code)
        other = await client.http.post(f"{client.base}/responses", json={})
        statuses.append((other.status_code, "set_default_openai_api" in other.text))

    play(micro, chat, [ANSWER, ANSWER], agent)
    assert statuses == [401, 200, 200, (404, True)]


def test_a_full_context_keeps_the_rows(micro, chat):
    async def agent(client, task):
        message = (await client.ask(USER))["message"]
        long = {"role": "user", "content": "word " * 600}
        reply = await client.post({"messages": [*USER, message, long]})
        assert reply.status_code == 400
        assert reply.json()["error"]["code"] == "context_length_exceeded"
        return 1 / 0  # as an unhandled BadRequestError would

    [trajectory], flow = play(micro, chat, ["<think>hm</think>no"], agent)
    assert trajectory.stop_reason in (StopReason.NO_ANSWER, StopReason.CONTEXT_OVERFLOW)
    assert len(trajectory.steps) == 1 and flow.counts["gateway/failed_tokens"] == 0


def test_a_stop_string_ends_sampling_at_its_token(micro, chat, cloned_model):
    from agents import sampler

    contents = []

    async def agent(client, task):
        choice = await client.ask(
            task["messages"], tools=[SEARCH], stop=["</think>"], max_tokens=40
        )
        contents.append(choice)

    policy = sampler(cloned_model, chat)
    [trajectory], flow = play(micro, chat, None, agent, policy=policy)
    [step] = trajectory.steps
    text = chat.turn_text(step.action_ids)
    if choice_stopped(contents[0], text):
        assert text.endswith("</think>") and contents[0]["finish_reason"] == "stop"
    assert flow.counts["gateway/trained_tokens"] == policy.stats.decode_tokens


def choice_stopped(choice, text):
    stopped = "</think>" in text
    assert stopped, f"the cloned model begins its turns with a thought, and sampled {text!r}"
    return stopped


def test_streams_have_the_same_answer(micro, chat):
    events = []

    async def agent(client, task):
        body = {"messages": USER, "stream": True, "stream_options": {"include_usage": True}}
        reply = await client.post(body | {"tools": [SEARCH]})
        for line in reply.text.splitlines():
            if line.startswith("data: {"):
                events.append(json.loads(line.removeprefix("data: ")))
        assert reply.text.rstrip().endswith("data: [DONE]")

    script = [f"<think>look</think>some text {call(query='Vexlor')}"]
    play(micro, chat, script, agent)
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "some text"
    [calls] = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert json.loads(calls[0]["function"]["arguments"]) == {"query": "Vexlor"}
    assert events[-1]["usage"]["completion_tokens"] > 0


def test_a_half_read_answer_is_given_again(micro, chat):
    async def agent(client, task):
        body = json.dumps({"messages": USER}).encode()
        host, port = client.base.split("/")[2].split(":")
        path = "/" + client.base.split("/", 3)[3]
        head = f"POST {path}/chat/completions HTTP/1.1\r\ncontent-length: {len(body)}\r\n\r\n"
        loop = asyncio.get_running_loop()
        with socket.socket() as connection:
            connection.setblocking(False)
            await loop.sock_connect(connection, (host, int(port)))
            await loop.sock_sendall(connection, head.encode() + body)
            await loop.sock_recv(connection, 20)  # of the answer's head
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.05)
        first = (await client.ask(USER))["message"]["content"]
        second = (await client.ask(USER))["message"]["content"]
        assert (first, second) == ("<answer>one</answer>", "<answer>two</answer>")
        return "two"

    script = ["<answer>one</answer>", "<answer>two</answer>"]
    [trajectory], flow = play(micro, chat, script, agent)
    assert flow.counts["gateway/retries"] == 1 and len(trajectory.steps) == 2
    assert flow.counts["gateway/undelivered_tokens"] == 0


def test_a_client_that_says_retry_gets_the_same(micro, chat):
    async def agent(client, task):
        for _ in range(2):
            reply = await client.post({"messages": USER}, **{"x-stainless-retry-count": "1"})
            assert "one" in reply.text

    [trajectory], flow = play(micro, chat, ["<answer>one</answer>"], agent)
    assert len(trajectory.steps) == 1


def test_the_reward_comes_from_where_the_setting_says(micro, chat):
    statuses = []

    async def agent(client, task):
        await client.ask(USER)
        address = client.variables["AGENT_R1_REWARD_URL"]
        keys = [client.variables["OPENAI_API_KEY"]] + [client.variables["AGENT_R1_REWARD_KEY"]] * 4
        for key, reward in zip(keys, ["9", "NaN", "true", "0.5", "1"], strict=True):
            reply = await client.http.post(
                address,
                content=f'{{"reward": {reward}}}'.encode(),
                headers={"authorization": f"Bearer {key}"},
            )
            statuses.append(reply.status_code)
        late = await client.post({"messages": USER})
        statuses.append(late.status_code)

    script = ['{"reward": 1}']  # a model that writes a reward gains nothing
    [trajectory], flow = play(micro, chat, script, agent, "rollout.agent_reward=agent")
    assert statuses == [401, 400, 400, 200, 400, 401]
    assert trajectory.reward == 0.5
    assert flow.counts["gateway/refused_reward"] == 4 and flow.counts["gateway/late_calls"] == 1


def test_without_a_reward_the_episode_failed(micro, chat):
    async def agent(client, task):
        await client.ask(USER)

    async def rewarded(client, task):
        await client.ask(USER)
        key = {"authorization": f"Bearer {client.variables['AGENT_R1_REWARD_KEY']}"}
        address = client.variables["AGENT_R1_REWARD_URL"]
        await client.http.post(address, json={"reward": 1}, headers=key)

    numbers = itertools.count()

    async def either(client, task):
        await (rewarded if next(numbers) else agent)(client, task)

    script = lambda session, turn, ids: ANSWER  # noqa: E731
    trajectories, _ = play(micro, chat, script, either, "rollout.agent_reward=agent", tasks=2)
    failed = [t for t in trajectories if t.stop_reason is StopReason.ERROR]
    assert len(failed) == 1 and "no reward was reported" in failed[0].error


def test_a_world_whose_method_hung_is_not_scored(micro, chat):
    """What the method did to the world is not known, so no reward is."""

    class World(WorldEnv):
        def outcome(self, stop_reason):
            return Outcome(1.0)

    async def agent(client, task):
        await client.ask(USER)

    numbers = itertools.count()

    def make_env(row):
        env = World({}, lenient(micro.config.env))
        env.reset = lambda row: env.first(row, None)
        env.broken = "wait took longer than 5 s" if next(numbers) else None
        return env

    policy = ScriptedPolicy(chat, lambda session, turn, ids: ANSWER)
    flow = gateway_flow(policy, chat, agent, make_env)
    tasks = [Task(question_row(), str(i), f"s{i}", 5) for i in range(2)]
    trajectories = asyncio.run(run_episodes(flow, tasks, Sampling(48)))
    assert sorted(t.reward for t in trajectories) == [0.0, 1.0]
    [failed] = [t for t in trajectories if t.error]
    assert "wait took longer" in failed.error


def test_an_invented_answer_is_not_captured(micro, chat):
    numbers = itertools.count()

    async def agent(client, task):
        number = next(numbers)
        await client.ask(USER)
        return "from another model" if number else "Marn"

    script = lambda session, turn, ids: ANSWER  # noqa: E731
    trajectories, flow = play(micro, chat, script, agent, tasks=2)
    assert sorted(trajectory.reward for trajectory in trajectories) == [0.0, 1.0]
    [failed] = [t for t in trajectories if t.stop_reason is StopReason.ERROR]
    assert "not captured" in failed.error and not failed.steps
    assert flow.counts["gateway/failed_tokens"] == len(chat.turn_ids(ANSWER, Hermes()))


def test_a_cut_off_turn_has_no_calls(micro, chat):
    async def agent(client, task):
        choice = await client.ask(USER, tools=[SEARCH])
        assert choice["finish_reason"] == "length" and "tool_calls" not in choice["message"]

    [trajectory], _ = play(micro, chat, [cut(chat, call(query="x")[:-4])], agent)
    assert trajectory.stop_reason is StopReason.MAX_TOKENS


@pytest.mark.parametrize(
    "text", [b"GARBAGE\r\n\r\n", b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n"]
)
def test_no_http_gets_an_error(text):
    from agent_r1_recipes.gateway.server import Reply, serving

    async def handle(request):
        return Reply.of({})

    async def ask():
        async with serving(handle) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(text)
            answer = await reader.read()
            writer.close()
            async with httpx.AsyncClient(trust_env=False) as client:
                chunked = iter_chunks()
                ok = await client.post(f"http://127.0.0.1:{port}/", content=chunked)
            return answer, ok.status_code

    answer, ok = asyncio.run(ask())
    assert answer.startswith(b"HTTP/1.1 400") and ok == 200


async def iter_chunks():
    yield b"a"
    yield b"bc"
