"""The presets for GPUs and the arithmetic of their plan (plan.py), compared with figures worked out
by hand, with `transformers`, with published steps and with the table in docs/presets.md. No GPU and
no download is needed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import transformers

from agent_r1.cluster import gpu_check, launch, plan, serve
from agent_r1.cluster.hardware import GPUS, find_gpu  # fmt: skip
from agent_r1.cluster.plan import (  # fmt: skip
    GIB,
    SLOWER,
    conversations,
    gpu_memory,
    misfits,
    run_hours,
    step_seconds,
)
from agent_r1.config import Config, load_config, preset_names
from agent_r1.data.source import source_of
from agent_r1.ground import machine
from agent_r1.ground.errors import AgentR1Error, ConfigError
from agent_r1.ground.preflight import GpuHere
from agent_r1.ground.shapes import MODELS, Shape, find_shape  # fmt: skip

ROOT = Path(__file__).parents[1]
GPU_PRESETS = [name for name in preset_names() if load_config(name, algorithm="ppo").verl.gpu]
MATHS = ("gsm8k", "dapo-math")
"""These have no evidence to find, and longer turns."""
PUBLISHED = json.loads((ROOT / "benchmarks" / "published_steps.json").read_text())
LARGE = MODELS["Qwen/Qwen2.5-7B-Instruct"]


def preset(name: str, *settings: str, algorithm: str = "grpo") -> tuple[Config, Shape]:
    config = load_config(name, list(settings), algorithm=algorithm)
    return config, MODELS[config.model.path]


# -------------------------------------------------------------------------------------- the presets


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
@pytest.mark.parametrize("name", GPU_PRESETS)
def test_a_preset_fits_the_gpu_and_the_data_that_it_names(name, algorithm):
    config, shape = preset(name, algorithm=algorithm)
    assert misfits(config, shape, find_gpu(config.verl.gpu)) == []
    assert config.data.train + config.data.val <= source_of(config.data).counts["train"]


def test_what_the_outermost_file_says_wins_over_an_inherited_section(tmp_path, monkeypatch):
    (tmp_path / "a.yaml").write_text(
        "seed: 3\nrollout: {max_concurrent_episodes: 3}\nppo: {rollout: {max_concurrent_episodes: "
        "5}, critic: {lr: 0.25}}\n"
    )
    (tmp_path / "b.yaml").write_text("extends: a\nrollout: {max_concurrent_episodes: 7}\n")
    (tmp_path / "c.yaml").write_text(
        "extends: b\nsteppo: {rollout: {max_concurrent_episodes: 9}}\n"
    )
    presets = {file.stem: file for file in tmp_path.glob("*.yaml")}
    monkeypatch.setattr("agent_r1.config.presets.preset_files", lambda: presets)
    slots = {
        name: [
            load_config(name, algorithm=a).rollout.max_concurrent_episodes
            for a in ("grpo", "ppo", "steppo")
        ]
        for name in "abc"
    }
    assert slots == {"a": [3, 5, 5], "b": [7, 7, 7], "c": [7, 7, 9]}
    inherited = load_config("c", algorithm="steppo")
    assert (inherited.seed, inherited.critic.lr, inherited.preset) == (3, 0.25, "c")
    assert (
        load_config(
            "b", ["rollout.max_concurrent_episodes=11"], algorithm="ppo"
        ).rollout.max_concurrent_episodes
        == 11
    )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["verl.nodes=3"], "must be a multiple of verl.nodes=3"),
        (
            ["rollout.max_context=40000", "trainer.max_tokens_per_microbatch=40000"],
            "more than the model's 32768 positions",
        ),
        (["verl.tensor_parallel=4", "model.path=Qwen/Qwen2.5-0.5B-Instruct"], "14 attention heads"),
        (["verl.gpu=H1000"], "did you mean 'H100'"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(settings, said):
    with pytest.raises(ConfigError, match=said):
        load_config("hotpotqa-4xh100", settings, algorithm="grpo")


def test_several_machines_share_a_ray_of_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    several = load_config("hotpotqa-8xh100", ["verl.nodes=2"], algorithm="grpo")
    alone = load_config("hotpotqa-8xh100", algorithm="grpo")
    assert (
        launch.driver_environment(several, "cuda", "mark", tmp_path)["RAY_ADDRESS"]
        == "10.0.0.1:6379"
    )
    assert "RAY_AUTH_TOKEN_PATH" not in launch.driver_environment(several, "cuda", "mark", tmp_path)
    assert "RAY_ADDRESS" not in launch.driver_environment(
        alone, "cuda", "mark", tmp_path
    )  # never another Ray by accident
    for name in machine.ALLOCATOR:  # expandable segments: vLLM's sleep breaks on them
        monkeypatch.setenv(name, "expandable_segments:True")
    given = launch.driver_environment(alone, "cuda", "mark", tmp_path) | serve._environment(
        "key", 4
    )
    assert not machine.ALLOCATOR & given.keys() and "PATH" in given
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    with pytest.raises(ConfigError, match="set RAY_ADDRESS"):
        launch.check_runnable(several, "cuda", tmp_path)
    with pytest.raises(ConfigError, match="verl.ranks=8 needs as many GPUs, and 4 are here"):
        launch.check_runnable(alone, "cuda", tmp_path)


# ---------------------------------------------------------------------------------- models and GPUs


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen3-1.7B"])
def test_parameters_are_those_that_transformers_builds(name):
    """On the meta device: shapes, and not a byte of weights. Norms and biases are what the closed
    form leaves out."""
    s = MODELS[name]
    kind = transformers.Qwen3Config if "Qwen3" in name else transformers.Qwen2Config
    config = kind(
        num_hidden_layers=s.layers,
        hidden_size=s.hidden,
        num_attention_heads=s.heads,
        num_key_value_heads=s.kv_heads,
        intermediate_size=s.intermediate,
        vocab_size=s.vocab,
        tie_word_embeddings=s.tied,
        **({"head_dim": s.head_dim} if "Qwen3" in name else {}),
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert s.parameters == pytest.approx(model.num_parameters(), rel=2e-4)
    cache = transformers.DynamicCache(config=config)
    with torch.device("meta"), torch.no_grad():
        model.to(torch.bfloat16)(torch.zeros(1, 10, dtype=torch.long), past_key_values=cache)
    keys = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert keys == 10 * s.cache


def test_a_local_folder_speaks_for_itself(tmp_path):
    raw = {
        "num_hidden_layers": 28,
        "hidden_size": 3584,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
        "max_position_embeddings": 32768,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert find_shape("my/own", tmp_path) == LARGE
    assert find_shape("Qwen/Qwen2.5-7B-Instruct@main", tmp_path / "nowhere") == LARGE
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="did you mean 'Qwen/Qwen2.5-7B-Instruct'"):
        find_shape("Qwen/Qwen2.5-7B-instruct", tmp_path)


# --------------------------------------------------------------------------------------------- time


def test_a_step_by_hand():
    """hotpotqa-4xh100, 640 episodes of 450 + 3 x 120 + 2 x 425 = 1,660 tokens, Qwen2.5-1.5B: 1.5436
    B weights."""
    seconds = step_seconds(*preset("hotpotqa-4xh100"), GPUS["H100"])
    # 2 x 1.5436e9 and, for attention, 2 x 28 x 12 x 128 x 1660 = 0.1428e9 operations a token,
    # 3.230e9; times 1,062,400 tokens is 3.431e15. 989e12 x .4 x sqrt(1536 / 4096) = 2.422e14 a
    # second on each of four: 3.54 s.
    assert seconds["log-probabilities"] == seconds["reference"] == pytest.approx(3.54, abs=0.01)
    assert seconds["actor's update"] == pytest.approx(14.17, abs=0.02)
    # 160 episodes a server; the longest says 1,440 tokens, so on average 40 decode together. Each
    # token reads 3.087e9 bytes of weights and 40 x 1,055 x 28,672 of cache, at 2.01e12 a second:
    # 2.14 ms, and 6 ms beside that.
    assert seconds["sampling: decoding"] == pytest.approx(1440 * 0.00814, abs=0.02)
    assert seconds["sampling: tools, turns"] == 5 and seconds["weight sync"] == pytest.approx(
        3.62, abs=0.01
    )
    hours = run_hours(*preset("hotpotqa-4xh100"), seconds)
    assert hours["training"] == pytest.approx(200 * sum(seconds.values()) / 3600)
    # 2 x (7,405 + 1,000) questions are 26.3 steps' episodes, of 18.7 s each
    assert hours["evaluations"] == pytest.approx(26.27 * 18.7 / 3600, rel=0.01)


@pytest.mark.parametrize("case", PUBLISHED, ids=lambda case: case["name"])
def test_published_steps(case, monkeypatch):
    """Within a factor of 1.5 where lengths were published with the times. For this very task only
    hours of 2025 are known, without lengths: the plan's range must hold them."""
    work, task = case["work"], case.get("task")
    monkeypatch.setattr(plan, "STEP_S", 0)  # those times are of other stacks
    if not task:  # one turn, of the published length
        turns = {"PROMPT_TOKENS": work["prompt"], "EPISODE_TURNS": 1, "TURN_TOKENS": work["said"]}
        turns["LONGEST"] = work["longest"] / work["said"]
        for name, value in turns.items():
            monkeypatch.setattr(plan, name, value)
    config = load_config("hotpotqa-4xh100", algorithm="ppo" if work.get("critic") else "grpo")
    samples = work["episodes"] // work["groups"]
    config.rollout.prompts_per_step, config.rollout.samples_per_prompt = work["groups"], samples
    config.rollout.max_tokens_per_turn = 4096
    config.verl.ranks, config.verl.tensor_parallel = case["ranks"], case["tensor_parallel"]
    if not task:
        config.env.max_turns = 1
    seconds = step_seconds(config, Shape(*case["shape"]), GPUS[case["gpu"]])
    seconds["step"] = sum(seconds.values())
    least, most = (1, SLOWER) if task else (1 / 1.5, 1.5)
    for part, measured in case["seconds"].items():
        assert least < measured / seconds[part] < most, (part, seconds)


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("first-agent-1xh100", [], "all steps are done before"),
        ("hotpotqa-1x80gb", [], "--resume is needed up to 1 time"),
        # On A100s a step takes up to four times the computed time, on H100s up to twice.
        ("hotpotqa-4xh100", ["verl.gpu=A100-80GB"], "--resume is needed up to 1 time"),
        ("hotpotqa-4xh100", ["trainer.max_hours=1"], "--resume is needed 2 to 5 times"),
        ("hotpotqa-4xh100", ["trainer.max_hours=0"], "no limit"),
    ],
)
def test_the_plan_compares_its_hours_with_the_limit(name, settings, said):
    page = plan.gpu_plan(load_config(name, settings, algorithm="grpo"))
    [line] = [line for line in page.splitlines() if line.startswith("limit")]
    assert said in line


