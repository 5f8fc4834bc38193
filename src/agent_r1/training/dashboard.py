"""What a person sees while the agent learns: curves in a terminal, plain lines in a pipe.

In: the metrics of each step and, now and then, a transcript, from the loop. Out: characters on a screen. The same
numbers go to `metrics.jsonl` (`log.py`) and come back, drawn properly, in report.html (`inspect/report.py`).

The screen is painted inside `step`, at most four times a second: a refresh thread would compete with PyTorch for the
cores. Model text is hostile: it is cleaned of control characters and handed to rich as `Text`, which is never read as
markup.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from agent_r1.env.hermes import split_turn
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


class Gauge(NamedTuple):
    """One line of the dashboard."""

    key: str
    label: str
    digits: int
    colour: str = "cyan"
    span: tuple[float, float] | None = None
    """Fixed ends of the sparkline's scale; without it, the smallest and largest value on the screen."""


GAUGES = (
    Gauge("reward/em", "EM, train sampled", 2, "green", (0, 1)),
    Gauge(VAL_EM, "val, greedy", 2, "bright_green", (0, 1)),
    Gauge("critic/score/mean", "reward", 2, "green"),
    Gauge("tool_calls/mean", "calls per question", 2, "magenta"),
    Gauge("episode/evidence", "evidence found", 2, "magenta", (0, 1)),
    Gauge("actor/entropy", "entropy", 2),
    Gauge("actor/ppo_kl", "KL to the sampler", 4),
    Gauge("timing_s/step", "seconds per step", 2, "yellow"),
    Gauge("perf/agent_tokens_per_s", "sampled tokens/s", 0, "yellow"),
)
"""Keys that both engines write (tests/test_report.py). An evaluation comes now and then; until the first one its gauge has
no line."""

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
            self._remember(with_val_em(metrics))

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
        self._transcript = [("asked", Text(f"{_one_line(question)} (reward {reward:.2f})", style="bold"))]
        for step in steps:
            self._transcript.append(("agent", style_turn(step.get("text", ""))))
            for call in step.get("info", {}).get("tool_calls", []):
                self._transcript.append(("tool", Text(_one_line(str(call.get("content", ""))), style="dim")))
        if not self.plain:
            self._paint()

    def note(self, text: str) -> None:
        """Say one line that is not about a step (a checkpoint, a warning)."""
        self._note = _one_line(text)
        if self.plain:
            self._say(self._note)
        else:
            self._paint(now=True)

    # ------------------------------------------------------------------------------------------------- bookkeeping

    def _remember(self, metrics: Mapping[str, Any]) -> None:
        self._last = metrics
        for key, values in self._values.items():
            value = metrics.get(key)
            # A diverging run must be seen, not crash the screen: NaN and infinity leave the curve where it was. So does
            # a step without an evaluation.
            if value is not None and math.isfinite(value):
                self._first.setdefault(key, value)
                values.append(value)
            else:
                values.append(values[-1] if values else None)
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
        """The screen; from the top what matters most, for a low terminal cuts it off below."""
        info, width, parts = self.info, self.console.width, step_times(self._last).items()
        about = f"   preset {info.preset} · {info.algorithm} · {info.model} · {info.device}"
        lines = [
            Text.assemble(("agent-r1", "bold cyan"), "  ", (clean(info.run), "bold"), (about, "dim")),
            self._bar(),
            self._gauges(width),
            Text(" · ".join(f"{name} {seconds:.2f} s" for name, seconds in parts if seconds), style="dim"),
            Text(self._note, style="dim italic"),
            *(Text(line, style="dim") for line in LEGEND),
        ]
        for line in lines:
            if isinstance(line, Text):
                line.truncate(width, overflow="ellipsis")
        return Group(*lines, self._episode(width))

    def _bar(self) -> Table:
        step, steps, eta = int(self._last.get(STEP, 0)), self.info.steps, self._eta()
        row = Table.grid(padding=(0, 1))
        row.add_row(
            Text(f"step {step:>{len(str(steps))}}/{steps}", no_wrap=True),
            ProgressBar(total=steps, completed=step, width=max(1, min(40, self.console.width - 55))),
            Text(
                f"{step / steps if steps else 1:4.0%}  {duration(time.monotonic() - self._started)} passed"
                + ("" if eta is None else f", {duration(eta)} to go"),
                no_wrap=True,
            ),
        )
        return row

    def _gauges(self, width: int) -> Table:
        """One line a gauge: its value now, at the start, ten steps ago, and its curve, as far as the width allows."""
        steps = len(self._values[VAL_EM])
        columns = [("now", "bold"), ("start", ""), ("10 ago", "")][: 1 if width < 52 else 3 if steps > 10 else 2]
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("", no_wrap=True)
        for name, style in columns:
            table.add_column(name, style=style, justify="right", no_wrap=True)
        if width >= 72:
            table.add_column("", no_wrap=True)
        for gauge in (gauge for gauge in GAUGES if gauge.key in self._first):
            values = self._values[gauge.key]
            shown = (values[-1], self._first[gauge.key], values[-11] if steps > 10 else None)
            cells = [gauge.label, *(_figure(gauge, value) for value in shown[: len(columns)])]
            if width >= 72:
                cells.append(Text(sparkline(values, width - 56, gauge.span), style=gauge.colour))
            table.add_row(*cells)
        return table

    def _episode(self, width: int) -> Table:
        """The question and the last turns of the transcript, one line each: the end says more than the middle."""
        room = max(2, self.console.height - len(self._first) - 9)
        rows = (
            self._transcript if len(self._transcript) <= room else [self._transcript[0], *self._transcript[1 - room :]]
        )
        table = Table.grid(padding=(0, 2, 0, 0))
        for label, text in rows:
            text = text[: 2 * width]  # a hostile turn can be very long, and rich reads every word of it
            text.truncate(max(1, width - 8), overflow="ellipsis")
            table.add_row(Text(label, style="bright_black"), text)
        return table


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
    groups = [[value for value in values[a:b] if value is not None] for a, b in pairwise(edges)]
    bars = [sum(group) / len(group) if group else None for group in groups]
    known = [bar for bar in bars if bar is not None]
    low, high = span or (min(known, default=0.0), max(known, default=0.0))
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    clipped = (" " if bar is None else _BARS[round((min(max(bar, low), high) - low) * scale)] for bar in bars)
    return "".join(clipped)


