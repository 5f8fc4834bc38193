"""Check a tool's arguments against its JSON schema.

In: the agent's arguments. Out: None, or one line about the fault. Next: `call_tool` in base.py
returns the line to the agent. It names the argument, quotes its value and lists what is accepted.
The messages of jsonschema repeat the whole value and do not tell what else is accepted.

The check shares the event loop with all episodes. Some rules may take hours, so of a server's
schema, which is untrusted, only names and types are checked here. The server checks the rest.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from agent_r1.ground import bounds
from agent_r1.ground.errors import ConfigError, nearest

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import ValidationError


class SchemaChecker:
    """Checker of objects against a JSON schema; `foreign`: an untrusted one.

    `owner` is its tool in messages.
    """

    def __init__(self, schema: dict[str, Any], owner: str, foreign: bool = False):
        self._schema = schema
        self._owner = owner
        self._foreign = foreign

    def compile(self) -> None:
        """Compile the schema, which the first check does otherwise.

        Raises ConfigError for an invalid one.
        """
        _ = self._validator

    @functools.cached_property
    def _validator(self) -> tuple[Draft202012Validator, str]:
        """The validator, and the list of what is accepted."""
        from jsonschema import Draft202012Validator
        from jsonschema.exceptions import SchemaError
        from referencing import Registry

        schema = self._schema
        owner = self._owner
        try:
            bounds.check_depth(schema)
            Draft202012Validator.check_schema(schema)
        except (ValueError, RecursionError) as error:
            why = "JSON nested too deeply" if isinstance(error, RecursionError) else error
            raise ConfigError(
                f"{owner}: parameters is not a JSON schema ({why}); nest it less deeply",
                code="bad_schema",
            ) from None
        except SchemaError as error:
            where = ".".join(map(str, error.absolute_path)) or "its top"
            raise ConfigError(
                f"{owner}: parameters is not a JSON schema (at {where}: {error.message}); fix it",
                code="bad_schema",
            ) from None
        if schema.get("type") != "object":
            raise ConfigError(
                f'{owner}: parameters must have "type": "object", because arguments are given by '
                "name",
                code="bad_schema",
            )
        # An empty registry: a remote reference must not be fetched, certainly not while an episode
        # waits.
        if self._foreign:
            schema_to_check = _outline(schema)
        else:
            schema_to_check = schema
        return Draft202012Validator(schema_to_check, registry=Registry()), _signature(schema)

    def complaint(self, arguments: Any) -> str | None:
        """Describe what is wrong with `given`, and what is accepted; None if it fits."""
        validator, signature = self._validator
        if not isinstance(arguments, dict):
            return f"arguments must be an object; {signature}"
        try:
            if validator.is_valid(arguments):
                return None
            return f"{_wrong(validator, arguments)}; {signature}"
        # Validators fail in many ways on lists nested a thousand deep, or a 5,000-digit number.
        except Exception:
            return "arguments are too large or nested too deeply"


def _outline(schema: dict[str, Any]) -> dict[str, Any]:
    """Keep the names of a schema's arguments, their types, and which are required."""
    types = {}
    for name, argument in schema.get("properties", {}).items():
        types[name] = {}
        if isinstance(argument, dict) and "type" in argument:
            types[name] = {"type": argument["type"]}
    no_others = schema.get("additionalProperties") is False and "patternProperties" not in schema
    return {
        "type": "object",
        "properties": types,
        "required": schema.get("required", []),
        "additionalProperties": not no_others,
    }


def quote(value: Any) -> str:
    """Quote a value of the model, shortened."""
    plain = isinstance(value, str | float | None) or (isinstance(value, int) and abs(value) < 1e18)
    # Python refuses to print integers of 5,000 digits.
    text = repr(value) if plain else type(value).__name__
    if len(text) <= 40:
        return text
    return text[:36] + "..." + text[-1]


def _signature(schema: dict[str, Any]) -> str:
    """List the accepted arguments: `accepts: query (string, required), limit (integer)`."""
    parts = []
    for key, value in schema.get("properties", {}).items():
        traits = []
        if isinstance(value, dict) and "type" in value:
            traits.append(str(value["type"]))
        if key in schema.get("required", []):
            traits.append("required")
        if traits:
            key = f"{key} ({', '.join(traits)})"
        parts.append(key)
    return f"accepts: {', '.join(parts) or 'no arguments'}"


def _wrong(validator: Draft202012Validator, arguments: dict[str, Any]) -> str:
    from jsonschema.exceptions import best_match

    schema = validator.schema
    missing = [key for key in schema.get("required", []) if key not in arguments]
    if missing:
        return f"missing argument {', '.join(map(repr, missing))}"
    properties = schema.get("properties", {})
    strangers = [key for key in arguments if key not in properties]
    no_others = schema.get("additionalProperties") is False and "patternProperties" not in schema
    if strangers and no_others:
        return f"unknown argument {quote(strangers[0])}{nearest(strangers[0], properties)}"
    return _describe(best_match(validator.iter_errors(arguments)))


def _describe(error: ValidationError) -> str:
    key = ".".join(str(part) for part in error.absolute_path)
    must = _duty(error.validator, error.validator_value)
    subject = f"argument {key!r}" if key else "the arguments"
    return f"{subject} must {must}, not {quote(error.instance)}"


def _duty(rule: Any, limit: Any) -> str:
    if rule == "type":
        return f"be {limit}" if isinstance(limit, str) else f"be {' or '.join(limit)}"
    if rule == "enum":
        return f"be one of {', '.join(repr(choice) for choice in limit)}"
    # By its name in the schema: "argument 'x' must have maximum 10, not 12".
    return f"have {rule} {limit}"
