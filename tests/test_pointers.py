"""Paths and names of our code in pages, docstrings and comments exist."""

from __future__ import annotations

import ast
import builtins
import io
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CODE = ("src", "recipes", "benchmarks", "lab")
ENDINGS = ("py", "md", "toml", "yaml", "yml", "sh", "j2")

# Names that point out of the repository. Each is here for one reason, given above its lines.
ELSEWHERE = {
    # Files that a page tells its reader to write.
    "OTHER.yaml",
    "away.py",
    "convert.py",
    "embedder.py",
    "guess.py",
    "invoices.py",
    "treasure.py",
    "notebook.py",
    "ours.py",
    "primes.py",
    "server.py",
    "slashes.py",
    "theirs.py",
    "try_all.py",
    "try_it.py",
    "try_mcp.py",
    "words.py",
    "tool.py",
    "tools.py",
    "recipes/frugal/",
    "recipes/frugal/README.md",
    "recipes/frugal/env.py",
    "recipes/frugal/median.py",
    "recipes/frugal/preset.yaml",
    "recipes/frugal/recipe.toml",
    "recipes/frugal/tools.py",
    "my_tools.py",
    "sums.py",
    # Files of a run, of a user's model, or of a build.
    "config.yaml",
    "agent_r1.yaml",
    "agent_loops.yaml",
    "build/site/",
    "model/",
    "global_step_N/",
    # Files of a Harbor task.
    "environment/",
    "instruction.md",
    "sitecustomize.py",
    "solution/",
    "solution/solve.sh",
    "task.toml",
    "test.sh",
    "tests/test.sh",
    # Files of other packages and repositories.
    "grpo_trainer.py",
    "reward_fn.py",
    "train_grpo.sh",
    "train_ppo.sh",
    "vllm_server.py",
    "chat_rl.py",
    "ppo.py",
    "search_r1/search/retrieval_server.py",
    "examples/sglang_multiturn/search_r1_like/run_qwen2.5-3b_instruct_search_multiturn.sh",
    "scripts/nq_hotpotqa/v0.2/train_grpo.sh",
    "skyrl-train/examples/search/run_search.sh",
}
ORIGINAL = "from-agent-r1-0.1.md"
"""A page whose tables have names of the original Agent-R1 next to ours, which
test_from_agent_r1.py looks up."""
# Folders that the program makes, and placeholders in capitals such as recipes/NAME/.
MADE = re.compile(r"^(runs|artifacts|checkpoints|questions|actor|rollouts)/|\b[A-Z]{4,}")


def pages() -> list[Path]:
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]
    return sorted(found + list(ROOT.glob("recipes/**/*.md")))


def sources() -> list[Path]:
    files = [ROOT / "one_file.py", ROOT / "conftest.py"]
    for folder in CODE:
        files += (ROOT / folder).rglob("*.py")
    # benchmarks/trl_compare has an environment of its own, where setup.sh was run.
    others = {"__pycache__", ".venv"}
    return sorted(file for file in files if not others & set(file.parts[len(ROOT.parts) :]))


@cache
def files_by_name() -> dict[str, list[str]]:
    """Map the name of each of our files to its paths."""
    paths: dict[str, list[str]] = {}
    for ending in ENDINGS:
        for file in ROOT.glob(f"**/*.{ending}"):
            path = file.relative_to(ROOT)
            outside = path.parts[0] in ("build", "runs", "artifacts", "env")
            if not outside and not (path.parts[0].startswith(".") and path.parts[0] != ".ci"):
                paths.setdefault(file.name, []).append(str(path))
    return paths


