"""`agent-r1 chat` as people and programs call it: through a pseudo-terminal, through pipes, with
one question.

The model is the agent that ships with the laptop recipe, in a run folder of its own. What needs no
terminal and no signal runs in this process.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from runs import ROOT, environment, main

from agent_r1.evaluation.card import play_rows
from agent_r1.inference.agent import find_model, open_agent
from agent_r1.workspace import Workspace


@pytest.fixture(scope="module")
def home(agent_home, tmp_path_factory) -> Path:
    """An AGENT_R1_HOME with one run, `laptop-grpo`, as training leaves it."""
    return shutil.copytree(agent_home, tmp_path_factory.mktemp("home"), dirs_exist_ok=True)


@pytest.fixture
def chat_command(home, monkeypatch, capsys):
    """A function that runs `agent-r1 chat ARGV` with that standard input; it returns exit code,
    output, errors."""
    monkeypatch.setenv("AGENT_R1_HOME", str(home))
    monkeypatch.chdir(home)

    def run(*argv: str, stdin: str | bytes = "") -> tuple[int, str, str]:
        stdin = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = main("chat", *argv)
        said = capsys.readouterr()
        assert "Traceback" not in said.err and "\x1b" not in said.out
        return code, said.out, said.err

    return run


# -------------------------------------------------------------------------------- a pseudo-terminal


class Terminal:
    """A child process on a pseudo-terminal, and what it has shown so far."""

    def __init__(self, command: list, env: dict[str, str], cwd: Path):
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=env,
            cwd=cwd,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C is a signal
        )
        os.close(slave)
        self.shown = ""
        self._seen = 0

    def read(self, seconds: float) -> bool:
        if not select.select([self.master], [], [], seconds)[0]:
            return False
        try:
            self.shown += os.read(self.master, 65536).decode(errors="replace")
        except OSError:  # the child is gone
            return False
        return True

    def expect(self, words: str, seconds: float = 100) -> str:
        """Wait for `words` behind what was expected last; what was shown up to them."""
        deadline = time.monotonic() + seconds
        while words not in self.shown[self._seen :]:
            assert time.monotonic() < deadline, f"no {words!r} in {self.shown[self._seen :]!r}"
            self.read(0.2)
        begun, self._seen = self._seen, self.shown.index(words, self._seen) + len(words)
        return self.shown[begun : self._seen]

    def send(self, text: str) -> None:
        """Type, and keep the terminal's buffer empty meanwhile, as a terminal does."""
        data = text.encode()
        while data:
            data = data[os.write(self.master, data[:1024]) :]
            while self.read(0):
                pass

    def close(self) -> int:
        while self.process.poll() is None and self.read(10):
            pass
        code = self.process.wait(timeout=100)
        os.close(self.master)
        return code


SLOW = """
import asyncio, sys
from contextlib import contextmanager
from agent_r1.app.cli import main
from agent_r1.inference import chat

real = chat.open_agent

@contextmanager
def open_agent(*args, **options):
    with real(*args, **options) as agent:
        generate = agent.policy.generate
        async def slow(ids, *rest):
            if "Wait" in agent.chat.decode(ids):
                agent.policy.on_token(rest[1], agent.chat.encode_data("hm"))
                await asyncio.sleep(60)
            return await generate(ids, *rest)
        agent.policy.generate = slow
        yield agent

chat.open_agent = open_agent
sys.exit(main(sys.argv[1:]))
"""
"""The real command, with a policy that takes a minute over a question with `Wait` in it."""

CTRL_C, CTRL_D, UP, ENTER = "\x03", "\x04", "\x1b[A", "\r"


@pytest.mark.slow
def test_a_session_in_a_terminal(home):
    env = environment(home) | {"TERM": "xterm-256color", "COLUMNS": "100"}
    env.pop("NO_COLOR", None)
    terminal = Terminal([sys.executable, "-c", SLOW, "chat"], env, home)
    opening = terminal.expect("\x1b[1;36m> ")
    opening = " ".join(
        re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", opening).split()
    )  # the terminal breaks and colours lines
    assert "runs/laptop-grpo/checkpoints/step_000220, local; tools: search over tinyhop-" in opening
    assert (
        "prompt: none; temperature 1," in opening
        and "each question starts a new conversation" in opening
    )
    assert "type a number to ask one" in opening

    terminal.send(f"1{ENTER}")
    assert "sampled token" in terminal.expect(" s\x1b[0m")
    terminal.expect("> ")
    terminal.send(f"/why{ENTER}")
    terminal.expect("expected: ")
    terminal.expect("> ")
    terminal.send(ENTER)
    terminal.expect("type a question, or /help")

    terminal.send(f"Wait for me{ENTER}")
    terminal.expect("hm")
    terminal.send(CTRL_C)
    terminal.expect("interrupted; the conversation is as it was before")
    terminal.expect("> \x1b[0m")
    time.sleep(
        0.3
        # a signal that meets Python between showing the prompt and waiting for a key waits for the
        # key
    )
    terminal.send(CTRL_C)
    terminal.expect("(leave with Ctrl-D or /quit)")
    terminal.send(UP + ENTER)  # history
    terminal.expect("Wait for me")
    terminal.expect("hm")
    terminal.send(CTRL_C)
    terminal.expect("interrupted")

    terminal.expect("> ")
    terminal.send(
        "\x1b[200~" + "lorem ipsum\n" * 8500 + "\x1b[201~" + ENTER
    )  # a paste, as terminals bracket it
    terminal.expect("the question alone takes")
    terminal.expect("> ")
    terminal.send(f"2{ENTER}")
    assert "sampled token" in terminal.expect(" s\x1b[0m")
    terminal.expect("> \x1b[0m")
    time.sleep(0.3)
    terminal.send(CTRL_D)
    assert terminal.close() == 0
    assert "Traceback" not in terminal.shown


