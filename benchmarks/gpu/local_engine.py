"""Measure the local engine on one GPU: warm start, sampler, gap between sampler and trainer.

    python -m benchmarks.gpu.local_engine Qwen/Qwen2.5-1.5B-Instruct --slots 128 --new-tokens 128

In: the name of a model in `hardware.py`, whose shape gets random weights. Out: one line of JSON,
with the plan's figures next to the measured ones. Without a GPU the model is tiny and the sequences
short: that tests this script and measures nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from agent_r1.cluster.hardware import GPUS
from agent_r1.cold_start.clone import Lesson, Phase, clone
from agent_r1.config import load_config
from agent_r1.core import Generation, Sampling
from agent_r1.ground.shapes import MODELS, Shape
from agent_r1.ground.units import GIB
from agent_r1.model.decoder import Decoder, DecoderShape
from agent_r1.model.sampler import LocalPolicy
from agent_r1.rollout.training_rows import TrainingRow, collate
from agent_r1.training.forward import batch_logprobs
from agent_r1.training.plan_local import local_memory
from benchmarks.gpu.common import CUDA, DEVICE, finished, peak_gib, reset_peak, shape_here

PROMPT = 450
"""Tokens of a HotpotQA prompt, as the plan assumes."""
ROWS = 8
"""Sequences of the warm start's batch; the gap takes twice as many."""
STEPS = 6


@torch.no_grad()
def random_model(s: Shape) -> Decoder:
    """Return a decoder with the shape `s` and random weights, in float32 on DEVICE."""
    size = (s.hidden, s.layers, s.heads, s.kv_heads, s.intermediate)
    # Drawn where they are used: a CPU needs a minute for 1.5 billion numbers.
    with torch.device(DEVICE):
        model = Decoder(DecoderShape(s.vocab, *size, 8192, rope_theta=1e6))
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.02)
    return model


def training_row(
    index: int, ids: list[int], observed: int, logprobs: list[float] = ()
) -> TrainingRow:
    """Return a row with `observed` observation tokens first, and sampled tokens after them."""
    said = len(ids) - observed
    return TrainingRow(
        index,
        str(index),
        ids,
        [0] * observed + [1] * said,
        [0.0] * observed + list(logprobs or [0.0] * said),
        [0.0] * len(ids),
        [-1] * observed + [0] * said,
    )


