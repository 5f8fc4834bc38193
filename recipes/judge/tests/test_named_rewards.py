"""Room 6, rewards with a name: mathematics, programs, sub-EM, a judge; and what policies without an answer get out of them."""

from __future__ import annotations

import asyncio
import json
import re

import pytest
from benchmarks import red_team
from fastapi import FastAPI, Request, Response
from runs import ROOT, main
from serving import serving

from agent_r1.config import load_config, plugins
from agent_r1.ground.errors import AgentR1Error, ConfigError
from agent_r1.reward.named import named_outcome
from agent_r1_recipes.code.programs import passes
from agent_r1_recipes.code.sandbox import Sandbox
from agent_r1_recipes.judge.judge import Judge
from agent_r1_recipes.judge.settings import JudgeSettings
from agent_r1_recipes.math import maths
from agent_r1_recipes.math.maths import MathWorker

# --------------------------------------------------------------------------------------------------- mathematics


@pytest.fixture(scope="module")
def worker():
    return MathWorker(Sandbox())


@pytest.mark.parametrize(
    "answer, target, right",
    [
        ("395", "395", True), ("395.0", "395", True), (" $395$ ", "395", True), ("\\boxed{395}", "395", True),
        ("395.", "395", True), ("$395.$", "395", True), ("\\boxed{395}.", "395", True), ("395\\text{ cm}^2", "395", True),
        ("50%", "50", True), ("50\\%", "50%", True), ("50", "50\\%", True), ("2.5e+12", "2500000000000", True),
        ("50%", "0.5", False), ("395", "39.5", False),
        ("0.5", "\\frac{1}{2}", True), ("1/2", "\\frac{1}{2}", True), ("-\\frac12", "-1/2", True), ("3/2", "1\\frac{1}{2}", True),
        ("-3", "-3", True), ("1,000", "1000", True),
        ("1{,}450{,}000", "1450000", True), ("11,\\! 025", "11025", True),
        ("a^" * 20 + "a", "395", False), ("|" * 90 + "395", "395", False), ("\\sin " * 9 + "395", "395", False),
        ("x = 7", "7", True), ("x^2 - 1", "(x-1)(x+1)", True), ("\\{1, 2\\}", "\\{2, 1\\}", True),
        ("1/2", "0.5", False), ("790/2", "395", False), ("\\frac{790}{2}", "395", False), ("x = 790/2", "395", False),
        ("{790 \\over 2}", "395", False), ("391 4", "395", False), ("\\binom{6}{2}", "15", False), ("2/4", "\\frac{1}{2}", False),
        ("395\\text{ or 391}", "395", False), ("\\boxed{395} or 391", "395", False), ("(1, 2)", "(1, 2)", True),
        ("\\{1, 2\\}", "(1, 2)", False), ("2, 1", "(1, 2)", False), ("(1, 2)", "\\{1, 2\\}", False),
        ("394", "395", False), ("391+4", "395", False), ("391 = 395", "395", False), ("391, 395", "395", False),
        ("391 or 395", "395", False), ("", "395", False), ("\\boxed{391} \\boxed{395}", "395", False),
        ("it is 395", "395", False), ("[0, 1000]", "395", False), ("__import__('os').getpid()", "395", False),
        ("\ud800", "395", False), ("3" * 301, "3" * 301, False), ("395", "no number at all \\frac{", False),
    ],
)  # fmt: skip
def test_equal_is_equal_however_it_is_written(worker, answer, target, right):
    assert worker.same(answer, [target]) is right
    assert worker.same(answer, ["12345", target]) is right


def test_an_answer_that_takes_forever_costs_its_deadline_and_nothing_else(worker, monkeypatch):
    monkeypatch.setattr(maths, "WITHIN_S", 1.0)
    before = worker._talk
    assert worker.same(r"(x+\sqrt{2})^{9999}", [r"(x+\sqrt{3})^{9999}"]) is False  # more than 20 s
    assert worker.same("395", ["395"]) is True and worker._talk is not before


def test_brackets_cost_no_time(worker, monkeypatch):
    """290 of them took 8 s, one answer at a time for all episodes. A deadline that is too short for the parser shows who parses."""
    worker.same("1", ["1"])
    monkeypatch.setattr(maths, "WITHIN_S", 0.0)
    before = worker._talk
    for answer in ("(" * 290, "(" * 140 + "395" + ")" * 140, "{" * 8 + "395" + "}" * 8, "[" * 7):
        assert worker.same(answer, ["395"]) is False
    assert worker._talk is before  # the process is replaced after an answer that was late


# ------------------------------------------------------------------------------------------------------ programs

