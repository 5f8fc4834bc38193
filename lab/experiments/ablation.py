"""Train with tool tokens in the policy loss, as if they were sampled (see ablation.sh).

python lab/experiments/ablation.py tool-tokens train grpo ...
    divided by all tokens in the loss
python lab/experiments/ablation.py tool-tokens-agent-n train grpo ...
    divided by the number of sampled tokens only
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import torch
from torch import Tensor

from agent_r1.app import cli
from agent_r1.config import Config
from agent_r1.ground.errors import ConfigError
from agent_r1.rollout.training_rows import Batch
from agent_r1.training import loop
from agent_r1.training.forward import batch_logprobs
from agent_r1.training.learner import Learner
from agent_r1.training.loop import update_actor
from agent_r1.training.losses import Ratios, loss_normalizer

TOOL = 1 + 2**-10
"""Mask value of a tool token: counts as 1 in the loss, and differs from a sampled one."""
NORMALIZERS = {
    "tool-tokens": loss_normalizer,
    "tool-tokens-agent-n": lambda mask_BT, *how: loss_normalizer(mask_BT == 1, *how),
}
"""What each arm divides by."""


def with_tool_tokens(batch: Batch, logprobs_now: Callable[[Batch], Tensor]) -> Batch:
    """Treat everything after the first action as if the policy had sampled it.

    The old log-probabilities of the tool's tokens are those before the update, so the clip applies
    to them, too.
    """
    # The local loop has filled the batch; they are None under verl, which reads estimators only.
    assert batch.ids_BT is not None and batch.lengths_B is not None
    assert batch.logprobs_BT is not None and batch.advantages_BT is not None
    sampled_BT = batch.mask_BT.bool()
    inside_BT = (
        torch.arange(batch.ids_BT.shape[1], device=sampled_BT.device) < batch.lengths_B[:, None]
    )
    chosen_BT = (sampled_BT.cumsum(dim=1) > 0) & inside_BT
    wide = replace(batch, mask_BT=torch.where(sampled_BT, 1.0, TOOL) * chosen_BT)
    wide.logprobs_BT = torch.where(sampled_BT, batch.logprobs_BT, logprobs_now(wide))
    # A GRPO row has one advantage for all of its tokens: the mean over its action tokens.
    advantage_B = batch.advantages_BT.sum(dim=1) / batch.mask_BT.sum(dim=1)
    wide.advantages_BT = advantage_B[:, None] * chosen_BT
    return wide


def update_on_all(
    learner: Learner, batch: Batch, config: Config, step: int, dtype: torch.dtype, ratios: Ratios
) -> dict[str, float]:
    """`update_actor` with tool tokens in the loss."""
    if config.actor.kl_coef:
        raise ConfigError("the ablation has no KL; set actor.kl_coef=0")

    def logprobs_now(wide: Batch) -> Tensor:
        return batch_logprobs(
            learner.actor,
            wide,
            config.rollout.temperature,
            config.trainer.max_tokens_per_microbatch,
            dtype,
        )

    return update_actor(learner, with_tool_tokens(batch, logprobs_now), config, step, dtype, ratios)


def main(arm: str, *argv: str) -> int:
    with patch.multiple(loop, update_actor=update_on_all, loss_normalizer=NORMALIZERS[arm]):
        return cli.main(list(argv))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
