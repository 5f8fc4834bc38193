"""Check a tool's arguments against its JSON schema.

In: the agent's arguments. Out: None, or one line about the fault. Next: `call_tool` in base.py returns the line to the
agent. It names the argument, quotes its value and lists what is accepted. The messages of
jsonschema repeat the whole value and do not tell what else is accepted.

The check shares the event loop with all episodes, so its work is limited. Schemas that refer to one another can double
it at each step. A server's schema is untrusted. Rules without a limit in a single step, such as regular expressions,
are left to the server.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from agent_r1.ground import bounds
from agent_r1.ground.errors import ConfigError, nearest

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import ValidationError


MAX_CHECK_STEPS = 20_000
"""Work of one check: rules, and a quarter of the entries that each visits. An ordinary call takes fewer than a hundred."""
UNCHECKED = ("pattern", "patternProperties", "uniqueItems", "unevaluatedItems", "unevaluatedProperties")
"""Rules of a foreign schema that are not checked here, because a single step has no limit."""

_steps_left: ContextVar[list[int]] = ContextVar("steps_left")


@functools.cache
def _checker(foreign: bool) -> type[Draft202012Validator]:
    """Return the validator class; `foreign` for an untrusted schema."""
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend

    if not foreign:
        return extend(Draft202012Validator, {name: _counted(r) for name, r in Draft202012Validator.VALIDATORS.items()})
    others = _checker(False).VALIDATORS["additionalProperties"]

    def additional(validator: Any, wanted: Any, instance: Any, schema: dict[str, Any]) -> Any:
        return () if "patternProperties" in schema else others(validator, wanted, instance, schema)

    return extend(
        _checker(False), {**dict.fromkeys(UNCHECKED, lambda *_: ()), "additionalProperties": additional}
    )  # fmt: skip


def _counted(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Make `rule` count its steps."""

    def check(validator: Any, wanted: Any, instance: Any, schema: Any) -> Any:
        if left := _steps_left.get(None):
            left[0] -= 1 + sum(len(value) // 4 for value in (wanted, instance) if isinstance(value, list | dict))
            if left[0] < 0:
                raise OverflowError(f"more than {MAX_CHECK_STEPS} steps")
        return rule(validator, wanted, instance, schema)

    return check


def _without_dialect(schema: Any) -> Any:
    """Copy a schema without "$schema", which would make jsonschema use another class."""
    if isinstance(schema, dict):
        return {k: _without_dialect(v) for k, v in schema.items() if not (k == "$schema" and isinstance(v, str))}
    return [_without_dialect(v) for v in schema] if isinstance(schema, list) else schema


class SchemaChecker:
    """Checker of objects against a JSON schema; `foreign`: an untrusted one.

    Raises ConfigError, naming `owner`, for an invalid schema.
    """

    def __init__(self, schema: dict[str, Any], owner: str, foreign: bool = False):
        from jsonschema.exceptions import SchemaError
        from referencing import Registry
        from referencing.exceptions import Unresolvable
        from referencing.jsonschema import DRAFT202012

        checker = _checker(foreign)
        try:
            bounds.check_depth(schema)
            schema = _without_dialect(schema)
            checker.check_schema(schema)
        except (ValueError, RecursionError) as error:
            why = "JSON nested too deeply" if isinstance(error, RecursionError) else error
            raise ConfigError(
                f"{owner}: parameters is not a JSON schema ({why}); make it flatter", code="bad_schema"
            ) from None
        except SchemaError as error:
            where = ".".join(map(str, error.absolute_path)) or "its top"
            raise ConfigError(
                f"{owner}: parameters is not a JSON schema (at {where}: {error.message}); fix it", code="bad_schema"
            ) from None
        if schema.get("type") != "object":
            raise ConfigError(
                f'{owner}: parameters must have "type": "object", because arguments are given by name',
                code="bad_schema",
            )
        # An empty registry: a remote reference must not be fetched, certainly not while an episode waits.
        resolver = Registry().resolver_with_root(DRAFT202012.create_resource(schema))
        for reference in _references(schema):
            try:
                resolver.lookup(reference)
            except Unresolvable:
                raise ConfigError(
                    f"{owner}: parameters refers to {reference}, which is not in it; write that out", code="bad_schema"
                ) from None
        self._validator = checker(schema, registry=Registry())

    def complaint(self, given: Any) -> str | None:
        """Describe what is wrong with `given`, and what is accepted; None if it fits."""
        schema = self._validator.schema
        if not isinstance(given, dict):
            return f"arguments must be an object; {_accepted(schema)}"
        token = _steps_left.set([MAX_CHECK_STEPS])
        try:
            return None if self._validator.is_valid(given) else f"{_wrong(self._validator, given)}; {_accepted(schema)}"
        except Exception:  # validators fail in many ways on lists nested a thousand deep, or a 5,000-digit number
            return "arguments are too large or nested too deeply"
        finally:
            _steps_left.reset(token)


def _references(schema: Any) -> Iterator[str]:
    """Yield every `$ref` of a schema."""
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        schema = list(schema.values())
    for part in schema if isinstance(schema, list) else ():
        yield from _references(part)


def quote(value: Any) -> str:
    """Quote a value of the model, shortened."""
    plain = isinstance(value, str | float | None) or (isinstance(value, int) and abs(value) < 1e18)
    text = repr(value) if plain else type(value).__name__  # Python refuses to print integers of 5,000 digits
    return text if len(text) <= 40 else text[:36] + "..." + text[-1]


def _accepted(schema: dict[str, Any]) -> str:
    """List the accepted arguments: `accepts: query (string, required), limit (integer)`."""
    parts = []
    for key, value in schema.get("properties", {}).items():
        traits = [str(value["type"])] if isinstance(value, dict) and "type" in value else []
        traits += ["required"] if key in schema.get("required", []) else []
        parts.append(f"{key} ({', '.join(traits)})" if traits else key)
    return f"accepts: {', '.join(parts) or 'no arguments'}"


def _wrong(validator: Draft202012Validator, arguments: dict[str, Any]) -> str:
    from jsonschema.exceptions import best_match

    schema = validator.schema
    if missing := [key for key in schema.get("required", []) if key not in arguments]:
        return f"missing argument {', '.join(map(repr, missing))}"
    properties = schema.get("properties", {})
    unknown = [key for key in arguments if key not in properties]
    if unknown and schema.get("additionalProperties") is False and "patternProperties" not in schema:
        return f"unknown argument {quote(unknown[0])}{nearest(unknown[0], properties)}"
    return _describe(best_match(validator.iter_errors(arguments)))


def _describe(error: ValidationError) -> str:
    key = ".".join(str(part) for part in error.absolute_path)
    rule, wanted = error.validator, error.validator_value
    if rule == "type":
        must = f"be {wanted if isinstance(wanted, str) else ' or '.join(wanted)}"
    elif rule == "enum":
        must = f"be one of {', '.join(map(repr, wanted))}"
    else:  # by its name in the schema: "argument 'x' must have maximum 10, not 12"
        must = f"have {rule} {wanted}"
    return f"{f'argument {key!r}' if key else 'the arguments'} must {must}, not {quote(error.instance)}"
