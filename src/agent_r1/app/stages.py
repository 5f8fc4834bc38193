"""Run the stages of a speedrun. Each makes one artefact, and prints its duration and place.

    data -> index -> cold start -> evaluate -> train -> evaluate -> report

A stage whose artefact exists is skipped. An artefact's name has a fingerprint of everything that it
depends on. A changed setting makes a new artefact, and a stale one is never used. Each stage writes
to a temporary name and renames at the end: an interrupted stage leaves nothing that looks complete.

    artifacts/tinyhop-<fp>/       questions and corpus, shared by all runs (or hotpotqa-<fp>/)
    artifacts/index-<fp>/         the search index
    artifacts/cold-start-<fp>/    the model that RL starts from (or model-<name>/: from the hub)
    runs/<name>/                  one training run: see training/run.py
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from agent_r1.app.engine import engine_of
from agent_r1.app.own_code import check_own
from agent_r1.chat.start import check_start_chat
from agent_r1.chat.tokenizer import byte_chat
from agent_r1.cold_start.stage import CLONED_COUNTS, check_start, make_cold_start
from agent_r1.config import Config, from_yaml, tables
from agent_r1.config.load import keep_stored
from agent_r1.core import Row
from agent_r1.env import add_class_tools, make_env
from agent_r1.ground import hub
from agent_r1.ground.device import resolve_device
from agent_r1.ground.errors import AgentR1Error, ConfigError
from agent_r1.ground.files import write_whole
from agent_r1.ground.machine import set_threads
from agent_r1.ground.ui import OnlyProgress, progress, say
from agent_r1.tool import BaseTool
from agent_r1.training.checkpoint import verify_checkpoint
from agent_r1.training.plan_local import check_free_memory
from agent_r1.training.run import check_network, start_model
from agent_r1.training.run_dir import (
    OWN_SETTINGS,
    RunDir,
    check_run,
    check_same_settings,
    open_run,
)
from agent_r1.watch.log import AGENT_SCORE, time_to
from agent_r1.workspace import Workspace, check_local_model, seconds_file

SAMPLED_QUESTIONS = 1000
"""Questions of an evaluation that are also sampled at temperature 1: gives +-.03.

All of HotpotQA's would take seven times as long.
"""
CONDITION_QUESTIONS = 100
"""Questions for each of `trainer.eval_conditions`: gives +-.05 near .9, in about a second."""


def make_missing(paths: Workspace) -> None:
    """Run those stages before training whose artefacts do not exist."""
    paths.make_task()
    paths.refuse_untrainable()
    if not paths.start_model.exists():
        make_cold_start(paths)


def prepare(paths: Workspace) -> None:
    """Run `make_missing`, and print one line if there was anything to do.

    While it clones, a line every ten seconds says how far it is.
    """
    has_index = paths.index.exists() or not paths.needs_index
    if paths.data.exists() and has_index and paths.start_model.exists():
        return
    print("making data, index and start model ...", end=" ", flush=True)
    start = time.perf_counter()
    shown = OnlyProgress(sys.stdout)
    with contextlib.redirect_stdout(shown):  # the stages have many lines
        make_missing(paths)
    if shown.lines:
        print()  # ends the last of them
    say(f"{time.perf_counter() - start:.1f} s, in {paths.root / 'artifacts'}")


def preflight(paths: Workspace, run: RunDir, resume: bool) -> None:
    """Refuse a run that cannot be trained, before anything is made.

    The checks run in this order, from quick to slow:

        run       an existing folder has these settings and this code: finished, or resumed
        engine    its packages are installed, and memory to convert its checkpoints
        code      user-defined code loads and keeps its contract
        memory    a pretrained model fits into free memory
        model     the folder of `model.path` is complete and supports context and arithmetic
        template  its chat template is exact and fits the dialect (of a hub model, fetched)

    `start_model` checks again what the stages have made, and `launch.check_runnable` what verl's
    workers need. Raises AgentR1Error with the remedy.
    """
    config = paths.config
    check_run(run, config, resume)
    if run.is_finished(config.trainer.steps):
        return
    engine_of(config).check(config)
    check_own(config)
    check_free_memory(config)
    if path := config.model.path:
        check_local_model(path)
        # A stage fetches these models, and repairs damaged ones.
        is_fetched = hub.is_repo_name(path) or tables.scheme_of(path)
        if not is_fetched and not paths.cold_start.exists():
            check_network(config, paths.base_model)
    check_start_chat(config)


def run_train(config: Config, name: str, resume: bool, plain: bool) -> None:
    """Train with RL (stage)."""
    config_file = run_dir(config, name).path / "config.yaml"
    if resume and config_file.exists():
        config = keep_stored(config, from_yaml(config_file))
    paths = Workspace(config)
    run = RunDir(paths.run(name))
    preflight(paths, run, resume)
    if run.is_finished(config.trainer.steps):
        say(f"train: already done, in {run.latest_checkpoint()}")
        return
    latest = run.latest_checkpoint()
    if resume and latest is None:
        say(f"train: no checkpoint in {run.path}: starting from step 0")
    card = run.path / "eval.json"
    if latest and card.exists():  # the run was finished, and now gets more steps
        card.rename(card.with_name(f"eval_{latest.name}.json"))
    make_missing(paths)
    set_threads(config.trainer.threads)
    model = start_model(paths)
    if config.engine == "local" and latest is None:
        check_start(paths)
    say(f"train: {config.algorithm}, {config.trainer.steps} steps, {run.path} ...")
    start = time.perf_counter()
    checkpoint = engine_of(config).train(paths, run, model, resume, plain)
    say(f"  {time.perf_counter() - start:.1f} s, in {checkpoint}")


def run_dir(config: Config, name: str) -> RunDir:
    """Return the files of the run `name`, which may not exist yet."""
    return RunDir(Workspace(config).run(name))


def evaluate_run(
    config: Config, name: str, before: bool, condition: str | None = None
) -> dict[str, Any]:
    """Evaluate a run's trained model, or with `before` its start model (stage); return the card."""
    paths = Workspace(config)
    run = run_dir(config, name)
    model = model_to_evaluate(config, name, before)
    paths.make_task()
    if not before:
        card = run_eval(config, model, run.path / "eval.json", "evaluate after RL", condition)
        print_change(run, card, condition)
        return card
    card = run_eval(config, model, run.path / "eval_before.json", "evaluate before RL", condition)
    open_run(run, config)
    return card


