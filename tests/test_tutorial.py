"""The pages about a task of one's own, followed in an empty folder: every command on them runs, made small."""

from __future__ import annotations

import io
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from runs import ROOT, main

from agent_r1 import own

PAGES = ROOT / "docs/tutorial"
SMALL = [
    "data.train=16", "data.val=4", "data.test=6", "cold_start.copy_steps=2", "cold_start.mix_steps=2", "trainer.steps=2",
    "trainer.eval_every=0", "trainer.threads=1", "trainer.device=cpu", "rollout.prompts_per_step=4", "rollout.samples_per_prompt=4",
    "model.hidden_size=32", "model.heads=2", "model.kv_heads=2", "model.intermediate_size=48",
]  # fmt: skip


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path))
    monkeypatch.setattr(own, "_said", set())
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    forget(tmp_path)


def forget(folder: Path) -> None:
    """The modules that were imported from there: outside of the tests, each command is a process of its own."""
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(folder)):
            del sys.modules[name]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (PAGES / page).read_text(), re.DOTALL)


def written(page: str, folder: Path) -> list[str]:
    """Write the files that a page shows under their names."""
    files = re.findall(r"^`([\w/-]+\.\w+)`:\n\n```\w+\n(.*?)```", (PAGES / page).read_text(), re.DOTALL | re.M)
    for name, code in files:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(code)
    return [name for name, _ in files]


def commands(page: str) -> list[list[str]]:
    lines = [shlex.split(line) for block in blocks(page, "bash") for line in block.splitlines()]
    return [words[1:] for words in lines if words[0] == "agent-r1"]


def follow(words: list[str], *settings: str) -> int:
    takes = words[0] in ("data", "cold-start", "train", "eval", "report", "try")
    return main(*words, *(settings if takes else ()))


@pytest.mark.slow
def test_your_own_task_in_30_minutes(empty_folder, monkeypatch, capsys):
    typed = b"calculate left=6 operation=* right=7\n= 42\norder item=lamp number=5\n"
    shop = written("your-own-task-in-30-minutes.md", empty_folder)
    lines = [line for name in shop if name.endswith(".py") for line in (empty_folder / name).read_text().splitlines()]
    assert len(list(filter(None, lines))) == 49  # as the page says
    for words in commands("your-own-task-in-30-minutes.md"):
        # The hub's model is not here, verl takes minutes (tests/test_verl_train.py), and a server runs until it is stopped.
        if {"--dry-run", "--engine", "serve"} & set(words):
            continue
        if "shop" in " ".join(words) and words[0] in ("eval", "report", "export"):  # as of the first task
            continue
        forget(empty_folder)
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(typed)))
        settings = [s for s in SMALL if s.partition("=")[0] not in {w.partition("=")[0] for w in words}]
        settings += ["rollout.max_context=320"] if words[0] == "chat" else []
        code = follow(words, *settings)
        assert code == 0 or (words[0] == "chat" and code == 1), (
            words,
            capsys.readouterr().err,
        )  # so small, it may not answer
    said = capsys.readouterr().out
    assert "The episode is over: answered" in said and "ok, " in said
    run = empty_folder / "runs" / "my-task-grpo"
    assert (run / "report.html").exists() and json.loads((run / "code.json").read_text()).keys() >= {
        "tool.py",
        "env.py",
    }
    assert json.loads((run / "eval.json").read_text())["score_name"] == "reward"


def test_a_run_whose_code_has_changed_is_not_resumed(empty_folder, capsys):
    assert main("new", "task") == 0
    train = ["train", "grpo", "--preset=task/preset.yaml", "--plain", *SMALL]
    assert main(*train, "trainer.max_hours=0.00001") == 130
    with (empty_folder / "task" / "env.py").open("a") as file:
        file.write("# another reward\n")
    assert main(*train, "--resume") == 1
    assert "env.py changed since" in capsys.readouterr().err.splitlines()[-1]


def test_the_code_of_the_task_is_as_short_as_the_page_says(empty_folder):
    assert main("new", "task") == 0
    table = dict(
        re.findall(r"^\| `(\S+)` \|.*\| (\d+) \|$", (PAGES / "your-own-task-in-30-minutes.md").read_text(), re.M)
    )
    counted = {}
    for name in table:
        text = (empty_folder / "task" / name).read_text()
        text = re.sub(r'\A""".*?"""', "", text, flags=re.DOTALL)  # what the file is about
        lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
        counted[name] = str(len(lines))
    assert counted == table
    assert sum(map(int, counted.values())) <= 60


def test_your_own_data(empty_folder):
    lines = blocks("your-own-data.md", "json")[0].splitlines()
    more = [json.dumps({"question": f"What is {i} + 1?", "answer": i + 1}) for i in range(2)]
    (empty_folder / "questions.jsonl").write_text("\n".join([*lines, *more]))
    (empty_folder / "questions.py").write_text(blocks("your-own-data.md", "python")[0])
    for words in commands("your-own-data.md"):
        if words[0] == "data":
            assert follow(words) == 0, words
    assert len(list((empty_folder / "artifacts").glob("rows-*"))) == 2


def test_your_own_flow(empty_folder, micro_model):
    code = blocks("your-own-flow.md", "python")
    (empty_folder / "flow.py").write_text("\n".join(code))
    small = [s for s in SMALL if not s.startswith(("model", "trainer.steps"))]
    for words in commands("your-own-flow.md"):
        run = f"--run={words[-2].partition(':')[2]}"
        extra = [
            "data.cold=8",
            "data.entities=60",
            "data.cold_entities=60",
            "search.dim=256",
            "rollout.max_tokens_per_turn=8",
        ]
        assert follow(words, *small, *extra, f"model.path={micro_model}", run, "--plain") == 0
        metrics = json.loads((empty_folder / "runs" / run[6:] / "metrics.jsonl").read_text())
        assert ("reward/short" in metrics) == ("AskOnce" in words[-2])
        assert metrics["num_turns/mean"] == 1 if "AskOnce" in words[-2] else metrics["num_turns/mean"] >= 1
