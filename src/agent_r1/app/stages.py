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
from agent_r1.cold_start.stage import CLONED_COUNTS, check_start, make_cold_start
from agent_r1.config import Config, from_yaml, tables
from agent_r1.config.load import keep_stored
from agent_r1.core import Row
from agent_r1.ground import hub
from agent_r1.ground.device import resolve_device
from agent_r1.ground.errors import AgentR1Error
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
"""Questions of an evaluation that are also sampled at temperature 1: at most.

Their 95 % interval is +-.03 at a score of .5. All 7,405 of HotpotQA would take seven times as long.
"""
CONDITION_QUESTIONS = 100
"""Questions for each of `trainer.eval_conditions`, at most: +-.06 at a score of .9."""
RECORDED_EPISODES = 60
"""Greedy episodes of an evaluation in rollouts/, at most: enough to read, and small to keep."""


def make_missing(paths: Workspace) -> None:
    """Run those stages before training whose artefacts do not exist."""
    paths.make_task()
    paths.refuse_untrainable()
    if not paths.start_model.exists():
        make_cold_start(paths)


def prepare(paths: Workspace) -> None:
    """Run `make_missing`, and print one line if there was anything to do.

    The stages' own lines are hidden, but for progress: while it clones, one every ten seconds.
    """
    has_index = paths.index.exists() or not paths.needs_index
    if paths.data.exists() and has_index and paths.start_model.exists():
        return
    print("making data, index and start model ...", end=" ", flush=True)
    start = time.perf_counter()
    shown = OnlyProgress(sys.stdout)
    with contextlib.redirect_stdout(shown):
        make_missing(paths)
    if shown.lines:
        print()  # the lines of progress have their line break before them
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

    A finished run is only checked for its settings: nothing will be trained. `start_model` checks
    again what the stages have made, and `launch.check_runnable` what verl's workers need. Raises
    AgentR1Error with the remedy.
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
        # A stage fetches these models and repairs damaged ones, so their folders are checked later.
        # A model with a warm start was checked before that.
        is_fetched = hub.is_repo_name(path) or tables.scheme_of(path)
        if not is_fetched and not paths.cold_start.exists():
            check_network(config, paths.base_model)
    check_start_chat(config)


def run_train(config: Config, name: str, resume: bool, plain: bool) -> None:
    """Train with RL (stage).

    Args:
        name: The folder in runs/.
        resume: Continue from the newest checkpoint, or begin if there is none.
        plain: Print lines instead of the dashboard.

    Raises AgentR1Error before anything is made, if the run cannot be trained.
    """
    run = run_dir(config, name)
    if resume and run.config.exists():
        config = keep_stored(config, from_yaml(run.config))
    paths = Workspace(config)
    preflight(paths, run, resume)
    if run.is_finished(config.trainer.steps):
        say(f"train: already done, in {run.latest_checkpoint()}")
        return
    latest = run.latest_checkpoint()
    if resume and latest is None:
        say(f"train: no checkpoint in {run.path}: starting from step 0")
    card = run.card
    if latest and card.exists():  # the run was finished, and now gets more steps
        card.rename(card.with_name(f"eval_{latest.name}.json"))
    make_missing(paths)
    set_threads(config.trainer.threads)
    model = start_model(paths)
    # A resumed run has learned already. The probe plays with the local sampler, which is too slow
    # for verl's models.
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
    """Evaluate a run's trained model, or with `before` its start model (stage).

    Returns the card, which also is in the run's folder. `condition`: see `run_eval`.
    """
    run = run_dir(config, name)
    model = model_to_evaluate(config, name, before)
    Workspace(config).make_task()
    if before:
        card = run_eval(config, model, run.card_before, "evaluate before RL", condition)
        # Now the run has begun: its config.yaml refuses a training with other settings.
        open_run(run, config)
        return card
    card = run_eval(config, model, run.card, "evaluate after RL", condition)
    print_change(run, card, condition)
    return card


def condition_card(card: Path, condition: str | None) -> Path:
    """Return the file of a card under a condition: `eval_passages_4.json` next to `eval.json`."""
    if not condition:
        return card
    return card.with_name(f"{card.stem}_{re.sub('[ -]', '_', condition)}.json")


