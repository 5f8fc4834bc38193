"""Define the commands of `agent-r1`, one function each. `agent-r1 COMMAND --help` shows examples.

The decorator above a function holds its help text, examples and options. Exit codes:

    0      done
    1      failed; the last line of standard error has the cause and the remedy
    2      wrong usage or configuration
    130    interrupted
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from argparse import Namespace
from pathlib import Path
from types import TracebackType

from agent_r1.app.parser import (
    AGENT,
    BACKEND,
    COMMANDS,
    CONFIG_OPTIONS,
    FROM_ANYWHERE,
    FROM_RUN,
    PROMPT,
    RECIPE,
    RUN,
    command,
    count,
    eval_condition,
    flag,
    option,
    parse_command_line,
    port,
    positive,
    share,
    temperature,
)
from agent_r1.config import (
    Config,
    apply_overrides,
    from_yaml,
    keep_spelling,
    load_config,
    plugins,
    tables,
    trusted_settings,
    user_code_names,
)
from agent_r1.ground.clean import clean
from agent_r1.ground.errors import AgentR1Error, ConfigError, extra
from agent_r1.ground.files import home
from agent_r1.ground.machine import choose_waiting, cores, raise_file_limit
from agent_r1.ground.ui import say

# Commands import their modules after they have read the configuration. So `agent-r1 --help`, the
# error for a misspelt setting and `train --dry-run` do not wait for PyTorch.


COMPUTING = {"data", "index", "cold-start", "train", "eval", "chat"}
"""Commands that compute for a while with PyTorch or FAISS, or begin a chain of such commands. Only
these spend the fifth of a second of `choose_waiting`."""


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code. Print a failure as one line on standard error.

    `agent-r1 A ... then B ...` runs B after A in the same process, unless A fails.
    """
    # A closed stream (`agent-r1 chat <&-`) is None, which has no method.
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115  open until the end
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    try:
        if argv is None:
            argv = sys.argv[1:]
            sys.excepthook = _print_traceback
        for words in _split(argv, "then"):
            code = run_command(words)
            if code:
                return code
        return 0
    except AgentR1Error as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt as interrupt:
        message = "interrupted"
        if str(interrupt):
            message += f": {interrupt}"
        return _fail(message, 130)
    except BrokenPipeError:  # `agent-r1 ... | head`
        return 0
    except OSError as error:
        return _fail(
            f"{error.filename or 'a file of this command'}: {error.strerror or error}; check space "
            "and permissions, and run it again",
            1,
        )


