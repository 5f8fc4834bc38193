"""Check that a model's chat template and a dialect fit, and choose one for `auto`.

In: a chat format and `env.name`. Out: one sentence on what is exact, or a ConfigError that names
the dialects that fit. `probe.py` compares the tokens; this module compares the *form* of a
call: the template writes one, and the dialect has to read it. A model that was trained with the
template writes its calls like that.

A result is kept in a file, because a comparison takes some tenths of a second.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from agent_r1.chat import format as chat_format
from agent_r1.chat import probe as template_probe
from agent_r1.chat import study as template_study
from agent_r1.chat import template as chat_template
from agent_r1.chat.format import ChatFormat
from agent_r1.chat.probe import TOOLS
from agent_r1.chat.study import StudiedTemplate, check_tools
from agent_r1.config import tables
from agent_r1.config.plugins import is_user_code
from agent_r1.config.settings import EnvConfig
from agent_r1.env import dialect_of, environment
from agent_r1.env.base import BaseToolEnv
from agent_r1.env.dialect import Dialect
from agent_r1.ground.errors import ConfigError
from agent_r1.tool import BaseTool, ToolCall, ToolResult

QUESTION = {"role": "user", "content": "Where is Oslo?"}
ARGUMENTS = {"query": "007", "count": 12}
"""Arguments of the call that is compared: a text that looks like a number, and a number."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "added_tokens.json",
    "special_tokens_map.json",
)
"""What a tokenizer is read from. Its settings may add tokens, or change how they are found."""


@dataclass(frozen=True)
class Result:
    """What a comparison found."""

    text: str
    """What is exact, or the error's message."""
    code: str | None = None
    """The error's code; None if there is none."""


class _ProbeTool(BaseTool):
    """The first tool of the probe, whose schema gives each argument its type."""

    name = TOOLS[0]["function"]["name"]
    description = TOOLS[0]["function"]["description"]
    parameters = TOOLS[0]["function"]["parameters"]

    async def execute(self, args: dict[str, Any]) -> str:
        return ""


# --------------------------------------------------------------------------------------- a call


def render_call(chat: ChatFormat) -> str | None:
    """Return a turn with a call as the template writes it, or None."""
    name = TOOLS[0]["function"]["name"]
    template = chat.template
    assert isinstance(template, StudiedTemplate)  # `make_studied_chat` gives it one
    turn = template.turn_with_calls([name], ARGUMENTS)
    try:
        text = template.render([QUESTION, turn], TOOLS, opens=False)
        prompt = template.render([QUESTION], TOOLS)
    except ConfigError:
        return None
    # Not within a control token: `<｜Assistant｜>` and a call's `<｜tool` share a beginning.
    common_prefix = re.sub(r"<[^<>]*\Z", "", os.path.commonprefix([text, prompt]))
    text = text[len(common_prefix) :]
    if name not in text:
        return None
    # The turn without its end.
    end_ids = {*chat.stop_ids, *chat.ends.closing}
    ends = [text.rfind(token) for token, index in chat.control_ids.items() if index in end_ids]
    return chat.opening + text[: max(ends) if max(ends) >= 0 else len(text)]


def reads(dialect: Dialect, turn: str) -> bool:
    """Return whether the dialect finds exactly the probe's call in a turn."""
    tool = _ProbeTool()
    calls = dialect.calls(turn, {tool.name: tool})
    if len(calls) != 1 or calls[0].error:
        return False
    return calls[0].name == tool.name and calls[0].arguments == ARGUMENTS


def template_dialects() -> dict[str, Dialect]:
    """Return the dialects that rely on the chat template, in the order of `auto`.

    The core's are first, then those of recipes in the order of their tables.
    """
    dialects: dict[str, Dialect] = {}
    for name in tables.names("env"):
        maker = environment(name)
        if not (isinstance(maker, type) and issubclass(maker, BaseToolEnv)):
            continue
        dialect_types = [type(dialect) for dialect in dialects.values()]
        if maker.dialect.system_prompt({}) is None and type(maker.dialect) not in dialect_types:
            dialects[name] = maker.dialect
    return dialects


def fitting(chat: ChatFormat) -> list[str] | None:
    """Return the names of the dialects that read the template's calls.

    None if the template neither writes a call nor shows one that a dialect reads.
    """
    dialects = template_dialects()
    turn = render_call(chat)
    if turn is not None:
        return [name for name, dialect in dialects.items() if reads(dialect, turn)]
    # Some templates show tools and the form of a call, but write no call of a conversation.
    try:
        prompt = chat.template.render([QUESTION], TOOLS)
    except ConfigError:
        return None
    tool = _ProbeTool()
    names = []
    for name, dialect in dialects.items():
        if any(not call.error for call in dialect.calls(prompt, {tool.name: tool})):
            names.append(name)
    return names or None


def choose(chat: ChatFormat) -> str:
    """Return the first dialect that fits the template: the value of `env.name=auto`.

    Raises ConfigError if there is none.
    """
    names = fitting(chat)
    if not names:
        raise ConfigError(
            f"env.name=auto: no dialect reads the calls of {chat.template.model}'s chat template; "
            "name one that describes its calls itself, such as env.name=react",
            code="unfitting_dialect",
        )
    return names[0]


