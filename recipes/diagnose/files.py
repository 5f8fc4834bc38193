"""Read the metrics and episodes of a run of Agent-R1, TRL, verl or verifiers.

In: a folder, perhaps a stranger's. Out: `Evidence`. Next: `causes.py`. The forms, as their projects
write them:

    Agent-R1   config.yaml; metrics.jsonl; rollouts/step_*.jsonl (training) with tokens, masks,
               rewards and advantages
    TRL        completions/completions_*.parquet (log_completions=True); trainer_state.json
    verl       STEP.jsonl (trainer.rollout_data_dir): input, output, score, step, uid
    verifiers  traces.jsonl (0.4), or results.jsonl (releases before it; one evaluation, no steps)

What is read is bounded: MAX_BYTES of a file, MAX_EPISODES, and each text in linear time. What does
not have its form raises AgentR1Error.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from yaml import YAMLError

from agent_r1 import AgentR1Error, first_line, json_records, parse_yaml, read_file

Record = Mapping[str, Any]
STEP = "training/global_step"
SPAN = 5
"""Steps of a mean."""
MAX_BYTES = 1 << 30
"""Of one file of episodes or metrics."""
MAX_CONFIG_BYTES = 1 << 20
MAX_FILES = 10_000
MAX_LINES = 1_000_000
"""Steps of metrics."""
MAX_EPISODES = 200_000
MAX_CHARS = 1 << 29
"""Of the texts of all episodes; equal rows make them larger than their file."""
MAX_NUMBER = 1e100
"""Larger figures are damage: their sums and squares would not be finite."""
FORMS = (
    "a run of Agent-R1 (metrics.jsonl, rollouts/), TRL (completions/), verl (1.jsonl) or "
    "verifiers (traces.jsonl)"
)
BOX = re.compile(r"\\boxed\{([^{}]*)\}")
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
    is_cut: bool | None = None  # by a limit on tokens
    advantage: float | None = None
    record: Record = field(default_factory=dict)  # of Agent-R1, with tokens
    has_mark: bool = False
    """Whether the answer stood between marks, such as <answer> and </answer>."""


@dataclass(frozen=True)
class Evidence:
    """What a folder holds."""

    source: str
    lines: list[dict[str, float]]  # a step's metrics, under Agent-R1's names
    episodes: list[Episode]
    config: Mapping[str, Any] = field(default_factory=dict)
    """The settings of a run of Agent-R1; empty where they are not recorded."""

    def series(self, key: str) -> list[float]:
        return [line[key] for line in self.lines if key in line]

    def first(self, key: str) -> float:
        """Return the mean of the first steps; 0 without the metric."""
        return mean(self.series(key)[:SPAN])

    def last(self, key: str) -> float:
        return mean(self.series(key)[-SPAN:])

    def setting(self, section: str, name: str) -> Any:
        """Return a setting of the run, or None if it is not recorded."""
        values = self.config.get(section)
        if isinstance(values, Mapping):
            return values.get(name)
        return None

    @property
    def episode_count(self) -> str:
        """Say how many episodes are recorded, and of how many if the settings tell."""
        count = f"{len(self.episodes):,}"
        prompts = self.setting("rollout", "prompts_per_step")
        samples = self.setting("rollout", "samples_per_prompt")
        if type(prompts) is not int or type(samples) is not int:
            return f"{count} episodes"
        total = len(self.lines) * prompts * samples
        if total <= len(self.episodes):
            return f"{count} episodes"
        return f"{count} recorded of {total:,} episodes"


Reader = Callable[[Record], Episode | None]
"""Reads a record; None if it counts for nothing."""
Form = tuple[Reader, list[dict[str, float]]]
"""What reads a record, and the metrics of a folder, if it has any."""


def mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def read_evidence(folder: Path) -> Evidence:
    """Read the first form that `folder` has.

    Raises AgentR1Error for none, and for damaged files.
    """
    if not folder.is_dir():
        raise AgentR1Error(f"{folder} is not a folder; name {FORMS}", code="missing_folder")
    for source, pattern, open_form in READERS:
        files = list_files(folder, pattern)
        if not files:
            continue
        reader, lines = open_form(folder)
        episodes = list(_episodes(source, files, reader))
        if not episodes and not lines:
            raise AgentR1Error(f"{files[0]} holds no episode", code="no_episode")
        if not lines:
            lines = list(_metrics_of(episodes))
        config = _our_config(folder) if source == "Agent-R1" else {}
        return Evidence(source, lines, episodes, config)
    lines = _our_metrics(folder)
    if lines:
        return Evidence("Agent-R1", lines, [], _our_config(folder))
    raise AgentR1Error(
        f"{folder} has no file of a known form; name the folder of {FORMS}", code="unknown_form"
    )


def list_files(folder: Path, pattern: str) -> list[Path]:
    """List the regular files of a pattern, sorted. A pipe would never end, so it is left out."""
    try:
        paths = list(islice(folder.glob(pattern), MAX_FILES + 1))
        if len(paths) > MAX_FILES:
            raise AgentR1Error(
                f"{folder} has more than {MAX_FILES} files of episodes; name a smaller folder",
                code="too_large",
            )
        return sorted(path for path in paths if path.is_file())
    except OSError as error:
        raise _unreadable(folder, error) from None


def _unreadable(path: Path, error: BaseException) -> AgentR1Error:
    return AgentR1Error(f"{path} cannot be read ({first_line(error)})", code="unreadable_file")


def _check_size(file: Path, limit: int = MAX_BYTES) -> None:
    try:
        size = file.stat().st_size
    except OSError as error:
        raise _unreadable(file, error) from None
    if size > limit:
        raise AgentR1Error(
            f"{file} has more than {limit >> 20} MB; name a folder with fewer steps",
            code="too_large",
        )


def _episodes(source: str, files: list[Path], reader: Reader) -> Iterator[Episode]:
    count = 0
    characters = 0
    for file in files:
        for place, record in _records(file):
            try:
                episode = reader(record)
                if episode is not None:
                    check_episode(episode)
            # RecursionError: `str` of a value with thousands of brackets. OverflowError: a number
            # of 400 digits.
            except (
                KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError,
                RecursionError,
            ) as error:  # fmt: skip
                missing = f"no {error}" if isinstance(error, KeyError) else first_line(error)
                raise AgentR1Error(
                    f"{place} is not an episode of {source} ({missing})", code="bad_episode"
                ) from None
            if episode is None:
                continue
            count += 1
            characters += len(episode.text) + len(episode.question)
            if count > MAX_EPISODES or characters > MAX_CHARS:
                raise AgentR1Error(
                    f"{file.parent} has more than {MAX_EPISODES} episodes or {MAX_CHARS} "
                    "characters; name a folder with fewer steps",
                    code="too_large",
                )
            yield episode


def check_episode(episode: Episode) -> None:
    """Raise TypeError or ValueError for a field that is not what `Episode` says."""
    if type(episode.step) is not int or not 0 <= episode.step < 1 << 53:
        raise ValueError(f"step is {str(episode.step)[:40]!r}, not a whole number")
    for name in ("question", "group", "answer", "text"):
        if not isinstance(getattr(episode, name), str):
            raise TypeError(f"{name} is no text")
    if episode.is_cut not in (None, True, False):
        raise TypeError("whether it was cut off is not true or false")
    numbers = {"reward": episode.reward}
    if episode.advantage is not None:
        numbers["advantage"] = episode.advantage
    for name, value in numbers.items():
        if not is_number(value):
            raise ValueError(f"{name} is no finite number")
    if episode.record:
        check_record(episode.record)


def is_number(value: Any) -> bool:
    """Say whether a value is a number of moderate size. NaN is not."""
    return type(value) in (int, float) and abs(value) < MAX_NUMBER


def are_numbers(values: Iterable[Any]) -> bool:
    return all(is_number(value) for value in values)


def check_texts(name: str, values: Any) -> None:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise TypeError(f"{name} is no list of texts")


def check_record(record: Record) -> None:
    """Check the form of a record of Agent-R1, as `causes.py` reads it.

    Raises TypeError, ValueError and KeyError.
    """
    for row in record["rows"]:
        length = len(row["tokens"])
        check_texts("tokens", row["tokens"])
        for key in ("action_mask", "rewards"):
            if len(row[key]) != length or not are_numbers(row[key]):
                raise ValueError(f"{key} has not a number for each token")
    for step in record["steps"]:
        if not isinstance(step["text"], str):
            raise TypeError("the text of a step is no text")
        for call in step["info"].get("tool_calls") or ():
            if not isinstance(call["content"], str):
                raise TypeError("the content of a call is no text")
    check_texts("ground_truth", record["ground_truth"])
    for key in ("kind", "stop_reason"):
        if not isinstance(record.get(key, ""), str):
            raise TypeError(f"{key} is no text")
    for key in ("reward_parts", "metrics"):
        values = record.get(key) or {}
        if not isinstance(values, dict) or not are_numbers(values.values()):
            raise TypeError(f"{key} is no object of numbers")
    if not is_number(record.get("process") or 0):
        raise TypeError("process is no number")


def _records(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield the place and the value of each record of a JSON-lines or parquet file."""
    _check_size(file)
    if file.suffix != ".parquet":
        for place, record in json_records(file):
            yield f"{file}, {place}", record
        return
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        # In batches: equal rows are compressed so well that a small file may fill the memory.
        with pyarrow.parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{file}, row {number}", row
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise _unreadable(file, error) from None