def test_fixed_seconds_of_a_small_step_are_those_of_a_tiny_models_step():
    """13 fixed seconds made a step of 48 episodes three times as long as it is."""
    assert plan.share_of_fixed_seconds(256, 13.0) == plan.share_of_fixed_seconds(640, 13.0) == 1
    assert 13 * plan.share_of_fixed_seconds(48, 13.0) == pytest.approx(2.7)
    assert 13 * plan.share_of_fixed_seconds(128, 13.0) == pytest.approx(6.5)
    assert plan.share_of_fixed_seconds(8, 2.0) == 1


def test_calls_with_resume_by_hand():
    """12 hours take one call of 12, and one more from the first minute after them."""
    assert [plan.resume_count(hours, 12) for hours in (1, 12, 12.1, 24, 25)] == [0, 0, 1, 1, 2]


def test_a_plan_for_other_cards_than_these_says_so(monkeypatch):
    config = load_config("hotpotqa-4xh100", algorithm="grpo")
    card = GpuHere("NVIDIA A100-SXM4-80GB", 81920, "580.65", 8.0)
    monkeypatch.setattr(plan, "gpus_here", lambda: [card] * 4)
    assert "4 x NVIDIA A100-SXM4-80GB, 80 GiB; verl.gpu=A100-80GB plans" in plan.gpu_plan(config)
    monkeypatch.setattr(plan, "gpus_here", lambda: [])
    assert "plans for that" not in plan.gpu_plan(config)