# ------------------------------------------------------------------------------------- the check


def check_fit(chat: ChatFormat, env: EnvConfig, tools: bool, use_cache: bool = True) -> str:
    """Compare template and dialect. Return one sentence, which says what is exact.

    Args:
        tools: Whether the agent has tools.
        use_cache: Whether the result may be kept in a file.

    Raises ConfigError with the first difference and a remedy.
    """
    dialect = dialect_of(env)
    file = _cache_file(chat, env.name, dialect, tools)
    result = _read_result(file)
    if result is None:
        try:
            result = Result(_examine(chat, env.name, dialect, tools))
        except ConfigError as error:
            result = Result(str(error), error.code)
        if use_cache:
            _keep(file, result)
    error = result
    if error.code:
        raise ConfigError(error.text, code=error.code)
    return result.text


def _examine(chat: ChatFormat, name: str, dialect: Dialect, tools: bool) -> str:
    shows_tools = tools and dialect.system_prompt({}) is None
    if shows_tools:
        check_tools(chat.template)
        _check_results(chat, name, dialect)
    sentence = template_probe.examine(chat, results=shows_tools)
    maker = environment(name)
    ours = isinstance(maker, type) and issubclass(maker, BaseToolEnv)
    if not (shows_tools and ours):
        return sentence
    names = fitting(chat)
    if names is None:
        return f"{sentence}; the template does not show how a call is written"
    if name in names or type(dialect) in [type(template_dialects()[n]) for n in names]:
        return sentence
    if is_user_code(name):
        return f"{sentence}; the template writes calls in another form than {name}"
    others = (
        " or ".join(f"env.name={n}" for n in names) or "env.name=react, which describes its own"
    )
    raise ConfigError(
        f"env.name={name} does not read the calls that {chat.template.model}'s chat template "
        f"writes; set {others}",
        code="unfitting_dialect",
    )


def _check_results(chat: ChatFormat, name: str, dialect: Dialect) -> None:
    """Render the dialect's own message of a result: its role may be no chat template's."""
    tool = _ProbeTool()
    results = dialect.responses([ToolCall(tool.name, {})], [ToolResult("")], {tool.name: tool})
    try:
        chat.template.continuation(results, calls=[tool.name])
    except ConfigError as error:
        own = sys.modules[type(dialect).__module__]
        remedy = "use a model with another template"
        if hasattr(own, "TEMPLATE"):
            remedy = f"save the TEMPLATE of {own.__name__} as the model's chat_template.jinja"
        raise ConfigError(
            f"{str(error).partition('; ')[0]}, for a tool's result in env.name={name}; {remedy}",
            code=error.code,
        ) from None


# ------------------------------------------------------------------------------------- the file


def _cache_file(chat: ChatFormat, name: str, dialect: Dialect, tools: bool) -> Path:
    """Name the file after all that the result depends on."""
    parts = [name, tools, type(dialect).__qualname__, chat.tokenizer.chat_template]
    parts += [list(chat.stop_ids), *_code(type(dialect).__module__)]
    parts += [metadata.version(package) for package in ("transformers", "tokenizers", "jinja2")]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode())
    folder = Path(chat.tokenizer.name_or_path or "")
    if chat.tokenizer.name_or_path and (folder / "tokenizer.json").is_file():
        for name in TOKENIZER_FILES:
            if (folder / name).is_file():
                digest.update((folder / name).read_bytes())
    else:
        digest.update(chat.tokenizer.backend_tokenizer.to_str().encode())
    root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return root / "agent-r1" / "templates" / f"{digest.hexdigest()[:32]}.json"


@cache
def _code(dialect: str) -> list[str]:
    """Return hashes of the code that computes the result."""
    modules = [chat_format, chat_template, template_study, template_probe, sys.modules[__name__]]
    files = [module.__file__ for module in modules]
    files.append(getattr(sys.modules.get(dialect), "__file__", None))
    return [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files if file]


def _read_result(file: Path) -> Result | None:
    try:
        return Result(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _keep(file: Path, result: Result) -> None:
    """Write the file, if that is possible: the next command only takes longer without it."""
    part = file.with_suffix(f".{os.getpid()}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(asdict(result)), encoding="utf-8")
        part.replace(file)
    except OSError:
        with suppress(OSError):
            part.unlink()


def check_dialect(chat: ChatFormat, env: EnvConfig, tools: bool, use_cache: bool = True) -> str:
    """Return one sentence on what is exact with this model and dialect.

    Raises ConfigError if the model cannot write this dialect, is not shown its tools, or has a chat
    template that cannot be followed exactly.
    """
    dialect = dialect_of(env)
    lacks = [token for token in dialect.control_tokens if token not in chat.control_ids]
    if lacks:
        raise ConfigError(
            f"env.name={env.name} requires the control token {lacks[0]}, which this model lacks; "
            "set model.path to a model that was trained with it (GPT-OSS for harmony), or choose "
            "another dialect, such as env.name=hermes",
            code="missing_control_tokens",
        )
    return check_fit(chat, env, tools, use_cache)
