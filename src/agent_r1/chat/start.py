"""Check the chat template of a start model before anything is made.

In: a configuration. Out: one sentence on what is exact, or an error with a remedy. Of a model on
the hub, only tokenizer and template are fetched (a few MB). `env.name=auto` is resolved here, too.
"""

from __future__ import annotations

from pathlib import Path

from agent_r1.chat.fit import check_dialect, choose
from agent_r1.chat.format import ChatFormat
from agent_r1.chat.tokenizer import byte_chat, chat_with_tools, load_chat
from agent_r1.config import Config, tables
from agent_r1.ground import hub
from agent_r1.ground.errors import AgentR1Error, ConfigError
from agent_r1.workspace import Workspace, check_local_model


def check_start_chat(config: Config, use_cache: bool = True) -> str:
    """Return one sentence on what is exact. Raise AgentR1Error if the template cannot be used.

    `use_cache`: whether the result may be kept in a file.
    """
    chat = start_chat(config)
    if chat is None:
        return "the chat template of a package is checked after its conversion"
    return check_dialect(chat, config.env, bool(config.env.tools), use_cache)


def describe_start_chat(config: Config, use_cache: bool = True) -> str:
    """Return the same sentence for a plan. Without a network, the template was not seen."""
    try:
        return check_start_chat(config, use_cache)
    except AgentR1Error as error:
        if error.code != "download_failed":
            raise
        return f"not seen, because {config.model.path} cannot be downloaded now"


def start_chat(config: Config) -> ChatFormat | None:
    """Load the start model's chat format. None for a package that is not converted yet."""
    path = config.model.path
    if path is None:
        return byte_chat()  # the template of a new model; its vocabulary is trained later
    folder = chat_folder(config)
    if folder is None:
        return None
    return chat_with_tools(folder) if config.cold_start.warm_steps else load_chat(folder)


def chat_folder(config: Config) -> Path | None:
    """Return a folder with the tokenizer and template of `model.path`, fetched if needed."""
    path = config.model.path
    check_local_model(path)
    folder = Workspace(config).base_model
    if (folder / "tokenizer.json").is_file() or not hub.is_repo_name(path):
        return folder if folder.is_dir() else None
    return hub.fetch_chat(path)


def auto_dialect(config: Config) -> str:
    """Return the value of `env.name=auto`: the first dialect that reads the template's calls."""
    path = config.model.path
    # Both write Hermes: the template of a new model, and the one that packages get.
    if path is None or tables.scheme_of(path):
        return "hermes"
    try:
        folder = chat_folder(config)
    except AgentR1Error as error:
        raise ConfigError(
            f"env.name=auto has to read the chat template of the model: {error}; or name the "
            "dialect, such as env.name=hermes",
            code="template_not_seen",
        ) from None
    if folder is None:  # a package that is not converted yet
        return "hermes"
    return choose(load_chat(folder))
