"""Room 9, export: a folder that computes what the checkpoint computes, says how it was trained, and
holds no code."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import fails_with
from runs import TINY, main
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from agent_r1.chat.tokenizer import load_tokenizer
from agent_r1.config import from_yaml, load_config
from agent_r1.evaluation.provenance import train_command
from agent_r1.ground.hub import push
from agent_r1.inference import export as room
from agent_r1.inference.agent import find_model
from agent_r1.inference.export import TOKENIZER_PATTERNS, _copy, export
from agent_r1.training.fsdp_merge import merge_shards


@pytest.fixture
def home(agent_home, tmp_path, monkeypatch):
    """A copy of a home with a finished run, the shipped agent's."""
    shutil.copytree(agent_home / "runs", tmp_path / "runs")
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path))
    return tmp_path


def checkpoint(home):
    return home / "runs" / "laptop-grpo" / "checkpoints" / "step_000220"


def test_the_export_of_a_run(home, capsys):
    assert main("export") == 0
    said, run = capsys.readouterr().out, home / "runs" / "laptop-grpo"
    target, config = run / "export", from_yaml(run / "config.yaml")
    assert said.rstrip().endswith(f", in {target}") and "differ by at most" in said
    assert from_yaml(target / "agent_r1.yaml") == config
    weights, exported = (
        load_file(f / "model.safetensors") for f in (checkpoint(home) / "model", target)
    )
    assert weights.keys() == exported.keys() and all(
        torch.equal(weights[k], exported[k]) for k in weights
    )
    g, r = GenerationConfig.from_pretrained(target), config.rollout
    assert (g.temperature, g.top_p, g.max_new_tokens) == (
        r.temperature,
        1.0,
        r.max_tokens_per_turn,
    ) and g.do_sample
    tokenizer, model = (
        AutoTokenizer.from_pretrained(target),
        AutoModelForCausalLM.from_pretrained(target),
    )
    assert (
        g.eos_token_id == [tokenizer.eos_token_id]
        and tokenizer.chat_template
        and model.config.model_type == "qwen2"
    )
    record = json.loads((target / "export.json").read_text())
    assert (
        # 0 on some CPUs: both readers of the weights add up in the same order.
        record["max_logprob_difference"] < 1e-4
        and record["checkpoint"] == "laptop-grpo/checkpoints/step_000220"
    )
    assert str(home) not in "".join(f.read_text() for f in target.glob("*.json"))
    assert find_model(hf_path=str(target)) == (target, config)


@pytest.mark.parametrize(
    "settings", [[], TINY[1:], ["data.mix={2-hop: 1.0}", "env.tools=[search]", "model.path='a b'"]]
)
def test_the_command_that_trains_it_again(settings):
    config = load_config("small", settings, seed=3)
    words = shlex.split(train_command(config))
    assert words[:3] == ["bash", "speedrun-nodocker.sh", "grpo"]
    assert words[3:7] == ["--preset", "small", "--seed", "3"]
    assert len(words) <= 7 + len(
        [s for s in settings if "tools" not in s]
    )  # only what differs from the preset
    assert load_config("small", words[7:], algorithm="grpo", seed=3) == config


@pytest.mark.parametrize("gone", ["laptop", "sprint", "deleted.yaml"])
def test_a_run_of_a_preset_that_is_gone_can_be_trained_again(gone):
    """The command has another preset, and all settings that differ."""
    config = load_config("small", ["actor.lr=0.25"], seed=3)
    words = shlex.split(train_command(config.model_copy(update={"preset": gone})))
    assert words[3:5] == ["--preset", "discover"]
    again = load_config("discover", words[7:], algorithm="grpo", seed=3)
    assert again.model_copy(update={"preset": "small"}) == config


def test_a_folder_of_somebody_else_is_left_alone(home, capsys):
    (home / "thesis").mkdir()
    (home / "thesis" / "draft.txt").write_text("five years")
    assert main("export", "--target-dir", str(home / "thesis")) == 1
    assert (
        "has other contents" in capsys.readouterr().err and (home / "thesis" / "draft.txt").exists()
    )
    assert main("export", "--target-dir", str(home / "runs" / "laptop-grpo" / "config.yaml")) == 1


def test_without_a_run_random_tokens_are_compared_and_what_could_hold_code_stays_behind(home):
    model = home / "foreign"
    shutil.copytree(checkpoint(home) / "model", model)
    torch.save({}, model / "pytorch_model.bin")
    (model / "modeling_evil.py").write_text("raise SystemExit")
    out = export(model, load_config("small"), home / "out")
    names = {path.name for path in out.iterdir()}
    assert "model.safetensors" in names and not any(
        name.endswith((".bin", ".py")) for name in names
    )
    assert json.loads((out / "export.json").read_text())["max_logprob_difference"] < 1e-4
    assert f"On {4 * 63} tokens" in (out / "README.md").read_text()


