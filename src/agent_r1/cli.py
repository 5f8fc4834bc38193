"""`agent-r1`: every stage of the speedrun as a command. `agent-r1 COMMAND --help` shows examples.

Exit codes: 0 done, 1 failed (cause and remedy on the last line of standard error), 2 wrong usage or configuration,
130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from agent_r1 import __version__
from agent_r1.config import ALGORITHMS, ENGINES, Config, from_yaml, load_config, preset_names
from agent_r1.errors import AgentR1Error, ConfigError

# The rooms are imported inside the commands, behind the configuration: `agent-r1 --help` and a misspelt setting are
# answered at once, without loading PyTorch.


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = _parse(argv)
    try:
        return arguments.command(arguments) or 0
    except ConfigError as error:
        return _fail(str(error), 2)
    except AgentR1Error as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt as interrupt:
        return _fail(f"interrupted{f': {interrupt}' if str(interrupt) else ''}", 130)
    except BrokenPipeError:  # `agent-r1 ... | head`
        return 0
    except OSError as error:
        return _fail(f"{error.filename or 'a file'}: {error.strerror or error}; check space and permissions", 1)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    """argparse takes positionals only in one place; people write overrides before, between and behind the options."""
    parser = build_parser()
    arguments, rest = parser.parse_known_args(argv)
    unknown = [item for item in rest if item.startswith("-") or not hasattr(arguments, "settings")]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest:
        arguments.settings += rest
    return arguments


def _fail(message: str, code: int) -> int:
    print(f"agent-r1: {' '.join(message.split())}", file=sys.stderr)  # one line, also where a library said several
    return code


# --------------------------------------------------------------------------------------------------------- commands


def doctor(arguments: argparse.Namespace) -> int:
    from agent_r1.doctor import print_checks, run_checks

    return print_checks(run_checks(arguments.preset))


def data(arguments: argparse.Namespace) -> None:
    config = _config(arguments)
    from agent_r1 import stages

    stages.make_data(config)


def index(arguments: argparse.Namespace) -> None:
    config = _config(arguments)
    from agent_r1 import stages

    stages.make_index(config)


def cold_start(arguments: argparse.Namespace) -> None:
    config = _config(arguments)
    from agent_r1 import stages

    stages.make_cold_start(config)


def train(arguments: argparse.Namespace) -> None:
    config = _config(arguments)
    if arguments.dry_run:
        from agent_r1.plan import print_plan

        return print_plan(config, _run_name(arguments, config))
    from agent_r1 import stages

    stages.run_train(config, _run_name(arguments, config), arguments.resume, arguments.plain)


def evaluate(arguments: argparse.Namespace) -> None:
    config = _config(arguments)
    from agent_r1 import stages

    places = stages.Places.of(config)
    if arguments.model:
        stages.run_eval(config, Path(arguments.model), None, f"evaluate {arguments.model}", arguments.split)
        return
    from agent_r1.training.checkpoint import verify_checkpoint
    from agent_r1.training.run import RunDir, check_same_settings, open_run

    run = RunDir(places.run(_run_name(arguments, config)))
    check_same_settings(run, config)
    if arguments.before:
        stages.run_eval(config, stages.start_model(config), run.path / "eval_before.json", "evaluate before RL")
        open_run(run, config, resume=True)
        return
    if not run.finished(config):
        raise AgentR1Error(f"{run.path} has not finished its {config.trainer.steps} steps; run `agent-r1 train` first")
    verify_checkpoint(run.latest_checkpoint())
    stages.run_eval(config, run.latest_checkpoint() / "model", run.path / "eval.json", "evaluate after RL")


def report(arguments: argparse.Namespace) -> None:
    from agent_r1 import stages

    config = _config(arguments)
    stages.run_report(_run_name(arguments, config), stages.Places.of(config).root)


def inspect(arguments: argparse.Namespace) -> None:
    from rich.console import Console

    from agent_r1.inspect.tokens import clean, token_table, token_text
    from agent_r1.training.loggers import read_jsonl

    path = Path(arguments.rollouts)
    if not path.is_file():
        raise AgentR1Error(f"{path} does not exist; runs/<name>/rollouts/ holds the trajectories of a run")
    records = read_jsonl(path)
    if not records or not {"question", "ground_truth", "stop_reason", "reward", "rows"} <= records[0].keys():
        raise AgentR1Error(f"{path} holds no trajectories; give a file of runs/<name>/rollouts/")
    if not 0 <= arguments.index < len(records):
        raise AgentR1Error(f"{path} has trajectories 0 to {len(records) - 1}; there is no {arguments.index}")
    record, console = records[arguments.index], Console()
    facts = f"{record['question']}  expected {record['ground_truth']}  {record['stop_reason']}  reward {record['reward']:.2f}"
    console.print(clean(facts), markup=False)
    for row in record["rows"]:
        console.print(token_table(row) if arguments.table else token_text(row))


# ------------------------------------------------------------------------------------------------------------ usage


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="agent-r1",
        description="Train LLM agents end to end with multi-turn reinforcement learning.",
        epilog="The stages of a run, in order: data, index, cold-start, eval --before, train, eval, report.",
    )
    parser.add_argument("--version", action="version", version=f"agent-r1 {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    command = _command(
        commands, "doctor", doctor, "check this machine", ["agent-r1 doctor", "agent-r1 doctor --preset laptop"]
    )
    command.add_argument("--preset", help=f"also check what this preset needs ({', '.join(preset_names())})")

    for name, function, text in (
        ("data", data, "make or fetch questions and passages"),
        ("index", index, "build the search index"),
        ("cold-start", cold_start, "make the model that RL starts from"),
    ):
        example = [f"agent-r1 {name} --preset smoke", f"agent-r1 {name} --preset laptop --seed 3 data.entities=1000"]
        _configured(_command(commands, name, function, text, example))

    command = _command(
        commands, "train", train, "reinforcement learning",
        ["agent-r1 train --preset smoke", "agent-r1 train grpo --preset laptop --seed 1 actor.lr=5e-4",
         "agent-r1 train --preset laptop --resume", "agent-r1 train --preset laptop --dry-run"],
    )  # fmt: skip
    _configured(command, run=True)
    command.add_argument("--resume", action="store_true", help="go on from the newest checkpoint of the run")
    command.add_argument(
        "--dry-run", action="store_true", help="print configuration, plan and estimates; start nothing"
    )
    command.add_argument("--plain", action="store_true", help="one line a step instead of the dashboard")

    command = _command(
        commands, "eval", evaluate, "evaluate a model on held-out questions",
        ["agent-r1 eval --before --preset laptop", "agent-r1 eval --preset laptop",
         "agent-r1 eval --model runs/laptop-ppo/checkpoints/step_000100/model --preset laptop --split val"],
    )  # fmt: skip
    _configured(command, run=True)
    command.add_argument("--before", action="store_true", help="the model that RL starts from, into eval_before.json")
    command.add_argument("--model", help="any model folder; prints its card and stores nothing")
    command.add_argument(
        "--split", default="test", choices=("train", "val", "test"), help="with --model (default: test)"
    )

    command = _command(
        commands,
        "report",
        report,
        "write report.html of a run",
        ["agent-r1 report --preset laptop", "agent-r1 report --run mine"],
    )
    _configured(command, run=True)

    command = _command(
        commands, "inspect", inspect, "show a trajectory token by token",
        ["agent-r1 inspect runs/laptop-ppo/rollouts/eval.jsonl",
         "agent-r1 inspect runs/mine/rollouts/step_000010.jsonl -i 3 --table"],
    )  # fmt: skip
    command.add_argument("rollouts", help="a file of runs/<name>/rollouts/")
    command.add_argument("-i", "--index", type=int, default=0, help="which trajectory (default: 0)")
    command.add_argument("--table", action="store_true", help="one token a line, with id, mask, log-prob, advantage")
    return parser


def _command(commands, name: str, function: Callable, text: str, examples: list[str]) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog="examples:\n" + "\n".join(f"  {example}" for example in examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(command=function)
    return command


def _configured(command: argparse.ArgumentParser, run: bool = False) -> None:
    """The options of every command that works on a configuration."""
    command.add_argument("--preset", help=f"{', '.join(preset_names())} (default: laptop, or the run's own)")
    command.add_argument("--seed", type=int, help="seed of everything random (default: 0)")
    command.add_argument("--engine", help=f"executor: {', '.join(ENGINES)}")
    if run:
        command.add_argument("--run", help="name of the run's folder in runs/ (default: PRESET-ALGORITHM[-sSEED])")
    command.add_argument(
        "settings", nargs="*", metavar="ppo|grpo|section.key=value", help="algorithm, and overrides of the preset"
    )


def _config(arguments: argparse.Namespace) -> Config:
    """The configuration of the command line; an existing run that is named alone speaks for itself."""
    settings = [item for item in arguments.settings if "=" in item]
    words = [item for item in arguments.settings if "=" not in item]
    if len(words) > 1 or any(word not in ALGORITHMS for word in words):
        raise ConfigError(f"unknown algorithm {' '.join(words)!r}; choose {' or '.join(ALGORITHMS)}, once")
    algorithm = words[0] if words else None
    if arguments.engine:
        settings.append(f"engine={arguments.engine}")
    name = getattr(arguments, "run", None)
    said = arguments.preset or algorithm or settings or arguments.seed is not None
    if name and not said:
        from agent_r1.stages import Places

        saved = Places.of(Config()).run(name) / "config.yaml"
        if saved.exists():
            return from_yaml(saved)
    return load_config(arguments.preset or "laptop", settings, algorithm=algorithm, seed=arguments.seed)


def _run_name(arguments: argparse.Namespace, config: Config) -> str:
    name = arguments.run or f"{config.preset}-{config.algorithm}" + (f"-s{config.seed}" if config.seed else "")
    if not name or name.startswith(".") or "/" in name or "\\" in name:
        raise ConfigError(f"--run {name!r}: give a plain folder name, such as my-first-run")
    return name


if __name__ == "__main__":
    sys.exit(main())
