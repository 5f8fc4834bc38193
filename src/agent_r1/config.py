"""One configuration: dataclasses whose fields document themselves, presets in YAML, overrides from the command line.

Order, later wins:  defaults here  <-  presets/NAME.yaml  <-  its `ppo:` or `grpo:` section  <-  `section.key=value`.
A preset may say that it `extends` another one.
OmegaConf checks names and types; what it says is turned into one line that names the nearest valid key. `check`
refuses what no run can do, with the remedy, before any minute is spent.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import resources
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from agent_r1 import hub
from agent_r1.errors import ConfigError, nearest
from agent_r1.sizes import check_context, find_gpu, known_model


def added(default: Any) -> Any:
    """A field that came after the first release. At its default it does not change a `fingerprint`: what was made before
    the field existed keeps its name."""
    return field(default=default, metadata={"counts": "when set"})


def aside(default: Any) -> Any:
    """A field that no weight depends on: where a run is logged, how often it is measured, who answers its searches. It
    never counts in a `fingerprint`, so a run may be resumed with another value."""
    settings = {"default_factory": list} if default == [] else {"default": default}
    return field(**settings, metadata={"counts": "never"})


@dataclass
class DataConfig:
    """Questions and their world (room 1)."""

    name: str = "tinyhop"
    """tinyhop (a synthetic world, generated on the spot) | hotpotqa | hotpotqa-fullwiki | twowiki | musique."""
    train: int = 4000
    """Questions to train on."""
    val: int = 200
    """Questions for the curve during training."""
    test: int = 500
    """Held-out questions for the evaluation before and after; 0: the whole validation set (not with tinyhop)."""
    entities: int = 600
    """Entities in the training world; the val and test worlds are scaled to their number of questions."""
    cold: int = 6000
    """Questions for the cold start's demonstrations, from a world of their own; half of them are one-hop. Of published
    data sets the training questions, as often as it takes, each time under other names."""
    cold_entities: int = 1800
    """Entities in that world. Many, because copying is learnt from the variety of names."""
    mix: dict[str, float] = field(
        default_factory=lambda: {"1-hop": 0.2, "2-hop": 0.4, "3-hop": 0.2, "yes-no": 0.1, "which": 0.1}
    )
    """Share of each kind of question."""
    source: str | None = added(None)
    """Real data sets only: a folder with the published files, or one such file, instead of the Hugging Face hub."""
    corpus: str = added("contexts")
    """Real data sets only: contexts (the questions' own paragraphs) | beir-hotpotqa (5.2 M abstracts) | kilt (the whole
    Wikipedia of 2019) | a JSONL file."""
    skip_bad: bool = added(False)
    """Leave corrupt records out instead of refusing the file."""


@dataclass
class SearchConfig:
    """Corpus to passages (room 2)."""

    encoder: str = "ngram"
    """`ngram` needs no download; anything else is a sentence-transformers model name such as BAAI/bge-small-en-v1.5."""
    dim: int = 2048
    """Width of the hashed n-gram vectors."""
    top_k: int = 3
    """Passages in one search result."""
    index: str = added("auto")
    """auto (by corpus size and free memory) | a FAISS factory string: Flat, HNSW32, IVF4096,PQ64 and the like |
    hub:OWNER/NAME[@REVISION] (one that somebody has built and published)."""
    url: str | None = aside(None)
    """Where `agent-r1 search-server` answers, such as http://127.0.0.1:8100; unset: search in this process."""


