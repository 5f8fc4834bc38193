"""A model of an API plays our environments, and what goes wrong on the way costs little."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from itertools import pairwise

import pytest
from api_servers import Wrong, answer, api_flow, scripted_api
from conftest import fails_with, question_row

from agent_r1 import HermesToolEnv, Sampling, StopReason, Task, make_env, run_episodes

CALL = answer("Let me look.", [("search", '{"query": "Vexlor"}')])
END = answer("<answer>Marn</answer>")
PRICED = ("rollout.api_price_in=1000", "rollout.api_price_out=2000")
"""A token costs a tenth and two tenths of a cent."""


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr("agent_r1_recipes.api.client.FIRST_WAIT_S", 0.01)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test-0123456789")


@pytest.fixture
def play(micro, chat, tmp_path):
    """Play `tasks` episodes against a script; return trajectories, the API and the client."""

    port = 0  # of the first server: an answer belongs to an address

    def run(script, *overrides, tasks=1, temperature=0.0, env=HermesToolEnv):
        nonlocal port
        rows = [question_row(f"Who founded Vexlor {n}?") for n in range(tasks)]

        def make_env(row):
            return env(micro.tools, micro.config.env)

        with (
            scripted_api(script, port) as api,
            api_flow(api.url, tmp_path, chat, make_env, *overrides) as flow,
        ):
            port = int(api.url.split(":")[2].split("/")[0])
            jobs = [Task(row, str(n), f"s-{n}") for n, row in enumerate(rows)]
            sampling = Sampling(64, temperature)
            played = asyncio.run(run_episodes(flow, jobs, sampling))
            return played, api, flow

    return run


def test_native_calls_come_back_with_their_results(play, chat):
    thinking = answer("", [("search", '{"query": "Vexlor"}')] * 2, reasoning_content="hm")
    [trajectory], api, flow = play([thinking, END])
    first, second = api.asked
    assert first["model"] == "some-model" and first["temperature"] == 0
    assert first["max_tokens"] == 64 and first["tools"][0]["function"]["name"] == "search"
    assert [m["role"] for m in second["messages"]] == ["user", "assistant", "tool", "tool"]
    assert [m["tool_call_id"] for m in second["messages"][2:]] == ["id-0", "id-1"]
    assert "reasoning_content" not in second["messages"][1]
    assert api.keys == ["Bearer sk-test-0123456789"] * 2
    assert trajectory.stop_reason is StopReason.ANSWERED and trajectory.reward == 1.0
    call = '<tool_call>\n{"name": "search", "arguments": {"query": "Vexlor"}}\n</tool_call>'
    assert chat.turn_text(trajectory.steps[0].action_ids) == f"<think>hm</think>{call}{call}"
    assert trajectory.metrics["tool_calls"] == 2 and trajectory.metrics["invalid_calls"] == 0
    usage = flow.client.usage()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["usd"]) == (200, 20, None)


def test_calls_as_text_for_a_server_without_tools(play):
    call = '<tool_call>\n{"name": "search", "arguments": {"query": "Vexlor"}}\n</tool_call>'
    [trajectory], api, _ = play([answer(call), END], "rollout.api_calls=text")
    assert trajectory.reward == 1.0 and trajectory.metrics["tool_calls"] == 1
    first, second = api.asked
    assert "tools" not in first
    assert [m["role"] for m in first["messages"]] == ["system", "user"]
    assert '"name": "search"' in first["messages"][0]["content"]
    assert second["messages"][-1]["role"] == "user"
    assert second["messages"][-1]["content"].startswith("<tool_response>\n")


def test_a_call_in_the_text_and_a_native_one(play):
    text = '<tool_call>\n{"name": "search", "arguments": {"query": "a"}}\n</tool_call>'
    both = answer(text, [("search", '{"query": "b"}')])
    [trajectory], api, _ = play([both, END])
    assert trajectory.metrics["tool_calls"] == 2
    assert [m["role"] for m in api.asked[1]["messages"]] == ["user", "assistant", "tool", "user"]


@pytest.mark.parametrize("arguments", ['{"query": ', '["a"]', '{"query": "\ud800"}'])
def test_an_invalid_call_is_the_models_fault(play, arguments):
    [trajectory], api, flow = play([answer(None, [("search", arguments)]), END])
    surrogate = "ud800" in ascii(arguments)
    assert trajectory.metrics["invalid_calls"] == (0 if surrogate else 1)
    assert trajectory.reward == 1.0
    result = api.asked[1]["messages"][-1]
    assert result["role"] == "tool" and ("error" in result["content"]) == (not surrogate)
    assert flow.client.retries == 0


def test_react_is_text(play):
    def react(tools, config):
        row = question_row(agent_name="react")
        return make_env(row, tools, config)

    turns = [answer("Action: search\nAction Input: x"), answer("Final Answer: Marn")]
    [trajectory], api, _ = play(turns, env=react)
    assert "tools" not in api.asked[0] and api.asked[0]["messages"][0]["role"] == "system"
    assert trajectory.stop_reason in (StopReason.ANSWERED, StopReason.NO_ANSWER)
    with fails_with("no_native_calls"):
        play([END], "rollout.api_calls=native", env=react)


@pytest.mark.parametrize(
    "wrong",
    [
        Wrong(429, b'{"error": {"message": "slow down"}}', {"retry-after": "0"}),
        Wrong(500, b"oops"),
        Wrong(503, b"<html><body>Bad Gateway</body></html>", {"retry-after-ms": "5"}),
        Wrong(200, b"<html><body>Sign in</body></html>"),
        Wrong(200, json.dumps({"choices": []}).encode()),
        Wrong(200, json.dumps({"choices": [{"message": None}]}).encode()),
        Wrong(200, json.dumps(END).encode(), half=True),
        Wrong(200, b'{"choices": ' + b"[" * 100_000),
    ],
    ids=["429", "500", "503", "html", "no choices", "no message", "half", "deep"],
)
def test_a_failed_attempt_is_tried_again(play, wrong):
    [trajectory], api, flow = play([wrong, wrong, END])
    assert trajectory.reward == 1.0 and len(api.asked) == 3
    usage = flow.client.usage()["usage"]
    assert (usage["requests"], usage["retries"], usage["failed_attempts"]) == (3, 2, 2)
    assert (usage["prompt_tokens"], usage["answers"]) == (100, 1)


def test_retry_after_is_waited_for_by_all(play):
    times = []

    def script(request, number):
        times.append(time.monotonic())
        busy = Wrong(429, b"{}", {"retry-after": "0.4"})
        return busy if number == 0 else END

    play(script, "rollout.api_concurrent=1", tasks=3)
    # The second request may have been sent already when the first was refused.
    assert max(after - before for before, after in pairwise(sorted(times))) >= 0.35


def test_too_long_a_wait_ends_the_run(play):
    with fails_with("api_busy", "3600 s"):
        play([Wrong(429, b"{}", {"retry-after": "3600"})])


def test_an_unauthorised_key_is_not_tried_again(play):
    body = b'{"error": {"message": "Incorrect API key provided: sk-test-0123456789"}}'
    with fails_with("key_refused", "OPENAI_API_KEY is set") as caught:
        play([Wrong(401, body)])
    assert "sk-test" not in str(caught.value)


def test_a_broken_key_is_not_printed(play, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret\nx")
    with fails_with("bad_key") as caught:
        play([END])
    assert "sk-secret" not in str(caught.value)


def test_an_empty_account_and_a_refused_field_stop_at_once(play):
    for body, status in ((b'{"error": {"code": "insufficient_quota"}}', 429), (b"no", 400)):
        with fails_with("api_refused"):
            play([Wrong(status, body)])


def test_a_few_lost_episodes_count_as_wrong_and_many_stop(play, tmp_path):
    def script(request, number):
        lost = "Vexlor 3?" in request["messages"][0]["content"]
        return Wrong(500, b"oops") if lost else END

    played, _, _ = play(script, "rollout.api_attempts=2", tasks=20)
    assert Counter(t.stop_reason for t in played)[StopReason.ERROR] == 1
    (tmp_path / "calls.jsonl").unlink()
    with fails_with("server_gone"):
        play(lambda request, number: Wrong(500, b"oops"), "rollout.api_attempts=2", tasks=20)


def test_a_full_context_is_an_overflow(play):
    body = b'{"error": {"message": "too long", "code": "context_length_exceeded"}}'
    [trajectory], _, _ = play([CALL, Wrong(400, body)])
    assert trajectory.stop_reason is StopReason.CONTEXT_OVERFLOW and len(trajectory.steps) == 1


FULL = {
    "llama.cpp": (
        400,
        {"error": {"code": 400, "message": "the request exceeds the available context size"}},
    ),
    "llama.cpp, type": (
        400,
        {"error": {"code": 400, "message": "no room", "type": "exceed_context_size_error"}},
    ),
    "llama.cpp, older": (500, {"error": {"message": "Context size has been exceeded."}}),
    "Anthropic": (
        400,
        {
            "type": "error",
            "error": {"message": "prompt is too long: 210000 tokens > 200000"},
        },
    ),
    "Gemini": (
        400,
        [{"error": {"message": "The input token count (12) exceeds the maximum number of tokens"}}],
    ),
    "TGI": (
        422,
        {"error": "Input validation error: `inputs` must have less than 1024 tokens. Given: 2048"},
    ),
    "TGI, both": (
        422,
        {"message": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 2048."},
    ),
    "vLLM": (
        400,
        {"object": "error", "message": "This model's maximum context length is 4096 tokens."},
    ),
    "vLLM, engine": (
        400,
        {"message": "The decoder prompt (length 5000) is longer than the maximum model length."},
    ),
    "Anthropic, with the turn": (
        400,
        {"error": {"message": "input length and `max_tokens` exceed context limit: 190000 + 20"}},
    ),
    "Bedrock": (400, {"message": "Input is too long for requested model."}),
    "Groq": (
        400,
        {"error": {"message": "Please reduce the length of the messages or completion."}},
    ),
    "xAI": (400, {"error": "This model's maximum prompt length is 131072."}),
    "DashScope": (400, {"error": {"message": "Range of input length should be [1, 30720]"}}),
    "Zhipu": (400, {"error": {"message": "Prompt exceeds max length"}}),
    "Cohere": (
        400,
        {"message": "total number of tokens in the prompt cannot exceed 4081"},
    ),
    "late words": (400, {"error": {"message": "x" * 300 + " maximum context length"}}),
}
"""What servers answer when a conversation is too long, as their source or documents have it."""


@pytest.mark.parametrize("server", FULL)
def test_a_full_context_is_told_in_many_words(play, server):
    status, body = FULL[server]
    [trajectory], api, flow = play([CALL, Wrong(status, json.dumps(body).encode())])
    assert trajectory.stop_reason is StopReason.CONTEXT_OVERFLOW and len(trajectory.steps) == 1
    assert len(api.asked) == 2 and flow.client.retries == 0


def test_a_refused_conversation_is_no_lost_server(play):
    """A 400 is not sent again, and its sentence says what was refused."""

    def script(request, number):
        refused = "Vexlor 3?" in request["messages"][0]["content"]
        return Wrong(400, b'{"error": {"message": "bad words"}}') if refused else END

    played, api, _ = play(script, "rollout.api_concurrent=1", tasks=20)
    [lost] = [t for t in played if t.stop_reason is StopReason.ERROR]
    assert (
        "refused 'some-model': HTTP 400: bad words" in lost.error and "attempts" not in lost.error
    )
    assert len(api.asked) == 20


@pytest.mark.parametrize("arguments", ["", " \n", None, {}, "{}"])
def test_a_call_without_arguments_is_a_call(play, chat, arguments):
    [trajectory], api, _ = play([answer(None, [("search", arguments)]), END])
    text = chat.turn_text(trajectory.steps[0].action_ids)
    assert text == '<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>'
    assert "query" in api.asked[1]["messages"][-1]["content"]  # the tool asks for its argument
    sent = api.asked[1]["messages"][1]["tool_calls"][0]["function"]
    assert sent == {"name": "search", "arguments": "{}"}


def test_a_cut_off_turn_runs_no_call(play):
    cut = answer(None, [("search", '{"query": "x"}')], finish_reason="length")
    [trajectory], api, _ = play([cut])
    assert trajectory.stop_reason is StopReason.MAX_TOKENS and len(api.asked) == 1
    empty = answer(None, finish_reason="length", reasoning_content=None)
    [trajectory], _, _ = play(lambda request, number: empty, "rollout.api_omit=[temperature]")
    assert trajectory.stop_reason is StopReason.MAX_TOKENS and trajectory.steps[0].action_ids


# ------------------------------------------------------------------------------------- the budget


def test_a_budget_is_never_exceeded_and_counts_retries(play):
    """Show the true cost: each answer costs 12 cents, and half of the attempts fail."""
    costs = []

    def script(request, number):
        if number % 2:
            return Wrong(500, b"oops")
        costs.append(0.1 + 0.02)
        return answer("<answer>Marn</answer>", usage=(100, 10))

    with fails_with("budget_spent", "larger --budget"):
        play(script, *PRICED, "rollout.api_budget=5", tasks=40)
    assert 0 < sum(costs) <= 5


def test_a_larger_budget_goes_on_without_paying_twice(play):
    script = lambda request, number: CALL if number % 2 == 0 else END  # noqa: E731
    one = "rollout.api_concurrent=1"
    with fails_with("budget_spent"):
        play(script, *PRICED, one, "rollout.api_budget=2.5", tasks=8)
    larger = "rollout.api_budget=50"
    played, api, flow = play(lambda request, number: END, *PRICED, one, larger, tasks=8)
    usage = flow.client.usage()["usage"]
    assert usage["replayed"] + usage["requests"] == sum(len(t.steps) for t in played)
    assert usage["replayed"] > 0 and usage["requests"] == len(api.asked)
    assert usage["answers"] == usage["replayed"] + usage["requests"]


def test_a_budget_needs_prices(play):
    with fails_with("missing_price"):
        play([END], "rollout.api_budget=1")


def test_an_answer_without_usage_counts_as_the_most_that_it_may_cost(play):
    _, api, flow = play([answer("<answer>Marn</answer>", usage=None)], *PRICED)
    usage = flow.client.usage()["usage"]
    bytes_of_request = len(json.dumps(api.asked[0], ensure_ascii=False).encode())
    assert usage["usd"] == 0
    assert usage["usd_uncertain"] == pytest.approx(bytes_of_request / 1000 + 64 * 2 / 1000)


def test_a_torn_line_and_another_process(play, tmp_path):
    play([END])
    ledger = tmp_path / "calls.jsonl"
    whole = ledger.read_bytes()
    ledger.write_bytes(whole + whole[:30])
    [trajectory], api, flow = play([])
    assert trajectory.reward == 1.0 and not api.asked and flow.client.replayed == 1

    with api_flow(api.url, tmp_path, flow.chat, None), fails_with("file_in_use"):
        play([])


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("api.example.com", "bad_address"),
        ("https://user:pw@x.org/v1", "key_in_command"),
        ("https://x.org/v1?key=1", "key_in_command"),
        ("ftp://x.org", "bad_address"),
    ],
)
def test_an_address_holds_no_key(url, code, tmp_path, chat):
    with fails_with(code), api_flow(url, tmp_path, chat, None):
        pass
