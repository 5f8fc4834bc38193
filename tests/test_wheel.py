"""The source archive and the wheel, made and installed as strangers get them: in an environment
outside of the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from runs import ROOT

pytestmark = pytest.mark.slow
BUILD = (
    "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
)

QUESTION = "In which city is the publisher of Sosnum based?"
SMALL = [
    "data.train=16",
    "data.val=4",
    "data.test=4",
    "cold_start.copy_steps=2",
    "cold_start.probe=0",
    "data.cold=20",
    "cold_start.mix_steps=2",
    "trainer.steps=2",
    "trainer.threads=1",
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
]


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "PIP", "AGENT_R1"))
    }
    done = subprocess.run(command, cwd=cwd, env=environment | env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, Path]:
    """(source archive, wheel): the archive of what git knows or would, the wheel of what the
    archive holds."""
    folder = tmp_path_factory.mktemp("made")
    files = run(
        "git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT
    ).splitlines()
    for name in files:
        if os.path.lexists(ROOT / name):
            (folder / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "checkout" / name)
    run(sys.executable, "-c", BUILD, "build_sdist", folder, cwd=folder / "checkout")
    [archive] = folder.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder)  # our own archive; `filter` needs Python 3.11.4
    run(
        sys.executable,
        "-c",
        BUILD,
        "build_wheel",
        folder,
        cwd=folder / archive.name.removesuffix(".tar.gz"),
    )
    [wheel] = folder.glob("*.whl")
    return archive, wheel


@pytest.fixture(scope="module")
def installed(made, tmp_path_factory) -> Path:
    """The folder of an environment with the wheel, and with the packages of this one, but without
    this checkout."""
    folder = tmp_path_factory.mktemp("elsewhere")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    [packages] = folder.glob("venv/lib/python*/site-packages")
    # Files ending in .pth are not read in a folder that one of them adds, so the checkout's own
    # installation is not there.
    (packages / "these.pth").write_text(
        "\n".join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    )
    pip(folder, "install", "--no-deps", str(made[1]))
    return folder


def pip(folder: Path, *words: str) -> str:
    """pip of this environment, for another one, without an index."""
    return run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        folder / "venv/bin/python",
        *words,
        "--no-index",
        cwd=folder,
    )


def test_the_archives_hold_what_belongs_to_the_package(made):
    with tarfile.open(made[0]) as archive, zipfile.ZipFile(made[1]) as wheel:
        packed = {name.partition("/")[2] for name in archive.getnames()}
        wheeled = set(wheel.namelist())
    kinds = (
        ".py",
        ".yaml",
        ".yml",
        ".toml",
        ".md",
        ".j2",
        ".typed",
        ".safetensors",
        ".json",
        ".jinja",
    )
    sources = {}  # name in the wheel: name in the checkout and in the source archive
    for package, folder in (("agent_r1", "src/agent_r1"), ("agent_r1_recipes", "recipes")):
        for file in (ROOT / folder).rglob("*"):
            inside = file.relative_to(ROOT / folder)
            if file.is_file() and file.suffix in kinds and "tests" not in inside.parts:
                sources[f"{package}/{inside}"] = f"{folder}/{inside}"
    own = set(sources)
    assert {"agent_r1_recipes/laptop/smoke.yaml", "agent_r1_recipes/credit/recipe.toml"} < own
    assert {"agent_r1_recipes/tinymath/README.md", "agent_r1/config/names.toml"} < own
    assert own <= wheeled and set(sources.values()) <= packed
    assert "src/agent_r1_recipes/__init__.py" in packed  # `PYTHONPATH=src` works in the archive
    assert {"CHANGELOG.md", "SECURITY.md", "CITATION.cff", "LICENSE"} <= packed
    assert not [
        name
        for name in wheeled
        if "tests" in Path(name).parts or name.startswith(("benchmarks/", "lab/"))
    ]


def test_the_wheel_works_outside_of_the_checkout(installed):
    where = "import agent_r1; print(agent_r1.__file__)"
    home = {"AGENT_R1_HOME": str(installed / "home"), "OMP_NUM_THREADS": "1"}
    assert str(installed) in run(installed / "venv/bin/python", "-c", where, cwd=installed)
    agent = installed / "venv/bin/agent-r1"
    said = run(
        agent, "chat", "--demo", "--temperature=0", "--question", QUESTION, cwd=installed, **home
    )
    assert "answer: Landir" in said
    assert "tinymath" in run(
        agent, "train", "grpo", "--recipe", "tinymath", "--dry-run", cwd=installed, **home
    )
    train = [agent, "train", "grpo", "--preset", "smoke", "--plain", *SMALL]
    run(*train, cwd=installed, **home)
    [metrics] = installed.glob("home/runs/*/metrics.jsonl")
    assert len(metrics.read_text().splitlines()) == 2
    run(agent, "new", "mine", cwd=installed, **home)
    run(agent, "data", "--recipe", "mine", *SMALL[:3], cwd=installed, **home)


def test_an_extra_can_be_asked_for_where_the_wheel_is(installed):
    """`agent-r1` is on no index; what is installed satisfies the name, and pip looks at the extra's
    packages."""
    said = pip(installed, "install", "--dry-run", "agent-r1[math]")
    assert "already satisfied: math-verify" in said and "agent-r1[math]" in said


def test_one_file_needs_nothing_of_the_repository(installed, tmp_path):
    """A copy of one_file.py finds its preset in the wheel."""
    shutil.copy(ROOT / "one_file.py", tmp_path)
    opens = "import one_file; print(one_file.open_run('smoke', 'grpo').name)"
    assert run(installed / "venv/bin/python", "-c", opens, cwd=tmp_path) == "smoke-grpo\n"
