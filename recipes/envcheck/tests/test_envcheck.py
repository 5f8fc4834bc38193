"""agent-r1 env check: verdicts, planted faults, and worlds that misbehave."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import planted
import pytest
from conftest import fails_with
from runs import main

from agent_r1 import Hermes, ToolCall
from agent_r1_recipes.envcheck.child import floor_of
from agent_r1_recipes.envcheck.command import checked_event
from agent_r1_recipes.envcheck.policies import FAMILIES, Case, sample_arguments
from agent_r1_recipes.envcheck.verdicts import AFTER, ORACLE, interval, judge

HERE = Path(__file__).parent
FACTS = {
    "families": {"random": ["r"], "empty": ["e"]},
    "floor": None, "floor_reason": "", "format_penalty": 0.0, "oracle": "o", "compared": 2,
}  # fmt: skip


def record(policy: str, question: int, reward: float, error: str | None = None) -> dict:
    return {
        "policy": policy, "question": question, "reward": reward, "stop": "answered",
        "error": error, "transcript": ["agent> x"], "trace": [], "seconds": [0.1], "sizes": [3],
    }  # fmt: skip


def verdicts_of(rewards: dict[str, list[float]], **facts) -> dict[str, str]:
    records = [record(p, i, r) for p, values in rewards.items() for i, r in enumerate(values)]
    return {verdict.name: verdict.state for verdict in judge(records, FACTS | facts)}


def test_an_interval_is_wilson_for_shares_of_zero_and_one():
    low, high = interval([0.0] * 80)
    assert low == 0 and high == pytest.approx(1.96**2 / (80 + 1.96**2))
    assert interval([0.2] * 80) == pytest.approx((0.2, 0.2))


@pytest.mark.parametrize(
    ("random", "facts", "state"),
    [
        ([0.0] * 80, {}, "ok"),
        ([0.0] * 40, {}, "open"),  # 0 of 40 may still be .088
        ([1.0] * 4 + [0.0] * 76, {}, "open"),
        ([1.0] + [0.0] * 7, {}, "open"),  # the mean is .125, and its lower end .022
        ([1.0] * 10 + [0.0] * 70, {}, "fail"),
        ([0.06] * 80, {}, "fail"),
        ([0.25] * 80, {"floor": 0.25}, "ok"),
        ([0.26] * 80, {"floor": 0.25}, "fail"),
        ([0.25] * 80, {"floor": 0.2}, "fail"),
    ],
)
def test_a_policy_fails_above_the_limit(random, facts, state):
    rewards = {ORACLE: [1.0] * 80, "e": [0.0] * 80, "r": random}
    assert verdicts_of(rewards, **facts)["random"] == state


def test_a_failure_of_guesses_says_what_would_declare_it():
    rewards = {ORACLE: [1.0] * 80, "e": [0.0] * 80, "r": [1.0, 0.0, 0.0, 0.0] * 20}
    records = [record(p, i, r) for p, values in rewards.items() for i, r in enumerate(values)]
    [text] = [v.text for v in judge(records, FACTS) if v.name == "random"]
    floor = float(re.search(r"declare env\.floor=([\d.]+)$", text)[1])
    assert verdicts_of(rewards, floor=floor)["random"] != "fail"
    assert verdicts_of(rewards, floor=floor - 0.02)["random"] == "fail"


def test_the_limit_is_a_share_of_the_way_to_the_oracle():
    """From -1 to 3, a reward of -.7 is .075 of the way."""
    rewards = {ORACLE: [3.0] * 80, "e": [-1.0] * 80, "r": [-0.7] * 80}
    assert verdicts_of(rewards)["random"] == "fail"
    assert verdicts_of(rewards | {"r": [-0.85] * 80})["random"] == "ok"


def test_a_format_penalty_declares_its_floor():
    rewards = {ORACLE: [1.0] * 80, "e": [-0.2] * 80, "r": [0.0] * 80}
    assert verdicts_of(rewards)["random"] == "fail"
    assert verdicts_of(rewards, format_penalty=0.2)["random"] == "ok"
    assert verdicts_of(rewards | {"r": [0.02] * 80}, format_penalty=0.2)["random"] == "fail"


@pytest.mark.parametrize(
    ("floor", "reason", "state"),
    [(0.3, "", "ok"), (0.31, "", "fail"), (0.31, "two doors", "ok")],
)
def test_a_high_floor_needs_a_reason(floor, reason, state):
    rewards = {ORACLE: [1.0], "e": [0.0], "r": [0.0]}
    assert verdicts_of(rewards, floor=floor, floor_reason=reason)["floor"] == state


def test_the_other_verdicts_fail_when_they_should():
    rewards = {ORACLE: [0.0], "e": [0.0], "r": [0.0]}
    assert verdicts_of(rewards)["oracle"] == "fail"
    assert verdicts_of({"e": [0.0]})["oracle"] == "open"
    kept = {ORACLE: [1.0], "e": [0.0], AFTER + "e": [1.0]}
    assert verdicts_of(kept)["fresh state"] == "fail"
    differing = [{"text": "t", "transcript": []}]
    assert verdicts_of(kept, differences=differing)["determinism"] == "fail"
    [first, *_] = judge([record("r", 0, 0.0, error="ValueError: nan")], FACTS)
    assert (first.name, first.state) == ("errors", "fail") and "nan" in first.text


def test_no_policy_knows_the_answer_or_raises():
    """Whatever the tools are: each policy writes text, and none of them reads the targets."""
    import random as randomness

    class Row(dict):
        def __getitem__(self, key):
            assert key != "reward_model", "a policy looked at the answer"
            return super().__getitem__(key)

    row = Row(prompt=[{"role": "user", "content": "What is 2 + 3?"}], reward_model={})
    for policies in FAMILIES.values():
        for policy in policies.values():
            for number in range(9):
                case = Case(row, number, Hermes(), randomness.Random(number))
                history = list(row["prompt"])
                for _ in range(3):
                    text = policy(case, history)
                    assert isinstance(text, str)
                    history.append({"role": "assistant", "content": text})


def test_sampled_arguments_fit_the_schema():
    import random as randomness

    schema = {
        "type": "object",
        "properties": {
            "direction": {"enum": ["left", "right"]},
            "page": {"type": "integer", "minimum": 1, "maximum": 3},
            "names": {"type": "array", "items": {"type": "string"}},
        },
    }
    for seed in range(20):
        arguments = sample_arguments(schema, randomness.Random(seed), ["word"])
        assert arguments["direction"] in ("left", "right") and 1 <= arguments["page"] <= 3
        assert arguments["names"] == ["word"]
        assert json.dumps(arguments) and ToolCall("t", arguments)


# -------------------------------------------------------------------------------- the whole command


def check(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"AGENT_R1_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "agent_r1", "env", "check", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["class", "reward"])
def test_a_healthy_world_passes(tmp_path, form):
    words = planted.write_world(tmp_path / "world", None, form)
    done = check(tmp_path, *words, "--questions", "4", "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    assert {v["state"] for v in result["verdicts"]} <= {"ok", "open"}
    assert {r["question"] for r in result["records"]} == set(range(4))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "name"),
    [(planted.TUNED[2], "fresh state"), (planted.TUNED[5], "repeated call")],
    ids=["class", "gym"],
)
def test_a_fault_is_found_with_its_transcript(tmp_path, fault, name):
    done = check(tmp_path, *planted.write_world(tmp_path / "world", fault), "--questions", "4")
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"fail  {name}" in done.stdout and f"\n{name}:\n" in done.stdout
    assert "reward 1" in done.stdout  # the end of a transcript


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "line"),
    [
        ("Hangs", "no answer within 2 s (--step-seconds), with 'oracle' on question 0"),
        ("Exits", "the environment ended the process (exit code 3), with 'oracle' on question 0"),
        ("Prints", "it printed more than 1 MB, with 'oracle' on question 0"),
        ("NotANumber", "a reward must be a finite number, and the environment returned nan"),
        ("ForgesEnd", "it ended after 0 of 2 questions, without a cause"),
        ("ForgesLate", "it ended after 0 of 2 questions, without a cause"),
        ("WritesJunk", "the environment wrote among our events"),
        ("SharesRandom", "next to another episode"),
        ("Escapes", "ValueError: \u241b]0;owned\u2407"),
    ],
)
def test_a_world_that_misbehaves_ends_in_one_line(tmp_path, world, line):
    name = f"{HERE / 'broken_worlds.py'}:{world}"
    # Only the world that hangs waits for the limit; on a busy machine, another step may take long.
    limit = "2" if world == "Hangs" else "60"
    done = check(tmp_path, name, "--questions", "2", "--step-seconds", limit)
    assert done.returncode == 1 and done.stderr == ""
    assert sum(line in text for text in done.stdout.splitlines()) == 1, done.stdout


@pytest.mark.slow
def test_a_forged_refusal_is_no_pass(tmp_path):
    name = f"{HERE / 'broken_worlds.py'}:ForgesRefusal"
    done = check(tmp_path, name, "--questions", "2")
    assert (done.returncode, done.stdout) == (1, "") and "all is well" in done.stderr


@pytest.mark.slow
def test_a_daemon_ends_with_the_check(tmp_path, monkeypatch):
    file = tmp_path / "daemons"
    monkeypatch.setenv("DAEMON_FILE", str(file))
    check(tmp_path, f"{HERE / 'broken_worlds.py'}:LeavesDaemon", "--questions", "1")
    processes = [int(line) for line in file.read_text().split()]
    assert processes and not [one for one in processes if Path(f"/proc/{one}").exists()]


GOOD = {"episode": record("r", 0, 1.0)}
BAD = [
    b"junk", b"[1]", b'"x"', b"9" * 5000, b"[" * 100_000, b"\xff",
    b'{"episode": 1}', b'{"episode": {}}', b'{"turn": 1}', b'{"late": "x"}',
    *(json.dumps({"episode": GOOD["episode"] | change}).encode()
      for change in ({"reward": float("nan")}, {"reward": "1"}, {"question": None}, {"trace": [1]},
                     {"transcript": [None]}, {"seconds": ["x"]}, {"more": 1})),
]  # fmt: skip


@pytest.mark.parametrize("line", BAD, ids=range(len(BAD)))
def test_a_line_that_is_no_event_is_noticed(line):
    with pytest.raises((ValueError, RecursionError)):
        checked_event(line)


@pytest.mark.parametrize("code", [0, -1, 400, "0", None, True])
def test_a_refusal_never_passes(code):
    event = checked_event(json.dumps({"refused": 5, "exit_code": code}).encode())
    assert event == {"refused": "5", "exit_code": 1}
    assert checked_event(json.dumps(GOOD).encode()) == GOOD


def test_a_declared_floor_of_a_class_is_read():
    class Doors:
        floor, floor_reason = 0.5, "two doors"

    def env(floor: float | None) -> SimpleNamespace:
        return SimpleNamespace(env=SimpleNamespace(floor=floor, floor_reason="mine"))

    world = SimpleNamespace(cls=Doors)
    assert floor_of(env(None), world) == (0.5, "two doors")
    assert floor_of(env(0.1), world) == (0.1, "mine")  # the user's settings come first
    Doors.floor = 5
    with fails_with("out_of_range"):
        floor_of(env(None), world)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["env"], "the only action is check"),
        (["env", "check"], "takes one name"),
        (["env", "check", "tinyquest", "restock"], "takes one name"),
        (["env", "check", "tinyquest", "--questions", "0"], "are above 0"),
    ],
)
def test_a_wrong_command_is_refused(capsys, words, message):
    assert main(*words) != 0
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_an_unknown_name_is_refused_in_one_line(tmp_path):
    done = check(tmp_path, "tinyqest")
    assert done.returncode != 0 and done.stderr.count("\n") == 1
    assert "there is no preset, folder, environment or FILE.py:CLASS" in done.stderr


def test_settings_may_follow_options(monkeypatch):
    """As in the other commands, whose parser this is."""
    from agent_r1_recipes.envcheck.command import Check

    seen = []
    monkeypatch.setattr(Check, "report", lambda self: seen.append(self.plan) or 0)
    assert main("env", "check", "restock", "--questions", "3", "env.max_turns=4") == 0
    assert seen[0]["name"] == "restock" and seen[0]["settings"] == ["env.max_turns=4"]
