"""`agent-r1 gpu-check` without a run: what it keeps of a preset, its key, and what it says of a
phase."""

from __future__ import annotations

import contextlib
import inspect
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.cluster import gpu_check, real_update
from agent_r1.cluster.gpu_check import GpuCheck, describe_setup, run_phases, small
from agent_r1.config import apply_overrides, load_config
from agent_r1.ground.errors import AgentR1Error
from agent_r1.ground.machine import installed
from agent_r1.ground.preflight import GpuHere
from agent_r1.ground.units import GIB

needs_verl = pytest.mark.cluster
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


@pytest.fixture
def measured(monkeypatch):
    """The phase of real size on a stand-in GPU; call it with the peak in GiB."""
    monkeypatch.setattr(gpu_check, "resolve_device", lambda *_: ("cuda", None))
    monkeypatch.setattr(gpu_check, "gpus_here", lambda: [])
    jobs = []

    def run(tmp_path, peak: float) -> str:
        def measure(config, shape, device, folder):
            jobs.append((shape.hidden, device, config.trainer.max_tokens_per_microbatch))
            folder.mkdir(exist_ok=True)
            figures = {"seconds": 2.0, "tokens": 20_000, "largest_pass": 16_384}
            return figures | {"peak": peak * GIB}

        monkeypatch.setattr(gpu_check.real_update, "measure", measure)
        preset = load_config("hotpotqa-4xh100", ["verl.attention=varlen"], algorithm="grpo")
        return gpu_check.real_size(GpuCheck(small(preset), tmp_path, preset=preset))

    run.jobs = jobs
    return run


def test_the_real_size_is_the_presets(measured, tmp_path):
    found = measured(tmp_path, peak=25)
    assert "10,000 a second; largest pass 16,384 of 16,384 tokens" in found
    assert "peak 25.0 GiB, planned" in found and "more than planned" not in found
    assert measured.jobs == [(1536, "cuda", 16384)]


def test_a_peak_above_the_plan_that_fits_is_said(measured, tmp_path):
    assert "peak 70.0 GiB" in (found := measured(tmp_path, peak=70))
    assert found.endswith("more than planned, and it fits")


def test_a_peak_above_the_card_fails(measured, tmp_path, monkeypatch):
    """With CUDA's own 3 GiB, 79 are more than an H100's 80; 70 are more than a smaller card's."""
    with pytest.raises(AgentR1Error, match="peak 79.0 GiB"):
        measured(tmp_path, peak=79)
    here = GpuHere("NVIDIA A100-SXM4-64GB", 65536, "580.65", 8.0)
    monkeypatch.setattr(gpu_check, "gpus_here", lambda: [here])
    with pytest.raises(AgentR1Error, match="card 64.0"):
        measured(tmp_path, peak=70)


# --------------------------------------------------------- what each pass of the real size holds


def passes_of_an_update(batch, ranks: int, limit: int, monkeypatch) -> list[int]:
    """Let verl's own worker cut one rank's rows into minibatches and passes; count their tokens.

    The worker's engine is a stand-in that says how many ranks there are.
    """
    from verl.utils import tensordict_utils
    from verl.workers.engine.utils import prepare_micro_batches
    from verl.workers.engine_workers import TrainingWorker

    passes: list[int] = []

    def count(minibatch):
        tensordict_utils.assign_non_tensor(minibatch, max_token_len_per_gpu=limit)
        cut, _ = prepare_micro_batches(minibatch)
        passes.extend(int(one["input_ids"].offsets()[-1]) for one in cut)
        return {}

    engine = SimpleNamespace(
        get_data_parallel_size=lambda: ranks,
        get_data_parallel_rank=lambda: 0,
        get_data_parallel_group=lambda: None,
        train_mode=lambda **options: contextlib.nullcontext(),
        is_mp_src_rank_with_outputs=lambda: False,
    )
    worker = SimpleNamespace(
        engine=engine, train_batch=count, profiler=SimpleNamespace(step=lambda: None)
    )
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: 1)
    gather = lambda results, result, group: results.__setitem__(0, result)  # noqa: E731
    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    inspect.unwrap(TrainingWorker.train_mini_batch)(worker, batch)
    return passes


@needs_verl
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize(("limit", "longest"), [(16384, 8192), (8192, 8192), (4096, 4096)])
def test_the_largest_pass_is_full_at_every_number_of_ranks(ranks, limit, longest, monkeypatch):
    lengths = real_update.row_lengths(limit, longest)
    assert max(lengths) <= longest
    batch = real_update.random_batch(lengths, 300, seed=0, ranks=ranks)
    passes = passes_of_an_update(batch, ranks, limit, monkeypatch)
    assert sum(passes) == sum(lengths), "each row once, in one minibatch"
    assert 0.9 * limit <= max(passes) <= limit
    assert len(passes) == 2


@needs_verl
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("rows", [1, 7, 13])
def test_odd_numbers_of_rows_are_divided_among_the_ranks(ranks, rows, monkeypatch):
    batch = real_update.random_batch([90] * rows, 300, seed=0, ranks=ranks)
    assert sum(passes_of_an_update(batch, ranks, 400, monkeypatch)) == 90 * rows


@given(limit=st.integers(300, 40_000), longest=st.integers(300, 40_000))
def test_two_passes_of_rows_have_the_limits_tokens(limit, longest):
    lengths = real_update.row_lengths(limit, longest)
    assert sum(lengths) == 2 * limit
    assert max(lengths) <= max(longest, 1) and min(lengths) >= 1
