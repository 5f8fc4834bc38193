"""Make a tool from a typed function with a docstring, by the decorator `@tool`.

    @tool
    def convert(amount: float, to: Literal["EUR", "USD"]) -> str:
        \"\"\"Convert an amount of money.

        Args:
            amount: How much, in the other currency.
            to: The currency wanted.
        \"\"\"

The summary becomes the description, the annotations become the JSON schema, and the lines under `Args:` describe the
arguments. A parameter without a default is required. `transformers` parses both. A missing part raises when the module
is imported, instead of confusing an agent later.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, Union

from agent_r1.ground.errors import ConfigError, first_line
from agent_r1.tool.base import BaseTool

SCALARS = (str, int, float, bool, type(None), Any, dict)
SUPPORTED = "str, int, float, bool, None, Any, Literal[...], list[...], dict[str, ...], unions of these"


class FunctionTool(BaseTool):
    """A tool around a function. The function can still be called directly, for unit tests.

    `owner` is its name in messages; default `@tool NAME`.
    """

    def __init__(self, function: Callable[..., Any], owner: str | None = None):
        self.function = function
        self.name = function.__name__
        self.description, self.parameters = _schema(function, owner or f"@tool {function.__name__}")
        super().__init__()

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
    """Decorate a function as a tool. Raise ConfigError for a missing annotation or docstring part."""
    return FunctionTool(function)


def _schema(function: Callable[..., Any], owner: str) -> tuple[str, dict[str, Any]]:
    """Return the description and the JSON schema of the parameters."""
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
        parse_google_format_docstring,
    )

    try:
        hints = typing.get_type_hints(function)
        _check(inspect.signature(function), hints, owner)
        found = get_json_schema(function)["function"]
        described = parse_google_format_docstring(inspect.getdoc(function))[1]
    except NameError as error:
        raise ConfigError(
            f"{owner}: an annotation cannot be resolved ({error}); import that name", code="bad_annotation"
        ) from None
    except (DocstringParsingException, TypeHintParsingException, ValueError) as error:
        raise ConfigError(
            f"{owner}: {first_line(error)}; write a docstring that says what it does and, under 'Args:', a line "
            "'name: ...' for each parameter",
            code="bad_docstring",
        ) from None
    parameters = found["parameters"]
    if strangers := described.keys() - parameters["properties"].keys():
        raise ConfigError(
            f"{owner}: the docstring describes {', '.join(sorted(strangers))}, but it has no such parameter; fix the "
            "name, or do not begin a continued line with 'word:'",
            code="bad_docstring",
        )
    for name, schema in parameters["properties"].items():
        schema["description"] = " ".join(schema["description"].split())
        parameters["properties"][name] = _with_null(schema)
    # An undeclared argument is a mistake, but the schema of `transformers` would accept it.
    closed = {"required": parameters.get("required", []), "additionalProperties": False}
    return " ".join(found["description"].split()), {**parameters, **closed}


def _check(signature: inspect.Signature, hints: dict[str, Any], owner: str) -> None:
    """Refuse types that `transformers` would treat as an object or report unclearly."""
    for name, parameter in signature.parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(
                f"{owner}: {parameter} cannot be given by name; write the parameters out one by one",
                code="wrong_signature",
            )
        if name not in hints:
            raise ConfigError(
                f"{owner}: parameter {name!r} has no type; annotate it (for example {name}: str)", code="bad_annotation"
            )
        if not _has_json_form(hints[name]):
            raise ConfigError(
                f"{owner}: parameter {name!r} has the type {hints[name]}, which has no JSON form; use {SUPPORTED}",
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


def _with_null(schema: Any) -> Any:
    """Replace OpenAPI's `nullable` ("or None"), which JSON schema does not have."""
    if isinstance(schema, list):
        return [_with_null(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: _with_null(value) for key, value in schema.items()}
    if schema.pop("nullable", None) is None:
        return schema
    described = {key: schema.pop(key) for key in ("description",) if key in schema}
    return {"anyOf": [schema, {"type": "null"}], **described}
