"""`bash inference.sh`, as a user calls it: from a trained run to an answer."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import time

import pytest
from runs import ROOT, environment, orphans, processes_of

SCRIPT = ROOT / "inference.sh"


def inference(
    home, *argv: str, timeout: float = 120, **variables: str
) -> subprocess.CompletedProcess:
    settings = environment(home) | {"AGENT_R1_VENV": sys.prefix} | variables
    return subprocess.run(
        ["bash", SCRIPT, *argv],
        env=settings,
        cwd=home,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.fixture
def venv(tmp_path):
    """An environment in which everything is installed, and `agent-r1` only writes down how it was
    called."""
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    log = tmp_path / "calls"
    agent = f'#!/bin/bash\nprintf "%q " "$@" >> {log}; echo >> {log}\n'
    agent += '[ "$1" != export ] || echo "export: already done, in /models/my agent"\n'
    agent += '[ "$FAIL" != "$1" ] || exit 7\n'
    for name, text in {"agent-r1": agent, "python": "#!/bin/bash\ncat > /dev/null\n"}.items():
        (tmp_path / "venv" / "bin" / name).write_text(text)
        (tmp_path / "venv" / "bin" / name).chmod(0o755)
    return tmp_path / "venv"


@pytest.mark.parametrize(
    ("argv", "calls"),
    [
        ([], ["export ", "chat --model /models/my\\ agent --backend vllm "]),
        (
            ["--run", "a", "--step", "40", "--backend", "local", "--question", "Who is it?"],
            [
                "export --run a --step 40 ",
                "chat --model /models/my\\ agent --backend local --question Who\\ is\\ it\\? ",
            ],
        ),
        (["--demo", "--json"], ["chat --demo --backend local --json "]),
        (["--demo", "--backend", "vllm"], ["chat --demo --backend vllm "]),
        (["--use-hf-model", "--hf-model-path", "o/n"], ["chat --model o/n --backend vllm "]),
        (
            ["--backend=transformers", "--prompt", "a=b", "env.max_turns=3"],
            [
                "export ",
                "chat --model /models/my\\ agent --backend local --prompt a=b env.max_turns=3 ",
            ],
        ),
    ],
)
def test_what_it_calls(tmp_path, venv, argv, calls):
    done = inference(tmp_path, *argv, AGENT_R1_VENV=str(venv))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "calls").read_text().splitlines() == calls
    assert done.stdout == "", "standard output is the chat's alone"


def commands_of_the_docs() -> list[str]:
    """Every `bash inference.sh ...` of README, documents, recipes and the scripts themselves."""
    files = [ROOT / "README.md", SCRIPT, ROOT / "requirements" / "inference.sh"]
    files += [*(ROOT / "docs").rglob("*.md"), *(ROOT / "recipes").rglob("*.md")]
    written = re.compile(r"bash (inference\.sh(?: +-[^`#\n[]*?)?)(?=  |`|#|\n|;|$)")
    return sorted({match[1] for file in files for match in written.finditer(file.read_text())})


@pytest.mark.parametrize("words", commands_of_the_docs())
def test_a_command_of_the_docs_is_accepted(tmp_path, venv, words):
    argv = shlex.split(words)[1:]
    done = inference(tmp_path, *argv, AGENT_R1_VENV=str(venv))
    assert done.returncode == 0, done.stderr
    assert "--help" in argv or "chat " in (tmp_path / "calls").read_text()


@pytest.mark.parametrize("command", ["export", "chat"])
def test_a_failure_is_passed_on(tmp_path, venv, command):
    done = inference(tmp_path, AGENT_R1_VENV=str(venv), FAIL=command)
    assert done.returncode == 7 and len((tmp_path / "calls").read_text().splitlines()) == (
        1 if command == "export" else 2
    )


# ----------------------------------------------------------------------------- with a trained agent


@pytest.fixture(scope="module")
def trained(agent_home, tmp_path_factory):
    return shutil.copytree(agent_home, tmp_path_factory.mktemp("talk"), dirs_exist_ok=True)


@pytest.mark.slow
def test_from_a_trained_run_to_an_answer(trained):
    """In one process. test_serve.py starts vLLM."""
    record = json.loads(
        (trained / "runs/laptop-grpo/rollouts/eval.jsonl").read_text().splitlines()[0]
    )
    begun = time.time()
    asked = (
        "--backend",
        "local",
        "--question",
        record["question"],
        "--temperature",
        "0",
        "--json",
    )
    done = inference(trained, *asked)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()  # what export and the server said went elsewhere
    assert json.loads(line)["question"] == record["question"]
    assert (
        record["steps"][-1]["text"].split("<answer>")[1].split("</answer>")[0] in line
    )  # as at the evaluation
    assert processes_of(trained) == [] == orphans(begun)
    assert not (trained / "logs").exists() or not list((trained / "logs").iterdir())