@dataclass
class EnvConfig:
    """What the agent lives in (rooms 3, 4 and 6)."""

    name: str = "hermes"
    """Environment by name; it is written into each row as `agent_name`."""
    tools: list[str] = field(default_factory=lambda: ["search"])
    """Tools by name."""
    max_turns: int = 5
    """Assistant turns in an episode, the answer included."""
    max_tool_calls: int = 6
    """Tool calls in an episode; one more ends it."""
    max_invalid_calls: int = 2
    """Invalid calls in a row that end an episode."""
    tool_timeout_s: float = 10.0
    """Deadline of one tool call, in seconds."""
    tool_max_chars: int = 4000
    """Longest text that a tool may put into the context."""
    episode_timeout_s: float = 300.0
    """Wall-clock budget of one episode, in seconds."""
    format_penalty: float = 0.2
    """Taken from the outcome when the episode did not end in a well-formed <answer>."""
    call_reward: float = 0.0
    """Process reward of a valid tool call that was not made before (its negative for an invalid one); 0 is off."""
    evidence_reward: float = added(0.0)
    """Paid for the share of the question's supporting titles among all that the episode's searches found. The share is
    measured wherever a data set names such titles (HotpotQA, 2WikiMultihopQA, MuSiQue); 0 pays nothing for it."""


@dataclass
class ModelConfig:
    """The policy. With `path` unset, a tiny Qwen2-architecture model is made from nothing."""

    path: str | None = None
    """Instead of the tiny model: a folder in Hugging Face's format, or OWNER/NAME[@REVISION] on the hub."""
    vocab_size: int = 1024
    """Tokens of the local BPE, special tokens included."""
    hidden_size: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 4
    intermediate_size: int = 256
    max_position: int = 1024


@dataclass
class ColdStartConfig:
    """Behaviour cloning of an imperfect demonstrator, so that RL has something to reinforce (room 7)."""

    copy_steps: int = 600
    """Phase (a): optimiser steps on clean one-hop episodes; here the model learns to copy names from what it has read."""
    copy_tokens: int = 1024
    """Tokens in one step of phase (a). Small: the many updates are what makes the copying circuit form."""
    mix_steps: int = 600
    """Phase (b): optimiser steps on the imperfect demonstrator's episodes."""
    mix_tokens: int = 2048
    """Tokens in one step of phase (b)."""
    lr: float = 1.5e-3
    """Peak learning rate of both phases."""
    behaviours: dict[str, float] = field(
        default_factory=lambda: {
            "good": 0.24,
            "stop_early": 0.38,
            "guess": 0.12,
            "bad_query": 0.18,
            "wrong_entity": 0.08,
        }
    )
    """How often the demonstrator of phase (b) does what; the names are explained in training/cold_start.py."""


@dataclass
class RolloutConfig:
    """How episodes are sampled (room 5)."""

    prompts_per_step: int = 16
    """Different questions in one RL step."""
    samples_per_prompt: int = 8
    """Episodes for each question: GRPO's group size. PPO works with 1."""
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens_per_turn: int = 64
    max_context: int = 512
    """Tokens of a whole conversation."""
    slots: int = 128
    """Episodes that decode side by side (rows of the KV cache)."""


@dataclass
class AdvantageConfig:
    """Credit assignment (training/advantages.py)."""

    gamma: float = 1.0
    """Discount per action token."""
    lam: float = 1.0
    """GAE's lambda."""
    normalize_std: bool = True
    """GRPO: divide by the group's standard deviation (False is Dr. GRPO). PPO: whiten advantages over the batch."""


@dataclass
class ActorConfig:
    """The policy's update (training/losses.py)."""

    lr: float = 3e-4
    lr_final: float = 0.1
    """The learning rate falls linearly to this share of `lr` at the last step."""
    warmup_steps: int = 0
    minibatches: int = 2
    """Optimiser steps that one batch of trajectories is cut into."""
    epochs: int = 1
    """Passes over one batch of trajectories."""
    clip_low: float = 0.2
    """PPO's clip on the side where the ratio falls."""
    clip_high: float = 0.28
    """... and where it rises: higher, so that rare good tokens may grow (clip-higher, DAPO section 3.1)."""
    clip_dual: float = 3.0
    """Bound on the loss of a negative advantage (dual clip); at most 1 switches it off."""
    loss_aggregation: str = "token-mean"
    """token-mean | seq-mean-token-mean | seq-mean-token-sum | seq-mean-token-sum-norm."""
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    """Weight of the KL to the model that RL started from; 0 needs no reference model."""
    kl_estimator: str = "k3"
    """k1 | k2 | k3 (Schulman, Approximating KL Divergence): k1 in the reward, k2 or k3 in the loss."""
    kl_in: str = "loss"
    """`loss` adds a term to the loss, `reward` takes it from each action token's reward."""
    grad_clip: float = 1.0
    weight_decay: float = 0.0
    mask_tool_tokens: bool = True
    """False puts tool tokens into the policy loss: the ablation of docs/laptop.md, never what you want."""
    ablation_normalizer: str = "masked"
    """With mask_tool_tokens=false: `masked` divides by all tokens in the loss, `agent` by agent tokens only."""


