"""`agent-r1 gpu-check`: one real run on one CPU rank, and for each phase a planted fault that it
must name, with a remedy.

The faults are planted in copies of that run, and met by the real code of the phase.
test_verl_train.py runs "resume" to its end.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from runs import CHECK, main, tree

from agent_r1.app import stages
from agent_r1.cluster import gpu_check, launch
from agent_r1.cluster.gpu_check import (
    CHECKPOINT,
    PHASES,
    SAMPLING,
    START,
    SYNC,
    UPDATE,
    GpuCheck,
    at_home,
    run_phases,
    small,
)
from agent_r1.config import apply_overrides, load_config
from agent_r1.ground.errors import AgentR1Error
from agent_r1.inference import export
from agent_r1.workspace import Workspace

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.cluster,
]
NOT_HERE = {"warm start"}
"""On one CPU rank, with a preset that has no warm start."""
POPEN = subprocess.Popen


def test_a_cpu_goes_through_all_that_it_can_run(checked, monkeypatch, capsys):
    result = json.loads((checked / "result.json").read_text())
    status = {one["phase"]: one["status"] for one in result["phases"]}
    assert result["passed"] and list(status) == [
        phase.name for phase in PHASES if phase.name != "resume"
    ]
    assert {name for name, said in status.items() if said == "not run"} == NOT_HERE
    assert {said for name, said in status.items() if name not in NOT_HERE} == {"passed"}
    before = tree(checked)
    monkeypatch.setattr(
        gpu_check, "describe_setup", lambda config: result["made_of"]
    )  # a commit meanwhile makes another key
    monkeypatch.setenv("AGENT_R1_HOME", str(checked.parents[1]))
    assert main("gpu-check", *CHECK, "--json") == 0
    said, last = capsys.readouterr().out.strip().rsplit("\n", 1)
    assert "checked before" in said and json.loads(last) == result and tree(checked) == before


@pytest.fixture
def go(checked, tmp_path, monkeypatch):
    """Go through some phases again, in a copy of the check, after a fault has been planted
    there."""
    folder = tmp_path / "copy"
    shutil.copytree(checked, folder, ignore=shutil.ignore_patterns("logs"))
    config = small(load_config("small", CHECK[2:], algorithm="grpo"))

    def through(*names: str, settings: tuple[str, ...] = ()) -> dict:
        """What was found in the last of them, which failed."""
        phases = tuple(phase for phase in PHASES if phase.name in names)
        with at_home(folder):
            *before, last = run_phases(
                GpuCheck(apply_overrides(config, list(settings)), folder), phases
            )
        assert [one["status"] for one in before] == ["passed"] * len(before)
        assert last["status"] == "failed" and last["means"] and last["remedy"]
        return last

    through.folder = folder
    return through


def cut(folder: Path, pattern: str) -> None:
    """Take away the second half of a file."""
    [file] = folder.glob(pattern)
    os.truncate(file, file.stat().st_size // 2)


def test_a_fault_of_the_start_model(go):
    shutil.rmtree(next(go.folder.glob("artifacts/cold-start-*")))
    cut(go.folder, "artifacts/index-*/vectors.faiss")
    assert "the vectors of the index" in go("tiny model")["seen"]


def test_a_fault_of_the_warm_start(go):
    """With a preset that has a warm start, and so another name for its tiny model."""
    settings = [*CHECK[2:], "cold_start.warm_steps=2"]
    with at_home(go.folder):
        model = Workspace(small(load_config("small", settings, algorithm="grpo"))).cold_start
    next(go.folder.glob("artifacts/cold-start-*")).rename(model)
    cut(model, "model.safetensors")
    assert "cut short" in go("warm start", settings=("cold_start.warm_steps=2",))["seen"]


def test_a_driver_that_does_not_start(go, tmp_path, monkeypatch):
    """As where a library of CUDA is missing: the real launcher, and a Ray that cannot be
    imported."""
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").write_text(
        "raise ImportError('libcudart.so.13: cannot open shared object file')"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    shutil.rmtree(go.folder / "runs")
    assert "while Ray, FSDP and vLLM were starting" in go(START)["seen"]


@pytest.mark.parametrize(
    "said, phase",
    [("sampling", SAMPLING), ("checkpoint: merge", CHECKPOINT), ("first weight sync", SYNC)],
)
def test_a_run_that_ends_in_a_phase(go, monkeypatch, said, phase):
    """The real launcher, over a driver that writes down its phase and dies in the first or second
    step."""
    lines = (go.folder / "runs" / "check" / "metrics.jsonl").read_text()
    shutil.move(go.folder / "runs" / "check" / "checkpoints", go.folder / "kept")
    shutil.rmtree(go.folder / "runs")
    code = f"""
