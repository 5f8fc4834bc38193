"""What a person sees while the agent learns: curves in a terminal, plain lines in a pipe.

In: the metrics of each step and, now and then, a transcript, from the loop. Out: characters on a screen. The same
numbers go to `metrics.jsonl` (`log.py`) and come back, drawn properly, in report.html (`inspect/report.py`).

The dashboard must not cost what it reports on. So there is no refresh thread competing with PyTorch for the cores: the
screen is painted inside `step`, at most four times a second. And model text is hostile: it is cleaned of control
characters and handed to rich as `Text`, whose contents are never read as markup.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from agent_r1.training.log import STEP, VAL_EM, step_times, with_val_em
from agent_r1.ui import clean, duration

KEPT = 600
"""Steps of history on the screen."""
AGREED = 3
"""Steps in a row that teach nothing, after which the dashboard says so."""
_BARS = "▁▂▃▄▅▆▇█"
_SECONDS_BETWEEN_PAINTS = 0.25


@dataclass(frozen=True)
class RunInfo:
    """What stands in the header."""

    run: str
    preset: str
    algorithm: str
    model: str
    """For example "0.52 M parameters"."""
    device: str
    """For example "cpu, 2 threads"."""
    steps: int
    """The last step of the run."""


@dataclass(frozen=True)
class Gauge:
    """One line of the dashboard."""

    key: str
    label: str
    digits: int
    unit: str = ""
    colour: str = "cyan"
    span: tuple[float, float] | None = None
    """Fixed ends of the sparkline's scale; without it, the smallest and largest value on the screen."""


GAUGES = (
    Gauge("reward/em", "EM, train sampled", 2, colour="green", span=(0, 1)),
    Gauge(VAL_EM, "val, greedy", 2, colour="bright_green", span=(0, 1)),
    Gauge("critic/score/mean", "reward", 2, colour="green"),
    Gauge("tool_calls/mean", "calls per question", 2, colour="magenta"),
    Gauge("episode/evidence", "evidence found", 2, colour="magenta", span=(0, 1)),
    Gauge("actor/entropy", "entropy", 2),
    Gauge("actor/ppo_kl", "KL to the sampler", 4),
    Gauge("timing_s/step", "step time", 2, " s", "yellow"),
    Gauge("perf/agent_tokens_per_s", "sampled tokens/s", 0, colour="yellow"),
)
"""Keys that both engines write. An evaluation comes now and then; until the first one its gauge has no line."""

LEGEND = (
    "Ctrl-C finishes the step and saves; --resume goes on from there",
    "EM: share of exact answers · entropy: how undecided it is, nats a token · KL: how far an update moves it",
)


