"""The pages about a task of one's own, followed in an empty folder: every command on them runs,
made small."""

from __future__ import annotations

import ast
import asyncio
import io
import json
import re
import shlex
import subprocess
import sys
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import pytest
from conftest import ScriptedPolicy
from runs import AGENT, ROOT, main

from agent_r1.cold_start.demonstrate import play_demonstrations
from agent_r1.config import load_config, plugins
from agent_r1.core import Sampling
from agent_r1.data.build import build
from agent_r1.data.storage import read_rows
from agent_r1.rollout.episode import Task
from agent_r1.rollout.setup import make_loop
from agent_r1.tool import make_tools
from agent_r1.workspace import Workspace

PAGES = ROOT / "docs/tutorial"
SMALL = [
    "data.train=16",
    "data.val=4",
    "data.test=6",
    "cold_start.copy_steps=2",
    "cold_start.probe=0",
    "cold_start.mix_steps=2",
    "trainer.steps=2",
    "trainer.eval_every=0",
    "trainer.threads=1",
    "trainer.device=cpu",
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "model.hidden_size=32",
    "model.heads=2",
    "model.kv_heads=2",
    "model.intermediate_size=48",
]


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path))
    monkeypatch.setattr(plugins, "_trusted_names", set())
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    forget(tmp_path)


def forget(folder: Path) -> None:
    """The modules that were imported from there: outside of the tests, each command is a process of
    its own."""
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(folder)):
            del sys.modules[name]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (PAGES / page).read_text(), re.DOTALL)


def commands(page: str) -> list[list[str]]:
    lines = [shlex.split(line) for block in blocks(page, "bash") for line in block.splitlines()]
    return [words[1:] for words in lines if words[0] == "agent-r1"]


def follow(words: list[str], *settings: str) -> int:
    takes = words[0] in ("data", "cold-start", "train", "eval", "report", "try")
    return main(*words, *(settings if takes else ()))


@pytest.mark.slow
def test_your_own_task_in_30_minutes(empty_folder, monkeypatch, capsys):
    typed = b"calculate left=6 operation=* right=7\n= 42\n"
    for words in commands("your-own-task-in-30-minutes.md"):
        if "--dry-run" in words:  # the hub's model is not here
            continue
        forget(empty_folder)
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(typed)))
        settings = [
            s for s in SMALL if s.partition("=")[0] not in {w.partition("=")[0] for w in words}
        ]
        settings += ["rollout.max_context=320"] if words[0] == "chat" else []
        code = follow(words, *settings)
        may_fail = words[0] == "chat"  # so small, it may not answer
        assert code == 0 or (may_fail and code == 1), (words, capsys.readouterr().err)
    said = capsys.readouterr().out
    assert "The episode is over: answered" in said and "ok, " in said
    run = empty_folder / "runs" / "my-task-grpo"
    assert (run / "report.html").exists()
    assert json.loads((run / "code.json").read_text()).keys() >= {"tool.py", "env.py"}
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
        re.findall(
            r"^\| `(\S+)` \|.*\| (\d+) \|$",
            (PAGES / "your-own-task-in-30-minutes.md").read_text(),
            re.M,
        )
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
        extra = ["data.cold=8", "data.entities=60", "data.cold_entities=60", "search.dim=256"]
        extra += ["rollout.max_tokens_per_turn=8"]
        assert follow(words, *small, *extra, f"model.path={micro_model}", run, "--plain") == 0
        metrics = json.loads((empty_folder / "runs" / run[6:] / "metrics.jsonl").read_text())
        assert ("reward/short" in metrics) == ("AskOnce" in words[-2])
        assert (
            metrics["num_turns/mean"] == 1
            if "AskOnce" in words[-2]
            else metrics["num_turns/mean"] >= 1
        )


MULTIHOP = "multihopqa.md"


