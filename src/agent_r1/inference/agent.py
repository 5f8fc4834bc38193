"""Find and open a model for chat, evaluation and export.

In: what the user named (a run, a checkpoint, a folder, a model on the hub). Out: an `Agent`:
policy, chat format, tools and the configuration that it was trained with. Next: `chat.py` and
`evaluation/compare.py` run the training episode loop with it.

The backends are in the table `[backend]`:

    local          in this process, on the training sampler: Llama, Qwen2 and Qwen3
    vllm           a vLLM server that we start, for speed and for other clients (cluster/serve.py)
    api            a model that somebody else serves (recipes/api)
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agent_r1.chat.fit import check_dialect
from agent_r1.chat.format import ChatFormat
from agent_r1.chat.tokenizer import byte_chat, load_chat
from agent_r1.config import Config, apply_overrides, from_yaml, load_config, plugins, tables
from agent_r1.core import Message, Policy
from agent_r1.data.prompts import instructions, messages
from agent_r1.env import add_class_tools, dialect_of
from agent_r1.ground import bounds, hub
from agent_r1.ground.device import resolve_device
from agent_r1.ground.errors import AgentR1Error, ConfigError
from agent_r1.ground.files import SUMS, home, verify_sums
from agent_r1.ground.machine import set_threads
from agent_r1.ground.ui import say
from agent_r1.model import files as model_files
from agent_r1.model.sampler import LocalPolicy
from agent_r1.rollout.agent import Agent
from agent_r1.tool import BaseTool, own_tool
from agent_r1.training.checkpoint import list_checkpoints
from agent_r1.workspace import Workspace

SETTINGS_FILE = "agent_r1.yaml"
"""In an exported folder: the run's configuration, so that the model acts as it was trained."""


@contextmanager
def open_agent(
    model: Path,
    config: Config,
    backend: str = "local",
    tools: dict[str, BaseTool] | None = None,
    prompt: str | None = None,
    all_gpus: bool = False,
) -> Iterator[Agent]:
    """Open the agent of a model folder; the end of the block stops it.

    Args:
        tools: Instead of the configuration's tools.
        prompt: The system message; without it that of the model's training, or `instructions`.
        all_gpus: Use all GPUs, for an evaluation; a chat prefers a server that starts sooner.
    """
    set_threads(config.trainer.threads)
    own_config = own_settings(model)
    chat = byte_chat()
    if tables.entry_of("backend", backend, "the backend").get("token_ids"):
        config = fit_context(config, model)
        chat = load_chat(model)
        check_dialect(chat, config.env, bool(config.env.tools if tools is None else tools))
    if tools is None:
        tools = make_tools_of(config)
    open_policy = tables.resolve("backend", backend, "the backend")
    with open_policy(model, config, chat.stop_ids, all_gpus) as (policy, max_concurrent):
        agent = Agent(policy, chat, tools, config, model, max_concurrent, own_config)
        agent.leading_messages = _leading_messages(agent, prompt)
        yield agent


@contextmanager
def open_to_evaluate(
    model: Path,
    config: Config,
    backend: str,
    temperature: float,
    tools: dict[str, BaseTool] | None,
    prompt: str | None,
    as_trained: bool,
) -> Iterator[Agent]:
    """Open an agent on all GPUs and print what it is.

    Args:
        as_trained: The model is of a run: without a `prompt` it is asked in the words of its rows.
    """
    with open_agent(model, config, backend, tools, prompt=prompt, all_gpus=True) as agent:
        if as_trained and prompt is None:
            agent.leading_messages = None
        say(describe(agent, backend, temperature))
        yield agent


def check_agent(model: Path, config: Config) -> ChatFormat:
    """Raise AgentR1Error if a model folder's agent cannot be used. Make nothing."""
    chat = load_chat(model)
    check_dialect(chat, config.env, bool(config.env.tools))
    return chat


