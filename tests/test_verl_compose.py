"""Our configuration as verl's: every preset is accepted by verl itself, and what verl cannot run is
refused before."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import fails_with, random_model
from runs import main

from agent_r1.app.plan import print_plan
from agent_r1.chat.tokenizer import save_tokenizer
from agent_r1.cluster import compose as room
from agent_r1.cluster import launch
from agent_r1.cluster.compose import Sources, compose, overrides
from agent_r1.config import Config, load_config, preset_names
from agent_r1.ground.errors import AgentR1Error
from agent_r1.ground.machine import installed
from agent_r1.model import files as model_files


def smoke(*settings: str, algorithm: str = "grpo") -> Config:
    return load_config("small", ["engine=verl", *settings], algorithm=algorithm)


def sources(folder: Path) -> Sources:
    return Sources(
        folder / "model", folder / "train.parquet", folder / "val.parquet", folder / "run"
    )


def composed(config: Config, folder: Path, device: str = "cpu"):
    return compose(overrides(config, sources(folder), device))


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize(
    ("preset", "algorithm", "device"),
    [
        (preset, algorithm, device)
        for preset in preset_names()
        for algorithm, device in (
            [("grpo", "cuda"), ("ppo", "cuda")]
            if load_config(preset).verl.gpu
            else [("grpo", "cpu")]
        )
    ],
)
def test_verl_accepts_every_preset(preset, algorithm, device, tmp_path):
    config = load_config(preset, ["engine=verl"], algorithm=algorithm)
    whole = composed(config, tmp_path, device)
    actor, r = whole.actor_rollout_ref.actor, config.rollout
    assert whole.data.train_batch_size == r.prompts_per_step
    assert actor.ppo_mini_batch_size * config.actor.minibatches == r.prompts_per_step
    assert whole.actor_rollout_ref.rollout.n == r.samples_per_prompt
    assert whole.algorithm.adv_estimator == f"agent_r1_{algorithm}"
    assert whole.critic.enable == (algorithm == "ppo")
    assert whole.actor_rollout_ref.rollout.enable_chunked_prefill == (
        device != "cpu"
    )  # else vLLM dies, now and then
    assert actor.fsdp_config.mixed_precision.param_dtype == ("fp32" if device == "cpu" else "bf16")
    # With these, vLLM never takes FlashInfer's sampler, which needs nvcc (cluster/serve.py).
    assert whole.actor_rollout_ref.rollout.logprobs_mode == "processed_logprobs"
    assert (whole.trainer.nnodes, whole.trainer.n_gpus_per_node) == (1, config.verl.ranks)
    for network in (actor.fsdp_config, whole.actor_rollout_ref.ref.fsdp_config, whole.critic.fsdp):
        assert network.param_offload == network.optimizer_offload == config.verl.offload
    correction = whole.algorithm.rollout_correction
    corrected = (
        device == "cuda" and preset != "search-r1-3b"
    )  # which is as its authors published it
    assert (correction.rollout_is, correction.rollout_is_threshold) == (
        "token" if corrected else None,
        2.0,
    )
    check_minibatches(whole, config)


def check_minibatches(whole, config: Config) -> None:
    """verl's own rules, where it applies them: a whole batch makes whole minibatches on each rank,
    without filling rows."""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    rows, ranks = (
        config.rollout.prompts_per_step * config.rollout.samples_per_prompt,
        config.verl.ranks,
    )
    trainer = SimpleNamespace(
        use_critic=whole.critic.enable, config=whole, global_steps=whole.trainer.critic_warmup
    )
    assert rows % PPOTrainer._get_required_batch_multiple(trainer, ranks) == 0
    updates = {"actor": whole.actor_rollout_ref.actor} | (
        {"critic": whole.critic} if whole.critic.enable else {}
    )
    for name, network in updates.items():
        minibatch = network.ppo_mini_batch_size * whole.actor_rollout_ref.rollout.n
        assert minibatch % ranks == 0  # TrainingWorker.train_mini_batch asserts it
        assert rows // ranks // (minibatch // ranks) == getattr(config, name).minibatches
    limits = [
        network.ppo_max_token_len_per_gpu
        for network in (whole.actor_rollout_ref.actor, whole.critic)
    ]
    limits.append(
        whole.critic.ppo_infer_max_token_len_per_gpu
    )  # PPOTrainer._setup takes it for both of its passes
    assert (
        limits == [config.trainer.max_tokens_per_microbatch] * 3
        and limits[0] >= config.rollout.max_context
    )


@pytest.mark.cluster
def test_ranks_are_spread_over_the_nodes(tmp_path):
    config = load_config("hotpotqa-8xh100", ["verl.nodes=2"], algorithm="grpo")
    whole = composed(config, tmp_path, "cuda")
    assert (whole.trainer.nnodes, whole.trainer.n_gpus_per_node) == (2, 4)


@pytest.mark.cluster
def test_verl_accepts_the_model_too(tokenizer, tmp_path):
    """For a critic it opens the folder. The bucket of the weight sync holds the largest matrix, and
    is not verl's 2 GB."""
    model_files.save_model(random_model(), tmp_path / "model", 0, 0)
    save_tokenizer(tokenizer, tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"vocab_size": 151936, "hidden_size": 896})
    )
    engine = composed(smoke(algorithm="ppo"), tmp_path).actor_rollout_ref.rollout.checkpoint_engine
    assert 151936 * 896 * 4 <= engine.update_weights_bucket_megabytes * 2**20 < 2**30


