"""One training run on disk: what is recorded while `loop.train` works, and how an interrupted run goes on.

    runs/<name>/config.yaml            the resolved configuration
                metrics.jsonl          one line a step
                rollouts/*.jsonl       whole trajectories: ids, masks, log-probs, rewards, advantages
                checkpoints/step_*/    see checkpoint.py
                eval_before.json       the model that RL started from, on the test split
                eval.json              the trained one
                report.html

A run is exactly repeatable: all randomness hangs on (seed, step), so continuing from the newest checkpoint gives the
weights and the curve that the run would have had without the interruption.
"""

from __future__ import annotations

import dataclasses
import fcntl
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agent_r1.config import Config, fingerprint, from_yaml, to_yaml, what_counts
from agent_r1.errors import AgentR1Error
from agent_r1.files import json_line, write_whole
from agent_r1.inference.evaluate import evaluate
from agent_r1.rollout import qwen
from agent_r1.rollout.chat_format import ChatFormat
from agent_r1.rollout.engine import LocalPolicy
from agent_r1.rollout.episode import make_loop
from agent_r1.rollout.rows import TrainingRow, trajectory_rows
from agent_r1.rollout.types import Row, Trajectory
from agent_r1.tool import BaseTool
from agent_r1.training.checkpoint import list_checkpoints, read_checkpoint, refuse_weights, save_checkpoint
from agent_r1.training.dashboard import Dashboard, RunInfo
from agent_r1.training.loggers import MetricsFile, trackers
from agent_r1.training.loop import Experience, Learner, make_learner, resolve_device, train
from agent_r1.training.tiny_model import load_chat, save_tokenizer


@dataclasses.dataclass(frozen=True)
class RunDir:
    """The places of a run."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> MetricsFile:
        return MetricsFile(self.path / "metrics.jsonl")

    def latest_checkpoint(self) -> Path | None:
        """The newest checkpoint, or None."""
        return (list_checkpoints(self.checkpoints) or [None])[-1]

    def begun(self) -> bool:
        """Has anything run here? The folder alone says nothing: it may be that of a run that was refused."""
        return any((self.path / name).exists() for name in ("metrics.jsonl", "checkpoints", "eval_before.json"))

    def finished(self, config: Config) -> bool:
        """Is the last step's checkpoint there?"""
        latest = self.latest_checkpoint()
        return latest is not None and latest.name == f"step_{config.trainer.steps:06d}"


def open_run(run: RunDir, config: Config, resume: bool) -> None:
    """Make the run's folder, or check that an existing one can be continued. Raises AgentR1Error with the remedy."""
    check_same_settings(run, config)
    if run.latest_checkpoint() is not None and not resume and not run.finished(config):
        raise AgentR1Error(
            f"{run.path} holds an unfinished run ({run.latest_checkpoint().name}); add --resume to continue it, or "
            "choose another name with --run NAME"
        )
    try:
        (run.path / "rollouts").mkdir(parents=True, exist_ok=True)
        write_whole(run.config, to_yaml(config))
    except OSError as error:
        raise AgentR1Error(
            f"cannot write to {run.path} ({error.strerror}); free space, or set AGENT_R1_HOME to a folder of yours"
        ) from None


def check_same_settings(run: RunDir, config: Config) -> None:
    """Raises AgentR1Error when the run exists and was started with settings that would give other weights."""
    if not (run.config.exists() and run.begun()):
        return
    saved = from_yaml(run.config)
    if fingerprint(saved) != fingerprint(config):
        raise AgentR1Error(
            f"{run.path} was started with other settings ({_first_difference(saved, config)}); choose another name with "
            "--run NAME, or delete the folder"
        )


