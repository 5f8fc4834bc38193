"""`agent-r1`: every stage of the speedrun as a command. `agent-r1 COMMAND --help` shows examples.

A command is a function; the decorator above it has its help, examples and options. Exit codes: 0 done, 1 failed (cause and
remedy on the last line of standard error), 2 wrong usage or configuration, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from pathlib import Path

from agent_r1.app.command_line import (
    BACKEND,
    COMMANDS,
    CONFIGURED,
    FROM_ANYWHERE,
    FROM_RUN,
    PROMPT,
    RECIPE,
    RUN,
    command,
    count,
    flag,
    option,
    parse,
    share,
    taken,
    temperature,
)
from agent_r1.config import Config, changed, from_yaml, load_config, preset_title, tables
from agent_r1.ground.errors import AgentR1Error, ConfigError, extra
from agent_r1.ground.files import home
from agent_r1.ground.machine import cores, raise_file_limit

# The rooms are imported inside the commands, after the configuration: `agent-r1 --help` and a misspelt setting are
# answered at once, without loading PyTorch.


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code; a failure is one line on standard error."""
    try:
        return run(argv)
    except AgentR1Error as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt as interrupt:
        return _fail(f"interrupted{f': {interrupt}' if str(interrupt) else ''}", 130)
    except BrokenPipeError:  # `agent-r1 ... | head`
        return 0
    except OSError as error:
        return _fail(f"{error.filename or 'a file'}: {error.strerror or error}; check space and permissions", 1)