def run_command(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code.

    Raises AgentR1Error, whose `code` names the failure.
    """
    arguments = parse_command_line(argv)
    raise_file_limit()
    if arguments.command in COMPUTING:
        choose_waiting()
    # Stages make millions of objects that stay. By default, Python looks for garbage among them
    # every 700 objects.
    gc.set_threshold(50_000, 10, 10)
    return COMMANDS[arguments.command][0](arguments) or 0


def _split(argv: list[str], word: str) -> list[list[str]]:
    """Split a command line at each `word`."""
    parts: list[list[str]] = [[]]
    for argument in argv:
        if argument == word:
            parts.append([])
        else:
            parts[-1].append(argument)
    return parts


def _print_traceback(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print an error that no one expected, whose words may be a stranger's, too."""
    text = "".join(traceback.format_exception(kind, error, trace))
    print(clean(text), end="", file=sys.stderr)


def _fail(message: str, code: int) -> int:
    # One line, and no control character: a server or a template may have written the words.
    print(f"agent-r1: {clean(' '.join(message.split()))}", file=sys.stderr)
    return code


# ----------------------------------------------------------------------------------- shared helpers


def config_of(a: Namespace) -> Config:
    """Load the configuration of the command line.

    `--run NAME` alone loads the saved configuration of that run.
    """
    agent = _agent_settings(a)
    names_settings = a.preset or a.settings or a.engine or a.seed is not None
    if getattr(a, "run", None) and not names_settings:
        file = home() / "runs" / a.run / "config.yaml"
        if file.exists():
            config = from_yaml(file)
            return apply_overrides(config, agent) if agent else config
    algorithm = " ".join(word for word in a.settings if "=" not in word)
    overrides = _overrides(a) + agent
    trains = a.command not in ("data", "index", "tools", "try", "search-server")
    return load_config(a.preset, overrides, algorithm=algorithm or None, seed=a.seed, trains=trains)


def _agent_settings(a: Namespace) -> list[str]:
    """Return the settings of --agent and --agent-python."""
    settings = []
    for name in ("agent", "agent_python"):
        value = getattr(a, name, None)
        if value:  # quoted, because a command may have any character of YAML
            settings.append(f"rollout.{name}={json.dumps(value)}")
    return settings


def _overrides(a: Namespace) -> list[str]:
    """Return the settings `section.key=value` of the command line."""
    overrides = [word for word in a.settings if "=" in word]
    if a.engine:
        overrides.append(f"engine={a.engine}")
    return overrides


def _config_of_run(a: Namespace) -> Config:
    """Return the configuration to evaluate `--run` with: the saved one of that run.

    Settings on the command line must agree with it. Naming the run's code there, or --trust-run, is
    the permission to run it.
    """
    file = home() / "runs" / (a.run or "") / "config.yaml"
    if not a.run or not file.exists():
        return config_of(a)
    if a.preset:
        # Its code is trusted, since the user named the preset. Its other values may have changed.
        load_config(a.preset)
    stored_config = from_yaml(file)
    overrides = _overrides(a) + _agent_settings(a)
    if a.preset:
        overrides.append(f"preset={json.dumps(a.preset)}")  # a folder may have a blank or a colon
    if a.seed is not None:
        overrides.append(f"seed={a.seed}")
    overrides += [f"algorithm={word}" for word in a.settings if "=" not in word]
    config = keep_spelling(apply_overrides(stored_config, overrides), stored_config)
    code = dict(user_code_names(config))
    for setting, place in trusted_settings(config).items():
        code[place] = setting
    if a.trust_run:
        plugins.trust(code)
    unnamed_code = []
    for name, setting in code.items():
        # Of a start model's making, and of training; an evaluation runs neither.
        trains_only = setting.startswith("cold_start.")
        if not trains_only and not plugins.is_trusted(name):
            unnamed_code.append(f"{setting}={name}")
    if unnamed_code:
        raise ConfigError(
            f"the run {a.run} names code, and you did not: {', '.join(unnamed_code)}. Inspect it, "
            "and if you trust it, name it on this command line, or add --trust-run",
            code="untrusted_code",
        )
    return config


# --------------------------------------------------------------------------------------- the stages


@command(
    "doctor", "check that this machine can run a preset",
    ["--preset smoke", "grpo --preset pocket trainer.recompute=true"], *CONFIG_OPTIONS,
    flag("--suggest-preset", "print only the preset for this machine's GPUs"),
)  # fmt: skip
def doctor(a: Namespace) -> int:
    from agent_r1.app.doctor import print_checks, run_checks
    from agent_r1.ground.preflight import gpus_here, suggest_preset

    if a.suggest_preset:
        say(suggest_preset(gpus_here()))
        return 0
    return print_checks(run_checks(config_of(a)))


@command(
    "data", "make or download questions and passages",
    ["--preset smoke", "--preset discover --seed 3 data.entities=1000", "--preset smoke --release "
        "my-data",
     "--preset smoke --from my-data"],
    *CONFIG_OPTIONS,
    option("--release", type=Path, metavar="FOLDER", help="also pack the data for publication: "
        "files, data card, SHA-256 hashes"),
    option("--from", dest="released", metavar="FOLDER|OWNER/NAME", help="verify and copy released "
        "data instead of making it"),
)  # fmt: skip
def data(a: Namespace) -> None:
    config = config_of(a)
    from agent_r1.workspace import Workspace

    paths = Workspace(config)
    if a.released:
        from agent_r1.data.release import find_release

        folder = find_release(a.released, config.data, config.seed, config.env.name)
        paths.make_data(folder, a.released)
    else:
        paths.make_data()
    if a.release:
        from agent_r1.data.release import release
        from agent_r1.evaluation.provenance import data_facts
        from agent_r1.ground.ui import say

        release(paths.data, a.release, data_facts(config))
        say(f"  released in {a.release}: read its README.md before you publish it")


@command(
    "index", "build the search index", ["--preset smoke", "--preset discover --seed 3 "
        "data.entities=1000"], *CONFIG_OPTIONS,
)  # fmt: skip
def index(a: Namespace) -> None:
    config = config_of(a)
    from agent_r1.workspace import Workspace

    Workspace(config).make_index()


@command(
    "cold-start", "make the model that RL starts from",
    ["--preset smoke", "--preset discover --seed 3 cold_start.copy_steps=600"],
    *CONFIG_OPTIONS, *AGENT,
)  # fmt: skip
def cold_start(a: Namespace) -> None:
    config = config_of(a)
    from agent_r1.cold_start.stage import make_cold_start, show_probe
    from agent_r1.workspace import Workspace

    paths = Workspace(config)
    make_cold_start(paths)
    show_probe(paths)


@command(
    "train", "train with reinforcement learning",
    ["--preset smoke", "grpo --preset small --seed 1 actor.lr=5e-4", "--preset discover --resume",
     "--run mine --resume trainer.steps=200", "--preset discover --dry-run",
     "--preset hotpotqa-4xh100 --dry-run --gpu-hour 3 "
         "model.path=Qwen/Qwen2.5-3B-Instruct"],
    *CONFIG_OPTIONS,
    RUN,
    flag("--resume", "continue from the run's newest checkpoint"),
    flag("--dry-run", "print the stages, and estimates of memory, time and cost; start nothing"),
    flag("--verbose", "with --dry-run: print all settings, too"),
    option("--gpu-hour", type=float, metavar="PRICE", help="with --dry-run: price of one GPU for "
        "one hour"),
    flag("--plain", "print one line per step instead of the dashboard"),
    *AGENT,
)  # fmt: skip
def train(a: Namespace) -> None:
    config = config_of(a)
    from agent_r1.workspace import run_name

    name = run_name(config, a.run)
    if a.dry_run:
        from agent_r1.app.own_code import check_own
        from agent_r1.app.plan import print_plan

        check_own(config)
        return print_plan(config, name, a.gpu_hour, a.verbose)
    from agent_r1.app import stages

    stages.run_train(config, name, a.resume, a.plain)


@command(
    "eval", "evaluate a model on held-out questions",
    ["--before --preset discover", "--preset discover", "--run mine --closed-book", "--run mine "
        "--split val --limit 100",
     "--run my-task --trust-run",
     "--model runs/a/export --model runs/b/export --out evals/a-b --backend vllm",
     "--api https://api.example.com/v1 --model NAME --run mine --against runs/mine/eval.json",
     "--run mine --samples 8 --temperature 0.5", "--power .02 --cards runs/mine*/eval.json"],
    *CONFIG_OPTIONS,
    RUN,
    flag("--before", "evaluate the model that RL starts from, and write eval_before.json"),
    option("--model", action="append", metavar="PATH|OWNER/NAME", help="evaluate this model; give "
        "it twice to compare two"),
    flag("--closed-book", "evaluate without tools, and write a separate card: what does the model "
        "know?"),
    option("--retriever", choices=("empty", "random"), help="replace search results: with none, or "
        "with random passages"),
    option("--poison", type=share, metavar="RATE", help="insert hostile documents into this share "
        "of search results, 0 to 1"),
    option("--split", choices=("train", "val", "test"),
           help="split to evaluate (default: test); with this option or one below, the card is "
               "printed and only --out saves it"),
    option("--dataset", metavar="NAME|FILE.parquet", help="questions of another data set"),
    option("--limit", type=count, help="evaluate only the first LIMIT questions"),
    option("--temperature", type=temperature, help="sampling temperature, 0 to 10 (default: 0, "
        "greedy)"),
    option("--samples", type=positive, metavar="N", help="samples of each question, for pass@k and "
        "pass^k (default: the preset's, or 1)"),
    option("--threshold", type=float, metavar="SCORE", help="least score of a right sample, for "
        "scores other than 0 and 1"),
    option("--power", type=share, metavar="DIFFERENCE", help="evaluate nothing: how many questions "
        "and seeds show this difference? Needs --cards"),
    option("--cards", type=Path, nargs="+", metavar="CARD", help="eval cards of three runs or more "
        "of one recipe, for --power"),
    PROMPT,
    BACKEND,
    option("--out", type=Path, metavar="DIR", help="save cards and one line per question; continue "
        "an interrupted evaluation"),
    flag("--trust-run", "run the code that the run --run names (you have inspected it)"),
    option("--api", metavar="URL", help="--model is the name of a model that this "
        "OpenAI-compatible address serves (recipes/api)"),
    option("--budget", type=float, metavar="USD", help="with --api: most US dollars to spend, "
        "retries and earlier parts included"),
    option("--against", type=Path, metavar="CARD", help="compare with this eval card of the same "
        "questions, such as runs/mine/eval.json"),
    *AGENT,
)  # fmt: skip
def evaluate(a: Namespace) -> None:
    if a.power:
        from agent_r1.evaluation.power import print_power

        return print_power(a.power, a.cards or [])
    if a.api:
        tables.resolve("option", "eval --api", "--api")(a)
    if a.model:
        return _evaluate_models(a)
    config = _config_of_run(a)
    from agent_r1.app import stages
    from agent_r1.workspace import run_name

    name = run_name(config, a.run)

    # The run's own cards hold only the standard evaluation. Any other one, such as ten questions of
    # val, is kept apart.
    other = (a.split, a.dataset, a.limit, a.temperature, a.prompt, a.backend, a.out)
    other += (a.samples, a.threshold, a.against)
    if any(value is not None for value in other):
        return _evaluate_models(a, stages.model_to_evaluate(config, name, a.before), config)
    stages.evaluate_run(config, name, a.before, eval_condition(a))


def _evaluate_models(a: Namespace, model: Path | None = None, config: Config | None = None) -> None:
    """Evaluate the models of --model, or a run's `model`, with any option of `eval`."""
    from agent_r1.data.storage import read_rows
    from agent_r1.evaluation import compare
    from agent_r1.inference import agent
    from agent_r1.workspace import Workspace

    file = None
    other = []
    if (a.dataset or "").endswith(".parquet"):
        file = Path(a.dataset)
    elif a.dataset:
        other = [f"data.name={a.dataset}"]
    if model and config:
        models = [model]
        config = apply_overrides(config, other)
    else:
        settings = [word if "=" in word else f"algorithm={word}" for word in a.settings]
        if a.engine is not None:
            settings.append(f"engine={a.engine}")
        if a.seed is not None:
            settings.append(f"seed={a.seed}")
        models = []
        configs = []
        for name in a.model:
            if a.api:
                folder = Path(name)
                config_of_model = agent.settings_for(folder, a.run, a.preset, settings + other)
            else:
                folder, config_of_model = agent.find_model(
                    a.run, hf_path=name, preset=a.preset, overrides=settings + other
                )
            models.append(folder)
            configs.append(config_of_model)
        config = configs[0]
    if not a.api:
        for folder in models:
            agent.check_agent(folder, config)
    is_of_run = model is not None
    split = a.split or "test"
    if a.split is None and not is_of_run:
        config, split = _split_of_models(models, config)
    paths = Workspace(config)
    paths.make_task()
    if file:
        rows = read_rows(file)
        split = file.stem
    else:
        rows = paths.load_rows(split)
    backend = a.backend or "local"
    temperature = a.temperature
    if temperature is None:
        temperature = float((a.samples or 1) > 1)  # several samples need one, and RL samples at 1
    questions = compare.Questions(
        config,
        rows[: a.limit],
        split,
        backend,
        temperature,
        samples=a.samples or 1,
        threshold=a.threshold,
        prompt=a.prompt,
        condition=eval_condition(a),
    )
    compare.evaluate_models(
        questions,
        models,
        lambda folder, tools: agent.open_to_evaluate(
            folder, config, backend, temperature, tools, a.prompt, as_trained=is_of_run
        ),
        a.out,
        a.against,
    )


def _split_of_models(models: list[Path], config: Config) -> tuple[Config, str]:
    """Return the split for models of --model, and the settings that make it.

    A model that was trained on these data keeps the split of its own training.
    """
    from agent_r1.inference.agent import own_settings
    from agent_r1.workspace import Workspace

    split = Workspace(config).foreign_split()
    if split == "test":
        return config, split
    source = Path(config.data.source or "").resolve()
    for model in models:
        own = own_settings(model)
        if own is None or own.data.name != config.data.name:
            continue
        if Path(own.data.source or "").resolve() == source:
            return config.model_copy(update={"data": own.data, "seed": own.seed}), "test"
    return config, split


@command(
    "report", "write a run's report.html", ["--preset discover", "--run mine"], *CONFIG_OPTIONS, RUN
)
def report(a: Namespace) -> None:
    from agent_r1.ground.ui import say
    from agent_r1.workspace import run_name

    with extra("report", "report.html"):
        from agent_r1.watch.report import write_report

    start = time.perf_counter()
    path = write_report(home() / "runs" / run_name(config_of(a), a.run))
    say(f"report: {path} ({time.perf_counter() - start:.1f} s); open it in a browser")


# ----------------------------------------------------------------------------------- after training


@command(
    "export", "write a checkpoint as a Hugging Face model folder or in a recipe's format",
    ["", "--run mine --step 40 --target-dir my-agent", "--checkpoint-dir DIR --push-to-hub "
        "OWNER/NAME",
     "--checkpoint-dir global_step_60"],
    *FROM_RUN,
    RECIPE,
    option("--target-dir", type=Path, metavar="DIR", help="default: export/ in the run's folder, "
        "or next to the checkpoint"),
    option("--base-model", metavar="PATH|OWNER/NAME", help="start model, for verl shards without "
        "config.json or tokenizer"),
    option("--push-to-hub", metavar="OWNER/NAME", help="also upload it (a new repository is "
        "private)"),
)  # fmt: skip
def export(a: Namespace) -> None:
    from agent_r1.ground.ui import say
    from agent_r1.inference.agent import find_checkpoint, hub_model, newest_step, own_settings
    from agent_r1.inference.export import export

    checkpoint = (
        newest_step(a.checkpoint_dir) if a.checkpoint_dir else find_checkpoint(a.run, a.step)
    )
    formats = {}
    for name in tables.options_of("export"):
        file = getattr(a, name.replace("-", "_"))
        if file:
            formats[name] = file
    for name, file in formats.items():
        write = tables.resolve("option", f"export --{name}", f"--{name}")
        write(checkpoint, own_settings(checkpoint), file)
    if formats and not (a.target_dir or a.push_to_hub):
        return
    base = hub_model(a.base_model) if a.base_model else None
    target = export(checkpoint, own_settings(checkpoint), a.target_dir, base)
    if a.push_to_hub:
        from agent_r1.ground.hub import push

        say(f"uploaded to {push(target, a.push_to_hub)}")


@command(
    "serve", "serve a trained agent with vLLM behind an OpenAI-compatible API",
    ["", "--run mine --port 8000", "--run mine --backend local", "--model runs/mine/export",
     "--model OWNER/NAME rollout.max_context=16384 rollout.max_concurrent_episodes=64"],
    *FROM_ANYWHERE,
    option("--port", type=port, help="port on 127.0.0.1 (default: a free one)"),
    option("--backend", choices=("local", "vllm"), help="local: this process, through the gateway "
        "of recipes/gateway (default for a run with --agent); vllm: a vLLM server (default)"),
)  # fmt: skip
def serve(a: Namespace) -> None:
    from agent_r1.inference.agent import check_agent, find_model, open_agent

    model, config = find_model(
        a.run, a.step, a.checkpoint_dir, a.model, a.preset, a.settings, a.demo
    )
    check_agent(model, config)
    if a.backend == "local" or (config.rollout.has_agent and a.backend is None):
        # The run's agent is the client here, and is not started.
        config = config.model_copy(update={"rollout": config.rollout.without_commands()})
        with open_agent(model, config) as opened:
            return tables.resolve("option", "serve --backend local", "--backend")(opened, a.port)
    tables.resolve("option", "serve --backend vllm", "--backend")(model, config, a.port)


@command(
    "chat", "talk to a trained agent",
    ["", "--demo", "--run discover-grpo --step 40 --backend vllm",
     '--question "In which city is the publisher of Sosnum based?" --json',
     "--tools my_tools:weather", "--model OWNER/NAME --preset hotpotqa-4xh100 "
         "search.url=http://127.0.0.1:8100",
     '--model OWNER/NAME env.tools=[] --prompt "Answer in one word."'],
    *FROM_ANYWHERE,
    BACKEND,
    option("--question", help="ask this question and exit; the exit code is 1 if there is no "
        "answer"),
    flag("--json", "print one line of JSON per question"),
    option("--tools", action="append", metavar="MODULE:FUNCTION", help="add your own tool to the "
        "run's tools (repeatable)"),
    option("--temperature", type=temperature, help="sampling temperature, 0 to 10 (default: as in "
        "training)"),
    option("--seed", type=int, default=0, help="sampling seed; the same seed gives the same "
        "answers (default: 0)"),
    PROMPT,
)  # fmt: skip
def chat(a: Namespace) -> None:
    from agent_r1.inference.agent import find_model
    from agent_r1.inference.chat import run_chat

    model, config = find_model(
        a.run, a.step, a.checkpoint_dir, a.model, a.preset, a.settings, a.demo
    )
    run_chat(
        model,
        config,
        a.backend or "local",
        a.question,
        a.json,
        a.tools,
        a.temperature,
        a.seed,
        a.prompt,
    )


@command(
    "new", "create your own recipe, ready to train",
    ["my-task"],
    option("folder", type=Path, help="new folder for tool, environment, demonstrator, questions, "
        "preset, test and README"),
)  # fmt: skip
def new(a: Namespace) -> None:
    from agent_r1.app.new_recipe import write_recipe

    write_recipe(a.folder)


@command(
    "tools", "list the agent's tools, or call one",
    ["--recipe my-task", "--recipe my-task --schema", "--recipe my-task --call calculate left=6 "
        "operation=* right=7"],
    *CONFIG_OPTIONS,
    flag("--schema", "print the tools' JSON schemas, as the chat template gets them"),
    option("--call", nargs="+", metavar=("NAME", "argument=value"), help="call one tool"),
)  # fmt: skip
def tools(a: Namespace) -> int:
    from agent_r1.env import add_class_tools
    from agent_r1.inference import play
    from agent_r1.workspace import Workspace

    config = config_of(a)
    all_tools = Workspace(config).load_tools()
    if a.call:
        return 0 if play.call_by_hand(all_tools, a.call, config.env) else 1
    play.show_tools(add_class_tools(all_tools, config.env), a.schema)
    return 0


@command(
    "try", "play the agent by hand, and see each observation with its tokens, mask and reward",
    ["--recipe my-task", "--preset discover --split val --index 7 --table"],
    *CONFIG_OPTIONS,
    option("--split", default="train", choices=("train", "val", "test"), help="split of the "
        "question (default: train)"),
    option("--index", type=int, default=0, help="number of the question (default: 0)"),
    flag("--table", "print the training rows with one token per line"),
)  # fmt: skip
def try_by_hand(a: Namespace) -> None:
    from agent_r1.app.by_hand import run_by_hand

    run_by_hand(config_of(a), a.split, a.index, a.table)


@command(
    "search-server", "serve the search index to other processes (they set "
        "search.url=http://127.0.0.1:8100)",
    ["--preset discover", "--preset discover --port 8101"],
    *CONFIG_OPTIONS,
    option("--host", default="127.0.0.1", help="address to listen on (default: this machine only)"),
    option("--port", type=port, default=8100, help="port (default: 8100)"),
)  # fmt: skip
def search_server(a: Namespace) -> None:
    config = config_of(a)
    if config.search.url:
        raise ConfigError(
            "search.url is for the clients of a search server; leave it out here",
            code="unused_setting",
        )
    # PyTorch and FAISS would each use every core for a few queries, and slow down trainers and
    # vLLM. Both read this variable when they are imported.
    os.environ.setdefault("OMP_NUM_THREADS", str(min(16, cores())))
    from agent_r1.search.service import serve_index
    from agent_r1.workspace import Workspace

    serve_index(Workspace(config).load_index, a.host, a.port)


@command(
    "inspect", "print a trajectory token by token",
    ["runs/discover-grpo", "runs/mine/rollouts/step_000010.jsonl -i 3 --table"],
    option("rollouts", type=Path, help="a run's folder, or a file of runs/NAME/rollouts/"),
    option("-i", "--index", type=int, default=0, help="number of the trajectory (default: 0)"),
    flag("--table", "print one token per line, with id, mask, log-prob and advantage"),
)  # fmt: skip
def inspect(a: Namespace) -> None:
    from agent_r1.watch import tokens

    tokens.print_trajectory(tokens.rollouts_file(a.rollouts), a.index, a.table)


if __name__ == "__main__":  # `python -m agent_r1`
    sys.exit(main())
