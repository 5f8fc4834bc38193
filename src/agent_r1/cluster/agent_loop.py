"""Run our episode loop inside verl, with verl's server client as a `Policy`.

In: one question from verl's data loader. Out: its training sequences as verl's `AgentLoopOutput`s,
with our environment's rewards per token. Next: verl's TransferQueue, from which `trainer.py` reads
them.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from verl.experimental.agent_loop import AgentLoopBase, AgentLoopOutput
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics

from agent_r1.chat.format import ChatFormat
from agent_r1.chat.tokenizer import load_chat
from agent_r1.cluster.watchdog import report
from agent_r1.config import Config, from_yaml
from agent_r1.core import Generation, Policy, Sampling, StopReason, Trajectory
from agent_r1.env import environment
from agent_r1.evaluation.records import trajectory_record
from agent_r1.ground.errors import AgentR1Error
from agent_r1.rollout.columns import PROCESS, Column
from agent_r1.rollout.episode import Task, derive_seed
from agent_r1.rollout.rollouts import GREEDY, first_failed_call, greedy_score
from agent_r1.rollout.setup import make_loop
from agent_r1.rollout.training_rows import TrainingRow, trajectory_rows
from agent_r1.tool import BaseTool
from agent_r1.training.metrics import EpisodeNumbers
from agent_r1.training.parts import make_estimator
from agent_r1.workspace import Workspace


class VerlPolicy(Policy):
    """Wrap verl's client of its vLLM servers as a `Policy`, one object per episode.

    It records which weights sampled the episode. A prompt may have `pictures`, in the order of
    their placeholders (recipes/pictures).
    """

    reads_pictures = True

    def __init__(self, client, stop_ids: tuple[int, ...], use_seeds: bool):
        self.client = client
        self.stop_ids = stop_ids
        self.use_seeds = use_seeds
        self.versions: list[int] = []
        self.seconds = 0.0

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, session: str | None = None
    ) -> Generation:
        parameters: dict[str, Any] = {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "logprobs": True,
            "stop_token_ids": list(self.stop_ids),
        }
        if self.use_seeds and sampling.seed is not None:
            parameters["seed"] = sampling.seed % 2**63
        pictures = getattr(prompt_ids, "pictures", ())
        # A text model's server need not know this argument.
        media = {"image_data": list(pictures)} if pictures else {}
        start = time.perf_counter()
        try:
            out = await self.client.generate(
                session, prompt_ids=list(prompt_ids), sampling_params=parameters, **media
            )
        # Ray and vLLM raise many kinds, with the same meaning for the run.
        except Exception as error:
            raise AgentR1Error(
                f"the rollout server failed ({type(error).__name__})", code="server_failed"
            ) from error
        self.seconds += time.perf_counter() - start
        if not out.token_ids or out.stop_reason == "aborted":
            raise AgentR1Error("the rollout server aborted a request", code="server_failed")
        report("tokens", len(out.token_ids))
        self.versions.append(out.extra_fields.get("global_steps") or 0)
        ids = list(out.token_ids)
        # verl reports "completed" for both ends of a turn; length and last token distinguish them.
        reason = "stop"
        if len(ids) >= sampling.max_tokens and ids[-1] not in self.stop_ids:
            reason = "length"
        return Generation(ids, list(out.log_probs), reason)


class RowOutput(AgentLoopOutput):
    """Add rewards per token: verl's `reward_score` rewards only the last token."""

    token_rewards: list[float]
    step_ids: list[int]
    columns: dict[str, Any]
    """Tensors, by the names of the estimator's columns."""

    def as_dict(self) -> dict[str, Any]:
        out = super().as_dict()
        out["rm_scores"] = torch.tensor(out.pop("token_rewards"), dtype=torch.float32)
        out["step_ids"] = torch.tensor(out["step_ids"], dtype=torch.int64)
        return out | out.pop("columns")


