"""The book's pages: notebooks run, links lead somewhere, and lists and tables say what the code
says."""

from __future__ import annotations

import re
import shutil
from operator import attrgetter
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from runs import STAGES, main

import agent_r1
from agent_r1.config import load_config
from agent_r1.core import Step, StopReason, Trajectory
from agent_r1.data.storage import ROW_KEYS
from agent_r1.evaluation.evaluate import eval_card

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


SHARE_A_START = ("01_rollout_and_masks", "04_open_the_agent")
"""Notebooks that open the start model of the preset small, and train nothing."""


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory) -> Path:
    """Data, index and start model of the preset small, which takes half a minute to make."""
    home = tmp_path_factory.mktemp("small")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENT_R1_HOME", str(home))
        for stage in STAGES:
            assert main(stage, "--preset=small", "trainer.threads=1") == 0
    return home / "artifacts"


@pytest.mark.slow
@each_notebook
def test_notebook_runs(path, tmp_path, monkeypatch, request):
    """Executed in an empty folder, so without anybody's runs/; its own `assert`s are the test."""
    if path.stem in SHARE_A_START:
        shutil.copytree(request.getfixturevalue("artifacts"), tmp_path / "artifacts")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # a download would be an error
    for name in (
        "IPYTHONDIR",
        "JUPYTER_RUNTIME_DIR",
        "JUPYTER_CONFIG_DIR",
    ):  # and the home directory stays as it is
        monkeypatch.setenv(name, str(tmp_path / name))
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=None, kernel_name="python3", resources=where).execute()
    if path.stem in SHARE_A_START:
        assert len(list(tmp_path.glob("artifacts/cold-start-*"))) == 1, "it made another start"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    assert sum("assert" in cell.source for cell in code) >= 3
    shown = [output.data for cell in code for output in cell.outputs if "data" in output]
    if path.stem == "01_rollout_and_masks":
        assert any("data-tip" in data.get("text/html", "") for data in shown), (
            "no coloured row was shown"
        )
    else:
        assert any("image/png" in data for data in shown), "no picture was drawn"


