"""Check Qwen2.5 in its real sizes with random weights against the plan's figures.

0.5B passes through verl's worker and checkpoint manager on four ranks, with Adam, and then through
a run's code: conversion, check, export, transformers, vLLM. Of 1.5B only the weights do: shards,
merge, a reader. Larger models are counted on torch's meta device. The plan's memory and disk must
be within 15 % of the measurements.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers

from agent_r1.chat.tokenizer import load_chat, save_tokenizer, train_tokenizer
from agent_r1.cluster import plan
from agent_r1.cluster.checkpoints import compare_logprobs, finish, keep_shards
from agent_r1.cluster.hardware import GPUS
from agent_r1.cluster.real_update import make_published_config
from agent_r1.cluster.serve import vllm_server
from agent_r1.config import load_config
from agent_r1.core import Sampling
from agent_r1.ground.shapes import MODELS, Shape
from agent_r1.ground.units import GIB
from agent_r1.model.policies import ServerPolicy, load_transformers
from agent_r1.training.fsdp_merge import write_merged
from agent_r1.training.run_dir import RunDir
from lab.rehearsals._as_on_a_gpu import NEEDS
from lab.rehearsals._real_shapes_rank import Peak, small

ROOT = Path(__file__).parents[2]
HALF, ONE = "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct"
RANKS, TOKENS, GREEDY = 4, 128, 24
NARROW = replace(MODELS[HALF], layers=2, hidden=128, heads=4, head_dim=32, intermediate=256)
"""The real vocabulary and tiny layers: the logits dominate its passes."""
CARDS = {  # billions of parameters, as the model cards say
    "Qwen/Qwen2.5-0.5B-Instruct": 0.49, "Qwen/Qwen2.5-1.5B-Instruct": 1.54, "Qwen/Qwen3-1.7B": 1.7,
    "Qwen/Qwen2.5-3B-Instruct": 3.09, "Qwen/Qwen3-4B": 4.0, "Qwen/Qwen2.5-7B-Instruct": 7.61,
    "Qwen/Qwen3-8B": 8.2, "Qwen/Qwen3-14B": 14.8, "Qwen/Qwen3-32B": 32.8,
}  # fmt: skip
WITHIN = 0.15


def run() -> dict[str, Any]:
    """Return bytes and seconds of each stage, and the plan's.

    Raises if the two differ, or a reader reads something else.
    """
    figures: dict[str, Any] = {"counted": count_models()}
    for title, part in (("logits", logits), ("0.5B", whole), ("1.5B", weights)):
        print(f"  {title} ...", flush=True)
        with tempfile.TemporaryDirectory(prefix="agent-r1-shapes-") as folder:
            figures[title] = part(Path(folder))
        print(f"  {figures[title]}", flush=True)
    ratio_of = figures["counted"]["ratios"]
    for title in ("0.5B", "1.5B"):
        ratio_of = ratio_of | figures[title]["plan_to_measured"]
    figures["plan_to_measured"] = f"{min(ratio_of.values())} to {max(ratio_of.values())}"
    if off := {name: ratio for name, ratio in ratio_of.items() if abs(ratio - 1) > WITHIN}:
        raise AssertionError(f"the plan is further than 15 % from what is measured: {off}")
    return figures


# ----------------------------------------------------------------------------------------- counting


def hf_config(name: str, shape: Shape | None = None) -> transformers.PreTrainedConfig:
    """Make config.json of model `name`, from the plan's table or with another shape."""
    return make_published_config(shape or MODELS[name], qwen3="Qwen3" in name)


def count_models() -> dict[str, Any]:
    """Count parameters of the plan's models as transformers builds them."""
    rows, ratios = {}, {}
    for name, shape in MODELS.items():
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(
                hf_config(name), dtype=torch.bfloat16
            )
        real = sum(p.numel() for p in model.parameters())
        short = name.split("/")[1].removesuffix("-Instruct")
        rows[short] = {
            "meta": round(real / 1e9, 3),
            "plan": round(shape.parameters / 1e9, 3),
            "card": CARDS[name],
        }
        ratios[f"{short}: parameters"] = round(shape.parameters / real, 3)
        ratios[f"{short}: the card's"] = round(shape.parameters / 1e9 / CARDS[name], 3)
    return {"models": rows, "ratios": ratios}


# ------------------------------------------------------------------------------------------- logits