@contextmanager
def locked(run: RunDir) -> Iterator[None]:
    """Only one process may train a run. The lock dies with its process, so a crash leaves none behind."""
    with (run.path / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise AgentR1Error(f"another process is training {run.path}; wait for it, or choose --run NAME") from None
        yield


def run_training(
    run: RunDir,
    config: Config,
    start_model: Path,
    tools: dict[str, BaseTool],
    questions: list[Row],
    val: list[Row],
    resume: bool,
    plain: bool,
) -> Path:
    """Train `start_model`, or go on from the newest checkpoint, and return the last checkpoint's folder."""
    started = time.time()
    open_run(run, config, resume)
    with locked(run):
        learner, reference = _start(run, config, start_model)
        chat = load_chat(start_model)
        run.metrics.truncate_after(learner.step)
        device, dtype = resolve_device(config)
        size = f"{learner.actor.parameter_count / 1e6:.2f} M parameters"
        info = RunInfo(
            run.path.name, config.preset, config.algorithm, size, f"{device}, {str(dtype)[6:]}", config.trainer.steps
        )
        history = run.metrics.read()
        with (
            trackers(config.trainer.loggers, run.path, dataclasses.asdict(config), history) as track,
            Dashboard(info, history=history, plain=plain or None) as dashboard,
            graceful_interrupt() as interrupted,
        ):
            limit = TimeLimit(config.trainer.max_hours, started)
            recorder = _Recorder(run, config, chat, tools, val, learner, dashboard, track, interrupted, limit)
            train(config, learner, chat, tools, questions, recorder.step, recorder.evaluate, recorder.save, reference)
    return run.latest_checkpoint()


def _start(run: RunDir, config: Config, start_model: Path) -> tuple[Learner, qwen.Qwen | None]:
    """The learner at its newest checkpoint (or at the beginning), and the reference model if the KL needs one."""
    device, _ = resolve_device(config)
    checkpoint = run.latest_checkpoint()
    if checkpoint:  # held against its hashes before any of its weights is read
        step, state = read_checkpoint(checkpoint, fingerprint(config))
    learner = make_learner(config, qwen.load(checkpoint / "model" if checkpoint else start_model), device)
    if checkpoint:
        learner.step = step
        learner.actor_optimizer.load_state_dict(state["actor_optimizer"])
        if learner.critic is not None:
            learner.critic.load_state_dict(state["critic"])
            learner.critic_optimizer.load_state_dict(state["critic_optimizer"])
    reference = qwen.load(start_model).to(device) if config.actor.kl_coef else None
    return learner, reference


class _Recorder:
    """The side effects of training: files, screen, loggers."""

    def __init__(
        self,
        run: RunDir,
        config: Config,
        chat: ChatFormat,
        tools: dict[str, BaseTool],
        val: list[Row],
        learner: Learner,
        dashboard: Dashboard,
        track: Callable[[dict[str, float]], None],
        interrupted: list[int],
        limit: TimeLimit,
    ):
        self.run, self.config, self.chat, self.tools, self.val = run, config, chat, tools, val
        self.learner, self.dashboard, self.track, self.interrupted = learner, dashboard, track, interrupted
        self.limit = limit

    def step(self, metrics: dict[str, float], trajectories: list[Trajectory], experience: Experience) -> None:
        step, t = self.learner.step, self.config.trainer
        metrics = {"training/global_step": step} | metrics
        self.run.metrics.append(metrics)
        self.track(metrics)
        if t.rollouts_every and (step % t.rollouts_every == 0 or step == 1):
            records = experience_records(experience, self.chat, step)
            write_rollouts(self.run.path / "rollouts" / f"step_{step:06d}.jsonl", records)
        self.dashboard.step(metrics)
        shown = trajectories[0]
        self.dashboard.transcript(question_of(shown.row), step_records(shown, self.chat), shown.reward)
        over = self.limit.reached() and step < t.steps
        if self.interrupted or over:
            self.save(self.learner)
            why = "" if self.interrupted else self.limit.said
            raise KeyboardInterrupt(f"{why}stopped after step {step}; continue with --resume")

    def evaluate(self, policy: LocalPolicy) -> dict[str, float]:
        """Greedy and sampled score on the validation questions. Greedy alone hides the mixture that RL works on."""
        loop = make_loop(policy, self.chat, self.tools, self.config)
        out, slots = {}, self.config.rollout.slots
        for name, temperature in (("acc/mean@1", 0.0), ("sampled_acc", self.config.rollout.temperature)):
            done = evaluate(loop, self.val, temperature=temperature, seed=self.config.seed, at_once=slots)
            out[f"val-core/{self.config.data.name}/{name}"] = sum(t.score for t in done) / len(done)
        return out

    def save(self, learner: Learner) -> None:
        for who, network in (("policy", learner.actor), ("critic", learner.critic)):
            refuse_weights([] if network is None else network.parameters(), f"step {learner.step}: the {who}")
        state: dict[str, Any] = {"actor_optimizer": learner.actor_optimizer.state_dict()}
        if learner.critic is not None:
            state |= {
                "critic": learner.critic.state_dict(),
                "critic_optimizer": learner.critic_optimizer.state_dict(),
            }
        save_checkpoint(
            self.run.checkpoints,
            learner.step,
            lambda folder: write_model(learner.actor, self.chat, folder),
            state,
            fingerprint(self.config),
            self.config.trainer.keep_checkpoints,
        )


def write_model(model: qwen.Qwen, chat: ChatFormat, folder: Path) -> None:
    """A Hugging Face folder: weights, configuration, tokenizer, chat template."""
    ends = list(chat.stop_ids)
    qwen.save(model, folder, ends if len(ends) > 1 else ends[0], chat.tokenizer.pad_token_id)
    save_tokenizer(chat.tokenizer, folder)


@contextmanager
def graceful_interrupt() -> Iterator[list[int]]:
    """The first Ctrl-C lets the step finish and saves it; the second one stops at once."""
    received: list[int] = []

    def on_signal(number, frame):
        if received:
            raise KeyboardInterrupt
        received.append(number)

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class TimeLimit:
    """`trainer.max_hours`, asked after each step. `started` is in seconds since 1970."""

    def __init__(self, hours: float, started: float):
        self.end = started + 3600 * hours if hours else float("inf")
        self.said = f"trainer.max_hours={hours:g} would be over in the next step; "
        self.last, self.longest = time.time(), 0.0

    def reached(self) -> bool:
        """Would another step, as long as the longest one so far (it had an evaluation or a checkpoint), end too late?"""
        now = time.time()
        self.last, self.longest = now, max(self.longest, now - self.last)
        return now + self.longest > self.end


# ------------------------------------------------------------------------------------------ trajectories for people


def question_of(row: Row) -> str:
    """The user's words."""
    return row["prompt"][-1]["content"]


def step_records(trajectory: Trajectory, chat: ChatFormat) -> list[dict[str, Any]]:
    """The turns of a trajectory as text and facts."""
    return [
        {"text": chat.decode(s.action_ids), "reward": s.reward, "finish_reason": s.finish_reason, "info": s.info}
        for s in trajectory.steps
    ]


def trajectory_record(
    trajectory: Trajectory,
    rows: list[TrainingRow],
    advantages: list[list[float]] | None,
    chat: ChatFormat,
    step: int | None,
) -> dict[str, Any]:
    """One line of a rollouts file; `inspect/` and the report read it."""
    row = trajectory.row
    return {
        "step": step,
        "group_id": trajectory.group_id,
        "question": question_of(row),
        "ground_truth": list(row["reward_model"]["ground_truth"]),
        "kind": row["extra_info"].get("kind", ""),
        "stop_reason": trajectory.stop_reason.value,
        "reward": trajectory.reward,
        "reward_parts": trajectory.reward_parts,
        "metrics": trajectory.metrics,
        "error": trajectory.error,
        "rows": [
            {
                "input_ids": r.input_ids,
                "tokens": [chat.decode([i]) for i in r.input_ids],
                "action_mask": r.action_mask,
                "logprobs": r.logprobs,
                "rewards": r.rewards,
                "advantages": advantages[i] if advantages else None,
                "step_ids": r.step_ids,
            }
            for i, r in enumerate(rows)
        ],
        "steps": step_records(trajectory, chat),
    }


def experience_records(x: Experience, chat: ChatFormat, step: int) -> Iterator[dict[str, Any]]:
    """The records of a training step, with advantages."""
    advantages = [a[: len(r.input_ids)] for a, r in zip(x.advantages_BT.tolist(), x.rows, strict=True)]
    for number, trajectory in enumerate(x.trajectories):
        mine = [i for i, r in enumerate(x.rows) if r.trajectory == number]
        yield trajectory_record(trajectory, [x.rows[i] for i in mine], [advantages[i] for i in mine], chat, step)


def evaluation_records(trajectories: list[Trajectory], chat: ChatFormat) -> Iterator[dict[str, Any]]:
    """The records of an evaluation: no advantages there."""
    for number, trajectory in enumerate(trajectories):
        yield trajectory_record(trajectory, trajectory_rows(trajectory, number), None, chat, None)


def write_rollouts(path: Path, records: Iterator[dict[str, Any]]) -> None:
    """Write a rollouts file, whole or not at all. Raises AgentR1Error when there is no space."""
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("w") as file:
            for record in records:
                file.write(json_line(record))
        part.rename(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise AgentR1Error(
            f"cannot write {path} ({error.strerror}); free space or mend permissions, then run the same command again "
            "(`agent-r1 train` with --resume)"
        ) from None


def _first_difference(old: Config, new: Config) -> str:
    """`actor.lr: 0.0003 there, 0.001 now` for the first setting that differs and matters."""

    def flat(value: Any, prefix: str = "") -> dict[str, Any]:
        if not isinstance(value, dict):
            return {prefix[:-1]: value}
        return {k: v for key, inner in value.items() for k, v in flat(inner, f"{prefix}{key}.").items()}

    a, b = flat(what_counts(old)), flat(what_counts(new))
    key = next(k for k in sorted(a.keys() | b.keys()) if a.get(k) != b.get(k))
    return f"{key}: {a.get(key)} there, {b.get(key)} now"
