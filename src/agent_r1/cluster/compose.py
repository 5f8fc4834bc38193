"""Convert our configuration to verl's: fill settings.yaml, merge and validate it.

In: `Config` and the paths of a run. Out: the Hydra configuration that `driver.py` trains with and
`--dry-run` prints.
Next: `trainer.py` reads it.

verl groups a batch by prompts: its `ppo_mini_batch_size` counts prompts, each with `rollout.n`
episodes.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import logging
import warnings
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from agent_r1.cluster import VERL
from agent_r1.config import Config
from agent_r1.ground.errors import AgentR1Error
from agent_r1.ground.machine import device_names, installed
from agent_r1.training.settings import LORA_ALPHA

KL_NAMES = {"k1": "k1", "k2": "k2", "k3": "low_var_kl"}


@dataclass(frozen=True)
class Sources:
    """Hold the paths that a run reads and writes."""

    model: Path
    train: Path
    val: Path
    run: Path
    """The run's folder; verl writes into `verl/` in it."""
    resume: Path | None = None
    """verl's own checkpoint folder (`.../global_step_N`) to resume from."""

    @property
    def folder(self) -> Path:
        return self.run / "verl"


def page(config: Config, model: Path, data: Path, run: Path) -> str:
    """Format verl's configuration for `--dry-run`; without verl, only our changes."""
    device = "cuda"
    if not config.verl.gpu:
        device, _ = device_names(config.trainer.device, config.trainer.dtype)
    ours = overrides(
        config, Sources(model, run / "verl" / "train.parquet", data / "val.parquet", run), device
    )
    if installed("verl") is None:
        return (
            "\nverl is not installed, so this is not validated; what differs from its defaults:\n"
            f"{OmegaConf.to_yaml(OmegaConf.create(ours))}"
        )
    text = OmegaConf.to_yaml(compose(ours), resolve=False)
    return f"\nverl's configuration, validated by verl:\n{text}"


def overrides(config: Config, sources: Sources, device: str) -> dict[str, Any]:
    """Fill settings.yaml for this run: what differs from verl's defaults.

    `device` is cpu or cuda.
    """
    values = {"our": config.model_dump(), "run": settings_of_run(config, sources, device)}
    settings = OmegaConf.create((resources.files("agent_r1.cluster") / "settings.yaml").read_text())
    parts = OmegaConf.to_container(OmegaConf.merge(values, settings), resolve=True)
    return {part: parts[part] for part in ("added", "changed")}


def settings_of_run(config: Config, sources: Sources, device: str) -> dict[str, Any]:
    """Compute the values that settings.yaml calls `run`: those that are no setting of ours."""
    r = config.rollout
    a = config.actor
    v = config.verl
    dtype = config.trainer.dtype
    cpu = device == "cpu"
    critic = config.algorithm_has("critic")
    kl = a.kl_coef > 0
    attention = attention_name(v.attention, device)
    if dtype in ("auto", "fast"):
        dtype = "float32" if cpu else "bfloat16"
    cap = v.tis_cap
    if cap is None:  # in float32 sampler and trainer agree
        cap = 2.0 if dtype == "bfloat16" else 0.0
    values = {
        "model": str(sources.model.resolve()),
        "train": str(sources.train.resolve()),
        "val": str(sources.val.resolve()),
        "name": sources.run.name,
        "folder": str(sources.folder.resolve()),
        "agent_loops": str(sources.folder / "agent_loops.yaml"),
        "resume": str(sources.resume.resolve()) if sources.resume else None,
        "resume_mode": "resume_path" if sources.resume else "disable",
        "device": device,
        "cpu": cpu,
        "gpu": not cpu,
        "dtype": dtype,
        "half": {"float32": "fp32", "bfloat16": "bf16"}[dtype],
        "attention": {"varlen": "agent_r1_varlen"}.get(attention, attention),
        "packed": attention != "sdpa",
        "extension": "agent_r1.cluster.cpu.CpuWorkerExtension" if cpu else None,
        "bucket_megabytes": bucket_megabytes(sources.model),
        "storage_units": 1 if cpu else 8,
        "ranks_per_node": v.ranks // v.nodes,
        "prompt_tokens": r.max_context - r.max_tokens_per_turn,
        "loss_scale": r.max_context if a.loss_aggregation == "seq-mean-token-sum-norm" else None,
        "lora_alpha": LORA_ALPHA * a.lora_rank,
        "clip_low": a.clip.low,
        "clip_high": a.clip.high,
        "kl_in_loss": kl and a.kl_in == "loss",
        "kl_in_reward": kl and a.kl_in == "reward",
        "kl_loss": KL_NAMES[a.kl_estimator],
        "tis": "token" if cap else None,
        "tis_cap": cap or 2.0,
        "critic": critic,
        "actor_minibatch": r.prompts_per_step // a.minibatches,
        "critic_minibatch": 1,
        "critic_steps": 0,
        "first_actor_step": 0,
        "test_freq": config.trainer.eval_every or -1,
    }
    if critic:
        values["critic_minibatch"] = r.prompts_per_step // config.critic.minibatches
        values["critic_steps"] = config.critic.warmup_steps
        values["first_actor_step"] = config.critic.warmup_steps + 1
    return values


