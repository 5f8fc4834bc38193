"""Make the model that RL starts from (the stage before RL).

In: a configuration. Out: a model folder in `artifacts/`. Next: `stages.py` trains it.
Demonstrations come from the data set's `teacher` (tables.py), a user-defined function, or recorded
conversations (`cold_start/demonstrate.py`).
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch

from agent_r1.chat.fit import check_dialect
from agent_r1.chat.format import ChatFormat
from agent_r1.chat.start import check_start_chat
from agent_r1.chat.tokenizer import byte_chat, chat_with_tools, load_chat, train_tokenizer
from agent_r1.cold_start.clone import (
    COPY_DECAY_OF_FEW,
    MIX_DECAY_OF_FEW,
    WEIGHT_DECAY,
    Lesson,
    Phase,
    clone,
)
from agent_r1.cold_start.probe import (
    Probe,
    probe_tasks,
    samples_of,
    summarize,
    warning_or_refusal,
)
from agent_r1.cold_start.tiny_model import new_model
from agent_r1.config import fingerprint, plugins, tables, user_code
from agent_r1.core import Sampling
from agent_r1.env import without_tools
from agent_r1.ground import hub
from agent_r1.ground.device import resolve_device
from agent_r1.ground.errors import ConfigError
from agent_r1.ground.files import json_line, write_whole, writing
from agent_r1.ground.machine import set_threads
from agent_r1.ground.ui import progress, say
from agent_r1.model import files as model_files
from agent_r1.model.sampler import LocalPolicy
from agent_r1.rollout.rollouts import run_episodes
from agent_r1.rollout.setup import make_loop
from agent_r1.rollout.training_rows import TrainingRow
from agent_r1.training.plan_local import check_free_memory
from agent_r1.training.run import check_network, check_start_model, write_model
from agent_r1.training.settings import ColdStartConfig
from agent_r1.workspace import Workspace, check_local_model, code, stage

CLONED_ROWS = "cloned.jsonl"
"""File of the start model's folder: the rows that were cloned, as token ids."""
CLONED_COUNTS = "cloned.json"
"""What these rows show, where the data set can tell (`count` in its table)."""


class Lessons(NamedTuple):
    """What a cold start clones, and in which chat format."""

    chat: ChatFormat
    copy: Lesson
    """For the first phase of a new model, which learns to copy names."""
    mix: Lesson
    """For the second phase, and for the only one of a pretrained model."""


def make_cold_start(paths: Workspace) -> None:
    """Make tokenizer and tiny model, and clone an imperfect demonstrator (stage).

    A pretrained `model.path` is fetched instead, and cloned into only with `cold_start.warm_steps`.
    Raises ConfigError for a task without a demonstrator.
    """
    config = paths.config
    settings = config.cold_start
    clones = not config.model.path or settings.warm_steps > 0
    has_own = settings.demonstrator or settings.episodes
    has_teacher = "teacher" in config.data_facts and config.searches  # ours only search
    if clones and not has_own and not has_teacher:
        raise ConfigError(
            "this task has no demonstrator: set cold_start.demonstrator to your function "
            "(FILE.py:FUNCTION), cold_start.episodes to recorded conversations, or model.path to a "
            "pretrained model; the built-in demonstrators only search",
            code="missing_demonstrator",
        )
    check_start_chat(config)
    if config.model.path:
        will_clone = clones and not paths.cold_start.exists()
        # Both refuse what cloning would only find after minutes: before the download by its size,
        # after it by its files.
        if will_clone:
            check_free_memory(config)
        _fetch_model(paths, config.model.path)
        if will_clone:
            check_network(config, paths.base_model)
        if clones:
            title = f"warm start: teach {config.model.path} the format"
            stage(title, paths.cold_start, lambda part: _teach(paths, part))
        check_start_model(paths)
        return
    title = "cold start: teach a new model the format, to copy, and to play badly"
    try:
        stage(title, paths.cold_start, lambda part: _teach(paths, part))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            "the cold start keeps no checkpoint, so the next call begins it anew; data and index "
            f"are kept in {paths.root / 'artifacts'}"
        ) from None


def show_probe(paths: Workspace) -> Probe | None:
    """Probe the model of the cold start and print it, or read an earlier result.

    Returns None if there is nothing to probe: a pretrained model, or `cold_start.probe=0`.
    """
    config = paths.config
    groups = config.cold_start.probe
    if config.model.path or not groups:
        return None
    digest = fingerprint(
        config.rollout, config.env, config.seed, groups, *code(*user_code(config, trains=False))
    )
    file = paths.cold_start.with_name(f".probe-{paths.cold_start.name}-{digest}.json")
    # No file, a damaged one, or one with the fields of another version: probe again.
    with suppress(OSError, ValueError, TypeError):
        return Probe(**json.loads(file.read_text()))
    probe = _play_probe(paths, groups)
    with writing(file):
        write_whole(file, json.dumps(asdict(probe)) + "\n")
    say(f"  {probe}")
    return probe


