"""Make the model that RL starts from (the stage before RL).

In: a configuration. Out: a model folder in `artifacts/`. Next: `stages.py` trains it.
Demonstrations come from the data set's `teacher` (tables.py), a user-defined function, or recorded
conversations (`training/demonstrate.py`).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from statistics import fmean

from agent_r1.app.plan_local import check_free_memory
from agent_r1.config import plugins, tables
from agent_r1.env import without_tools
from agent_r1.ground import hub
from agent_r1.ground.device import resolve_device
from agent_r1.ground.errors import ConfigError
from agent_r1.ground.files import write_whole
from agent_r1.ground.machine import set_threads
from agent_r1.ground.ui import progress, say
from agent_r1.rollout import decoder, model_files
from agent_r1.rollout.chat_format import ChatFormat
from agent_r1.rollout.setup import check_dialect
from agent_r1.rollout.training_rows import TrainingRow
from agent_r1.training.run import check_network, check_start_model, write_model
from agent_r1.training.start_chat import check_start_chat
from agent_r1.training.tiny_model import (
    byte_chat,
    chat_with_tools,
    init_weights,
    shape_of,
    train_tokenizer,
)
from agent_r1.workspace import Workspace, check_local_model, stage


def make_cold_start(paths: Workspace) -> None:
    """Make tokenizer and tiny model, and clone an imperfect demonstrator (stage).

    A pretrained `model.path` is fetched instead, and cloned into only with `cold_start.warm_steps`.
    """
    config = paths.config
    own_task = config.cold_start.demonstrator or config.cold_start.episodes
    teaches = not config.model.path or config.cold_start.warm_steps
    if teaches and not own_task and ("teacher" not in config.data_facts or not config.searches):
        raise ConfigError(
            "this task has no demonstrator: set cold_start.demonstrator to your function "
            "(FILE.py:FUNCTION), "
            "cold_start.episodes to recorded conversations, or model.path to a pretrained model; "
            "the built-in demonstrators "
            "only search",
            code="missing_demonstrator",
        )
    check_start_chat(config)
    if config.model.path:
        teach = config.cold_start.warm_steps and not paths.cold_start.exists()
        if teach:
            check_free_memory(config)
        _fetch_model(paths, config.model.path)
        if teach:
            check_network(config, paths.base_model)
        if config.cold_start.warm_steps:
            title = f"warm start: teach {config.model.path} the format"
            stage(title, paths.cold_start, lambda part: _teach(paths, part))
        return check_start_model(paths)
    title = "cold start: teach a new model the format, to copy, and to play badly"
    stage(title, paths.cold_start, lambda part: _teach(paths, part))


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
    # The hub's cache was emptied, or a part of it.
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
    """Clone demonstrations into `out`: a new model in two phases, a pretrained one in one."""
    from agent_r1.training.clone import clone

    config = paths.config
    set_threads(config.trainer.threads)
    c = config.cold_start
    base = None
    model_chat = None
    precision = []
    if config.model.path:
        base = paths.base_model
        model_chat = chat_with_tools(base)
    check_dialect(model_chat or byte_chat(), config.env, tools=False)
    # This takes up to half a minute, before the bar below appears.
    say("  a demonstrator plays its questions ...")
    if c.demonstrator or c.episodes:
        play = own_demonstrations
    else:
        play = plugins.import_object(config.data_facts["teacher"], "data.name")
    chat, copy_rows, mix_rows = play(paths, model_chat)
    if base:
        device, *precision = resolve_device(config.trainer.device, config.trainer.dtype)
        model = model_files.load_model(base, device)
        model.recompute = config.trainer.recompute
        phases = [("warm", mix_rows, c.warm_steps, c.mix_tokens)]
    else:
        model = decoder.Decoder(shape_of(config.model, len(chat.tokenizer)))
        init_weights(model, config.seed)
        phases = [
            ("copy", copy_rows, c.copy_steps, c.copy_tokens),
            ("mix", mix_rows, c.mix_steps, c.mix_tokens),
        ]
    losses: list[float] = []
    with progress("cloning", sum(steps for _, _, steps, _ in phases)) as advance:
        for phase, rows, steps, tokens in phases:

            def on_step(step: int, loss: float, phase: str = phase) -> None:
                losses.append(loss)
                advance(f"{phase} loss {loss:.3f}")

            clone(model, rows, steps, tokens, c.lr, config.seed, on_step, *precision)
    write_model(model, chat, out)
    demonstrations = " + ".join(str(len(rows)) for _, rows, _, _ in phases)
    return (
        f"{model.parameter_count / 1e6:.2f} M parameters, {len(chat.tokenizer)} tokens, "
        f"{demonstrations} demonstrations, loss "
        f"{losses[0]:.2f} -> {fmean(losses[-5:]):.2f}"
    )


def own_demonstrations(
    paths: Workspace, model_chat: ChatFormat | None = None
) -> tuple[ChatFormat, list[TrainingRow], list[TrainingRow]]:
    """Return the chat format and training rows of a user-defined task.

    They come from its demonstrator on the training questions, or from recorded episodes.
    """
    from agent_r1.training import demonstrate

    config = paths.config
    tools = paths.load_tools()
    c = config.cold_start
    if c.demonstrator:
        rows = paths.load_rows("train")
        rows += [without_tools(row) for row in rows[: round(c.closed_book * len(rows))]]
        episodes = demonstrate.play_demonstrations(
            c.demonstrator, rows, tools, config.rollout, config.env, config.seed
        )
    else:
        episodes = demonstrate.read_episodes(Path(c.episodes), tools, config.env)
    chat = model_chat or ChatFormat(
        train_tokenizer(demonstrate.texts_of(episodes), config.model.vocab_size)
    )
    say(f"  {demonstrate.describe_demonstrations(episodes)}")
    rows = demonstrate.sequences(episodes, chat, config.rollout.max_context, paths.dialect)
    return chat, rows, rows