def print_change(run: RunDir, card: dict[str, Any], condition: str | None) -> None:
    """Print the paired difference to the evaluation before RL, if there is one."""
    from agent_r1.evaluation.compare import compare_cards, print_comparison, read_card

    name = "eval_before.json"
    if condition:
        name = f"eval_before_{re.sub('[ -]', '_', condition)}.json"
    if (run.path / name).is_file():
        with suppress(AgentR1Error):  # another version's card, or other questions
            print_comparison(compare_cards(read_card(run.path / name), card), "after minus before")


def model_to_evaluate(config: Config, name: str, before: bool) -> Path:
    """Return the folder of a run's trained model, or with `before` of its start model.

    Raises AgentR1Error if the run has other settings, or is not finished.
    """
    from agent_r1.inference.agent import model_folder

    run = run_dir(config, name)
    check_same_settings(run, config, OWN_SETTINGS)
    if before:
        return start_model(Workspace(config))
    if not run.is_finished(config.trainer.steps):
        state = "does not exist"
        if run.has_begun():
            state = f"has not finished its {config.trainer.steps} steps"
        raise AgentR1Error(f"{run.path} {state}; run `agent-r1 train` first", code="unfinished_run")
    checkpoint = run.latest_checkpoint()
    assert checkpoint is not None  # a finished run has one
    verify_checkpoint(checkpoint, "restore the file from a backup")
    return model_folder(checkpoint)


def run_eval(
    config: Config, model: Path, out: Path, title: str, condition: str | None = None
) -> dict:
    """Evaluate a model folder greedily and sampled (stage); write and return the card.

    The card goes to `out`, or with a `condition` (recipes/robustness) to a separate file next to
    `out`.
    """
    from agent_r1.evaluation.compare import condition_of, full_card, play_rows, score_under
    from agent_r1.evaluation.evaluate import (
        calls_line,
        card_text,
        first_samples,
        majority,
        score_line,
        scores,
    )
    from agent_r1.evaluation.records import evaluation_records, write_rollouts
    from agent_r1.evaluation.reliability import check_scores, reliability, reliability_line
    from agent_r1.inference.agent import open_agent

    facts = {}
    samples = config.trainer.eval_samples
    threshold = config.trainer.eval_threshold
    if condition:
        out, title = (
            out.with_name(f"{out.stem}_{re.sub('[ -]', '_', condition)}.json"),
            f"{title} ({condition})",
        )
    if out.exists():
        say(f"{title}: already done, in {out}")
        return json.loads(out.read_text())
    paths = Workspace(config)
    rows, backend = paths.load_rows("test"), _backend(config, model)
    if condition:
        # What the agent knows without its tools is one number; reliability is about its work.
        samples = 1
        facts = {"condition": condition, "majority": majority(paths.load_rows("train"), rows)}
        rows, tools = condition_of(condition).apply(config, rows, paths.load_tools)
    else:
        tools = paths.load_tools()
        if out.name == "eval.json":
            facts = {"time_to_agent": time_to_agent(config, RunDir(out.parent))}
    few = rows[:SAMPLED_QUESTIONS]
    # Before anything is played, since one of them may be wrong.
    conditions = {} if condition else apply_conditions(config, rows[:CONDITION_QUESTIONS], tools)
    total = len(rows) + len(few) * samples + sum(len(other) for other, _ in conditions.values())
    times = f" {samples} times" if samples > 1 else ""
    say(f"{title}: {len(rows)} test questions greedily, {len(few)} sampled{times} ...")
    with (
        open_agent(model, config, backend, tools, all_gpus=True) as agent,
        progress("evaluating", total) as advance,
    ):
        start = time.perf_counter()
        greedy = play_rows(agent, rows, 0.0, lambda done: advance())
        if samples > 1:
            check_scores(greedy, threshold)
        # One pass: the first samples are those of an evaluation with one sample.
        samples_of_few = play_rows(agent, few, 1.0, lambda done: advance(), samples=samples)
        scores_under = {
            text: score_under(agent, other_rows, other_tools, lambda done: advance())
            for text, (other_rows, other_tools) in conditions.items()
        }
    if samples > 1:
        name = scores(samples_of_few)["score_name"]
        facts["reliability"] = reliability(samples_of_few, name, 1.0, threshold)
    counts = paths.start_model / CLONED_COUNTS
    if counts.is_file():
        # What imitation could know, next to what RL made of it.
        facts["cloned"] = json.loads(counts.read_text())
    samples_of_few = first_samples(samples_of_few)
    if scores_under:
        facts["conditions"] = scores_under
    card_scores = {k: v for k, v in scores(samples_of_few).items() if k not in ("sub_em", "f1")}
    card = full_card(
        agent,
        greedy,
        "test",
        start,
        sampled={"temperature": 1.0, "n": len(samples_of_few)} | card_scores,
        **facts,
    )
    (out.parent / "rollouts").mkdir(parents=True, exist_ok=True)
    write_rollouts(
        out.parent / "rollouts" / f"{out.stem}.jsonl", evaluation_records(greedy[:60], agent.chat)
    )
    write_whole(out, card_text(card))
    say(f"  {score_line(card)}; sampled {card['sampled']['score']:.3f}, {calls_line(card)}")
    if samples > 1:
        say(f"  {reliability_line(card['reliability'])}")
    if scores_under:
        figures = [f"{text} {part['score']:.2f}" for text, part in scores_under.items()]
        questions = min(len(rows), CONDITION_QUESTIONS)
        say(f"  under other conditions, {questions} questions: {', '.join(figures)}")
    say(f"  {card['wall_seconds']:.1f} s, in {out}")
    return card