def _play_probe(paths: Workspace, groups: int) -> Probe:
    """Play training questions with the model of the cold start, sampled as in RL."""
    config = paths.config
    rollout = config.rollout
    device, dtype = resolve_device(config.trainer.device, config.trainer.dtype)
    chat = load_chat(paths.cold_start)
    policy = LocalPolicy(
        model_files.load_model(paths.cold_start, device).to(dtype),
        chat.stop_ids,
        slots=rollout.max_concurrent_episodes,
        max_context=rollout.max_context,
    )
    flow = make_loop(policy, chat, paths.load_tools(), rollout, config.env)
    samples = samples_of(config)
    tasks = probe_tasks(paths.load_rows("train"), groups, samples, config.seed)
    sampling = Sampling(rollout.max_tokens_per_turn, rollout.temperature)
    trajectories = asyncio.run(
        run_episodes(flow, tasks, sampling, max_concurrent=rollout.max_concurrent_episodes)
    )
    entropy = policy.stats.mean_entropy()["actor/entropy"]
    return summarize(trajectories, samples, entropy)


def check_start(paths: Workspace) -> None:
    """Probe the start model before RL. Print a warning if little differs between samples.

    Raises ConfigError with the remedy if RL could learn nothing from it.
    """
    probe = show_probe(paths)
    if probe:
        warning = warning_or_refusal(probe, paths.config)
        if warning:
            say(f"  warning: {warning}")


def _fetch_model(paths: Workspace, name: str) -> None:
    """Download a model of the hub once and pin its commit. A local model is used as it is.

    All stages and runs start from that commit, whatever is published under the name later.
    """
    scheme = tables.scheme_of(name)
    if scheme:
        return stage(
            f"start model: {name}, as a model folder",
            paths.fetch_folder,
            lambda part: scheme.convert(name, part),
        )
    if not hub.is_repo_name(name):
        check_local_model(name)
        if not paths.config.cold_start.warm_steps:
            say(f"cold start: not needed, the run starts from {name}")
        return
    # The hub's cache was emptied, or a part of it: fetch the same commit again.
    if paths.fetch_folder.exists() and hub.damage(paths.base_model):
        manifest_of_fetch = json.loads((paths.fetch_folder / "manifest.json").read_text())
        name = f"{name.partition('@')[0]}@{manifest_of_fetch['revision']}"
        shutil.rmtree(paths.fetch_folder)

    def make(part: Path) -> str:
        folder = hub.fetch_model(name)
        part.mkdir()
        manifest = {
            "model": paths.config.model.path,
            "revision": folder.name,
            "folder": str(folder.resolve()),
        }
        write_whole(part / "manifest.json", json.dumps(manifest, indent=2) + "\n")
        return f"commit {folder.name}, in {folder}"

    stage(f"start model: fetch {name} from the hub", paths.fetch_folder, make)


def _teach(paths: Workspace, out: Path) -> str:
    """Clone demonstrations into `out`: a new model in two phases, a pretrained one in one.

    Returns the summary of the stage.
    """
    config = paths.config
    set_threads(config.trainer.threads)
    c = config.cold_start
    base = None
    model_chat = None
    dtype = torch.float32  # of a new model, which is tiny
    if config.model.path:
        base = paths.base_model
        model_chat = chat_with_tools(base)
    check_dialect(model_chat or byte_chat(), config.env, tools=False)
    # This takes up to half a minute, before the bar below appears.
    say("  a demonstrator plays its questions ...")
    if c.demonstrator or c.episodes:
        lessons = own_demonstrations(paths, model_chat)
    else:
        teach = plugins.import_object(config.data_facts["teacher"], "data.name")
        chat, copy_rows, mix_rows = teach(paths, model_chat)
        lessons = Lessons(chat, Lesson(copy_rows), Lesson(mix_rows))
    chat = lessons.chat
    if base:
        device, dtype = resolve_device(config.trainer.device, config.trainer.dtype)
        model = model_files.load_model(base, device)
        model.recompute = config.trainer.recompute
        phases = [Phase("warm", lessons.mix, c.warm_steps, c.mix_tokens, c.lr)]
    else:
        model = new_model(config.model, len(chat.tokenizer), config.seed)
        phases = phases_of(lessons, c)
    losses: list[float] = []
    ends: list[str] = []
    with progress("cloning", sum(phase.steps for phase in phases)) as advance:
        for phase in phases:
            # `name` has a default, because a function of a loop sees the loop's last phase.
            def on_step(step: int, loss: float, name: str = phase.name) -> None:
                losses.append(loss)
                advance(f"{name} loss {loss:.3f}")

            end = clone(model, phase, config.seed, on_step, dtype)
            if end.held_out_loss is not None:
                ends.append(
                    f"{phase.name}: {end.steps} of {phase.steps} steps, held-out loss "
                    f"{end.held_out_loss:.3f} at its best, which is kept"
                )
    write_model(model, chat, out)
    keep_cloned_rows(phases, out)
    count = config.data_facts.get("count")
    if count and not base:
        counts = plugins.import_object(count, "data.name")(paths, out)
        if counts:
            write_whole(out / CLONED_COUNTS, json.dumps(counts, indent=2) + "\n")
    for text in ends:
        say(f"  {text}")
    demonstrations = " + ".join(str(len(phase.lesson.rows)) for phase in phases if phase.steps)
    change = ""
    if losses:
        # A step's loss is noisy; the first falls too quickly for a mean.
        change = f", loss {losses[0]:.2f} -> {fmean(losses[-5:]):.2f}"
    return (
        f"{model.parameter_count / 1e6:.2f} M parameters, {len(chat.tokenizer)} tokens, "
        f"{demonstrations} demonstrations{change}"
    )


