"""A teacher plays, what scored is cloned, and the recorded teacher is asked no more."""

from __future__ import annotations

import json

from api_servers import answer, scripted_api
from runs import TINY, main

from agent_r1 import Workspace, load_config

SETTINGS = [word for word in TINY if "=" in word and not word.startswith("--")]


def teacher(rows):
    """Search first. Know the answers to two of three questions, to one of them after a detour."""
    targets = {}
    for number, row in enumerate(rows):
        targets[row["prompt"][-1]["content"]] = number, row["reward_model"]["ground_truth"][0]

    def script(request, number):
        messages = request["messages"]
        question = next(m["content"] for m in messages if m["role"] == "user")
        place, target = targets[question]
        turns = sum(message["role"] == "assistant" for message in messages)
        if turns < (2 if place % 3 == 1 else 1):
            query = question.split()[-1].strip("?")
            call = ("search", json.dumps({"query": f"{query} {turns}"}))
            return answer("", [call], reasoning_content="look it up")
        return answer(f"<answer>{target if place % 3 else 'unknown'}</answer>")

    return script


def test_what_scored_is_cloned_and_a_recorded_teacher_is_free(indexed_home, capfd, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-teacher-0123")
    rows = Workspace(load_config("small", SETTINGS)).load_rows("train")[:12]
    out = indexed_home / "teacher.jsonl"
    words = ["demonstrate", "--preset", "small", *SETTINGS, "--model", "big", "--limit", "12"]
    with scripted_api(teacher(rows)) as api:
        words += ["--api", api.url, "--out", str(out), "--samples", "2"]
        assert main(*words) == 0
        asked = len(api.asked)
    printed = capfd.readouterr().out
    assert "12 questions, 24 episodes, mean score 0.667" in printed and "kept 8" in printed
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == 8 and asked == 2 * (4 * 2 + 4 * 3 + 4 * 2)
    first = lines[0]["messages"]
    assert [message["role"] for message in first[-3:]] == ["assistant", "tool", "assistant"]
    assert first[-3]["content"].startswith("<think>look it up</think><tool_call>")
    assert lines[0]["tools"][0]["function"]["name"] == "search"
    # Nothing listens there any more: the record is enough, also for another selection.
    before = out.read_text()
    assert main(*words) == 0 and out.read_text() == before
    assert main(*words, "--keep", "2") == 0
    assert len(out.read_text().splitlines()) == 16
    assert main(*words, "--least", "2") == 1 and "no episode scored 2" in capfd.readouterr().err
    short = ["cold_start.copy_steps=0", "cold_start.mix_steps=3", "model.vocab_size=384"]
    assert main("cold-start", *TINY, *short, f"cold_start.episodes={out}") == 0


def test_the_shortest_of_equal_plays_is_kept(indexed_home):
    """Both plays of one question score 1; the first takes a detour of two searches."""
    [row] = Workspace(load_config("small", SETTINGS)).load_rows("train")[:1]
    turns = []

    def script(request, number):
        turns.append(number)
        if len(turns) < 3:
            return answer("", [("search", json.dumps({"query": f"detour {number}"}))])
        return answer(f"<answer>{row['reward_model']['ground_truth'][0]}</answer>")

    out = indexed_home / "shortest.jsonl"
    words = ["demonstrate", "--preset", "small", *SETTINGS, "--model", "big", "--limit", "1"]
    words += ["--out", str(out), "--samples", "2", "rollout.api_concurrent=1"]
    with scripted_api(script) as api:
        assert main(*words, "--api", api.url) == 0
    assert len(turns) == 4  # three turns of the first play, and one of the second
    [kept] = [json.loads(line) for line in out.read_text().splitlines()]
    assert "detour" not in json.dumps(kept)


def test_a_call_of_a_missing_tool_is_shown_and_not_cloned(indexed_home):
    """The episode scored all the same, so its answers were paid for and can be cloned."""
    [row] = Workspace(load_config("small", SETTINGS)).load_rows("train")[:1]

    def script(request, number):
        if not any(message["role"] == "tool" for message in request["messages"]):
            return answer("", [("browse", '{"url": "x"}')])
        return answer(f"<answer>{row['reward_model']['ground_truth'][0]}</answer>")

    out = indexed_home / "missing.jsonl"
    words = ["demonstrate", "--preset", "small", *SETTINGS, "--model", "big", "--limit", "1"]
    with scripted_api(script) as api:
        assert main(*words, "--out", str(out), "--api", api.url) == 0
    [kept] = [json.loads(line) for line in out.read_text().splitlines()]
    turns = [m for m in kept["messages"] if m["role"] == "assistant"]
    assert "browse" in turns[0]["content"]
    assert [turn.get("weight") for turn in turns] == [0, None]  # test_recorded.py reads such a file


def test_a_dialect_with_tools_in_its_prompt_is_refused(indexed_home):
    words = ["--model", "big", "--api", "http://127.0.0.1:9/v1", "--out", str(indexed_home / "x")]
    react = [*SETTINGS, "env.name=react", "env.tools=[search]"]
    assert main("demonstrate", "--preset", "small", *react, *words, "--limit", "1") == 2