@each_notebook
def test_notebook_is_committed_with_its_outputs(path):
    """A code-hosting page shows them. They are of one run from top to bottom, small, and name no
    folder of a machine."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), (
        f"run jupyter execute {path.name}"
    )
    outputs = [output for cell in code for output in cell.outputs]
    assert outputs and not any(
        output.output_type == "error" or output.get("name") == "stderr" for output in outputs
    )
    assert not re.search(r"/(?:work|home|root|tmp|Users)/", str(outputs))
    assert code[0].source.startswith("# On a notebook service, first: ")
    assert path.stat().st_size < 250_000


def links(path: Path) -> set[str]:
    """Relative targets of Markdown links."""
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text())
    return {target for target in targets if not re.match(r"[a-z]+:", target)}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    missing = sorted(target for target in links(path) if not (path.parent / target).exists())
    assert not missing


def names_in(text: str, start: str, end: str) -> list[str]:
    """Names in backquotes between two marks."""
    return re.findall(r"`([a-z_0-9]+)`", text[text.index(start) : text.index(end)])


def test_architecture_lists_the_contracts():
    text = (ROOT / "docs" / "architecture.md").read_text()
    assert names_in(text, "**Row**", "TinyHop adds")[: len(ROW_KEYS)] == list(ROW_KEYS)
    table = text[text.index("| stop reason |") : text.index("**Training rows**")]
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == [
        reason.value for reason in StopReason
    ]
    metrics = {"em": 1.0, "sub_em": 1.0, "f1": 1.0, "evidence": 1.0, "malformed": 0.0}
    row = {
        "data_source": "tinyhop",
        "prompt": [{"role": "user", "content": "Which?"}],
        "reward_model": {"ground_truth": ["x"]},
        "extra_info": {},
    }
    trajectory = Trajectory([Step([1], [2], [0.0])], "g", StopReason.ANSWERED, row, metrics=metrics)
    card = eval_card([trajectory], model="", split="test", seed=0, retriever="", start_time=0.0)
    assert names_in(text, "**Eval card**", "`em` is exact match") == list(card)


def test_the_recipe_is_the_preset():
    text = (ROOT / "docs" / "laptop.md").read_text()
    config = load_config("discover", algorithm="grpo")
    with_critic = load_config("discover", algorithm="ppo")
    rows = re.findall(r"^\| `([a-z_]+\.[a-z_]+)` \|([^|]*)\|", text, re.MULTILINE)
    assert len(rows) > 20
    for key, written in rows:
        of_ppo = key.startswith("critic.") or key in ("advantage.gamma", "advantage.lam")
        value = attrgetter(key)(with_critic if of_ppo else config)
        assert value is not None, f"docs/laptop.md says {key} = {written}; it is not set"
        assert type(value)(written.strip()) == value, (
            f"docs/laptop.md says {key} = {written}; the preset says {value}"
        )


def commands() -> list[str]:
    """Every `speedrun-nodocker.sh` line of the laptop page."""
    text = (ROOT / "docs" / "laptop.md").read_text()
    return re.findall(r"^bash speedrun-nodocker\.sh *(.*?) *(?:#.*)?$", text, re.MULTILINE)


@pytest.mark.parametrize("line", commands())
def test_commands_on_the_laptop_page_are_possible(line):
    preset = re.search(r"--preset (\S+)", line)
    overrides = re.findall(r"'([^']*=[^']*)'|(\S+=\S+)", line)
    algorithm = next((word for word in line.split() if word in ("grpo", "ppo")), None)
    config = load_config(
        preset[1] if preset else "discover", [a or b for a, b in overrides], algorithm=algorithm
    )
    assert config.algorithm == (algorithm or "grpo")


# ------------------------------------------------------------------ what pages and notebooks import

TEACHES_THE_PATH = ("02_advantages_and_losses", "04_open_the_agent")
"""Notebooks that may also import from the twelve files of the README."""


def code_of(path: Path) -> list[str]:
    """The Python of a page (its blocks) or of a notebook (its cells, with files that they
    write)."""
    text = path.read_text()
    if path.suffix == ".md":
        return re.findall(r"^```(?:python|pycon)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    cells = nbformat.reads(text, as_version=4).cells
    return [cell.source for cell in cells if cell.cell_type == "code"]


def deep_imports(blocks: list[str], allowed: frozenset[str] = frozenset()) -> set[str]:
    """What the blocks import from agent_r1 beyond users' names and the `allowed` modules."""
    users = {name for names in agent_r1.USERS.values() for name in names}
    found = set()
    for block in blocks:
        lines = [line for line in block.splitlines() if not line.lstrip().startswith(("%", "!"))]
        source = "\n".join(line.removeprefix(">>> ").removeprefix("... ") for line in lines)
        for module, names in re.findall(
            r"^\s*from (agent_r1[\w.]*) import (\([^)]*\)|.*)$", source, re.MULTILINE
        ):
            imported = {name.split(" as ")[0].strip() for name in names.strip("() ").split(",")}
            imported.discard("")
            if module == "agent_r1":
                found |= {f"agent_r1.{name}" for name in imported - users}
            elif module not in allowed and (module, imported) != ("agent_r1.tool", {"tool"}):
                found |= {f"{module}.{name}" for name in imported}
        found |= set(re.findall(r"^\s*import (agent_r1\.[\w.]+)", source, re.MULTILINE))
    return found


def the_twelve() -> frozenset[str]:
    """Modules of the README's reading path."""
    listed = re.findall(
        r"^\d+\. \[[\w./]+\]\(src/([\w/]+)\.py\)", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    return frozenset(path.replace("/", ".") for path in listed)


@pytest.mark.parametrize(
    "path",
    [
        ROOT / "README.md",
        ROOT / "docs/python.md",
        *sorted((ROOT / "docs/tutorial").glob("your-*.md")),
        *NOTEBOOKS,
    ],
    ids=lambda path: path.stem,
)
def test_newcomers_see_users_names_only(path):
    allowed = the_twelve() if path.stem in TEACHES_THE_PATH else frozenset()
    blocks = code_of(path)
    assert any("agent_r1" in block for block in blocks) or path.suffix == ".md"
    assert deep_imports(blocks, allowed) == set()


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("from agent_r1 import Estimator", {"agent_r1.Estimator"}),
        ("from agent_r1.training.loop import train", {"agent_r1.training.loop.train"}),
        (
            "from agent_r1 import (\n    open_run,\n    whiten,\n)",
            {"agent_r1.whiten"},
        ),
        ("import agent_r1.training.loop", {"agent_r1.training.loop"}),
        ("from agent_r1.tool import tool", set()),
    ],
)
def test_a_planted_deep_import_is_found(line, found):
    assert deep_imports([line]) == found
