"""The settings of TinyHop and of its demonstrator, and the folders of the shipped agents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, NonNegativeFloat

from agent_r1 import ColdStartConfig, ConfigError, DataConfig, OutsideWhileDefault

DEMO_AGENT = Path(__file__).with_name("agent")
"""An agent of the default preset; its model card is README.md.

The page train.html has its tokenizer and its shapes.
"""
LAPTOP_AGENT = Path(__file__).with_name("agent_laptop")
"""An agent of lab/laptop.yaml. The lessons' recorded group is in its words."""


def _some_share(shares: dict[str, float]) -> dict[str, float]:
    if sum(shares.values()) == 0:
        raise ValueError("one share must be more than 0")
    return shares


Shares = Annotated[dict[str, NonNegativeFloat], AfterValidator(_some_share)]
"""Share of each kind; only proportions count."""


KIND_NAMES = ("1-hop", "2-hop", "3-hop", "yes-no", "which", "4-hop", "5-hop")
"""The keys of `tinyhop.KINDS`, which is not imported when a command starts."""


class TinyHopSettings(DataConfig):
    entities: int = 600
    """Entities in the training world; the val and test worlds are scaled to their number of
    questions."""
    cold_entities: int = 1800
    """Entities in the world of the cold start. Many, because copying is learnt from the variety of
    names."""
    mix: Shares = {"1-hop": 0.2, "2-hop": 0.4, "3-hop": 0.2, "yes-no": 0.1, "which": 0.1}
    """Share of each kind of question: 1-hop to 5-hop, yes-no, which. Chains of four hops need
    env.max_turns=5, and chains of five 6."""
    train_mix: OutsideWhileDefault[Shares | None] = None
    """The same, of the questions that RL practises; unset: `mix`. Where all eight samples of an
    easy question are right, its group teaches nothing."""

    @staticmethod
    def conflicts(config: Any, trains: bool) -> Iterator[ConfigError]:
        for key in ("mix", "train_mix"):
            for kind in getattr(config.data, key) or ():
                if kind not in KIND_NAMES:
                    yield ConfigError.unknown(f"data.{key}", kind, KIND_NAMES)


class DemonstratorSettings(ColdStartConfig):
    behaviours: Shares = {
        "good": 0.24,
        "stop_early": 0.38,
        "guess": 0.12,
        "bad_query": 0.18,
        "wrong_entity": 0.08,
    }
    """Probabilities of the behaviours of phase (b)'s demonstrator; demonstrator.py explains the
    names."""
