"""Measure verl's own actor on one GPU without Ray and vLLM: memory and seconds.

    python -m benchmarks.gpu.verl_actor Qwen/Qwen2.5-1.5B-Instruct --tokens 8192

It measures an update and log-probabilities. The worker is verl's (FSDP2, packed rows, dynamic
batches). Two things are replaced. Ray, which verl imports in every module, is not used by this
worker. The wheel of flash-attn is on no package index, so PyTorch's attention replaces it
(lab/rehearsals/_varlen.py). Out: one line of JSON, with the plan's figures next to the measured
ones. Without a GPU the model is tiny: that tests this script and measures nothing.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import json
import os
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from lab.rehearsals import _varlen

from agent_r1.app import plan
from agent_r1.config import load_config
from agent_r1.ground.hardware import GIB, GPUS, MODELS, Shape
from benchmarks.gpu.common import CUDA, finished, peak_gib, reset_peak, shape_here

ROWS = 4
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


def start_worker(shape: Shape, name: str, tokens: int, folder: Path):
    """Build verl's worker for a model of that shape with random weights. Writes the model into
    `folder`."""
    sys.meta_path.insert(0, NoRay())
    os.environ |= ONE_PROCESS | {"MASTER_PORT": os.environ.get("MASTER_PORT", "29555")}
    if not CUDA:
        from lab.rehearsals._as_on_a_gpu import NEEDS

        os.environ |= NEEDS
    _varlen.install()
    from lab.rehearsals import _real_shapes_rank, real_shapes

    real_shapes.make_model(real_shapes.hf_config(name, shape), folder)
    return _real_shapes_rank.make_worker(_real_shapes_rank.composed(folder, folder, tokens))


def timed(work: Callable[[Any], Any], tokens: int, vocab: int) -> dict[str, float]:
    """Time `work` on the third of three batches; the first two warm up.

    A batch has ROWS rows of `tokens` tokens.
    """
    from lab.rehearsals._real_shapes_rank import batch
    from verl.utils import tensordict_utils

    for again in range(3):
        data = batch(tokens, ROWS, vocab, again)
        tensordict_utils.assign_non_tensor(data, global_batch_size=ROWS, mini_batch_size=ROWS)
        reset_peak()
        began = finished()
        work(data)
        seconds = finished() - began
    return {
        "s": round(seconds, 2),
        "peak_gib": peak_gib(),
        "tokens_per_s": round(ROWS * tokens / seconds),
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


def measure(name: str, tokens: int, folder: Path) -> dict[str, Any]:
    """Measure an update, and log-probabilities with entropy. Raises KeyError for a name that
    `sizes.MODELS` lacks."""
    shape = shape_here(name)
    worker = start_worker(shape, name, tokens, folder)
    from lab.rehearsals._real_shapes_rank import logprobs

    found: dict[str, Any] = {"model": name, "tokens": tokens, "weights_gib": peak_gib()}
    found["update"] = timed(worker.update_actor, tokens, shape.vocab)
    found["logprobs, entropy"] = timed(
        lambda data: logprobs(worker, data, entropy=True), tokens, shape.vocab
    )
    work = 3 * shape.forward(tokens) * ROWS * tokens  # forward, and twice that backward
    found["update"]["share_of_h100"] = round(work / found["update"]["s"] / GPUS["H100"].flops, 3)
    return found | {"plan_gib": planned(shape, folder, tokens)}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.verl_actor", description=__doc__.split("\n")[0]
    )
    parser.add_argument("model", choices=list(MODELS), metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a row, and of a pass")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="agent-r1-verl-") as folder:
        print("VERL", json.dumps(measure(options.model, options.tokens, Path(folder))))


if __name__ == "__main__":
    main()
