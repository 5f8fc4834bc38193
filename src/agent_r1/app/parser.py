"""Turn functions into commands of `agent-r1`, and parse the command line.

`cli.py` has the commands.
"""

from __future__ import annotations

import argparse
import re
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from agent_r1 import __version__
from agent_r1.config import ALGORITHMS, ENGINES, preset_names, presets, tables
from agent_r1.config.presets import preset_named
from agent_r1.ground.errors import ConfigError, nearest

COMMANDS: dict[str, tuple] = {}


def command(
    name: str, text: str, examples: list[str], *options: tuple
) -> Callable[[Callable], Callable]:
    """Register the decorated function as command `name`.

    Args:
        text: The help text.
        examples: Command lines without `agent-r1 NAME`.
    """

    def register(function: Callable) -> Callable:
        if name in COMMANDS and COMMANDS[name][0].__module__ != function.__module__:
            raise ConfigError(
                f"{function.__module__}: the command {name!r} already exists; rename it",
                code="name_taken",
            )
        COMMANDS[name] = (
            function,
            text,
            [f"agent-r1 {name} {example}".rstrip() for example in examples],
            options,
        )
        return function

    return register


def option(*names: str, **settings) -> tuple:
    """Keep the arguments of argparse's `add_argument`."""
    return names, settings


def flag(name: str, text: str) -> tuple:
    return option(name, action="store_true", help=text)


# ----------------------------------------------------------------------------------- shared options

RECIPE = option(
    "--recipe",
    metavar="FOLDER",
    help="your own recipe (uses FOLDER/preset.yaml), or the name of a built-in recipe",
)
CONFIG_OPTIONS = (
    option(
        "--preset",
        help=f"{', '.join(preset_names())} (default: {presets.DEFAULT}, or the run's own)",
    ),
    RECIPE,
    option("--seed", type=int, help="random seed of all stages (default: 0)"),
    option("--engine", help=f"training engine: {', '.join(ENGINES)}"),
    option(
        "settings",
        nargs="*",
        metavar="ALGORITHM|section.key=value",
        help=f"algorithm ({', '.join(ALGORITHMS)}), and settings that override the preset",
    ),
)
RUN = option(
    "--run", help="name of the run's folder in runs/ (default: PRESET-ALGORITHM[-verl][-sSEED])"
)
AGENT = (
    option(
        "--agent",
        metavar="FILE.py:FUNCTION|COMMAND",
        help="your own agent, which uses an OpenAI client, instead of our loop (recipes/gateway)",
    ),
    option("--agent-python", metavar="FILE", help="the Python that imports FILE.py:FUNCTION"),
)
FROM_RUN = (
    option("--run", help="use a run's last checkpoint (default: the newest run)"),
    option("--step", type=int, help="use the run's checkpoint of this step"),
    option(
        "--checkpoint-dir",
        type=Path,
        metavar="DIR",
        help="a checkpoint folder, or the folder of a run's checkpoints",
    ),
)
FROM_ANYWHERE = (
    *FROM_RUN,
    option("--model", metavar="PATH|OWNER/NAME", help="a model folder, or a model on the hub"),
    flag("--demo", "use the trained agent that ships with agent-r1"),
    option(
        "--preset",
        help="preset for data, index, tools and limits (default: the model's own run, or the "
        "newest)",
    ),
    RECIPE,
    option(
        "settings",
        nargs="*",
        metavar="section.key=value",
        help="settings, such as data.name=hotpotqa",
    ),
)


def backend(text: str) -> str:
    """Return the backend's name; `transformers` is the former name of `local`."""
    return "local" if text == "transformers" else text


BACKEND = option(
    "--backend",
    choices=("local", "vllm"),
    type=backend,
    help="run the model in this process (local, the default) or in a vLLM server",
)
PROMPT = option(
    "--prompt",
    help="system message (default: as in training, or a description of the answer format)",
)


def share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise ValueError  # argparse writes the message
    return value


