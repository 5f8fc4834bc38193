"""Make a tool from a typed function with a docstring, by the decorator `@tool`.

    @tool
    def convert(amount: float, to: Literal["EUR", "USD"]) -> str:
        \"\"\"Convert an amount of money.

        Args:
            amount: How much, in the other currency.
            to: The currency wanted.
        \"\"\"

The summary becomes the description, the annotations become the JSON schema, and the docstring's
section on parameters describes the arguments. `docstring_parser` reads the section in Google's,
NumPy's, Sphinx's or Epydoc's style. A parameter without a default is required. A missing part
raises when the module is imported, instead of confusing an agent later.
"""

from __future__ import annotations

import functools
import inspect
import re
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, Union

import docstring_parser
from docstring_parser import DocstringStyle
from pydantic import TypeAdapter

from agent_r1.ground.errors import ConfigError, first_line
from agent_r1.tool.base import BaseTool

SCALARS = (str, int, float, bool, type(None), Any, dict)
SUPPORTED_TYPES = (
    "str, int, float, bool, None, Any, Literal[...], list[...], dict[str, ...], unions of these"
)


class FunctionTool(BaseTool):
    """A tool around a function. The function can still be called directly, for unit tests.

    `owner` is its name in messages; default `@tool NAME`.
    """

    def __init__(self, function: Callable[..., Any], owner: str | None = None):
        self.function = function
        self.name = _name_of(function)
        self.description, self.parameters = _schema(function, owner or f"@tool {self.name}")
        # Only made, not compiled: pydantic made the schema, and loading jsonschema takes time at
        # start-up.
        _ = self.validator

    @property
    def body(self) -> Callable[..., Any]:
        return _unwrap(self.function)

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(_unwrap(self.function))

    def execute(self, args: dict[str, Any]) -> Any:
        return self.function(**args)  # for an async function a coroutine, which `call_tool` awaits

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def tool(function: Callable[..., Any]) -> FunctionTool:
    """Decorate a function as a tool.

    Raise ConfigError for a missing annotation or docstring part.
    """
    return FunctionTool(function)


# ------------------------------------------------------------------------- the function's own parts


def _unwrap(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that has the annotations, the docstring and the lines of code.

    Of a `functools.partial` it is the function inside; of an object, its method `__call__`.
    """
    while isinstance(function, functools.partial):
        function = function.func
    plain = inspect.isroutine(function) or hasattr(function, "__wrapped__")
    return function if plain else type(function).__call__


def _name_of(function: Callable[..., Any]) -> str:
    """Return the tool's name: the function's, or an object's class in small letters."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", None)
    if name is None:
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(function).__name__).lower()
    return name


def _docstring_of(function: Callable[..., Any]) -> str:
    """Return the docstring of the function; of an object, its class's if `__call__` has none."""
    while isinstance(function, functools.partial):
        function = function.func
    inner = _unwrap(function)
    own = inspect.getdoc(inner)
    # Every class inherits a `__call__` with Python's docstring: "Call self as a function."
    if inner is not function and (not own or own == inspect.getdoc(type.__call__)):
        own = inspect.getdoc(type(function))
    return own or ""


def _schema(function: Callable[..., Any], owner: str) -> tuple[str, dict[str, Any]]:
    """Return the description and the JSON schema of the parameters."""
    inner = _unwrap(function)
    try:
        hints = typing.get_type_hints(inner)
        signature = inspect.signature(function)
    except NameError as error:
        raise ConfigError(
            f"{owner}: an annotation cannot be resolved ({error}); import that name",
            code="bad_annotation",
        ) from None
    except Exception as error:  # a function in C, or an annotation that is no type
        raise ConfigError(
            f"{owner}: its signature cannot be read ({first_line(error)}); write a typed function "
            "around it",
            code="bad_annotation",
        ) from None
    # What a `functools.partial` has set already is no matter for the agent.
    preset_names = _find_preset_names(function)
    parameters = {
        name: parameter
        for name, parameter in signature.parameters.items()
        if name not in preset_names
    }
    _check(parameters, hints, owner)
    docstring = _docstring_of(function)
    description, descriptions = read_docstring(docstring, list(parameters))
    if parameters.keys() - descriptions.keys():
        description, descriptions = read_docstring(_in_plain_form(docstring), list(parameters))
    lacking_names = [name for name in parameters if name not in descriptions]
    if lacking_names or not description:
        lack = "there is no docstring"
        if description:
            lack = f"the docstring does not describe {', '.join(lacking_names)}"
        raise ConfigError(
            f"{owner}: {lack}; write a docstring that says what it does and, under 'Args:', a line "
            "'name: ...' for each parameter",
            code="bad_docstring",
        )
    if strangers := descriptions.keys() - signature.parameters.keys() - preset_names:
        raise ConfigError(
            f"{owner}: the docstring describes {', '.join(sorted(strangers))}, but it has no such "
            "parameter; fix the name, or indent a continued line that begins with 'word:'",
            code="bad_docstring",
        )
    properties = {}
    required_names = []
    for name, parameter in parameters.items():
        properties[name] = TypeAdapter(hints[name]).json_schema()
        properties[name]["description"] = descriptions[name]
        if parameter.default is parameter.empty:
            required_names.append(name)
    constraints = {"required": required_names, "additionalProperties": False}
    return description, {"type": "object", "properties": properties, **constraints}


def _find_preset_names(function: Callable[..., Any]) -> set[str]:
    """Return the parameters that a `functools.partial` has set, by name or by position."""
    if not isinstance(function, functools.partial):
        return set()
    inside = inspect.signature(function.func).parameters
    open_parameters = inspect.signature(function).parameters
    return set(function.keywords) | (inside.keys() - open_parameters.keys())