def answer_of_served(folder: Path, words: list[str]) -> str:
    """Serve with the page's command, and run the page's agent with the lines that it prints."""
    server = subprocess.Popen([AGENT, *words], stdout=subprocess.PIPE, text=True, cwd=folder)
    try:
        for line in server.stdout:
            if line.startswith("export "):
                break
        code = "import agent; print(repr(agent.answer({'question': 'Who founded Vexlor?'})))"
        script = f'{line.strip()}\n"{sys.executable}" -c "{code}"'
        done = subprocess.run(
            ["bash", "-c", script], cwd=folder, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return ast.literal_eval(done.stdout.strip())
    finally:
        server.terminate()
        assert server.wait(30) == 0
        assert not list((folder / "runs").glob("serve-*.key"))


@pytest.mark.cluster  # the package openai comes with vLLM
@pytest.mark.slow
def test_train_the_agent_you_have(empty_folder, capsys):
    """Each command of the page, with the page's file unchanged and a tiny world."""
    page = "train-the-agent-you-have.md"
    [agent] = blocks(page, "python")
    assert agent == (ROOT / "recipes/gateway/example_agent.py").read_text()
    (empty_folder / "agent.py").write_text(agent)
    small = [*SMALL, "data.cold=40", "data.entities=60", "data.cold_entities=60", "search.dim=256"]
    small += ["rollout.max_tokens_per_turn=24"]
    found = commands(page)
    # train comes first
    found.sort(key=lambda words: "--before" not in words and words[0] == "eval")
    for words in found:
        if words[0] != "serve":
            assert follow(words, *small) == 0, (words, capsys.readouterr().err)
    served = [words for words in found if words[0] == "serve"]
    assert served and isinstance(answer_of_served(empty_folder, served[0]), str)
    run = empty_folder / "runs" / "small-grpo"
    lines = (run / "metrics.jsonl").read_text().splitlines()
    for line in lines:
        metrics = json.loads(line)
        assert metrics["gateway/trained_tokens"] == metrics["rollout/decode_tokens"] > 0
    assert len(lines) == 2
    assert {"eval.json", "eval_before.json"} <= {path.name for path in run.iterdir()}


def test_multi_hop_questions(empty_folder, chat):
    """The row and the episode that the page shows are those of the code, and all of its commands
    run."""
    subprocess.run([sys.executable, ROOT / "tests/hotpotqa_tiny/make.py", "questions"], check=True)
    config = load_config("hotpotqa-tiny", ["data.source=questions"], algorithm="grpo")
    Workspace(config).make_task()
    shown = json.loads(blocks(MULTIHOP, "json")[0])
    (row,) = [
        row
        for row in Workspace(config).load_rows("test")
        if row["prompt"][-1] == shown["prompt"][-1]
    ]
    assert json.loads(json.dumps(row, default=list)) | {"prompt": [row["prompt"][-1]]} == shown
    shown = [(line[0], line[2:]) for line in blocks(MULTIHOP, "text")[0].splitlines()]
    turns = [
        (mark, "\n".join(text for _, text in some))
        for mark, some in groupby(shown, key=itemgetter(0))
    ]
    policy = ScriptedPolicy(chat, [text for mark, text in turns if mark == ">"])
    wide = config.rollout.model_copy(update={"max_context": 10**6, "max_tokens_per_turn": 10**5})
    loop = make_loop(policy, chat, Workspace(config).load_tools(), wide, config.env)
    played = asyncio.run(loop.run(Task(row, "g", "s"), Sampling(10**5)))
    said = [call["content"] for step in played.steps for call in step.info.get("tool_calls", [])]
    assert said == [text for mark, text in turns if mark == "<"] and len(said) == 2
    assert (played.reward, played.metrics["evidence"]) == (1.0, 1.0)

    small = [s for s in SMALL if not s.startswith("data.")]
    small += ["data.cold=100", "rollout.max_context=512", "data.train=60"]
    names = ["data.val=4", "data.test=6", "trainer.save_every=2", "critic.warmup_steps=0"]
    for words in commands(MULTIHOP):
        words = [word.replace("step_000028", "step_000002") for word in words]
        assert follow(words, *small, *names) == 0, words
    assert {path.name.split("-")[0] for path in (empty_folder / "artifacts").iterdir()} >= {
        "twowiki",
        "musique",
    }
    # The presets that evaluate a HotpotQA agent, at the size of this one.
    here = ["engine=local", "trainer.device=cpu", "trainer.threads=1", "search.encoder=ngram"]
    here += ["rollout.prompts_per_step=4"]
    for name in ("2wiki", "musique"):
        model = f"--model={empty_folder / 'runs/hotpotqa-tiny-grpo/checkpoints/step_000002/model'}"
        words = [
            "eval",
            model,
            f"--preset={name}",
            f"data.source=questions/{name}",
            f"--out={name}",
            *here,
            *names,
        ]
        assert main(*words, "data.train=60", "rollout.max_tokens_per_turn=48") == 0
        card = json.loads((empty_folder / name / "1.json").read_text())
        assert (card["dataset"], card["n"]) == (
            {"2wiki": "twowiki"}.get(name, name),
            6,
        ) and "evidence" in card


MATHS = {"retool.md": "problems.py", "mathtir.md": "primes.py"}


def shown(page: str) -> str:
    """The transcript on a page."""
    return re.findall(r"^(`{3,4})text\n(.*?)^\1$", (PAGES / page).read_text(), re.DOTALL | re.M)[0][
        1
    ]


def world(page: str, folder: Path) -> None:
    """Write the page's one file."""
    code = re.search(r"^(`{3,4})python\n(.*?)^\1$", (PAGES / page).read_text(), re.DOTALL | re.M)[2]
    (folder / MATHS[page]).write_text(code)


def test_retool_by_hand(empty_folder, monkeypatch, capsys):
    world("retool.md", empty_folder)
    by_hand = commands("retool.md")[0]
    typed = [
        line.removeprefix("your turn> ")
        for line in shown("retool.md").splitlines()
        if line.startswith("your")
    ]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("\n".join(typed).encode())))
    assert by_hand[0] == "try" and main(*by_hand) == 0
    said = " ".join(capsys.readouterr().out.split())
    for line in shown("retool.md").splitlines():
        assert " ".join(line.removeprefix("your turn> ").split()) in said, line


