"""Read the metrics and episodes of a run of Agent-R1, TRL, verl or verifiers.

In: a folder. Out: `Evidence`. Next: `causes.py`. The forms, as their projects write them:

    Agent-R1   metrics.jsonl; rollouts/step_*.jsonl (training) with tokens, masks, rewards and advantages
    TRL        completions/completions_*.parquet or .jsonl (log_completions=True); trainer_state.json
    verl       STEP.jsonl (trainer.rollout_data_dir): input, output, score, step
    verifiers  results.jsonl: prompt, completion, reward, is_truncated; one evaluation, no steps
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from agent_r1 import AgentR1Error, json_records

Record = Mapping[str, Any]
STEP = "training/global_step"
FORMS = "a run of Agent-R1 (metrics.jsonl, rollouts/), TRL (completions/), verl (1.jsonl) or verifiers (results.jsonl)"
ANSWER = re.compile(r"<answer>(.*?)</answer>|\\boxed\{([^{}]*)\}", re.DOTALL)
RESULT = re.compile(r"<tool_response>.*?</tool_response>", re.DOTALL)
LAST_CHARS = 200
"""Of the last line, where a text marks no answer."""


@dataclass(frozen=True)
class Episode:
    """One sampled episode. What its project does not record is None."""

    step: int
    question: str
    group: str
    text: str  # by the agent, results of tools included
    answer: str
    reward: float
    calls: int | None = None
    cut: bool | None = None  # by a limit on tokens
    advantage: float | None = None
    record: Record = field(default_factory=dict)  # of Agent-R1, with tokens


@dataclass(frozen=True)
class Evidence:
    """What a folder holds."""

    source: str
    lines: list[dict[str, float]]  # a step's metrics, under Agent-R1's names
    episodes: list[Episode]


def read_evidence(folder: Path) -> Evidence:
    """Read the first form that `folder` has. Raises AgentR1Error for none, and for damaged files."""
    if not folder.is_dir():
        raise AgentR1Error(f"{folder} is not a folder; name {FORMS}", code="missing_folder")
    for source, pattern, episode, metrics in READERS:
        if files := sorted(folder.glob(pattern)):
            return _evidence(source, folder, files, episode, metrics)
    if lines := _metrics(folder, "metrics.jsonl*"):
        return Evidence("Agent-R1", lines, [])
    raise AgentR1Error(f"{folder} has no file of a known form; name the folder of {FORMS}", code="unknown_form")


def _evidence(
    source: str, folder: Path, files: list[Path], episode: Callable[[Record], Episode], metrics: str
) -> Evidence:
    episodes = []
    for place, record in (pair for file in files for pair in _records(file)):
        try:
            episodes.append(episode(record))
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            missing = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise AgentR1Error(f"{place} is not an episode of {source} ({missing})", code="bad_episode") from None
    lines = _metrics(folder, metrics) or list(_counted(episodes))
    if not episodes and not lines:
        raise AgentR1Error(f"{files[0]} holds no episode", code="no_episode")
    return Evidence(source, lines, episodes)


def _records(file: Path) -> Iterator[tuple[str, Any]]:
    if file.suffix != ".parquet":
        yield from json_records(file)
        return
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(file).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise AgentR1Error(f"{file} cannot be read ({error})", code="unreadable_file") from None
    yield from ((f"{file}, row {number}", row) for number, row in enumerate(rows, 1))


def _counted(episodes: list[Episode]) -> Iterator[dict[str, float]]:
    """Yield metrics of each step, from its episodes alone."""
    steps: dict[int, list[Episode]] = defaultdict(list)
    for episode in episodes:
        steps[episode.step].append(episode)
    for step, played in sorted(steps.items()):
        groups: dict[str, list[float]] = defaultdict(list)
        for e in played:
            groups[e.group].append(e.reward)
        compared = [rewards for rewards in groups.values() if len(rewards) > 1]
        line = {STEP: step, "critic/score/mean": fmean(e.reward for e in played)}
        line["response_length/mean"] = fmean(len(e.text) / 4 for e in played)  # four characters a token, roughly
        if compared:
            line["groups/zero_advantage"] = fmean(max(rewards) == min(rewards) for rewards in compared)
        for key, values in (
            ("tool_calls/mean", [e.calls for e in played]),
            ("stop/max_tokens", [e.cut for e in played]),
        ):
            if len(known := [value for value in values if value is not None]) == len(played):
                line[key] = fmean(known)
        yield line


def _metrics(folder: Path, name: str) -> list[dict[str, float]]:
    """Read the metrics file, if there is one; TRL's under our names."""
    found = sorted(folder.glob(name), key=lambda file: file.stat().st_mtime) if name else []
    if not found:
        return []
    if found[-1].name.startswith("metrics"):
        return [record for _, record in json_records(found[-1]) if isinstance(record, dict) and STEP in record]
    try:
        logged = json.loads(found[-1].read_text(encoding="utf-8"))["log_history"]
        return [
            {ours: line[theirs] for theirs, ours in TRL.items() if theirs in line}
            for line in logged
            if "reward" in line
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AgentR1Error(f"{found[-1]} cannot be read ({error!r})", code="unreadable_file") from None


TRL = {
    "step": STEP, "reward": "critic/score/mean", "frac_reward_zero_std": "groups/zero_advantage", "entropy": "actor/entropy",
    "completions/mean_length": "response_length/mean", "completions/clipped_ratio": "stop/max_tokens", "kl": "actor/kl_loss",
    "tools/call_frequency": "tool_calls/mean", "tools/failure_frequency": "tool_calls/failed_rate",
    "sampling/sampling_logp_difference/mean": "training/rollout_logprobs_diff_mean", "grad_norm": "actor/grad_norm",
}  # fmt: skip
"""TRL's name of a metric -> ours."""


# --------------------------------------------------------------------------------------------------------- the forms


def _ours(record: Record) -> Episode:
    steps, asked = record["steps"], record["question"]
    text = "\n".join(step["text"] for step in steps)
    calls = int(record["metrics"].get("tool_calls", 0))
    credit = [
        a for row in record["rows"] for a, on in zip(row["advantages"] or (), row["action_mask"], strict=False) if on
    ]
    reward, stop = float(record["reward"]), record["stop_reason"]
    advantage = credit[-1] if credit else None
    answer = _answer(steps[-1]["text"]) if steps else ""
    return Episode(
        record["step"] or 0,
        asked,
        record["group_id"],
        text,
        answer,
        reward,
        calls,
        stop == "max_tokens",
        advantage,
        record,
    )


def _trl(record: Record) -> Episode:
    text, calls = _spoken(record["completion"])
    asked, _ = _spoken(record["prompt"])
    known = {"step", "prompt", "completion", "advantage", "mode"}
    paid = [v for k, v in record.items() if k not in known and isinstance(v, (int, float)) and not isinstance(v, bool)]
    if not paid:
        raise KeyError("reward")
    reward = record.get("reward", sum(paid))
    return Episode(record["step"], asked, asked, text, _answer(text), reward, calls, None, record.get("advantage"))


def _verl(record: Record) -> Episode:
    text, asked = record["output"], record["input"]
    group = str(record.get("uid", asked))
    calls = RESULT.sub("", text).count("<tool_call>")
    return Episode(record["step"], asked, group, text, _answer(RESULT.sub("", text)), float(record["score"]), calls)


def _verifiers(record: Record) -> Episode:
    text, calls = _spoken(record["completion"])
    asked, _ = _spoken(record["prompt"])
    reward = float(record["reward"])
    return Episode(0, asked, str(record["example_id"]), text, _answer(text), reward, calls, record.get("is_truncated"))


def _spoken(messages: str | list[Record] | None) -> tuple[str, int]:
    """Return text and number of calls of a message list, or of plain text."""
    if isinstance(messages, str):
        return messages, RESULT.sub("", messages).count("<tool_call>")
    said = [m for m in messages or () if m.get("role") != "system"]
    text = "\n".join(str(m.get("content") or "") for m in said)
    agent = "\n".join(str(m.get("content") or "") for m in said if m.get("role") == "assistant")
    return text, sum(len(m.get("tool_calls") or ()) for m in said) or agent.count("<tool_call>")


def _answer(text: str) -> str:
    """Return the marked answer, or the text's last line."""
    if marked := ANSWER.findall(text):
        return "".join(marked[-1]).strip()
    return (text.strip().splitlines() or [""])[-1].strip()[:LAST_CHARS]


READERS = (
    ("Agent-R1", "rollouts/step_*.jsonl*", _ours, "metrics.jsonl*"),
    ("TRL", "**/completions_*.parquet", _trl, "**/trainer_state.json"),
    ("TRL", "**/completions_*.jsonl", _trl, "**/trainer_state.json"),
    ("verifiers", "**/results.jsonl", _verifiers, ""),
    ("verl", "[0-9]*.jsonl", _verl, ""),
)
"""Source, its files of episodes, what reads one, its file of metrics; in the order in which they are tried."""
