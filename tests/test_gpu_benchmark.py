"""benchmarks/gpu on a machine without a GPU: the measurement of the local engine with a tiny model.

What a GPU would show is not tested: no figure that comes out here means anything.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys

import pytest
from benchmarks.gpu import pack_vllm
from runs import ROOT


def test_machine_code_of_other_cards_becomes_zeros(tmp_path):
    """A fat binary between other bytes: an entry for compute capability 8.0, one for 9.0."""

    def entry(capability: int, code: bytes) -> bytes:
        return struct.pack("<HHIQIIII", 2, 1, 32, len(code), 0, 0, 0, capability) + code

    entries = entry(80, b"ampere!!") + entry(90, b"hopper!!")
    container = pack_vllm.FAT_BINARY + struct.pack("<HHQ", 1, 16, len(entries)) + entries
    library = tmp_path / "library.so"
    library.write_bytes(b"before" + container + b"after")
    pack_vllm.keep_hopper(library)
    kept = container.replace(b"ampere!!", bytes(8))
    assert library.read_bytes() == b"before" + kept + b"after"


@pytest.mark.slow
def test_the_local_engine_is_measured_with_a_tiny_model():
    model, words = "Qwen/Qwen2.5-0.5B-Instruct", ["--slots", "8", "--new-tokens", "4"]
    env = os.environ | {
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-m", "benchmarks.gpu.local_engine", model, *words]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.strip().splitlines()[-1].partition(" ")[2])
    assert (
        found["device"] == "cpu"
        and found["sampler"]["slots"] == 8
        and found["sampler"]["tokens_per_s"] > 0
    )
    assert (
        len(found["warm start"]["losses"]) == 6
        and "weights, gradients, Adam" in found["warm start"]["plan_gib"]
    )
    gaps = [value for name, value in found.items() if name.startswith("gap of")]
    assert len(gaps) == 2 and all(0 < gap["mean"] < 0.1 for gap in gaps), (
        "bf16 differs a little, and only a little"
    )
