"""`agent-r1 eval --model A [--model B]`: any model on any questions, and two models on the same ones.

In: model folders and rows. Out: an eval card for each model, a line of JSON for each question, and for two models the
difference with its confidence interval. The episode loop, tools and limits are those of training.

Two models that answer the same questions are compared question by question. What both know and what neither knows says
nothing about the difference, so the interval is much narrower than that of two separate shares.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from agent_r1.config import Config, fingerprint
from agent_r1.errors import AgentR1Error
from agent_r1.files import json_line, read_jsonl, sha256, write_whole
from agent_r1.inference.agent import Agent, describe, open_agent
from agent_r1.inference.provenance import provenance
from agent_r1.inference.serve import gpus_for
from agent_r1.rollout.episode import make_loop
from agent_r1.rollout.evaluate import eval_card, evaluate, score_line
from agent_r1.rollout.records import evaluation_records, write_rollouts
from agent_r1.types import Row, Step, StopReason, Trajectory
from agent_r1.ui import progress, say, status
from agent_r1.workspace import retriever_of

Card = dict[str, Any]


def evaluate_models(
    models: list[Path],
    config: Config,
    rows: list[Row],
    *,
    split: str,
    backend: str,
    temperature: float,
    out: Path | None,
    prompt: str | None = None,
) -> list[Card]:
    """Evaluate each model, print its card, and compare two. With `out`, everything is kept there, and what is there
    already (of the very same evaluation) is not done again."""
    if not rows:
        raise AgentR1Error("there are no questions; raise --limit or choose another split")
    if out is not None:
        _claim(out, models, config, rows, [split, backend, temperature, prompt])
    results = []
    for number, model in enumerate(models, 1):
        with ExitStack() as stack:
            with status() as on_status:
                gpus = gpus_for(config.trainer) if backend == "vllm" else 0
                agent = stack.enter_context(
                    open_agent(model, config, backend, on_status=on_status, gpus=gpus, prompt=prompt)
                )
            say(describe(agent, backend))
            card, done = _evaluate(agent, rows, split, temperature, out / f"{number}.jsonl" if out else None)
        if out is not None:
            _write(out / f"{number}.json", card)
        _print_card(card)
        results.append((card, done))
    if len(results) == 2:
        name = "em" if all(card["score_name"] == "em" for card, _ in results) else "reward"
        measured = ([t.metrics.get("em", 0.0) if name == "em" else t.reward for t in done] for _, done in results)
        comparison = compare(*measured, name)
        if out is not None:
            _write(out / "comparison.json", comparison)
        low, high = comparison["ci95"]
        what, test, better = "reward", f"sign test p = {comparison.get('p_sign', 1):.2g}", "better"
        if name == "em":
            what, test, better = "EM", f"McNemar p = {comparison['p_mcnemar']:.2g}", "right"
        say(
            f"the second against the first: {what} {comparison['difference']:+.3f} (95 % {low:+.3f} to {high:+.3f}), exact "
            f"{test}; {better} only in the first {comparison['only_first']}, only in the second "
            f"{comparison['only_second']}, of {comparison['n']}"
        )
    return [card for card, _ in results]


# ----------------------------------------------------------------------------------------------------- one evaluation


def play(
    agent: Agent,
    rows: list[Row],
    temperature: float,
    on_done: Callable[[Trajectory], None],
    done: list[Trajectory] = (),
) -> list[Trajectory]:
    """An episode for each row, as in training; see `evaluate`."""
    c = agent.config
    loop = make_loop(agent.policy, agent.chat, agent.tools, c.rollout, c.env)
    return evaluate(loop, rows, temperature=temperature, seed=c.seed, on_done=on_done, at_once=agent.at_once, done=done)


def full_card(agent: Agent, trajectories: list[Trajectory], split: str, started: float, **facts: Any) -> Card:
    """The eval card with what it was made from."""
    c = agent.config
    retriever = retriever_of(c) if "search" in agent.tools else "none"
    card = eval_card(
        trajectories, model=str(agent.model), split=split, seed=c.seed, retriever=retriever, started=started
    )
    return card | facts | provenance(c, agent.model)


def _evaluate(
    agent: Agent, rows: list[Row], split: str, temperature: float, records: Path | None
) -> tuple[Card, list[Trajectory]]:
    """One episode for each row that `records` does not hold yet; the card is over all rows."""
    start = time.perf_counter()
    if agent.lead is not None:
        rows = [row | {"prompt": [*agent.lead, row["prompt"][-1]]} for row in rows]
    before = _restore(records, rows) if records else []
    scores = [t.score for t in before]
    with ExitStack() as stack:
        file = stack.enter_context(records.open("a")) if records else None
        advance = stack.enter_context(progress("evaluating", len(rows) - len(before)))

        def on_done(trajectory: Trajectory) -> None:
            scores.append(trajectory.score)
            if file:
                file.writelines(map(json_line, evaluation_records([trajectory], agent.chat)))
                file.flush()
            advance(f"{'EM' if 'em' in trajectory.metrics else 'reward'} {fmean(scores):.2f}")

        done = play(agent, rows, temperature, on_done, before)
    return full_card(agent, done, split, start, temperature=temperature, resumed=len(before)), done


def _restore(path: Path, rows: list[Row]) -> list[Trajectory]:
    """As much of the recorded trajectories as the card needs. Failed ones are left out: they get another chance."""
    records = [r for r in read_jsonl(path) if r["stop_reason"] != StopReason.ERROR]
    write_rollouts(path, records)  # without the half line that a kill left behind
    trajectories = []
    for r in records:
        steps = [Step([], [], [], step["reward"]) for step in r["steps"]]
        for row, first in zip(r["rows"][:1], steps[:1], strict=True):  # neither, where nothing was sampled
            first.observation_ids = row["input_ids"][: row["action_mask"].index(1)]
        row, stop = rows[int(r["group_id"])], StopReason(r["stop_reason"])
        trajectories.append(Trajectory(steps, r["group_id"], stop, row, r["reward_parts"], r["metrics"]))
    return trajectories


def _claim(out: Path, models: list[Path], config: Config, rows: list[Row], facts: list) -> None:
    """Make `out`, or make sure that what lies there is a part of this very evaluation."""
    weights = [[sha256(file) for file in sorted(model.glob("*.safetensors"))] for model in models]
    settings = {"models": [str(m) for m in models], "evaluation": fingerprint(weights, config, rows, facts)}
    out.mkdir(parents=True, exist_ok=True)
    if (out / "settings.json").exists() and json.loads((out / "settings.json").read_text()) != settings:
        raise AgentR1Error(f"{out} holds another evaluation; choose another --out, or delete it")
    _write(out / "settings.json", settings)


def _write(path: Path, value: dict) -> None:
    write_whole(path, json.dumps(value, indent=2) + "\n")


def _print_card(card: Card) -> None:
    say(
        f"{card['model']}\n  {score_line(card)}, {card['mean_tool_calls']:.2f} calls a question; {card['n']} "
        f"{card['split']} questions"
        + (f", {card['resumed']} of them from before" if card["resumed"] else "")
        + f", {card['wall_seconds']:.1f} s"
    )


# ------------------------------------------------------------------------------------------------------ two of them


def compare(first: list[float], second: list[float], name: str = "em") -> dict[str, Any]:
    """The difference of two models on the same questions, second minus first: in EM (1 right, 0 wrong), or in reward."""
    n = len(first)
    only_first = sum(a > b for a, b in zip(first, second, strict=True))
    only_second = sum(b > a for a, b in zip(first, second, strict=True))
    better = {"only_first": only_first, "only_second": only_second}
    if name == "em":
        difference, interval = (only_second - only_first) / n, paired_interval(only_first, only_second, n)
        test = {"p_mcnemar": mcnemar(only_first, only_second)}
    else:
        differences = [b - a for a, b in zip(first, second, strict=True)]
        difference, half = fmean(differences), 1.96 * pstdev(differences) / math.sqrt(n)
        interval = [difference - half, difference + half]
        test = {"p_sign": mcnemar(only_first, only_second)}  # the same coin flips
    means = {"n": n, "score_name": name, name: [fmean(first), fmean(second)]}
    return means | {"difference": difference, "ci95": interval} | better | test


def mcnemar(b: int, c: int) -> float:
    """Exact two-sided p-value (McNemar 1947): were both equally good, the b + c disagreements were coin flips."""
    n = b + c
    tail = sum(math.comb(n, k) for k in range(min(b, c) + 1)) / 2**n
    return min(1.0, 2 * tail)


def paired_interval(b: int, c: int, n: int, z: float = 1.96) -> list[float]:
    """95 % interval of (c - b) / n for paired shares: Wald's, with half a question added to each of the four cells.

    Agresti and Min (Statistics in Medicine 24, 2005). Without the halves, models that agree everywhere would get an
    interval of width zero.
    """
    b, c, n = b + 0.5, c + 0.5, n + 2
    centre = (c - b) / n
    half = z * math.sqrt((b + c) / n - centre**2) / math.sqrt(n)
    return [max(-1.0, centre - half), min(1.0, centre + half)]
