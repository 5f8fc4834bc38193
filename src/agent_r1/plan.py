"""`--dry-run`: the resolved configuration, what is done and what is to do, and what it will take. Starts nothing.

For a run on this machine a matrix product is timed. For a preset that names a GPU, `roofline.py` computes what such GPUs
would do, so that a run can be planned before one is rented.
"""

from __future__ import annotations

import time

import torch
from omegaconf import OmegaConf

from agent_r1 import roofline
from agent_r1.config import Config, to_yaml
from agent_r1.doctor import gpus_here
from agent_r1.errors import AgentR1Error
from agent_r1.rollout import qwen
from agent_r1.roofline import GIB
from agent_r1.stages import Places, needs_index, set_threads
from agent_r1.training.loop import resolve_device
from agent_r1.training.tiny_model import shape_of
from agent_r1.ui import say

TOKENS_PER_EPISODE = 115
"""Mean length of a laptop episode in training (metrics: sequence_length/mean)."""
EFFICIENCY = 0.35
"""Share of the matmul rate that a whole step reaches. At 194 GFLOP/s it foretells 0.80 s for a GRPO step of 16 x 8; measured
there: 0.88 s in steps 4 to 23, and 0.69 s over the whole run, whose later batches have more rows without advantage."""


def print_plan(config: Config, run_name: str, gpu_hour: float | None = None) -> None:
    """Print configuration, stages and estimates. `gpu_hour`: the price of one GPU for an hour."""
    places = Places.of(config)
    lines = gpu_plan(config, gpu_hour) if config.verl.gpu and config.engine == "verl" else estimates(config)
    say(to_yaml(config))
    for title, path in (
        ("data", places.data),
        ("index", places.index),
        ("start model", places.start_model),
        ("evaluation before", places.run(run_name) / "eval_before.json"),
        ("training", places.run(run_name) / "checkpoints" / f"step_{config.trainer.steps:06d}"),
        ("evaluation after", places.run(run_name) / "eval.json"),
        ("report", places.run(run_name) / "report.html"),
    ):
        if title == "index" and not needs_index(config):
            say(f"{title:18} not needed here{f': {config.search.url} has one' if config.search.url else ''}")
            continue
        say(f"{title:18} {'done' if path.exists() else 'to do':6} {path}")
    for line in lines:
        say(line)
    if config.engine == "verl":
        print_verl(config, places, run_name)


def print_verl(config: Config, places: Places, run_name: str) -> None:
    """verl's whole configuration, validated by verl where it is installed; else what we would set."""
    from agent_r1.verl_engine.compose import Sources, compose, installed_verl, overrides

    device = "cuda" if config.verl.gpu else resolve_device(config)[0]
    run = places.run(run_name)
    sources = Sources(places.start_model, run / "verl" / "train.parquet", places.data / "val.parquet", run)
    ours = overrides(config, sources, device)
    if installed_verl() is None:
        say("\nverl is not installed, so nobody has validated this; what differs from its defaults:")
        say(OmegaConf.to_yaml(OmegaConf.create(ours)))
        return
    whole = compose(ours)
    say("\nverl's configuration, validated by verl:")
    say(OmegaConf.to_yaml(whole, resolve=False))


def estimates(config: Config) -> list[str]:
    """Memory, disk and time, each with its assumption."""
    set_threads(config)
    device, dtype = resolve_device(config)
    r, t = config.rollout, config.trainer
    parameters = _parameters(config)
    networks = 2 if config.algorithm == "ppo" else 1
    size = torch.finfo(dtype).bits // 8
    shape = _shape(config)
    cache = 2 * shape.layers * shape.kv_heads * shape.head_dim * r.max_context * r.slots * size
    # float32 weights, gradients and two Adam moments for each trained network; a copy in `dtype` to sample from.
    states = parameters * (16 * networks + (0 if dtype is torch.float32 else size) + (4 if config.actor.kl_coef else 0))
    checkpoint = parameters * (12 * networks)
    episodes = r.prompts_per_step * r.samples_per_prompt
    # 2 FLOPs a parameter and token to sample, 6 to train (forward and backward), 2 more to predict values.
    per_token = parameters * (2 + 6 * config.actor.epochs + (networks - 1) * (2 + 6 * config.critic.epochs))
    rate = matmul_rate(device, dtype) * EFFICIENCY
    seconds = episodes * TOKENS_PER_EPISODE * per_token / rate
    return [
        f"\nmodel              {parameters / 1e6:.2f} M parameters on {device}, {str(dtype)[6:]}",
        f"memory             {(states + cache) / 2**20:.0f} MiB for weights, optimizer and KV cache, and about 700 MiB for PyTorch",
        f"disk               {(t.keep_checkpoints + 1) * checkpoint / 2**20:.0f} MiB of checkpoints ({t.keep_checkpoints} kept)",
        f"time               about {seconds:.2f} s a step, {t.steps * seconds / 60:.1f} min for {t.steps} steps "
        f"(a matmul here reaches {rate / EFFICIENCY / 1e9:.0f} GFLOP/s; assumed: {TOKENS_PER_EPISODE} tokens an episode, "
        f"{EFFICIENCY:.0%} of that rate)",
    ]


# ------------------------------------------------------------------------------------------------- GPUs that are not here


