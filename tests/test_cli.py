"""The command line: what it refuses, how it says so, and its exit codes.

0 done, 1 failed, 2 wrong usage or configuration, 130 interrupted; the last line on standard error
has cause and remedy.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from runs import CHATML, ROOT, TINY, leftovers, lines, main, prepare, tree

from agent_r1 import workspace
from agent_r1.app import cli
from agent_r1.config import load_config
from agent_r1.data.storage import read_rows, write_rows
from agent_r1.training.run_dir import RunDir, only_trainer
from agent_r1.workspace import Workspace

SMALL = [
    *TINY,
    "cold_start.copy_steps=3",
    "cold_start.probe=0",
    "cold_start.mix_steps=3",
    "trainer.steps=3",
    "trainer.save_every=1",
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A home with a finished run `done` of three steps, and its first half in `half`. Copy it
    before changing it."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("home")
        patch.setenv("AGENT_R1_HOME", str(folder))
        prepare(folder, *SMALL[len(TINY) :])
        assert main("train", "grpo", *SMALL, "--run=done") == 0
        done, half = folder / "runs" / "done", folder / "runs" / "half"
        shutil.copytree(done, half)
        shutil.rmtree(half / "checkpoints" / "step_000003")  # killed before its last checkpoint
        shutil.copytree(
            done / "checkpoints" / "step_000002",
            half / "checkpoints" / "step_000002",
            dirs_exist_ok=True,
        )
        yield folder


@pytest.fixture
def home(made, tmp_path, monkeypatch):
    """A copy that a test may spoil."""
    shutil.copytree(made, tmp_path / "home")
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def empty(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path))
    return tmp_path


def test_commands_joined_by_then_run_in_order_until_one_fails(empty, capsys):
    good, bad = ["data", *TINY], ["train", "--run=a/b", *TINY]
    assert main(*good, "then", *good) == 0
    assert capsys.readouterr().out.count("data:") == 2
    assert main(*bad, "then", *good) == 2
    assert "data:" not in capsys.readouterr().out


def refused(capsys, code: int, *argv: str) -> str:
    """`agent-r1 ARGV` ends with `code`; its last words."""
    assert main(*argv) == code
    errors = capsys.readouterr().err
    assert "Traceback" not in errors
    return errors.splitlines()[-1]


# ----------------------------------------------------------------------------- help, and how to ask


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_shows_examples_that_work(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main("new", "my-task") == 0
    capsys.readouterr()
    assert main(name, "--help") == 0
    examples = [
        shlex.split(line)
        for line in capsys.readouterr().out.partition("examples:\n")[2].splitlines()
    ]
    assert examples and all(line[:2] == ["agent-r1", name] for line in examples)
    for example in examples:
        arguments = cli.parse_command_line(example[1:])
        if name in ("chat", "serve"):  # the settings go on top of the model's own
            model = [f"model.path={arguments.model}"] if arguments.model else []
            load_config(arguments.preset or "discover", model + arguments.settings)
        elif "settings" in arguments:
            preset = cli.config_of(arguments).preset
            assert (
                preset in example
                or {"--run", "--model", "--power"} & set(example)
                or Path(preset).is_file()
            )


WITHOUT_TORCH = [
    ["--help"],
    ["train", "--preset", "nope"],
    ["data", "x=1"],
    ["doctor", "--suggest-preset"],
    *(
        ["train", "--preset", preset, "--dry-run"]
        for preset in ("discover", "pocket", "tinyquest", "hotpotqa-4xh100")
    ),
]


def test_an_environment_with_pictures_is_refused_before_the_run(tmp_path, monkeypatch, capsys):
    """The local loop reads tokens only. Nothing is made: no data, no cold start, no run."""
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path))
    assert main("train", "grpo", *TINY, "env.name=album", "--run=album") == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert "shows pictures, which the local loop cannot read; train with --engine verl" in message
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_help_refusals_and_plans_do_not_wait_for_torch(tmp_path):
    """Without verl, which needs PyTorch to validate its configuration."""
    code = (
        "import contextlib, sys; from agent_r1.app.cli import main; from agent_r1.ground import "
        "machine\n"
        "machine.installed = lambda package: None\n"
        f"for argv in {WITHOUT_TORCH}:\n"
        "    with contextlib.suppress(SystemExit): main(argv)\n"
        "    loaded = {'torch', 'transformers', 'pyarrow', 'faiss', 'matplotlib'} & "
        "set(sys.modules)\n"
        "    assert not loaded, (argv, loaded)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        # A plan fetches the template of a hub model, and reads it with transformers.
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def planned(monkeypatch):
    """What `train --dry-run` was to plan: (configuration, name of the run)."""
    seen = []
    monkeypatch.setattr(
        "agent_r1.app.plan.print_plan",
        lambda config, run, price, is_verbose: seen.append((config, run)),
    )
    return seen


def test_settings_in_any_order(planned):
    parts = [["grpo"], ["--preset", "small"], ["--seed=3"], ["actor.lr=0.5", "data.train=99"]]
    for order in itertools.permutations(parts):
        assert main("train", *itertools.chain(*order), "--dry-run") == 0
    expected = load_config("small", ["actor.lr=0.5", "data.train=99"], algorithm="grpo", seed=3)
    assert planned == [(expected, "small-grpo-s3")] * 24


def test_what_is_trained_where_nothing_or_only_a_run_is_named(home, planned):
    assert main("train", "--dry-run") == main("train", "--dry-run", "--run", "done") == 0
    assert planned == [
        (load_config("discover", algorithm="grpo"), "discover-grpo"),
        (load_config("small", SMALL[1:], algorithm="grpo"), "done"),  # it speaks for itself
    ]


# ---------------------------------------------------------------------------------- what is refused

BAD_USAGE = {  # of settings there is more in test_config.py
    "unknown command": (["trian"], "did you mean 'train'?"),
    "unknown value": (["eval", "--split", "tset"], "did you mean 'test'?"),
    "a port that cannot be": (["serve", "--port", "99999"], "invalid port value: '99999'"),
    "no port": (["search-server", "--port", "0"], "invalid port value: '0'"),
    "minutes that are no number": (
        ["env", "check", "tinyquest", "--minutes", "nan"],
        "--minutes, --step-seconds and --memory-gb are above 0",
    ),
    "unknown key": (["data", "data.trian=3"], "did you mean 'data.train'?"),
    "unknown algorithm": (["train", "grop"], "did you mean 'grpo'?"),
    "a run that is a path": (["train", "--run", "a/b"], "give a plain folder name"),
    "demonstrations without search": (
        ["cold-start", "env.tools=[]"],
        "this task has no demonstrator",
    ),
}


@pytest.mark.parametrize(("argv", "said"), BAD_USAGE.values(), ids=BAD_USAGE)
def test_wrong_usage(empty, capsys, argv, said):
    assert said in refused(capsys, 2, *argv)
    assert tree(empty) == {}


MISSING = {  # in which order the stages are asked for: test_stages.py
    "data": (["index", *TINY], "agent-r1 data --preset small --seed 0"),
    "run to evaluate": (
        ["eval", *TINY, "--run=nope"],
        "nope does not exist; run `agent-r1 train` first",
    ),
    "run to report": (["report", "--run=nope"], "name a run with --run (there are: none yet)"),
    "rollouts": (["inspect", "nope.jsonl"], "nope.jsonl does not exist; runs/<name>/rollouts/"),
    "model to start from": (["train", *TINY, "model.path=/nope"], "no model at model.path=/nope"),
}


@pytest.mark.parametrize(("argv", "said"), MISSING.values(), ids=MISSING)
def test_what_is_missing(empty, capsys, argv, said):
    assert said in refused(capsys, 1, *argv)
    assert tree(empty) == {}


def test_an_evaluation_of_a_run_honours_every_option_and_leaves_its_card_alone(home, capsys):
    """Each of them was ignored without --model: the test set was evaluated instead, into
    eval.json."""
    before, out, file = tree(home), home.parent / "cards", home.parent / "mine.parquet"
    run, card = ["eval", "--run=done"], {}
    options = {
        "plain": ["--limit=2"],
        "val": ["--limit=2", "--split=val"],
        "sampled": ["--limit=2", "--temperature=0.7"],
        "told": ["--limit=2", "--prompt=Answer in one word."],
        "file": [f"--dataset={file}"],
        "start": ["--limit=2", "--before"],
    }
    (data,) = (path.parent for path in home.glob("artifacts/*/test.parquet"))
    write_rows(file, read_rows(data / "train.parquet")[:3])
    for name, words in options.items():
        assert main(*run, *words, f"--out={out / name}") == 0
        card[name] = json.loads((out / name / "1.json").read_text())
    assert {name: (c["split"], c["n"], c["temperature"]) for name, c in card.items()} == {
        "plain": ("test", 2, 0.0),
        "val": ("val", 2, 0.0),
        "sampled": ("test", 2, 0.7),
        "told": ("test", 2, 0.0),
        "file": ("mine", 3, 0.0),
        "start": ("test", 2, 0.0),
    }
    assert card["val"]["rows_hash"] != card["plain"]["rows_hash"]
    assert (
        card["told"]["prompt_hash"] != card["plain"]["prompt_hash"] == card["start"]["prompt_hash"]
    )
    assert card["start"]["model_hash"] != card["plain"]["model_hash"]
    assert tree(home) == before and "temperature 0.7, " in capsys.readouterr().out


def test_a_run_that_is_running_is_not_called_unfinished(home, capsys):
    train = ["train", "grpo", *SMALL, "--run=half"]
    assert "add --resume to continue it" in refused(capsys, 1, *train)
    with only_trainer(RunDir(home / "runs" / "half")):
        assert "another process is training" in refused(capsys, 1, *train)


# ------------------------------------------------------------------------------ damaged checkpoints


def flip_a_byte(checkpoint):
    data = bytearray((checkpoint / "model" / "model.safetensors").read_bytes())
    data[-9] ^= 1
    (checkpoint / "model" / "model.safetensors").write_bytes(data)


def test_deleting_the_damaged_checkpoint_helps_as_it_was_said(home, made, capsys):
    run = home / "runs" / "done"
    flip_a_byte(run / "checkpoints" / "step_000003")
    assert "step_000003 is damaged" in refused(capsys, 1, "eval", "grpo", *SMALL, "--run=done")
    shutil.rmtree(run / "checkpoints" / "step_000003")
    assert main("train", "grpo", *SMALL, "--run=done", "--resume") == 0
    same = Path("runs/done/checkpoints/step_000003/model/model.safetensors")
    assert (home / same).read_bytes() == (made / same).read_bytes()
    assert len(lines(run)) == 3


# ----------------------------------------------------------------------- nowhere to write, no space


@pytest.mark.parametrize("place", ["/proc/nowhere", "file"])
def test_a_home_that_cannot_be_written(tmp_path, monkeypatch, capsys, place):
    (tmp_path / "file").write_text("mine")
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path / place))
    said = refused(capsys, 1, "data", *SMALL)
    assert str(tmp_path / place) in said and "cannot write" in said and "AGENT_R1_HOME" in said
    assert (tmp_path / "file").read_text() == "mine"


@contextmanager
def limited(kilobytes: int):
    """No file may grow beyond this; the system refuses to write, as it does when a disk is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (kilobytes * 1024, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


NO_SPACE = {
    "cold start": (["cold-start", "cold_start.mix_steps=4"], 50),
    "later checkpoint, state": (
        ["train", "grpo", "--run=half", "--resume", "trainer.rollouts_every=0"],
        200,
    ),
    "rollouts": (["train", "grpo", "--run=new", "trainer.save_every=3"], 30),
}


@pytest.mark.slow
@pytest.mark.parametrize(("argv", "kilobytes"), NO_SPACE.values(), ids=NO_SPACE)
def test_no_space(home, capsys, argv, kilobytes):
    """One line, no half thing under a whole one's name, everything that was there still there, and
    then it goes on."""
    before = {
        name: digest
        for name, digest in tree(home).items()
        if not name.endswith(("config.yaml", "metrics.jsonl"))
    }
    command = [argv[0], *SMALL, *argv[1:]]
    with limited(kilobytes):
        said = refused(capsys, 1, *command)
    assert ("File too large" in said or "trainer.pt" in said) and (
        "free" in said or "make room" in said
    ), said
    assert before.items() <= tree(home).items()
    assert leftovers(home) == []
    for folder in (home / "artifacts").iterdir():
        assert folder.name.startswith(".") or folder.name in {
            name.split("/")[1] for name in before if "/" in name
        }
    assert main(*command, *(["--resume"] if argv[0] == "train" else [])) == 0


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (OSError(errno.ENOSPC, "No space left", "/a/file"), 1, "/a/file: No space left; check "
            "space and permissions, and run it again"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)  # fmt: skip
def test_what_nobody_thought_of(empty, monkeypatch, capsys, error, code, said):
    def raises(*words):
        raise error

    monkeypatch.setattr(workspace.Workspace, "make_data", raises)
    assert refused(capsys, code, "data") == f"agent-r1: {said}"


def test_a_bug_of_ours_keeps_its_traceback(empty, monkeypatch):
    monkeypatch.setattr(workspace.Workspace, "make_data", lambda *words: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["data"])


def test_a_run_says_once_that_there_is_an_agent_and_keeps_that_step(home, monkeypatch, capsys):
    """Step 3 is as good, and is no news. Step 2 is saved once, although nothing else asks for
    it. If each step is saved and one is kept, the agent stays next to it."""
    scores = iter([0.5, 0.95, 0.95])
    score = {"val-core/tinyhop/acc/mean@1": 0.0}
    monkeypatch.setattr(
        "agent_r1.training.run.validation", lambda *words: dict.fromkeys(score, next(scores))
    )
    every = ("trainer.save_every=50", "trainer.eval_every=1")
    assert main("train", "grpo", *SMALL, *every, "--run=new", "--plain") == 0
    told = [line for line in capsys.readouterr().out.splitlines() if "an agent: " in line]
    assert len(told) == 1 and "greedy validation 0.950 at step 2; talk to it: " in told[0]
    assert told[0].endswith("agent-r1 chat --run new --step 2")
    kept = {path.name for path in (home / "runs" / "new" / "checkpoints").glob("step_*")}
    assert kept == {"step_000002", "step_000003"}

    scores = iter([0.95, 0.5, 0.95])
    every = ("trainer.save_every=1", "trainer.eval_every=1", "trainer.keep_checkpoints=1")
    assert main("train", "grpo", *SMALL, *every, "--run=one", "--plain") == 0
    kept = {path.name for path in (home / "runs" / "one" / "checkpoints").glob("step_*")}
    assert kept == {"step_000001", "step_000003"}


# ---------------------------------------------------------------------------- eval, report, inspect


def test_the_stages_after_training(home, capsys):
    for argv in (["eval", "--before"], ["eval"], ["report"]):
        assert main(*argv, "grpo", *SMALL, "--run=done") == 0
    run = home / "runs" / "done"
    assert {"eval_before.json", "eval.json", "report.html", "config.yaml", "metrics.jsonl"} <= {
        p.name for p in run.iterdir()
    }
    card = json.loads((run / "eval.json").read_text())
    assert card["model"].endswith("step_000003/model")
    assert card["time_to_agent"]["val"] == 0.9 and card["time_to_agent"]["cold_start_seconds"] > 0
    assert "time_to_agent" not in json.loads((run / "eval_before.json").read_text())
    capsys.readouterr()
    assert main("eval", "grpo", *SMALL, "--run=done") == 0
    assert "already done" in capsys.readouterr().out
    assert "has not finished its 3 steps" in refused(
        capsys, 1, "eval", "grpo", *SMALL, "--run=half"
    )


# ---------------------------------------------------------------------------- models of other kinds


def test_what_no_run_can_start_from_is_said_before_anything_is_written(home, tmp_path, capsys):
    """A template that shows no tools. (An architecture that is not ours: test_decoder.py.)"""
    model = tmp_path / "plain"
    shutil.copytree(Workspace(load_config("small", SMALL[1:])).cold_start, model)
    (model / "chat_template.jinja").write_text(CHATML)
    before = tree(home)
    for command in (["cold-start"], ["eval", "--before", "--run=new"], ["train", "--run=new"]):
        assert "does not show the tools to the model" in refused(
            capsys, 2, *command, *SMALL, f"model.path={model}"
        )
    assert tree(home) == before and not (home / "runs" / "new").exists()
    assert main("train", "grpo", *SMALL, "--run=new") == 0  # the same name, other settings


def test_a_run_that_failed_before_its_first_step_holds_nobody_to_its_settings(
    home, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, "wandb", None)
    options = ["train", "grpo", *SMALL, "--run=new"]
    assert "not installed" in refused(
        capsys, 2, *options, "trainer.loggers=[wandb]", "actor.lr=0.1"
    )
    assert main(*options) == 0
    assert "actor.lr: 0.0005 there, 0.1 now" in refused(
        capsys, 1, *options, "actor.lr=0.1"
    )  # now something has run


BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ImportError(f"blocked: {name}")

sys.meta_path.insert(0, Blocked())
from agent_r1.app.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["diagnose", "RUN"], "Agent-R1: 8 steps"),
        (["inspect", "RUN/rollouts/eval.jsonl", "-i", "3", "--table"], "log-prob"),
        (["env", "check", "--recipe", "tinyquest", "--questions", "4"], "determinism"),
        # It refuses a file before it loads the model. To play a record's runs needs the model.
        (["record", "RUN/config.yaml"], "the record is refused"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_commands_that_read_load_neither_torch_nor_transformers(produced, words, shown):
    run = str(produced / "runs" / "grpo")
    words = [word.replace("RUN", run) for word in words]
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, *words], capture_output=True, text=True, cwd=ROOT
    )
    said = done.stdout + done.stderr
    assert "blocked" not in said and shown in said