@dataclass
class CriticConfig:
    """The value model of PPO."""

    lr: float = 1e-3
    warmup_steps: int = 5
    """RL steps in which only the critic learns, because early values are noise."""
    value_clip: float = 0.5
    """Values may move this far from the sampled ones within one batch."""
    minibatches: int = 2
    epochs: int = 1
    grad_clip: float = 1.0


@dataclass
class TrainerConfig:
    """The run."""

    steps: int = 100
    """RL steps."""
    max_hours: float = aside(0.0)
    """End with a checkpoint before so many hours are over, for a machine that is rented by the hour or taken away (0: no
    limit). `--resume` goes on."""
    eval_every: int = aside(10)
    """Steps between evaluations on val (0: never)."""
    save_every: int = aside(10)
    """Steps between checkpoints; the last step is always saved."""
    keep_checkpoints: int = aside(2)
    """Older checkpoints are deleted."""
    rollouts_every: int = aside(10)
    """Steps between dumps of full trajectories into rollouts/."""
    loggers: list[str] = aside([])
    """Any of wandb, tensorboard. metrics.jsonl and the dashboard are always there."""
    device: str = "auto"
    """auto | cpu | cuda."""
    dtype: str = "auto"
    """auto (float32 on a CPU, bfloat16 on CUDA) | float32 | bfloat16."""
    threads: int = 0
    """CPU threads for PyTorch; 0 takes every core."""
    micro_tokens: int = 8192
    """Largest padded batch (rows x longest row) in one forward and backward pass."""


@dataclass
class VerlConfig:
    """The executor `--engine verl` (room 8); without effect on the local loop."""

    ranks: int = added(1)
    """Training processes that share the model (FSDP2): on GPUs one each, on a CPU just processes."""
    tensor_parallel: int = aside(1)
    """GPUs that one vLLM server spans."""
    agent_workers: int = aside(1)
    """Processes that run episodes."""
    gpu_memory: float = aside(0.5)
    """Share of a GPU's memory for vLLM, beside the trainer."""
    patience_s: int = aside(600)
    """A run in which nothing has moved for so long, starting up included, is ended."""
    nodes: int = aside(1)
    """Machines that the ranks are spread over; with several, RAY_ADDRESS names the head of a Ray that runs on all."""
    offload: bool = aside(False)
    """Keep weights and optimizer in host memory while their network is not at work: slower, for small GPUs."""
    tis_cap: float | None = added(None)
    """vLLM and the trainer round differently, so a token's loss is weighted by min(trainer's probability / vLLM's, this):
    truncated importance sampling (TIS). Unset: 2 in bfloat16, off in float32. 0: off."""
    gpu: str | None = aside(None)
    """The GPU that the preset is sized for, such as H100; the plan is for it unless this machine has enough others."""


