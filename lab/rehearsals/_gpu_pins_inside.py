"""Validate every GPU preset with the GPU's verl and vLLM on a faked card.

gpu_pins.py's Python runs this. Real are verl's validation of the composed configuration, verl's
construction of vLLM's arguments (`launch_server`), vLLM's parsing and `create_engine_config`. Only
the card is faked. Prints a JSON line per combination, with `error` if it is refused.
"""

# vLLM has no public way to replace the platform. It keeps the capability; here the card changes.
# pyright: reportPrivateUsage=false, reportIncompatibleVariableOverride=false
from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}

import ray
import torch
import vllm.platforms
from vllm.platforms.cuda import NonNvmlCudaPlatform
from vllm.platforms.interface import DeviceCapability

CARDS = {
    "H100": ((9, 0), 80, "NVIDIA H100 80GB HBM3"),
    "A100-80GB": ((8, 0), 80, "NVIDIA A100-SXM4-80GB"),
    "RTX-4090": ((8, 9), 24, "NVIDIA GeForce RTX 4090"),
}


class FakeCard(NonNvmlCudaPlatform):
    """Fake eight cards of the kind in `card`. verl and vLLM keep this object."""

    card = "H100"

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        return DeviceCapability(*CARDS[cls.card][0])

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return CARDS[cls.card][2]

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return CARDS[cls.card][1] * 2**30

    @classmethod
    def device_count(cls) -> int:
        return 8

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None: ...

    @classmethod
    def log_warnings(cls) -> None: ...

    @classmethod
    def has_device_capability(cls, capability: tuple[int, int] | int, device_id: int = 0) -> bool:
        least = capability if isinstance(capability, tuple) else divmod(capability, 10)
        return CARDS[cls.card][0] >= least


vllm.platforms._current_platform = FakeCard()
from verl.utils.config import omega_conf_to_dataclass  # noqa: E402
from verl.workers.rollout.replica import RolloutMode  # noqa: E402
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer  # noqa: E402
from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: E402
from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402

from agent_r1.chat.tokenizer import save_tokenizer, train_tokenizer  # noqa: E402
from agent_r1.cluster import serve  # noqa: E402
from agent_r1.cluster.compose import Sources, compose, overrides  # noqa: E402
from agent_r1.cluster.real_update import make_published_config  # noqa: E402
from agent_r1.config import Config, load_config, preset_names  # noqa: E402
from agent_r1.ground.shapes import MODELS  # noqa: E402


def model_folder(path: str, root: Path) -> Path:
    """Write config.json in the real shape of model `path`, and a small tokenizer; no weights."""
    shape, folder = MODELS[path.partition("@")[0]], root / path.replace("/", "--")
    if not folder.exists():
        config = make_published_config(shape, qwen3="Qwen3" in path)
        config.save_pretrained(folder)
        save_tokenizer(train_tokenizer(["a question and an answer"], 300), folder)
    return folder


def engine_facts(args: argparse.Namespace) -> dict[str, Any]:
    """Return vLLM's configuration for parsed arguments. Raises what `vllm serve` would raise."""
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    return {
        "cudagraph": str(config.compilation_config.cudagraph_mode),
        "graphs": len(config.compilation_config.cudagraph_capture_sizes or []),
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "memory_share": config.cache_config.gpu_memory_utilization,
        "sleep": config.model_config.enable_sleep_mode,
        "logprobs": str(config.model_config.logprobs_mode),
        "tensor_parallel": config.parallel_config.tensor_parallel_size,
        "data_parallel": config.parallel_config.data_parallel_size,
    }


class Server(vLLMHttpServer):
    """Stop verl's server at the moment in which vLLM would start."""

    async def run_server(self, args: argparse.Namespace) -> None:
        self.facts = engine_facts(args)


def rollout_server(config: Config, model: Path, root: Path) -> dict[str, Any]:
    """Configure the sampler of a training run, as verl would start it."""
    settings = compose(overrides(config, Sources(model, root, root, root), "cuda"))
    rollout = settings.actor_rollout_ref.rollout
    model_config = omega_conf_to_dataclass(settings.actor_rollout_ref.model)
    server = Server(rollout, model_config, RolloutMode.HYBRID, [], 0, 0, config.verl.ranks, 1, "")
    asyncio.run(server.launch_server())
    return server.facts


def evaluation_server(config: Config, model: Path) -> dict[str, Any]:
    """Configure the server of `agent-r1 eval` and `chat` with a GPU."""
    serve.resolve_device = lambda device, dtype: ("cuda", torch.bfloat16)
    facts = {}
    for name, gpus in (("chat", 0), ("evaluation", config.verl.ranks)):
        words = serve.options(model, config.rollout, config.trainer, 8000, gpus)
        args = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
        assert args  # None only where an argument asks for help
        validate_parsed_serve_args(args)
        facts[name] = engine_facts(args)
    return facts


def main() -> int:
    """Check every GPU preset with each algorithm on each card. Exit code 1 after a refusal."""
    refusals = 0
    ray.get_runtime_context = lambda: SimpleNamespace(
        get_job_id=lambda: "rehearsal"
    )  # no Ray is running
    ray.util.get_node_ip_address = lambda: "127.0.0.1"
    root = Path(tempfile.mkdtemp())
    for preset in preset_names():
        if load_config(preset).engine != "verl":
            continue
        for algorithm, card in ((a, c) for a in ("grpo", "ppo") for c in CARDS):
            line, output = {"preset": preset, "algorithm": algorithm, "card": card}, io.StringIO()
            try:
                FakeCard.card = card
                config = load_config(preset, algorithm=algorithm)
                model = model_folder(config.model.path, root)
                with contextlib.redirect_stdout(output):
                    line["rollout"] = rollout_server(config, model, root)
                    line["server"] = evaluation_server(config, model)
            except Exception as error:  # this program lists what is refused
                refusals += 1
                line["error"] = f"{type(error).__name__}: {error}"
            print(json.dumps(line), flush=True)
    return int(refusals > 0)


if __name__ == "__main__":
    sys.exit(main())