@pytest.mark.parametrize("noise", [0.01, 0.1, math.nan])
def test_an_export_that_computes_something_else_is_not_kept(home, monkeypatch, capsys, noise):
    """Rounding that is far out on one token is no other model: sums of 28 layers in another order
    are small on average, and above 1e-3 somewhere. Here the exported model's last norm is off by a
    share."""
    copy = room._copy

    def spoiled(source, target, patterns):
        copy(source, target, patterns)
        weights = load_file(target / "model.safetensors")
        weights["model.norm.weight"] = weights["model.norm.weight"] * (1 + noise)
        save_file(weights, target / "model.safetensors", metadata={"format": "pt"})

    monkeypatch.setattr(room, "_copy", spoiled)
    code, target = main("export"), home / "runs" / "laptop-grpo" / "export"
    if noise == 0.01:
        record = json.loads((target / "export.json").read_text())
        assert (
            code == 0
            and record["max_logprob_difference"] > 1e-3
            and record["mean_logprob_difference"] < 3e-4
        )
    else:
        assert code == 1 and "differ by" in capsys.readouterr().err
        assert not target.exists() and not list(home.rglob(".part*"))


def test_an_export_copies_nothing_from_outside_of_its_folder(tmp_path):
    """A downloaded model's merges.txt could be a link to a private key."""
    private = tmp_path / "private"
    private.write_text("-----BEGIN")
    model, target = tmp_path / "model", tmp_path / "target"
    target.mkdir()
    for name, place in [("merges.txt", private), ("vocab.json", Path("/dev/zero"))]:
        model.mkdir()
        (model / name).symlink_to(place)
        with fails_with("link_out", name):
            _copy(model, target, TOKENIZER_PATTERNS)
        shutil.rmtree(model)
    model.mkdir()
    os.mkfifo(model / "vocab.json")
    with pytest.raises(ValueError, match="not a regular file"):
        _copy(model, target, TOKENIZER_PATTERNS)
    assert list(target.iterdir()) == []


def test_an_export_copies_links_inside_and_those_of_the_hubs_cache(tmp_path):
    cache = tmp_path / "models--a--b"
    snapshot, target = cache / "snapshots/0123", tmp_path / "target"
    for folder in (snapshot, cache / "blobs", target):
        folder.mkdir(parents=True)
    (cache / "blobs/4567").write_text("{}")
    (snapshot / "vocab.json").symlink_to("../../blobs/4567")
    (snapshot / "merges.txt").symlink_to("vocab.json")
    _copy(snapshot, target, TOKENIZER_PATTERNS)
    assert {file.name: file.read_text() for file in target.iterdir()} == {
        "vocab.json": "{}",
        "merges.txt": "{}",
    }
    assert not any(file.is_symlink() for file in target.iterdir())


def test_upload(home, monkeypatch, capsys):
    import huggingface_hub

    calls = []

    class Hub:
        def create_repo(self, name, private, exist_ok):
            calls.append((name, private))
            return f"https://hub.example/{name}"

        def upload_folder(self, repo_id, folder_path, commit_message):
            if repo_id == "me/forbidden":
                raise huggingface_hub.errors.HfHubHTTPError("403 Forbidden", response=_forbidden())
            calls.append({path.name for path in folder_path.iterdir()})

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    assert main("export", "--push-to-hub", "me/agent") == 0
    assert "https://hub.example/me/agent" in capsys.readouterr().out
    assert (
        calls[0] == ("me/agent", True)
        and {"README.md", "model.safetensors", "agent_r1.yaml"} <= calls[1]
    )
    with fails_with("upload_failed"):
        push(home / "runs" / "laptop-grpo" / "export", "me/forbidden")


def _forbidden():
    import httpx

    return httpx.Response(403, request=httpx.Request("POST", "http://localhost"))


# ----------------------------------------------------------------------------------- shards of verl

TRAINER = """
import json, os, sys, torch, torch.distributed as dist
from pathlib import Path
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
folder, child = Path(sys.argv[1]), os.fork()  # the ranks share the seconds that the imports take
rank = int(child == 0)
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
ids = torch.tensor(json.loads((folder / "ids.json").read_text()))[None]
for name, dimensions, names in (
    ("qwen2", (2,), ("fsdp",)), ("llama", (2,), ("fsdp",)), ("replicas", (2, 1), ("ddp", "fsdp"))
):
    start, actor = folder / "start" / name, folder / name / "global_step_12" / "actor"
    model = AutoModelForCausalLM.from_pretrained(start)
    mesh = init_device_mesh("cpu", dimensions, mesh_dim_names=names)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    actor.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), actor / f"model_world_size_2_rank_{rank}.pt")
    torch.save(optimizer.state_dict(), actor / f"optim_world_size_2_rank_{rank}.pt")
    with torch.no_grad():
        logprobs = model(ids).logits.log_softmax(-1)
    if rank == 0:
        model.config.save_pretrained(actor / "huggingface")
        PreTrainedTokenizerFast.from_pretrained(start).save_pretrained(actor / "huggingface")
        torch.save(logprobs, folder / name / "logprobs.pt")
dist.barrier()
sys.exit(os.waitpid(child, 0)[1] if child else 0)
"""
"""Two ranks take a step with FSDP2 and save as verl's FSDPCheckpointManager does."""


