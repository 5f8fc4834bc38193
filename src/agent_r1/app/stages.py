"""The stages of a speedrun. Each makes one thing, says what it does, how long it took and where it left it.

    data -> index -> cold start -> evaluate -> train -> evaluate -> report

A stage that is done is skipped. What a stage makes is named after a fingerprint of everything that it depends on, so a
changed setting makes a new thing next to the old one, and nothing stale is ever used. Each stage writes next to its
target and renames at the end: an interrupted one leaves nothing that looks whole.

    artifacts/tinyhop-<fp>/       questions and corpus        shared by all runs (or hotpotqa-<fp>/ and the like)
    artifacts/index-<fp>/         the search index
    artifacts/cold-start-<fp>/    the model that RL starts from (or model-<name>/: which commit of the hub it is)
    runs/<name>/                  one training run            see training/run.py
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

from agent_r1.app.cold_start import make_cold_start
from agent_r1.app.plan_local import check_memory
from agent_r1.config import Config, own_names, tables
from agent_r1.config.own import is_own
from agent_r1.env import brings_tools, environment, make_env, offered
from agent_r1.ground import hub
from agent_r1.ground.device import resolve_device
from agent_r1.ground.errors import ConfigError, extra
from agent_r1.ground.files import home, write_whole
from agent_r1.ground.machine import set_threads
from agent_r1.ground.ui import progress, say
from agent_r1.reward.named import reward_of
from agent_r1.rollout.episode import flow_of
from agent_r1.tool import make_tools
from agent_r1.training.log import time_to
from agent_r1.training.run import RunDir, check_network, open_run, run_training, start_model
from agent_r1.training.tiny_model import byte_chat
from agent_r1.workspace import Workspace, check_local_model, load_rows, load_tools, make_task, took

AGENT = 0.9
"""Validation score from which on a run has made an agent."""
SAMPLED = 1000
"""Questions of an evaluation that are also asked at temperature 1: enough for +-.03, at a seventh of HotpotQA's cost."""


def check_own(config: Config) -> None:
    """Load all user-defined code that the configuration names, before a minute is spent. Raises ConfigError, with the remedy,
    where it keeps no contract."""
    from agent_r1.training.demonstrate import demonstrator_of

    loads = {
        "env.name": environment, "env.reward": reward_of, "rollout.flow": flow_of, "cold_start.demonstrator": demonstrator_of,
    }  # fmt: skip
    for name, setting in own_names(config).items():
        loads.get(setting, lambda name: None)(name)  # the data stage loads what makes the questions
    if config.env.reward and brings_tools(config.env.name):
        raise ConfigError(
            f"env.name={config.env.name} pays for itself and never asks env.reward={config.env.reward}; unset one",
            code="unused_setting",
        )
    named = make_tools([name for name in config.env.tools if is_own(name)])
    others = (name.rpartition(".")[2] for name in config.env.tools if not is_own(name))
    offered(named | dict.fromkeys(others), config.env)


def make_missing(config: Config, paths: Workspace | None = None) -> None:
    """The stages before training, those that are not done."""
    paths = paths or Workspace.of(config)
    make_task(config)
    if not paths.start_model.exists():
        make_cold_start(config, paths)


def preflight(config: Config, paths: Workspace, run: RunDir, resume: bool) -> None:
    """Refuse what cannot be trained before anything is made. Raises AgentR1Error with the remedy.

    In this order: a later check would advise on a run that an earlier one refuses, and each takes longer than those before it.

        run       an existing folder has these settings and this code, and is finished or to be resumed
        engine    its packages are installed
        code      user-defined code loads and keeps its contract
        memory    a pretrained model fits into what is free
        model     the folder of `model.path` is there, whole, and has the context and the arithmetic

    `start_model` checks again what the stages have made, and verl what its workers need (`launch.check_machine`).
    """
    if run.config.exists():
        open_run(run, config, resume)
        if run.finished(config.trainer.steps):
            return
    if config.engine == "verl":
        with extra("verl", "--engine verl"):
            from agent_r1.verl_engine.compose import require_verl

        require_verl()
    check_own(config)
    check_memory(config)
    if path := config.model.path:
        check_local_model(path)
        fetched = hub.is_name(path) or tables.scheme_of(path)  # by a stage, which repairs what it finds damaged
        if not fetched and not paths.cold_start.exists():
            check_network(config, paths.pretrained)


def run_train(config: Config, name: str, resume: bool, plain: bool) -> None:
    """Stage: RL."""
    paths = Workspace.of(config)
    run = RunDir(paths.run(name))
    preflight(config, paths, run, resume)
    if run.finished(config.trainer.steps):
        say(f"train: done before, in {run.latest_checkpoint()}")
        return
    make_missing(config, paths)
    set_threads(config.trainer.threads)
    model = start_model(config, paths)
    say(f"train: {config.algorithm}, {config.trainer.steps} steps, {run.path} ...")
    start = time.perf_counter()
    if config.engine == "verl":
        from agent_r1.verl_engine import launch

        checkpoint = launch.train(run, config, model, resume, plain)
    else:
        rows = load_rows(config, "train"), load_rows(config, "val")
        checkpoint = run_training(run, config, model, load_tools(config), *rows, resume, plain)
    say(f"  {time.perf_counter() - start:.1f} s, in {checkpoint}")


