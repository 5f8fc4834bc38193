"""Our configuration to verl's: one dictionary, which verl itself merges and validates.

In: `Config` and the places of a run. Out: the Hydra configuration that `driver.py` trains with and `--dry-run` prints.
Next: `trainer.py` reads it.

verl groups a batch by prompts: its `ppo_mini_batch_size` counts prompts, each of which brings `rollout.n` episodes.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from agent_r1.config import Config
from agent_r1.errors import AgentR1Error
from agent_r1.verl_engine import VERL

KL_NAMES = {"k1": "k1", "k2": "k2", "k3": "low_var_kl"}
_FSDP = {"mixed_precision": {"param_dtype": None, "reduce_dtype": None, "buffer_dtype": None}}
_MODEL = {"override_config": {"attn_implementation": None}}
LEFT_OUT = {
    "actor_rollout_ref": {
        "model": _MODEL,
        "actor": {"fsdp_config": _FSDP},
        "ref": {"fsdp_config": _FSDP},
        "rollout": {"enable_sleep_mode": True, "engine_kwargs": {"vllm": {"worker_extension_cls": None}}},
    },
    "critic": {"model": _MODEL, "fsdp": _FSDP, "ppo_infer_max_token_len_per_gpu": None},
}
"""Fields that verl's code reads and its YAML leaves out."""


@dataclass(frozen=True)
class Sources:
    """What a run reads and where it writes."""

    model: Path
    train: Path
    val: Path
    run: Path
    """The run's folder; verl writes into `verl/` in it."""
    resume: Path | None = None
    """verl's own checkpoint folder (`.../global_step_N`) to go on from."""

    @property
    def folder(self) -> Path:
        return self.run / "verl"


def overrides(config: Config, sources: Sources, device: str) -> dict[str, Any]:
    """What differs from verl's defaults, as a nested dictionary. `device` is cpu or cuda."""
    cpu = device == "cpu"
    dtype = "float32" if config.trainer.dtype == "float32" or (config.trainer.dtype == "auto" and cpu) else "bfloat16"
    model, fsdp = _model(sources, cpu), _fsdp(config, dtype, cpu)
    return {
        "data": _data(config, sources),
        "actor_rollout_ref": {
            "model": model,
            "actor": _actor(config, fsdp, cpu),
            "ref": {"strategy": "fsdp2", "fsdp_config": fsdp},
            "rollout": _rollout(config, sources, dtype, cpu),
        },
        "critic": _critic(config, model, fsdp),
        "algorithm": _algorithm(config, dtype),
        "reward": {"num_workers": 0},  # our environment has paid already
        "transfer_queue": {"backend": {"SimpleStorage": {"num_data_storage_units": 1 if cpu else 8}}},
        "trainer": _trainer(config, sources, device),
    }


def _model(sources: Sources, cpu: bool) -> dict[str, Any]:
    return {
        "path": str(sources.model.resolve()),
        # flash-attn is CUDA only, and packed rows need it.
        "override_config": {"attn_implementation": "sdpa" if cpu else "flash_attention_2"},
        "use_remove_padding": not cpu,
        "enable_gradient_checkpointing": not cpu,
        # Imported by every worker that builds the model: this is how our engine and our loss get into verl's tables.
        "external_lib": "agent_r1.verl_engine.engine",
    }