@pytest.mark.slow
@pytest.mark.parametrize("page", MATHS)
def test_training_in_the_dialects_of_mathematics(empty_folder, page):
    world(page, empty_folder)
    for words in commands(page):
        if words[0] == "try":
            continue
        if (
            "--dry-run" in words
        ):  # of a preset for GPUs; verl composes it in tests/test_verl_compose.py
            settings = [word for word in words[1:] if "=" in word]
            assert load_config(
                words[words.index("--preset") + 1], settings, algorithm="grpo"
            ).env.tools == ["python"]
            continue
        forget(empty_folder)
        assert follow(words, *SMALL, *(["--plain"] if words[0] == "train" else [])) == 0, words
    (card,) = empty_folder.glob("runs/*/eval.json")
    assert json.loads(card.read_text())["n"] == 6


def test_the_episode_on_the_page_of_mathtir(empty_folder):
    world("mathtir.md", empty_folder)
    settings = [word for word in commands("mathtir.md")[0] if "=" in word]
    config = load_config("small", settings)
    few = config.data.model_copy(update={"train": 1, "val": 1, "test": 1})
    build(few, config.seed, empty_folder / "data", config.env.name)
    rows = read_rows(empty_folder / "data" / "train.parquet")
    (episode,) = play_demonstrations(
        config.cold_start.demonstrator,
        rows,
        make_tools(["python"]),
        config.rollout,
        config.env,
        config.seed,
    )
    assert "\n\n".join(f"{m['role']}: {m['content']}" for m in episode.messages) + "\n" == shown(
        "mathtir.md"
    )
