"""Evaluate a policy on held-out questions, and compare two evaluations.

In: an episode loop (any policy) and rows. Out: trajectories and the evaluation card. EM is exact
match after the official SQuAD/HotpotQA normalisation; a substring match is `sub_em`, never EM.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from statistics import fmean, pstdev, stdev
from typing import Any

from agent_r1.core import Row, Sampling, StopReason, Trajectory
from agent_r1.reward.scorers import exact_match
from agent_r1.rollout.episode import AgentEnvLoop, Task, derive_seed
from agent_r1.rollout.rollouts import run_episodes


def evaluate(
    loop: AgentEnvLoop,
    rows: list[Row],
    *,
    temperature: float,
    seed: int,
    samples: int = 1,
    on_done: Callable[[Trajectory], None] | None = None,
    max_concurrent: int | None = None,
    done: Iterable[Trajectory] = (),
) -> list[Trajectory]:
    """Play `samples` episodes per row: all of the first row, then all of the second.

    Temperature 0 is greedy. `max_concurrent`: see `run_episodes`. `done`: finished trajectories,
    not played again. Seeds depend on the question's and the sample's numbers only, so the others
    come out the same.
    """
    by_episode = {(trajectory.group_id, trajectory.sample): trajectory for trajectory in done}
    tasks: list[Task] = []
    for i, row in enumerate(rows):
        for j in range(samples):
            tasks.append(Task(row, str(i), f"eval-{j}-{i}", sample_seed(seed, i, j), j))
    sampling = Sampling(max_tokens=loop.limits.max_tokens_per_turn, temperature=temperature)
    unplayed_tasks = [task for task in tasks if (task.group_id, task.sample) not in by_episode]
    for trajectory in asyncio.run(
        run_episodes(loop, unplayed_tasks, sampling, on_done, max_concurrent)
    ):
        by_episode[trajectory.group_id, trajectory.sample] = trajectory
    return [by_episode[task.group_id, task.sample] for task in tasks]


def sample_seed(seed: int, question: int, sample: int) -> int:
    """Derive the seed of one sample of a question."""
    # Sample 0 has the seed of an evaluation with one sample. So more samples only add to it.
    if sample == 0:
        return derive_seed(seed, "eval", question)
    return derive_seed(seed, "eval", question, sample)


def first_samples(trajectories: Iterable[Trajectory]) -> list[Trajectory]:
    """Return one trajectory per question: what most figures of a card are about."""
    return [trajectory for trajectory in trajectories if trajectory.sample == 0]


def eval_card(
    trajectories: list[Trajectory],
    *,
    model: str,
    split: str,
    seed: int,
    retriever: str,
    start_time: float,
) -> dict[str, Any]:
    """Make the evaluation card. `start_time` is time.perf_counter() at the start."""
    n = len(trajectories)

    def total(name: str) -> float:
        return sum(t.metrics.get(name, 0) for t in trajectories)

    calls = total("tool_calls")
    stops = Counter(t.stop_reason.value for t in trajectories)
    averages = scores(trajectories)
    shares: dict[str, float] = {}
    for key, name in (("evidence", "evidence"), ("malformed", "malformed_rate")):
        values = [t.metrics[key] for t in trajectories if key in t.metrics]
        if values:
            shares[name] = fmean(values)
    kinds: dict[str, dict[str, Any]] = {}
    for kind, members in by_kind(trajectories).items():
        of_kind = scores(members)
        kinds[kind] = {"n": len(members)}
        kinds[kind] |= {key: of_kind[key] for key in of_kind if key in ("score", "em")}
    cut_off = (StopReason.MAX_TOKENS, StopReason.CONTEXT_OVERFLOW, StopReason.MAX_TURNS)
    return {
        "model": model,
        "dataset": trajectories[0].row["data_source"],
        "split": split,
        "n": n,
        "seed": seed,
        **averages,
        **shares,
        "search_rate": fmean(t.metrics.get("tool_calls", 0) > 0 for t in trajectories),
        "mean_turns": fmean(len(t.steps) for t in trajectories),
        "mean_tool_calls": calls / n,
        "invalid_call_rate": total("invalid_calls") / max(calls, 1),
        "truncated_rate": sum(stops[reason.value] for reason in cut_off) / n,
        "stop_reasons": dict(stops),
        "retriever": retriever,
        "rows_hash": rows_hash(trajectories),
        "questions_hash": questions_hash(trajectories),
        "question_scores": [score_of(t, averages["score_name"]) for t in trajectories],
        "prompt_hash": prompt_hash(trajectories),
        "wall_seconds": round(time.perf_counter() - start_time, 2),
        "by_kind": kinds,
    }


def by_kind(trajectories: Iterable[Trajectory]) -> dict[str, list[Trajectory]]:
    """Group trajectories by the kind of their questions, in alphabetical order.

    Questions of a data set that names no kinds are of kind `all`.
    """
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        kind = trajectory.row.get("extra_info", {}).get("kind", "all")
        groups.setdefault(kind, []).append(trajectory)
    return dict(sorted(groups.items()))


def card_text(card: dict[str, Any]) -> str:
    """Format a card as JSON, with each list of numbers on one line."""
    text = json.dumps(card, indent=2)
    # `reliability` has a number per question, and 500 lines would hide the rest of the card.
    lists = re.compile(r"\[[\d\s.,eE+-]+\]")
    return lists.sub(lambda match: re.sub(r"\s+", "", match[0]).replace(",", ", "), text) + "\n"


def scores(trajectories: list[Trajectory]) -> dict[str, Any]:
    """Average `score`, reward, and em, sub_em and f1 if measured, with intervals.

    `score_name` names the averaged metric: em, reward, or the environment's own. A metric is
    measured if every episode reports it, except those whose environment failed; they count as 0.
    """
    complete = [t for t in trajectories if t.stop_reason is not StopReason.ERROR]
    metrics = []
    for metric in ("em", "sub_em", "f1"):
        if complete and all(metric in t.metrics for t in complete):
            metrics.append(metric)
    own_names = [t.score_name for t in complete if t.score_name]
    name = next(iter(own_names), "em" if "em" in metrics else "reward")
    values = [score_of(t, name) for t in trajectories]
    rewards = [t.reward for t in trajectories]
    averages = {"score": fmean(values), "score_ci95": mean_interval(values), "score_name": name}
    averages |= {"reward": fmean(rewards), "reward_ci95": mean_interval(rewards)}
    for metric in metrics:
        averages[metric] = fmean(t.metrics.get(metric, 0.0) for t in trajectories)
    if name == "em":
        averages["em_ci95"] = averages["score_ci95"]
    return averages


def score_of(trajectory: Trajectory, name: str) -> float:
    """Return the episode's value of the metric `name`; 0 if it was not measured."""
    return trajectory.reward if name == "reward" else trajectory.metrics.get(name, 0.0)