def gpu_plan(config: Config, gpu_hour: float | None = None) -> list[str]:
    """Memory, disk, time and cost on the GPUs that the run is meant for. Raises ConfigError for a model that nobody knows."""
    name, gpu, whose = hardware(config)
    shape = roofline.find_shape(config.model.path or "", Places.of(config).start_model)
    roofline.check_context(config, shape)
    v = config.verl
    nodes = f" on {v.nodes} machines" if v.nodes > 1 else ""
    return [
        f"\nhardware           {v.ranks} x {name}{nodes} ({gpu.memory / GIB:.0f} GiB, {gpu.flops / 1e12:.0f} TFLOP/s, "
        f"{gpu.bandwidth / 1e12:.2f} TB/s each), {whose}",
        f"model              {config.model.path}, {shape.parameters / 1e9:.2f} B parameters, {shape.cache / 1024:.0f} KiB of "
        "cache a token",
        *_memory_lines(config, shape, gpu),
        *_time_lines(config, shape, gpu, gpu_hour),
        f"\nassumed            prompts of {roofline.PROMPT} tokens, {roofline.TURNS} turns of {roofline.SAID}, passages of "
        f"{roofline.READ}; the longest episode says {roofline.LONGEST} times as much",
        f"                   {roofline.MULTIPLY:.0%} of the arithmetic from width {roofline.WIDE}, {roofline.STREAM:.0%} of the "
        f"bandwidth, {roofline.TOKEN_S * 1000:.0f} ms a token, {roofline.TURN_S:.0f} s a turn (src/agent_r1/roofline.py)",
        "                   computed, not measured: this project has not run on GPUs yet (docs/presets.md)",
    ]


def hardware(config: Config) -> tuple[str, roofline.Gpu, str]:
    """This machine's GPUs where they are known and enough, else those that the preset names."""
    here, v = gpus_here(), config.verl
    known = roofline.recognise(here[0].name) if here else None
    if known and len(here) >= v.ranks // v.nodes:
        return known, roofline.find_gpu(known), "as in this machine"
    return v.gpu, roofline.find_gpu(v.gpu), "by verl.gpu and verl.ranks"


def _memory_lines(config: Config, shape: roofline.Shape, gpu: roofline.Gpu) -> list[str]:
    rows = roofline.gpu_memory(config, shape, gpu)
    rows.append(("together", *(sum(row[i] for row in rows) for i in (1, 2))))
    here = (
        config.rollout.prompts_per_step
        * config.rollout.samples_per_prompt
        * config.verl.tensor_parallel
        / config.verl.ranks
    )
    host, disk = roofline.host_memory(config, shape), roofline.disk(config, shape)
    return [
        f"\n{f'GiB of {gpu.memory / GIB:.0f} on each GPU':34} sampling  training",
        *(f"  {name:32} {sampling / GIB:8.1f}  {training / GIB:8.1f}" for name, sampling, training in rows),
        f"  each vLLM server keeps {roofline.conversations(config, shape, gpu):.0f} conversations of "
        f"{config.rollout.max_context} tokens, and gets {here:.0f} episodes a step",
        *(f"DOES NOT FIT       {problem}" for problem in roofline.misfits(config, shape, gpu)),
        f"\nhost memory        {sum(host.values()) / GIB:.0f} GiB a machine: {_parts(host)}",
        f"disk               {sum(disk.values()) / GIB:.0f} GiB at most: {_parts(disk)}",
        f"/dev/shm           {roofline.SHM / GIB:.0f} GiB (docker run --shm-size)",
    ]


def _parts(amounts: dict[str, float]) -> str:
    return ", ".join(f"{name} {amount / GIB:.1f}" for name, amount in amounts.items() if amount)


def _time_lines(config: Config, shape: roofline.Shape, gpu: roofline.Gpu, gpu_hour: float | None) -> list[str]:
    v, t = config.verl, config.trainer
    work = roofline.work_of(config, shape, gpu)
    seconds = roofline.step_seconds(shape, gpu, v.ranks, v.tensor_parallel, work)
    step = sum(seconds.values())
    low = t.steps * step / 3600
    high = low * roofline.SLOWER
    cost = f"{low * v.ranks:.0f} to {high * v.ranks:.0f} GPU-hours"
    if gpu_hour is not None:
        cost += f", {low * v.ranks * gpu_hour:.0f} to {high * v.ranks * gpu_hour:.0f} at {gpu_hour:g} a GPU and hour"
    return [
        f"\nseconds of a step of {work.episodes} episodes of {work.length:.0f} tokens",
        *(f"  {name:32} {value:8.1f}" for name, value in seconds.items()),
        f"  {'together':32} {step:8.1f}",
        f"time               {low:.1f} to {high:.1f} h for {t.steps} steps: real steps took 1 to {roofline.SLOWER} times what is "
        "computed (docs/presets.md)",
        "                   downloads, index, evaluations and checkpoints come on top",
        f"cost               {cost}{' (--gpu-hour PRICE makes it money)' if gpu_hour is None else ''}",
    ]


# -------------------------------------------------------------------------------------------------------- this machine


def matmul_rate(device: str, dtype: torch.dtype) -> float:
    """FLOP/s of a matrix product of the size that the tiny model's layers have, measured for a tenth of a second."""
    a, b = torch.randn(4096, 128, device=device, dtype=dtype), torch.randn(128, 384, device=device, dtype=dtype)
    a @ b
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < 0.1:
        product = a @ b
        count += 1
    product[0, 0].item()  # waits for a GPU that is still at work
    return count * 2 * 4096 * 128 * 384 / (time.perf_counter() - start)


def _shape(config: Config) -> qwen.QwenShape:
    if config.model.path is None:
        return shape_of(config.model, config.model.vocab_size)
    folder = Places.of(config).start_model
    if not folder.is_dir():
        raise AgentR1Error(
            f"the sizes of model.path={config.model.path} are not known yet; `agent-r1 cold-start` fetches it"
        )
    return qwen.read_shape(folder)


def _parameters(config: Config) -> int:
    with torch.device("meta"):  # shapes only: a 7B model is counted without a byte of its weights
        return qwen.Qwen(_shape(config)).parameter_count