@pytest.mark.cluster
@pytest.mark.parametrize("name, value", [("no_such_field", 1), ("loss_agg_mode", "median")])
def test_what_verl_refuses_is_said_in_one_line(name, value, tmp_path):
    """... and a name that it does not know."""
    ours = overrides(smoke(), sources(tmp_path), "cpu")
    ours["changed"]["actor_rollout_ref"]["actor"][name] = value
    with fails_with("refused_by_verl", str(value) if name == "loss_agg_mode" else name):
        compose(ours)


@pytest.mark.parametrize(
    "settings, code",
    [
        (["rollout.prompts_per_step=6"], "indivisible_batch"),
        (["verl.ranks=5"], "indivisible_ranks"),
        (["verl.ranks=2", "verl.tensor_parallel=4"], "indivisible_tensor_parallel"),
        (["trainer.max_tokens_per_microbatch=300"], "small_microbatch"),
        (["verl.stall_timeout_s=300"], "short_patience"),
        (["verl.tis_cap=0.5"], "out_of_range"),
    ],
)
def test_impossible_settings_are_refused(settings, code):
    with fails_with(code):
        smoke(*settings)


@pytest.mark.cluster
def test_weights_for_the_samplers_rounding_follow_the_arithmetic(tmp_path):
    def chosen(*settings: str, device: str = "cpu"):
        correction = composed(smoke(*settings), tmp_path, device).algorithm.rollout_correction
        return correction.rollout_is, correction.rollout_is_threshold

    assert chosen() == chosen("verl.tis_cap=0", device="cuda") == (None, 2.0)
    assert chosen("trainer.dtype=bfloat16") == chosen(device="cuda") == ("token", 2.0)
    assert chosen("verl.tis_cap=3") == ("token", 3.0)


@pytest.mark.parametrize(
    "preset, least",
    [("small", 3 + 1 + 9 + 1), ("hotpotqa-4xh100", 12 + 1 + 9 + 1), ("hotpotqa-8xh100", 35)],
)
def test_ray_is_told_of_enough_cpus_for_all_that_verl_places(preset, least, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert launch.ray_cpus(load_config(preset)) >= least


@pytest.mark.cluster
def test_a_cluster_that_lacks_a_machine_or_cpus_is_refused(tmp_path, monkeypatch):
    """Two machines of four GPUs. Ray would place nothing and wait: for a machine, or for more CPUs
    than 16 cores are."""
    import ray

    from agent_r1.cluster import driver

    config = load_config("hotpotqa-8xh100", ["verl.nodes=2"], algorithm="grpo")
    whole, cpus = composed(config, tmp_path, "cuda"), launch.ray_cpus(config)
    for have, refused in (
        ({"GPU": 8, "CPU": 64}, False),
        ({"GPU": 4, "CPU": 64}, True),
        ({"GPU": 8, "CPU": 32}, True),
    ):
        monkeypatch.setattr(ray, "cluster_resources", lambda have=have: have)
        with (
            pytest.raises(AgentR1Error, match="all 2 machines.* --num-cpus=26")
            if refused
            else nullcontext()
        ):
            driver.check_cluster(whole, cpus)


@pytest.mark.parametrize(("found", "code"), [("0.8.0", "wrong_version"), (None, "missing_extra")])
def test_another_version_of_verl_is_refused(monkeypatch, tmp_path, found, code):
    monkeypatch.setattr(room, "installed", lambda name: found)
    with fails_with(code):
        room.require_verl()
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path))
    assert (
        main("train", "--preset=small", "--engine=verl") == 1
    )  # before the data that is missing, too


# ----------------------------------------------------------------------------------------- the plan


def test_a_dry_run_shows_verls_configuration(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path))
    print_plan(smoke(), "dry")
    shown = capsys.readouterr().out
    assert "adv_estimator: agent_r1_grpo" in shown
    assert ("validated by verl" in shown) == (installed("verl") is not None)
    assert not list(tmp_path.iterdir())