@contextmanager
def open_in_process(
    model: Path, config: Config, stop_ids: tuple[int, ...], all_gpus: bool
) -> Iterator[tuple[Policy, int]]:
    """Load the model into this process. Yield its policy, and how many episodes it plays at a time.

    Args:
        all_gpus: Of no use here: the sampler has one device.
    """
    rollout = config.rollout
    device, dtype = resolve_device(config.trainer.device, config.trainer.dtype)
    network = model_files.load_model(model, device, dtype)
    # With training's number of slots, the cache of a large model would not fit: keep it below 2
    # GiB.
    shape = network.shape
    per_slot = (
        2 * shape.layers * shape.kv_heads * shape.head_dim * rollout.max_context * dtype.itemsize
    )
    slots = max(1, min(rollout.max_concurrent_episodes, 2**31 // per_slot))
    policy = LocalPolicy(network, stop_ids, slots=slots, max_context=rollout.max_context)
    yield policy, rollout.max_concurrent_episodes


def _leading_messages(agent: Agent, prompt: str | None) -> list[Message] | None:
    """Return the messages of `Agent.leading_messages`.

    Foreign models need instructions, unless their data set has them.
    """
    if prompt is None:
        if (
            agent.own_config
            or messages(agent.config.data.data_source, "")[:-1]
            or agent.starts_from_nothing
        ):
            return None
        prompt = instructions(agent.tools, dialect_of(agent.config.env).describes_format)
    if not prompt:
        return []
    return [{"role": "system", "content": prompt}]


def find_card(model: Path) -> dict[str, Any] | None:
    """Return the eval card of a model, or None.

    It is in the model's folder, or in the folder of its run. A run's card is about its last
    checkpoint, so it does not count for an earlier one.
    """
    card_file = model / "eval.json"
    if card_file.is_file():
        return bounds.read_json(card_file)
    folders = model.resolve().parents  # runs/NAME/checkpoints/step_000220/model
    if len(folders) < 3 or not (folders[2] / "eval.json").is_file():
        return None
    card = bounds.read_json(folders[2] / "eval.json")
    return card if Path(card["model"]).resolve() == model.resolve() else None


def describe(agent: Agent, backend: str, temperature: float | None = None) -> str:
    """Describe model, tools, corpus, prompt and sampling in one line.

    The default of `temperature` is that of training.
    """
    c = agent.config
    workspace = Workspace(c)
    world = ""
    if tables.any_entry_has("tool", agent.tools, "index"):
        world = f" over {workspace.data.name}, {c.search.url or workspace.index.name}"
    leading = agent.leading_messages
    if leading is None:
        describes_format = dialect_of(c.env).describes_format
        leading = messages(c.data.data_source, "", describes_format=describes_format)[:-1]
    prompt = "none"
    if leading:
        prompt = f'"{textwrap.shorten(leading[0]["content"], 80, placeholder="...")}"'
    r = c.rollout
    tools = add_class_tools(agent.tools, c.env)
    if temperature is None:
        temperature = r.temperature
    return (
        f"{short_name(agent.model)}, {backend}; tools: {', '.join(tools) or 'none'}{world}; "
        f"prompt: {prompt}; "
        f"temperature {temperature:g}, {r.max_tokens_per_turn} tokens a turn, "
        f"{r.max_context} in all"
    )


def short_name(model: Path) -> str:
    """Shorten a model's path by the part that all our folders share."""
    root = home().resolve()
    folder = model.resolve()
    if folder.is_relative_to(root):
        model = folder.relative_to(root)
    return str(model).removesuffix("/model")


def fit_context(config: Config, model: Path) -> Config:
    """Limit the context of `config` to the model's length."""
    longest = (
        model_files.read_config(model).get("max_position_embeddings") or config.rollout.max_context
    )
    if longest >= config.rollout.max_context:
        return config
    return config.model_copy(
        update={"rollout": config.rollout.model_copy(update={"max_context": longest})}
    )


# ---------------------------------------------------------------------------------------- its tools


def make_tools_of(config: Config) -> dict[str, BaseTool]:
    """Make the configured tools, and a generated world if it is missing on this machine.

    Published data are downloaded by `agent-r1 data` only.
    """
    if not config.env.tools:
        return {}
    workspace = Workspace(config)
    there = workspace.data.exists() and (workspace.index.exists() or not workspace.needs_index)
    if config.data_facts.get("generated") and not there:
        say(
            "the data of this model is not on this machine; it is generated now (stages data and "
            "index)"
        )
        workspace.make_task()
    return workspace.load_tools()


def user_tools(names: list[str]) -> dict[str, BaseTool]:
    """Load the tools of `--tools`. Naming code on the command line permits to run it."""
    names = [plugins.absolute(name, Path.cwd()) for name in names]
    plugins.trust(names)
    tools = [own_tool(name, "--tools") for name in names]
    return {tool.name: tool for tool in tools}


# ------------------------------------------------------------------------------------- find a model


def find_model(
    run: str | None = None,
    step: int | None = None,
    checkpoint_dir: Path | None = None,
    hf_path: str | None = None,
    preset: str | None = None,
    overrides: Sequence[str] = (),
    demo: bool = False,
) -> tuple[Path, Config]:
    """Find a model folder and the configuration that it acts with; default: the newest run's.

    `hf_path` is a folder or a name on the hub; for `preset` and `overrides` see `settings_for`.
    `demo` is the trained agent that a recipe ships. Raises AgentR1Error that lists the existing
    runs.
    """
    others = [x for x in (checkpoint_dir, hf_path, demo or None) if x is not None]
    if len(others) > 1 or (others and step is not None) or (demo and run is not None):
        raise ConfigError(
            "name one model: --run and --step, or --checkpoint-dir, or --model, or --demo",
            code="exclusive_options",
        )
    if demo:
        model = model_folder(tables.resolve("option", "chat --demo", "--demo"))
    elif hf_path is not None:
        if hub.is_repo_name(hf_path):  # a template of some KB may save gigabytes of weights
            folder = hub.fetch_chat(hf_path)
            check_agent(folder, settings_for(folder, run, preset, overrides))
        model = hub_model(hf_path)
    elif checkpoint_dir is not None:
        model = model_folder(newest_step(checkpoint_dir))
    else:
        model = model_folder(find_checkpoint(run, step))
    return model, fit_context(settings_for(model, run, preset, overrides), model)


def find_checkpoint(run: str | None = None, step: int | None = None) -> Path:
    """Return a run's checkpoint folder; by default the last step of the newest run."""
    place = home() / "runs"
    runs = {
        path.parent.name: list_checkpoints(path)
        for path in place.glob("*/checkpoints")
        if list_checkpoints(path)
    }
    if not runs:
        raise AgentR1Error(
            f"there is no trained run in {place}; train one with `bash speedrun-nodocker.sh`, or "
            "talk to the agent that ships with agent-r1: `agent-r1 chat --demo`",
            code="missing_run",
        )
    if run is not None and run not in runs:
        raise AgentR1Error(
            f"there is no trained run {run!r} in {place}; there are: {', '.join(sorted(runs))}",
            code="missing_run",
        )
    name = run or max(runs, key=lambda name: runs[name][-1].stat().st_mtime)
    steps = {int(path.name[5:]): path for path in runs[name]}
    if step is None:
        step = max(steps)
    if step not in steps:
        raise AgentR1Error(
            f"run {name!r} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}",
            code="missing_checkpoint",
        )
    return steps[step]


def newest_step(folder: Path) -> Path:
    """Return `folder`, or its last step if it holds the steps of a run.

    A folder with SHA256SUMS is verified.
    """
    if (folder / SUMS).is_file():
        verify_sums(folder)
    if (folder / "model").is_dir() or not folder.is_dir():
        return folder
    steps = [path for path in folder.iterdir() if re.fullmatch(r"(global_)?step_\d+", path.name)]
    return max(steps, key=lambda path: int(path.name.rpartition("_")[2]), default=folder)


def hub_model(name: str) -> Path:
    """Return a model's folder, after a download if needed."""
    if Path(name).is_dir():
        return model_folder(Path(name))
    return hub.fetch_model(name)


def model_folder(checkpoint: Path) -> Path:
    """Return a checkpoint's Hugging Face folder: itself or its `model/`.

    The files of a folder with SHA256SUMS are verified.
    """
    if (checkpoint / SUMS).is_file():
        verify_sums(checkpoint)
    for folder in (checkpoint / "model", checkpoint):
        if (folder / "config.json").is_file():
            return folder
    if not checkpoint.is_dir():
        raise AgentR1Error(
            f"the folder {checkpoint} does not exist; give a checkpoint or a model",
            code="missing_checkpoint",
        )
    if model_files.find_shards(checkpoint):
        raise AgentR1Error(
            f"{checkpoint} was written by verl; convert it to a model with `agent-r1 export "
            f"--checkpoint-dir {checkpoint}`",
            code="unconverted_checkpoint",
        )
    raise AgentR1Error(
        f"{checkpoint} is not a complete model (it has no config.json); make or download it again",
        code="damaged_model",
    )


def settings_for(
    model: Path, run: str | None = None, preset: str | None = None, overrides: Sequence[str] = ()
) -> Config:
    """Choose the configuration that a model acts with, and apply `overrides`.

    The first that exists: `preset`, `run`, the model's own, the newest run's, the default preset.
    Foreign models get longer turns.
    """
    own = own_settings(model)
    if preset is not None:
        # A model is used, not trained: a step of the preset may be larger than few questions.
        config = load_config(preset, list(overrides), trains=False)
    elif run is not None or own is None:
        try:
            config = _without_commands(from_yaml(find_checkpoint(run).parents[1] / "config.yaml"))
        except AgentR1Error:
            if run is not None:
                raise
            config = load_config()
    else:
        config = own
    if own is not None:
        return apply_overrides(config, list(overrides), trains=False)
    r = config.rollout
    model_settings = config.model
    room = {
        "max_tokens_per_turn": max(512, r.max_tokens_per_turn),
        "max_context": max(4096, r.max_context),
    }
    # Check against this model's length (`fit_context`), not the tiny model's.
    other = model_settings.model_copy(update={"path": str(model)})
    sections = {"rollout": r.model_copy(update=room), "model": other}
    if preset is None:  # the default preset's device, a CPU, is for its tiny model
        sections["trainer"] = config.trainer.model_copy(update={"device": "auto"})
    config = apply_overrides(config.model_copy(update=sections), list(overrides), trains=False)
    return config.model_copy(update={"model": model_settings})


def own_settings(model: Path) -> Config | None:
    """Return the configuration that a model or checkpoint was trained with, or None."""
    runs = [folder for folder in model.resolve().parents[:4] if (folder / "checkpoints").is_dir()]
    for path in (model / SETTINGS_FILE, *(folder / "config.yaml" for folder in runs)):
        if path.is_file():
            return _without_commands(from_yaml(path))
    return None


def _without_commands(config: Config) -> Config:
    """Remove commands that start programs: a downloaded model must not run any."""
    return config.model_copy(update={"env": config.env.without_commands()})