def apply_conditions(
    config: Config, rows: list[Row], tools: dict[str, BaseTool]
) -> dict[str, tuple[list[Row], dict[str, BaseTool]]]:
    """Return the rows and tools of each of `trainer.eval_conditions`. Raise ConfigError for a
    condition that the task does not know."""
    from agent_r1.evaluation.compare import condition_of

    # `tools` are the agent's, whose index is loaded once.
    return {
        text: condition_of(text).apply(config, rows, lambda: dict(tools))
        for text in config.trainer.eval_conditions
    }


def time_to_agent(config: Config, run: RunDir) -> dict:
    """Return what RL needed until validation first reached .9, and the cold start's seconds.

    The seconds are None if there was no cold start.
    """
    file = seconds_file(Workspace(config).cold_start)
    cold = float(file.read_text()) if file.exists() else None
    return time_to(AGENT_SCORE, run.metrics.read(), config.rollout, config.algorithm) | {
        "cold_start_seconds": cold
    }


def _backend(config: Config, model: Path) -> str:
    """Choose vLLM on GPUs, and for an architecture that only verl trains.

    On GPUs it needs minutes for what takes the reference sampler hours.
    """
    from agent_r1.model.files import OtherModelError, read_shape

    if config.engine != "verl":
        return "local"
    try:
        read_shape(model)
    except OtherModelError:
        return "vllm"
    return (
        "vllm"
        if resolve_device(config.trainer.device, config.trainer.dtype)[0] == "cuda"
        else "local"
    )


def run_by_hand(config: Config, split: str, index: int, table: bool) -> None:
    """Let a person play one episode.

    The tokens are those of the start model, or bytes if there is no model yet.
    """
    from agent_r1.chat.tokenizer import load_chat
    from agent_r1.inference.play import NO_LIMIT, play_by_hand

    check_own(config)
    paths = Workspace(config)
    paths.make_task()
    rows, tools, start = paths.load_rows(split), paths.load_tools(), paths.start_model
    if not 0 <= index < len(rows):
        raise ConfigError(
            f"--index {index}: {split} has questions 0 to {len(rows) - 1}",
            code="index_out_of_range",
        )
    rollout = config.rollout
    limits = (
        f"a turn has at most {rollout.max_tokens_per_turn} tokens (rollout.max_tokens_per_turn), "
        f"an episode {rollout.max_context} (rollout.max_context)"
    )
    if (start / "config.json").exists():
        chat = load_chat(start)
        say(f"as in training: {limits}, of the tokenizer in {start}")
    else:
        say(
            f"{start} does not exist yet: each token is one byte here, and token limits are off. "
            f"In training {limits}, of a tokenizer that `agent-r1 cold-start` makes"
        )
        chat = byte_chat()
        wide = {"max_context": 10**6, "max_tokens_per_turn": NO_LIMIT}
        rollout = rollout.model_copy(update=wide)
    agent_tools = add_class_tools(tools, config.env)
    play_by_hand(
        rows[index],
        chat,
        agent_tools,
        rollout,
        config.env,
        lambda row: make_env(row, tools, config.env),
        table,
    )