def phases_of(lessons: Lessons, settings: ColdStartConfig) -> list[Phase]:
    """Return the two phases of a new model: to copy, then to play.

    Held-out rows mean that the demonstrations are few, which need more weight decay (clone.py).
    """
    is_few = bool(lessons.copy.held_out)
    copy = Phase(
        name="copy",
        lesson=lessons.copy,
        steps=settings.copy_steps,
        tokens=settings.copy_tokens,
        lr=settings.lr,
        weight_decay=COPY_DECAY_OF_FEW if is_few else WEIGHT_DECAY,
        muon=settings.copy_optimizer == "muon",
        embedding_lr=None if settings.embedding_lr == "auto" else settings.embedding_lr,
    )
    mix = Phase(
        name="mix",
        lesson=lessons.mix,
        steps=settings.mix_steps,
        tokens=settings.mix_tokens,
        lr=settings.lr if settings.mix_lr == "auto" else settings.mix_lr,
        weight_decay=MIX_DECAY_OF_FEW if is_few else WEIGHT_DECAY,
    )
    return [copy, mix]


def keep_cloned_rows(phases: Sequence[Phase], out: Path) -> None:
    """Write the token ids of every cloned row, so that its content can be counted.

    A line is a row: phase, episode, all ids, and [start, end) of each stretch with a loss.
    """
    lines = []
    for phase in phases:
        for row in phase.lesson.rows if phase.steps else ():
            # Where the mask rises a stretch starts, where it falls the stretch ends: by turns.
            changes = enumerate(pairwise([0, *row.action_mask, 0]))
            edges = [i for i, (before, after) in changes if before != after]
            line = {
                "phase": phase.name,
                "episode": row.group_id,
                "input_ids": row.input_ids,
                "actions": list(zip(edges[::2], edges[1::2], strict=True)),
            }
            lines.append(json_line(line))
    write_whole(out / CLONED_ROWS, "".join(lines))


def own_demonstrations(paths: Workspace, model_chat: ChatFormat | None = None) -> Lessons:
    """Return the chat format and training rows of a user-defined task.

    They come from its demonstrator on the training questions, or from recorded episodes. A new
    model gets a tokenizer of their texts. Of few questions some are held out, and a new model first
    clones the best plays.
    """
    from agent_r1.cold_start import demonstrate

    config = paths.config
    tools = paths.load_tools()
    c = config.cold_start
    if c.demonstrator:
        questions = paths.load_rows("train")
        plays = c.plays or 1
        if model_chat is None:  # a pretrained model needs few demonstrations
            plays = demonstrate.plays_per_question(c.plays, len(questions))
        closed_book = questions[: round(c.closed_book * len(questions))]
        questions += [without_tools(row) for row in closed_book]
        episodes = demonstrate.play_demonstrations(
            c.demonstrator,
            questions,
            tools,
            config.rollout,
            paths.demonstration_env,
            config.seed,
            plays,
        )
    else:
        episodes = demonstrate.read_episodes(Path(c.episodes), tools, config.env)
    chat = model_chat
    if chat is None:
        texts = demonstrate.texts_of(episodes)
        chat = ChatFormat(train_tokenizer(texts, config.model.vocab_size))
    say(f"  {demonstrate.describe_demonstrations(episodes)}")
    rows = demonstrate.sequences(episodes, chat, config.rollout.max_context, paths.dialect)
    held_questions: set[str] = set()
    if model_chat is None:
        held_questions = demonstrate.held_out_questions(episodes, config.seed)
    if not held_questions:
        return Lessons(chat, Lesson(rows), Lesson(rows))
    cloned_rows: list[TrainingRow] = []
    held_rows: list[TrainingRow] = []
    for row in rows:
        if episodes[row.trajectory].question in held_questions:
            held_rows.append(row)
        else:
            cloned_rows.append(row)
    best = demonstrate.best_plays(episodes)
    best_cloned = [row for row in cloned_rows if row.trajectory in best]
    best_held = [row for row in held_rows if row.trajectory in best]
    if not best_cloned or not best_held:  # too few to choose from
        best_cloned = cloned_rows
        best_held = held_rows
    repeats = demonstrate.repeats_of_best(len(best_cloned), len(cloned_rows))
    # Held-out rows have the same mixture, so that their loss measures the same.
    return Lessons(
        chat,
        copy=Lesson(best_cloned, best_held),
        mix=Lesson(cloned_rows + repeats * best_cloned, held_rows + repeats * best_held),
    )
