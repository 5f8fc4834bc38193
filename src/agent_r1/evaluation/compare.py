"""Evaluate any model on any questions, and compare two: `agent-r1 eval --model A [--model B]`.

In: model folders and rows. Out: an eval card per model, a line of JSON per question, and for two
models the difference with its confidence interval. The episode loop, tools and limits are those of
training.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from agent_r1.config import Config, fingerprint
from agent_r1.core import Row, Step, StopReason, Trajectory
from agent_r1.evaluation.card import (
    Card,
    compare_cards,
    condition_of,
    full_card,
    play_rows,
    print_comparison,
    read_card,
)
from agent_r1.evaluation.evaluate import (
    calls_line,
    card_text,
    compare,
    first_samples,
    score_line,
    score_of,
    scores,
)
from agent_r1.evaluation.provenance import weights_hash
from agent_r1.evaluation.records import evaluation_records, write_rollouts
from agent_r1.evaluation.reliability import (
    check_scores,
    reliability,
    reliability_line,
    resampled_interval,
    values_of,
)
from agent_r1.ground.errors import AgentR1Error, ConfigError
from agent_r1.ground.files import json_line, read_jsonl, write_whole, writing
from agent_r1.ground.ui import progress, say
from agent_r1.rollout.agent import Agent
from agent_r1.tool import BaseTool
from agent_r1.workspace import Workspace

OpenModel = Callable[[Path, dict[str, BaseTool] | None], AbstractContextManager[Agent]]


@dataclass(frozen=True)
class Questions:
    """Questions, and how they are asked. Cards of equal ones can be compared."""

    config: Config
    rows: list[Row]
    split: str
    backend: str
    temperature: float
    samples: int = 1
    """Of each question. From two on, the card has `reliability`; the rest is about the first."""
    threshold: float | None = None
    """See `reliability.is_right`."""
    prompt: str | None = None
    """The system message, instead of that of the model's training."""
    condition: str | None = None
    """See `condition_of`."""

    def apply_condition(self) -> tuple[Questions, dict[str, BaseTool] | None]:
        """Return the questions and tools under the condition; None: the configuration's tools."""
        if not self.condition:
            return self, None
        load_tools = Workspace(self.config).load_tools
        rows, tools = condition_of(self.condition).apply(self.config, self.rows, load_tools)
        return replace(self, rows=rows), tools

    def key(self, models: Sequence[Path]) -> str:
        """Return the fingerprint of an evaluation: another one does not continue it."""
        inputs: list[Any] = [[weights_hash(model) for model in models], self.config, self.rows]
        inputs += [self.split, self.backend, self.temperature, self.prompt]
        if self.condition:
            inputs.append(self.condition)
        if self.samples > 1:
            inputs += [self.samples, self.threshold]
        return fingerprint(*inputs)


def evaluate_models(
    questions: Questions,
    models: Sequence[Path],
    open_model: OpenModel,
    out: Path | None = None,
    against: Path | None = None,
) -> list[Card]:
    """Evaluate each model, print its card, and compare two.

    Args:
        open_model: Opens the agent of a model with these tools (None: the configuration's).
        out: Folder for all results; an interrupted evaluation with the same settings continues
        there.
        against: The card of another evaluation of these questions, to compare each model with.
    """
    if not questions.rows:
        raise AgentR1Error(
            "there are no questions; raise --limit or choose another split", code="no_records"
        )
    if len(models) > 2:
        raise ConfigError("--model: give one model, or two to compare", code="too_many_models")
    check_samples(questions.samples, questions.temperature)
    other = read_card(against) if against else None
    questions, tools = questions.apply_condition()
    if out is not None:
        names = [str(model) for model in models]
        _claim(out, {"models": names, "evaluation": questions.key(models)})
    cards: list[Card] = []
    trajectories: list[list[Trajectory]] = []
    for number, model in enumerate(models, 1):
        with open_model(model, tools) as agent:
            records = out / f"{number}.jsonl" if out else None
            card, done = _evaluate(agent, questions, records)
        before = f", {card['resumed']} of them done earlier" if card["resumed"] else ""
        say(
            f"{card['model']}\n  {score_line(card)}, {calls_line(card)}; {card['n']} "
            f"{card['split']} questions{before}, {card['wall_seconds']:.1f} s"
        )
        if "reliability" in card:
            say(f"  {reliability_line(card['reliability'])}")
        if out:
            write_whole(out / f"{number}.json", card_text(card))
        if other:
            comparison = compare_cards(other, card)
            print_comparison(comparison)
            _write(out and out / f"{number}-against.json", comparison)
        cards.append(card)
        trajectories.append(done)
    if len(models) == 2:
        names = {card["score_name"] for card in cards}
        name = names.pop() if len(names) == 1 else "reward"
        first = [score_of(trajectory, name) for trajectory in first_samples(trajectories[0])]
        second = [score_of(trajectory, name) for trajectory in first_samples(trajectories[1])]
        comparison = compare(first, second, name)
        print_comparison(comparison)
        if questions.samples > 1:
            comparison["reliability"] = _compare_reliability(cards, questions.samples)
        _write(out and out / "comparison.json", comparison)
    return cards