def calls_line(card: dict[str, Any]) -> str:
    """Format `1.98 calls per question`. Without tools, calls are only attempts."""
    suffix = " tried, without a tool" if card.get("condition") == "closed-book" else ""
    return f"{card['mean_tool_calls']:.2f} calls per question{suffix}"


def score_line(card: dict[str, Any]) -> str:
    """Format the scores of a card.

    Example: `EM 0.910 (95 % 0.882 to 0.932), F1 0.931, sub-EM 0.940, reward 0.905 (95 % 0.876 to
    0.934)`.
    """
    name: str = card["score_name"]
    words = {"em": "EM", "f1": "F1", "sub_em": "sub-EM"}
    figures = [_with_interval(words.get(name, name), card["score"], card["score_ci95"])]
    figures += [f"{words[key]} {card[key]:.3f}" for key in ("f1", "sub_em") if key in card]
    if name != "reward":
        figures.append(_with_interval("reward", card["reward"], card["reward_ci95"]))
    failures = card["stop_reasons"].get(StopReason.ERROR)
    if failures:
        figures.append(f"episodes that failed, and counted as wrong: {failures}")
    return ", ".join(figures)


def _with_interval(name: str, mean: float, interval: list[float]) -> str:
    low, high = interval
    return f"{name} {mean:.3f}" + (f" (95 % {low:.3f} to {high:.3f})" if low < high else "")


