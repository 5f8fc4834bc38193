"""benchmarks/gpu on a machine without a GPU: the measurement of the local engine with a tiny model.

What a GPU would show is not tested: no figure that comes out here means anything.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from runs import ROOT


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
