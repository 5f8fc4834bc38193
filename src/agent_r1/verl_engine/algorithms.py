"""Our estimators, policy loss and learning rate under the names that verl looks up.

In: verl's tensors of the response part [B, T]. Out: what `training/estimators.py` and `training/losses.py` compute of
them. verl imports this module in every worker (settings.yaml: `external_lib`); `trainer.py` calls the estimators through
verl's table. The critic's loss is verl's own: it has no table, and tests/test_verl_equivalence.py holds it against ours.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import partial
from typing import NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from verl.trainer.ppo.core_algos import register_adv_est, register_policy_loss
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from agent_r1.choices import IN_GROUPS, LossAggregation, Ratio
from agent_r1.errors import AgentR1Error
from agent_r1.rollout.episode import derive_seed
from agent_r1.rollout.rows import Batch
from agent_r1.settings import AdvantageConfig
from agent_r1.training.estimators import ESTIMATORS, one_vote
from agent_r1.training.learner import linear_decay
from agent_r1.training.losses import aggregate_loss, policy_loss


class RowKey(NamedTuple):
    """A row's name in verl's TransferQueue. Sorted, the rows of an episode stand together and in time order."""

    group: str
    sample: int
    row: int

    @property
    def episode(self) -> tuple[str, int]:
        return self.group, self.sample


def parse_key(key: str) -> RowKey:
    """Of verl's `{group}_{sample}_{row}`."""
    group, sample, row = key.rsplit("_", 2)
    return RowKey(group, int(sample), int(row))


