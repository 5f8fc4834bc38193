"""`agent-r1 gpu-check` without a run: what it keeps of a preset, its key, and what it says of a
phase."""

from __future__ import annotations

import pytest

from agent_r1.cluster import gpu_check
from agent_r1.cluster.gpu_check import GpuCheck, describe_setup, run_phases, small
from agent_r1.config import apply_overrides, load_config
from agent_r1.ground.errors import AgentR1Error
from agent_r1.ground.machine import installed
from agent_r1.ground.units import GIB

ON_VERL = ["hotpotqa-4xh100", "gsm8k", "dapo-math"]


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
@pytest.mark.parametrize("preset", ON_VERL)
def test_only_model_task_and_sizes_are_small(preset, algorithm):
    whole = load_config(preset, algorithm=algorithm)
    tiny = small(whole)
    assert tiny.verl == whole.verl.model_copy(update={"stall_timeout_s": 600})
    for section, names in {
        "actor": "minibatches kl_coef kl_in kl_estimator grad_clip loss_aggregation clip_high "
        "ratio_level",
        "critic": "minibatches",
        "rollout": "samples_per_prompt max_concurrent_episodes",
        "trainer": "device dtype max_tokens_per_microbatch recompute",
    }.items():
        for name in names.split():
            assert getattr(getattr(tiny, section), name) == getattr(
                getattr(whole, section), name
            ), name
    assert (tiny.algorithm, tiny.data.name, tiny.model.path, tiny.trainer.steps) == (
        algorithm,
        "tinyhop",
        None,
        2,
    )
    assert bool(tiny.cold_start.warm_steps) == bool(whole.cold_start.warm_steps)


def test_the_key_is_of_preset_commit_packages_driver_and_gpus(monkeypatch):
    config = load_config("hotpotqa-1x80gb", algorithm="grpo")
    about = describe_setup(config)
    assert (
        describe_setup(config)
        == about
        == describe_setup(apply_overrides(config, ["trainer.steps=7", "data.train=500"]))
    )
    assert about != describe_setup(apply_overrides(config, ["verl.offload=true"]))
    assert about != describe_setup(load_config("hotpotqa-1x80gb", algorithm="ppo"))
    assert {"version", "commit", "source"} <= about["code"].keys() and about["packages"][
        "torch"
    ] == installed("torch")
    for name, other in {
        "code_version": dict,
        "installed": lambda name: "0",
        "gpus_here": lambda: ["H100, 580.65"],
    }.items():
        with monkeypatch.context() as patch:
            patch.setattr(gpu_check, name, other)
            assert describe_setup(config) != about


def test_what_cannot_be_run_never_passes_and_what_fails_is_named(tmp_path, capsys):
    def fail(check):
        raise RuntimeError("CUDA error: no kernel image\nand an essay")

    def absent(check):
        raise gpu_check.NotRun("no GPU")

    phases = [
        gpu_check.Phase(name, look, "driver", "another one")
        for name, look in {
            "a": lambda check: "two",
            "b": absent,
            "c": fail,
            "d": lambda check: "never",
        }.items()
    ]
    found = run_phases(GpuCheck(load_config("small"), tmp_path), tuple(phases))
    assert [(one["phase"], one["status"], one["seen"]) for one in found] == [
        ("a", "passed", "two"),
        ("b", "not run", "no GPU"),
        ("c", "failed", "RuntimeError: CUDA error: no kernel image"),
        ("d", "not run", "c failed"),
    ]
    assert (
        found[2]["means"] == "driver"
        and found[2]["remedy"] == "another one"
        and "means" not in found[0]
    )
    assert "no kernel image" in capsys.readouterr().err  # the traceback, for a report


def test_a_busy_machine_is_not_called_broken(tmp_path):
    """Another run holds the lock: neither a meaning nor a remedy, which would be about drivers."""

    def busy(check):
        raise AgentR1Error("another run is on this machine; wait for it", code="locked")

    phase = gpu_check.Phase("a", busy, "driver", "another one")
    [result] = run_phases(GpuCheck(load_config("small"), tmp_path), (phase,))
    assert result["status"] == "failed"
    assert "means" not in result and "remedy" not in result


def test_a_peak_above_the_plan_fails_before_the_run(tmp_path, monkeypatch):
    preset = load_config("hotpotqa-4xh100", ["verl.attention=varlen"], algorithm="grpo")
    check = GpuCheck(small(preset), tmp_path, preset=preset)
    monkeypatch.setattr(gpu_check, "resolve_device", lambda *_: ("cuda", None))
    jobs = []

    def measure(config, shape, device, folder):
        jobs.append((shape.hidden, device, config.trainer.max_tokens_per_microbatch))
        folder.mkdir()
        return {"peak": peak, "seconds": 2.0, "tokens": 20_000}

    monkeypatch.setattr(gpu_check.real_update, "measure", measure)
    peak = 25 * GIB
    assert "10,000 a second; peak 25.0 GiB, planned" in gpu_check.real_size(check)
    assert jobs == [(1536, "cuda", 16384)]
    (tmp_path / "real_size").rmdir()
    peak = 79 * GIB
    with pytest.raises(AgentR1Error, match="peak 79.0 GiB"):
        gpu_check.real_size(check)
