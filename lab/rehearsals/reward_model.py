"""Serve a tiny reward model with vLLM, and compare its numbers with PyTorch's.

The weights are random. Both endpoints answer, with and without the sigmoid (recipes/judge).
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from agent_r1 import train_tokenizer
from agent_r1_recipes.judge.reward_model import RewardModel

ANSWERS = ["Bumvel", "Tulo", "in Marn"]
START_S = 300.0
"""For vLLM to answer, on two busy cores."""


def write_model(folder: Path) -> tuple[Any, Any]:
    """Write a random classifier of one class; return its tokenizer and weights."""
    tokenizer = train_tokenizer([f"Where? {answer}" for answer in ANSWERS] * 20, 320)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=0,
    )
    config.num_labels = 1
    model = Qwen2ForSequenceClassification(config).eval()
    with torch.no_grad():
        model.score.weight.mul_(20)  # numbers that differ from each other
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer, model


def serve(folder: Path, port: int) -> subprocess.Popen[bytes]:
    """Start vLLM on a CPU in its own process group, and wait for its answer."""
    command = [Path(sys.prefix) / "bin" / "vllm", "serve", folder, "--runner", "pooling"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--enforce-eager", "--max-model-len", "256"]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "CUDA_VISIBLE_DEVICES": ""}
    server = subprocess.Popen(command, env=environment, start_new_session=True)
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200:
                return server
        except httpx.HTTPError:
            time.sleep(1)
    stop(server)
    raise RuntimeError("vLLM did not answer")


def stop(server: subprocess.Popen[bytes]) -> None:
    """End vLLM with its workers."""
    os.killpg(server.pid, signal.SIGTERM)
    server.wait(60)


async def scores(model: RewardModel) -> list[float]:
    return list(await asyncio.gather(*(model.score("Where?", answer) for answer in ANSWERS)))


def run() -> dict[str, float]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer, model = write_model(Path(folder))
        texts = [f"Where?\n{answer}" for answer in ANSWERS]
        with torch.no_grad():
            logits = [
                model(tokenizer(text, return_tensors="pt").input_ids).logits[0, 0] for text in texts
            ]
        server = serve(Path(folder), port)
        try:
            for form in ("classify", "pooling"):
                for raw in (False, True):
                    url = f"http://127.0.0.1:{port}/{form}"
                    answers = asyncio.run(scores(RewardModel(url, raw=raw)))
                    own = [float(n if raw else torch.sigmoid(n)) for n in logits]
                    worst = max(abs(a - b) for a, b in zip(answers, own, strict=True))
                    figures[f"{form}{'_raw' if raw else ''}_diff_max"] = float(f"{worst:.1g}")
        finally:
            stop(server)
    if max(figures.values()) > 1e-4:
        raise AssertionError(f"vLLM's numbers differ from PyTorch's: {figures}")
    return figures
