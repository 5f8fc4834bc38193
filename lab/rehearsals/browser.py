"""Train in the page of recipes/browser: Chromium and Firefox give Node's weights, to the bit.

The module is compiled again to the same SHA-256. The comparison with PyTorch finds ten planted
faults in the C files. Hostile questions stay text. Needs Debian's chromium and firefox-esr.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from agent_r1_recipes.browser import build, measure, page, world
from agent_r1_recipes.browser.node import node, run_node
from lab.rehearsals._chromium import chromium
from lab.rehearsals._firefox import firefox
from lab.rehearsals.page import LOOKS, PAYLOADS

ROOT = Path(__file__).parents[2]
SHORT = 5
"""Steps of the runs that are compared to the bit."""
FLAGS = {
    "without AVX": ("--no-enable-avx",),
    "the baseline compiler": ("--liftoff", "--no-wasm-tier-up"),
}
"""Ways in which V8 compiles the module otherwise."""

FAULTS = {
    "the mask of the attention": (
        "softmax(row, t + 1, width);",
        "softmax(row, t + 1 < n ? t + 2 : n, width);",
    ),
    "the scale of the attention's gradient": (
        "store(row + j, times(own, four(ATTENTION_SCALE)));",
        "store(row + j, own);",
    ),
    "the bias's gradient": (
        "store(g + B_QKV + i, add(load(g + B_QKV + i), load(dqkv + t * QKV + i)));",
        "store(g + B_QKV + i, load(dqkv + t * QKV + i));",
    ),
    "the rotation back": ("rotate(dqkv, positions, n, -1);", "rotate(dqkv, positions, n, 1);"),
    "the norm's second term": (
        "subtract(own, times(load(x + i), shared))",
        "subtract(own, times(load(x + i), times(shared, four(0.5f))))",
    ),
    "the derivative of silu": (
        "times_add(gate, subtract(four(1), s), four(1))",
        "times_add(gate, subtract(four(1), s), four(0))",
    ),
    "the upper clip": ("high = 1 + loss->clip_high", "high = 1 + loss->clip_low"),
    "the dual clip": ("if (loss->clip_dual > 1 && advantage < 0", "if (0 && advantage < 0"),
    "the tied embedding's second gradient": (
        "store(g, add(load(g), load(dx + t * D + i)));",
        "(void)g;",
    ),
    "the correction of the second moment": (
        "correct_2 = (float)(1 - beta_2_power)",
        "correct_2 = (float)(1 - beta_1_power)",
    ),
}
"""Name -> text of c/trainer.c, and the text in its place."""


def run() -> dict[str, Any]:
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        python = _compiler(Path(place))
        rebuilt = Path(place) / "trainer.wasm"
        build.compile_to(rebuilt, str(python))
        figures["sha256"] = build.sha256(rebuilt)[:16]
        assert build.sha256(rebuilt) == build.hashes()["binary"], "another binary"
        figures["planted_faults_found"] = _planted(Path(place), str(python))
        data = world.pack(world.header())
        file = Path(place) / "train.html"
        figures["megabytes"] = round(page.write_page(file, data) / 1e6, 2)
        hashes = _in_node(data)
        figures["hash_of_short_run"] = hashes["as usual"][:16]
        figures |= _in_chromium(file, hashes)
        figures |= _in_firefox(file, hashes)
        assert len(set(hashes.values())) == 1, hashes
        figures["engines_with_equal_bits"] = len(hashes)
    return figures


def _compiler(place: Path) -> Path:
    """Install the pinned compiler into an environment of its own."""
    environment = place / "compiler"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    python = environment / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", build.COMPILER], check=True)
    return python


def _planted(place: Path, python: str) -> int:
    """Compile the module with each fault. The comparison with PyTorch must fail with each."""
    folder = place / "checkout"
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    for shared in ("src", "tests", "conftest.py", "pyproject.toml"):
        (folder / shared).symlink_to(ROOT / shared)
    (folder / "build/types").mkdir(parents=True)
    recipe = folder / "recipes/browser"
    source = (recipe / "c/trainer.c").read_text()
    for name, (right, wrong) in {"none": ("", ""), **FAULTS}.items():
        assert not right or source.count(right) == 1, name
        planted = source.replace(right, wrong) if right else source
        (recipe / "c/trainer.c").write_text(planted)
        build.compile_to(recipe / "trainer.wasm", python, recipe)
        passed = _parity_passes(folder)
        assert passed == (name == "none"), f"with the fault {name!r}, the comparison passes"
        print(f"  fault {name}: {'passes' if passed else 'found'}", flush=True)
    return len(FAULTS)


def _parity_passes(folder: Path) -> bool:
    """Run the comparison with PyTorch on a copy of the recipe."""
    program = (
        "import sys, pathlib, agent_r1_recipes\n"
        f"agent_r1_recipes.__path__[:] = [{str(folder / 'recipes')!r}]\n"
        "import pytest\n"
        "sys.exit(pytest.main(sys.argv[1:]))"
    )
    tests = folder / "recipes/browser/tests/test_trainer.py"
    chosen = ["-q", "-n", "0", "-p", "no:cacheprovider", "-k", "pytorch or adamw", str(tests)]
    done = subprocess.run(
        [sys.executable, "-c", program, *chosen],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 1), done.stdout[-2000:] + done.stderr[-2000:]
    return done.returncode == 0


def _in_node(data: bytes) -> dict[str, str]:
    """Run the short run under Node, compiled in several ways. Return the hashes."""
    run = {"switches": [], "seed": 1, "steps": SHORT, "questions": 0}
    hashes = {}
    for name, flags in {"as usual": (), **FLAGS}.items():
        [found] = run_node(measure.RUN, {"runs": [run]}, data, flags)
        hashes[name] = found["hash"]
    return hashes


# ----------------------------------------------------------------------------------------- browsers

READY = "document.querySelector('#score').innerText || !document.querySelector('#problem').hidden"
DONE = (
    "document.querySelector('#score').dataset.after || !document.querySelector('#problem').hidden"
)
TRAIN = f"""(() => {{
  const steps = document.querySelector("#steps");
  steps.append(new Option({SHORT}));
  steps.value = "{SHORT}";
  document.querySelector("#train").click();
  return true;
}})()"""
FRAMES = """(() => {
  window.gaps = [];
  let last = performance.now();
  const look = (now) => { gaps.push(now - last); last = now; requestAnimationFrame(look); };
  requestAnimationFrame(look);
  return true;
})()"""
GAP = "gaps.sort((a, b) => a - b)[Math.floor(0.99 * gaps.length)]"


def _train(browser: Any, file: Path) -> str:
    """Open the page, train, and return the final hash."""
    browser.open(f"file://{file}")
    browser.wait(READY, 300)
    problem = browser.js("document.querySelector('#problem').innerText")
    assert not problem, problem
    browser.js(FRAMES)
    browser.js(TRAIN)
    browser.wait(DONE, 600)
    problem = browser.js("document.querySelector('#problem').innerText")
    assert not problem, problem
    return browser.js("page.run.hash")


def _in_chromium(file: Path, hashes: dict[str, str]) -> dict[str, Any]:
    """Train, ask hostile questions, and look at the page in four looks."""
    with chromium() as browser:
        began = time.monotonic()
        hashes["Chromium"] = _train(browser, file)
        seconds = time.monotonic() - began
        gap = browser.js(GAP)
        for text in PAYLOADS:
            _ask(browser, text)
        for width, dark in LOOKS:
            browser.open(f"file://{file}", width, dark)
            browser.wait(READY, 300)
            widths = browser.js("[document.documentElement.scrollWidth, innerWidth]")
            assert widths[0] <= widths[1], widths
        assert not browser.console, browser.console[0]
    return {
        "hostile_questions": len(PAYLOADS),
        "seconds_open_train_score_in_chromium": round(seconds),
        "frame_gap_p99_ms": round(gap),
    }


def _ask(browser: Any, text: str) -> None:
    """Ask a question. It must stay text: no element, no title, no request of its own."""
    browser.js("document.querySelector('#answer').replaceChildren()")
    browser.js(f"document.querySelector('#question').value = {json.dumps(text)}")
    browser.js("ask()")
    browser.wait("document.querySelector('.verdict') !== null")
    tags = browser.js("[...document.querySelectorAll('body *')].map((one) => one.localName)")
    assert not set(tags) & {"img", "iframe", "base", "link", "math", "meta"}, text
    assert browser.js("document.title") == "Train an agent in this page", text


def _in_firefox(file: Path, hashes: dict[str, str]) -> dict[str, Any]:
    """Train, and ask hostile questions."""
    with firefox() as browser:
        hashes["Firefox"] = _train(browser, file)
        for text in PAYLOADS:
            _ask(browser, text)
        return {"firefox": browser.version, "node": _node_version()}


def _node_version() -> str:
    told = subprocess.run([node(), "--version"], capture_output=True, text=True, check=True)
    return told.stdout.strip()