def _metrics_of(episodes: list[Episode]) -> Iterator[dict[str, float]]:
    """Yield metrics of each step, from its episodes alone."""
    episodes_by_step: dict[int, list[Episode]] = defaultdict(list)
    for episode in episodes:
        episodes_by_step[episode.step].append(episode)
    for step in sorted(episodes_by_step):
        batch = episodes_by_step[step]
        rewards_by_group: dict[str, list[float]] = defaultdict(list)
        for episode in batch:
            rewards_by_group[episode.group].append(episode.reward)
        line: dict[str, float] = {
            STEP: step,
            "critic/score/mean": fmean(episode.reward for episode in batch),
            "tool_calls/mean": fmean(len(episode.calls) for episode in batch),
            # four characters a token, roughly
            "response_length/mean": fmean(len(episode.text) / 4 for episode in batch),
        }
        ties = []
        for rewards in rewards_by_group.values():
            if len(rewards) > 1:
                ties.append(max(rewards) == min(rewards))
        if ties:
            line["groups/zero_advantage"] = fmean(ties)
        cuts = [episode.is_cut for episode in batch if episode.is_cut is not None]
        if cuts:
            line["stop/max_tokens"] = fmean(cuts)
        yield line


# ---------------------------------------------------------------------------- metrics and settings


