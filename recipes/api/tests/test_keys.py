"""The command as people run it: a key is never written, and a cut run pays nothing twice."""

from __future__ import annotations

import asyncio
import html
import json
import os
import re
import signal
import subprocess
import time
from collections import Counter
from urllib.parse import unquote

import pytest
from api_servers import Wrong, answer, api_flow, scripted_api
from runs import AGENT, TINY, main

SECRET = "sk-secret-9f31c2a7d0"
"""A text that occurs nowhere else."""
NAME = ["--model", "big", "rollout.api_concurrent=2"]


@pytest.fixture(autouse=True)
def _key(indexed_home, monkeypatch):
    monkeypatch.setenv("HOME", str(indexed_home))
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)


def assert_unwritten(indexed_home, *texts):
    """Search every file below the home, and what was printed."""
    files = [path for path in indexed_home.rglob("*") if path.is_file()]
    assert len(files) > 3
    for path in files:
        assert SECRET.encode() not in path.read_bytes(), path
    for text in texts:
        assert SECRET not in text


def echo(request, number):
    """Answer correctly to half of the questions; repeat the key, as a hostile server might."""
    return answer(f"<think>{SECRET}</think><answer>no</answer>", key=SECRET)


def test_after_success_and_after_401(indexed_home, capfd):
    with scripted_api(echo) as api:
        assert main("eval", *TINY, "--api", api.url, *NAME, "--out", str(indexed_home / "ok")) == 0
    card = json.loads((indexed_home / "ok" / "1.json").read_text())
    assert card["n"] == 12 and card["usage"]["answers"] == 12 and len(api.keys) == 12
    assert set(api.keys) == {f"Bearer {SECRET}"}
    refusal = Wrong(401, f'{{"error": "no such key: {SECRET}"}}'.encode())
    with scripted_api(lambda request, number: refusal) as api:
        assert main("eval", *TINY, "--api", api.url, *NAME, "--out", str(indexed_home / "401")) == 1
    printed = capfd.readouterr()
    assert "was refused" in printed.err and "[OPENAI_API_KEY]" in printed.err
    assert_unwritten(indexed_home, printed.out, printed.err)


def spellings(key):
    """The key as JSON, PHP, a URL and HTML may write it, and JSON in JSON."""
    as_numbers = "".join(f"\\u{ord(letter):04x}" for letter in key)
    yield as_numbers
    yield as_numbers.upper().replace("\\U", "\\u")
    yield f"\\u{ord(key[0]):04x}{key[1:]}"
    yield key.replace("/", "\\/")
    yield as_numbers.replace("\\", "\\\\")
    yield as_numbers.replace("\\", "\\u005c")
    yield as_numbers.replace("\\", "\\\\u005c")
    yield "".join(f"%{ord(letter):02X}" for letter in key)
    yield "".join(f"&#{ord(letter)};" for letter in key)
    yield "".join(f"&#x{ord(letter):x};" for letter in key)
    yield key.replace("/", "&sol;")


PLACES = [
    '{"choices": [{"message": {"content": "KEY"}, "finish_reason": "stop"}]}',
    '{"choices": [{"message": {"content": "", "reasoning_content": "KEY"}}]}',
    '{"choices": [{"message": {"content": "x"}, "finish_reason": "KEY"}]}',
    '{"choices": [{"message": {"content": "x", "KEY": {"KEY": ["KEY"]}}}]}',
    '{"choices": [{"message": {"content": null, "tool_calls": [{"id": "KEY", "function": '
    '{"name": "KEY", "arguments": "{\\"query\\": \\"KEY\\"}"}}]}}]}',
    '{"error": {"message": "no KEY", "code": "KEY", "type": "KEY"}}',
    "<html><b>KEY</b></html>",
    '["KEY"]',
]