_STYLES = {"think": "dim italic", "tool_call": "cyan", "answer": "bold green", "text": ""}


def style_turn(text: str) -> Text:
    """A turn on one line without its tags: thoughts dim, calls coloured, the answer bold."""
    parts = [(_one_line(part.text), _STYLES[part.kind]) for part in split_turn(text)]
    return Text(" ").join(Text(words, style) for words, style in parts if words)


def _needs_plain(console: Console) -> bool:
    # isatty too: FORCE_COLOR makes rich call a pipe a terminal, and cursor movements would fill the log.
    if not (console.is_terminal and console.file.isatty()) or console.no_color or console.is_dumb_terminal:
        return True
    try:
        _BARS.encode(console.encoding)
    except (UnicodeEncodeError, LookupError):
        return True
    return False


def _one_line(text: str) -> str:
    return " ".join(clean(text).split())


def _figure(gauge: Gauge, value: float | None) -> str:
    return "" if value is None else f"{round(value, gauge.digits) + 0.0:,.{gauge.digits}f}"  # no -0.0000


def _short(value: float, digits: int) -> str:
    """Without the zero before the point: shares are what most of these numbers are."""
    text = f"{round(value, digits) + 0.0:.{digits}f}"
    return text.replace("0.", ".", 1) if text.lstrip("-").startswith("0.") else text
