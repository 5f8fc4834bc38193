"""Train the preset small with a known bug, in a patched copy of the source.

In: an exhibit (exhibits.yml). Out: runs in AGENT_R1_HOME/museum, for `record.py`. Each seed has its
own data, cold start and test questions, which the exhibits share. The source in use scores the last
checkpoint: a patch cannot score itself.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import yaml

import agent_r1
import agent_r1_recipes
from agent_r1 import ConfigError, command, option

HERE = Path(__file__).parent
HEALTHY = "healthy"
QUICK = [
    "trainer.threads=1",
    "trainer.eval_every=32",
    "trainer.save_every=32",
    "trainer.rollouts_every=31",
]
"""Rollouts of the first step and the last but one; validation at the end."""


@dataclass(frozen=True)
class Exhibit:
    """A bug: texts of the source that it replaces, and the tests that fail then."""

    name: str
    patch: list[dict[str, str]]
    tests: str = ""
    algorithm: str = "grpo"
    settings: tuple[str, ...] = ()
    cold: bool = False
    compare: str = HEALTHY
    cause: str = ""

    def patch_texts(self, core: Path, recipes: Path) -> dict[Path, str]:
        """Return the new texts of files, which are in these folders of both packages.

        Raises ValueError for a text that does not occur once.
        """
        texts: dict[Path, str] = {}
        for change in self.patch:
            name = change["in"]
            if name.startswith("recipes/"):
                file = recipes / name.removeprefix("recipes/")
            else:
                file = core / name
            text = texts.get(file) or file.read_text()
            count = text.count(change["text"])
            if count != 1:
                raise ValueError(f"{self.name}: {file} has {change['text']!r} {count} times")
            texts[file] = text.replace(change["text"], change["becomes"])
        return texts


def read_exhibits() -> dict[str, Exhibit]:
    entries = yaml.safe_load((HERE / "exhibits.yml").read_text())
    return {name: Exhibit(name, **facts) for name, facts in entries.items()}


def copy_source(exhibit: Exhibit, folder: Path) -> Path:
    """Copy the source to `folder`, with the exhibit's patch.

    The copy has both packages side by side, as an installation has.
    """
    for package in (agent_r1, agent_r1_recipes):
        shutil.copytree(
            package.__path__[0],
            folder / package.__name__,
            ignore=shutil.ignore_patterns("__pycache__", "recorded.zip"),
        )
    copies = (folder / "agent_r1", folder / "agent_r1_recipes")
    for file, text in exhibit.patch_texts(core=copies[0], recipes=copies[1]).items():
        file.write_text(text)
    return folder


def agent(stage: str, exhibit: Exhibit, seed: int, source: Path | None, *words: str) -> None:
    """Run a stage: with the patched `source`, or with the source in use."""
    preset = [
        exhibit.algorithm,
        "--preset",
        "small",
        "--seed",
        str(seed),
        *QUICK,
        *exhibit.settings,
    ]
    paths = {"AGENT_R1_HOME": str(base_of(exhibit))} | (
        {"PYTHONPATH": str(source)} if source else {}
    )
    subprocess.run(
        [sys.executable, "-m", "agent_r1", stage, *preset, *words],
        env=os.environ | paths,
        check=True,
    )


def base_of(exhibit: Exhibit) -> Path:
    """Return the home of an exhibit's runs.

    Exhibits share data and cold starts unless their cold start differs.
    """
    return (
        Path(os.environ.get("AGENT_R1_HOME", "."))
        / "museum"
        / (exhibit.name if exhibit.cold else "shared")
    )


def train(exhibit: Exhibit, seed: int, source: Path) -> Path:
    """Train an exhibit, unless it was trained before; return the run's folder."""
    run, flag_file = f"{exhibit.name}-s{seed}", base_of(exhibit) / f"made-s{seed}"
    folder = base_of(exhibit) / "runs" / run
    if not (folder / "checkpoints/step_000032").exists():
        for stage in () if flag_file.exists() else ("data", "index", "cold-start"):
            agent(stage, exhibit, seed, source if exhibit.cold else None)
        flag_file.touch()
        agent("train", exhibit, seed, source, "--run", run, "--plain", "--resume")
    return folder


def score(exhibit: Exhibit, seed: int) -> None:
    """Score the last checkpoint on the test questions, without the patch."""
    run = f"{exhibit.name}-s{seed}"
    if not (base_of(exhibit) / "runs" / run / "eval.json").exists():
        agent("eval", exhibit, seed, None, "--run", run)


@command(
    "museum", "train with a known bug of agent RL, next to the healthy run",
    ["mask-forgotten", "kl-of-the-wrong-sign healthy --seeds 0 1 2"],
    option("names", nargs="+", metavar="NAME", help="exhibits: see recipes/museum/README.md"),
    option("--seeds", nargs="+", type=int, default=[0], help="train once per seed (default: 0)"),
)  # fmt: skip
def museum(a: Namespace) -> None:
    exhibits = read_exhibits()
    for name in a.names:
        if name not in exhibits:
            raise ConfigError.unknown("NAME", name, exhibits)
        with tempfile.TemporaryDirectory() as folder:
            source = copy_source(exhibits[name], Path(folder))
            for seed in a.seeds:
                folder = train(exhibits[name], seed, source)
                score(exhibits[name], seed)
                print(f"{name}, seed {seed}: {folder}", flush=True)
