"""Kill a run or a stage at any moment: what follows is what would have been without."""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from runs import (
    AGENT,
    STAGES,
    TINY,
    curve,
    environment,
    killed_at,
    killed_sometime,
    leftovers,
    lines,
    main,
    rollouts,
    steps,
    struck,
    tree,
    weights,
)  # fmt: skip
from safetensors.torch import load

from agent_r1.config import load_config
from agent_r1.training.checkpoint import list_checkpoints, verify_checkpoint
from agent_r1.workspace import Workspace

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def home(produced, tmp_path_factory):
    """A home with data, index and cold start, and one uninterrupted run for each algorithm."""
    folder = Path(shutil.copytree(produced, tmp_path_factory.mktemp("home") / "home"))
    for evaluated in folder.glob(
        "runs/*/rollouts/eval*"
    ):  # the others are not evaluated, and all files are compared
        evaluated.unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENT_R1_HOME", str(folder))
        yield folder


def train(algorithm: str, run: str, *more: str) -> list[str]:
    return ["train", algorithm, *TINY, f"--run={run}", *more]


def assert_same(run, straight):
    assert weights(run) == weights(straight)
    assert curve(run) == curve(straight)
    assert steps(run) == steps(straight) == ["step_000006", "step_000008"], (
        "old ones are pruned, nothing is left"
    )
    assert rollouts(run) == rollouts(straight)
    assert leftovers(run) == []


def test_the_reference_runs_are_worth_comparing_with(home):
    """Every step moved the weights; else equality would show nothing."""
    start = load(
        (Workspace(load_config("small", TINY[1:])).cold_start / "model.safetensors").read_bytes()
    )
    for algorithm in ("grpo", "ppo"):
        records = curve(home / "runs" / algorithm)
        assert [r["training/global_step"] for r in records] == list(range(1, 9))
        updates = [r for r in records if r.get("actor/grad_norm", 0) > 0]
        assert len(updates) == {"grpo": 8, "ppo": 6}[algorithm]  # the critic warms up for two steps
        assert sum(r["actor/pg_loss"] != 0 for r in updates) >= 3
        assert max(r["num_turns/mean"] for r in records) > 1
        assert sum("val-core/tinyhop/acc/mean@1" in r for r in records) == 2
        end = load(weights(home / "runs" / algorithm))
        assert all(not end[name].equal(start[name]) for name in start)


MOMENTS = {
    "grpo": [("open", "manifest.json"), ("os.rename", "step_00000")],
    "ppo": [("shutil.rmtree", "/step_00000"), ("os.rename", ".part-metrics")],
}
"""While a checkpoint is written (weights and state are there, the list of hashes is not); just
before it gets its name; just before the oldest goes; while the curve is cut back to the
checkpoint."""


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_killed_again_and_again(home, capsys, algorithm):
    """kill -9 at the moments that hurt most and at random ones, then --resume, to the same weights
    and curve."""
    name = f"{algorithm}-killed"
    run, resume = home / "runs" / name, train(algorithm, name, "--resume")
    killed_sometime(home, run, random.Random(algorithm), *train(algorithm, name))
    for event, path in MOMENTS[algorithm]:
        killed_at(home, event, path, 1, *resume)
        for checkpoint in list_checkpoints(run / "checkpoints"):
            verify_checkpoint(checkpoint)
        if path == "manifest.json":
            assert any(path.name.startswith(".part") for path in (run / "checkpoints").iterdir())
    assert main(*resume) == 0
    assert_same(run, home / "runs" / algorithm)
    capsys.readouterr()
    assert main(*resume) == 0 and "already done" in capsys.readouterr().out


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_the_last_steps_done_again_are_the_same(home, algorithm):
    """From a checkpoint whose optimisers, critic and random states all have a past; a kill at
    random seldom finds one."""
    run = copy_of(home / "runs" / algorithm, f"{algorithm}-again")
    shutil.rmtree(run / "checkpoints" / "step_000008")
    assert main(*train(algorithm, run.name, "--resume")) == 0
    assert_same(run, home / "runs" / algorithm)


def test_a_finished_run_gets_more_steps_and_equals_a_longer_one(home, capsys):
    flat = "actor.lr_final=1"
    assert main(*train("grpo", "long", flat)) == 0
    assert main(*train("grpo", "short", flat, "trainer.steps=4")) == 0
    run = home / "runs" / "short"
    (run / "eval.json").write_text("{}")
    capsys.readouterr()
    assert main(*train("grpo", "short", flat)) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert "trainer.steps: 4 there, 8 now" in said and "add --resume to add the steps" in said
    assert main(*train("grpo", "short", flat, "--resume")) == 0
    assert weights(run) == weights(home / "runs" / "long")
    assert curve(run) == curve(home / "runs" / "long")
    # The card was about step 4.
    assert not (run / "eval.json").exists() and (run / "eval_step_000004.json").exists()