def majority(train: list[Row], rows: list[Row]) -> dict[str, Any]:
    """Score the baseline that always gives the commonest training answer of a question's kind."""

    def answers_by_kind(questions: list[Row]) -> dict[str, list[list[str]]]:
        answers: dict[str, list[list[str]]] = {}
        for row in questions:
            kind = row["extra_info"].get("kind", "all")
            answers.setdefault(kind, []).append(list(row["reward_model"]["ground_truth"]))
        return answers

    train_answers = answers_by_kind(train)
    kinds: dict[str, dict[str, Any]] = {}
    hits: list[float] = []
    for kind, targets in sorted(answers_by_kind(rows).items()):
        counts = Counter(answers[0] for answers in train_answers.get(kind, []) if answers)
        best = max(sorted(counts), key=counts.get, default="")
        hits_of_kind = [exact_match(best, answers) for answers in targets]
        kinds[kind] = {"answer": best, "em": fmean(hits_of_kind)}
        hits += hits_of_kind
    return {"em": fmean(hits), "by_kind": kinds}


def rows_hash(trajectories: list[Trajectory]) -> str:
    """Hash the questions and answers, to tell whether two evaluations used the same."""
    rows = [[t.row["prompt"], list(t.row["reward_model"]["ground_truth"])] for t in trajectories]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def questions_hash(trajectories: list[Trajectory]) -> str:
    """Hash questions and answers without the messages before them, which may differ by model."""
    rows: list[Any] = []
    for t in trajectories:
        rows.append([t.row["prompt"][-1]["content"], list(t.row["reward_model"]["ground_truth"])])
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def prompt_hash(trajectories: list[Trajectory]) -> str:
    """Hash all prompts' token ids. Equal hashes: same questions, wording and template."""
    prompts = [t.steps[0].observation_ids if t.steps else [] for t in trajectories]
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]


def wilson_interval(share: float, n: int, z: float = 1.96) -> list[float]:
    """Return the 95 % confidence interval of a share (Wilson 1927).

    Unlike +-1.96 s.e., it stays within [0, 1].
    """
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return [max(0.0, centre - half), min(1.0, centre + half)]


def mean_interval(values: list[float]) -> list[float]:
    """Return the 95 % confidence interval of a mean.

    Wilson's if all values are 0 or 1, else the normal one, whose width is 0 if all values are
    equal.
    """
    mean = fmean(values)
    n = len(values)
    if set(values) <= {0, 1}:
        return wilson_interval(mean, n)
    half = 1.96 * stdev(values) / math.sqrt(n) if n > 1 else 0.0
    return [mean - half, mean + half]


# --------------------------------------------------------------------------------------- comparison


def compare(first: list[float], second: list[float], name: str = "em") -> dict[str, Any]:
    """Compare two models on the same questions: second minus first, in EM or another score.

    Questions that both or neither answer do not affect the difference. So the paired interval is
    much narrower than the interval of two separate shares.
    """
    n = len(first)
    differences = [b - a for a, b in zip(first, second, strict=True)]
    only_first = sum(d < 0 for d in differences)
    only_second = sum(d > 0 for d in differences)
    p = mcnemar(only_first, only_second)  # for other scores this is the sign test
    if name == "em":
        effect = {
            "difference": (only_second - only_first) / n,
            "ci95": paired_interval(only_first, only_second, n),
        }
    else:
        mean = fmean(differences)
        half = 1.96 * pstdev(differences) / math.sqrt(n)
        effect = {"difference": mean, "ci95": [mean - half, mean + half]}
    better = {
        "only_first": only_first,
        "only_second": only_second,
        "p_mcnemar" if name == "em" else "p_sign": p,
    }
    return {"n": n, "score_name": name, name: [fmean(first), fmean(second)]} | effect | better


def mcnemar(b: int, c: int) -> float:
    """Return the exact two-sided p-value (McNemar 1947): b + c disagreements as fair coin flips."""
    n = b + c
    tail = sum(math.comb(n, k) for k in range(min(b, c) + 1)) / 2**n
    return min(1.0, 2 * tail)


def paired_interval(b: float, c: float, n: int, z: float = 1.96) -> list[float]:
    """Return the 95 % interval of (c - b) / n for paired shares (Agresti and Min 2005).

    Wald's interval with half a question added to each of the four cells (Statistics in Medicine
    24). Otherwise models that agree everywhere would have an interval of width zero.
    """
    b = b + 0.5
    c = c + 0.5
    n = n + 2
    centre = (c - b) / n
    half = z * math.sqrt((b + c) / n - centre**2) / math.sqrt(n)
    return [max(-1.0, centre - half), min(1.0, centre + half)]
