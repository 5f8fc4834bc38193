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
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from agent_r1 import hub
from agent_r1.config import Config, fingerprint, from_yaml, to_yaml, what_counts
from agent_r1.device import resolve_device
from agent_r1.errors import AgentR1Error
from agent_r1.files import locked, write_whole
from agent_r1.rollout import qwen
from agent_r1.rollout.chat_format import ChatFormat
from agent_r1.rollout.episode import make_loop
from agent_r1.rollout.evaluate import evaluate
from agent_r1.rollout.records import question_of, step_records, training_records, write_rollouts
from agent_r1.rollout.rows import Batch
from agent_r1.rollout.sampler import LocalPolicy
from agent_r1.tool import BaseTool
from agent_r1.training.checkpoint import list_checkpoints, read_checkpoint, refuse_weights, save_checkpoint
from agent_r1.training.dashboard import Dashboard
from agent_r1.training.learner import Learner, make_learner
from agent_r1.training.log import MetricsFile, trackers
from agent_r1.training.loop import train
from agent_r1.training.tiny_model import load_chat, load_tokenizer, save_tokenizer
from agent_r1.types import Row, Trajectory
from agent_r1.workspace import Workspace, check_local_model, data_folder, needed, needs_index


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


def only_trainer(run: RunDir) -> AbstractContextManager[None]:
    """Within it, no other process trains the run."""
    return locked(run.path / ".lock", f"another process is training {run.path}; wait for it, or choose --run NAME")


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
    with only_trainer(run):
        learner, reference = _start(run, config, start_model)
        chat = load_chat(start_model)
        run.metrics.truncate_after(learner.step)
        device, dtype = resolve_device(config.trainer)
        about = (
            f"preset {config.preset} · {config.algorithm} · {learner.actor.parameter_count / 1e6:.2f} M parameters · "
            f"{device}, {str(dtype)[6:]}"
        )
        history = run.metrics.read()
        with (
            trackers(config.trainer.loggers, run.path, config.model_dump(), history) as track,
            Dashboard(run.path.name, about, config.trainer.steps, history=history, plain=plain) as dashboard,
            graceful_interrupt() as interrupted,
        ):
            limit = TimeLimit(config.trainer.max_hours, started)
            recorder = _Recorder(run, config, chat, tools, val, learner, dashboard, track, interrupted, limit)
            train(config, learner, chat, tools, questions, recorder.step, recorder.evaluate, recorder.save, reference)
    return run.latest_checkpoint()


def _start(run: RunDir, config: Config, start_model: Path) -> tuple[Learner, qwen.Qwen | None]:
    """The learner at its newest checkpoint (or at the beginning), and the reference model if the KL needs one."""
    device, _ = resolve_device(config.trainer)
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

    def step(self, metrics: dict[str, float], trajectories: list[Trajectory], batch: Batch) -> None:
        step, t = self.learner.step, self.config.trainer
        metrics = {"training/global_step": step} | metrics
        self.run.metrics.append(metrics)
        self.track(metrics)
        if t.rollouts_every and (step % t.rollouts_every == 0 or step == 1):
            records = training_records(batch, self.chat, step)
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
        loop = make_loop(policy, self.chat, self.tools, self.config.rollout, self.config.env)
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


def _first_difference(old: Config, new: Config) -> str:
    """`actor.lr: 0.0003 there, 0.001 now` for the first setting that differs and matters."""

    def flat(value: Any, prefix: str = "") -> dict[str, Any]:
        if not isinstance(value, dict):
            return {prefix[:-1]: value}
        return {k: v for key, inner in value.items() for k, v in flat(inner, f"{prefix}{key}.").items()}

    a, b = flat(what_counts(old)), flat(what_counts(new))
    key = next(k for k in sorted(a.keys() | b.keys()) if a.get(k) != b.get(k))
    return f"{key}: {a.get(key)} there, {b.get(key)} now"


def start_model(config: Config) -> Path:
    """The folder of the model that RL starts from. Raises AgentR1Error when it is not there."""
    path, workspace = config.model.path, Workspace.of(config)
    if path and not hub.is_name(path):
        check_local_model(path)
    data_folder(config)  # the first that is missing is the one to name
    if needs_index(config):
        needed(workspace.index, "agent-r1 index", config)
    needed(workspace.start_model, "agent-r1 cold-start", config)
    check_start_model(config)
    return workspace.start_model


def check_start_model(config: Config) -> None:
    """What no run can start from, said before anything is computed or written. Raises AgentR1Error."""
    model = Workspace.of(config).start_model
    if trouble := hub.damage(model):
        raise AgentR1Error(f"this model cannot be trained: {trouble}")
    if config.engine == "local":
        qwen.read_shape(model)
    chat = ChatFormat(load_tokenizer(model))
    if config.env.tools:
        chat.check_tools()
