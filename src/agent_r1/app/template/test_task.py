"""Let the demonstrator play a few questions in the real environment.

Run `python -m pytest` in this folder.
"""

import json
from pathlib import Path

from demonstrator import demonstrate
from tool import calculate

HERE = Path(__file__).parent


def test_the_tool():
    assert calculate(6, "*", 7) == "42"


def test_a_demonstrator_that_never_stops_early_is_always_right():
    class Patient:
        def random(self):
            return 1.0

    # At "\n" only: `splitlines` also breaks at letters that may stand inside of a question.
    lines = (HERE / "questions.jsonl").read_text(encoding="utf-8").split("\n")
    for line in lines[:50]:
        if not line:
            continue
        question = json.loads(line)
        row = {"prompt": [{"role": "user", "content": question["question"]}]}
        history = []
        for _ in range(3):
            turn = demonstrate(row, history, Patient())
            if "<answer>" in turn:
                break
            call = json.loads(turn.split("<tool_call>")[1].split("</tool_call>")[0])
            history.append({"role": "tool", "content": calculate(**call["arguments"])})
        assert f"<answer>{question['answer']}</answer>" in turn
