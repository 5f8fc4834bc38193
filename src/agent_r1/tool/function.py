"""`@tool`: a typed function with a docstring becomes a `BaseTool`. You write what you know and nothing else.

    @tool
    def convert(amount: float, to: Literal["EUR", "USD"]) -> str:
        \"\"\"Convert an amount of money.

        Args:
            amount: How much, in the other currency.
            to: The currency wanted.
        \"\"\"

The summary becomes the description, the annotations become the JSON schema, the lines under `Args:` describe the
arguments, and a parameter without a default is required. What is missing is refused on the spot, when the module is
imported, and not by a confused agent an hour later.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, Union

from agent_r1.errors import ConfigError
from agent_r1.tool.base import BaseTool

SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
SECTION = re.compile(r"^(Args|Returns|Raises|Yields|Examples?):[ ]*$", re.MULTILINE)
SUPPORTED = "str, int, float, bool, None, Any, Literal[...], list[...], dict[str, ...], unions of these"


class FunctionTool(BaseTool):
    """A tool around a function. It can still be called like the function, which keeps its unit tests plain."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self.name = function.__name__
        self.description, documented = _read_docstring(function)
        self.parameters = _parameters(function, documented)
        super().__init__()

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    def execute(self, args: dict[str, Any]) -> Any:
        return self.function(**args)  # a coroutine where the function is async; `call_tool` awaits it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def tool(function: Callable[..., Any]) -> FunctionTool:
    """Decorator. Raises ConfigError where an annotation or a part of the docstring is missing."""
    return FunctionTool(function)


def _parameters(function: Callable[..., Any], documented: dict[str, str]) -> dict[str, Any]:
    """The JSON schema of a function's parameters."""
    owner = f"@tool {function.__name__}"
    try:
        hints = typing.get_type_hints(function)
    except NameError as error:
        raise ConfigError(f"{owner}: an annotation cannot be resolved ({error}); import that name") from None
    properties, required = {}, []
    for parameter in inspect.signature(function).parameters.values():
        name = parameter.name
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"{owner}: {parameter} cannot be given by name; write the parameters out one by one")
        if name not in hints:
            raise ConfigError(f"{owner}: parameter {name!r} has no type; annotate it (for example {name}: str)")
        if name not in documented:
            raise ConfigError(f"{owner}: the docstring does not describe {name!r}; add '{name}: ...' under 'Args:'")
        schema = _type_schema(hints[name], f"{owner}: parameter {name!r}")
        properties[name] = {**schema, "description": documented[name]}
        if parameter.default is parameter.empty:
            required.append(name)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _type_schema(annotation: Any, owner: str) -> dict[str, Any]:
    """The JSON schema of one type annotation."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return {}
    if annotation in SCALARS:
        return {"type": SCALARS[annotation]}
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_type_schema(option, owner) for option in inner]}
    if annotation is list or origin is list:
        return {"type": "array", "items": _type_schema(inner[0], owner) if inner else {}}
    if annotation is dict or origin is dict and inner[0] is str:
        return {"type": "object", "additionalProperties": _type_schema(inner[1], owner) if inner else {}}
    raise ConfigError(f"{owner} has the type {annotation}, which has no JSON form; use {SUPPORTED}")


def _read_docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Description (all before the first section) and the entries of `Args:`, from a Google-style docstring."""
    doc = inspect.getdoc(function)
    if not doc:
        raise ConfigError(f"@tool {function.__name__} has no docstring; say there what it does, and describe 'Args:'")
    description, *sections = SECTION.split(doc)
    bodies = dict(zip(sections[::2], sections[1::2], strict=True))  # the headings are a group, so split() keeps them
    entries: dict[str, str] = {}
    current = None
    for line in inspect.cleandoc(bodies.get("Args", "")).splitlines():
        entry = re.match(r"(\w+)(?: *\([^)]*\))?: *(.*)", line)  # `name: text` or `name (type): text`
        if entry:
            current = entry[1]
            entries[current] = entry[2].strip()
        elif current and line.startswith(" "):  # a longer description goes on, indented
            entries[current] = f"{entries[current]} {line.strip()}".strip()
    description = " ".join(description.split())
    if not description:
        raise ConfigError(f"@tool {function.__name__}: the docstring does not say what it does; begin it with that")
    return description, entries