def print_change(run: RunDir, card: dict[str, Any], condition: str | None) -> None:
    """Print the paired difference to the evaluation before RL, if there is one."""
    from agent_r1.evaluation.card import compare_cards, print_comparison, read_card

    file = condition_card(run.card_before, condition)
    if file.is_file():
        with suppress(AgentR1Error):  # another version's card, or other questions
            print_comparison(compare_cards(read_card(file), card), "after minus before")


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

    All test questions are played greedily, the first ones also sampled, and a few under each of
    `trainer.eval_conditions`. An evaluation whose card exists is not repeated.

    Args:
        out: The card's file: `eval.json` of a run, or another.
        title: The evaluation's name in the lines that are printed.
        condition: Play all questions under it instead (recipes/robustness, such as `passages 4`).
        The card is a separate file next to `out`.
    """
    from agent_r1.evaluation.card import condition_of, full_card, play_rows, score_under
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
        out = condition_card(out, condition)
        title = f"{title} ({condition})"
    if out.exists():
        say(f"{title}: already done, in {out}")
        return json.loads(out.read_text())
    paths = Workspace(config)
    rows = paths.load_rows("test")
    backend = _backend(config, model)
    if condition:
        # A condition is about one number, such as what the agent knows without its tools.
        # Reliability is about its work.
        samples = 1
        facts = {"condition": condition, "majority": majority(paths.load_rows("train"), rows)}
        rows, tools = condition_of(condition).apply(config, rows, paths.load_tools)
    else:
        tools = paths.load_tools()
        if out == RunDir(out.parent).card:
            facts = {"time_to_agent": time_to_agent(config, RunDir(out.parent))}
    sampled_rows = rows[:SAMPLED_QUESTIONS]
    # Before anything is played, since one of them may be wrong.
    conditions = {} if condition else apply_conditions(config, rows[:CONDITION_QUESTIONS], tools)
    total = len(rows) + len(sampled_rows) * samples
    total += sum(len(other_rows) for other_rows, _ in conditions.values())
    times = f" {samples} times" if samples > 1 else ""
    say(f"{title}: {len(rows)} test questions greedily, {len(sampled_rows)} sampled{times} ...")
    with (
        open_agent(model, config, backend, tools, all_gpus=True) as agent,
        progress("evaluating", total) as advance,
    ):
        start = time.perf_counter()
        greedy = play_rows(agent, rows, 0.0, lambda done: advance())
        if samples > 1:
            check_scores(greedy, threshold)
        # One pass: the first samples are those of an evaluation with one sample.
        sampled_episodes = play_rows(
            agent, sampled_rows, 1.0, lambda done: advance(), samples=samples
        )
        scores_under = {
            text: score_under(agent, other_rows, other_tools, lambda done: advance())
            for text, (other_rows, other_tools) in conditions.items()
        }
    if samples > 1:
        name = scores(sampled_episodes)["score_name"]
        facts["reliability"] = reliability(sampled_episodes, name, 1.0, threshold)
    counts = paths.start_model / CLONED_COUNTS
    if counts.is_file():
        # What imitation could know, next to what RL made of it.
        facts["cloned"] = json.loads(counts.read_text())
    if scores_under:
        facts["conditions"] = scores_under
    sampled_episodes = first_samples(sampled_episodes)
    # sub_em and f1 of the greedy answers are in the card, and enough.
    card_scores = {k: v for k, v in scores(sampled_episodes).items() if k not in ("sub_em", "f1")}
    card = full_card(
        agent,
        greedy,
        "test",
        start,
        sampled={"temperature": 1.0, "n": len(sampled_episodes)} | card_scores,
        **facts,
    )
    rollouts = out.parent / "rollouts"
    rollouts.mkdir(parents=True, exist_ok=True)
    records = evaluation_records(greedy[:RECORDED_EPISODES], agent.chat)
    write_rollouts(rollouts / f"{out.stem}.jsonl", records)
    # Last, because the evaluation counts as done when its card exists.
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
    """Return the rows and tools of each of `trainer.eval_conditions`.

    `tools` are the agent's, so their index is loaded once. Raises ConfigError for a condition that
    the task does not know.
    """
    from agent_r1.evaluation.card import condition_of

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
    """Choose what samples an evaluation: "vllm" or "local".

    With verl it is vLLM, if there is a GPU or the local sampler does not know the model. On a GPU
    vLLM needs minutes for what takes the local sampler hours.
    """
    from agent_r1.model.files import OtherModelError, read_shape

    if config.engine != "verl":
        return "local"
    try:
        read_shape(model)
    except OtherModelError:
        return "vllm"
    device, _ = resolve_device(config.trainer.device, config.trainer.dtype)
    return "vllm" if device == "cuda" else "local"