def test_the_range_of_hours_depends_on_the_card():
    assert [plan.slower(name) for name in ("H100", "H200", "A100-80GB", "L4")] == [2, 2, 4, 4]
    page = plan.gpu_plan(load_config("hotpotqa-4xh100", algorithm="grpo"))
    assert "1 to 2 times the computed time" in page


# ------------------------------------------------------------------------------------------- memory


def test_a_conversion_that_host_memory_cannot_hold_is_refused(monkeypatch, tmp_path):
    """One process merges the shards of Qwen3-32B: 32.76 B weights in float32 are 122 GiB."""
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path))
    config = load_config("hotpotqa-8xh100", ["model.path=Qwen/Qwen3-32B"])
    monkeypatch.setattr(plan, "total_memory", lambda: 128 * GIB)
    with pytest.raises(AgentR1Error, match="merged by one process, which needs 136 GiB"):
        plan.check_conversion(config)
    monkeypatch.setattr(plan, "total_memory", lambda: 256 * GIB)
    plan.check_conversion(config)
    plan.check_conversion(load_config("hotpotqa-4xh100"))


def test_a_model_made_from_nothing_has_a_plan_on_gpus():
    """gpu-check trains one; no table and no folder has its sizes."""
    plan.check_conversion(gpu_check.small(load_config("first-agent-1xh100")))
    page = plan.gpu_plan(load_config("small", ["engine=verl", "verl.gpu=H100"], algorithm="grpo"))
    assert "GPU-hours" in page


