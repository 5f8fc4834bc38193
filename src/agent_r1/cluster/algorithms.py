"""Register our estimators, policy loss and learning rate where verl looks for them.

In: verl's tensors of the response part [B, T]. Out: the results of an estimator and of
`training/losses.py`. verl imports this module in every worker (settings.yaml: `external_lib`).
`trainer.py` calls the estimators through verl's table and gives `verl_actor_loss` to the workers.
The critic's loss is verl's own; tests/test_verl_equivalence.py compares it with ours.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from verl.trainer.ppo.core_algos import kl_penalty, register_adv_est
from verl.utils.metric import Metric
from verl.workers.config import ActorConfig
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import (
    FSDPEngineWithLMHead,
    FSDPEngineWithValueHead,
)
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.padding import no_padding_2_padding

from agent_r1.cluster.watchdog import report
from agent_r1.config import tables
from agent_r1.config.settings import AdvantageConfig
from agent_r1.ground.errors import AgentR1Error
from agent_r1.rollout.episode import derive_seed
from agent_r1.rollout.training_rows import Batch
from agent_r1.training.advantages import Estimator
from agent_r1.training.learner import linear_decay
from agent_r1.training.losses import aggregate_loss, episode_tokens, policy_loss
from agent_r1.training.parts import get_estimator, get_ratios


class RowKey(NamedTuple):
    """Parse a row's name in verl's TransferQueue.

    Sorted, an episode's rows are adjacent and in time order.
    """

    group: str
    sample: int
    row: int

    @property
    def episode(self) -> tuple[str, int]:
        return self.group, self.sample


def parse_key(key: str) -> RowKey:
    """Parse verl's `{group}_{sample}_{row}`."""
    group, sample, row = key.rsplit("_", 2)
    return RowKey(group, int(sample), int(row))


