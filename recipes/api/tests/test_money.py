"""The budget is never exceeded, the ledger counts every answer once, and damage costs one line."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import time

import pytest
from api_servers import Wrong, answer, api_flow, scripted_api
from conftest import fails_with, question_row

from agent_r1 import AgentR1Error, HermesToolEnv, Sampling, StopReason, Task, run_episodes
from agent_r1_recipes.api.ledger import Ledger, Prices

PRICED = ("rollout.api_price_in=1000", "rollout.api_price_out=2000", "rollout.api_attempts=1")
LIMIT = 64
BODY = {"messages": [{"role": "user", "content": "Who founded Vexlor?"}], "max_tokens": LIMIT}
BYTES = len(json.dumps({"model": "some-model"} | BODY).encode())
BOUND = BYTES / 1000 + LIMIT * 2 / 1000
"""US dollars: a token has at least one byte, and the turn at most LIMIT tokens."""


@pytest.fixture(autouse=True)
def _key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test-0123456789")


@pytest.fixture
def ask(tmp_path, chat):
    """Ask the same `times` times under other names; return the client, and what failed."""

    def run(script, *overrides, times=1, name="call"):
        async def all_calls(client):
            calls = [client.ask(f"{name}-{n}", BODY) for n in range(times)]
            return await asyncio.gather(*calls, return_exceptions=True)

        with (
            scripted_api(script) as api,
            api_flow(api.url, tmp_path, chat, None, *PRICED, *overrides) as flow,
        ):
            results = asyncio.run(all_calls(flow.client))
        return flow.client, [one for one in results if isinstance(one, Exception)], api

    return run


def test_the_bound_of_requests_on_their_way_counts(ask):
    """Five bounds fit, and each answer costs its bound: eight at once would cost eight."""
    script = lambda request, number: answer("x", usage=(BYTES, LIMIT))  # noqa: E731
    budget = f"rollout.api_budget={5.5 * BOUND}"
    client, errors, api = ask(script, budget, times=8)
    assert len(api.asked) == 5 and client.ledger.spent == pytest.approx(5 * BOUND)
    assert {error.code for error in errors} == {"budget_spent"} and len(errors) == 3


@pytest.mark.parametrize(
    ("reply", "charged"),
    [
        (Wrong(200, json.dumps(answer("x")).encode(), half=True), True),
        (Wrong(200, b"<html>"), True),
        (Wrong(500, b"oops"), True),
        (Wrong(400, b"no"), False),
        (Wrong(429, b"no"), False),
    ],
)
def test_an_attempt_that_may_be_charged_counts_as_its_bound(ask, reply, charged):
    client, errors, _ = ask([reply])
    assert len(errors) == 1 and client.ledger.dollars == 0
    assert client.ledger.uncertain_dollars == pytest.approx(BOUND * charged)


def test_a_connection_that_was_never_made_costs_nothing(tmp_path, chat):
    with api_flow("http://127.0.0.1:9/v1", tmp_path, chat, None, *PRICED) as flow:
        with pytest.raises(Exception, match="no connection"):
            asyncio.run(flow.client.ask("x", BODY))
        assert flow.client.ledger.spent == 0 and flow.client.ledger.failures == 1


@pytest.mark.parametrize(
    "usage",
    [
        (0, 0),
        (0, 5),
        (5, 0),
        (BYTES + 1, 5),
        (5, LIMIT + 1),
        (10**6, 10**6),
        (10**400, 5),
        (-1, 5),
        (5.0, 5),
        ("5", 5),
        (True, 5),
        None,
    ],
)
def test_a_usage_that_what_was_sent_contradicts_is_not_believed(ask, usage):
    """It counts as the bound, so no number of a server exceeds the budget or hides a cost."""
    script = lambda request, number: answer("<answer>Marn</answer>", usage=usage)  # noqa: E731
    client, errors, api = ask(script, f"rollout.api_budget={3.5 * BOUND}", times=30)
    assert len(api.asked) == 3 and len(errors) == 27
    assert client.ledger.uncertain_dollars == pytest.approx(3 * BOUND)
    facts = client.usage()["usage"]
    assert (facts["answers_without_usage"], facts["prompt_tokens"], facts["usd"]) == (3, 0, 0)


def test_tokens_of_a_cache_are_tokens_of_the_prompt(ask):
    """More of them than the prompt has are none: nothing says which tokens were cheaper."""

    def script(request, number):
        body = answer("x", usage=(100, 10))
        body["usage"]["prompt_tokens_details"] = {"cached_tokens": [0, 60, 101][number]}
        return body

    client, _, _ = ask(script, "rollout.api_price_cached=100", times=3)
    assert client.ledger.dollars == pytest.approx(0.12 + (0.04 + 0.006 + 0.02) + 0.12)


def test_a_server_that_keeps_no_limit_is_charged_by_what_it_sent(ask):
    client, _, _ = ask([answer("word " * 1000, usage=None)])
    assert client.ledger.uncertain_dollars > BYTES / 1000 + 5000 * 2 / 1000


def test_an_answer_of_megabytes_does_not_hold_the_others(tmp_path, chat, micro):
    """It is cut, so its letters are not encoded one by one. Resuming reads it as quickly."""
    text = "x" * 7_000_000
    seconds = []
    with scripted_api(lambda request, number: answer(text)) as api:
        for _ in range(2):
            make_env = lambda row: HermesToolEnv(micro.tools, micro.config.env)  # noqa: E731
            with api_flow(api.url, tmp_path, chat, make_env) as flow:
                before = time.process_time()
                tasks = [Task(question_row(), "0", "s", None)]
                [trajectory] = asyncio.run(run_episodes(flow, tasks, Sampling(64, 0.0)))
                seconds.append(time.process_time() - before)
            assert trajectory.stop_reason is StopReason.MAX_TOKENS
            assert len(trajectory.steps[0].action_ids) == 1 << 16
        assert len(api.asked) == 1
    assert max(seconds) < 10  # CPU seconds; 44 before the cut


def test_a_budget_needs_the_limit_of_a_turn(ask):
    renamed = ["rollout.api_limit=n", "rollout.api_omit=[n]"]
    for names in (["rollout.api_omit=[max_tokens]"], renamed):
        with fails_with("missing_limit", "api_omit leaves out"):
            ask([], "rollout.api_budget=1", *names)
    client, _, api = ask([answer("x")], "rollout.api_omit=[max_tokens]")
    assert "max_tokens" not in api.asked[0] and client.ledger.answers


# ------------------------------------------------------------------------------------- the ledger


def usage(count):
    return dict.fromkeys(["prompt_tokens", "cached_tokens", "completion_tokens"], count)


def line(**changes):
    record = {
        "key": "k",
        "usage": {"prompt_tokens": 1000, "cached_tokens": 0, "completion_tokens": 0},
        "answer": {"message": {"content": "x"}, "finish_reason": "stop", "usage": None},
    }
    return json.dumps(record | changes).encode()


DAMAGED = {
    "half a line": line()[:40],
    "a number": b"4711",
    "a list": b'["key"]',
    "no key": line(key=None),
    "a key that is a number": line(key=4711),
    "neither": b'{"key": "k"}',
    "no message": line(answer={"finish_reason": "stop"}),
    "no reason": line(answer={"message": {}}),
    "an answer that is a text": line(answer="x"),
    "deep": b"[" * 100_000,
    "a large number": b'{"key": ' + b"9" * 5000 + b"}",
    "an impossible usage": line(usage=usage(10**400)),
    "a negative usage": line(usage=usage(-1)),
    "a usage of fractions": line(usage=usage(0.5)),
    "a usage without a count": line(usage={"prompt_tokens": 1}),
    "a usage that is a text": line(usage="many"),
    "a bound of one": line(usage=None, bound=[1]),
    "a bound of texts": line(usage=None, bound=["1", "2"]),
    "a bound that is infinite": b'{"key": "k", "failed": "x", "bound": [1e999, 1]}',
    "no UTF-8": b'{"key": "\xff"}',
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_line_is_named_and_the_rest_is_read(name, tmp_path, capfd):
    path = tmp_path / "calls.jsonl"
    path.write_bytes(b"\n".join([line(key="a"), DAMAGED[name], line(key="b"), b""]))
    ledger = Ledger(path, Prices(1000, 1000, 2000))
    ledger.close()
    assert list(ledger.answers) == ["a", "b"] and ledger.spent == pytest.approx(2.0)
    printed = capfd.readouterr().err
    assert printed.startswith(f"{path}: line 2 cannot be read") and printed.count("\n") == 1


def test_an_answer_after_half_a_line_is_read_at_the_next_start(tmp_path):
    path = tmp_path / "calls.jsonl"
    path.write_bytes(line(key="a") + b"\n" + line(key="b")[:50])
    for key in ("c", "d"):
        ledger = Ledger(path, Prices(1000, 1000, 2000))
        ledger.write(json.loads(line(key=key)))
        ledger.close()
    ledger = Ledger(path, Prices(1000, 1000, 2000))
    ledger.close()
    assert list(ledger.answers) == ["a", "c", "d"] and ledger.spent == pytest.approx(3.0)


def test_what_cannot_be_counted_is_not_written(tmp_path):
    path = tmp_path / "calls.jsonl"
    ledger = Ledger(path, Prices(1000, 1000, 2000))
    with pytest.raises(ValueError):
        ledger.write(json.loads(line(usage=usage(10**400))))
    ledger.close()
    assert path.read_bytes() == b"" and not ledger.answers


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_a_ledger_that_is_no_file_is_refused_at_once(tmp_path, kind):
    path = tmp_path / "calls.jsonl"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")  # reading it would not end
    else:
        path.mkdir()
    with pytest.raises(AgentR1Error, match="calls.jsonl is not a regular file"):
        Ledger(path, Prices(1000, 1000, 2000))


def test_a_full_disk_is_reported_with_the_name_of_the_ledger(tmp_path):
    path = tmp_path / "calls.jsonl"
    ledger = Ledger(path, Prices(1000, 1000, 2000))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with pytest.raises(OSError) as raised:
            ledger.write(json.loads(line(key="a")))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert raised.value.filename == str(path)
