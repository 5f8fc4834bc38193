"""How a function becomes a command of `agent-r1`, and how the words of a command line are read. `cli.py` has the commands."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Callable

from agent_r1 import __version__
from agent_r1.errors import ConfigError

COMMANDS: dict[str, tuple] = {}


def command(name: str, text: str, examples: list[str], *options: tuple) -> Callable[[Callable], Callable]:
    """The function below becomes a command. `examples` are command lines without `agent-r1 NAME`."""

    def register(function: Callable) -> Callable:
        COMMANDS[name] = (function, text, [f"agent-r1 {name} {example}".rstrip() for example in examples], options)
        return function

    return register


def option(*names: str, **settings) -> tuple:
    """What argparse's `add_argument` takes."""
    return names, settings


def flag(name: str, text: str) -> tuple:
    return option(name, action="store_true", help=text)


def share(text: str) -> float:
    if not 0 < (value := float(text)) <= 1:
        raise ValueError  # argparse puts it into words
    return value


def taken(a: Namespace) -> str | None:
    """What an evaluation does to the agent's tools: see `workspace.under`."""
    said = ["closed-book"] * a.closed_book + [a.retriever] + ([f"poison {a.poison:g}"] if a.poison else [])
    if len(said := [word for word in said if word]) > 1:
        raise ConfigError("--closed-book, --retriever and --poison exclude one another; give one of them")
    return said[0] if said else None


def parse(argv: list[str] | None) -> Namespace:
    """argparse takes positionals only in one place; people write overrides before, between and behind the options."""
    parser = argparse.ArgumentParser(
        prog="agent-r1",
        description="Train LLM agents end to end with multi-turn reinforcement learning.",
        epilog="The stages of a run, in order: data, index, cold-start, eval --before, train, eval, report.",
    )
    parser.add_argument("--version", action="version", version=f"agent-r1 {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for name, (_, text, examples, options) in COMMANDS.items():
        one = commands.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}.", epilog="examples:\n  " + "\n  ".join(examples),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        for names, settings in options:
            one.add_argument(*names, **settings)
    arguments, rest = parser.parse_known_args(argv)
    unknown = [item for item in rest if item.startswith("-") or not hasattr(arguments, "settings")]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest:
        arguments.settings += rest
    return arguments
