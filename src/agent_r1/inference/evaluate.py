"""Evaluation: the training episode loop over held-out questions, and one card of honest numbers.

In: an episode loop (any policy) and rows. Out: trajectories and the eval card. EM is exact match after the official
SQuAD/HotpotQA normalisation; a substring match is reported as `sub_em` and never called EM.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable
from statistics import fmean

from agent_r1.rollout.episode import AgentEnvLoop, Task, derive_seed, run_episodes
from agent_r1.rollout.types import Row, Sampling, StopReason, Trajectory


def evaluate(
    loop: AgentEnvLoop,
    rows: list[Row],
    *,
    temperature: float,
    seed: int,
    on_done: Callable[[Trajectory], None] | None = None,
    at_once: int | None = None,
) -> list[Trajectory]:
    """One episode for each row, in the order of the rows; temperature 0 is greedy. `at_once`: see `run_episodes`."""
    sampling = Sampling(max_tokens=loop.limits.max_tokens_per_turn, temperature=temperature)
    return asyncio.run(run_episodes(loop, eval_tasks(rows, seed), sampling, on_done, at_once))


def eval_tasks(rows: list[Row], seed: int) -> list[Task]:
    """A task for each row. The seed hangs on the row's number, so a part of them, done later, comes out the same."""
    return [Task(row, str(i), f"eval-{i}", derive_seed(seed, "eval", i)) for i, row in enumerate(rows)]


def eval_card(
    trajectories: list[Trajectory], *, model: str, split: str, seed: int, retriever: str, started: float
) -> dict:
    """The card (keys as in docs/architecture.md). `started` is time.perf_counter() at the start."""
    n = len(trajectories)

    def mean(name: str) -> float:
        return fmean(t.metrics[name] for t in trajectories)

    calls = sum(t.metrics["tool_calls"] for t in trajectories)
    stops = Counter(t.stop_reason.value for t in trajectories)
    cut = (StopReason.MAX_TOKENS, StopReason.CONTEXT_OVERFLOW, StopReason.MAX_TURNS)
    by_kind: dict[str, list[float]] = {}
    for t in trajectories:
        by_kind.setdefault(t.row["extra_info"].get("kind", "all"), []).append(t.metrics["em"])
    em = mean("em")
    found = [t.metrics["evidence"] for t in trajectories if "evidence" in t.metrics]
    return {
        "model": model,
        "dataset": trajectories[0].row["data_source"],
        "split": split,
        "n": n,
        "seed": seed,
        "em": em,
        "em_ci95": wilson_interval(em, n),
        "sub_em": mean("sub_em"),
        "f1": mean("f1"),
        **({"evidence": fmean(found)} if found else {}),
        "search_rate": fmean(t.metrics["tool_calls"] > 0 for t in trajectories),
        "mean_turns": mean("turns"),
        "mean_tool_calls": calls / n,
        "invalid_call_rate": sum(t.metrics["invalid_calls"] for t in trajectories) / max(calls, 1),
        "truncated_rate": sum(stops[reason.value] for reason in cut) / n,
        "stop_reasons": dict(stops),
        "retriever": retriever,
        "rows_hash": rows_hash(trajectories),
        "prompt_hash": prompt_hash(trajectories),
        "wall_seconds": round(time.perf_counter() - started, 2),
        "by_kind": {kind: {"n": len(ems), "em": fmean(ems)} for kind, ems in sorted(by_kind.items())},
    }


def rows_hash(trajectories: list[Trajectory]) -> str:
    """Hash of the questions with their answers: whatever file they came from, it tells whether they are the same."""
    rows = [[t.row["prompt"], list(t.row["reward_model"]["ground_truth"])] for t in trajectories]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def prompt_hash(trajectories: list[Trajectory]) -> str:
    """Hash of all prompts' token ids: equal cards were asked the same questions in the same words and template."""
    prompts = [t.steps[0].observation_ids if t.steps else [] for t in trajectories]
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]


def wilson_interval(share: float, n: int, z: float = 1.96) -> list[float]:
    """95 % confidence interval of a share (Wilson 1927); unlike +-1.96 s.e. it stays inside [0, 1] at the edges."""
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return [max(0.0, centre - half), min(1.0, centre + half)]