def check_samples(samples: int, temperature: float) -> None:
    """Refuse several samples of greedy decoding: they are equal."""
    if samples > 1 and temperature == 0:
        raise ConfigError(
            f"--samples {samples} at temperature 0 would be {samples} times the same; give "
            "--temperature 1, or another one above 0",
            code="equal_samples",
        )


def _compare_reliability(cards: list[Card], samples: int) -> Card:
    """Compare two models in the measures of their samples, question by question."""
    differences = {}
    for key in (f"mean@{samples}", f"pass@{samples}", f"pass^{samples}"):
        first = values_of(cards[0]["reliability"], key)
        second = values_of(cards[1]["reliability"], key)
        change = [b - a for a, b in zip(first, second, strict=True)]
        low, high = resampled_interval(change, lowest=-1.0)
        differences[key] = {"difference": fmean(change), "ci95": [low, high]}
        say(f"second minus first: {key} {fmean(change):+.3f} (95 % {low:+.3f} to {high:+.3f})")
    return differences


# ----------------------------------------------------------------------------------- one evaluation


def _evaluate(
    agent: Agent, questions: Questions, records: Path | None
) -> tuple[Card, list[Trajectory]]:
    """Play the samples that `records` does not contain yet. The card covers all."""
    start = time.perf_counter()
    rows = questions.rows
    samples = questions.samples
    threshold = questions.threshold
    facts: Card = {"temperature": questions.temperature}
    if questions.condition:
        facts["condition"] = questions.condition
    if agent.leading_messages is not None:
        rows = [row | {"prompt": [*agent.leading_messages, row["prompt"][-1]]} for row in rows]
    before = []
    if records:
        before = _restore(records, rows)
    finished_scores = [t.score for t in before]
    with ExitStack() as stack:
        file = stack.enter_context(records.open("a")) if records else None
        remaining_samples = len(rows) * samples - len(before)
        advance = stack.enter_context(progress("evaluating", remaining_samples))

        def on_done(trajectory: Trajectory) -> None:
            finished_scores.append(trajectory.score)
            if file:
                with writing(records):
                    for record in evaluation_records([trajectory], agent.chat):
                        file.write(json_line(record | {"sample": trajectory.sample}))
                    file.flush()
            if samples > 1:
                check_scores([trajectory], threshold)
            name = trajectory.score_name or ("EM" if "em" in trajectory.metrics else "reward")
            advance(f"{name} {fmean(finished_scores):.2f}")

        done = play_rows(agent, rows, questions.temperature, on_done, before, samples)
    if samples > 1:
        name = scores(done)["score_name"]
        facts["reliability"] = reliability(done, name, questions.temperature, threshold)
    usage = getattr(agent.policy, "usage", None)
    if usage:  # tokens and cost of a model that somebody else serves
        facts |= usage()
    facts["resumed"] = len(before)
    card = full_card(agent, first_samples(done), questions.split, start, **facts)
    return card, done


def _restore(path: Path, rows: list[Row]) -> list[Trajectory]:
    """Restore the recorded trajectories, as far as the card needs them, without failed ones."""
    records = [r for r in read_jsonl(path) if r["stop_reason"] != StopReason.ERROR]
    write_rollouts(path, records)  # drops a half-written last line
    trajectories = []
    for r in records:
        steps = [Step([], [], [], step["reward"], info=step["info"]) for step in r["steps"]]
        if steps:  # something was sampled
            first_row = r["rows"][0]
            prompt_length = first_row["action_mask"].index(1)
            steps[0].observation_ids = first_row["input_ids"][:prompt_length]
        trajectories.append(
            Trajectory(
                steps,
                r["group_id"],
                StopReason(r["stop_reason"]),
                rows[int(r["group_id"])],
                reward_parts=r["reward_parts"],
                metrics=r["metrics"],
                score_name=r.get("score_name"),
                sample=r.get("sample", 0),  # older files have one sample of each question
            )
        )
    return trajectories


def _claim(out: Path, settings: dict[str, Any]) -> None:
    """Create `out`, or check that it contains a part of the same evaluation."""
    out.mkdir(parents=True, exist_ok=True)
    if (out / "settings.json").exists() and json.loads(
        (out / "settings.json").read_text()
    ) != settings:
        raise AgentR1Error(
            f"{out} has another evaluation; choose another --out, or delete it",
            code="other_contents",
        )
    _write(out / "settings.json", settings)


def _write(path: Path | None, value: dict) -> None:
    if path is not None:
        write_whole(path, json.dumps(value, indent=2) + "\n")