class Dashboard:
    """Shows a run from `with` to its end.

    `history` are earlier lines of metrics.jsonl, so that the curves of a resumed run go on. `plain` forces one line a
    step (True) or the live view (False); None lets the terminal decide: no terminal, NO_COLOR or a terminal that cannot
    show the bars means plain.
    """

    def __init__(
        self,
        info: RunInfo,
        *,
        history: Iterable[Mapping[str, Any]] = (),
        plain: bool | None = None,
        console: Console | None = None,
    ):
        self.info = info
        self.console = console or Console(highlight=False)
        self.plain = _needs_plain(self.console) if plain is None else plain
        self._live: Live | None = None
        self._values: dict[str, list[float | None]] = {gauge.key: [] for gauge in GAUGES}
        self._first: dict[str, float] = {}
        self._last: Mapping[str, Any] = {}
        self._transcript: list[tuple[str, Text]] = []
        """Who speaks, and what is said."""
        self._note = ""
        self._done_here = self._agreed = 0
        self._started = self._painted = time.monotonic()
        for metrics in history:
            self._remember(metrics)

    def __enter__(self) -> Dashboard:
        self._started = time.monotonic()
        if not self.plain:
            self._live = Live(self._view(), console=self.console, auto_refresh=False, vertical_overflow="crop")
            self._live.start(refresh=True)
        return self

    def __exit__(self, *error: object) -> None:
        if self._live:
            self._live.update(self._view(), refresh=True)
            self._live.stop()
            self._live = None

    # ------------------------------------------------------------------------------------------------ what comes in

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Show one RL step; `metrics` is the line that goes to metrics.jsonl."""
        metrics = with_val_em(metrics)
        self._remember(metrics)
        self._done_here += 1
        if self.plain:
            self._say(plain_line(metrics, self.info.steps, self._eta()))
        else:
            self._paint()
        self._agreed = self._agreed + 1 if metrics.get("groups/zero_advantage") == 1 else 0
        if self._agreed == AGREED:
            self.note(
                f"{AGREED} steps in a row no group had a better and a worse sample: nothing was learnt. Look at rollouts/; "
                "other questions, a higher rollout.temperature or more samples_per_prompt may help"
            )

    def transcript(self, question: str, steps: Sequence[Mapping[str, Any]], reward: float) -> None:
        """Show one sampled episode; `steps` are those of a rollout line: {"text": ..., "info": {"tool_calls": ...}}.

        Plain output leaves it out: a log of lines is for numbers, and rollouts/ has the whole text.
        """
        self._transcript = [("", Text(f"A sampled episode, reward {reward:.2f}", style="dim"))]
        self._transcript.append(("asked", Text(_squeeze(question), style="bold")))
        for step in steps:
            self._transcript.append(("agent", style_turn(step.get("text", ""))))
            for call in step.get("info", {}).get("tool_calls", []):
                self._transcript.append(("tool", Text(_squeeze(str(call.get("content", ""))), style="dim")))
        if not self.plain:
            self._paint()

    def note(self, text: str) -> None:
        """Say one line that is not about a step (a checkpoint, a warning)."""
        self._note = _squeeze(text)
        if self.plain:
            self._say(self._note)
        else:
            self._paint(now=True)

    # ------------------------------------------------------------------------------------------------- bookkeeping

    def _remember(self, metrics: Mapping[str, Any]) -> None:
        self._last = metrics
        for key, values in self._values.items():
            value = _finite(metrics.get(key))
            if value is not None:
                self._first.setdefault(key, value)
            # One entry a step for every gauge, so that the curves stand above one another: between two evaluations the
            # last one holds.
            values.append(value if value is not None else values[-1] if values else None)
            del values[:-KEPT]

    def _eta(self) -> float | None:
        """Seconds to go at this process's own pace, evaluations and checkpoints included."""
        if not self._done_here:
            return None
        left = max(0, self.info.steps - int(self._last.get(STEP, 0)))
        return (time.monotonic() - self._started) / self._done_here * left

    def _say(self, line: str) -> None:
        encoding = self.console.encoding or "utf-8"
        try:
            self.console.file.write(line.encode(encoding, "replace").decode(encoding) + "\n")
            self.console.file.flush()
        except (OSError, ValueError):
            # Whoever read us has gone (`| head`, a closed terminal). metrics.jsonl has the numbers; the run goes on.
            return

    # ------------------------------------------------------------------------------------------------ the live view

    def _paint(self, now: bool = False) -> None:
        due = time.monotonic() - self._painted >= _SECONDS_BETWEEN_PAINTS
        if self._live and (now or due or self._done_here <= 1):
            self._painted = time.monotonic()
            self._live.update(self._view(), refresh=True)

    def _view(self) -> Group:
        """The whole screen as lines that are cut to the terminal: rich has nothing left to lay out, which is fast."""
        width, height = self.console.size
        lines = [*self._header(width), Text(""), *self._gauge_lines(width), self._time_line()]
        if height >= 20:
            lines += [Text(""), *(Text(line, style="dim") for line in LEGEND)]
        room = height - len(lines) - 3
        if self._transcript and room > 5:
            lines += [Text(""), *self._transcript_lines(width, room)]
        if self._note:
            lines += [Text(""), Text(self._note, style="dim italic")]
        for line in lines:
            line.no_wrap = True
            line.truncate(width, overflow="ellipsis")
        return Group(*lines)

    def _header(self, width: int) -> list[Text]:
        info, step = self.info, int(self._last.get(STEP, 0))
        title = Text.assemble(("agent-r1", "bold cyan"), "  ", (clean(info.run), "bold"))
        title.append(f"   preset {info.preset} · {info.algorithm} · {info.model} · {info.device}", style="dim")
        share = step / info.steps if info.steps else 1.0
        cells = max(10, min(40, width - 50))
        filled = round(cells * min(1.0, share))
        eta = self._eta()
        bar = Text.assemble(
            f"step {step:>{len(str(info.steps))}}/{info.steps} ",
            ("━" * filled, "cyan"),
            ("─" * (cells - filled), "bright_black"),
            f" {share:4.0%}   {duration(time.monotonic() - self._started)} passed",
            "" if eta is None else f", {duration(eta)} to go",
        )
        return [title, bar]

    def _gauge_lines(self, width: int) -> list[Text]:
        spark = width - 56 if width >= 72 else 0
        long = any(len(values) > 10 for values in self._values.values())
        columns = f"{'':20}{'now':>10}" + (f"{'start':>10}{'10 ago' if long else '':>10}" if width >= 52 else "")
        lines = [Text(columns, style="dim")]
        for gauge in GAUGES:
            values = self._values[gauge.key]
            if gauge.key not in self._first:
                continue
            line = Text(f"{gauge.label:20}")
            line.append(f"{_figure(gauge, values[-1]):>10}", style="bold")
            if width >= 52:
                ago = values[-11] if len(values) > 10 else None
                line.append(f"{_figure(gauge, self._first[gauge.key]):>10}{_figure(gauge, ago):>10}")
            if spark:
                line.append("   " + sparkline(values, spark, gauge.span), style=gauge.colour)
            lines.append(line)
        return lines

    def _time_line(self) -> Text:
        parts = [f"{name} {seconds:.2f} s" for name, seconds in step_times(self._last).items() if seconds]
        return Text(f"{'':20}{' · '.join(parts)}", style="dim")

    def _transcript_lines(self, width: int, room: int) -> list[Text]:
        lines = [piece for label, text in self._transcript for piece in _wrap(self.console, label, text, width)]
        if len(lines) > room:
            # The end of an episode says more than its middle: keep the question and the answer.
            kept = room - 3
            lines[2:] = [Text(f"        … {len(lines) - 2 - kept} lines", style="dim"), *lines[len(lines) - kept :]]
        return lines


