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

from agent_r1.config import Config, fingerprint, tables
from agent_r1.core import Row, Step, StopReason, Trajectory
from agent_r1.evaluation.evaluate import (
    calls_line,
    card_text,
    compare,
    eval_card,
    evaluate,
    first_samples,
    score_line,
    score_of,
    scores,
)
from agent_r1.evaluation.provenance import provenance, weights_hash
from agent_r1.evaluation.records import evaluation_records, write_rollouts
from agent_r1.evaluation.reliability import (
    check_scores,
    reliability,
    reliability_line,
    resampled_interval,
    values_of,
)
from agent_r1.ground import bounds
from agent_r1.ground.errors import AgentR1Error, ConfigError
from agent_r1.ground.files import json_line, read_jsonl, write_whole, writing
from agent_r1.ground.ui import progress, say
from agent_r1.rollout.agent import Agent
from agent_r1.rollout.setup import make_loop
from agent_r1.tool import BaseTool
from agent_r1.workspace import Workspace

Card = dict[str, Any]
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


def read_card(path: Path) -> Card:
    """Read the card of an evaluation. Raise AgentR1Error if it cannot be compared."""
    try:
        card = bounds.read_json(path)
    except (OSError, ValueError):
        card = None
    if not isinstance(card, dict) or "rows_hash" not in card:
        raise AgentR1Error(
            f"--against {path} is not an eval card; give the eval.json of a run, or 1.json in the "
            "--out of an evaluation",
            code="no_card",
        )
    if "question_scores" not in card:
        raise AgentR1Error(
            f"{path} has no score for each question, because an earlier version wrote it; delete "
            "it and evaluate that model again",
            code="old_card",
        )
    return card


def compare_cards(first: Card, second: Card) -> Card:
    """Compare two cards question by question. Raise AgentR1Error if the questions differ."""
    for key, what in (("questions_hash", "questions"), ("score_name", "scores")):
        if first[key] != second[key]:
            raise AgentR1Error(
                f"{first['model']} and {second['model']} were evaluated with other {what} "
                f"({first['n']} and {second['n']} of {first['split']} and {second['split']}); give "
                "both evaluations the same preset, seed, --split and --limit",
                code="other_contents",
            )
    names = {"first": first["model"], "second": second["model"]}
    scores_of_both = first["question_scores"], second["question_scores"]
    return names | compare(scores_of_both[0], scores_of_both[1], second["score_name"])


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


def play_rows(
    agent: Agent,
    rows: list[Row],
    temperature: float,
    on_done: Callable[[Trajectory], None],
    done: Sequence[Trajectory] = (),
    samples: int = 1,
) -> list[Trajectory]:
    """Play `samples` episodes for each row, as in training; see `evaluate`."""
    c = agent.config
    loop = make_loop(agent.policy, agent.chat, agent.tools, c.rollout, c.env)
    return evaluate(
        loop,
        rows,
        temperature=temperature,
        seed=c.seed,
        samples=samples,
        on_done=on_done,
        max_concurrent=agent.max_concurrent,
        done=done,
    )


def full_card(
    agent: Agent, trajectories: list[Trajectory], split: str, start_time: float, **facts: Any
) -> Card:
    """Make the eval card, with its provenance."""
    c = agent.config
    condition = facts.get("condition")
    retriever = "none"
    if tables.any_entry_has("tool", agent.tools, "index"):
        retriever = condition or Workspace(c).retriever
    card = eval_card(
        trajectories,
        model=str(agent.model),
        split=split,
        seed=c.seed,
        retriever=retriever,
        start_time=start_time,
    )
    if condition:
        card |= condition_of(condition).report(trajectories, c.seed)
    card |= Workspace(c).held_out(split)
    return card | facts | provenance(c, agent.model)


def score_under(
    agent: Agent,
    rows: list[Row],
    tools: dict[str, BaseTool],
    on_done: Callable[[Trajectory], None],
) -> Card:
    """Evaluate an agent greedily with other rows and tools, as a condition gives them.

    Return its scores. Episodes that do not fit into the context are counted apart, because they say
    nothing about the agent's skill.
    """
    played = play_rows(replace(agent, tools=tools), rows, 0.0, on_done)
    averages = scores(played)
    overflows = sum(t.stop_reason is StopReason.CONTEXT_OVERFLOW for t in played)
    card: Card = {key: averages[key] for key in ("score", "score_ci95", "score_name")}
    return {"n": len(rows)} | card | {"context_overflows": overflows}


def condition_of(text: str) -> Any:
    """Resolve a condition of an evaluation, such as `poison 0.5`: a name and its argument."""
    name, _, argument = text.partition(" ")
    return tables.resolve("condition", name, "the condition")(argument)


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


def print_comparison(c: dict[str, Any], title: str = "second minus first") -> None:
    """Print the difference of two evaluations of the same questions."""
    name = c["score_name"]
    if name == "em":
        name = "EM"
        test = f"exact McNemar p = {c['p_mcnemar']:.2g}; right"
    else:
        test = f"exact sign test p = {c['p_sign']:.2g}; better"
    low, high = c["ci95"]
    say(
        f"{title}: {name} {c['difference']:+.3f} (95 % {low:+.3f} to {high:+.3f}), "
        f"{test} only in the first {c['only_first']}, only in the second "
        f"{c['only_second']}, of {c['n']}"
    )