def deal_into_minibatches(keys: list[str], size: int, seed: int, by: int = 1) -> list[list[str]]:
    """Deal rows into minibatches of at most `size` rows, with each episode in one minibatch.

    The local loop does the same. Episodes with most rows come first and go to the emptiest
    minibatch. The number of minibatches is the smallest possible multiple of `by`. An episode with
    more than `size` rows is cut anywhere.
    """
    episodes: dict[tuple[str, int], list[str]] = defaultdict(list)
    for key in sorted(keys, key=parse_key):
        episodes[parse_key(key).episode].append(key)
    order = sorted(
        episodes, key=lambda episode: (-len(episodes[episode]), derive_seed(seed, *episode))
    )
    count = by * -(-len(keys) // (by * size))
    if len(episodes[order[0]]) > size:
        rows: list[str] = []
        for episode in order:
            rows += episodes[episode]
        return [rows[i * len(rows) // count : (i + 1) * len(rows) // count] for i in range(count)]
    while True:
        parts: list[list[str]] = [[] for _ in range(count)]
        for episode in order:
            min(parts, key=len).extend(episodes[episode])
        if max(map(len, parts)) <= size:
            return parts
        count += by


def compute_advantages(
    name: str,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    section: AdvantageConfig,
    columns: dict[str, Tensor] | None = None,
    metrics: dict[str, float] | None = None,
    estimate: Estimator | None = None,
    **tensors: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute advantages and returns [B, T] in the order of the row keys in `index`.

    Args:
        columns: Columns that the estimator declares.
        tensors: Other fields of a `Batch`.
        estimate: The estimator with wrappers from the settings. Its changed rewards are written to
            `token_level_rewards`,
            and its measurements to `metrics`.

    verl shuffles rows to balance its workers, and adds padding rows without actions. Our estimators
    need complete trajectories in time order, so rows are sorted, padding is removed, and everything
    is put back at the end.
    """
    keys = [parse_key(key) for key in index]
    order = sorted(response_mask.any(dim=1).nonzero().flatten().tolist(), key=keys.__getitem__)
    estimate = estimate or get_estimator(name)
    if estimate.groups:
        # If the environment broke off all but one episode of a group, there is nothing to compare
        # it with.
        episodes_of_order = {keys[i].episode for i in order}
        sizes = Counter(group for group, _ in episodes_of_order)
        order = [i for i in order if sizes[keys[i].group] > 1]
    advantages_BT = torch.zeros_like(token_level_rewards, dtype=torch.float32)
    returns_BT = torch.zeros_like(token_level_rewards, dtype=torch.float32)
    if metrics is None:
        metrics = {}
    if order:
        episodes: dict[tuple[str, int], int] = {}  # in the order of their first rows
        for i in order:
            episodes.setdefault(keys[i].episode, len(episodes))
        batch = Batch(
            rewards_BT=token_level_rewards[order],
            mask_BT=response_mask[order],
            groups=[keys[i].group for i in order],
            trajectory_B=torch.tensor([episodes[keys[i].episode] for i in order]),
            columns={column: values[order] for column, values in (columns or {}).items()},
            metrics=metrics,
            **{name: None if values is None else values[order] for name, values in tensors.items()},
        )
        advantages_BT[order], returns_BT[order] = estimate(batch, section)
        token_level_rewards[order] = batch.rewards_BT
    return advantages_BT, returns_BT


for _name in tables.names("estimator"):
    register_adv_est(f"agent_r1_{_name}")(partial(compute_advantages, _name))


def votes(keys: list[str], minibatch_B: list[int], mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return [B] action tokens of each row's episode, and the minibatch's number of episodes.

    verl would count rows, including padding. An episode with more rows than a minibatch is cut
    (`deal_into_minibatches`); each part counts as an episode.
    """
    parts = [
        (number, parse_key(key).episode) for number, key in zip(minibatch_B, keys, strict=True)
    ]
    numbers = {part: number for number, part in enumerate(dict.fromkeys(parts))}
    tokens_B = episode_tokens(mask_BT, torch.tensor([numbers[part] for part in parts]))
    with_actions = {part for part, tokens in zip(parts, tokens_B.tolist(), strict=True) if tokens}
    episodes = Counter(number for number, _ in with_actions)
    return tokens_B, torch.tensor([episodes[number] for number in minibatch_B])


def verl_actor_loss(
    config: ActorConfig, model_output: dict[str, Tensor], data: TensorDict, dp_group=None
) -> tuple[Tensor, dict[str, Metric]]:
    """Compute `loop.actor_loss` of a micro-batch on one rank, instead of verl's `ppo_loss`.

    verl's loss weights rows equally. The divisor is counted over all ranks and micro-batches. Verl
    averages gradients over `dp_size` ranks, so each rank's share is multiplied by it.
    `rollout_is_weights` [B, T] correct for a sampler that rounds differently from the trainer
    (verl.tis_cap).
    """
    logprobs_BT = no_padding_2_padding(model_output["log_probs"], data)
    columns = data.select(
        "response_mask",
        "old_log_probs",
        "advantages",
        "episode_tokens",
        "minibatch_episodes",
        "ref_log_prob",
        "rollout_is_weights",
        strict=False,
    ).to_padded_tensor()
    mask_BT = columns["response_mask"].bool()
    mode = config.loss_agg_mode
    if mode == "token-mean":
        normalizer = data["batch_num_tokens"]
    else:
        normalizer = columns["minibatch_episodes"][0, 0].item()
    if mode == "seq-mean-token-sum-norm":
        normalizer *= config.loss_scale_factor

    def aggregate(x_BT: Tensor) -> Tensor:
        return (
            aggregate_loss(x_BT, mask_BT, mode, normalizer, columns["episode_tokens"][:, 0])
            * data["dp_size"]
        )

    loss_BT, stats = policy_loss(
        logprobs_BT,
        columns["old_log_probs"],
        columns["advantages"],
        mask_BT,
        config.clip_ratio_low,
        config.clip_ratio_high,
        config.clip_ratio_c,
        get_ratios(config.policy_loss.loss_mode),
    )
    weights_BT = columns.get("rollout_is_weights", None)
    if weights_BT is not None:
        loss_BT = loss_BT * weights_BT
        stats["actor/rollout_is_weight"] = weights_BT[mask_BT].mean().item()
    loss = aggregate(loss_BT)
    terms = {"actor/pg_loss": loss.detach()}
    if config.entropy_coeff:
        terms["actor/entropy_loss"] = entropy = aggregate(
            no_padding_2_padding(model_output["entropy"], data)
        )
        loss = loss - config.entropy_coeff * entropy
    if config.use_kl_loss:
        terms["kl_loss"] = kl = aggregate(
            kl_penalty(logprobs_BT, columns["ref_log_prob"], config.kl_loss_type)
        )
        loss = loss + config.kl_loss_coef * kl
        stats["kl_coef"] = config.kl_loss_coef
    return loss, Metric.from_dict(stats, "mean") | Metric.from_dict(terms, "sum")


NAN_SHARE = 1e-3
"""Most sampled tokens of a step that may lack a log-probability."""


def replace_unknown_logprobs(
    sampler_BT: Tensor, trainer_BT: Tensor, mask_BT: Tensor
) -> tuple[Tensor, Tensor, int]:
    """Give tokens whose sampled log-probability is NaN or infinite the trainer's.

    vLLM returns such a number now and then. Its importance weight would be NaN, and so would the
    whole gradient. With the trainer's number the weight is exp(0) = 1. A NaN of the trainer stays
    one, and ends the run.

    Returns the repaired log-probabilities [B, T], the mask of tokens with a number of their own,
    and how many have none. Raises AgentR1Error if their share exceeds NAN_SHARE.
    """
    action_BT = mask_BT.bool()
    is_unknown_BT = action_BT & ~sampler_BT.isfinite()
    count = int(is_unknown_BT.sum())
    share = count / max(1, int(action_BT.sum()))
    if share > NAN_SHARE:
        raise AgentR1Error(
            f"vLLM gave no log-probability (NaN) for {count} sampled tokens, {share:.1%} of the "
            f"step's; more than {NAN_SHARE:.1%} means that it computes wrongly: try another "
            "version of vLLM, or enforce_eager",
            code="nan_logprobs",
        )
    # Also outside of actions, where NaN times a mask of 0 would still be NaN.
    trainer_BT = trainer_BT.to(sampler_BT.dtype)
    full_logprobs_BT = torch.where(sampler_BT.isfinite(), sampler_BT, trainer_BT)
    return full_logprobs_BT, action_BT & ~is_unknown_BT, count


class SamplerWatch:
    """Stop a run whose sampler no longer has the trainer's weights.

    Other metrics would not show it for hours.
    """

    # Rounding in bfloat16 gives .002 to .01 in probability, and .01 to .02 in log-probability.
    LIMITS = {"training/rollout_probs_diff_mean": 0.05, "training/rollout_logprobs_diff_mean": 0.2}

    def __init__(self):
        self.strange = 0

    def check(self, trainer_BT: Tensor, sampler_BT: Tensor, mask_BT: Tensor) -> dict[str, float]:
        """Return mean differences of trainer's and sampler's log-probabilities before any update.

        Raises AgentR1Error if a difference exceeds its limit twice in a row.
        """
        action_BT = mask_BT.bool()
        trainer = trainer_BT[action_BT].float()
        sampler = sampler_BT[action_BT].float()
        differences = (
            (trainer.exp() - sampler.exp()).abs().mean().item(),
            (trainer - sampler).abs().mean().item(),
        )
        metrics = dict(zip(self.LIMITS, differences, strict=True))
        sound = all(value <= self.LIMITS[name] for name, value in metrics.items())
        if sound:
            self.strange = 0
        else:
            self.strange += 1
        if self.strange == 2:
            raise AgentR1Error(
                "vLLM does not have the trainer's weights: in two consecutive steps its "
                "probabilities of the sampled tokens differed from the trainer's (on average by "
                f"{differences[0]:.2f}, and by {differences[1]:.2f} in log-probability)",
                code="stale_weights",
            )
        return metrics


class ReportsMicroBatches:
    """Tell the launcher of each micro-batch, because a pass over a batch may take minutes."""

    unit = "micro_batches"

    def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        engine = cast(Any, super())  # verl's engine, the second base of each class below
        out = engine.forward_step(micro_batch, loss_function, forward_only)
        report(self.unit)
        return out


# verl prefers an engine that is registered for its vendor. A CPU's platform has the vendor "cpu"
# (cpu.py), and is looked up as the device "cuda" (VERL_ENGINE_DEVICE).
register_engine = partial(
    EngineRegistry.register, backend="fsdp2", device="cuda", vendor=["cpu", "nvidia"]
)


@register_engine(model_type="value_model")
class CriticEngine(ReportsMicroBatches, FSDPEngineWithValueHead):
    """Use verl's engine for the critic."""

    unit = "critic_micro_batches"


class CriticWorker(TrainingWorker):
    """Use verl's worker for the critic.

    Its process makes the engine before it imports our modules. Ray imports this one for this class.
    """


@register_engine(model_type="language_model")
class ActorEngine(ReportsMicroBatches, FSDPEngineWithLMHead):
    """Add the local loop's linear learning rate to verl's FSDP engine.

    verl has only constant and cosine. The critic keeps verl's engine, with a constant rate.
    """

    def _build_lr_scheduler(self, optimizer) -> LambdaLR:
        o = self.optimizer_config
        # RL step of the first update: settings.yaml stores the critic's warm-up there.
        first = int(o.num_cycles) + 1
        return LambdaLR(
            optimizer,
            lambda done: linear_decay(
                first + done, o.total_training_steps, o.lr_warmup_steps, o.min_lr_ratio
            ),
        )

    def lr_scheduler_step(self) -> float:
        """Return the finished update's rate for the log; verl's own returns the next."""
        learning_rate = self.lr_scheduler.get_last_lr()[0]
        self.lr_scheduler.step()
        return learning_rate
