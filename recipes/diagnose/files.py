"""Read the metrics and episodes of a run of Agent-R1, TRL, verl or verifiers.

In: a folder. Out: `Evidence`. Next: `causes.py`. The forms, as their projects write them:

    Agent-R1   metrics.jsonl; rollouts/step_*.jsonl (training) with tokens, masks, rewards and
               advantages
    TRL        completions/completions_*.parquet (log_completions=True); trainer_state.json
    verl       STEP.jsonl (trainer.rollout_data_dir): input, output, score, step, uid
    verifiers  traces.jsonl (0.4), or results.jsonl (releases before it; one evaluation, no steps)
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from agent_r1 import AgentR1Error, json_records

Record = Mapping[str, Any]
STEP = "training/global_step"
SPAN = 5
"""Steps of a mean."""
FORMS = (
    "a run of Agent-R1 (metrics.jsonl, rollouts/), TRL (completions/), verl (1.jsonl) or "
    "verifiers (traces.jsonl)"
)
ANSWER = re.compile(r"<answer>(.*?)</answer>|\\boxed\{([^{}]*)\}", re.DOTALL)
CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
RESULT = re.compile(r"<tool_response>.*?</tool_response>", re.DOTALL)
LAST_CHARS = 200
"""Of the last line, where a text marks no answer."""


@dataclass(frozen=True)
class Episode:
    """One sampled episode. What its project does not record is None."""

    step: int
    question: str
    group: str
    answer: str
    reward: float
    calls: Sequence[str]
    """The text of each call."""
    text: str  # by the agent
    cut: bool | None = None  # by a limit on tokens
    advantage: float | None = None
    record: Record = field(default_factory=dict)  # of Agent-R1, with tokens


@dataclass(frozen=True)
class Evidence:
    """What a folder holds."""

    source: str
    lines: list[dict[str, float]]  # a step's metrics, under Agent-R1's names
    episodes: list[Episode]

    def series(self, key: str) -> list[float]:
        return [line[key] for line in self.lines if isinstance(line.get(key), (int, float))]

    def first(self, key: str) -> float:
        """Return the mean of the first steps; 0 without the metric."""
        return mean(self.series(key)[:SPAN])

    def last(self, key: str) -> float:
        return mean(self.series(key)[-SPAN:])


Form = tuple[Callable[[Record], Episode | None], list[dict[str, float]]]
"""What reads a record (None: it counts for nothing), and the metrics of a folder, if it has any."""


def mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def read_evidence(folder: Path) -> Evidence:
    """Read the first form that `folder` has. Raises AgentR1Error for none, and for damaged
    files."""
    if not folder.is_dir():
        raise AgentR1Error(f"{folder} is not a folder; name {FORMS}", code="missing_folder")
    for source, pattern, reader in READERS:
        if files := sorted(folder.glob(pattern)):
            read, lines = reader(folder)
            episodes = [one for file in files for one in _episodes(source, file, read)]
            if not episodes and not lines:
                raise AgentR1Error(f"{files[0]} holds no episode", code="no_episode")
            return Evidence(source, lines or list(_counted(episodes)), episodes)
    if lines := _our_metrics(folder):
        return Evidence("Agent-R1", lines, [])
    raise AgentR1Error(
        f"{folder} has no file of a known form; name the folder of {FORMS}", code="unknown_form"
    )


def _episodes(
    source: str, file: Path, read: Callable[[Record], Episode | None]
) -> Iterator[Episode]:
    for place, record in _records(file):
        try:
            if episode := read(record):
                yield episode
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            missing = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise AgentR1Error(
                f"{place} is not an episode of {source} ({missing})", code="bad_episode"
            ) from None


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
    for step in sorted({episode.step for episode in episodes}):
        played = [episode for episode in episodes if episode.step == step]
        groups: dict[str, list[float]] = defaultdict(list)
        for episode in played:
            groups[episode.group].append(episode.reward)
        compared = [max(rewards) == min(rewards) for rewards in groups.values() if len(rewards) > 1]
        cut = [episode.cut for episode in played if episode.cut is not None]
        yield {
            STEP: step, "critic/score/mean": fmean(e.reward for e in played),
            "tool_calls/mean": fmean(len(e.calls) for e in played),
            # four characters a token, roughly
            "response_length/mean": fmean(len(e.text) / 4 for e in played),
            **({"groups/zero_advantage": fmean(compared)} if compared else {}),
            **({"stop/max_tokens": fmean(cut)} if cut else {}),
        }  # fmt: skip


# ------------------------------------------------------------------------------------------ metrics


def _our_metrics(folder: Path) -> list[dict[str, float]]:
    files = sorted(folder.glob("metrics.jsonl*"))
    return [
        line
        for file in files[:1]
        for _, line in json_records(file)
        if isinstance(line, dict) and STEP in line
    ]


def _trl_state(folder: Path) -> list[dict[str, float]]:
    """Read the newest trainer_state.json, if there is one."""
    files = sorted(folder.glob("**/trainer_state.json"), key=lambda file: file.stat().st_mtime)
    try:
        return [
            line
            for file in files[-1:]
            for line in json.loads(file.read_text())["log_history"]
            if "reward" in line
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AgentR1Error(
            f"{files[-1]} cannot be read ({error!r})", code="unreadable_file"
        ) from None


def _trl_folder(folder: Path) -> Form:
    state = _trl_state(folder)
    names = {
        name[1]
        for line in state
        for key in line
        if (name := re.fullmatch("rewards/(.+)/mean", key))
    }
    lines = [
        {ours: line[theirs] for theirs, ours in TRL.items() if theirs in line} for line in state
    ]
    return partial(_trl, names=names), lines


TRL = {
    "step": STEP,
    "reward": "critic/score/mean",
    "frac_reward_zero_std": "groups/zero_advantage",
    "entropy": "actor/entropy",
    "completions/mean_length": "response_length/mean",
    "completions/clipped_ratio": "stop/max_tokens",
    "kl": "actor/kl_loss",
    "tools/call_frequency": "tool_calls/mean",
    "tools/failure_frequency": "tool_calls/failed_rate",
    "sampling/sampling_logp_difference/mean": "training/rollout_logprobs_diff_mean",
    "grad_norm": "actor/grad_norm",
}
"""TRL's name of a metric -> ours."""


