"""Play agents through the gateway: 500 equal episodes, 1,000 hostile ones, seven real clients.

The tests of recipes/gateway and recipes/api do the same with tens of episodes. Here they run in
pytest, because the world and the model are its fixtures. The clients of CLIENTS are installed from
the registry, each in an environment of its own; curl is the machine's. The requests of six clients
are written to build/recorded. Copied to recipes/gateway/tests/recorded, they are what `make test`
replays.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TESTS = (
    "recipes/gateway/tests/test_at_size.py",
    "recipes/gateway/tests/test_real_clients.py",
    "recipes/gateway/tests/test_six_clients.py",
    "recipes/api/tests/test_own_model.py",
)
CLIENTS = {
    "openai": ("openai==3.57.0",),
    "langgraph": ("langgraph==1.2.22", "langchain-openai==1.7.4"),
    "openai-agents": ("openai-agents==0.24.0",),
    "litellm": ("litellm==1.110.2",),
    "pydantic-ai-slim": ("pydantic-ai-slim[openai]==2.68.0",),
    "smolagents": ("smolagents[openai]==1.26.0",),
}


def install(folder: Path, packages: tuple[str, ...]) -> Path:
    """Make an environment with `packages`, and return its Python."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    words = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages]
    subprocess.run(words, check=True)
    return python


def run() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        pythons = {}
        for name, packages in CLIENTS.items():
            print(f"installing {name} ...", flush=True)
            pythons[name] = str(install(Path(folder) / name, packages))
        figures = Path(folder) / "figures.json"
        recordings = ROOT / "build" / "recorded"
        recordings.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {
            "AGENT_R1_FIGURES": str(figures),
            "AGENT_R1_CLIENTS": json.dumps(pythons),
            "AGENT_R1_RECORDINGS": str(recordings),
            "OMP_NUM_THREADS": "1",
            # LiteLLM would ask for a list of prices first.
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            # Neither client may send traces anywhere.
            "LANGSMITH_TRACING": "false",
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
        }
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", *TESTS],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(done.stdout[-3000:])
        versions = {name: packages[0] for name, packages in CLIENTS.items()}
        return json.loads(figures.read_text()) | {"clients": versions}