@dataclass
class Config:
    """Everything a run depends on. `agent-r1 train --dry-run` prints it resolved."""

    preset: str = "laptop"
    algorithm: str = "ppo"
    """grpo | ppo: estimator, critic and the preset's section of that name."""
    engine: str = "local"
    seed: int = 0
    data: DataConfig = field(default_factory=DataConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    cold_start: ColdStartConfig = field(default_factory=ColdStartConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    verl: VerlConfig = field(default_factory=VerlConfig)


ALGORITHMS = ("grpo", "ppo")
ENGINES = ("local", "verl")


def preset_names() -> list[str]:
    """Names that `--preset` accepts."""
    return sorted(p.name.removesuffix(".yaml") for p in _preset_dir().iterdir() if p.name.endswith(".yaml"))


def load_config(
    preset: str, overrides: list[str] | None = None, *, algorithm: str | None = None, seed: int | None = None
) -> Config:
    """Resolve a configuration.

    `overrides` are `section.key=value` strings; values are YAML. Raises ConfigError naming the key and its nearest match.
    """
    overrides = list(overrides or [])
    if algorithm is not None:
        overrides.append(f"algorithm={algorithm}")
    if seed is not None:
        overrides.append(f"seed={seed}")
    path = _preset_dir() / f"{preset}.yaml"
    if preset not in preset_names():
        raise ConfigError(
            f"unknown preset {preset!r}{nearest(preset, preset_names())}; choose from {', '.join(preset_names())}"
        )

    def layers(cli: DictConfig) -> list:
        base = _read_preset(path)
        per_algorithm = {name: base.pop(name, {}) for name in ALGORITHMS}
        chosen = str(cli.get("algorithm", base.get("algorithm", Config.algorithm)))
        return [OmegaConf.structured(Config), base, per_algorithm.get(chosen, {}), {"preset": preset}]

    return _resolve(layers, overrides)


def changed(config: Config, overrides: list[str]) -> Config:
    """`config` with `section.key=value` strings on top. Raises ConfigError as `load_config` does."""
    return _resolve(lambda cli: [OmegaConf.structured(config)], overrides)


def _resolve(layers: Callable[[DictConfig], list], overrides: list[str]) -> Config:
    """The layers below the command line's, and that on top of them."""
    for item in overrides:
        if "=" not in item:
            raise ConfigError(f"override {item!r} is not of the form section.key=value (for example trainer.steps=20)")
    try:
        cli = OmegaConf.from_dotlist(overrides)
        stack = [*layers(cli), cli]
        merged = OmegaConf.merge(*stack)
        for layer in stack[1:]:
            _replace_tables(merged, layer)
        config: Config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(_explain(error)) from None
    except (yaml.YAMLError, IndexError, TypeError):  # the command line's fault: an open bracket, a list for a table
        said = ", ".join(map(repr, overrides))
        raise ConfigError(f"an override is of a wrong type, or not valid YAML: {said}") from None
    check(config)
    return config


def _read_preset(path) -> DictConfig:
    """A preset; one that `extends` another says only what differs."""
    preset = OmegaConf.create(path.read_text())
    if parent := preset.pop("extends", None):
        preset = OmegaConf.merge(_read_preset(_preset_dir() / f"{parent}.yaml"), preset)
    return preset


def check(config: Config) -> None:
    """Refuse what no run can do. Raises ConfigError with cause and remedy."""
    if config.algorithm not in ALGORITHMS:
        raise ConfigError(
            f"unknown algorithm {config.algorithm!r}{nearest(config.algorithm, ALGORITHMS)}; choose grpo or ppo"
        )
    if config.engine not in ENGINES:
        raise ConfigError(f"unknown engine {config.engine!r}; choose from {', '.join(ENGINES)}")
    for key, (least, most) in BOUNDS.items():
        value = attrgetter(key)(config)
        if not least <= value <= most:  # NaN lies nowhere
            wrong = "too small" if value < least else "too large" if value > most else "no number"
            limits = f"at least {least}" + (f" and at most {most}" if most < math.inf else "")
            raise ConfigError(f"{key}={value} is {wrong}; it must be {limits}")
    for key in ("data.mix", "cold_start.behaviours"):
        shares = attrgetter(key)(config).values()
        if not (all(0 <= share < math.inf for share in shares) and sum(shares) > 0):
            raise ConfigError(f"{key}: shares must be at least 0, and one of them more")
    r, a, m = config.rollout, config.actor, config.model
    if r.top_p != 1:
        raise ConfigError(
            f"rollout.top_p={r.top_p}: what is cut off is not sampled, and the trainer's log-probabilities know of no cut; "
            "leave it at 1"
        )
    if not a.mask_tool_tokens and a.kl_coef:
        raise ConfigError("actor.mask_tool_tokens=false is an ablation without a KL; set actor.kl_coef=0")
    if m.path is None and (m.hidden_size % (2 * m.heads) or m.heads % m.kv_heads):
        raise ConfigError(
            f"model.hidden_size={m.hidden_size} must be a multiple of 2 x model.heads={m.heads}, and model.heads one of "
            f"model.kv_heads={m.kv_heads}"
        )
    if config.algorithm == "grpo" and r.samples_per_prompt < 2:
        raise ConfigError(
            "grpo compares samples of one prompt and has nothing to learn from a group of one; "
            "set rollout.samples_per_prompt to 2 or more, or use ppo"
        )
    batch = r.prompts_per_step * r.samples_per_prompt
    for name, count in (("actor", a.minibatches), ("critic", config.critic.minibatches)):
        if count < 1 or batch % count:
            raise ConfigError(
                f"a batch of {r.prompts_per_step} prompts x {r.samples_per_prompt} samples = {batch} trajectories does not "
                f"divide into {name}.minibatches={count}; choose a divisor of {batch}"
            )
    if r.prompts_per_step > config.data.train:
        raise ConfigError(
            f"rollout.prompts_per_step={r.prompts_per_step} is more than data.train={config.data.train} questions; "
            "raise the second or lower the first"
        )
    _check_search(config)
    if config.env.call_reward * config.env.max_tool_calls >= 1:
        raise ConfigError(
            f"env.call_reward={config.env.call_reward:g} pays {config.env.max_tool_calls} calls (env.max_tool_calls) as much "
            f"as a right answer; set it below {1 / config.env.max_tool_calls:.2g}"
        )
    if r.max_tokens_per_turn >= r.max_context:
        raise ConfigError("rollout.max_tokens_per_turn must be smaller than rollout.max_context")
    if config.model.path is None and r.max_context > config.model.max_position:
        raise ConfigError(
            f"rollout.max_context={r.max_context} is larger than the model's model.max_position={config.model.max_position}"
        )
    choices = {
        "data.name": (config.data.name, DATASETS),
        "actor.loss_aggregation": (a.loss_aggregation, LOSS_AGGREGATIONS),
        "actor.kl_estimator": (a.kl_estimator, KL_ESTIMATORS),
        "actor.kl_in": (a.kl_in, ("loss", "reward")),
        "actor.ablation_normalizer": (a.ablation_normalizer, ("masked", "agent")),
        "trainer.device": (config.trainer.device, ("auto", "cpu", "cuda")),
        "trainer.dtype": (config.trainer.dtype, ("auto", "float32", "bfloat16")),
    }
    for key, (value, allowed) in choices.items():
        if value not in allowed:
            raise ConfigError(f"{key}={value!r} is unknown{nearest(value, allowed)}; choose from {', '.join(allowed)}")
    if (a.kl_in == "reward") != (a.kl_estimator == "k1"):
        raise ConfigError(
            f"actor.kl_estimator={a.kl_estimator} with actor.kl_in={a.kl_in} does not pull the policy to the reference "
            f"(losses.kl_penalty says why); set actor.kl_estimator={'k1' if a.kl_in == 'reward' else 'k3'}"
        )
    for logger in config.trainer.loggers:
        if logger not in ("wandb", "tensorboard"):
            raise ConfigError(f"trainer.loggers: unknown logger {logger!r}; choose from wandb, tensorboard")
    if config.engine == "verl":
        pass

        check_verl(config)


def _check_search(config: Config) -> None:
    """Questions, corpus and index belong together."""
    d, s = config.data, config.search
    if d.name == "tinyhop" and (d.source or d.corpus != "contexts"):
        raise ConfigError(
            f"tinyhop is generated and takes no data.source or data.corpus; set data.name to {', '.join(DATASETS[1:])}"
        )
    if not re.fullmatch(rf"auto|Flat|(IVF|HNSW)\d+\S*|hub:{hub.NAME}", s.index):
        raise ConfigError(
            f"search.index={s.index!r} is unknown; choose auto, Flat, HNSW32, IVF4096,PQ64 or the like, or hub:OWNER/NAME"
        )
    if s.url and not re.fullmatch(r"https?://[^/\s]+/?", s.url):
        raise ConfigError(f"search.url={s.url!r} is no address; give one such as http://127.0.0.1:8100")


_BOUNDS = {
    1: "data.train data.val data.cold search.top_k search.dim env.max_turns env.max_tool_calls env.max_invalid_calls "
    "env.tool_max_chars model.heads model.kv_heads model.hidden_size model.intermediate_size cold_start.copy_tokens "
    "cold_start.mix_tokens rollout.prompts_per_step rollout.samples_per_prompt rollout.max_tokens_per_turn rollout.slots "
    "actor.epochs critic.epochs trainer.steps trainer.save_every trainer.keep_checkpoints trainer.micro_tokens "
    "verl.ranks verl.tensor_parallel verl.agent_workers verl.patience_s verl.nodes",
    0: "data.test cold_start.copy_steps cold_start.mix_steps actor.warmup_steps actor.clip_high actor.clip_dual "
    "actor.entropy_coef actor.kl_coef actor.weight_decay critic.warmup_steps env.format_penalty trainer.eval_every "
    "trainer.rollouts_every trainer.threads trainer.max_hours",
}
BOUNDS = {
    **{key: (least, math.inf) for least, keys in _BOUNDS.items() for key in keys.split()},
    "model.layers": (2, math.inf),  # copying takes two heads, one behind the other (training/tiny_model.py)
    **dict.fromkeys(("advantage.gamma", "advantage.lam", "actor.lr_final", "actor.clip_low"), (0, 1)),
    **dict.fromkeys(("actor.lr", "critic.lr", "cold_start.lr"), (0, 1)),
    **dict.fromkeys(("actor.grad_clip", "critic.grad_clip", "critic.value_clip"), (1e-6, math.inf)),
    "rollout.temperature": (0.01, 100),
    **dict.fromkeys(("env.tool_timeout_s", "env.episode_timeout_s"), (0.01, math.inf)),
    "env.call_reward": (-10, 10),
}
"""Smallest and largest values that make sense."""
DATASETS = ("tinyhop", "hotpotqa", "hotpotqa-fullwiki", "twowiki", "musique")
LOSS_AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
KL_ESTIMATORS = ("k1", "k2", "k3")


def to_yaml(config: Config) -> str:
    """The resolved configuration as YAML (what config.yaml of a run holds)."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def from_yaml(path: Path) -> Config:
    """Read a run's config.yaml back. Raises ConfigError when it is damaged or of another version."""
    try:
        saved = OmegaConf.load(path)
        merged = OmegaConf.merge(OmegaConf.structured(Config), saved)
        _replace_tables(merged, saved)
        config: Config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {_explain(error)}; was this run made by another version?") from None
    except Exception as error:  # a YAML parser has many ways to fail on a damaged file
        raise ConfigError(
            f"{path} cannot be read as YAML ({type(error).__name__}); delete the run or restore the file"
        ) from None
    check(config)
    return config


def fingerprint(*parts: Any) -> str:
    """Eight hex digits that change whenever any of the (JSON-able or dataclass) parts does."""
    return hashlib.sha256(json.dumps([what_counts(p) for p in parts], sort_keys=True).encode()).hexdigest()[:8]


def what_counts(part: Any) -> Any:
    """`part` as plain values; of a dataclass all fields but those `aside`, and those `added` that are at their default."""
    if not dataclasses.is_dataclass(part):
        return part
    values = [(f, getattr(part, f.name)) for f in dataclasses.fields(part)]
    return {f.name: what_counts(value) for f, value in values if _counts(f, value)}


def _counts(f: dataclasses.Field, value: Any) -> bool:
    return {None: True, "never": False, "when set": value != f.default}[f.metadata.get("counts")]


def _preset_dir():
    return resources.files("agent_r1") / "presets"


def _replace_tables(merged, layer) -> None:
    """A free table (data.mix, cold_start.behaviours) replaces the one below it; merging would extend it."""
    for section, key in (("data", "mix"), ("cold_start", "behaviours")):
        table = OmegaConf.select(OmegaConf.create(layer), f"{section}.{key}")
        if table is not None:
            OmegaConf.update(merged, f"{section}.{key}", {k: float(v) for k, v in table.items()}, merge=False)


def _explain(error: OmegaConfBaseException) -> str:
    """One line from OmegaConf's several, with the nearest valid key where a key is unknown."""
    first = str(error).strip().splitlines()[0]
    key = getattr(error, "full_key", None)
    if key and "not in" in first:
        known = [
            f"{f.name}.{g.name}"
            for f in dataclasses.fields(Config)
            if f.name in _SECTIONS
            for g in dataclasses.fields(_SECTIONS[f.name])
        ]
        known += [f.name for f in dataclasses.fields(Config)]
        return f"unknown configuration key {key!r}{nearest(key, known)}; `agent-r1 train --dry-run` lists all keys"
    return f"configuration key {key!r}: {first}" if key else first


_SECTIONS = {
    f.name: f.default_factory for f in dataclasses.fields(Config) if f.default_factory is not dataclasses.MISSING
}


def check_verl(config: Config) -> None:
    """Refuse what verl cannot run, before anything starts. Raises ConfigError."""
    r, v = config.rollout, config.verl
    for name, count in (("actor", config.actor.minibatches), ("critic", config.critic.minibatches)):
        if name == "critic" and config.algorithm != "ppo":
            continue
        if r.prompts_per_step % count:
            raise ConfigError(
                f"verl cuts a batch by prompts: rollout.prompts_per_step={r.prompts_per_step} does not divide into "
                f"{name}.minibatches={count}; choose a divisor of {r.prompts_per_step}"
            )
        if r.prompts_per_step // count * r.samples_per_prompt % v.ranks:
            raise ConfigError(
                f"a minibatch of {r.prompts_per_step // count} prompts x {r.samples_per_prompt} samples does not divide "
                f"among verl.ranks={v.ranks}; change {name}.minibatches or verl.ranks"
            )
    if v.ranks % v.nodes:
        raise ConfigError(f"verl.ranks={v.ranks} do not divide among verl.nodes={v.nodes}; make them a multiple")
    if v.ranks // v.nodes % v.tensor_parallel:
        raise ConfigError(
            f"verl.tensor_parallel={v.tensor_parallel} needs a multiple of as many verl.ranks ({v.ranks // v.nodes} on a machine)"
        )
    if not 0 < v.gpu_memory < 1:
        raise ConfigError(f"verl.gpu_memory={v.gpu_memory} is a share of a GPU's memory; give one such as 0.5")
    if v.tis_cap and v.tis_cap < 1:
        raise ConfigError(
            f"verl.tis_cap={v.tis_cap} would shrink every token's loss; give 1 or more, or 0 to leave it out"
        )
    if v.patience_s <= config.env.episode_timeout_s:
        raise ConfigError(
            f"verl.patience_s={v.patience_s} would end a run for one episode that takes its env.episode_timeout_s="
            f"{config.env.episode_timeout_s:g}; raise the one or lower the other"
        )
    if v.gpu is not None:
        find_gpu(v.gpu)
    if shape := known_model(config.model.path):
        check_context(config.rollout.max_context, config.verl.tensor_parallel, shape)
    if config.trainer.micro_tokens < r.max_context:
        raise ConfigError(
            f"trainer.micro_tokens={config.trainer.micro_tokens} cannot hold one conversation of "
            f"rollout.max_context={r.max_context} tokens; raise it"
        )
    if not config.actor.mask_tool_tokens:
        raise ConfigError("actor.mask_tool_tokens=false is an ablation of the local loop; use --engine local for it")