def _our_config(folder: Path) -> Mapping[str, Any]:
    """Read the settings of a run of Agent-R1. Nothing that they name is imported."""
    file = folder / "config.yaml"
    if not file.is_file():
        return {}
    _check_size(file, MAX_CONFIG_BYTES)
    try:
        config = parse_yaml(read_file(file).decode())
    except (OSError, ValueError, YAMLError, RecursionError) as error:
        raise _unreadable(file, error) from None
    if not isinstance(config, Mapping):
        raise AgentR1Error(f"{file} holds no settings", code="unreadable_file")
    return config


def _our_metrics(folder: Path) -> list[dict[str, float]]:
    files = list_files(folder, "metrics.jsonl*")
    if not files:
        return []
    _check_size(files[0])
    records = []
    for _, record in json_records(files[0]):
        if isinstance(record, dict) and STEP in record:
            records.append(record)
    return numeric_lines(files[0], records)


def numeric_lines(file: Path, records: Iterable[Record]) -> list[dict[str, float]]:
    """Keep what is a number of each line. Raises AgentR1Error for a line without a step."""
    lines = []
    for record in records:
        line = {key: value for key, value in record.items() if is_number(value)}
        if STEP not in line:
            raise AgentR1Error(
                f"{file}: {STEP} is {str(record.get(STEP))[:40]!r}, not a number",
                code="bad_metrics",
            )
        lines.append(line)
        if len(lines) > MAX_LINES:
            raise AgentR1Error(f"{file} has more than {MAX_LINES} steps", code="too_large")
    return lines