def run(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code. Raises AgentR1Error, whose `code` names the failure."""
    arguments = parse(argv)
    raise_file_limit()
    return COMMANDS[arguments.command][0](arguments) or 0


def _fail(message: str, code: int) -> int:
    print(f"agent-r1: {' '.join(message.split())}", file=sys.stderr)  # one line, also where a library said several
    return code


# -------------------------------------------------------------------------------------------- words of several commands


def _config(a: Namespace) -> Config:
    """The configuration of the command line; an existing run that is named alone speaks for itself."""
    said = a.preset or a.settings or a.engine or a.seed is not None
    if getattr(a, "run", None) and not said:
        saved = home() / "runs" / a.run / "config.yaml"
        if saved.exists():
            return from_yaml(saved)
    algorithm = " ".join(item for item in a.settings if "=" not in item)
    overrides = [item for item in a.settings if "=" in item] + ([f"engine={a.engine}"] if a.engine else [])
    trains = a.command not in ("data", "index", "tools", "try", "search-server")
    return load_config(a.preset or "laptop", overrides, algorithm=algorithm or None, seed=a.seed, trains=trains)


def _run_name(a: Namespace, config: Config) -> str:
    default = f"{preset_title(config.preset)}-{config.algorithm}" + ("-verl" if config.engine == "verl" else "")
    name = a.run or default + (f"-s{config.seed}" if config.seed else "")
    if name.startswith(".") or "/" in name or "\\" in name:
        raise ConfigError(f"--run {name!r}: give a plain folder name, such as my-first-run", code="bad_run_name")
    return name


# ----------------------------------------------------------------------------------------------------------- the stages


@command(
    "doctor", "check this machine", ["--preset smoke", "grpo --preset pocket trainer.recompute=true"], *CONFIGURED,
    flag("--suggest-preset", "print only the preset for this machine's GPUs"),
)  # fmt: skip
def doctor(a: Namespace) -> int:
    from agent_r1.app.doctor import print_checks, run_checks, suggest_preset
    from agent_r1.ground.machine import gpus_here

    if a.suggest_preset:
        print(suggest_preset(gpus_here()))
        return 0
    return print_checks(run_checks(_config(a)))


@command(
    "gpu-check", "run a preset for verl in small", ["grpo --preset hotpotqa-4xh100", "--preset smoke --engine verl --json"],
    *CONFIGURED, flag("--json", "the result as the last line (docs/verl.md)"),
)  # fmt: skip
def gpu_check(a: Namespace) -> None:
    config = _config(a)
    with extra("verl", "gpu-check"):
        from agent_r1.app.gpu_check import check_machine

    check_machine(config, a.json)


@command(
    "data", "make or fetch questions and passages",
    ["--preset smoke", "--preset laptop --seed 3 data.entities=1000"], *CONFIGURED,
)  # fmt: skip
def data(a: Namespace) -> None:
    config = _config(a)
    from agent_r1 import workspace

    workspace.make_data(config)


@command(
    "index", "build the search index", ["--preset smoke", "--preset laptop --seed 3 data.entities=1000"], *CONFIGURED,
)  # fmt: skip
def index(a: Namespace) -> None:
    config = _config(a)
    from agent_r1 import workspace

    workspace.make_index(config)


@command(
    "cold-start", "make the model that RL starts from",
    ["--preset smoke", "--preset laptop --seed 3 cold_start.mix_steps=900"], *CONFIGURED,
)  # fmt: skip
def cold_start(a: Namespace) -> None:
    config = _config(a)
    from agent_r1.app import stages

    stages.make_cold_start(config)


@command(
    "train", "reinforcement learning",
    ["--preset smoke", "grpo --preset laptop --seed 1 actor.lr=5e-4", "--preset laptop --resume",
     "--preset laptop --dry-run", "--preset hotpotqa-4xh100 --dry-run --gpu-hour 3 model.path=Qwen/Qwen2.5-3B-Instruct"],
    *CONFIGURED,
    RUN,
    flag("--resume", "go on from the newest checkpoint of the run"),
    flag("--dry-run", "print configuration, plan and estimates; start nothing"),
    option("--gpu-hour", type=float, metavar="PRICE", help="with --dry-run: what a GPU costs for an hour"),
    flag("--plain", "one line a step instead of the dashboard"),
)  # fmt: skip
def train(a: Namespace) -> None:
    config = _config(a)
    name = _run_name(a, config)
    from agent_r1.app import stages

    if a.dry_run:
        from agent_r1.app.plan import print_plan

        stages.check_own(config)
        return print_plan(config, name, a.gpu_hour)
    stages.run_train(config, name, a.resume, a.plain)


@command(
    "eval", "evaluate a model on held-out questions",
    ["--before --preset laptop", "--preset laptop", "--run mine --closed-book", "--run mine --split val --limit 100",
     "--model runs/a/export --model runs/b/export --out evals/a-b --backend vllm"],
    *CONFIGURED,
    RUN,
    flag("--before", "the model that RL starts from, into eval_before.json"),
    option("--model", action="append", metavar="PATH|OWNER/NAME", help="any model instead of the run's; twice: compare two"),
    flag("--closed-book", "with no tools, onto a card of its own: what does the model know?"),
    option("--retriever", choices=("empty", "random"), help="placebo: a search that finds nothing, or passages by lot"),
    option("--poison", type=share, metavar="RATE", help="hostile documents in this share of the search results, 0 to 1"),
    option("--split", choices=("train", "val", "test"),
           help="which questions (default: test); with this option or one below, the card is printed and only --out keeps it"),
    option("--dataset", metavar="NAME|FILE.parquet", help="other questions than the model's own"),
    option("--limit", type=count, help="only the first so many questions"),
    option("--temperature", type=temperature, help="of sampling, 0 to 10 (default: 0, greedy)"),
    PROMPT,
    BACKEND,
    option("--out", type=Path, metavar="DIR", help="keep cards and a line a question; go on where it stopped"),
)  # fmt: skip
def evaluate(a: Namespace) -> None:
    if a.model:
        return _evaluate_models(a)
    config = _config(a)
    from agent_r1.app import stages
    from agent_r1.inference.agent import model_folder
    from agent_r1.training.checkpoint import verify_checkpoint
    from agent_r1.training.run import RunDir, check_same_settings, open_run, start_model
    from agent_r1.workspace import Workspace, make_task

    run = RunDir(Workspace.of(config).run(_run_name(a, config)))
    check_same_settings(run, config)
    if a.before:
        model, card, title = start_model(config), "eval_before.json", "evaluate before RL"
    elif not run.finished(config.trainer.steps):
        how = f"has not finished its {config.trainer.steps} steps" if run.begun() else "does not exist"
        raise AgentR1Error(f"{run.path} {how}; run `agent-r1 train` first", code="unfinished_run")
    else:
        verify_checkpoint(run.latest_checkpoint())
        model, card, title = model_folder(run.latest_checkpoint()), "eval.json", "evaluate after RL"
    # The run's cards hold the standard evaluation. Any other, such as ten questions of val, is not written there.
    if any(value is not None for value in (a.split, a.dataset, a.limit, a.temperature, a.prompt, a.backend, a.out)):
        return _evaluate_models(a, model, config)
    make_task(config)
    stages.run_eval(config, model, run.path / card, title, taken(a))
    if a.before:
        open_run(run, config, resume=True)


def _evaluate_models(a: Namespace, model: Path | None = None, config: Config | None = None) -> None:
    """Evaluate the models of --model, or a run's `model`, with all options of `eval`."""
    from agent_r1.data.rows import read_rows
    from agent_r1.inference import agent, compare
    from agent_r1.workspace import load_rows, make_task

    file = Path(a.dataset) if (a.dataset or "").endswith(".parquet") else None
    other = [f"data.name={a.dataset}"] if a.dataset and not file else []
    if model and config:
        models, config = [model], changed(config, other)
    else:
        settings = [item if "=" in item else f"algorithm={item}" for item in a.settings]
        settings += [f"{key}={value}" for key, value in (("engine", a.engine), ("seed", a.seed)) if value is not None]
        found = [agent.find_model(a.run, hf_path=name, preset=a.preset, overrides=settings + other) for name in a.model]
        models, config = [folder for folder, _ in found], found[0][1]
    make_task(config)
    rows, split = (read_rows(file), file.stem) if file else (load_rows(config, a.split or "test"), a.split or "test")
    compare.evaluate_models(
        models, config, rows[: a.limit], split, a.backend or "transformers", a.temperature or 0.0, a.out, a.prompt, taken(a),
        as_trained=model is not None,
    )  # fmt: skip


@command("report", "write report.html of a run", ["--preset laptop", "--run mine"], *CONFIGURED, RUN)
def report(a: Namespace) -> None:
    from agent_r1.app import stages

    stages.run_report(_run_name(a, _config(a)))


# --------------------------------------------------------------------------------------------- what comes after training


@command(
    "export", "make a Hugging Face folder of a checkpoint",
    ["", "--run laptop-grpo --step 40 --target-dir my-agent", "--checkpoint-dir DIR --push-to-hub OWNER/NAME",
     "--checkpoint-dir global_step_60"],
    *FROM_RUN,
    RECIPE,
    option("--target-dir", type=Path, metavar="DIR", help="default: export/ in the run's folder, or next to the checkpoint"),
    option("--base-model", metavar="PATH|OWNER/NAME", help="for shards of verl without a config.json or tokenizer next to them"),
    option("--push-to-hub", metavar="OWNER/NAME", help="also upload it (private, if it is new)"),
)  # fmt: skip
def export(a: Namespace) -> None:
    from agent_r1.ground.ui import say
    from agent_r1.inference.agent import find_checkpoint, hub_model, newest_step, own_settings
    from agent_r1.inference.export import export

    checkpoint = newest_step(a.checkpoint_dir) if a.checkpoint_dir else find_checkpoint(a.run, a.step)
    base = hub_model(a.base_model) if a.base_model else None
    target = export(checkpoint, own_settings(checkpoint), a.target_dir, base)
    if a.push_to_hub:
        from agent_r1.ground.hub import push

        say(f"uploaded to {push(target, a.push_to_hub)}")


@command(
    "serve", "serve a trained agent with vLLM, for OpenAI clients",
    ["", "--run laptop-grpo --port 8000", "--model runs/mine/export",
     "--model OWNER/NAME rollout.max_context=16384 rollout.slots=64"],
    *FROM_ANYWHERE,
    option("--port", type=int, help="on 127.0.0.1 (default: a free one)"),
)  # fmt: skip
def serve(a: Namespace) -> None:
    from agent_r1.inference.agent import find_model
    from agent_r1.inference.serve import serve_forever

    model, config = find_model(a.run, a.step, a.checkpoint_dir, a.model, a.preset, a.settings)
    serve_forever(model, config.rollout, config.trainer, a.port)


@command(
    "chat", "talk to a trained agent",
    ["", "--run laptop-grpo --step 40 --backend vllm", '--question "In which city is the publisher of Sosnum based?" --json',
     "--tools my_tools:weather", "--model OWNER/NAME --preset hotpotqa-4xh100 search.url=http://127.0.0.1:8100",
     '--model OWNER/NAME env.tools=[] --prompt "Answer in one word."'],
    *FROM_ANYWHERE,
    BACKEND,
    option("--question", help="ask this and leave; exit code 1 if there is no answer"),
    flag("--json", "one line of JSON for each question"),
    option("--tools", action="append", metavar="MODULE:FUNCTION", help="a tool of yours, in addition to the run's (repeatable)"),
    option("--temperature", type=temperature, help="of sampling, 0 to 10 (default: as in training)"),
    option("--seed", type=int, default=0, help="of sampling; same seed, same answers (default: 0)"),
    PROMPT,
)  # fmt: skip
def chat(a: Namespace) -> None:
    from agent_r1.inference.agent import find_model
    from agent_r1.inference.chat import run_chat

    model, config = find_model(a.run, a.step, a.checkpoint_dir, a.model, a.preset, a.settings)
    run_chat(model, config, a.backend or "transformers", a.question, a.json, a.tools, a.temperature, a.seed, a.prompt)


@command(
    "new", "write a recipe of yours that trains as it stands",
    ["my-task"],
    option("folder", type=Path, help="a new folder: tool, environment, demonstrator, questions, preset, test and README"),
)  # fmt: skip
def new(a: Namespace) -> None:
    from agent_r1.app.new_recipe import write_recipe

    write_recipe(a.folder)


@command(
    "tools", "list the agent's tools, or call one by hand",
    ["--recipe my-task", "--recipe my-task --schema", "--recipe my-task --call calculate left=6 operation=* right=7"],
    *CONFIGURED,
    flag("--schema", "as JSON, as the chat template gets them"),
    option("--call", nargs="+", metavar=("NAME", "argument=value"), help="call one"),
)  # fmt: skip
def tools(a: Namespace) -> int:
    from agent_r1.env import offered
    from agent_r1.inference import by_hand
    from agent_r1.workspace import load_tools

    config = _config(a)
    found = load_tools(config)
    if a.call:
        return 0 if by_hand.call_by_hand(found, a.call, config.env) else 1
    by_hand.show_tools(offered(found, config.env), a.schema)
    return 0


@command(
    "try", "play the agent by hand: each observation, its tokens, mask and reward",
    ["--recipe my-task", "--preset laptop --split val --index 7 --table"],
    *CONFIGURED,
    option("--split", default="train", choices=("train", "val", "test"), help="of the questions (default: train)"),
    option("--index", type=int, default=0, help="which question (default: 0)"),
    flag("--table", "show what would be trained on with one token a line"),
)  # fmt: skip
def try_by_hand(a: Namespace) -> None:
    from agent_r1.app import stages

    stages.run_by_hand(_config(a), a.split, a.index, a.table)


@command(
    "search-server", "serve the search index to other processes (search.url=http://127.0.0.1:8100)",
    ["--preset laptop", "--preset laptop --port 8101"],
    *CONFIGURED,
    option("--host", default="127.0.0.1", help="address to listen on (default: this machine only)"),
    option("--port", type=int, default=8100, help="default: 8100"),
)  # fmt: skip
def search_server(a: Namespace) -> None:
    config = _config(a)
    if config.search.url:
        raise ConfigError("search.url is for those who ask; leave it out here", code="unused_setting")
    # PyTorch and FAISS would each take every core for a handful of queries, and slow down trainers and vLLM. Both
    # read this when they are imported, and it holds for all of their threads.
    os.environ.setdefault("OMP_NUM_THREADS", str(min(16, cores())))
    from agent_r1 import workspace

    workspace.serve_index(config, a.host, a.port)


@command(
    "inspect", "show a trajectory token by token",
    ["runs/laptop-ppo/rollouts/eval.jsonl", "runs/mine/rollouts/step_000010.jsonl -i 3 --table"],
    option("rollouts", type=Path, help="a file of runs/<name>/rollouts/"),
    option("-i", "--index", type=int, default=0, help="which trajectory (default: 0)"),
    flag("--table", "one token a line, with id, mask, log-prob, advantage"),
    option("--compare", metavar="grpo,ppo", help="what these estimators credit the trajectory's group with"),
)  # fmt: skip
def inspect(a: Namespace) -> None:
    from agent_r1.viewer import tokens

    if a.compare:
        tables.resolve("view", "credit", "--compare")(a.rollouts, a.index, a.compare.split(","), a.table)
    else:
        tokens.print_trajectory(a.rollouts, a.index, a.table)


if __name__ == "__main__":  # `python -m agent_r1`
    sys.exit(main())