def _check(parameters: dict[str, inspect.Parameter], hints: dict[str, Any], owner: str) -> None:
    """Refuse parameters that have no name or no form in JSON."""
    for name, parameter in parameters.items():
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
                f"use {SUPPORTED_TYPES}",
                code="bad_annotation",
            )


def _has_json_form(hint: Any) -> bool:
    origin = typing.get_origin(hint)
    inner = typing.get_args(hint)
    if origin is Literal:
        return True
    if origin is dict:
        return inner[0] is str and _has_json_form(inner[1])
    if origin in (list, Union, types.UnionType):
        return all(_has_json_form(one) for one in inner)
    return hint in SCALARS


# ------------------------------------------------------------------------------------ the docstring

DESCRIPTION_END = re.compile(r"^(?:Args|Returns|Raises):", re.MULTILINE)
"""Headings that end the description of every tool."""
PARAMETERS = re.compile(
    r"^(?:Args|Arguments|Params|Parameters|Keyword Args|Keyword Arguments|Other Parameters):",
    re.MULTILINE,
)
"""Google's headings of a section on parameters."""
HEADING = re.compile(r"[^\W\d]\w*:|[A-Z]\w*(?: \w+)+:\s*$")
"""A line at the margin that ends a section, such as `Returns: Text.` or `Side effects:`."""
ENTRY = re.compile(r"(\s*)\*{0,2}(\w+)\s*(?:\(.*\))?\s*:(.*)")
"""The beginning of an entry: `name: What it is.` or `name (type): What it is.`"""
PLAIN_FORMS = (
    (
        re.compile(r"^[ *_#]*(?:arg|argument|param|parameter|input)s?[ *_]*:[ *_]*$", re.I | re.M),
        "Args:",
    ),
    (re.compile(r"^(\s*)[-*+] +(?=[`*_]*\w+)", re.M), r"\1"),
    (re.compile(r"^(\s*)[`*]+(\w+)[`*]+(?=\s*[:(-])", re.M), r"\1\2"),
    (re.compile(r"^(\s+\w+) +--? +", re.M), r"\1: "),
)
"""Only for docstrings that describe no parameter otherwise."""
OTHER_STYLES = (DocstringStyle.NUMPYDOC, DocstringStyle.REST, DocstringStyle.EPYDOC)


def read_docstring(docstring: str, parameters: list[str]) -> tuple[str, dict[str, str]]:
    """Return the description of a tool and those of its parameters, each as one line.

    Names that are not `parameters` are returned, too: the caller refuses them.
    """
    if PARAMETERS.search(docstring) or not parameters:
        description = DESCRIPTION_END.split(docstring)[0]
        if parameters:
            description = PARAMETERS.split(description)[0]
        parsed_docstring = docstring_parser.parse(
            _google_section(docstring, parameters), DocstringStyle.GOOGLE
        )
    else:
        parsed_docstring = _in_another_style(docstring)
        description = parsed_docstring.description or ""
    descriptions = {}
    for entry in parsed_docstring.params:
        # NumPy's style describes several parameters in one entry: `a, b : int`.
        for name in entry.arg_name.split(","):
            descriptions[name.strip().lstrip("*")] = " ".join((entry.description or "").split())
    return " ".join(description.split()), descriptions


def _in_plain_form(docstring: str) -> str:
    """Rewrite what people mix into Google's style: `args:`, lists, marked names, `name - text`."""
    for pattern, plain in PLAIN_FORMS:
        docstring = pattern.sub(plain, docstring)
    return docstring


def _in_another_style(docstring: str) -> docstring_parser.Docstring:
    """Parse a docstring in the style in which it describes most parameters."""
    best = docstring_parser.Docstring()
    best.short_description = DESCRIPTION_END.split(docstring)[0]
    for style in OTHER_STYLES:
        try:
            candidate = docstring_parser.parse(docstring, style)
        except docstring_parser.ParseError:
            continue
        if len(candidate.params) > len(best.params):
            best = candidate
    return best


def _google_section(docstring: str, parameters: list[str]) -> str:
    """Return the sections on parameters as one, with regular indentation, for the parser.

    The parser takes every line with the first entry's indentation for an entry. People indent
    unevenly, and continue a description with `word:`. So a line is an entry if it begins with a
    parameter's name, or is indented no deeper than the first entry.
    """
    # The empty line keeps the parser from removing the entries' indentation, as of a docstring.
    section = ["", "Args:"]
    for heading in PARAMETERS.finditer(docstring):
        indentation: int | None = None
        # The heading's own line may begin the first entry: `Args: a: The a.`
        for line in f"    {docstring[heading.end() :].lstrip(' ')}".splitlines():
            # Entries at the margin end with the next heading that is no entry.
            at_margin = not line.startswith(" ") and line.strip()
            depth, name, text = _entry(line)
            if at_margin and HEADING.match(line) and name not in parameters:
                break
            # `word: ...` with the indentation of an entry is one with a wrong name.
            is_stranger = line.lstrip().startswith(f"{name}:") and bool(name)
            if is_stranger and indentation is not None:
                is_stranger = depth <= indentation
            if name in parameters or is_stranger:
                section.append(f"    {name}: {text}")
                indentation = depth if indentation is None else indentation
            elif indentation is not None and line.strip():
                section.append(f"        {line.strip()}")
    return "\n".join(section) if len(section) > 2 else ""


def _entry(line: str) -> tuple[int, str, str]:
    """Split a line into indentation, name and text. The name is "" if it begins no entry."""
    entry = ENTRY.fullmatch(line)
    if entry is None:
        return 0, "", ""
    return len(entry[1]), entry[2], entry[3].strip()