@pytest.fixture(scope="module")
def shards(tmp_path_factory, agent_home):
    """NAME/global_step_12/ of three trainings in two ranks, beside what the trained model says of
    ids.json."""
    folder = tmp_path_factory.mktemp("elsewhere")
    for name in ("qwen2", "replicas", "llama"):
        shutil.copytree(checkpoint(agent_home) / "model", folder / "start" / name)
    small = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    small |= {
        "intermediate_size": 48,
        "vocab_size": 401,
        "max_position_embeddings": 512,
    }  # not even: two shards
    torch.manual_seed(0)
    llama = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("llama", **small, tie_word_embeddings=False)
    )
    llama.save_pretrained(folder / "start" / "llama")
    (folder / "ids.json").write_text(json.dumps(list(range(5, 45))))
    subprocess.run([sys.executable, "-c", TRAINER, str(folder)], check=True, timeout=120)
    (folder / "start").rename(folder / "gone")  # the shards travel alone
    return folder


def test_adapters_in_shards_are_merged(tmp_path):
    """The names that verl's FSDP state has: the base layer inside `base_layer`, the adapter called
    `default`."""
    generator = torch.Generator().manual_seed(0)
    base, A, B, norm = (
        torch.randn(size, generator=generator) for size in ((6, 4), (2, 4), (6, 2), (4,))
    )
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    state = {
        f"{layer}.base_layer.weight": base.bfloat16(),
        f"{layer}.lora_A.default.weight": A,
        f"{layer}.lora_B.default.weight": B,
        "base_model.model.model.norm.weight": norm,
    }
    torch.save(state, tmp_path / "model_world_size_1_rank_0.pt")
    merged = merge_shards(tmp_path)
    assert merged.keys() == {"model.layers.0.self_attn.q_proj.weight", "model.norm.weight"}
    assert torch.equal(merged["model.norm.weight"], norm)
    expected = base.bfloat16().float() + 2 * B @ A  # alpha / r is 2
    assert torch.allclose(merged["model.layers.0.self_attn.q_proj.weight"], expected, atol=1e-6)


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """Another machine: no run, no verl."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "verl"] + ["verl"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path / "home"))
    return tmp_path


def says(model, folder):
    """Largest difference between the log-probabilities of a model folder and those of the
    trainer."""
    ids = torch.tensor(json.loads((folder.parent / "ids.json").read_text()))[None]
    with torch.inference_mode():
        logprobs = AutoModelForCausalLM.from_pretrained(model)(ids).logits.log_softmax(-1)
    return (logprobs - torch.load(folder / "logprobs.pt", weights_only=True)).abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2", "llama", "replicas"])
def test_shards_of_verl_become_a_model_wherever_they_are(shards, bare, name, capsys):
    out = bare / "out"
    assert (
        main("export", "--checkpoint-dir", str(shards / name), "--target-dir", str(out)) == 0
    )  # the newest in there
    assert says(out, shards / name) < 1e-5 < says(shards / "gone" / name, shards / name)
    assert load_tokenizer(out).chat_template and find_model(hf_path=str(out))[0] == out
    # Whose training it was is not known, so nothing is said of it.
    assert (
        not (out / "agent_r1.yaml").exists() and "Algorithm" not in (out / "README.md").read_text()
    )
    assert (
        main(
            "export",
            "--checkpoint-dir",
            str(shards / name / "global_step_12/actor"),
            "--target-dir",
            str(out),
        )
        == 0
    )
    assert "already done" in capsys.readouterr().out


@pytest.mark.slow
def test_shards_without_their_shape_ask_for_it(shards, bare, capsys):
    actor = bare / "global_step_12" / "actor"
    shutil.copytree(shards / "qwen2" / "global_step_12" / "actor", actor)
    (actor / "huggingface" / "tokenizer.json").unlink()
    options = "export", "--checkpoint-dir", str(actor.parent), "--target-dir", str(bare / "out")
    assert (
        main(*options) == 1
        and "has no tokenizer.json" in (said := capsys.readouterr().err)
        and "--base-model" in said
    )
    assert main(*options, "--base-model", str(shards / "gone" / "qwen2")) == 0
    assert says(bare / "out", shards / "qwen2") < 1e-5
    (actor / "model_world_size_2_rank_1.pt").unlink()
    assert (
        main(*options, "--base-model", str(shards / "gone" / "qwen2")) == 1
        and "1 shards" in capsys.readouterr().err
    )


@pytest.mark.slow
def test_shards_that_were_written_on_gpus_are_read_without_one(shards, bare):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    step = bare / "global_step_12"
    shutil.copytree(shards / "qwen2" / "global_step_12", step)
    for rank, file in enumerate(sorted((step / "actor").glob("model_*.pt"))):
        mesh = DeviceMesh("cuda", torch.arange(2), _init_backend=False, _rank=rank)
        parts = {
            name: DTensor(
                part.to_local(),
                DTensorSpec(mesh, part.placements, part._spec.tensor_meta),
                requires_grad=False,
            )
            for name, part in torch.load(file, weights_only=True).items()
        }
        torch.save(parts, file)
    assert (
        main("export", "--checkpoint-dir", str(step)) == 0
        and says(bare / "export", shards / "qwen2") < 1e-5
    )