def _trl_state(folder: Path) -> tuple[Path, list[Record]]:
    """Read the newest trainer_state.json, if there is one."""
    files = list_files(folder, "**/trainer_state.json")
    if not files:
        return folder, []
    try:
        file = max(files, key=lambda path: path.stat().st_mtime)
        _check_size(file)
        state = parse_json_file(file)
        return file, [line for line in state["log_history"] if "reward" in line]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unreadable(files[-1], error) from None


def parse_json_file(file: Path) -> Any:
    """Read a JSON file of one value. Raises ValueError."""
    text = read_file(file).decode()
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _trl_folder(folder: Path) -> Form:
    """Read TRL's metrics, and learn the names of its reward functions from them."""
    file, history = _trl_state(folder)
    reward_names = set()
    records = []
    for state in history:
        for key in state:
            match = re.fullmatch("rewards/(.+)/mean", key)
            if match:
                reward_names.add(match[1])
        records.append({ours: state[theirs] for theirs, ours in TRL.items() if theirs in state})
    return partial(_trl, reward_names=reward_names), numeric_lines(file, records)


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
    advantages = []
    for row in record["rows"]:
        for advantage, mask in zip(row["advantages"] or (), row["action_mask"], strict=False):
            if mask:
                advantages.append(advantage)
    calls = []
    texts = []
    for step in record["steps"]:
        texts.append(step["text"])
        for call in step["info"].get("tool_calls") or ():
            calls.append(str(call["arguments"]))
    answer, has_mark = answer_in(texts[-1] if texts else "")
    return Episode(
        step=record["step"] or 0,
        question=record["question"],
        group=record["group_id"],
        answer=answer,
        reward=record["reward"],
        calls=calls,
        text="\n".join(texts),
        is_cut=record["stop_reason"] == "max_tokens",
        advantage=advantages[-1] if advantages else None,
        record=record,
        has_mark=has_mark,
    )


def _make_episode(
    messages: Any, *, step: int, question: str, group: str, reward: float, **others: Any
) -> Episode:
    """Make an episode of another project from its messages, or from its text."""
    text, calls = text_and_calls(messages)
    answer, has_mark = answer_in(text)
    return Episode(step, question, group, answer, reward, calls, text, has_mark=has_mark, **others)


def _trl(record: Record, reward_names: Set[str]) -> Episode | None:
    """Read a row.

    Its rewards are the columns of `reward_names`, or all numbers; NaN stands where a reward does
    not apply.
    """
    others = {"step", "prompt", "completion", "advantage"}
    rewards = []
    for name, value in record.items():
        is_reward = name in reward_names or not reward_names
        if is_reward and name not in others and type(value) in (int, float):
            rewards.append(value)
    if not rewards:
        raise KeyError("reward")
    rewards = [value for value in rewards if not math.isnan(value)]
    if not rewards:
        return None
    return _make_episode(
        record["completion"],
        step=record["step"],
        question=text_of(record["prompt"]),
        group=text_of(record["prompt"]),
        reward=sum(rewards),
        advantage=record.get("advantage"),
    )


def _verl(record: Record) -> Episode:
    """Read a row.

    A `uid` is PROMPT_SAMPLE_OUTPUT, which has two numbers at its end, or the prompt's alone.
    """
    return _make_episode(
        record["output"],
        step=record["step"],
        question=record["input"],
        group=re.sub(r"_\d+_\d+$", "", str(record.get("uid", record["input"]))),
        reward=float(record["score"]),
    )


