"""Extend verl's synchronous trainer by our advantages, metrics and checkpoints.

In: verl's configuration. Out: metrics.jsonl, rollouts/ and checkpoints/ of the run, in the local
loop's formats.

verl's `_step_once` reads as the algorithm: sample, old log-probs, reference, values, advantage,
critic, actor. Only `_compute_advantage` is replaced: verl's own passes neither values nor a row's
trajectory to a registered estimator. `_balance_batch` orders the rows, so that a minibatch has
complete episodes. The rest records, and reports each phase to the launcher.
"""

from __future__ import annotations

import itertools
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.core_algos import get_adv_estimator_fn
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.seqlen_balancing import (
    calculate_workload,
    get_seqlen_balanced_partitions,
    log_seqlen_unbalance,
)
from verl.workers.utils.padding import response_from_nested, response_to_nested

from agent_r1.cluster.algorithms import (
    CriticWorker,
    RowKey,
    SamplerWatch,
    deal_into_minibatches,
    parse_key,
    replace_unknown_logprobs,
    verl_actor_loss,
    votes,
)
from agent_r1.cluster.checkpoints import finish, keep_shards
from agent_r1.cluster.replay import NamingReplayBuffer
from agent_r1.config import from_yaml
from agent_r1.evaluation.records import write_rollouts
from agent_r1.ground.errors import AgentR1Error
from agent_r1.ground.files import write_whole
from agent_r1.ground.machine import set_threads
from agent_r1.rollout.episode import derive_seed
from agent_r1.rollout.rollouts import refuse_broken_tools
from agent_r1.rollout.training_rows import Batch
from agent_r1.training.learner import refuse_gradient
from agent_r1.training.metrics import EpisodeNumbers, episode_metrics
from agent_r1.training.parts import make_estimator
from agent_r1.training.run import TimeLimit, stop_and_roll_back
from agent_r1.training.run_dir import RunDir
from agent_r1.watch.log import free_host_memory

PARITY_ROWS = 8
"""Rows with log-probabilities in each checkpoint, for the check of its conversion.

With two short ones the 99th percentile would be a single token, which bfloat16 may change a lot
(checkpoints.LIMITS).
"""
PARITY_TOKENS = 512
"""Longest row, in tokens, because the check runs on the CPU while GPUs wait."""


