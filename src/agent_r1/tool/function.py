"""Make a tool from a typed function with a docstring, by the decorator `@tool`.

    @tool
    def convert(amount: float, to: Literal["EUR", "USD"]) -> str:
        \"\"\"Convert an amount of money.

        Args:
            amount: How much, in the other currency.
            to: The currency wanted.
        \"\"\"

The summary becomes the description, the annotations become the JSON schema, and the lines under
`Args:` describe the arguments. A parameter without a default is required. A missing part raises
when the module is imported, instead of confusing an agent later.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, Union

from pydantic import TypeAdapter

from agent_r1.ground.errors import ConfigError
from agent_r1.tool.base import BaseTool

SCALARS = (str, int, float, bool, type(None), Any, dict)
HEADING = re.compile(r"^(Args|Returns|Raises):", re.MULTILINE)
ARGUMENT = re.compile(r"^\s*(\w+):\s*(.*?)\s*(?=^\s*\w+:|\Z)", re.MULTILINE | re.DOTALL)
"""Name and description of an argument, up to the next one."""
SUPPORTED = (
    "str, int, float, bool, None, Any, Literal[...], list[...], dict[str, ...], unions of these"
)


class FunctionTool(BaseTool):
    """A tool around a function. The function can still be called directly, for unit tests.

    `owner` is its name in messages; default `@tool NAME`.
    """

    def __init__(self, function: Callable[..., Any], owner: str | None = None):
        self.function = function
        self.name = function.__name__
        self.description, self.parameters = _schema(function, owner or f"@tool {function.__name__}")
        _ = (
            self.validator
        )  # not compiled: pydantic made the schema, and loading jsonschema takes time at start-up

    @property
    def body(self) -> Callable[..., Any]:
        return self.function

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    def execute(self, args: dict[str, Any]) -> Any:
        return self.function(**args)  # for an async function a coroutine, which `call_tool` awaits

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def tool(function: Callable[..., Any]) -> FunctionTool:
    """Decorate a function as a tool. Raise ConfigError for a missing annotation or docstring
    part."""
    return FunctionTool(function)


def _schema(function: Callable[..., Any], owner: str) -> tuple[str, dict[str, Any]]:
    """Return the description and the JSON schema of the parameters."""
    try:
        hints = typing.get_type_hints(function)
    except NameError as error:
        raise ConfigError(
            f"{owner}: an annotation cannot be resolved ({error}); import that name",
            code="bad_annotation",
        ) from None
    signature = inspect.signature(function)
    _check(signature, hints, owner)
    summary, *sections = HEADING.split(inspect.getdoc(function) or "")
    described = dict(
        ARGUMENT.findall(dict(zip(sections[::2], sections[1::2], strict=True)).get("Args", ""))
    )
    undescribed = [name for name in signature.parameters if name not in described]
    if undescribed or not summary.strip():
        lack = (
            f"the docstring does not describe {', '.join(undescribed)}"
            if summary.strip()
            else "there is no docstring"
        )
        raise ConfigError(
            f"{owner}: {lack}; write a docstring that says what it does and, under 'Args:', a line "
            "'name: ...' for each parameter",
            code="bad_docstring",
        )
    if strangers := described.keys() - signature.parameters.keys():
        raise ConfigError(
            f"{owner}: the docstring describes {', '.join(sorted(strangers))}, but it has no such "
            "parameter; fix the "
            "name, or do not begin a continued line with 'word:'",
            code="bad_docstring",
        )
    properties = {
        name: TypeAdapter(hints[name]).json_schema()
        | {"description": " ".join(described[name].split())}
        for name in signature.parameters
    }
    required = [
        name
        for name, parameter in signature.parameters.items()
        if parameter.default is parameter.empty
    ]
    closed = {"required": required, "additionalProperties": False}
    return " ".join(summary.split()), {"type": "object", "properties": properties, **closed}


def _check(signature: inspect.Signature, hints: dict[str, Any], owner: str) -> None:
    """Refuse parameters that have no name or no form in JSON."""
    for name, parameter in signature.parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(
                f"{owner}: {parameter} cannot be given by name; write the parameters out one by "
                "one",
                code="wrong_signature",
            )
        if name not in hints:
            raise ConfigError(
                f"{owner}: parameter {name!r} has no type; annotate it (for example {name}: str)",
                code="bad_annotation",
            )
        if not _has_json_form(hints[name]):
            raise ConfigError(
                f"{owner}: parameter {name!r} has the type {hints[name]}, which has no JSON form; "
                f"use {SUPPORTED}",
                code="bad_annotation",
            )


def _has_json_form(hint: Any) -> bool:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return True
    if origin is dict:
        return inner[0] is str and _has_json_form(inner[1])
    if origin in (list, Union, types.UnionType):
        return all(map(_has_json_form, inner))
    return hint in SCALARS