class AgentR1Loop(AgentLoopBase):
    """Run one episode.

    verl makes an object for each, by an environment's name in `agent_loops.yaml`.
    """

    def __init__(
        self,
        trainer_config: Any,
        server_manager: Any,
        env_name: str,
        run: str,
        processor: Any = None,
        **_: Any,
    ):
        # Not AgentLoopBase.__init__: it builds a tokenizer wrapper for verl's own loops in each
        # episode.
        self.client = server_manager
        self.processor = processor
        self.env_name = env_name
        self.run_path = Path(run)
        # On a GPU, vLLM samples seeded requests one after the other, at each token; and results do
        # not repeat there anyway.
        self.use_seeds = trainer_config.config.trainer.device == "cpu"
        self.config, self.chat, self.tools = _open_shared(
            run, trainer_config.config.actor_rollout_ref.model.path
        )

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[AgentLoopOutput]:
        """Run one episode; an empty list if it failed.

        In validation a time-out counts as no answer.
        """
        c = self.config
        training = sampling_params["temperature"] > 0
        step = int(row["global_steps"])
        policy = VerlPolicy(self.client, self.chat.stop_ids, self.use_seeds)
        loop = make_loop(policy, self.chat, self.tools, c.rollout, c.env)
        question = {
            **row,
            "prompt": [dict(m) for m in row["raw_prompt"]],
            "agent_name": self.env_name,
        }
        session = f"{row['uid']}_{row['session_id']}"
        seed = derive_seed(
            c.seed, "rollout" if training else "eval", step, row["index"], row["session_id"]
        )
        sampling = Sampling(c.rollout.max_tokens_per_turn, sampling_params["temperature"])
        start = time.perf_counter()
        try:
            self._check_processor()
            trajectory = await loop.play(Task(question, row["uid"], session, seed), sampling)
            compares = training and c.algorithm_has("greedy")
            if compares and row["session_id"] == 0:  # the prompt's other samples share it
                best = Sampling(c.rollout.max_tokens_per_turn, temperature=0.0)
                greedy = await loop.play(Task(question, row["uid"], f"{session}_greedy"), best)
                trajectory.extra[GREEDY] = greedy_score(greedy)
        except (
            AgentR1Error
        ) as error:  # verl logs the error and trains on: with a dead server, without any episode
            self._note_failure(str(error))
            raise
        report("episodes")
        seconds = time.perf_counter() - start
        if trajectory.stop_reason.failed:
            self._note_failure(f"episodes fail: {trajectory.error}")
            if training or trajectory.stop_reason is StopReason.ERROR:
                return []
        # The last column is for the recorded rollouts.
        columns = list(dict.fromkeys((*make_estimator(c).columns, PROCESS)))
        rows = trajectory_rows(trajectory, 0, columns)
        every = c.trainer.rollouts_every
        if not rows:  # the question alone fills the context
            return []
        dump = training and every and (step % every == 0 or step == 1)
        numbers = EpisodeNumbers.from_trajectory(trajectory)
        extra = {
            # verl's validation averages these by name, with `acc` as its core metric.
            "reward_extra_info": numbers.metrics | numbers.parts | {"acc": trajectory.score},
            "episode": asdict(numbers),
            "truncated": trajectory.truncated,
            "columns": {c.name: rows[0].columns[c.name] for c in columns if not c.of_tokens},
            "failed_call": first_failed_call(trajectory),
            "min_global_steps": min(policy.versions),
            "max_global_steps": max(policy.versions),
            "record": trajectory_record(trajectory, rows, None, self.chat, step) if dump else None,
        }
        metrics = AgentLoopMetrics(
            generate_sequences=policy.seconds, tool_calls=seconds - policy.seconds
        )
        outputs: list[AgentLoopOutput] = [
            row_output(r, trajectory, metrics, extra, columns) for r in rows
        ]
        # verl makes pixels and positions of these pictures, and does not store them.
        for output, pictures in zip(outputs, trajectory.extra.get("pictures", ()), strict=False):
            output.multi_modal_data = {"images": list(pictures)}
        return outputs

    def _check_processor(self) -> None:
        """Raise AgentR1Error where verl would train without the pictures of the environment.

        If verl cannot open a model's processor, it warns and takes the model for a text model.
        """
        shows_pictures = getattr(environment(self.env_name), "shows_pictures", False)
        if shows_pictures and self.processor is None:
            raise AgentR1Error(
                f"env.name={self.env_name} shows pictures, and verl has no processor of this "
                "model; install torchvision, and see verl's warning in the log",
                code="pictures_not_read",
            )

    def _note_failure(self, text: str) -> None:
        """Store a failure for the trainer, which only sees that trajectories are missing.

        It is also the last line of a failed command.
        """
        (self.run_path / "verl" / "failure.txt").write_text(text)


def row_output(
    row: TrainingRow,
    trajectory: Trajectory,
    metrics: AgentLoopMetrics,
    extra: dict,
    columns: Sequence[Column] = (),
) -> RowOutput:
    """Convert a training sequence: the prompt ends before the first action.

    The response follows.
    """
    prompt_length = row.action_mask.index(1)
    return RowOutput(
        prompt_ids=row.input_ids[:prompt_length],
        response_ids=row.input_ids[prompt_length:],
        response_mask=row.action_mask[prompt_length:],
        response_logprobs=row.logprobs[prompt_length:],
        token_rewards=row.rewards[prompt_length:],
        step_ids=row.step_ids[prompt_length:],
        columns={
            c.name: torch.tensor(row.columns[c.name][prompt_length:], dtype=c.dtype)
            for c in columns
            if c.of_tokens
        },
        # set, so that verl does not compute one; `token_rewards` is used
        reward_score=trajectory.reward,
        num_turns=len(trajectory.steps),
        metrics=metrics,
        extra_fields=dict(extra),
    )


@functools.cache
def _open_shared(run: str, model: str) -> tuple[Config, ChatFormat, dict[str, BaseTool]]:
    """Open what all episodes of this process share, so that the index is read once."""
    config = from_yaml(Path(run) / "config.yaml", written_here=True)
    note = Path(run) / "verl" / "note.txt"  # launch.py shows it
    return config, load_chat(Path(model)), Workspace(config).load_tools(note.write_text)