# ------------------------------------------------------------------------------------------------------ small parts


def plain_line(metrics: Mapping[str, Any], steps: int, eta: float | None) -> str:
    """One step as one line of text, for example
    `step  12/100  em .41  reward .38  calls 1.62  entropy .31  kl .0020  0.61 s  eta 54 s`."""
    parts = [f"step {int(metrics.get(STEP, 0)):>{len(str(steps))}}/{steps}"]
    shown = (
        ("em", "reward/em", 2),
        ("reward", "critic/score/mean", 2),
        ("calls", "tool_calls/mean", 2),
        ("entropy", "actor/entropy", 2),
        ("kl", "actor/ppo_kl", 4),
        ("val", VAL_EM, 2),
    )
    parts += [f"{name} {_short(metrics[key], digits)}" for name, key, digits in shown if metrics.get(key) is not None]
    if metrics.get("timing_s/step") is not None:
        parts.append(f"{metrics['timing_s/step']:.2f} s")
    if eta is not None:
        parts.append(f"eta {duration(eta)}")
    return "  ".join(parts)


def sparkline(values: Sequence[float | None], width: int, span: tuple[float, float] | None = None) -> str:
    """`values` as at most `width` bars; more values than bars are averaged, so the picture covers all of them.

    None is a blank. `span` are the ends of the scale (by default the smallest and the largest bar).
    """
    n = min(len(values), width)
    edges = [i * len(values) // n for i in range(n + 1)] if n else [0]
    bars = [_mean(values[a:b]) for a, b in pairwise(edges)]
    known = [bar for bar in bars if bar is not None]
    low, high = span or (min(known, default=0.0), max(known, default=0.0))
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    clipped = (" " if bar is None else _BARS[round((min(max(bar, low), high) - low) * scale)] for bar in bars)
    return "".join(clipped)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


# A tag that a turn opened and never closed runs to the end of the turn, as the environment reads it too.
_TAGGED = re.compile(r"<(think|tool_call|answer)>.*?(?:</\1>|$)", re.DOTALL)
_TAG_STYLE = {"think": "dim italic", "tool_call": "cyan", "answer": "bold green"}


def style_turn(text: str) -> Text:
    """A turn with its thoughts dimmed, its calls coloured and its answer bold."""
    text, styled, start = _squeeze(text), Text(), 0
    for match in _TAGGED.finditer(text):
        styled.append(text[start : match.start()])
        styled.append(match[0], style=_TAG_STYLE[match[1]])
        start = match.end()
    styled.append(text[start:])
    return styled


def _needs_plain(console: Console) -> bool:
    # isatty too: FORCE_COLOR makes rich call a pipe a terminal, and cursor movements would fill the log.
    if not (console.is_terminal and console.file.isatty()) or console.no_color or console.is_dumb_terminal:
        return True
    try:
        _BARS.encode(console.encoding)
    except (UnicodeEncodeError, LookupError):
        return True
    return False


def _finite(value: Any) -> float | None:
    """A diverging run must be seen, not crash the screen: NaN and infinity leave the curve where it was."""
    return float(value) if value is not None and math.isfinite(value) else None


def _squeeze(text: str) -> str:
    """Cleaned and on one line."""
    return " ".join(clean(text).split())


def _wrap(console: Console, label: str, text: Text, width: int) -> list[Text]:
    """An entry of the transcript with its label in the margin, in at most three lines."""
    width = max(10, width - 8)
    # A hostile turn can be very long, and wrapping costs time for every word of it: cut before wrapping.
    lines = list(text[: 3 * width].wrap(console, width))
    if len(text) > 3 * width or len(lines) > 3:
        lines = lines[:3]
        lines[-1].truncate(width - 2)
        lines[-1].append(" …")
    margins = (f"{label:>6}  ", *[" " * 8] * len(lines))
    return [Text.assemble((margin, "bright_black"), line) for margin, line in zip(margins, lines, strict=False)]


def _figure(gauge: Gauge, value: float | None) -> str:
    return "" if value is None else f"{round(value, gauge.digits) + 0.0:,.{gauge.digits}f}{gauge.unit}"  # no -0.0000


def _short(value: float, digits: int) -> str:
    """Without the zero before the point: shares are what most of these numbers are."""
    text = f"{round(value, digits) + 0.0:.{digits}f}"
    return text.replace("0.", ".", 1) if text.lstrip("-").startswith("0.") else text
