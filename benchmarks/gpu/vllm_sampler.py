"""Measure vLLM's sampler on one GPU: tokens per second, the start, sleep and wake.

    python -m benchmarks.gpu.vllm_sampler Qwen/Qwen2.5-1.5B-Instruct --prompts 256 --new-tokens 128

In: the name of a model in `hardware.py`, whose shape gets random weights and no tokenizer, so that
nothing is downloaded. The requests are those of a training step: prompts of 450 tokens that differ,
temperature 1, the log-probability of each sampled token. Out: one line of JSON. vLLM's builds for
GPUs do not run without one, so this script has no test on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

# As in a run: FlashInfer's sampler needs nvcc (cluster/serve.py).
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
from vllm import LLM, SamplingParams  # noqa: E402

from agent_r1.ground.shapes import MODELS, Shape
from agent_r1.ground.units import GIB

PROMPT = 450
"""Tokens of a HotpotQA prompt, as the plan assumes."""


def write_shape(folder: Path, s: Shape) -> None:
    """Write the `config.json` of a Qwen2 model with the sizes `s` into `folder`."""
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": s.vocab,
        "hidden_size": s.hidden,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "intermediate_size": s.intermediate,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "eos_token_id": 151645,
    }
    (folder / "config.json").write_text(json.dumps(config))


def sample(model: LLM, count: int, new_tokens: int) -> float:
    """Sample `new_tokens` tokens after each of `count` random prompts; return tokens per second."""
    prompts = [{"prompt_token_ids": torch.randint(1000, (PROMPT,)).tolist()} for _ in range(count)]
    request = SamplingParams(
        temperature=1.0, max_tokens=new_tokens, ignore_eos=True, logprobs=0, detokenize=False
    )
    began = time.perf_counter()
    outputs = model.generate(prompts, request, use_tqdm=False)
    seconds = time.perf_counter() - began
    sampled = sum(len(output.outputs[0].token_ids) for output in outputs)
    return round(sampled / seconds)


def measure(name: str, count: int, new_tokens: int, eager: bool) -> dict[str, Any]:
    """Measure all of it for one model. Raises KeyError for a name that `MODELS` lacks."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        write_shape(Path(folder), MODELS[name])
        model = LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=4096,
            gpu_memory_utilization=0.5,
            enable_sleep_mode=True,
            enforce_eager=eager,
        )
    found: dict[str, Any] = {"model": name, "eager": eager}
    found["start_s"] = round(time.perf_counter() - began, 1)
    sample(model, count, 8)
    for prompts in (count, 8):
        found[f"tokens_per_s, {prompts} prompts"] = sample(model, prompts, new_tokens)
    used_before = torch.cuda.mem_get_info()
    for act in ("sleep", "wake_up"):
        began = time.perf_counter()
        getattr(model, act)()
        found[f"{act}_s"] = round(time.perf_counter() - began, 2)
        found[f"free_gib after {act}"] = round(torch.cuda.mem_get_info()[0] / GIB, 1)
    found["free_gib before"] = round(used_before[0] / GIB, 1)
    found["tokens_per_s after sleep and wake"] = sample(model, count, new_tokens)
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.vllm_sampler", description=__doc__.split("\n")[0]
    )
    parser.add_argument("model", choices=list(MODELS), metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--prompts", type=int, default=256, help="requests at the same time")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens that each samples")
    parser.add_argument("--eager", action="store_true", help="without compiling and CUDA graphs")
    options = parser.parse_args(argv)
    found = measure(options.model, options.prompts, options.new_tokens, options.eager)
    print("VLLM", json.dumps(found))


if __name__ == "__main__":
    main()
