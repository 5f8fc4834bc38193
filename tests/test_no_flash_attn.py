"""verl without flash-attn: packed rows by PyTorch's kernel, and log-probabilities in one
product."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import fails_with

from agent_r1.cluster import launch
from agent_r1.cluster.compose import Sources, attention_name, overrides
from agent_r1.config import fingerprint, from_yaml, load_config
from agent_r1.evaluation.provenance import provenance
from agent_r1.ground import device as device_room
from agent_r1.training.run_dir import RunDir

ROOT = Path(__file__).parents[1]

CHECKS = """
import sys, torch, transformers, verl
room = sys.modules["agent_r1.cluster.no_flash_attn"]  # verl imports it, by way of cpu.py
import verl.utils.torch_functional as functional
import verl.workers.engine_workers, agent_r1.cluster.trainer, agent_r1.cluster.driver

torch.manual_seed(0)
assert functional.logprobs_from_logits_v2 is room.token_logprobs
assert verl.utils.model.load_valuehead_model is room.load_value_model
assert not verl.models.transformers.monkey_patch.is_trl_available()
logits = torch.randn(1100, 64, requires_grad=True)
labels = torch.randint(64, (1100,))
weights = torch.randn(1100)
exact = torch.log_softmax(logits, -1).gather(1, labels[:, None])[:, 0]
(exact * weights).sum().backward()
half = logits.detach().bfloat16().requires_grad_()
ours = functional.logprobs_from_logits(half, labels)
(ours * weights).sum().backward()
assert ours.dtype is torch.float32
gap = (ours - exact).abs().max().item()
slope = ((half.grad.float() - logits.grad).norm() / logits.grad.norm()).item()

config = transformers.Qwen2Config(
    vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, intermediate_size=48, attn_implementation="sdpa",
)
model = transformers.AutoModelForCausalLM.from_config(config)
rows = [torch.randint(50, (1, length)) for length in (5, 9, 3)]
alone = torch.cat([model(row).logits[0] for row in rows])
model.set_attn_implementation(room.VARLEN)
places = torch.cat([torch.arange(row.shape[1]) for row in rows])[None]
packed = model(torch.cat(rows, 1), attention_mask=None, position_ids=places).logits[0]
print("gap", gap, slope, (packed - alone).abs().max().item())
"""


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize("kind", ["ImportError", "OSError"])
def test_all_parts_of_a_run_load_without_flash_attn(tmp_path, kind, monkeypatch):
    """A wheel that does not load raises either; verl itself expects the first only."""
    package = tmp_path / "flash_attn"
    package.mkdir()
    (package / "__init__.py").write_text(f"raise {kind}('undefined symbol')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), str(ROOT / "src"))))
    environment = os.environ | {
        "PYTHONPATH": launch.hide_flash_attn(tmp_path),
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "agent_r1.cluster.cpu",
    }
    process = subprocess.run(
        [sys.executable, "-c", CHECKS], env=environment, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr[-2000:]
    line = process.stdout.splitlines()[-1]
    gap, slope, rows = (float(word) for word in line.split()[1:])
    assert gap < 0.02  # logits of about 3 in bfloat16 are rounded to 0.008
    assert slope < 0.01
    assert rows < 1e-5


@pytest.mark.parametrize(
    ("setting", "device", "name", "packed"),
    [
        ("auto", "cpu", "sdpa", False),
        ("auto", "cuda", "flash_attention_2", True),
        ("varlen", "cuda", "agent_r1_varlen", True),
        ("sdpa", "cuda", "sdpa", False),
    ],
)
def test_each_place_of_verl_gets_the_chosen_attention(setting, device, name, packed, tmp_path):
    config = load_config("hotpotqa-4xh100", [f"verl.attention={setting}"], algorithm="ppo")
    ours = overrides(config, Sources(tmp_path, tmp_path, tmp_path, tmp_path), device)
    for part in (ours["added"]["actor_rollout_ref"], ours["added"]["critic"]):
        assert part["model"]["override_config"]["attn_implementation"] == name
    for part in (ours["changed"]["actor_rollout_ref"], ours["changed"]["critic"]):
        assert part["model"]["use_remove_padding"] is packed
    flash = attention_name(setting, device) == "flash_attention_2"
    environment = launch.driver_environment(config, device, "mark", tmp_path)
    modules = environment.get("VERL_USE_EXTERNAL_MODULES", "")
    assert ("sitecustomize" in str(list(tmp_path.rglob("*.py")))) is (
        device == "cuda" and not flash
    )
    assert ("no_flash_attn" in modules) is (device == "cuda" and not flash)
    assert environment["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] == "1"


@pytest.mark.parametrize(
    ("error", "chosen"),
    [
        (None, "flash_attention_2"),
        (ImportError("undefined symbol: x\nmore"), "varlen"),
        (OSError("GLIBCXX_3.4.32 not found"), "varlen"),
    ],
)
def test_a_run_chooses_what_loads_and_keeps_it(error, chosen, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(launch, "flash_attn_error", lambda: error)
    run = RunDir(tmp_path)
    config = launch.choose_attention(run, load_config("hotpotqa-4xh100"), "cuda")
    assert config.verl.attention == chosen
    printed = capsys.readouterr()
    assert ("does not load" in printed.out + printed.err) is (error is not None)
    launch.open_run(run, config)
    (tmp_path / "metrics.jsonl").touch()
    monkeypatch.setattr(launch, "flash_attn_error", lambda: ImportError("gone meanwhile"))
    assert launch.choose_attention(run, load_config("hotpotqa-4xh100"), "cuda") == config
    # The script evaluates before it trains, also when it is called again.
    launch.open_run(run, load_config("hotpotqa-4xh100"))
    assert from_yaml(run.config) == config


def test_a_run_is_not_continued_with_another_attention(tmp_path):
    run = RunDir(tmp_path)
    launch.open_run(run, load_config("hotpotqa-4xh100"))
    (tmp_path / "metrics.jsonl").touch()
    chosen = load_config("hotpotqa-4xh100", ["verl.attention=varlen"])
    launch.open_run(run, chosen)  # not trained yet, so this call may choose
    launch.open_run(run, load_config("hotpotqa-4xh100"))
    other = load_config("hotpotqa-4xh100", ["verl.attention=sdpa"])
    with fails_with("other_settings", "verl.attention: varlen there, sdpa now"):
        launch.open_run(run, other)
    assert fingerprint(chosen) != fingerprint(other)
    assert provenance(chosen, tmp_path)["attention"] == "varlen"
    assert provenance(load_config("small"), tmp_path)["attention"] is None


def test_a_gpu_does_not_use_cudnns_attention(monkeypatch):
    """cuDNN compiles for each new shape; an agent's batches have a new one in every pass."""
    switches = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", switches.append)
    device_room.resolve_device("cpu", "float32")
    assert switches == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device_room.resolve_device("auto", "auto") == ("cuda", torch.bfloat16)
    assert switches == [False]
