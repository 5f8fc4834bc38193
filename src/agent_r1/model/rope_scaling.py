"""Change rotary frequencies as Llama 3.1 and 3.2 do.

Their contexts are longer than those of pretraining.

In: the four numbers in config.json. Out: a function of the frequencies, for `decoder.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class RopeScaling:
    """Divide low frequencies by `factor`, keep high ones, and blend between them."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int
    """Context of pretraining, in tokens."""

    def __call__(self, frequency: Tensor) -> Tensor:
        turns = self.original_max_position_embeddings * frequency / (2 * math.pi)
        # A pair that turned fewer than `low` times in pretraining would meet new angles in a longer
        # context. One that turned more than `high` times has seen all of them.
        span = self.high_freq_factor - self.low_freq_factor
        share = ((turns - self.low_freq_factor) / span).clamp(0, 1)
        return share * frequency + (1 - share) * frequency / self.factor