def test_vllm_on_a_gpu_needs_no_compiler_of_cuda(monkeypatch, tmp_path):
    """FlashInfer's sampler looks for nvcc when vLLM starts; a machine with a driver may lack it."""
    name = "VLLM_USE_FLASHINFER_SAMPLER"
    config = load_config("first-agent-1xh100", algorithm="grpo")

    def given(device):
        return launch.driver_environment(config, device, "mark", tmp_path)

    assert serve._environment("key", 1)[name] == given("cuda")[name] == "0"
    assert name not in given("cpu")
    monkeypatch.setenv(name, "1")
    assert serve._environment("key", 1)[name] == given("cuda")[name] == "1"


def test_memory_by_hand():
    """GiB, of Qwen2.5-1.5B's 1.5436 B weights on one GPU of 80: 12 bytes each are 17.25, 4 are
    5.75."""
    config, shape = preset("hotpotqa-1x80gb", algorithm="ppo")
    rows = {
        n: (a / GIB, b / GIB) for n, (a, b) in gpu_memory(config, shape, GPUS["A100-80GB"]).items()
    }
    assert (
        rows["actor: weights, Adam"]
        == rows["critic: weights, Adam"]
        == pytest.approx((17.25, 17.25), abs=0.01)
    )
    assert rows["gradients"] == pytest.approx((0, 5.75), abs=0.01)
    assert rows["gathered embeddings, layer"] == pytest.approx(
        (0, 1.04), abs=0.01
    )  # 4 x (151,936 x 1,536 + 46.8 M)
    assert rows["logits of 8,192 tokens"] == pytest.approx(
        (0, 9.27), abs=0.01
    )  # 8 x 8,192 x 151,936 bytes
    assert rows["vLLM: weights, cache, work"] == pytest.approx((24, 0))  # .3 of 80
    assert not any(
        "reference" in name for name in rows
    )  # verl keeps it in host memory, layer by layer on the GPU
    assert sum(a for a, _ in rows.values()) == pytest.approx(17.25 * 2 + 24 + 0.87 + 3, abs=0.02)
    # 24 GiB less 2.88 of weights and 2 of work, over 28 KiB a token and 8,192 tokens a conversation
    assert conversations(config, shape, GPUS["A100-80GB"]) == pytest.approx(
        19.12 * 2**30 / (28 * 2**10 * 8192), rel=1e-3
    )


# ----------------------------------------------------------------------------------------- the page


def test_the_plan_counts_adapters_and_not_the_frozen_weights():
    settings = ["model.path=Qwen/Qwen2.5-1.5B-Instruct", "actor.kl_coef=0"]
    whole, thin = (
        gpu_memory(*preset("hotpotqa-1x80gb", *settings, f"actor.lora_rank={rank}"), GPUS["H100"])
        for rank in (0, 32)
    )
    shape = MODELS["Qwen/Qwen2.5-1.5B-Instruct"]
    adapters = shape.count_trained_weights(32)
    assert whole["actor: weights, Adam"][1] == 12 * shape.parameters
    assert thin["actor: weights, Adam"][1] == 4 * shape.parameters + 8 * adapters
    assert thin["gradients"][1] == 4 * adapters < whole["gradients"][1] / 20


def test_the_table_of_the_page_is_what_is_computed():
    page = (ROOT / "docs" / "presets.md").read_text()
    rows = re.findall(r"^\| ((?:`[\w-]+`(?:, )?)+) \| (\d x .+) \|$", page, re.MULTILINE)
    shown = [(name, cells) for names, cells in rows for name in re.findall(r"`(.+?)`", names)]
    assert sorted(name for name, _ in shown) == sorted(
        name for name in GPU_PRESETS if name not in MATHS
    )
    for name, cells in shown:
        first = load_config(name, algorithm="grpo")
        hardware, own, *fits = (cell.strip() for cell in cells.split("|"))
        assert hardware == f"{first.verl.ranks} x {first.verl.gpu}"
        assert own == first.model.path.removeprefix("Qwen/")
        for model, said in zip(MODELS, fits, strict=True):
            for algorithm in ("grpo", "ppo"):
                config, shape = preset(name, f"model.path={model}", algorithm=algorithm)
                assert (said in (algorithm, "both")) == (
                    not misfits(config, shape, find_gpu(config.verl.gpu))
                ), (
                    name,
                    model,
                )
