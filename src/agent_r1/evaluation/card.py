"""Make the eval card of an opened agent, and compare two cards.

In: an agent and rows. Out: trajectories and their card, with its provenance; of two cards the
difference, question by question. The episode loop, tools and limits are those of training. Next:
`compare.py` does so for any models, and the stages for a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent_r1.config import tables
from agent_r1.core import Row, StopReason, Trajectory
from agent_r1.evaluation.evaluate import compare, eval_card, evaluate, scores
from agent_r1.evaluation.provenance import provenance
from agent_r1.ground import bounds
from agent_r1.ground.errors import AgentR1Error
from agent_r1.ground.ui import say
from agent_r1.rollout.agent import Agent
from agent_r1.rollout.setup import make_loop
from agent_r1.tool import BaseTool
from agent_r1.workspace import Workspace

Card = dict[str, Any]


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