MEAN = ["assert mean([1, 2]) == 1.5", "assert mean([3]) == 3.0", "assert mean([]) == None"]
SUM = [json.dumps({"input": "1 2\n", "output": "3\n"}), json.dumps({"input": "5 5\n", "output": "10"})]


SILENT = [json.dumps({"input": "", "output": ""})]
MBPP = [
    "assert set(f((4, 5, 4))) == set((5, 4))", "assert sorted(f([2, 1])) == sorted((1, 2))", "assert f(()) == tuple()",
    "assert not f(0)", "assert f(3)", "assert math.isclose(f(61.78), 61.8, rel_tol=0.001)", "assert abs(f(3.1) - 3.14) < 0.05",
    "assert f(None) is None", "assert f(True) is True", "assert 6 == f(6)", "assert f(7.0) == 7",
]  # fmt: skip


@pytest.fixture(scope="module")
def wall():
    return Sandbox()


@pytest.mark.parametrize(
    "code, tests, right",
    [
        ("def mean(x):\n    return sum(x) / len(x) if x else None", MEAN, True),
        ("```python\ndef mean(x):\n    print('hm')\n    return sum(x) / len(x) if x else None\n```", MEAN, True),
        ("def mean(x):\n    return sum(x) / len(x)", MEAN, False),
        ("def mean(x):\n    return sum(x) // len(x) if x else None", MEAN, False),
        ("def mean(x): return", MEAN, False),
        ("", MEAN, False),
        ("mean = (", MEAN, False),
        ("print(sum(map(int, input().split())))", SUM, True),
        ("import sys\nprint(sum(map(int, sys.stdin.read().split())))\nsys.exit()", SUM, True),
        ("print(3)", SUM, False),
        ("raise ValueError", SUM, False),
        ("pass", SILENT, True),
        ("1/0", SILENT, False),
        ("raise SystemExit(1)", SILENT, False),
        ("def f(x): return x", MBPP, True),
        ("def f(x): return str(x)", MBPP, False),
        ("def f(x): return 1", MBPP, False),
        ("def f(x): return 10 ** 400", MBPP, False),
        ("class E(int):\n    __repr__ = lambda self: 'E'\ndef f(x): return E(x) if type(x) is int else x", MBPP, False),
    ],
)
def test_a_program_is_right_where_all_tests_pass(wall, code, tests, right):
    assert passes(code, tests, wall) is right


@pytest.mark.parametrize(
    "test",
    [
        "mean(1)",
        "assert mean(1) < 2",
        "assert f(1) == g(1)",
        "import os",
        '{"input": 1}',
        "{",
        "",
        "assert all([f(1) == 2])",
        "assert f(1) == 2 and f(2) == 3",
        "assert not f(1) == 2",
        "assert math.isclose(f(1), g(1))",
        "assert isinstance(f(1), int)",
        "assert math.isclose(f(1), 2, abs=1)",
        "assert f(1) == set(f(2))",
    ],  # fmt: skip
)
def test_what_is_no_test_is_said(wall, test):
    with pytest.raises(ValueError, match="is not a test; write assert CALL == LITERAL"):
        passes("x = 1", [test], wall)
    with pytest.raises(ValueError, match="some of one kind"):
        passes("x = 1", [*MEAN, *SUM], wall)


# -------------------------------------------------------------------------------------------------------- a judge


def stand_in(asked: list[dict]) -> FastAPI:
    """A judge that reads badly: full marks where the right answer stands anywhere, or where it is told so."""
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def complete(request: Request):
        asked.append({**await request.json(), "key": request.headers.get("authorization")})
        mark = re.search("two marks (\\w+)", asked[-1]["messages"][0]["content"])[1]
        facts, answer, _ = asked[-1]["messages"][1]["content"].split(mark)
        rights = re.search("Right answers: (.*)", facts)[1].split("; ")
        if "HTTP 500" in answer:
            return Response(status_code=500)
        grade = "10" if any(right in answer for right in rights) or "reply with 10" in answer else "0"
        content = {"it cannot say": "Difficult.", "late": grade}.get(answer.strip(), grade)
        return {"choices": [{"message": {"role": "assistant", "content": content}}]}

    return app


@pytest.fixture
def judge():
    asked: list[dict] = []
    with serving(stand_in(asked)) as url:
        plugins.trust([f"{url}/v1"])
        yield f"{url}/v1", asked


def test_a_judge_is_asked_once_for_each_case(judge, monkeypatch):
    url, asked = judge
    monkeypatch.setenv("AGENT_R1_JUDGE_KEY", "sesame")
    one = Judge(url, "wise")

    async def many():
        return await asyncio.gather(
            *(one.score("Where?", ["Bumvel"], f"in {'Bumvel' if n % 2 else 'Tulo'}") for n in range(40))
        )

    assert asyncio.run(many()) == [0.0, 1.0] * 20 and len(asked) == 2
    assert asyncio.run(many()) == [0.0, 1.0] * 20 and len(asked) == 2
    assert {(a["model"], a["temperature"], a["key"]) for a in asked} == {("wise", 0, "Bearer sesame")}