import json, pathlib
run = pathlib.Path({str(go.folder / "runs" / "check")!r})
(run / "metrics.jsonl").write_text({lines!r})
(run / "verl" / "phase.json").write_text(json.dumps({{"step": 2, "phase": {said!r}}}))
(run / "verl" / "cause.txt").write_text("RuntimeError: CUDA error: an illegal memory access")
raise SystemExit(1)
"""
    monkeypatch.setattr(
        launch.subprocess,
        "Popen",
        lambda command, **options: POPEN([sys.executable, "-c", code], **options),
    )
    before = (
        [START, SAMPLING, UPDATE][: 1 + [SAMPLING, UPDATE, CHECKPOINT].index(phase)]
        if phase != SYNC
        else [START]
    )
    found = go(*before, phase)
    assert (
        f"in step 2, {said}: RuntimeError: CUDA error" in found["seen"] and found["phase"] == phase
    )


def test_a_sampler_that_keeps_its_old_weights(go):
    """What vLLM sampled in step 1 is what it would have sampled in step 2 without the sync."""
    rollouts = go.folder / "runs" / "check" / "rollouts"
    shutil.copy(rollouts / "step_000001.jsonl", rollouts / "step_000002.jsonl")
    assert "the weights that step 1 left" in go(SYNC)["seen"]


def test_a_checkpoint_that_was_cut(go):
    cut(go.folder, "runs/check/checkpoints/step_000002/model/model.safetensors")
    assert "does not match its checksum" in go(CHECKPOINT)["seen"]


def test_a_run_that_cannot_go_on(go):
    cut(go.folder, "runs/check/checkpoints/step_000001/trainer.pt")
    assert "step_000001 is damaged" in go("resume")["seen"]


def test_an_export_with_other_weights(go, monkeypatch):
    def write(source, part, base):
        ours = real(source, part, base)
        cut_short = load(part)
        with torch.no_grad():
            next(cut_short.parameters()).mul_(1.5)
        cut_short.save_pretrained(part)
        return ours

    real, load = export._write_model, export.load_transformers
    monkeypatch.setattr(export, "_write_model", write)
    shutil.rmtree(go.folder / "export")
    assert "it does not have the checkpoint's weights" in go("export")["seen"]


def test_a_model_server_that_does_not_start(go, tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\necho 'RuntimeError: Failed to find C compiler. Please specify via CC'\nexit 1\n"
    )
    python.chmod(0o755)
    monkeypatch.setenv("AGENT_R1_VLLM", str(python))
    monkeypatch.setattr(stages, "_backend", lambda config, model: "vllm")
    (go.folder / "runs" / "check" / "eval.json").unlink()
    assert "Failed to find C compiler" in go("evaluation")["seen"]


def test_a_check_that_failed_is_done_again_and_ends_the_speedrun(tmp_path, monkeypatch, capsys):
    """With the phase and the remedy on the last line."""

    def broken(check):
        raise AgentR1Error("no space")

    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path))
    monkeypatch.setattr(gpu_check, "PHASES", (gpu_check.Phase("export", broken, "that", "this"),))
    for _ in range(2):
        assert main("gpu-check", *CHECK, "--json") == 1
        out, errors = capsys.readouterr()
        assert "checked before" not in out and not json.loads(out.splitlines()[-1])["passed"]
        assert (
            errors.splitlines()[-1]
            == "agent-r1: gpu-check, export: no space. This means: that. Remedy: this"
        )