def warm_start(model: Decoder, s: Shape, tokens: int) -> dict[str, Any]:
    """Time the cloning steps of `hotpotqa-4xh100`: `tokens` tokens per step, bf16, recomputed
    layers."""
    length, stamps, losses = tokens // 4, [], []

    def on_step(step: int, loss: float) -> None:
        stamps.append(finished())
        losses.append(round(loss, 3))

    rows = [
        training_row(i, torch.randint(1000, (length,)).tolist(), length // 2) for i in range(ROWS)
    ]
    model.recompute = True
    phase = Phase("warm", Lesson(rows), STEPS, tokens, 1e-5)
    clone(model, phase, 0, on_step, torch.bfloat16)
    seconds = (stamps[-1] - stamps[1]) / (
        STEPS - 2
    )  # the first steps choose kernels and grow the allocator
    settings = [
        f"cold_start.mix_tokens={tokens}",
        f"rollout.max_context={max(tokens, 600)}",
        "rollout.max_tokens_per_turn=64",
        f"trainer.max_tokens_per_microbatch={max(tokens, 600)}",
    ]
    plan = local_memory(load_config("hotpotqa-4xh100", settings, algorithm="grpo"), s, itemsize=2)
    work = 4 * s.forward(length) * tokens  # forward, the same again for the recomputation, backward
    return {
        "s": round(seconds, 2),
        "tokens_per_s": round(tokens / seconds),
        "share_of_h100": round(work / seconds / GPUS["H100"].flops, 3),
        "peak_gib": peak_gib(),
        "plan_gib": {part: round(size / GIB, 2) for part, size in plan.items()},
        "losses": losses,
    }


def sample(
    model: Decoder, slots: int, new_tokens: int
) -> tuple[dict[str, Any], list[list[int]], list[Generation]]:
    """Sample `new_tokens` tokens after each of `slots` random prompts, with a bf16 copy of
    `model`."""
    copy = Decoder(model.shape).to(DEVICE, torch.bfloat16)
    policy = LocalPolicy(copy, (), slots=slots, max_context=1024 + new_tokens)
    policy.sync(model)
    prompts = [torch.randint(1000, (PROMPT,)).tolist() for _ in range(slots)]

    async def play(prompts: list[list[int]], tokens: int, name: str) -> list[Generation]:
        turns = (
            policy.generate(p, Sampling(tokens, 1.0, i), f"{name}{i}")
            for i, p in enumerate(prompts)
        )
        return await asyncio.gather(*turns)

    asyncio.run(play(prompts[:2], 4, "warm-up"))
    for i in range(2):
        policy.release(f"warm-up{i}")
    reset_peak()
    began = finished()
    turns = asyncio.run(play(prompts, new_tokens, "episode"))
    seconds = finished() - began
    found = {
        "slots": slots,
        "s": round(seconds, 2),
        "tokens_per_s": round(slots * new_tokens / seconds),
        "ms_per_token": round(1000 * seconds / new_tokens, 1),
        "peak_gib": peak_gib(),
    }
    return found, prompts, turns


def gap(
    model: Decoder, prompts: list[list[int]], turns: list[Generation], dtype: torch.dtype
) -> dict[str, float]:
    """Compare the sampler's log-probabilities with the trainer's in `dtype`: absolute differences
    in nats."""
    pairs = list(zip(prompts, turns, strict=True))[: 2 * ROWS]
    rows = [training_row(i, p + t.token_ids, PROMPT, t.logprobs) for i, (p, t) in enumerate(pairs)]
    batch = collate(rows).to(DEVICE)
    now_BT = batch_logprobs(model, batch, 1.0, 16384, dtype)
    apart = (now_BT - batch.logprobs_BT)[batch.mask_BT.bool()].abs()
    return {
        "mean": round(apart.mean().item(), 4),
        "p99": round(apart.quantile(0.99).item(), 4),
        "max": round(apart.max().item(), 3),
    }


def attention_kernels(s: Shape) -> dict[str, str]:
    """List the kernels for grouped queries with the sampler's mask, and with a causal one."""
    q, k = (
        torch.randn(8, heads, 64, s.head_dim, device=DEVICE, dtype=torch.bfloat16)
        for heads in (s.heads, s.kv_heads)
    )
    masks = {
        "mask": {"attn_mask": torch.ones(8, 1, 64, 64, dtype=torch.bool, device=DEVICE)},
        "causal": {"is_causal": True},
    }
    found = {}
    for kernel in (
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
    ):
        for name, given in masks.items():
            try:
                with sdpa_kernel(kernel):
                    scaled_dot_product_attention(q, k, k, enable_gqa=True, **given)
            except RuntimeError:
                found[f"{kernel.name}, {name}"] = "no"
            else:
                found[f"{kernel.name}, {name}"] = "yes"
    return found


def measure(name: str, slots: int, new_tokens: int) -> dict[str, Any]:
    """Measure all of it for one model. Raises KeyError for a name that `sizes.MODELS` lacks."""
    shape = shape_here(name)
    torch.manual_seed(0)
    model = random_model(shape)
    found: dict[str, Any] = {"model": name, "device": DEVICE, "parameters": model.parameter_count}
    found["warm start"] = warm_start(model, shape, 8192 if CUDA else 512)
    found["sampler"], prompts, turns = sample(model, slots, new_tokens)
    for dtype in (torch.bfloat16, torch.float32):
        found[f"gap of a bf16 sampler to a trainer in {str(dtype)[6:]}"] = gap(
            model, prompts, turns, dtype
        )
    return found | ({"attention": attention_kernels(shape)} if CUDA else {})


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.local_engine", description=__doc__.split("\n")[0]
    )
    parser.add_argument("model", choices=list(MODELS), metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument(
        "--slots", type=int, default=128, help="episodes that sample at the same time"
    )
    parser.add_argument(
        "--new-tokens", type=int, default=128, help="tokens that each of them samples"
    )
    options = parser.parse_args(argv)
    print("LOCAL", json.dumps(measure(options.model, options.slots, options.new_tokens)))


if __name__ == "__main__":
    main()