@cache
def defined_names(module: Path) -> frozenset[str]:
    """Return the functions, classes, variables and imports of a module, and its methods."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).rpartition(".")[2])
    return frozenset(names)


@cache
def all_names() -> frozenset[str]:
    names: set[str] = set()
    for file in [*sources(), *ROOT.glob("tests/*.py")]:
        names |= defined_names(file)
    return frozenset(names)


def path_exists(path: str, near: Path) -> bool:
    """Look up a path: from the root, from the text's folder, or by its end."""
    if path in ELSEWHERE or MADE.search(path):
        return True
    if (ROOT / path).exists() or (near.parent / path).exists():
        return True
    if path.endswith("/"):
        return any(ROOT.glob(f"*/{path}")) or any(ROOT.glob(f"src/agent_r1/{path}"))
    return any(
        f"/{known}".endswith(f"/{path}") for known in files_by_name().get(Path(path).name, ())
    )


def dotted_name_exists(name: str) -> bool:
    """Look up `agent_r1.a.b.name`: the longest module, and a name that it defines."""
    parts = name.removesuffix("()").split(".")
    for length in range(len(parts), 0, -1):
        module = ROOT / "src" / Path(*parts[:length])
        if module.with_suffix(".py").is_file():
            return length == len(parts) or parts[length] in defined_names(module.with_suffix(".py"))
        if (module / "__init__.py").is_file():
            public = (module / "__init__.py").read_text(encoding="utf-8")
            return length == len(parts) or re.search(rf"\b{parts[length]}\b", public) is not None
    return False


def stale_in_page(text: str, page: Path) -> list[str]:
    """List the backticked paths and `agent_r1` names of a page that do not exist."""
    stale = []
    if page.name == ORIGINAL:
        text = re.sub(r"^\|.*$", "", text, flags=re.M)
    for name in re.findall(r"`([^`\n]+)`", re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)):
        is_path = re.fullmatch(rf"[\w./-]+(/|\.({'|'.join(ENDINGS)}))", name)
        if is_path and not path_exists(name, page):
            stale.append(name)
        is_dotted = re.fullmatch(r"agent_r1(\.\w+)+(\(\))?", name) and not is_path
        if is_dotted and not dotted_name_exists(name):
            stale.append(name)
    return stale


def prose_of(text: str) -> str:
    """Return the docstrings and comments of a source file."""
    parts = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            parts.append(str(node.value.value))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            parts.append(token.string)
    return "\n".join(parts)


def stale_in_source(text: str, file: Path) -> list[str]:
    """List the files, `agent_r1` names and `functions()` in a file's prose that do not exist."""
    prose = prose_of(text)
    stale = []
    for path in re.findall(r"(?<![\w./:*{-])[\w][\w/-]*\.py\b(?!:)", prose):
        if not path_exists(path, file):
            stale.append(path)
    for name in re.findall(r"`(agent_r1(?:\.\w+)+(?:\(\))?)`", prose):
        if not dotted_name_exists(name):
            stale.append(name)
    for name in re.findall(r"`([a-z_]\w*)\(\)`", prose):
        if name not in all_names() and not hasattr(builtins, name):
            stale.append(f"{name}()")
    return stale


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page):
    assert stale_in_page(page.read_text(encoding="utf-8"), page) == []


def test_what_docstrings_and_comments_name_exists():
    stale = {}
    for file in sources():
        names = stale_in_source(file.read_text(encoding="utf-8"), file)
        if names:
            stale[str(file.relative_to(ROOT))] = names
    assert stale == {}


def test_stale_names_are_reported():
    page = (
        "See `src/agent_r1/nowhere.py`, `docs/`, `agent_r1.training.loop.train`, `agent_r1.gone`."
    )
    assert stale_in_page(page, ROOT / "README.md") == ["src/agent_r1/nowhere.py", "agent_r1.gone"]
    source = '"""See nowhere.py, loop.py and `vanish_into()`."""\n# and `agent_r1.core.Rowing`\n'
    file = ROOT / "src/agent_r1/core.py"
    assert stale_in_source(source, file) == ["nowhere.py", "agent_r1.core.Rowing", "vanish_into()"]


def test_the_list_of_foreign_names_has_no_name_that_exists_here():
    foreign = [name for name in ELSEWHERE if (ROOT / name).exists()]
    assert foreign == []
