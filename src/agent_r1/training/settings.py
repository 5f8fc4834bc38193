"""Settings of the start model: the tiny model and its cold start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat

from agent_r1.config.settings import (
    AtLeast1,
    LearningRate,
    ModelConfig,
    NamesCode,
    NamesFile,
    OutsideFingerprint,
    OutsideWhileDefault,
    Section,
    Share,
)
from agent_r1.ground.errors import ConfigError

INDUCTION_PAIRS = {"auto": 1, "bigram": 2, "trigram": 3}
"""`model.induction` -> pairs of copying heads. Each compares one token more of what was read."""
LORA_ALPHA = 2
"""LoRA's alpha / r, constant, so that doubling the rank does not halve the step."""


class TinyModelConfig(ModelConfig):
    vocab_size: int = 1024
    """Tokens of the local BPE, special tokens included."""
    hidden_size: AtLeast1 = 128
    layers: int = Field(2, ge=2)
    heads: AtLeast1 = 4
    kv_heads: AtLeast1 = 4
    intermediate_size: AtLeast1 = 256
    max_position: int = 1024
    induction: OutsideWhileDefault[Literal["auto", "bigram", "trigram"]] = "auto"
    """Copying circuit of the initial weights: auto compares one token with what was read.

    bigram also compares the token before, in a second head. trigram adds the one before that
    (cold_start/tiny_model.py).
    """
    rope_theta: OutsideWhileDefault[PositiveFloat] = 10_000.0
    """Base of the rotary frequencies (2104.09864).

    A head that compares *words* rotates them by their distance, too. With a larger base most
    coordinates rotate slowly, so it matches far ones as well.
    """

    @staticmethod
    def conflicts(config: Any, trains: bool) -> Iterator[ConfigError]:
        m = config.model
        r = config.rollout
        if m.path is None and r.max_context > m.max_position:
            yield ConfigError(
                f"rollout.max_context={r.max_context} is larger than the model's "
                f"model.max_position={m.max_position}",
                code="context_exceeds_model",
            )
        if m.path is None and (m.hidden_size % (2 * m.heads) or m.heads % m.kv_heads):
            yield ConfigError(
                f"model.hidden_size={m.hidden_size} must be a multiple of 2 x "
                f"model.heads={m.heads}, and model.heads a multiple of model.kv_heads={m.kv_heads}",
                code="indivisible_heads",
            )
        heads = INDUCTION_PAIRS[m.induction]
        if m.path is None and heads > 1 and not heads <= m.heads == m.kv_heads:
            yield ConfigError(
                f"model.induction={m.induction} lays out {heads} heads with keys of their own; set "
                f"model.kv_heads to model.heads, and both to {heads} or more",
                code="shared_keys",
            )


class ColdStartConfig(Section):
    """Behaviour cloning of an imperfect demonstrator, so that RL has something to reinforce (room
    7)."""

    copy_steps: NonNegativeInt = 600
    """Phase (a): optimiser steps on clean episodes, one-hop unless the demonstrator plans. Here the
    model learns to copy names from what it has read."""
    copy_tokens: AtLeast1 = 1024
    """Tokens in one step of phase (a). Small: the many updates are what makes the copying circuit
    form."""
    copy_optimizer: OutsideWhileDefault[Literal["auto", "muon"]] = "auto"
    """Optimiser of phase (a). auto: AdamW. `muon`: Muon for the matrices of the layers, which
    learns to copy in about half the steps (docs/lab/laptop.md)."""
    embedding_lr: OutsideWhileDefault[LearningRate | Literal["auto"]] = "auto"
    """Peak learning rate, in phase (a), of what Muon does not move: embeddings, gains and biases.
    auto: `lr`. With about five times `lr`, copying is learned sooner (docs/lab/laptop.md)."""
    mix_steps: NonNegativeInt = 600
    """Phase (b): optimiser steps on the imperfect demonstrator's episodes."""
    mix_tokens: AtLeast1 = 2048
    """Tokens in one step of phase (b)."""
    lr: LearningRate = 1.5e-3
    """Peak learning rate of both phases."""
    mix_lr: OutsideWhileDefault[LearningRate | Literal["auto"]] = "auto"
    """Peak learning rate of phase (b); auto: `lr`. Smaller where phase (a) has already learned the
    skills, which large steps would damage."""
    warm_steps: NonNegativeInt = 0
    """With a pretrained `model.path`: optimiser steps of cloning before RL, `mix_tokens` each. 0:
    the model knows the format."""
    plays: NonNegativeInt = 0
    """Demonstrations of each training question by your own demonstrator. 0: one, or with fewer than
    1,000 questions as many as give 1,000, at most 8. A tenth of so few questions is held out, and
    cloning stops when it no longer helps there (cold_start/demonstrate.py)."""
    probe: OutsideFingerprint[NonNegativeInt] = 64
    """Questions that a model from a cold start plays before RL, `rollout.samples_per_prompt` times
    each, to see whether it has anything to compare (cold_start/probe.py). 0: no probe."""
    demonstrator: NamesCode[str | None] = None
    """FILE.py:FUNCTION that plays your own task: see cold_start/demonstrate.py."""
    episodes: NamesFile[str | None] = None
    """Or a JSONL file of recorded conversations."""
    closed_book: Share = 0.0
    """The demonstrator plays this share of the training questions a second time, with no tools: see
    `eval --closed-book`."""

    @staticmethod
    def conflicts(config: Any, trains: bool) -> Iterator[ConfigError]:
        c = config.cold_start
        if c.embedding_lr != "auto" and c.copy_optimizer != "muon":
            yield ConfigError(
                "cold_start.embedding_lr is for what Muon does not move; set "
                "cold_start.copy_optimizer=muon, too",
                code="unused_embedding_lr",
            )
        if c.closed_book and not c.demonstrator:
            yield ConfigError(
                "cold_start.closed_book: no demonstrator plays without tools; name a function with "
                "cold_start.demonstrator",
                code="missing_demonstrator",
            )
