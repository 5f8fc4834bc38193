"""The commonest answer of the training questions, which an agent without tools is compared with."""

from __future__ import annotations

from building import row_of

from agent_r1.env import brings_tools
from agent_r1.evaluation.evaluate import majority


def asked(kind: str, *answers: str) -> dict:
    return row_of({"question": "q", "kind": kind, "answer": list(answers)})


def test_the_commonest_answer_by_hand():
    train = [asked("a", "Paris"), asked("a", "Rome"), asked("a", "Rome"), asked("b", "yes")]
    test = [asked("a", "Roma", "the Rome"), asked("a", "Oslo"), asked("b", "no"), asked("c", "x")]
    assert majority(train, test) == {
        "em": 1 / 4,
        "by_kind": {
            "a": {"answer": "Rome", "em": 0.5},
            "b": {"answer": "yes", "em": 0.0},
            "c": {"answer": "", "em": 0.0},
        },
    }


def test_an_environment_with_tools_of_its_own_keeps_them():
    assert brings_tools("openenv") and not brings_tools("hermes")