def test_an_unfinished_run_is_finished_before_it_gets_more_steps(home, capsys):
    """Its checkpoint has the old number of steps, which config.yaml must not forget."""
    flat = "actor.lr_final=1"
    assert main(*train("grpo", "half", flat)) == 0
    run = home / "runs" / "half"
    shutil.rmtree(run / "checkpoints" / "step_000008")
    before = tree(run)
    assert main(*train("grpo", "half", flat, "--resume", "trainer.steps=12")) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert "first finish it with --resume trainer.steps=8" in said and tree(run) == before
    assert main(*train("grpo", "half", flat, "--resume")) == 0
    assert main(*train("grpo", "half", flat, "--resume", "trainer.steps=12")) == 0


def test_a_run_whose_learning_rate_has_fallen_gets_no_more_steps(home, capsys):
    before = tree(home / "runs" / "grpo")
    assert main(*train("grpo", "grpo", "--resume", "trainer.steps=9")) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert "actor.lr_final=0.1 the learning rate falls over all steps" in said
    assert tree(home / "runs" / "grpo") == before


@pytest.fixture(scope="module")
def interrupted(home):
    """A run that got Ctrl-C in its third step, and how its process ended."""
    process = struck(home, "open", "/metrics.jsonl", 3, "SIGINT", *train("grpo", "ctrl-c"))
    out, errors = process.communicate(timeout=300)
    return home / "runs" / "ctrl-c", process.returncode, out, errors


def copy_of(run, name):
    return shutil.copytree(run, run.parent / name)


def test_ctrl_c_saves_the_step_and_goes_on_to_the_same_end(home, interrupted):
    run, code, _, errors = interrupted
    assert code == 130
    assert (
        errors.splitlines()[-1]
        == "agent-r1: interrupted: stopped after step 3; continue with --resume"
    )
    assert "Traceback" not in errors
    assert len(lines(run)) == 3 and steps(run) == ["step_000002", "step_000003"]
    run = copy_of(run, "ctrl-c-resumed")
    assert main(*train("grpo", run.name, "--resume")) == 0
    assert_same(run, home / "runs" / "grpo")


def test_one_process_trains_a_run_and_a_second_ctrl_c_does_not_wait(home, capsys):
    process = struck(home, "open", "/metrics.jsonl", 4, "hang", *train("grpo", "impatient"))
    run = home / "runs" / "impatient"
    assert "it hangs\n" in iter(process.stderr.readline, "")  # in its fourth step
    assert len(lines(run)) == 3
    assert main(*train("grpo", "impatient", "--resume")) == 1
    assert "another process is training" in capsys.readouterr().err.splitlines()[-1]
    process.send_signal(signal.SIGTERM)  # as good as Ctrl-C
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 130, errors
    assert errors.splitlines()[-1].startswith("agent-r1: interrupted")
    assert main(*train("grpo", "impatient", "--resume")) == 0  # the lock died with its process
    assert_same(run, home / "runs" / "grpo")


def test_a_run_whose_time_is_up_saves(home, capsys):
    """trainer.max_hours, and then to the same end."""
    run = home / "runs" / "late"
    assert main(*train("grpo", "late", "trainer.max_hours=0.00001")) == 130
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .endswith("stopped after step 1; continue with --resume")
    )
    assert len(lines(run)) == 1 and steps(run) == ["step_000001"]
    assert main(*train("grpo", "late", "--resume")) == 0
    assert_same(run, home / "runs" / "grpo")


def test_a_terminal_that_goes_away_saves_the_step(home):
    """As when an SSH connection breaks: SIGHUP, and then no line can be written."""
    run, (ours, theirs) = home / "runs" / "hung-up", os.openpty()

    def sit_at_a_terminal():
        os.login_tty(theirs)
        # Tests that run under nohup ignore SIGHUP, and so would this process.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)

    process = subprocess.Popen(
        [AGENT, *train("grpo", "hung-up")], env=environment(home) | {"TERM": "xterm"}, cwd=home,
        start_new_session=True, preexec_fn=sit_at_a_terminal, pass_fds=(theirs,),
    )  # fmt: skip
    os.close(theirs)
    deadline = time.monotonic() + 100
    while len(lines(run)) < 2 and time.monotonic() < deadline:
        if select.select([ours], [], [], 0.01)[0]:
            os.read(ours, 65536)
    os.close(ours)
    assert process.wait(timeout=100) == 130
    done = len(lines(run))
    assert 2 <= done < 8 and steps(run)[-1] == f"step_{done:06d}"