def _results(record: Record) -> Episode:
    question, _ = text_and_calls(record["prompt"])
    return _make_episode(
        record["completion"],
        step=0,
        question=question,
        group=str(record["example_id"]),
        reward=float(record["reward"]),
        is_cut=record.get("is_truncated"),
    )


def _traces(record: Record) -> Episode | None:
    """Read an episode: its first trace that trains the policy."""
    trace = None
    for candidate in record["traces"]:
        if candidate["agent"].get("trainable", True):
            trace = candidate
            break
    if trace is None:
        return None
    rewards = [reward for reward in trace["rewards"].values() if reward]
    if not rewards:  # it failed before it was scored
        return None
    users = []
    others = []
    for node in trace["nodes"]:
        message = node["message"]
        if message["role"] == "user":
            users.append(message)
        elif message["role"] in ("assistant", "tool"):
            others.append(message)
    question, _ = text_and_calls(users[:1])
    work = (record.get("run") or {}).get("work") or {}
    group = (record.get("group") or {}).get("id") or record["task"].get("hash") or question
    return _make_episode(
        others,
        step=work.get("step", 0),
        question=question,
        group=group,
        reward=sum(reward["score"] * reward.get("weight", 1.0) for reward in rewards),
        is_cut=str(trace.get("stop_condition")).endswith(("_tokens", "context_length")),
    )


# ------------------------------------------------------------------------------------------- texts


def between(text: str, start: str, end: str) -> tuple[list[str], str]:
    """Split `text` into what stands between the marks, and the text around those parts.

    Both searches only move forward, so n unclosed marks take time linear in n. A regular
    expression such as `<a>(.*?)</a>` looks for the end of each anew.
    """
    inside = []
    outside = []
    place = 0
    while True:
        start_at = text.find(start, place)
        end_at = text.find(end, start_at + len(start)) if start_at >= 0 else -1
        if end_at < 0:
            outside.append(text[place:])
            return inside, "".join(outside)
        outside.append(text[place:start_at])
        inside.append(text[start_at + len(start) : end_at])
        place = end_at + len(end)


def text_and_calls(messages: Any) -> tuple[str, list[str]]:
    """Return the agent's text, and its calls, from messages or plain text."""
    if isinstance(messages, str):
        _, text = between(messages, "<tool_response>", "</tool_response>")
        calls, _ = between(text, "<tool_call>", "</tool_call>")
        return text, calls
    texts = []
    calls = []
    for message in messages or ():
        if message.get("role") not in ("system", "tool"):
            texts.append(text_of(message.get("content")))
            calls += [str(call) for call in message.get("tool_calls") or ()]
    text = "\n".join(texts)
    if not calls:
        calls, _ = between(text, "<tool_call>", "</tool_call>")
    return text, calls


def text_of(content: Any) -> str:
    """Return a message's text, which may be in parts; or the texts of messages."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content or ():
        texts.append(str(part.get("text") or part.get("content") or ""))
    return " ".join(texts)


def answer_in(text: str) -> tuple[str, bool]:
    """Return the answer, and whether it is marked; else the text's last line."""
    answers, _ = between(text, "<answer>", "</answer>")
    answers += BOX.findall(text)
    if answers:
        return answers[-1].strip(), True
    lines = text.strip().splitlines() or [""]
    return lines[-1].strip()[:LAST_CHARS], False


READERS: tuple[tuple[str, str, Callable[[Path], Form]], ...] = (
    ("Agent-R1", "rollouts/step_*.jsonl*", lambda folder: (_ours, _our_metrics(folder))),
    ("TRL", "**/completions_*.parquet", _trl_folder),
    ("verifiers", "**/results.jsonl", lambda folder: (_results, [])),
    ("verifiers", "**/traces.jsonl", lambda folder: (_traces, [])),
    ("verl", "[0-9]*.jsonl", lambda folder: (_verl, [])),
)
"""Source, its files of episodes, and its reader; in the order in which they are tried."""