def run_eval(config: Config, model: Path, out: Path, title: str, condition: str | None = None) -> dict:
    """Stage: greedy and sampled evaluation of a model folder; the card goes to `out` and is returned. Under a `condition`
    (recipes/robustness) it is a card of its own, next to it."""
    from agent_r1.inference.agent import open_agent
    from agent_r1.inference.compare import condition_of, full_card, play
    from agent_r1.rollout.evaluate import calls_line, majority, score_line, scores
    from agent_r1.rollout.records import evaluation_records, write_rollouts

    facts = {}
    if condition:
        out, title = out.with_name(f"{out.stem}_{re.sub('[ -]', '_', condition)}.json"), f"{title} ({condition})"
    if out.exists():
        say(f"{title}: done before, in {out}")
        return json.loads(out.read_text())
    rows, backend = load_rows(config, "test"), _backend(config)
    if condition:
        facts = {"condition": condition, "majority": majority(load_rows(config, "train"), rows)}
        rows, tools = condition_of(condition).apply(config, rows)
    else:
        tools = load_tools(config)
        if out.name == "eval.json":
            facts = {"time_to_agent": time_to_agent(config, RunDir(out.parent))}
    few = rows[:SAMPLED]
    say(f"{title}: {len(rows)} test questions greedily, {len(few)} sampled ...")
    with (
        open_agent(model, config, backend, tools, all_gpus=True) as agent,
        progress("evaluating", len(rows) + len(few)) as advance,
    ):
        start = time.perf_counter()
        greedy, sampled = (play(agent, some, t, lambda done: advance()) for some, t in ((rows, 0.0), (few, 1.0)))
    kept = {k: v for k, v in scores(sampled).items() if k not in ("sub_em", "f1")}
    card = full_card(agent, greedy, "test", start, sampled={"temperature": 1.0, "n": len(sampled)} | kept, **facts)
    (out.parent / "rollouts").mkdir(parents=True, exist_ok=True)
    write_rollouts(out.parent / "rollouts" / f"{out.stem}.jsonl", evaluation_records(greedy[:60], agent.chat))
    write_whole(out, json.dumps(card, indent=2) + "\n")
    say(
        f"  {score_line(card)}; sampled {card['sampled']['score']:.3f}, {calls_line(card)}\n"
        f"  {card['wall_seconds']:.1f} s, in {out}"
    )
    return card


def time_to_agent(config: Config, run: RunDir) -> dict:
    """What RL took until validation first reached .9 (`log.time_to`), and apart from it what the cold start took, in seconds: None
    where there was none."""
    noted = took(Workspace.of(config).cold_start)
    cold = float(noted.read_text()) if noted.exists() else None
    return time_to(AGENT, run.metrics.read(), config.rollout, config.algorithm) | {"cold_start_seconds": cold}


def _backend(config: Config) -> str:
    """Thousands of questions to a model of billions take vLLM minutes, and the reference sampler hours."""
    return "vllm" if config.engine == "verl" and resolve_device(config.trainer)[0] == "cuda" else "transformers"


def run_by_hand(config: Config, split: str, index: int, table: bool) -> None:
    """A person plays one episode. The tokens are those of the start model, or bytes where there is none yet."""
    from agent_r1.inference.by_hand import play_by_hand
    from agent_r1.training.tiny_model import load_chat

    check_own(config)
    make_task(config)
    rows, tools, start = load_rows(config, split), load_tools(config), Workspace.of(config).start_model
    if not 0 <= index < len(rows):
        raise ConfigError(f"--index {index}: {split} has questions 0 to {len(rows) - 1}", code="index_out_of_range")
    rollout = config.rollout
    if (start / "config.json").exists():
        chat = load_chat(start)
    else:
        say(f"{start} is not there yet: a byte is a token here, and no limit of tokens holds")
        chat, wide = byte_chat(), {"max_context": 10**6, "max_tokens_per_turn": 10**5}
        rollout = rollout.model_copy(update=wide)
    shown = offered(tools, config.env)
    play_by_hand(rows[index], chat, shown, rollout, config.env, lambda row: make_env(row, tools, config.env), table)


def run_report(name: str) -> None:
    """Stage: one HTML page about a run."""
    with extra("report", "report.html"):
        from agent_r1.viewer.report import write_report

    start = time.perf_counter()
    path = write_report(home() / "runs" / name)
    say(f"report: {path} ({time.perf_counter() - start:.1f} s); open it in a browser")
