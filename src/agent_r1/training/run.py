"""Run training on disk (run_dir.py): record it, and resume it after an interruption.

A run is exactly repeatable: all randomness depends on (seed, step). Resuming from the newest
checkpoint gives the same weights and metrics as an uninterrupted run.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from agent_r1.chat.fit import check_dialect
from agent_r1.chat.format import ChatFormat
from agent_r1.chat.tokenizer import load_chat, save_tokenizer
from agent_r1.config import Config, fingerprint, shareable
from agent_r1.config.settings import ActorConfig, CriticConfig, RolloutConfig, TrainerConfig
from agent_r1.core import Row, Trajectory
from agent_r1.env import dialect_of, make_env
from agent_r1.evaluation.evaluate import by_kind, evaluate
from agent_r1.evaluation.records import question_of, step_records, training_records, write_rollouts
from agent_r1.ground import bounds, hub
from agent_r1.ground.device import resolve_device
from agent_r1.ground.errors import AgentR1Error, ConfigError
from agent_r1.ground.files import remove
from agent_r1.model import decoder
from agent_r1.model import files as model_files
from agent_r1.model.sampler import LocalPolicy
from agent_r1.rollout.episode import AgentEnvLoop
from agent_r1.rollout.setup import make_loop
from agent_r1.rollout.training_rows import Batch
from agent_r1.tool import BaseTool
from agent_r1.training.checkpoint import (
    checkpoint_step,
    list_checkpoints,
    read_checkpoint,
    refuse_weights,
    save_checkpoint,
)
from agent_r1.training.folder_check import check_folder
from agent_r1.training.learner import Learner, make_learner
from agent_r1.training.loop import train
from agent_r1.training.parts import make_parts
from agent_r1.training.run_dir import (
    RunDir,
    fingerprints_of_checkpoint,
    only_trainer,
    open_run,
)
from agent_r1.watch.dashboard import Dashboard
from agent_r1.watch.log import (
    AGENT_SCORE,
    STEP_KEY,
    VAL_EM,
    Track,
    first_agent_step,
    free_host_memory,
    process_memory,
    trackers,
    with_val_em,
)
from agent_r1.watch.sentinel import SPAN, new_signs
from agent_r1.workspace import Workspace, check_local_model


def run_training(
    run: RunDir,
    config: Config,
    start_model: Path,
    tools: dict[str, BaseTool],
    questions: list[Row],
    val_rows: list[Row],
    plain: bool,
) -> Path:
    """Train `start_model`, or continue from the newest checkpoint.

    Return the last checkpoint's folder.
    """
    limit = TimeLimit(config.trainer.max_hours, time.time())
    with only_trainer(run):
        open_run(run, config)
        device, dtype = resolve_device(config.trainer.device, config.trainer.dtype)
        critic = config.critic if config.algorithm_has("critic") else None
        made_with = fingerprints_of_checkpoint(run, config)
        learner = start_learner(run, made_with, start_model, config.actor, critic, device)
        learner.actor.recompute = config.trainer.recompute
        if learner.critic is not None:
            learner.critic.trunk.recompute = config.trainer.recompute
        reference = model_files.load_model(start_model, device) if config.actor.kl_coef else None
        chat = load_chat(start_model)
        run.metrics.truncate_after(learner.step)
        history = run.metrics.read()
        parts = dialect_of(config.env).parts
        about = (
            f"preset {config.preset} · {config.algorithm} · "
            f"{learner.actor.parameter_count / 1e6:.2f} M parameters · {device}, {str(dtype)[6:]}"
        )
        with (
            trackers(
                config.trainer.loggers,
                run.path,
                shareable(config).model_dump(),
                learner.step + 1,
            ) as track,
            Dashboard(
                run.path.name,
                about,
                config.trainer.steps,
                history=history,
                parts=parts,
                plain=plain,
            ) as dashboard,
            graceful_interrupt(dashboard.finishing) as signals,
        ):

            def validate(policy: LocalPolicy) -> dict[str, float]:
                loop = make_loop(policy, chat, tools, config.rollout, config.env)
                return validation(loop, val_rows, config.rollout, config.seed)

            recorder = _Recorder(
                run,
                config.trainer,
                fingerprint(config),
                learner,
                chat,
                dashboard,
                track,
                limit,
                signals,
            )
            env_of = partial(make_env, tools=tools, config=config.env)
            train(
                config,
                make_parts(config, learner.actor, chat, env_of, questions),
                learner,
                recorder.step,
                validate,
                recorder.save,
                reference,
            )
    return run.latest_checkpoint()


def start_learner(
    run: RunDir,
    made_with: list[str],
    start_model: Path,
    actor: ActorConfig,
    critic: CriticConfig | None,
    device: str,
) -> Learner:
    """Load the learner of the newest checkpoint, or start one.

    `made_with`: fingerprints that its configuration may have.
    """
    checkpoint = run.latest_checkpoint()
    if checkpoint is None:
        return make_learner(model_files.load_model(start_model, device), actor, critic)
    # Checks all hashes before any weights are read.
    step, state = read_checkpoint(checkpoint, *made_with)
    learner = make_learner(model_files.load_model(checkpoint / "model", device), actor, critic)
    learner.step = step
    learner.actor_optimizer.load_state_dict(state["actor_optimizer"])
    if critic is not None:
        learner.critic.load_state_dict(state["critic"])
        learner.critic_optimizer.load_state_dict(state["critic_optimizer"])
    return learner


def validation(
    loop: AgentEnvLoop, rows: list[Row], rollout: RolloutConfig, seed: int
) -> dict[str, float]:
    """Score validation questions greedily and sampled. Greedy scores hide the mixture that RL
    improves. Where the questions are of several kinds, each kind has a greedy score of its own."""
    scores = {}
    source = rows[0]["data_source"]
    for name, temperature in (("acc/mean@1", 0.0), ("sampled_acc", rollout.temperature)):
        trajectories = evaluate(
            loop,
            rows,
            temperature=temperature,
            seed=seed,
            max_concurrent=rollout.max_concurrent_episodes,
        )
        score = sum(t.score for t in trajectories) / len(trajectories)
        scores[f"val-core/{source}/{name}"] = score
        kinds = by_kind(trajectories)
        # With one kind, its score is the one above.
        if temperature == 0.0 and len(kinds) > 1:
            for kind, members in kinds.items():
                score_of_kind = sum(t.score for t in members) / len(members)
                scores[f"val-aux/{source}/{kind}/{name}"] = score_of_kind
    return scores


@dataclasses.dataclass
class _Recorder:
    """The side effects of training: files, screen, trackers."""

    run: RunDir
    trainer: TrainerConfig
    made_with: str  # fingerprint of the configuration
    learner: Learner
    chat: ChatFormat
    dashboard: Dashboard
    track: Track
    limit: TimeLimit
    signals: list[int]  # received so far; see `graceful_interrupt`

    def step(self, metrics: dict[str, float], trajectories: list[Trajectory], batch: Batch) -> None:
        step = self.learner.step
        every = self.trainer.rollouts_every
        metrics = {STEP_KEY: step} | metrics | free_host_memory() | process_memory()
        self.run.metrics.append(metrics)
        self.track(metrics)
        if every and (step % every == 0 or step == 1):
            records = training_records(batch, self.chat, step)
            write_rollouts(self.run.path / "rollouts" / f"step_{step:06d}.jsonl", records)
        score = with_val_em(metrics).get(VAL_EM) or 0.0
        # The file is read only after a validation that is good enough, not in every step.
        if score >= AGENT_SCORE and first_agent_step(self.run.metrics.read()) == step:
            # Saved now, so that a chat can open it while the run goes on.
            self.save(self.learner)
            self.dashboard.note(
                f"an agent: greedy validation {score:.3f} at step {step}; talk to it: "
                f"agent-r1 chat --run {self.run.path.name} --step {step}"
            )
        reasons = [sign.stop_reason for sign in self.dashboard.step(metrics) if sign.stop_reason]
        example = next((t for t in trajectories if t.stop_reason in reasons), trajectories[0])
        if reasons:
            self.dashboard.note(f"for example: {step_records(example, self.chat)[-1]['text']}")
        self.dashboard.transcript(
            question_of(example.row), step_records(example, self.chat), example.reward
        )
        if self.trainer.stop_on_collapse:
            stop_and_roll_back(self.run)
        over = self.limit.would_exceed() and step < self.trainer.steps
        if self.signals or over:
            self.save(self.learner)
            why = "" if self.signals else self.limit.message
            raise KeyboardInterrupt(f"{why}stopped after step {step}; continue with --resume")

    def save(self, learner: Learner) -> None:
        saved = self.run.latest_checkpoint()
        if saved and checkpoint_step(saved) == learner.step:
            return  # the first agent's step may also be one of `trainer.save_every`
        state: dict[str, Any] = {"actor_optimizer": learner.actor_optimizer.state_dict()}
        refuse_weights(learner.actor.parameters(), f"step {learner.step}: the policy")
        if learner.critic is not None:
            refuse_weights(learner.critic.parameters(), f"step {learner.step}: the critic")
            state["critic"] = learner.critic.state_dict()
            state["critic_optimizer"] = learner.critic_optimizer.state_dict()
        write = partial(write_model, learner.actor, self.chat)
        keep = self.trainer.keep_checkpoints
        # The user was told to talk to the first agent, so it stays.
        agent = first_agent_step(self.run.metrics.read())
        folder = self.run.checkpoints
        save_checkpoint(folder, learner.step, write, state, self.made_with, keep, spare=agent)


def stop_and_roll_back(run: RunDir) -> None:
    """Raise AgentR1Error if the newest metrics mean collapse.

    Delete the checkpoints since it began.
    """
    collapses = [sign for sign in new_signs(run.metrics.read()) if sign.collapse]
    if not collapses:
        return
    first = collapses[0]
    checkpoints = list_checkpoints(run.checkpoints)
    # A sign compares means over SPAN steps, so it may appear that many steps late.
    healthy = [c for c in checkpoints if checkpoint_step(c) <= first.step - SPAN]
    advice = "no checkpoint is older than that"
    if healthy:
        # Without a healthy one nothing is deleted: a bad checkpoint is better than none.
        for checkpoint in checkpoints:
            if checkpoint not in healthy:
                remove(checkpoint)
        advice = f"the last healthy checkpoint is {healthy[-1]}"
    raise AgentR1Error(
        f"stopped after step {first.step} (trainer.stop_on_collapse); {advice}. {first}",
        code="collapsed",
    )


def write_model(model: decoder.Decoder, chat: ChatFormat, folder: Path) -> None:
    """Write a Hugging Face folder: weights, configuration, tokenizer, chat template."""
    ends = list(chat.stop_ids)
    model_files.save_model(
        model,
        folder,
        ends if len(ends) > 1 else ends[0],
        chat.tokenizer.pad_token_id,
        read_generation_config(chat),
    )
    save_tokenizer(chat.tokenizer, folder)


def read_generation_config(chat: ChatFormat) -> dict[str, Any]:
    """Return what generation_config.json of the start model says, such as a repetition penalty."""
    file = Path(chat.tokenizer.name_or_path or "", "generation_config.json")
    if not chat.tokenizer.name_or_path or not file.is_file():
        return {}
    generation_config = bounds.read_json(file)
    return generation_config if isinstance(generation_config, dict) else {}


@contextmanager
def graceful_interrupt(acknowledge: Callable[[], None] = lambda: None) -> Iterator[list[int]]:
    """Finish the step at the first Ctrl-C, after calling `acknowledge`; stop at the second.

    SIGTERM (Slurm, a preempted machine) and SIGHUP (a broken SSH connection) count as Ctrl-C.
    """
    signals: list[int] = []
    terminals = [stream for stream in (1, 2) if os.isatty(stream)]

    def on_signal(number, frame):
        if signals:
            raise KeyboardInterrupt
        signals.append(number)
        if (
            number == signal.SIGHUP
        ):  # the terminal cannot be written to, and its shell sends the signal again
            signal.signal(number, signal.SIG_IGN)
            for stream in terminals:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        with suppress(RuntimeError):  # the signal interrupted other output
            acknowledge()

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
        numbers.append(signal.SIGHUP)
    previous = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield signals
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class TimeLimit:
    """`trainer.max_hours`, checked after each step. `start_time` is in seconds since 1970."""

    def __init__(self, hours: float, start_time: float):
        self.end = start_time + 3600 * hours if hours else float("inf")
        self.message = f"trainer.max_hours={hours:g} would be over in the next step; "
        self.last = time.time()
        self.longest = 0.0

    def would_exceed(self) -> bool:
        """Return whether another step, as long as the longest so far, would exceed the limit."""
        now = time.time()
        self.last, self.longest = now, max(self.longest, now - self.last)
        return now + self.longest > self.end


def start_model(paths: Workspace) -> Path:
    """Return the folder of the model that RL starts from. Raise AgentR1Error if it is missing."""
    if paths.config.model.path:
        check_local_model(paths.config.model.path)
    paths.data_folder()  # raises first, so that the first missing stage is named
    if paths.needs_index:
        paths.require(paths.index, "agent-r1 index")
    paths.require(paths.start_model, "agent-r1 cold-start")
    check_start_model(paths)
    return paths.start_model


def check_start_model(paths: Workspace) -> None:
    """Check the start model before anything is computed or written.

    Raise AgentR1Error for a fault.
    """
    check_network(paths.config, paths.start_model)
    chat = load_chat(paths.start_model)
    check_dialect(chat, paths.config.env, bool(paths.config.env.tools))


def check_network(config: Config, model: Path) -> None:
    """Raise AgentR1Error for damaged weights, a short context or an unsupported architecture."""
    trouble = hub.damage(model)
    if trouble:
        raise AgentR1Error(f"this model cannot be trained: {trouble}", code="damaged_model")
    context = config.rollout.max_context
    longest = model_files.read_config(model).get("max_position_embeddings", context)
    if context > longest:
        raise ConfigError(
            f"rollout.max_context={context} is more than the model's {longest} positions",
            code="context_exceeds_model",
        )
    is_local = config.engine == "local"
    if is_local:
        model_files.check_head(model)  # raises for an architecture that the loop lacks, too
    if config.model.path:
        check_folder(model, weights=is_local)