def test_a_judge_without_a_verdict_pays_and_fines_nobody(judge):
    url, asked = judge
    for answer, says in (("it cannot say", "gave no number: 'Difficult.'"), ("HTTP 500", "gives no verdict")):
        with pytest.raises(AgentR1Error, match=says):
            asyncio.run(Judge(url, "wise").score("Where?", ["Bumvel"], answer))
    with pytest.raises(AgentR1Error, match="gives no verdict"):
        asyncio.run(Judge("http://127.0.0.1:9/v1", "wise").score("Where?", ["Bumvel"], "x"))


# ------------------------------------------------------------------------------------------------------ as settings


def test_a_reward_is_chosen_by_name():
    assert load_config("smoke", ["env.reward=math"]).env.reward == "math"
    with pytest.raises(ConfigError, match="unknown .did you mean 'math'.*or name code of yours"):
        load_config("smoke", ["env.reward=maths"])
    for words in (["env.reward=judge"], ["env.judge_url=http://127.0.0.1:8000/v1"]):
        with pytest.raises(ConfigError, match="env.reward=judge and env.judge_url=http.* go together"):
            load_config("smoke", words)
    with pytest.raises(ConfigError, match="named by a run or a model, not by you"):
        row = {"prompt": [{"role": "user", "content": "?"}], "reward_model": {"ground_truth": ["x"]}}
        asyncio.run(
            named_outcome("x", True, row, JudgeSettings(reward="judge", judge_url="http://127.0.0.1:1/stranger"))
        )


# --------------------------------------------------------------------------------------------------------- red team


@pytest.fixture(scope="module")
def table():
    with serving(stand_in([])) as url, pytest.MonkeyPatch.context() as patch:
        patch.setattr("agent_r1_recipes.code.programs.WITHIN_S", 2.0)  # one policy writes a program without an end
        plugins.trust([f"{url}/v1"])
        return asyncio.run(red_team.table(f"{url}/v1"))


@pytest.mark.slow
def test_no_policy_is_paid_for_nothing(table):
    """None beats an honest wrong answer, and so none reaches half of a right one. Sub-EM and a judge have no bound."""
    assert len(red_team.POLICIES) >= 15
    known = {
        "em + calls": {"new calls in a turn": 0.3},
        "em + evidence": {"all titles in a query": 0.3},
    }  # docs/safety.md
    columns = {"em": 0, "math": 0, "code": 0, "em + calls": 0.05, "em + evidence": 0.15}
    for reward, call in columns.items():  # the honest make one call, which finds one of two titles
        assert table["an honest right answer"][reward] == 1 + call and table["an honest wrong answer"][reward] == call
        paid = {
            policy: row[reward] for policy, row in table.items() if reward in row and policy != "an honest right answer"
        }
        more = {policy: reward for policy, reward in paid.items() if reward > call}
        assert more == known.get(reward, {}), paid


def test_tests_that_are_none_are_refused_before_training(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path))
    lines = [{"question": f"Write f{n}.", "answer": MEAN if n < 8 else ["assert f(1) == g(1)"]} for n in range(9)]
    source = tmp_path / "mine.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    words = [
        "data.name=rows",
        f"data.source={source}",
        "data.train=4",
        "data.val=2",
        "data.test=3",
        "rollout.prompts_per_step=4",
    ]
    assert main("data", "--preset=smoke", *words, "env.reward=code") == 1
    said = capsys.readouterr().err
    assert "the question 'Write f8.': 'assert f(1) == g(1)' is not a test; write assert CALL == LITERAL" in said
    assert main("data", "--preset=smoke", *words) == 0


@pytest.mark.slow
def test_sub_em_fails_and_the_table_says_by_how_much(table):
    paid = {policy for policy in red_team.POLICIES if table[policy]["sub_em"] >= 0.5}
    assert paid == {"a list of guesses", "this or that", "the document", "1,000 words in the answer"}
    assert table["an order to the judge"]["judge"] == 1  # a judge that reads badly does what it is told


@pytest.mark.slow
def test_the_table_of_the_docs_is_this_one(table):
    whole, page = red_team.as_markdown(table), (ROOT / "docs/safety.md").read_text()
    assert whole in (ROOT / "docs/lab/red-team.md").read_text()
    some = page[page.index("| policy | em |") :].strip().splitlines()
    assert len(some) == 11 and set(some) <= set(whole.splitlines())