# ---------------------------------------------------------------------------------------- the forms


def _ours(record: Record) -> Episode:
    steps, rows = record["steps"], record["rows"]
    credit = [
        a
        for r in rows
        for a, on in zip(r["advantages"] or (), r["action_mask"], strict=False)
        if on
    ]
    calls = [
        str(call["arguments"]) for step in steps for call in step["info"].get("tool_calls", ())
    ]
    return Episode(
        record["step"] or 0,
        record["question"],
        record["group_id"],
        _answer(steps[-1]["text"] if steps else ""),
        float(record["reward"]),
        calls,
        "\n".join(step["text"] for step in steps),
        record["stop_reason"] == "max_tokens",
        credit[-1] if credit else None,
        record,
    )


def _trl(record: Record, names: Set[str]) -> Episode | None:
    """Read a row. Its rewards are the columns of `names`, or all numbers; NaN stands where a reward
    does not apply."""
    others = {"step", "prompt", "completion", "advantage"}
    rewards = [
        v
        for k, v in record.items()
        if (k in names or not names) and k not in others and type(v) in (int, float)
    ]
    if not rewards:
        raise KeyError("reward")
    paid = [v for v in rewards if not math.isnan(v)]
    text, calls = _spoken(record["completion"])
    asked, credit = record["prompt"], record.get("advantage")
    return (
        Episode(record["step"], asked, asked, _answer(text), sum(paid), calls, text, None, credit)
        if paid
        else None
    )


def _verl(record: Record) -> Episode:
    """Read a row. A `uid` is PROMPT_SAMPLE_OUTPUT, which has two numbers at its end, or the
    prompt's alone."""
    text, calls = _spoken(record["output"])
    group = re.sub(r"_\d+_\d+$", "", str(record.get("uid", record["input"])))
    return Episode(
        record["step"], record["input"], group, _answer(text), float(record["score"]), calls, text
    )


def _results(record: Record) -> Episode:
    text, calls = _spoken(record["completion"])
    asked, _ = _spoken(record["prompt"])
    group, cut = str(record["example_id"]), record.get("is_truncated")
    return Episode(0, asked, group, _answer(text), float(record["reward"]), calls, text, cut)


def _traces(record: Record) -> Episode | None:
    """Read an episode: its first trace that trains the policy."""
    trace = next((one for one in record["traces"] if one["agent"].get("trainable", True)), None)
    rewards = [one for one in trace["rewards"].values() if one] if trace else []
    if not trace or not rewards:  # it failed before it was scored
        return None
    said = [node["message"] for node in trace["nodes"]]
    asked, _ = _spoken([message for message in said if message["role"] == "user"][:1])
    text, calls = _spoken([message for message in said if message["role"] in ("assistant", "tool")])
    work = (record.get("run") or {}).get("work") or {}
    group = (record.get("group") or {}).get("id") or record["task"].get("hash") or asked
    reward = sum(one["score"] * one.get("weight", 1.0) for one in rewards)
    cut = str(trace.get("stop_condition")).endswith(("_tokens", "context_length"))
    return Episode(work.get("step", 0), asked, group, _answer(text), reward, calls, text, cut)


def _spoken(messages: str | list[Record] | None) -> tuple[str, list[str]]:
    """Return what the agent said, and its calls, from messages or plain text."""
    if isinstance(messages, str):
        text = RESULT.sub("", messages)
        return text, CALL.findall(text)
    said = [m for m in messages or () if m.get("role") not in ("system", "tool")]
    text = "\n".join(_content(m.get("content")) for m in said)
    return text, [str(call) for m in said for call in m.get("tool_calls") or ()] or CALL.findall(
        text
    )


def _content(content: Any) -> str:
    """Return a message's text, which may be in parts."""
    return (
        content
        if isinstance(content, str)
        else " ".join(str(part.get("text", "")) for part in content or ())
    )


def _answer(text: str) -> str:
    """Return the marked answer, or the text's last line."""
    if marked := ANSWER.findall(text):
        return "".join(marked[-1]).strip()
    return (text.strip().splitlines() or [""])[-1].strip()[:LAST_CHARS]


READERS: tuple[tuple[str, str, Callable[[Path], Form]], ...] = (
    ("Agent-R1", "rollouts/step_*.jsonl*", lambda folder: (_ours, _our_metrics(folder))),
    ("TRL", "**/completions_*.parquet", _trl_folder),
    ("verifiers", "**/results.jsonl", lambda folder: (_results, [])),
    ("verifiers", "**/traces.jsonl", lambda folder: (_traces, [])),
    ("verl", "[0-9]*.jsonl", lambda folder: (_verl, [])),
)
"""Source, its files of episodes, and its reader; in the order in which they are tried."""
