"""Check an environment before training: `agent-r1 env check NAME`.

In: a name on the command line. Out: verdicts, and the transcript of each failure. `child.py` plays
in a process of its own; this one ends it at a limit of time, memory or output.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from argparse import Namespace
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from agent_r1 import ConfigError, clean, command, option, say, write_whole

SETUP_S = 300.0
"""Seconds to make rows and an index."""
MAX_OUTPUT = 1 << 20
"""Bytes that the environment may print."""
TAIL = 2000
"""Characters of its output that a failure shows."""
SHOWN_LINES = 12
"""Lines of a transcript."""
WIDTH = 240
"""Characters of such a line."""


@command(
    "env",
    "check an environment before training: is its reward paid without the work?",
    [
        "check tinyquest                             # a preset of ours, or --recipe FOLDER",
        "check game.py:Game env.max_turns=8          # a class; functions `questions` and "
        "`demonstrate` in its file are used",
        "check gym:corridor.py:Corridor",
        "check openenv env.url=http://127.0.0.1:8000",
        "check small 'env.mcp.rivers=\"python server.py\"' env.tools=[rivers]",
        "check my-task/                              # a folder with preset.yaml, or a Harbor task",
        "check two-doors.py:Doors env.floor=.5 env.floor_reason='random play finds one'",
    ],
    option("settings", nargs="*", metavar="check NAME|section.key=value",
           help="`check`, what to check, and settings"),
    option("--oracle", metavar="FILE.py:FUNCTION",
           help="a function (row, history) that plays well (default: `expert` next to the "
           "demonstrator, else the demonstrator's best plays)"),
    option("--questions", type=int, default=80, metavar="N",
           help="questions for each policy (default: 80, so that 0 of N shows less than .05)"),
    option("--minutes", type=float, default=5.0, help="time in all (default: 5)"),
    option("--step-seconds", type=float, default=30.0, help="time of one step (default: 30)"),
    option("--memory-gb", type=float, default=4.0, help="memory of the process (default: 4)"),
    option("--json", type=Path, metavar="FILE", help="also write verdicts and records to a file"),
)  # fmt: skip
def env(a: Namespace) -> int:
    """Run the command. Return 1 if a verdict is `fail`."""
    action, *words = a.settings or [""]
    if action != "check":
        raise ConfigError(
            f"agent-r1 env {action}: the only action is check, as in `agent-r1 env check "
            "tinyquest`",
            code="unknown_name",
        )
    names = [word for word in words if "=" not in word]
    if len(names) > 1 or not (names or a.preset):
        raise ConfigError(
            "env check takes one name, such as `agent-r1 env check tinyquest`, and settings "
            f"section.key=value; it got {' '.join(names) or 'none'}",
            code="missing_name",
        )
    # NaN is above nothing.
    limits = (a.questions, a.minutes, a.step_seconds, a.memory_gb)
    if not all(limit > 0 for limit in limits):
        raise ConfigError(
            "--questions, --minutes, --step-seconds and --memory-gb are above 0",
            code="out_of_range",
        )
    check = Check(names[0] if names else None, a.preset, _settings(words), a)
    return check.report()


def _settings(words: list[str]) -> list[str]:
    return [word for word in words if "=" in word]


@dataclass
class Watched:
    """What one child process did."""

    records: list[dict[str, Any]] = field(default_factory=list)
    again: list[dict[str, Any]] = field(default_factory=list)
    interleaved: list[dict[str, Any]] = field(default_factory=list)
    """Plays of the same turns, step by step next to another episode."""
    replays: list[tuple[list[str], int]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    refused: dict[str, Any] | None = None
    ended: bool = False
    broken: str | None = None
    """Why it was ended, or how it ended itself."""
    turns: list[str] = field(default_factory=list)
    """Turns of the episode that it was in."""
    place: tuple[str, int] | None = None
    """Policy and question of that episode."""

    def take(self, event: dict[str, Any]) -> None:
        """Add an event of `child.py`."""
        if "turn" in event:
            place = (event["policy"], event["question"])
            if place != self.place or event["turn"] == "[reset]":
                self.turns = []
            self.place = place
            self.turns.append(event["turn"])
        elif "episode" in event:
            self.records.append(event["episode"])
        elif "again" in event:
            self.again.append(event["again"])
        elif "replay" in event:
            self.replays.append((event["replay"], event["question"]))
        elif "interleaved" in event:
            self.interleaved.append(event["interleaved"])
        elif "refused" in event:
            self.refused = event
        elif "ready" in event:
            self.facts |= event
        elif "late" in event:
            self.facts["late"] = event["late"]
        self.ended = self.ended or "end" in event


class Check:
    """One call of the command."""

    def __init__(self, name: str | None, preset: str | None, settings: list[str], a: Namespace):
        self.plan: dict[str, Any] = {
            "name": name, "preset": preset, "settings": settings, "oracle": a.oracle,
            "questions": a.questions, "seconds": 60 * a.minutes,
            "memory": int(a.memory_gb * 2**30), "replay": [],
        }  # fmt: skip
        self.a = a

    def report(self) -> int:
        """Play, print all verdicts, and return the exit code."""
        from agent_r1_recipes.envcheck.policies import FAMILIES
        from agent_r1_recipes.envcheck.verdicts import Verdict, judge

        start = time.monotonic()
        first = self.watch(self.plan)
        if first.refused and not first.broken:
            print(f"agent-r1: {clean(first.refused['refused'])}", file=sys.stderr)
            return first.refused["exit_code"]
        facts = first.facts
        facts.setdefault("oracle", None)
        facts["families"] = {family: list(names) for family, names in FAMILIES.items()}
        verdicts: list[Verdict] = []
        if first.broken:
            policy, question = first.place or ("no policy", 0)
            text = f"{first.broken}, with {policy!r} on question {question}"
            turns = [f"agent> {turn}" for turn in first.turns]
            verdicts.append(Verdict("process", "fail", text, turns))
        elif first.replays:
            second = self.watch(self.plan | {"replay": first.replays})
            self.compare(first, second, facts)
        questions = len({record["question"] for record in first.records})
        is_early = questions < facts.get("late", self.a.questions)
        if not first.broken and (is_early or not first.records):
            # The environment shares the child's process, and may end it or write its events.
            text = f"it ended after {questions} of {self.a.questions} questions, without a cause"
            verdicts.append(Verdict("process", "fail", text))
        if first.records and not first.broken:
            verdicts += judge(first.records, facts)
        title = clean(self.plan["name"] or self.plan["preset"])
        say(
            f"{title}: {len(first.records)} episodes on {questions} questions in "
            f"{time.monotonic() - start:.0f} s"
        )
        if "late" in facts:
            say(f"the time was over (--minutes) after {facts['late']} questions")
        for verdict in verdicts:
            print(f"{verdict.state:5} {verdict.name:14} {clean(verdict.text)}")
        for verdict in verdicts:
            if verdict.state == "fail" and verdict.transcript:
                say(f"\n{verdict.name}:")
                for line in verdict.transcript[:SHOWN_LINES]:
                    print(f"  {clean(' '.join(line.split()))[:WIDTH]}")
        if self.a.json:
            result = {"verdicts": [asdict(one) for one in verdicts], "records": first.records}
            write_whole(self.a.json, json.dumps(result, indent=1) + "\n")
        return int(any(verdict.state == "fail" for verdict in verdicts))

    def compare(self, first: Watched, second: Watched, facts: dict[str, Any]) -> None:
        """Compare the plays of the same turns in one process and in another one."""
        from agent_r1_recipes.envcheck.child import REPLAY_POLICY

        record_of = {
            record["question"]: record
            for record in first.records
            if record["policy"] == REPLAY_POLICY
        }
        differences = []
        plays = {
            "one process": first.again,
            "another process": second.again,
            "one process, next to another episode": first.interleaved,
        }
        for where, records in plays.items():
            for record in records:
                original = record_of.get(record["question"], record)
                if record["trace"] != original["trace"]:
                    pairs = zip(original["trace"], record["trace"], strict=False)
                    place = next((i for i, (x, y) in enumerate(pairs) if x != y), "the end")
                    text = f"question {record['question']} in {where}, at part {place} of the trace"
                    lines = [*original["transcript"], "the second time:", *record["transcript"]]
                    differences.append({"text": text, "transcript": lines})
        facts["compared"] = sum(map(len, plays.values()))
        facts["differences"] = differences
        if second.broken:
            differences.append({"text": second.broken, "transcript": second.turns})

    # --------------------------------------------------------------------------- the process

    def watch(self, plan: dict[str, Any]) -> Watched:
        """Run a child process to its end or to a limit."""
        read_end, write_end = os.pipe()
        own_children = _children()
        _adopt_orphans(True)
        process: Any = subprocess.Popen(
            [sys.executable, "-m", "agent_r1_recipes.envcheck.child"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            pass_fds=[write_end], start_new_session=True,
        )  # fmt: skip
        os.close(write_end)
        watch = Watched()
        try:
            process.stdin.write(json.dumps(plan | {"events": write_end}).encode() + b"\n")
            process.stdin.close()
            tail = self._read_all(process, read_end, watch)
        except BrokenPipeError:
            tail = process.stdout.read(TAIL).decode(errors="replace")
        finally:
            os.close(read_end)
            _end(process)
            _end_orphans(own_children)
            _adopt_orphans(False)
        if not (watch.ended or watch.refused or watch.broken):
            last = " ".join(tail.split())[-200:]
            watch.broken = f"the environment ended the process (exit code {process.returncode})" + (
                f": {last}" if last else ""
            )
        return watch

    def _read_all(self, process: Any, events: int, watch: Watched) -> str:
        """Read events and output to their end or a limit; return the last output."""
        selector = selectors.DefaultSelector()
        selector.register(events, selectors.EVENT_READ)
        selector.register(process.stdout, selectors.EVENT_READ)
        rest, tail = b"", ""
        byte_count = 0
        start = last_event = time.monotonic()
        while events in {key.fd for key in selector.get_map().values()}:
            now = time.monotonic()
            limit = self.a.step_seconds if watch.facts else SETUP_S
            if now - last_event > limit:
                watch.broken = f"no answer within {limit:g} s (--step-seconds)"
                return tail
            if now - start > 2 * self.plan["seconds"] + SETUP_S:
                watch.broken = "it goes on after twice the time (--minutes)"
                return tail
            for key, _ in selector.select(timeout=0.2):
                chunk = os.read(key.fd, 1 << 16)
                if not chunk:
                    selector.unregister(key.fileobj)
                elif key.fd == events:
                    last_event = time.monotonic()
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        try:
                            event = checked_event(line)
                        except (ValueError, RecursionError) as error:
                            watch.broken = f"the environment wrote among our events ({error})"
                            return tail
                        watch.take(event)
                        if "ready" in event:  # what came before is ours: rows and an index
                            byte_count, tail = 0, ""
                else:
                    byte_count += len(chunk)
                    tail = (tail + chunk.decode(errors="replace"))[-TAIL:]
                    if byte_count > MAX_OUTPUT:
                        watch.broken = f"it printed more than {MAX_OUTPUT >> 20} MB"
                        return tail
        return tail


FORMS: dict[str, Any] = {
    "policy": str, "question": int, "reward": (int, float), "stop": str,
    "error": (str, type(None)), "transcript": list, "trace": list, "seconds": list, "sizes": list,
}  # fmt: skip
"""Fields of a record, as `Episode.record` makes them."""


def checked_event(line: bytes) -> dict[str, Any]:
    """Read one event of `child.py`. Raise ValueError unless it has an event's form.

    The environment lives in the same process, so it can write to the same descriptor.
    """
    event = json.loads(line)
    if not isinstance(event, dict):
        raise ValueError("a line is no event")
    for name in ("episode", "again", "interleaved"):
        if name not in event:
            continue
        record = event[name]
        if not isinstance(record, dict) or record.keys() != FORMS.keys():
            raise ValueError("a line is no record")
        if not all(isinstance(record[key], form) for key, form in FORMS.items()):
            raise ValueError("a record has fields of other types")
        if not math.isfinite(record["reward"]):
            raise ValueError("a record has no finite reward")
        texts = record["transcript"] + record["trace"]
        numbers = record["seconds"] + record["sizes"]
        is_good = all(isinstance(text, str) for text in texts)
        if not is_good or not all(isinstance(number, int | float) for number in numbers):
            raise ValueError("a record has parts of other types")
    if "turn" in event and not (
        isinstance(event["turn"], str) and {"policy", "question"} <= event.keys()
    ):
        raise ValueError("a line is no turn")
    if "refused" in event:
        code = event.get("exit_code")
        event["refused"] = str(event["refused"])[:1000]
        event["exit_code"] = code if type(code) is int and 0 < code < 128 else 1
    if "late" in event and type(event["late"]) is not int:
        raise ValueError("a line is no number of questions")
    return event


PR_SET_CHILD_SUBREAPER = 36


def _adopt_orphans(on: bool) -> None:
    """Become the parent of processes whose own parent has ended, in whatever session (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


def _children() -> set[int]:
    """Return this process's children; none where /proc does not tell."""
    children: set[int] = set()
    for file in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children.update(int(word) for word in file.read_text().split())
    return children


def _end_orphans(others: set[int]) -> None:
    """End what the environment left. `others` are children that were there before."""
    while orphans := _children() - others:
        for process in orphans:  # their own children come here next
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)


def _end(process: Any) -> None:
    """Give a process that has closed its events a second, then kill its whole group."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=1)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