# -------------------------------------------------------------------------------------------- pipes


def test_json_gives_what_evaluation_gets(home, chat_command):
    """Three questions through a pipe: the same turns as the loop of training and evaluation."""
    model, config = find_model("laptop-grpo")
    rows = Workspace(config).load_rows("test")[:3]
    questions = [row["prompt"][-1]["content"] for row in rows]
    code, out, _ = chat_command(
        "--json", "--temperature", "0", stdin="\n\n".join(questions) + "\n/clear\n"
    )
    records = [json.loads(line) for line in out.splitlines()]
    assert [record["question"] for record in records] == questions
    with open_agent(model, config) as agent:
        done = play_rows(agent, rows, 0.0, lambda trajectory: None)
    for record, trajectory in zip(records, done, strict=True):
        assert record["turns"] == [
            agent.chat.turn_text(step.action_ids) for step in trajectory.steps
        ]
        assert (record["reward"], record["stop_reason"]) == (
            trajectory.reward,
            trajectory.stop_reason.value,
        )
    assert code == int(any(record["answer"] is None for record in records))


def test_the_tool_of_the_docs(home, chat_command):
    """The example in docs/inference/inference.md, as it stands there."""
    page = (ROOT / "docs" / "inference" / "inference.md").read_text()
    code = re.search(r"```python\n(# my_tools\.py\n.*?)```", page, re.DOTALL)[1]
    command = re.search(r"^agent-r1 chat (--tools my_tools:\w+)$", page, re.MULTILINE)[1].split()
    (home / "my_tools.py").write_text(code)
    _, out, _ = chat_command(*command, stdin="/tools\n/quit\n")
    assert "search(query)" in out and f"  {command[1].partition(':')[2]}(" in out


def test_one_question(chat_command):
    question = ("--question", "Who founded Vexlor?", "--seed", "3")
    code, out, errors = chat_command(*question)
    again, line, _ = chat_command(*question, "--json", stdin="never read")
    record = json.loads(line)
    assert code == again == int(record["answer"] is None) and "sampled token" in out
    assert "temperature 0.5," in chat_command(*question, "--temperature", "0.5")[2]
    assert (
        record["answer"] in out
        if record["answer"]
        else errors.splitlines()[-1].startswith("agent-r1: ")
    )


def test_a_question_with_words_of_no_training_question(chat_command):
    asked = ("Wo liegt die Stadt von Sosnum?", "In which city is the publisher of Sosnum based?")
    notes = [chat_command("--question", question)[1].split("\n")[0] for question in asked]
    assert "and not: liegt, die, von, Stadt; do not trust" in notes[0] and "do not" not in notes[1]


def test_the_first_question_is_one_that_was_learned(home, chat_command):
    model, config = find_model("laptop-grpo")
    paths = Workspace(config)
    rows = paths.load_rows("test")
    run = home / "runs" / "laptop-grpo"
    card = {"rows_hash": "1", "data": paths.data.name, "model": str(model)}
    try:
        for name, right in (("eval_before", 0.0), ("eval", 1.0)):
            scores = [1.0] * len(rows)
            scores[7] = right
            (run / f"{name}.json").write_text(json.dumps(card | {"question_scores": scores}))
        assert paths.learned_question(model) == 7
        _, out, _ = chat_command(stdin="/help\n")
        assert f"  1  {rows[7]['prompt'][-1]['content']}\n" in out
    finally:
        (run / "eval_before.json").unlink()
        (run / "eval.json").unlink()


def test_a_script_through_standard_input(chat_command):
    script = (
        b"1\n/why\n\xff\xfe broken bytes\n/nonsense\n"
        + b"x" * 100_000
        + b"\n/tools\n/quit\nnever asked\n"
    )
    code, out, errors = chat_command(stdin=script)
    assert (
        "expected: " in out
        and "search(query)" in out
        and "trained with its own tools only" not in out
    )
    assert (
        "unknown command /nonsense" in out
        and "the question alone takes" in out
        and "never asked" not in out
    )
    assert code == 1 and "the question alone takes" in errors.splitlines()[-1]
    assert "trained with its own tools only" in chat_command("env.tools=[]", stdin="/tools\n")[1]


def test_a_server_that_fails_in_mid_answer_and_the_conversation_that_survives_it(
    chat_command, monkeypatch
):
    """A server process of its own that fails over HTTP (fake_vllm.py), in place of vLLM."""
    monkeypatch.setenv("AGENT_R1_VLLM", str(Path(__file__).with_name("fake_vllm.py")))
    monkeypatch.setenv("FAKE_VLLM", "cut")
    code, out, _ = chat_command("--backend", "vllm", stdin="One?\nTwo?\n/tools\n")
    notes = [
        line for line in out.splitlines() if line.startswith("* ") and "one small world" not in line
    ]
    assert code == 1 and len(notes) == 2 and "RuntimeError: the engine core has died" in notes[0]
    assert "search(query)" in out.splitlines()[-1]
