"""Measure verl's own actor on one GPU without Ray and vLLM: memory and seconds.

    python -m benchmarks.gpu.verl_actor Qwen/Qwen2.5-1.5B-Instruct --tokens 16384 --attention sdpa

It measures an update and log-probabilities of rows with the lengths of HotpotQA episodes. The
worker is verl's (FSDP2, dynamic batches). Ray, which verl imports in every module, is not used by
this worker. `flash_attention_2` are packed rows with PyTorch's kernel for each row
(lab/rehearsals/_varlen.py): the wheel of flash-attn is on no package index. `sdpa` are padded rows,
and nothing is replaced. Out: one line of JSON, with the plan's figures next to the measured ones.
Without a GPU the model is tiny: that tests this script and measures nothing.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.machinery
import json
import os
import random
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from lab.rehearsals import _varlen

from agent_r1.cluster import plan
from agent_r1.cluster.hardware import GPUS
from agent_r1.cluster.real_update import random_batch
from agent_r1.config import load_config
from agent_r1.ground.shapes import MODELS, Shape
from agent_r1.ground.units import GIB
from benchmarks.gpu.common import CUDA, finished, peak_gib, reserved_gib, reset_peak, shape_here

PASSES = 4
"""Full passes of a batch."""
SHORTEST = 500
LONGEST = 2200
"""Tokens of the shortest and of the longest row. Their mean is about the plan's, 1,480."""
ONE_PROCESS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


class NoRay:
    """Answer every import of `ray` with a module that has every name."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "ray":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = self._any_name
        return module

    def exec_module(self, module) -> None:
        pass

    @staticmethod
    def _any_name(name: str) -> MagicMock:
        if name.startswith(
            "__"
        ):  # the import system asks modules for these, and takes an answer seriously
            raise AttributeError(name)
        return MagicMock(name=name)


def start_worker(shape: Shape, name: str, tokens: int, attention: str, folder: Path):
    """Build verl's worker for a model of that shape with random weights. Writes the model into
    `folder`."""
    sys.meta_path.insert(0, NoRay())
    os.environ |= ONE_PROCESS | {"MASTER_PORT": os.environ.get("MASTER_PORT", "29555")}
    if not CUDA:
        from lab.rehearsals._as_on_a_gpu import NEEDS

        os.environ |= NEEDS
    if attention == "flash_attention_2":
        _varlen.install()
    else:
        importlib.import_module("agent_r1.cluster.no_flash_attn")
    from lab.rehearsals import _real_shapes_rank, real_shapes

    real_shapes.make_model(real_shapes.hf_config(name, shape), folder)
    settings = _real_shapes_rank.compose_preset(
        folder, folder, tokens, [f"verl.attention={attention}"]
    )
    return _real_shapes_rank.make_worker(settings)


def row_lengths(tokens: int) -> list[int]:
    """Draw lengths of rows that fill PASSES passes of `tokens` tokens."""
    generator = random.Random(0)
    longest = min(LONGEST, tokens)
    lengths: list[int] = []
    while sum(lengths) < PASSES * tokens:
        lengths.append(generator.randint(min(SHORTEST, longest // 2), longest))
    return lengths


def timed(work: Callable[[Any], Any], lengths: list[int], vocab: int) -> dict[str, float]:
    """Time `work` on the third of three batches; the first two warm up."""
    for again in range(3):
        data = random_batch(lengths, vocab, again)
        reset_peak()
        began = finished()
        work(data)
        seconds = finished() - began
    return {
        "s": round(seconds, 2),
        "peak_gib": peak_gib(),
        "reserved_gib": reserved_gib(),
        "tokens_per_s": round(sum(lengths) / seconds),
    }


def planned(shape: Shape, folder: Path, tokens: int) -> dict[str, float]:
    """Return the plan's GiB for such a training pass on one H100."""
    settings = [
        f"model.path={folder}",
        f"trainer.max_tokens_per_microbatch={tokens}",
        f"rollout.max_context={tokens}",
        f"rollout.max_tokens_per_turn={tokens // 2}",
        "actor.kl_coef=0",
    ]
    config = load_config("hotpotqa-1x80gb", settings, algorithm="grpo")
    parts = plan.gpu_memory(config, shape, GPUS["H100"])
    return {part: round(training / GIB, 2) for part, (_, training) in parts.items() if training}


def measure(name: str, tokens: int, attention: str, folder: Path) -> dict[str, Any]:
    """Measure an update, and log-probabilities with entropy. Raises KeyError for a name that
    `hardware.MODELS` lacks."""
    shape = shape_here(name)
    worker = start_worker(shape, name, tokens, attention, folder)
    from lab.rehearsals._real_shapes_rank import logprobs

    lengths = row_lengths(tokens if CUDA else 128)
    result: dict[str, Any] = {
        "model": name,
        "attention": attention,
        "tokens_of_a_pass": tokens,
        "rows": len(lengths),
        "tokens": sum(lengths),
        "weights_gib": peak_gib(),
    }

    def with_entropy(batch: Any) -> None:
        logprobs(worker, batch, entropy=True)

    result["update"] = timed(worker.update_actor, lengths, shape.vocab)
    result["logprobs, entropy"] = timed(with_entropy, lengths, shape.vocab)
    # Forward, and twice that backward. The recomputed forward is not counted as useful work.
    work = sum(3 * shape.forward(length) * length for length in lengths)
    share = work / result["update"]["s"] / GPUS["H100"].flops
    result["update"]["share_of_h100"] = round(share, 3)
    result["plan_gib"] = planned(shape, folder, tokens)
    return result


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.verl_actor", description=__doc__.split("\n")[0]
    )
    parser.add_argument("model", choices=list(MODELS), metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of a pass")
    parser.add_argument(
        "--attention", choices=["flash_attention_2", "varlen", "sdpa"], default="flash_attention_2"
    )
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="agent-r1-verl-") as folder:
        measured = measure(options.model, options.tokens, options.attention, Path(folder))
        print("VERL", json.dumps(measured))


if __name__ == "__main__":
    main()