def _fsdp(config: Config, dtype: str, cpu: bool) -> dict[str, Any]:
    half = {"float32": "fp32", "bfloat16": "bf16"}[dtype]
    return {
        "strategy": "fsdp2",
        "model_dtype": "fp32",  # master weights; products run in `dtype`
        "dtype": dtype,
        "mixed_precision": {"param_dtype": half, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        "use_torch_compile": not cpu,
        "param_offload": config.verl.offload,
        "optimizer_offload": config.verl.offload,
        "seed": config.seed,
    }


def _data(config: Config, sources: Sources) -> dict[str, Any]:
    r = config.rollout
    return {
        "train_files": str(sources.train.resolve()),  # written in the order of training: see launch.write_questions
        "val_files": str(sources.val.resolve()),
        "train_batch_size": r.prompts_per_step,
        "shuffle": False,
        "dataloader_num_workers": 0,
        "max_prompt_length": r.max_context - r.max_tokens_per_turn,
        "max_response_length": r.max_tokens_per_turn,
    }


def _rollout(config: Config, sources: Sources, dtype: str, cpu: bool) -> dict[str, Any]:
    r, v = config.rollout, config.verl
    rollout = {
        "name": "vllm",
        "n": r.samples_per_prompt,
        "temperature": r.temperature,
        "top_p": 1.0,
        "dtype": dtype,
        "seed": config.seed,
        "prompt_length": r.max_context - r.max_tokens_per_turn,
        "response_length": r.max_tokens_per_turn,
        "max_model_len": r.max_context,
        "max_num_seqs": r.slots,
        # On a CPU, vLLM 0.27 dies of a seeded request whose prompt it reads in two chunks; all of ours have seeds.
        "enable_chunked_prefill": not cpu,
        "tensor_model_parallel_size": v.tensor_parallel,
        "gpu_memory_utilization": v.gpu_memory,
        "load_format": "auto",
        "enforce_eager": cpu,
        "free_cache_engine": not cpu,  # the CPU backend can neither sleep nor wake up
        "enable_sleep_mode": not cpu,
        "agent": {"num_workers": v.agent_workers, "agent_loop_config_path": str(sources.folder / "agent_loops.yaml")},
        # A bucket must hold the largest matrix, and is allocated whole: verl's 2 GB would fill a small machine's /dev/shm.
        "checkpoint_engine": {"update_weights_bucket_megabytes": _bucket_megabytes(sources.model)},
        "val_kwargs": {"temperature": 0, "n": 1, "do_sample": False},
    }
    if cpu:
        extension = "agent_r1.verl_engine.weight_sync.CpuWorkerExtension"
        rollout["engine_kwargs"] = {"vllm": {"worker_extension_cls": extension}}
    return rollout


def _actor(config: Config, fsdp: dict[str, Any], cpu: bool) -> dict[str, Any]:
    a, r = config.actor, config.rollout
    return {
        "strategy": "fsdp2",
        "fsdp_config": fsdp,
        "optim": {
            "lr": a.lr,
            "weight_decay": a.weight_decay,
            "clip_grad": a.grad_clip,
            "lr_warmup_steps": a.warmup_steps,
            "min_lr_ratio": a.lr_final,  # engine.py draws the line down to it
            # A field of verl's cosine, free for us: verl's scheduler counts updates, and the line counts RL steps.
            "num_cycles": config.critic.warmup_steps if config.algorithm == "ppo" else 0,
        },
        "ppo_mini_batch_size": r.prompts_per_step // a.minibatches,
        "ppo_epochs": a.epochs,
        "use_dynamic_bsz": True,
        "ppo_max_token_len_per_gpu": config.trainer.micro_tokens,
        "shuffle": True,
        "data_loader_seed": config.seed,
        "policy_loss": {"loss_mode": "agent_r1"},
        "clip_ratio_low": a.clip_low,
        "clip_ratio_high": a.clip_high,
        "clip_ratio_c": a.clip_dual,
        "loss_agg_mode": a.loss_aggregation,
        "loss_scale_factor": r.max_context if a.loss_aggregation == "seq-mean-token-sum-norm" else None,
        "entropy_coeff": a.entropy_coef,
        "use_kl_loss": a.kl_coef > 0 and a.kl_in == "loss",
        "kl_loss_coef": a.kl_coef,
        "kl_loss_type": KL_NAMES[a.kl_estimator],
        "use_torch_compile": not cpu,
    }


def _critic(config: Config, model: dict[str, Any], fsdp: dict[str, Any]) -> dict[str, Any]:
    c, ppo = config.critic, config.algorithm == "ppo"
    return {
        "enable": ppo,
        "strategy": "fsdp2",
        "model": {**model, "external_lib": None},
        "fsdp": fsdp,
        "optim": {"lr": c.lr, "weight_decay": 0.0, "clip_grad": c.grad_clip},
        "ppo_mini_batch_size": config.rollout.prompts_per_step // c.minibatches if ppo else 1,
        "ppo_epochs": c.epochs,
        "ppo_max_token_len_per_gpu": config.trainer.micro_tokens,
        "ppo_infer_max_token_len_per_gpu": config.trainer.micro_tokens,  # what verl 0.9.1 takes for its updates, too
        "cliprange_value": c.value_clip,
        "loss_agg_mode": "token-mean",
        "data_loader_seed": config.seed,
    }


def _algorithm(config: Config, dtype: str) -> dict[str, Any]:
    a, cap = config.actor, config.verl.tis_cap
    if cap is None:  # in float32 sampler and trainer agree
        cap = 2.0 if dtype == "bfloat16" else 0.0
    return {
        "adv_estimator": f"agent_r1_{config.algorithm}",
        "gamma": config.advantage.gamma,
        "lam": config.advantage.lam,
        "norm_adv_by_std_in_grpo": config.advantage.normalize_std,
        "use_kl_in_reward": a.kl_coef > 0 and a.kl_in == "reward",
        "kl_penalty": a.kl_estimator,
        "kl_ctrl": {"kl_coef": a.kl_coef},
        "rollout_correction": {"rollout_is": "token", "rollout_is_threshold": cap} if cap else {},
    }


def _trainer(config: Config, sources: Sources, device: str) -> dict[str, Any]:
    t = config.trainer
    return {
        "device": device,
        "nnodes": config.verl.nodes,
        "n_gpus_per_node": config.verl.ranks // config.verl.nodes,
        "total_epochs": 1,
        "total_training_steps": t.steps,
        "project_name": "agent-r1",
        "experiment_name": sources.run.name,
        "logger": ["console"],
        "val_before_train": False,
        "test_freq": t.eval_every or -1,
        "save_freq": t.save_every,
        # verl counts the first step in which the actor learns.
        "critic_warmup": config.critic.warmup_steps + 1 if config.algorithm == "ppo" else 0,
        "default_local_dir": str(sources.folder.resolve()),
        "resume_mode": "resume_path" if sources.resume else "disable",
        "resume_from_path": str(sources.resume.resolve()) if sources.resume else None,
    }


def compose(ours: dict[str, Any]) -> DictConfig:
    """verl's defaults with our values on top, validated by verl. Raises AgentR1Error for what verl refuses."""
    require_verl()
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hydra 1.3 on the newest omegaconf; nothing that a user could do about it
        with initialize_config_module("verl.trainer.config", version_base=None):
            base = hydra_compose("ppo_trainer")
    OmegaConf.set_struct(base, False)
    base = OmegaConf.merge(base, LEFT_OUT)
    OmegaConf.set_struct(base, True)  # a name that this version of verl does not know is an error, not a new key
    try:
        merged = OmegaConf.merge(base, ours)
        # For a critic, verl opens the model; a dry run may come before there is one.
        critic = need_critic(merged) and Path(merged.critic.model.path).is_dir()
        with contextlib.redirect_stdout(io.StringIO()):  # it congratulates
            validate_config(merged, need_reference_policy(merged), critic)
    except Exception as error:  # verl asserts, raises ValueError, and OmegaConf has its own
        said = str(error.__cause__ or error).strip().splitlines()[0]
        raise AgentR1Error(f"verl {VERL} refuses the configuration: {said}") from None
    return merged


def require_verl() -> None:
    """Raises AgentR1Error unless verl is here, in the version that this room is written for."""
    found = installed_verl()
    if found is None:
        raise AgentR1Error(
            "--engine verl needs verl, Ray and vLLM: pip install --no-deps -r requirements/verl-cpu.txt (GPU: verl-gpu.txt)"
        )
    if found != VERL:
        raise AgentR1Error(f"verl {found} is installed and {VERL} is needed; install requirements/verl-cpu.txt again")


def installed_verl() -> str | None:
    """The installed version of verl, or None."""
    try:
        return importlib.metadata.version("verl")
    except importlib.metadata.PackageNotFoundError:
        return None


def _bucket_megabytes(model: Path) -> int:
    try:
        shape = json.loads((model / "config.json").read_text())
        return 16 + shape["vocab_size"] * shape["hidden_size"] * 4 // 2**20
    except (OSError, ValueError, KeyError):
        return 2048  # a dry run before the model is there
