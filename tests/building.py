"""What tests of recipes build around a recipe: trusted names, data sets, an index, tools and
demonstrations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from conftest import clone_steps, question_row, random_model

from agent_r1.chat.format import ChatFormat
from agent_r1.chat.tokenizer import load_chat
from agent_r1.cold_start import demonstrate
from agent_r1.cold_start.demonstrate import Demonstration, sequences
from agent_r1.config import Config, plugins, tables
from agent_r1.config.settings import DataConfig, EnvConfig
from agent_r1.core import Message, Row
from agent_r1.data.build import build
from agent_r1.data.corpora import corpus_passages
from agent_r1.data.own_rows import OwnQuestion
from agent_r1.data.storage import Passage, read_corpus, read_rows, verify
from agent_r1.env.dialect import Dialect
from agent_r1.model import files as model_files
from agent_r1.model.decoder import Decoder
from agent_r1.reward.scorers import exact_match
from agent_r1.search.encoders import make_encoder
from agent_r1.search.index import PassageIndex, build_index
from agent_r1.search.searcher import Searcher
from agent_r1.tool import BaseTool, ToolCall, ToolResult, make_tools
from agent_r1.tool.base import call_tool
from agent_r1.training import run
from agent_r1.workspace import Workspace

__all__ = ["corpus_passages", "exact_match", "tables"]


async def called(
    tools: dict[str, BaseTool],
    name: str,
    timeout_s: float = 5.0,
    max_chars: int = 1000,
    /,
    **arguments: Any,
) -> ToolResult:
    """Call a tool as an environment does."""
    return await call_tool(tools, ToolCall(name, arguments), timeout_s, max_chars)


def trust(*names: str) -> None:
    """Name code, a command or an address as a command line does."""
    plugins.trust(names)


def build_data(config: DataConfig, folder: Path, seed: int = 0) -> Path:
    build(config, seed, folder)
    return folder


def manifest_of(folder: Path) -> dict[str, Any]:
    """Check the files of a data set and return its manifest."""
    return verify(folder)


def rows_in(folder: Path) -> dict[str, list[Row]]:
    """Read the rows of each split."""
    return {file.stem: read_rows(file) for file in folder.glob("*.parquet")}


def passages_in(folder: Path) -> list[Passage]:
    return list(read_corpus(folder / "corpus.jsonl"))


def search_over(folder: Path, top_k: int = 1, dim: int = 512) -> dict[str, BaseTool]:
    """Build the index of a data set once, and return the search tool over it."""
    index = folder.parent / f"index-{folder.name}"
    if not index.exists():
        build_index(folder / "corpus.jsonl", index, make_encoder("ngram", dim))
    searcher = Searcher(PassageIndex.load(index, folder / "corpus.jsonl"))
    return make_tools(["search"], searcher=searcher, top_k=top_k)


def tools_of(*names: str, env: EnvConfig | None = None) -> dict[str, BaseTool]:
    return make_tools(list(names), env=env)


def row_of(question: dict[str, Any], environment: str = "hermes") -> Row:
    """Make the row that the data stage makes of a recipe's question."""
    own = OwnQuestion(**question)
    return question_row(
        own.prompt,
        tuple(own.answer),
        agent_name=environment,
        extra_info=own.extra(),
        env_kwargs={"tools": own.tools},
    )


def demonstrated(
    config: Config,
    rows: list[Row],
    tools: dict[str, BaseTool] | None = None,
    demonstrator: str | None = None,
) -> list[Demonstration]:
    """Play the demonstrator on these rows as the cold start does; by default that of the
    configuration."""
    code = demonstrator or config.cold_start.demonstrator
    trust(code, config.env.name)
    return demonstrate.play_demonstrations(code, rows, tools or {}, config.rollout, config.env, 0)


def taught_model(
    folder: Path, chat: ChatFormat, messages: list[Message], tools: list, dialect: Dialect
) -> Path:
    """Teach a small model one episode by heart and write it to `folder`."""
    model = random_model(len(chat.tokenizer), max_position=2000)
    clone_steps(model, sequences([Demonstration(messages, tools)], chat, 2000, dialect), steps=80)
    write_model(model, chat, folder)
    return folder


def write_model(model: Decoder, chat: ChatFormat, folder: Path) -> None:
    """Write a model as training does."""
    run.write_model(model, chat, folder)


def start_model_of(config: Config) -> Path:
    """Return the folder of the model that RL starts from."""
    return Workspace(config).start_model


def chat_of(folder: Path) -> ChatFormat:
    """Read a model's chat format."""
    return load_chat(folder)


def model_of(folder: Path) -> Decoder:
    """Read a model's weights."""
    return model_files.load_model(folder)