def temperature(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 10:
        raise ValueError
    return value


def count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError
    return value


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def port(text: str) -> int:
    value = int(text)
    if not 0 < value < 2**16:
        raise ValueError
    return value


def eval_condition(a: Namespace) -> str | None:
    """Return how this evaluation changes the agent's tools, or None: see `compare.condition_of`."""
    conditions = []
    if a.closed_book:
        conditions.append("closed-book")
    if a.retriever:
        conditions.append(a.retriever)
    if a.poison:
        conditions.append(f"poison {a.poison:g}")
    if len(conditions) > 1:
        raise ConfigError(
            "--closed-book, --retriever and --poison exclude one another; give only one",
            code="exclusive_options",
        )
    return conditions[0] if conditions else None


class _Parser(argparse.ArgumentParser):
    """Suggest the nearest word for a misspelt one."""

    def error(self, message: str) -> NoReturn:
        match = re.search(r"invalid choice: '(.*?)'(?= \(choose from (.*)\))", message)
        if match:
            choices = re.findall(r"[^', ]+", match[2])
            message = message.replace(match[0], match[0] + nearest(match[1], choices))
        super().error(message)

    def refuse(self, words: list[str]) -> NoReturn:
        """Exit with an error that names the unknown words and the nearest option."""
        word = words[0].partition("=")[0]
        options: list[str] = []
        for action in self._actions:
            options += action.option_strings
        self.error(f"unrecognized arguments: {' '.join(words)}{nearest(word, options)}")


def _add_recipes(argv: list[str]) -> None:
    """Add the names of a user's recipe, and import the command of `argv`."""
    early = argparse.ArgumentParser(prog="agent-r1", add_help=False)
    early.add_argument("--recipe", action="append", nargs="?", default=[])
    for recipe in filter(None, early.parse_known_args(argv)[0].recipe):
        preset_named(recipe, None)
    for name in tables.names("command"):
        if name in argv:
            tables.resolve("command", name, f"recipe.toml, [command] {name}")


def _file_formats() -> tuple[Any, ...]:
    """Return one option of `export` per format that a recipe adds."""
    return tuple(
        option(f"--{name}", type=Path, metavar="FILE", help=facts.get("help"))
        for name, facts in tables.options_of("export").items()
    )


def parse_command_line(argv: list[str] | None) -> Namespace:
    """Parse a command line, with overrides allowed before, between and after the options.

    argparse itself accepts positionals in one place only. Raises ConfigError for a recipe that does
    not exist.
    """
    if argv is None:
        argv = sys.argv[1:]
    _add_recipes(argv)
    parser = _Parser(
        prog="agent-r1",
        description="Train LLM agents end to end with multi-turn reinforcement learning.",
        epilog="The stages of a run, in order: data, index, cold-start, eval --before, train, "
        "eval, report. "
        "`agent-r1 data --preset smoke then index --preset smoke` runs two in one process.",
    )
    parser.add_argument("--version", action="version", version=f"agent-r1 {__version__}")
    commands = parser.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", required=True
    )
    for name, (_, text, examples, options) in COMMANDS.items():
        one = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog="examples:\n  " + "\n  ".join(examples),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        more: tuple[Any, ...] = ()
        if name == "export":
            more = _file_formats()
        elif name in tables.names("command") and RECIPE not in options:
            more = (RECIPE,)
        for names, settings in (*options, *more):
            one.add_argument(*names, **settings)
    for name, facts in tables.entries("command").items():
        if name not in COMMANDS:  # listed, not imported
            commands.add_parser(name, help=facts.get("help"))
    arguments, rest = parser.parse_known_args(argv)
    takes_settings = hasattr(arguments, "settings")
    wrong_words = [word for word in rest if word.startswith("-") or not takes_settings]
    if wrong_words:
        commands.choices[arguments.command].refuse(wrong_words)
    if rest:
        arguments.settings += rest
    if "recipe" in arguments:
        arguments.preset = preset_named(arguments.recipe, getattr(arguments, "preset", None))
    return arguments