class AgentR1Trainer(PPOTrainerSync):
    """Override the parts named in the module's docstring."""

    replay_buffer: NamingReplayBuffer
    """verl makes it by `trainer.v1.sampler.custom_sampler` (settings.yaml)."""

    def __init__(self, config):
        super().__init__(config)
        self.folder = Path(config.trainer.default_local_dir)
        self.run = RunDir(self.folder.parent)
        self.ours = from_yaml(self.run.config, written_here=True)
        self.estimate = make_estimator(self.ours)
        self.replay_buffer.samples = config.actor_rollout_ref.rollout.n
        self.replay_buffer.note = (self.folder / "note.txt").write_text
        self.advantages: dict[RowKey, list[float]] = {}
        self.sampler = SamplerWatch()
        self.checkpoint_metrics: dict[str, float] = {}
        # Ray gives this process one thread, but it checks each checkpoint's model.
        set_threads(self.ours.trainer.threads)

    # --------------------------------------------------------------------------------- the watchdog

    def phase(self, name: str) -> None:
        """Report the next phase to the watchdog."""
        step = getattr(self, "global_steps", 0)
        write_whole(self.folder / "phase.json", json.dumps({"step": step, "phase": name}))

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        if Role.Critic in self.role_worker_mapping:
            self.role_worker_mapping[Role.Critic] = ray.remote(CriticWorker)

    def on_init_end(self) -> None:
        self.phase("first weight sync")
        actor = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
        self.actor_rollout_wg.set_loss_fn(partial(verl_actor_loss, actor))
        super().on_init_end()
        # The launcher writes the configuration just before this process starts, so the start
        # counts, too.
        self.limit = TimeLimit(
            self.ours.trainer.max_hours, (self.folder / "config.yaml").stat().st_mtime
        )

    def on_sample_begin(self) -> None:
        self.phase("sampling")
        super().on_sample_begin()

    def on_sample_end(self) -> None:
        self.phase("update")
        super().on_sample_end()

    def on_validate_begin(self) -> None:
        self.phase("validation")
        super().on_validate_begin()

    def on_step_end(self) -> None:
        stop = (
            self.folder / "stop"
        )  # launch.watch makes it at Ctrl-C: the step is finished and saved first
        if (
            self.limit.would_exceed()
            and self.global_steps < self.total_training_steps
            and not stop.exists()
        ):
            stop.write_text(self.limit.message)
        if stop.exists():
            latest = self.run.latest_checkpoint()
            if latest is None or latest.name != f"step_{self.global_steps:06d}":
                self._save_checkpoint()
            self.total_training_steps = (
                self.global_steps
            )  # verl's loop checks after each step whether this was the last
        self.phase("weight sync")
        super().on_step_end()

    # ------------------------------------------------------------------------------------- the step

    def prepare_step(self) -> dict:
        (self.folder / "failure.txt").unlink(
            missing_ok=True
        )  # a failure of an earlier step explains nothing
        return super().prepare_step()

    def step(self, metrics: dict, timing_raw: dict) -> KVBatchMeta:
        self._batch = super().step(metrics, timing_raw)
        for who in ("critic", "actor"):  # verl would only log and skip such a step
            refuse_gradient(
                metrics.get(f"{who}/grad_norm", 0.0), f"step {self.global_steps}: the {who}"
            )
        return self._batch

    def _submit_batch_to_rollout(self, batch: TensorDict) -> int:
        """Tell the buffer whose episodes it will wait for."""
        questions = (int(index) for index in batch["index"])
        self.replay_buffer.questions = dict(zip(batch["uid"], questions, strict=True))
        return super()._submit_batch_to_rollout(batch)

    def _balance_batch(self, batch: KVBatchMeta, metrics, **kwargs) -> KVBatchMeta:
        """Check how many episodes came back; this is verl's first call with them."""
        count = self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n
        missing = count - len({parse_key(key).episode for key in batch.keys})
        metrics["rollout/lost_episodes"] = missing
        if missing * 2 > count:
            self.phase("sampling")
            failure = self.folder / "failure.txt"
            reason = "see the log"
            if failure.exists():
                reason = failure.read_text()
            raise AgentR1Error(
                f"{missing} of {count} episodes failed: {reason}", code="episodes_failed"
            )
        return self._in_minibatches(batch, metrics)

    def _in_minibatches(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        """Order the rows so that an episode's rows are in one minibatch.

        Verl is told not to shuffle, and cuts each rank's rows into minibatches in order. Each rank
        gets an equal part of a minibatch, of about equal length. Verl's own order would balance the
        ranks over the whole batch only.
        """
        c = self.config
        ranks = c.trainer.n_gpus_per_node * c.trainer.nnodes
        size = c.actor_rollout_ref.actor.ppo_mini_batch_size
        if self.use_critic:
            size = math.gcd(size, c.critic.ppo_mini_batch_size)
        size *= c.actor_rollout_ref.rollout.n
        seed = derive_seed(self.ours.seed, "minibatches", self.global_steps)
        parts = deal_into_minibatches(
            batch.keys, size, seed, self._get_required_batch_multiple(ranks) // size
        )
        batch = upsample_batch_to_divisible_size(
            batch, len(parts) * size, self.tokenizer.eos_token_id
        )
        places = {key: place for place, key in enumerate(batch.keys)}
        lengths = [tag["seq_len"] for tag in batch.tags]
        filling = (place for place, tag in enumerate(batch.tags) if tag.get("is_padding"))
        of_rank: list[list[int]] = [[] for _ in range(ranks)]
        for part in parts:
            rows = [places[key] for key in part]
            rows += itertools.islice(filling, size - len(rows))
            work = calculate_workload(torch.tensor([lengths[row] for row in rows]))
            for mine, share in zip(
                of_rank, get_seqlen_balanced_partitions(work, ranks, equal_size=True), strict=True
            ):
                mine += [rows[place] for place in share]
        metrics |= log_seqlen_unbalance(lengths, of_rank, "global_seqlen")
        batch.reorder(list(itertools.chain.from_iterable(of_rank)))
        return batch

    def _minibatches(self, rows: int) -> list[int]:
        """Return the minibatch of the policy's update for each row, on any rank."""
        c = self.config
        ranks = c.trainer.n_gpus_per_node * c.trainer.nnodes
        size = c.actor_rollout_ref.actor.ppo_mini_batch_size * c.actor_rollout_ref.rollout.n
        return [row % (rows // ranks) // (size // ranks) for row in range(rows)]

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        """Step 4 of `training/loop.py`, with the same functions."""
        fields = [
            "response_mask",
            "rm_scores",
            "rollout_log_probs",
            "old_log_probs",
            "ref_log_prob",
            "values",
        ]
        of_tokens = [column.name for column in self.estimate.columns if column.of_tokens]
        fields += ["step_ids", *of_tokens]
        columns_of_batch = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=fields
        )
        nested_mask = columns_of_batch["response_mask"]
        columns_BT = columns_of_batch.to_padded_tensor()
        rewards_BT = columns_BT["rm_scores"].clone()
        mask_BT = columns_BT["response_mask"]
        old_BT = columns_BT["old_log_probs"]
        # Before any exp(): one NaN of the sampler would make the whole gradient NaN.
        sampler_BT, is_known_BT, unknown_count = replace_unknown_logprobs(
            columns_BT["rollout_log_probs"], old_BT, mask_BT
        )
        metrics["rollout/nan_logprobs"] = unknown_count
        metrics |= self.sampler.check(old_BT, sampler_BT, is_known_BT)
        algorithm = self.config.algorithm
        truncated_B, columns = self._of_episodes(batch)
        advantages_BT, returns_BT = get_adv_estimator_fn(algorithm.adv_estimator)(
            token_level_rewards=rewards_BT,
            response_mask=mask_BT,
            index=np.array(batch.keys, dtype=object),
            section=self.ours.advantage,
            columns=columns | {name: columns_BT[name] for name in of_tokens},
            metrics=metrics,
            estimate=self.estimate,
            logprobs_BT=old_BT,
            ref_logprobs_BT=columns_BT.get("ref_log_prob", None),
            values_BT=columns_BT.get("values", None),
            steps_BT=columns_BT["step_ids"],
            truncated_B=truncated_B,
        )
        has_actions_B = mask_BT.bool().any(dim=1)
        metrics["groups/zero_advantage"] = (
            (advantages_BT == 0).all(dim=1)[has_actions_B].float().mean().item()
        )
        fields = {
            "advantages": advantages_BT,
            "returns": returns_BT,
            "token_level_rewards": rewards_BT,
        }
        tokens_B, episodes_B = votes(batch.keys, self._minibatches(len(batch)), mask_BT)
        fields["episode_tokens"] = tokens_B[:, None].expand_as(mask_BT)
        fields["minibatch_episodes"] = episodes_B[:, None].expand_as(mask_BT)
        correction = algorithm.rollout_correction
        # verl's own step, which stands in the method that this one replaces.
        if correction.rollout_is:
            weights, _, correction_metrics = compute_rollout_correction_and_rejection_mask(
                old_BT, sampler_BT, mask_BT, correction.rollout_is, correction.rollout_is_threshold
            )
            fields["rollout_is_weights"] = weights.batch["rollout_is_weights"]
            metrics |= correction_metrics
        nested_fields = {
            name: response_to_nested(value, nested_mask) for name, value in fields.items()
        }
        self.advantages = {
            parse_key(key): row.tolist()
            for key, row in zip(batch.keys, nested_fields["advantages"].unbind(), strict=True)
        }
        return tq.kv_batch_put(
            keys=batch.keys,
            partition_id=batch.partition_id,
            fields=TensorDict(nested_fields, batch_size=len(batch)),
        )

    def _of_episodes(self, batch: KVBatchMeta) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return data of the rows' episodes: `truncated_B`, and the estimator's columns [B].

        If the value of a row is NaN, another sample of its prompt may have it: the greedy episode
        belongs to only one.
        """
        rows = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=["extra_fields"]
        )
        extras = rows.get("extra_fields").tolist()
        groups = [parse_key(key).group for key in batch.keys]
        columns = {}
        for column in self.estimate.columns:
            if column.of_tokens:
                continue
            values = [extra["columns"][column.name] for extra in extras]
            value_of_group = {
                group: value for group, value in zip(groups, values, strict=True) if value == value
            }
            values = [
                value_of_group.get(group, value)
                for group, value in zip(groups, values, strict=True)
            ]
            columns[column.name] = torch.tensor(values, dtype=column.dtype)
        return torch.tensor([extra["truncated"] for extra in extras]), columns

    def _update_critic(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        """verl fits the critic where the mask is 1: meanwhile that is `critic_mask`."""
        masks = ["response_mask", "loss_mask"]
        whole = tq.kv_batch_get(
            keys=batch.keys,
            partition_id=batch.partition_id,
            select_fields=[*masks, "step_ids"],
        )
        columns_BT = whole.to_padded_tensor()
        mask_BT = columns_BT["response_mask"]
        critic_mask_BT = self.estimate.critic_mask(
            Batch(
                mask_BT=mask_BT,
                rewards_BT=torch.zeros_like(mask_BT),
                steps_BT=columns_BT["step_ids"],
                groups=[],
                trajectory_B=torch.empty(0),
            )
        )
        if critic_mask_BT is mask_BT:
            return super()._update_critic(batch, metrics)
        critic_mask = response_to_nested(critic_mask_BT.long(), whole["response_mask"])
        tq.kv_batch_put(
            keys=batch.keys,
            partition_id=batch.partition_id,
            fields=TensorDict(dict.fromkeys(masks, critic_mask), batch_size=len(batch)),
        )
        batch = super()._update_critic(batch, metrics)
        tq.kv_batch_put(
            keys=batch.keys, partition_id=batch.partition_id, fields=whole.select(*masks)
        )
        return batch

    # ---------------------------------------------------------------------------------- the records

    def _compute_metrics(
        self, batch: KVBatchMeta, metrics: dict, timing_raw, global_steps, epoch
    ) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)
        real = [
            key
            for key, tag in zip(batch.keys, batch.tags, strict=True)
            if not tag.get("is_padding")
        ]
        columns = tq.kv_batch_get(
            keys=real,
            partition_id=batch.partition_id,
            select_fields=["extra_fields", "response_mask"],
        )
        keys = [parse_key(key) for key in real]
        tokens = int(columns["response_mask"].values().sum())
        # Each row of an episode carries the same extras: count them once.
        extras = {
            key.episode: extra
            for key, extra in zip(keys, columns.get("extra_fields").tolist(), strict=True)
        }
        episodes = [EpisodeNumbers(**extra["episode"]) for extra in extras.values()]
        metrics |= (
            episode_metrics(episodes)
            | {"response_length/mean": tokens / len(episodes)}
            | self.checkpoint_metrics
        )
        metrics |= free_host_memory()
        self.checkpoint_metrics = {}
        metrics["perf/agent_tokens_per_s"] = tokens / timing_raw["gen"]
        calls = sum(episode.metrics.get("tool_calls", 0.0) for episode in episodes)
        failures = sum(episode.metrics.get("failed_calls", 0.0) for episode in episodes)
        example = ""
        for extra in extras.values():
            if extra["failed_call"]:
                example = extra["failed_call"]
                break
        refuse_broken_tools(calls, failures, example)
        records = {
            episode: extra["record"] for episode, extra in sorted(extras.items()) if extra["record"]
        }
        if records:
            for key in keys:
                row = records[key.episode]["rows"][key.row]
                advantages = self.advantages[key]
                row["advantages"] = [0.0] * (len(row["input_ids"]) - len(advantages)) + advantages
            write_rollouts(
                self.run.path / "rollouts" / f"step_{global_steps:06d}.jsonl",
                iter(records.values()),
            )
        self.run.metrics.append(metrics)
        if self.ours.trainer.stop_on_collapse:
            stop_and_roll_back(self.run)
        self.phase("next step")

    # ------------------------------------------------------------------------------ the checkpoints

    def _save_checkpoint(self) -> None:
        """Save atomically: verl's checkpoint, the model in Hugging Face's format, a manifest."""
        self.phase("checkpoint: log-probabilities")
        rows = self._logprobs_now()
        self.phase("checkpoint: save")
        super()._save_checkpoint()
        actor = self.config.actor_rollout_ref
        step = self.global_steps
        dtype = actor.actor.fsdp_config.dtype
        shards = keep_shards(self.run, step, self.folder / f"global_step_{step}", dtype, rows)
        self.checkpoint_metrics = finish(
            self.run, self.ours, Path(actor.model.path), shards, self.phase
        )

    def _logprobs_now(self) -> list[dict[str, Any]]:
        """Return some rows of this step with the updated policy's log-probabilities."""
        ranks = self.config.trainer.n_gpus_per_node * self.config.trainer.nnodes
        keys_and_tags = sorted(
            zip(self._batch.keys, self._batch.tags, strict=True),
            key=lambda row: "is_padding" in row[1],
        )
        rows = -(-PARITY_ROWS // ranks) * ranks  # each rank takes as many
        batch = self._batch.select_keys([key for key, _ in keys_and_tags[:rows]])
        batch.extra_info |= {"calculate_entropy": False, "compute_loss": False, "temperature": 1.0}
        self.actor_rollout_wg.compute_log_prob(batch)
        fields = ["input_ids", "log_probs", "response_mask"]
        fields_of_rows = tq.kv_batch_get(
            keys=batch.keys[:PARITY_ROWS], partition_id=batch.partition_id, select_fields=fields
        )
        logprobs = response_from_nested(
            fields_of_rows["log_probs"], fields_of_rows["response_mask"]
        )
        columns = (
            column.unbind()
            for column in (fields_of_rows["input_ids"], logprobs, fields_of_rows["response_mask"])
        )
        return [parity_row(*row) for row in zip(*columns, strict=True)]


def parity_row(ids: torch.Tensor, logprobs: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
    """Cut a row for `checkpoints.compare_logprobs`; some of the response always remains."""
    prompt = len(ids) - len(logprobs)
    length = max(PARITY_TOKENS, prompt + 64)
    answer = {
        "logprobs": logprobs[: length - prompt].tolist(),
        "mask": mask[: length - prompt].tolist(),
    }
    return {"ids": ids[:length].tolist()} | answer
