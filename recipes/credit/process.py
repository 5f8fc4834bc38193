"""Wrap estimators as settings require; recipe.toml maps each setting to its wrapper.

In: an estimator and the configuration. Out: an estimator. `parts.py` combines them.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from agent_r1 import AdvantageConfig, Batch, Column, Config, Estimator

PROCESS = Column.process()


def with_scaled_process_rewards(inner: Estimator, config: Config) -> Estimator:
    """Scale process rewards to the outcome's size, so that calls do not outweigh it."""

    def credit(batch: Batch, advantage: AdvantageConfig) -> tuple[Tensor, Tensor]:
        batch.rewards_BT, scale = scale_process_rewards(
            batch.rewards_BT, batch.columns[PROCESS.name], advantage.process_weight
        )
        batch.metrics["reward/process_scale"] = scale
        return inner(batch, advantage)

    return replace(inner, credit=credit, columns=(*inner.columns, PROCESS))


def scale_process_rewards(
    rewards_BT: Tensor, process_BT: Tensor, weight: float
) -> tuple[Tensor, float]:
    """Scale process rewards to the size of the outcome (PRIME, 2502.01456, batch normalisation).

        P_t = p_t + P_{t+1} along a row
        scale = weight / (max |P| over the batch + 1e-6)
        r = outcome + scale * p

    An outcome is about 1, and process rewards may have any size. After scaling, they add at most
    `weight` to a row. `process_BT` is the part p of `rewards_BT`. Returns the new rewards and the
    scale.
    """
    # The sums P_t run from a token to the end of its row, hence the flip.
    most = process_BT.flip(1).cumsum(1).abs().max().item()
    scale = weight / (most + 1e-6) if most else 0.0
    return rewards_BT + (scale - 1) * process_BT, scale