def logits(root: Path) -> dict[str, Any]:
    """Measure bytes per token and vocabulary word of an update, and of log-probabilities.

    The entropy is compiled, as on a GPU.
    """
    tokens = 256
    make_model(hf_config(HALF, NARROW), root / "start")
    peaks = largest(four_ranks("passes", root / "start", root / "ranks", tokens))
    inside = 2 * (NARROW.layers * NARROW.hidden + plan.layer_width(NARROW))
    bytes_a_logit = {
        name: ((peaks[f"{name} {2 * tokens}"] - peaks[f"{name} {tokens}"]) / tokens - inside)
        / NARROW.vocab
        for name in ("update", "logprobs")
    }
    if max(bytes_a_logit.values()) > plan.BYTES_PER_LOGIT:
        raise AssertionError(
            f"the logits take {bytes_a_logit} bytes a token and word, "
            f"the plan {plan.BYTES_PER_LOGIT}"
        )
    return {name: round(value, 2) for name, value in bytes_a_logit.items()} | {
        "plan, at most": plan.BYTES_PER_LOGIT
    }


# ------------------------------------------------------------------------------ 0.5B, the whole way


def whole(root: Path) -> dict[str, Any]:
    """Run start model, four ranks, conversion, export, transformers and vLLM."""
    os.environ["AGENT_R1_HOME"] = str(root)
    start, shards = root / "start", root / "shards"
    make_model(hf_config(HALF), start)
    ranks = four_ranks("whole", start, shards)
    config = load_config("hotpotqa-4xh100", small(start, TOKENS), algorithm="grpo")
    run = RunDir(root / "run")
    (shards / "rows.json").rename(root / "rows.json")
    rows = json.loads((root / "rows.json").read_text())
    shards_of_step = keep_shards(run, 1, shards / "global_step_1", "bfloat16", rows)
    phases: dict[str, Peak] = {}
    parity = in_phases(phases, lambda phase: finish(run, config, start, shards_of_step, phase))
    checkpoint = run.latest_checkpoint()
    assert checkpoint, "finish writes one"
    float32_gap = compare_logprobs(checkpoint / "model", rows, torch.float32)["mean"]
    files = {
        file.stat().st_ino: file.stat().st_size for file in checkpoint.rglob("*") if file.is_file()
    }
    target, export = root / "export", Peak()
    with export.measured():
        child = [
            sys.executable,
            "-m",
            "agent_r1.app.cli",
            "export",
            "--checkpoint-dir",
            checkpoint,
            "--target-dir",
            target,
        ]
        subprocess.run(child, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    greedy = both_readers(target)
    shape, gpu = MODELS[HALF], GPUS["H100"]
    plan_rows, peaks = plan.gpu_memory(config, shape, gpu), largest(ranks)
    # Without the logits: the plan has only an upper limit, and they are freed before the gradients
    # are summed.
    at_work = sum(
        row[1]
        for name, row in plan_rows.items()
        if not name.startswith(("actor", "CUDA", "logits"))
    )
    ours = {
        "weights and Adam of a rank": (
            plan_rows["actor: weights, Adam"][1],
            peaks["weights"] + peaks["adam"],
        ),
        f"an update of {TOKENS} tokens": (at_work, peaks["update"]),
        # Here the shard stays in host memory. The first rank sends the others theirs, which on GPUs
        # would be on the GPU.
        "host memory to load, a rank": (
            4 * shape.parameters,
            ranks[0]["load"] - ranks[0]["weights"],
        ),
        "host memory to convert": (
            plan.convert_memory(shape),
            max(peak.bytes for peak in phases.values()),
        ),
        "a checkpoint on disk": (plan.checkpoint_bytes(config, shape), sum(files.values())),
    }
    return {
        "seconds": {
            "load": peaks["load_s"],
            "update": peaks["update_s"],
            "save": peaks["save_s"],
        }
        | {name.removeprefix("checkpoint: "): peak.seconds for name, peak in phases.items()}
        | {"export": export.seconds},
        "gib": {name: {"plan": gib(a), "measured": gib(b)} for name, (a, b) in ours.items()},
        "plan_to_measured": {f"0.5B: {name}": round(a / b, 2) for name, (a, b) in ours.items()},
        "parity": {
            name.removeprefix("checkpoint/logprob_diff_"): round(x, 5) for name, x in parity.items()
        }
        | {"mean, weights in float32": round(float32_gap, 5)},
        "greedy_tokens_alike": greedy,
    }


def make_model(config: transformers.PreTrainedConfig, folder: Path) -> None:
    """Write random weights in bfloat16, as published models have, and a small tokenizer."""
    torch.manual_seed(0)
    # A CPU draws 1.5 billion numbers in about a minute, a GPU at once.
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    save_tokenizer(train_tokenizer(["a question and an answer"], 300), folder)


def four_ranks(what: str, model: Path, out: Path, tokens: int = TOKENS) -> list[dict[str, float]]:
    """Run _real_shapes_rank.py and return each rank's figures."""
    out.mkdir()
    environment = (
        os.environ
        | NEEDS
        | {
            "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
            "OMP_NUM_THREADS": "1",
            # verl compiles the entropy, so the compiled one is measured
            "TORCHDYNAMO_DISABLE": "0",
            # freed memory is returned to the system, and so measured
            "MALLOC_MMAP_THRESHOLD_": "65536",
        }
    )
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={RANKS}",
    ]
    command += ["-m", "lab.rehearsals._real_shapes_rank", what, model, out, str(tokens)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        print(done.stderr[-6000:], file=sys.stderr)
        raise RuntimeError(f"the ranks of {what} ended with {done.returncode}")
    return [json.loads((out / f"rank_{rank}.json").read_text()) for rank in range(RANKS)]


def largest(ranks: list[dict[str, float]]) -> dict[str, float]:
    return {name: max(rank[name] for rank in ranks) for name in ranks[0]}


Value = TypeVar("Value")


def in_phases(phases: dict[str, Peak], work: Callable[[Callable[[str], None]], Value]) -> Value:
    """Call `work` with a callback for phases; `phases` gets memory and seconds of each."""
    open_phase = []

    def close() -> None:
        if open_phase:
            open_phase.pop().__exit__(None, None, None)

    def phase(name: str) -> None:
        close()
        gc.collect()
        phases[name] = Peak()
        block = phases[name].measured()
        block.__enter__()
        open_phase.append(block)

    try:
        return work(phase)
    finally:
        close()


def both_readers(model: Path) -> int:
    """Check that transformers and vLLM generate the same tokens greedily; return their number."""
    config = load_config(
        "small", ["trainer.device=cpu", "trainer.dtype=float32", "rollout.max_context=256"]
    )
    ids = torch.randint(256, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    sampling, stop = Sampling(GREEDY, 0.0), load_chat(model).stop_ids
    reader: Any = load_transformers(model)  # PyTorch declares each attribute as a tensor or module
    whole = reader.generate(
        torch.tensor([ids]), max_new_tokens=GREEDY, do_sample=False, eos_token_id=list(stop)
    )
    ours = whole[0, len(ids) :].tolist()
    del reader
    gc.collect()
    with vllm_server(model, config.rollout, config.trainer) as server:
        policy = ServerPolicy(server.url, server.api_key, server.name, stop, server.diagnose)
        theirs = asyncio.run(policy.generate(ids, sampling))
    if ours != theirs.token_ids:
        raise AssertionError(f"transformers says {ours}, vLLM {theirs.token_ids}")
    return len(ours)


# -------------------------------------------------------------------------------- 1.5B, the weights


def weights(root: Path) -> dict[str, Any]:
    """Merge shards of four ranks and check that every row is at its place."""
    start, out = root / "start", root / "model"
    hf_config(ONE).save_pretrained(start)
    ranks = largest(four_ranks("weights", start, root / "shards"))
    merge, reading = Peak(), Peak()
    out.mkdir()
    with merge.measured():
        write_merged(root / "shards" / "actor", start, out)
    size = (out / "model.safetensors").stat().st_size
    with reading.measured():
        model = load_transformers(out, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        rows = (torch.arange(len(parameter)) + 1) % 1021
        if not torch.equal(parameter.detach().reshape(len(rows), -1)[:, -1], rows.float()):
            raise AssertionError(f"the rows of {name} are not where they belong")
    shape = MODELS[ONE]
    ours = {
        "weights of a rank": (4 * shape.parameters / RANKS, ranks["weights"]),
        "host memory to merge": (plan.convert_memory(shape), merge.bytes),
        "the merged model on disk": (4 * shape.parameters, size),
    }
    return {
        "seconds": {"save": ranks["save_s"], "merge": merge.seconds, "read": reading.seconds},
        "gib": {name: {"plan": gib(a), "measured": gib(b)} for name, (a, b) in ours.items()},
        "plan_to_measured": {f"1.5B: {name}": round(a / b, 2) for name, (a, b) in ours.items()},
    }


def gib(size: float) -> float:
    return round(size / GIB, 2)