def decoded(text):
    """A text as the next reader of JSON, of HTML or of an address may see it."""
    seen = {text}
    for _ in range(4):
        text = re.sub(r"\\u([0-9a-fA-F]{4})", lambda m: chr(int(m[1], 16)), text)
        text = text.replace("\\/", "/").replace("\\\\", "\\")
        seen |= {text, html.unescape(text), unquote(text)}
    return seen


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("status", [200, 400])
def test_a_key_in_any_spelling_is_not_kept(place, status, tmp_path, monkeypatch, chat):
    key = "sk/secret/9f31c2a7d0"
    monkeypatch.setenv("OPENAI_API_KEY", key)
    forms = list(spellings(key))
    replies = [Wrong(status, place.replace("KEY", form).encode()) for form in forms]
    errors = []
    with (
        scripted_api(replies) as api,
        api_flow(api.url, tmp_path, chat, None, "rollout.api_attempts=1") as flow,
    ):
        for number in range(len(forms)):
            body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}
            try:
                asyncio.run(flow.client.ask(str(number), body))
            except Exception as error:
                errors.append(str(error))
        assert len(api.asked) == len(forms)
    written = (tmp_path / "calls.jsonl").read_text()
    assert written.count("\n") == len(forms) and "[OPENAI_API_KEY]" in written
    for text in [*errors, *written.splitlines()]:
        assert not [form for form in decoded(text) if key in form], text


@pytest.mark.parametrize("value", ["sk-x-4711", "AKIA/4711", "sk_4711", "A" * 65, "4711"])
@pytest.mark.parametrize("setting", ["rollout.api_key=VALUE", "rollout.agent_environment=[VALUE]"])
def test_a_key_instead_of_its_name_is_refused_and_not_shown(value, setting, capfd):
    words = ["--api", "http://127.0.0.1:9/v1", *NAME, setting.replace("VALUE", f"'{value}'")]
    assert main("eval", *TINY, *words) == 2
    printed = capfd.readouterr()
    assert "name of an environment variable" in printed.err
    assert value not in printed.err + printed.out


def test_compare_with_the_card_of_another_model(indexed_home, capfd):
    right = lambda request, number: answer("<answer>yes</answer>")  # noqa: E731
    with scripted_api(right) as api:
        first = ["eval", *TINY, "--api", api.url, *NAME]
        assert main(*first, "--out", str(indexed_home / "first")) == 0
        card = str(indexed_home / "first" / "1.json")
        assert main(*first, "--out", str(indexed_home / "second"), "--against", card) == 0
        compared = json.loads((indexed_home / "second" / "1-against.json").read_text())
        assert (compared["n"], compared["difference"]) == (12, 0.0)
        assert "second minus first" in capfd.readouterr().out
        few = [*first, "--limit", "5", "--out", str(indexed_home / "few"), "--against", card]
        assert main(*few) == 1 and "were evaluated with other questions" in capfd.readouterr().err
        assert main(*first, "--against", str(indexed_home / "first" / "settings.json")) == 1
        assert "is not an eval card" in capfd.readouterr().err


def test_options_that_need_weights_are_refused(indexed_home, capfd):
    for words in (["--before"], ["--backend", "vllm"]):
        assert main("eval", *TINY, "--api", "http://127.0.0.1:9/v1", *NAME, *words) == 2
    assert main("eval", *TINY, "--api", "http://127.0.0.1:9/v1") == 2
    assert main("eval", *TINY, "--api", "http://a:b@127.0.0.1:9/v1", *NAME) == 2
    assert main("train", *TINY, "grpo", "rollout.api=http://127.0.0.1:9/v1") in (1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_a_cut_run_pays_nothing_twice(indexed_home, end):
    """Each answer arrives once: after kill -9 except for those on their way, after Ctrl-C all."""

    def script(request, number):
        time.sleep(0.15)
        asked = len(request["messages"])
        if asked < 4:
            return answer(None, [("search", f'{{"query": "{asked}"}}')])
        return answer("<answer>no</answer>")

    out = indexed_home / f"cut-{int(end)}"
    with scripted_api(script) as api:
        words = [AGENT, "eval", *TINY, "--api", api.url, *NAME, "--out", out]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        while len(api.asked) < 8:
            assert process.poll() is None and time.sleep(0.02) is None
        process.send_signal(end)
        printed = process.communicate(timeout=60)
        assert process.returncode in (-9, 130)
        assert_unwritten(indexed_home, *printed)
        assert 8 <= len(api.asked) < 20
        assert main(*map(str, words[1:])) == 0
    twice = Counter(json.dumps(request["messages"]) for request in api.asked)
    repeated = sum(count - 1 for count in twice.values())
    assert repeated <= (2 if end == signal.SIGKILL else 0)
    card = json.loads((out / "1.json").read_text())
    assert card["n"] == 12 and card["usage"]["answers"] == len(twice)
    assert_unwritten(indexed_home)