def test_an_unfinished_run_is_not_begun_again_by_mistake(interrupted, capsys):
    run = interrupted[0]
    before = tree(run)
    assert main(*train("grpo", run.name)) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert "unfinished run (step_000003)" in said and "--resume" in said and "--run" in said
    assert tree(run) == before


@pytest.mark.parametrize(
    ("command", "setting", "named"),
    [(("train", "--resume"), "actor.lr=0.001", "actor.lr: 0.0005 there, 0.001 now"),
     (("train",), "seed=4", "seed: 0 there, 4 now"),
     (("eval", "--before"), "trainer.steps=9", "trainer.steps: 8 there, 9 now"),
     (("eval",), "data.train=65", "data.train: 64 there, 65 now")],
)  # fmt: skip
def test_other_settings_are_refused_by_name(interrupted, capsys, command, setting, named):
    """... and not the eval_every that is also another one, which would do no harm."""
    run = interrupted[0]
    before = tree(run)
    assert main(*command, "grpo", *TINY, f"--run={run.name}", setting, "trainer.eval_every=7") == 1
    said = capsys.readouterr().err.splitlines()[-1]
    # An evaluation takes the run's own settings, so it names no other run.
    remedy = "leave this one out" if command[0] == "eval" else "--run"
    assert named in said and remedy in said
    assert tree(run) == before


def test_how_often_it_is_measured_may_change_on_resume(home, interrupted):
    run = copy_of(interrupted[0], "measured")
    changed = [
        "trainer.eval_every=0",
        "trainer.save_every=3",
        "trainer.keep_checkpoints=9",
        "trainer.rollouts_every=0",
    ]
    assert main(*train("grpo", run.name, "--resume", *changed)) == 0
    assert weights(run) == weights(home / "runs" / "grpo")
    assert steps(run) == [f"step_00000{n}" for n in (2, 3, 6, 8)]
    assert "keep_checkpoints: 9" in (run / "config.yaml").read_text()


# --------------------------------------------------------------------------------------- the stages


NAMES = ("tinyhop", "index", "cold-start")
"""Of what the stages make."""


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("stage", "event", "path"),
    [
        ("data", "open", "corpus.jsonl"),
        ("index", "os.rename", ".part-index"),
        ("cold-start", "open", "config.json"),
    ],
)
def test_a_killed_stage_starts_clean(home, fresh, stage, event, path):
    *before, made = (
        next((home / "artifacts").glob(f"{n}-*")) for n in NAMES[: STAGES.index(stage) + 1]
    )
    for needed in before:
        shutil.copytree(needed, fresh / "artifacts" / needed.name)
    killed_at(fresh, event, path, 1, stage, *TINY)
    assert leftovers(fresh), "it died in the middle"
    assert not (fresh / "artifacts" / made.name).exists()
    assert main(stage, *TINY) == 0
    assert tree(fresh / "artifacts" / made.name) == tree(made)
    assert {path.name for path in (fresh / "artifacts").iterdir() if path.is_dir()} == {
        p.name for p in (*before, made)
    }


def test_a_killed_evaluation_leaves_no_half_a_card(home, fresh):
    """The card appears whole or not at all, and the second try writes what the first would have."""
    shutil.copytree(home, fresh, dirs_exist_ok=True)
    command = ["eval", "grpo", *TINY, "--run=grpo"]
    card = fresh / "runs" / "grpo" / "eval.json"
    before = json.loads(card.read_text())
    card.unlink()  # a card that is there is not written again
    # The first file whose name has this in it is rollouts/eval.jsonl, the second is the card.
    killed_at(fresh, "os.rename", "eval.json", 2, *command)
    assert not card.exists()
    assert main(*command) == 0
    after = json.loads(card.read_text())
    for key in after.keys() - {"wall_seconds", "model"}:  # `model` is a path in this folder
        assert after[key] == before[key], key
    assert leftovers(fresh) == []


def test_a_stage_that_gets_ctrl_c_cleans_up(fresh):
    process = struck(fresh, "open", "corpus.jsonl", 1, "SIGINT", "data", *TINY)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 130
    assert errors.splitlines()[-1].startswith("agent-r1: interrupted") and "Traceback" not in errors
    assert tree(fresh) == {}