def attention_name(setting: str, device: str) -> str:
    """Resolve `verl.attention=auto` without a look at the machine: sdpa on a CPU."""
    if setting != "auto":
        return setting
    return "sdpa" if device == "cpu" else "flash_attention_2"


def compose(ours: dict[str, Any]) -> DictConfig:
    """Merge `ours` into verl's defaults and validate. Raises AgentR1Error for what verl refuses."""
    require_verl()
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    base = OmegaConf.merge(_defaults(), ours["added"])
    # A name that this version of verl does not know is an error, not a new key.
    OmegaConf.set_struct(base, True)
    try:
        complete = OmegaConf.merge(base, ours["changed"])
        # For a critic, verl opens the model, which a dry run may not have yet.
        critic = need_critic(complete) and Path(complete.critic.model.path).is_dir()
        with contextlib.redirect_stdout(io.StringIO()):  # verl prints a success message
            validate_config(complete, need_reference_policy(complete), critic)
    # verl asserts or raises ValueError, and OmegaConf has its own errors.
    except Exception as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise AgentR1Error(
            f"verl {VERL} refuses the configuration: {reason}", code="refused_by_verl"
        ) from None
    return complete


def ray_environment(config: DictConfig) -> dict[str, Any]:
    """Return verl's runtime environment for Ray: variables that every process of the run gets."""
    logging.disable(logging.WARNING)  # verl warns if there is no GPU
    try:
        from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

        return get_ppo_ray_runtime_env(config)
    finally:
        logging.disable(logging.NOTSET)


@functools.cache
def _defaults() -> DictConfig:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module

    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # hydra 1.3 warns about the newest omegaconf; a user cannot change that
        with initialize_config_module("verl.trainer.config", version_base=None):
            defaults = hydra_compose("ppo_trainer")
    OmegaConf.set_struct(defaults, False)
    return defaults


def require_verl() -> None:
    """Raise AgentR1Error unless the supported version of verl is installed."""
    version = installed("verl")
    if version is None:
        raise AgentR1Error(
            "--engine verl needs verl, Ray and vLLM: pip install 'agent-r1[verl]' (GPU) or, in a "
            "checkout, "
            "pip install --no-deps -r requirements/verl-cpu.txt (CPU; GPU with the tested pins: "
            "verl-gpu.txt)",
            code="missing_extra",
        )
    if version != VERL:
        raise AgentR1Error(
            f"verl {version} is installed and {VERL} is needed: pip install 'agent-r1[verl]'",
            code="wrong_version",
        )


def bucket_megabytes(model: Path) -> int:
    """Return the megabytes for the model's largest matrix in float32."""
    try:
        shape = json.loads((model / "config.json").read_text())
    except FileNotFoundError:
        return 2048  # a dry run without a model
    return 16 + shape["vocab_size"] * shape["hidden_size"] * 4 // 2**20
