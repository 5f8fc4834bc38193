"""Run `agent-r1 gpu-check` on two ranks, also with faults in verl.

Each time the phase and its remedy are compared. Preset small with `verl.ranks=2`, on gloo.
`_planted.py` has the faults; `make test` plants others around verl.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WORDS = [
    "gpu-check",
    "grpo",
    "--preset=small",
    "--engine=verl",
    "trainer.threads=1",
    "cold_start.warm_steps=2",
    "--json",
]
PHASE_OF = {
    "engine": "Ray, FSDP2 and vLLM",
    "deaf": "weight sync",
    "episodes": "sampling",
    "gradient": "update",
    "shards": "checkpoint",
}
"""The fault, and the phase that must be named."""


def run() -> dict[str, float]:
    """Return the seconds of the sound check, and the number of faults that were named.

    Raises if a check finds something else.
    """
    began = time.perf_counter()
    sound = run_check([sys.executable, "-m", "agent_r1.app.cli", *WORDS, "verl.ranks=2"])
    seconds = round(time.perf_counter() - began)
    status, evidence = (
        {one["phase"]: one[key] for one in sound["phases"]} for key in ("status", "seen")
    )
    if not sound["passed"] or "several ranks" not in evidence["Ray, FSDP2 and vLLM"]:
        raise AssertionError(f"the sound check: {status}, {evidence}")
    for fault, phase in PHASE_OF.items():
        check = run_check([sys.executable, "-m", "lab.rehearsals._planted", fault, *WORDS])
        failures = [one for one in check["phases"] if one["status"] == "failed"]
        print(f"  {fault}: {[one['seen'] for one in failures]}", flush=True)
        if (
            check["passed"]
            or [one["phase"] for one in failures] != [phase]
            or not failures[0]["remedy"]
        ):
            raise AssertionError(f"{fault}: {failures} instead of {phase}")
    return {
        "seconds_two_ranks": seconds,
        "passed": list(status.values()).count("passed"),
        "faults_named": len(PHASE_OF),
    }


def run_check(command: list[str]) -> dict[str, Any]:
    """Return the result of a check in a home of its own."""
    with tempfile.TemporaryDirectory(prefix="agent-r1-check-") as home:
        paths = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
        environment = os.environ | {"AGENT_R1_HOME": home, "PYTHONPATH": paths}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    try:
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        raise RuntimeError(f"no result: {done.stderr[-500:]}") from None
