"""`agent-r1`: every stage of the speedrun as a command. `agent-r1 COMMAND --help` shows examples.

Exit codes: 0 done, 1 failed (cause and remedy on the last line of standard error), 2 wrong usage or configuration,
130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from agent_r1 import __version__
from agent_r1.config import ALGORITHMS, ENGINES, Config, changed, from_yaml, load_config, preset_names
from agent_r1.errors import AgentR1Error, ConfigError

# The rooms are imported inside the commands, behind the configuration: `agent-r1 --help` and a misspelt setting are
# answered at once, without loading PyTorch.


PROMPT = (
    "the system message (default: that of the model's training; one that was not trained here is told how to answer)"
)


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
    from agent_r1.device import gpus_here
    from agent_r1.doctor import print_checks, run_checks
    from agent_r1.doctor_preset import check_preset, suggest_preset

    if arguments.suggest_preset:
        print(suggest_preset(gpus_here()))
        return 0
    if arguments.preset is not None:
        load_config(arguments.preset)  # an unknown name is wrong usage, not a finding about the machine
    return print_checks(run_checks() + (check_preset(arguments.preset) if arguments.preset else []))


def data(arguments: argparse.Namespace) -> None:
    config = _config(arguments)
    from agent_r1 import workspace

    workspace.make_data(config)


def index(arguments: argparse.Namespace) -> None:
    config = _config(arguments)
    from agent_r1 import workspace

    workspace.make_index(config)
    if arguments.push:
        from agent_r1.search import prebuilt
        from agent_r1.ui import say

        say(f"uploaded to {prebuilt.push(workspace.Places.of(config).index, arguments.push)}")


def cold_start(arguments: argparse.Namespace) -> None:
    config = _config(arguments)
    from agent_r1 import stages

    stages.make_cold_start(config)


def train(arguments: argparse.Namespace) -> None:
    config = _config(arguments)
    if arguments.dry_run:
        from agent_r1.plan import print_plan

        return print_plan(config, _run_name(arguments, config), arguments.gpu_hour)
    from agent_r1 import stages

    stages.run_train(config, _run_name(arguments, config), arguments.resume, arguments.plain)


def evaluate(arguments: argparse.Namespace) -> None:
    if arguments.model:
        return evaluate_models(arguments)
    config = _config(arguments)
    from agent_r1 import stages
    from agent_r1.training.checkpoint import verify_checkpoint
    from agent_r1.training.run import RunDir, check_same_settings, open_run, start_model
    from agent_r1.workspace import Places

    places = Places.of(config)
    run = RunDir(places.run(_run_name(arguments, config)))
    check_same_settings(run, config)
    if arguments.before:
        stages.run_eval(config, start_model(config), run.path / "eval_before.json", "evaluate before RL")
        open_run(run, config, resume=True)
        return
    if not run.finished(config):
        raise AgentR1Error(f"{run.path} has not finished its {config.trainer.steps} steps; run `agent-r1 train` first")
    verify_checkpoint(run.latest_checkpoint())
    stages.run_eval(config, run.latest_checkpoint() / "model", run.path / "eval.json", "evaluate after RL")


def chat(arguments: argparse.Namespace) -> None:
    from agent_r1.inference.agent import find_model
    from agent_r1.inference.chat import check_temperature, run_chat

    temperature = None if arguments.temperature is None else check_temperature(arguments.temperature)
    model, config = find_model(
        arguments.run, arguments.step, arguments.checkpoint_dir, arguments.model, arguments.preset, arguments.settings
    )
    run_chat(
        model,
        config,
        arguments.backend,
        arguments.question,
        arguments.json,
        arguments.tools,
        temperature,
        arguments.seed,
        arguments.prompt,
    )


def evaluate_models(arguments: argparse.Namespace) -> None:
    if len(arguments.model) > 2:
        raise ConfigError("--model: give one model, or two to compare")
    from agent_r1.data.rows import read_rows
    from agent_r1.inference import agent, compare
    from agent_r1.workspace import load_rows

    settings = [f"algorithm={item}" if item in ALGORITHMS else item for item in arguments.settings]
    settings += [f"{k}={v}" for k in ("engine", "seed") if (v := getattr(arguments, k)) is not None]
    found = [
        agent.find_model(arguments.run, hf_path=m, preset=arguments.preset, overrides=settings) for m in arguments.model
    ]
    config, name = found[0][1], arguments.dataset or ""
    own = name.endswith(".parquet")
    if name and not own:
        config = changed(config, [f"data.name={name}"])
    agent.make_world(config)
    rows = read_rows(Path(name)) if own else load_rows(config, arguments.split)
    compare.evaluate_models(
        [model for model, _ in found],
        config,
        rows[: arguments.limit],
        split=Path(name).stem if own else arguments.split,
        backend=arguments.backend,
        temperature=arguments.temperature,
        out=Path(arguments.out) if arguments.out else None,
        prompt=arguments.prompt,
    )


def export(arguments: argparse.Namespace) -> None:
    from agent_r1.inference.agent import find_checkpoint, hub_model, newest_step, own_settings
    from agent_r1.inference.export import default_target, export
    from agent_r1.ui import say

    given = arguments.checkpoint_dir
    checkpoint = newest_step(given) if given else find_checkpoint(arguments.run, arguments.step)
    target = arguments.target_dir or default_target(checkpoint)
    base = hub_model(arguments.base_model) if arguments.base_model else None
    export(checkpoint, own_settings(checkpoint), target, base)
    if arguments.push_to_hub:
        from agent_r1.hub import push

        say(f"uploaded to {push(target, arguments.push_to_hub)}")


def serve(arguments: argparse.Namespace) -> None:
    from agent_r1.inference.agent import find_model, fit_context
    from agent_r1.inference.serve import serve_forever

    model, config = find_model(
        arguments.run, arguments.step, arguments.checkpoint_dir, arguments.model, arguments.preset, arguments.settings
    )
    serve_forever(model, fit_context(config, model), arguments.port)


def search_server(arguments: argparse.Namespace) -> None:
    config = _config(arguments)
    if config.search.url:
        raise ConfigError("search.url is for those who ask; leave it out here")
    from agent_r1.device import cores

    # PyTorch and FAISS would each take every core for a handful of queries, and spin beside the trainers and vLLM. Both
    # read this when they are imported, and it holds for all of their threads.
    os.environ.setdefault("OMP_NUM_THREADS", str(min(16, cores())))
    try:
        from agent_r1.search import server
    except ImportError as error:
        raise AgentR1Error(f"the search service needs {error.name}; run `pip install 'agent-r1[serve]'`") from None
    from agent_r1.ui import say
    from agent_r1.workspace import load_index

    listener = server.open_port(arguments.host, arguments.port)
    index = load_index(config)
    say(f"search: {len(index.passages)} passages at http://{arguments.host}:{arguments.port} (Ctrl-C ends it)")
    server.serve(index, listener)


def report(arguments: argparse.Namespace) -> None:
    from agent_r1 import stages
    from agent_r1.workspace import Places

    config = _config(arguments)
    stages.run_report(_run_name(arguments, config), Places.of(config).root)


def inspect(arguments: argparse.Namespace) -> None:
    from rich.console import Console

    from agent_r1.files import read_jsonl
    from agent_r1.inspect.tokens import token_table, token_text
    from agent_r1.ui import clean

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
    command.add_argument("--suggest-preset", action="store_true", help="print only the preset for this machine's GPUs")

    for name, function, text in (
        ("data", data, "make or fetch questions and passages"),
        ("index", index, "build the search index"),
        ("cold-start", cold_start, "make the model that RL starts from"),
    ):
        example = [f"agent-r1 {name} --preset smoke", f"agent-r1 {name} --preset laptop --seed 3 data.entities=1000"]
        command = _command(commands, name, function, text, example)
        _configured(command)
        if name == "index":
            command.add_argument("--push", metavar="OWNER/NAME", help="also publish it on the hub (private, if new)")

    command = _command(
        commands, "train", train, "reinforcement learning",
        ["agent-r1 train --preset smoke", "agent-r1 train grpo --preset laptop --seed 1 actor.lr=5e-4",
         "agent-r1 train --preset laptop --resume", "agent-r1 train --preset laptop --dry-run",
         "agent-r1 train --preset hotpotqa-4xh100 --dry-run --gpu-hour 3 model.path=Qwen/Qwen2.5-3B-Instruct"],
    )  # fmt: skip
    _configured(command, run=True)
    command.add_argument("--resume", action="store_true", help="go on from the newest checkpoint of the run")
    command.add_argument(
        "--dry-run", action="store_true", help="print configuration, plan and estimates; start nothing"
    )
    command.add_argument("--gpu-hour", type=float, metavar="PRICE", help="with --dry-run: what a GPU costs for an hour")
    command.add_argument("--plain", action="store_true", help="one line a step instead of the dashboard")

    _commands_of_use(commands)
    _commands_of_looking(commands)
    return parser


def _commands_of_use(commands) -> None:
    """Room 9: evaluate, export, serve, chat."""
    command = _command(
        commands, "eval", evaluate, "evaluate a model on held-out questions",
        ["agent-r1 eval --before --preset laptop", "agent-r1 eval --preset laptop",
         "agent-r1 eval --model runs/laptop-ppo/export --split val",
         "agent-r1 eval --model runs/a/export --model runs/b/export --out evals/a-b --backend vllm"],
    )  # fmt: skip
    _configured(command, run=True)
    command.add_argument("--before", action="store_true", help="the model that RL starts from, into eval_before.json")
    command.add_argument(
        "--model", action="append", metavar="PATH|OWNER/NAME", help="any model instead of the run's; twice: compare two"
    )
    options = command.add_argument_group("with --model")
    options.add_argument("--split", default="test", choices=("train", "val", "test"), help="default: test")
    options.add_argument("--dataset", metavar="NAME|FILE.parquet", help="other questions than the model's own")
    options.add_argument("--limit", type=int, help="only the first so many questions")
    options.add_argument("--temperature", type=float, default=0.0, help="of sampling (default: 0, greedy)")
    options.add_argument("--prompt", help=PROMPT)
    options.add_argument("--out", metavar="DIR", help="keep cards and a line a question; go on where it stopped")
    _backend(options)

    command = _command(
        commands, "export", export, "make a Hugging Face folder of a checkpoint",
        ["agent-r1 export", "agent-r1 export --run laptop-grpo --step 40 --target-dir my-agent",
         "agent-r1 export --checkpoint-dir DIR --push-to-hub OWNER/NAME", "agent-r1 export --checkpoint-dir global_step_60"],
    )  # fmt: skip
    _which_checkpoint(command)
    command.add_argument(
        "--target-dir", type=Path, metavar="DIR", help="default: export/ in the run's folder, or beside the checkpoint"
    )
    command.add_argument(
        "--base-model",
        metavar="PATH|OWNER/NAME",
        help="for shards of verl without a config.json or tokenizer beside them",
    )
    command.add_argument("--push-to-hub", metavar="OWNER/NAME", help="also upload it (private, if it is new)")

    command = _command(
        commands, "serve", serve, "serve a trained agent with vLLM, for OpenAI clients",
        ["agent-r1 serve", "agent-r1 serve --run laptop-grpo --port 8000", "agent-r1 serve --model runs/mine/export",
         "agent-r1 serve --model OWNER/NAME rollout.max_context=16384 rollout.slots=64"],
    )  # fmt: skip
    _which_checkpoint(command)
    _acting(command, "rollout.max_context=16384 or trainer.dtype=bfloat16; tools are the client's")
    command.add_argument("--port", type=int, help="on 127.0.0.1 (default: a free one)")

    command = _command(
        commands, "chat", chat, "talk to a trained agent",
        ["agent-r1 chat", "agent-r1 chat --run laptop-grpo --step 40 --backend vllm",
         'agent-r1 chat --question "In which city is the publisher of Sosnum based?" --json',
         "agent-r1 chat --tools my_tools:weather",
         "agent-r1 chat --model OWNER/NAME --preset hotpotqa-4xh100 search.url=http://127.0.0.1:8100",
         'agent-r1 chat --model OWNER/NAME env.tools=[] --prompt "Answer in one word."'],
    )  # fmt: skip
    _which_checkpoint(command)
    _acting(command, "env.tools=[] or data.name=hotpotqa")
    _backend(command)
    command.add_argument("--question", help="ask this and leave; exit code 1 if there is no answer")
    command.add_argument("--json", action="store_true", help="one line of JSON for each question")
    command.add_argument(
        "--tools", action="append", metavar="MODULE:FUNCTION", help="a tool of yours, beside the run's; may be repeated"
    )
    command.add_argument("--temperature", help="of sampling (default: as in training)")
    command.add_argument("--seed", type=int, default=0, help="of sampling; same seed, same answers (default: 0)")
    command.add_argument("--prompt", help=PROMPT)


def _commands_of_looking(commands) -> None:
    """The search service, and what shows a run."""
    command = _command(
        commands, "search-server", search_server, "serve the search index to other processes (search.url=http://127.0.0.1:8100)",
        ["agent-r1 search-server --preset laptop", "agent-r1 search-server --preset laptop --port 8101"],
    )  # fmt: skip
    _configured(command)
    command.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    command.add_argument("--port", type=int, default=8100, help="default: 8100")

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


def _which_checkpoint(command: argparse.ArgumentParser) -> None:
    """The options of the commands that use what a run has made."""
    command.add_argument("--run", help="a run's last checkpoint (default: the newest run)")
    command.add_argument("--step", type=int, help="the run's checkpoint of this step")
    command.add_argument(
        "--checkpoint-dir", type=Path, metavar="DIR", help="a checkpoint of whatever run, or the folder that holds them"
    )


def _acting(command: argparse.ArgumentParser, such_as: str) -> None:
    """Of chat and serve: any model, and the configuration that it acts with."""
    command.add_argument("--model", metavar="PATH|OWNER/NAME", help="a model folder, or a model on the hub")
    command.add_argument(
        "--preset", help="whose data, index, tools and limits (default: the model's own run, or the newest)"
    )
    help = f"others than those, such as {such_as}"
    command.add_argument("settings", nargs="*", metavar="section.key=value", help=help)


def _backend(command) -> None:
    command.add_argument(
        "--backend",
        default="transformers",
        help="transformers (in this process; default) or vllm (a server of its own)",
    )


def _configured(command: argparse.ArgumentParser, run: bool = False) -> None:
    """The options of every command that works on a configuration."""
    command.add_argument("--preset", help=f"{', '.join(preset_names())} (default: laptop, or the run's own)")
    command.add_argument("--seed", type=int, help="seed of everything random (default: 0)")
    command.add_argument("--engine", help=f"executor: {', '.join(ENGINES)}")
    if run:
        command.add_argument(
            "--run", help="name of the run's folder in runs/ (default: PRESET-ALGORITHM[-verl][-sSEED])"
        )
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
    if name and not _said(arguments):
        from agent_r1.workspace import Places

        saved = Places.of(Config()).run(name) / "config.yaml"
        if saved.exists():
            return from_yaml(saved)
    return load_config(arguments.preset or "laptop", settings, algorithm=algorithm, seed=arguments.seed)


def _said(arguments: argparse.Namespace) -> bool:
    """Does the command line say anything about the configuration?"""
    return bool(arguments.preset or arguments.settings or arguments.engine or arguments.seed is not None)


def _run_name(arguments: argparse.Namespace, config: Config) -> str:
    default = f"{config.preset}-{config.algorithm}" + ("-verl" if config.engine == "verl" else "")
    name = arguments.run or default + (f"-s{config.seed}" if config.seed else "")
    if not name or name.startswith(".") or "/" in name or "\\" in name:
        raise ConfigError(f"--run {name!r}: give a plain folder name, such as my-first-run")
    return name


if __name__ == "__main__":
    sys.exit(main())