def deal(keys: list[str], size: int, seed: int, by: int = 1) -> list[list[str]]:
    """Deal rows into minibatches of at most `size` rows, all rows of an episode into one, as the local loop does.

    Whoever has most rows comes first and goes where there are fewest, so all are about equally full. Their number is a
    multiple of `by`, and no larger than it takes. Where an episode alone has more than `size` rows, rows are cut anywhere.
    """
    episodes: dict[tuple[str, int], list[str]] = defaultdict(list)
    for key in sorted(keys, key=parse_key):
        episodes[parse_key(key).episode].append(key)
    order = sorted(episodes, key=lambda episode: (-len(episodes[episode]), derive_seed(seed, *episode)))
    count = by * -(-len(keys) // (by * size))
    if len(episodes[order[0]]) > size:
        rows = [key for episode in order for key in episodes[episode]]
        return [rows[i * len(rows) // count : (i + 1) * len(rows) // count] for i in range(count)]
    while True:
        parts: list[list[str]] = [[] for _ in range(count)]
        for episode in order:
            min(parts, key=len).extend(episodes[episode])
        if max(map(len, parts)) <= size:
            return parts
        count += by


def estimated(
    name: str,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    section: AdvantageConfig,
    aggregation: LossAggregation = "token-mean",
    **columns: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns [B, T] in the order of the row keys in `index`. `columns` are other tensors of a `Batch`.

    verl shuffles rows to balance its workers and adds rows of padding, which have no action. Our estimators want whole
    trajectories in time order, so rows are sorted, padding is left out, and everything is put back at the end.
    """
    keys = [parse_key(key) for key in index]
    order = sorted(response_mask.any(dim=1).nonzero().flatten().tolist(), key=keys.__getitem__)
    if name in IN_GROUPS:  # the environment broke off all but one of a group: nothing to compare it with
        left = Counter(group for group, _ in {keys[i].episode for i in order})
        order = [i for i in order if left[keys[i].group] > 1]
    advantages_BT, returns_BT = (torch.zeros_like(token_level_rewards, dtype=torch.float32) for _ in range(2))
    if order:
        episodes = {episode: n for n, episode in enumerate(dict.fromkeys(keys[i].episode for i in order))}
        batch = Batch(
            rewards_BT=token_level_rewards[order],
            mask_BT=response_mask[order],
            groups=[keys[i].group for i in order],
            trajectory_B=torch.tensor([episodes[keys[i].episode] for i in order]),
            **{column: None if values is None else values[order] for column, values in columns.items()},
        )
        found_BT, returns_BT[order] = ESTIMATORS[name](batch, section)
        advantages_BT[order] = one_vote(batch, found_BT, aggregation)
    return advantages_BT, returns_BT


for _name in ESTIMATORS:
    register_adv_est(f"agent_r1_{_name}")(partial(estimated, _name))


def verl_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config=None,
    rollout_is_weights: Tensor | None = None,
    ratio: str = "token",
) -> tuple[Tensor, dict[str, float]]:
    """`losses.policy_loss`, aggregated over the whole minibatch, of which this micro-batch on this rank is a part.

    What the minibatch's loss is divided by comes from verl's counts over all ranks and micro-batches. verl averages
    gradients over `dp_size` ranks, so each rank's share is multiplied by it. `rollout_is_weights` [B, T] correct for a
    sampler that rounds otherwise than the trainer (verl.tis_cap).
    """
    loss_BT, stats = policy_loss(
        log_prob, old_log_prob, advantages, response_mask,
        config.clip_ratio_low, config.clip_ratio_high, config.clip_ratio_c, ratio,
    )  # fmt: skip
    if rollout_is_weights is not None:
        loss_BT = loss_BT * rollout_is_weights
        stats["actor/rollout_is_weight"] = rollout_is_weights[response_mask.bool()].mean().item()
    whole, mode = config.global_batch_info, loss_agg_mode
    normalizer = whole["batch_num_tokens"] if mode == "token-mean" else whole["global_batch_size"]
    if mode == "seq-mean-token-sum-norm":
        normalizer *= whole["loss_scale_factor"]
    return aggregate_loss(loss_BT, response_mask, mode, normalizer) * whole["dp_size"], stats


for _ratio in get_args(Ratio):
    register_policy_loss(f"agent_r1_{_ratio}")(partial(verl_policy_loss, ratio=_ratio))


class SamplerWatch:
    """Ends a run whose sampler no longer has the trainer's weights, which no other number shows for hours."""

    # Rounding in bfloat16 gives .002 to .01 in probability, and .01 to .02 in log-probability.
    LIMITS = {"training/rollout_probs_diff_mean": 0.05, "training/rollout_logprobs_diff_mean": 0.2}

    def __init__(self):
        self.strange = 0

    def check(self, trainer_BT: Tensor, sampler_BT: Tensor, mask_BT: Tensor) -> dict[str, float]:
        """Mean differences between the two's log-probabilities of the sampled tokens, before any update.

        Raises AgentR1Error the second time in a row that one is over its limit.
        """
        acted_BT = mask_BT.bool()
        trainer, sampler = trainer_BT[acted_BT].float(), sampler_BT[acted_BT].float()
        apart = (trainer.exp() - sampler.exp()).abs().mean().item(), (trainer - sampler).abs().mean().item()
        found = dict(zip(self.LIMITS, apart, strict=True))
        sound = all(value <= self.LIMITS[name] for name, value in found.items())
        self.strange = 0 if sound else self.strange + 1
        if self.strange == 2:
            raise AgentR1Error(
                "vLLM does not have the trainer's weights: in two steps running its probabilities of the tokens that it "
                f"sampled were others than the trainer's (by {apart[0]:.2f}, and {apart[1]:.2f} in logarithms, on average)"
            )
        return found


# verl chooses an engine that is registered for its vendor before its own. The platform of a CPU calls itself the vendor
# "cpu" (cpu.py), and is looked up as the device "cuda" (VERL_ENGINE_DEVICE).
@EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cuda", vendor=["cpu", "nvidia"])
class ActorEngine(FSDPEngineWithLMHead):
    """verl's FSDP engine with the local loop's learning rate: verl itself knows constant and cosine, and no line. The critic
    keeps verl's engine: its learning rate is constant."""

    def _build_lr_scheduler(self, optimizer) -> LambdaLR:
        o = self.optimizer_config
        first = int(o.num_cycles) + 1  # RL step of the first update: settings.yaml puts the critic's warm-up there
        return LambdaLR(
            optimizer,
            lambda done: linear_decay(first + done, o.total_training_steps, o.lr_warmup_steps, o.min_lr_ratio),
        )

    def lr_scheduler_step(self) -> float:
        """The rate of the update that is over, for the log; verl's own returns the next one's."""
        used = self.lr_scheduler.get_last_lr()[0]
        self.lr_scheduler.step()
        return used
