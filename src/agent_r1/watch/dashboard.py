"""Show training progress: a table in a terminal, plain lines in a pipe.

In: the metrics of each step and, sometimes, a transcript, from the loop. Out: characters on a
screen. The same numbers go to `metrics.jsonl` (`log.py`), and `watch/report.py` draws them in
report.html.

`step` paints the screen itself, at most four times a second: a refresh thread would compete with
PyTorch for the cores. Model text is untrusted: control characters are removed, and rich gets it as
`Text`, which it never parses as markup.
"""

from __future__ import annotations

import math
import os
import termios
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any, NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from agent_r1.env.dialect import Part
from agent_r1.env.hermes import split_turn
from agent_r1.ground.clean import clean
from agent_r1.ground.clean_console import CleanConsole
from agent_r1.ground.ui import duration, say
from agent_r1.watch.log import STEP_KEY, VAL_EM, step_times, validation_kinds, with_val_em
from agent_r1.watch.sentinel import Sign, is_solved, new_signs, signs, solved_step


class Gauge(NamedTuple):
    """A row of the live view. With a `short` name it is also part of the plain line."""

    key: str
    label: str
    digits: int
    short: str = ""


GAUGES = (
    Gauge("reward/em", "EM, train sampled", 2, "em"),
    Gauge(VAL_EM, "val, greedy", 2, "val"),
    Gauge("critic/score/mean", "reward", 2, "reward"),
    Gauge("tool_calls/mean", "calls per question", 2, "calls"),
    Gauge("episode/evidence", "evidence found", 2),
    Gauge("actor/entropy", "entropy", 2, "entropy"),
    Gauge("actor/ppo_kl", "KL to the sampler", 4, "kl"),
    Gauge("timing_s/step", "seconds per step", 2, "s"),
    Gauge("perf/agent_tokens_per_s", "sampled tokens/s", 0),
)
"""Keys that both engines write (tests/test_report.py). A gauge without a value yet has no row."""

LEGEND = (
    "Ctrl-C finishes the step and saves; --resume continues",
    "EM: share of exact answers · entropy: how undecided it is, nats per token · KL: how far an "
    "update moves it",
)
_SECONDS_BETWEEN_PAINTS = 0.25


class Dashboard:
    """Display of a run from `with` to its end.

    `name` and `about` form the header; `steps` is the run's last step.

    `history`: earlier lines of metrics.jsonl, for a resumed run's columns "start" and "10 ago".
    `parts` parses a turn of the agent's dialect. `plain` forces one line per step, and so do a
    pipe, NO_COLOR and a terminal without a progress bar.
    """

    def __init__(
        self,
        name: str,
        about: str,
        steps: int,
        *,
        history: Iterable[Mapping[str, Any]] = (),
        parts: Callable[[str], Sequence[Part]] = split_turn,
        plain: bool = False,
        console: Console | None = None,
    ):
        self.name = name
        self.about = about
        self.steps = steps
        self._parts = parts
        self.console = screen = console or CleanConsole(highlight=False)
        # Check isatty: FORCE_COLOR makes rich treat a pipe as a terminal, and cursor movements
        # would fill the log.
        terminal = screen.is_terminal and screen.file.isatty() and not screen.is_dumb_terminal
        self.plain = plain or not terminal or screen.no_color or screen.options.ascii_only
        self._live: Live | None = None
        # A kind of validation questions gets a gauge when it is first scored.
        self._gauge_list = list(GAUGES)
        self._values: dict[str, list[float]] = {
            gauge.key: [] for gauge in GAUGES
        }  # from a gauge's first value on
        self._last: Mapping[str, Any] = {}
        self._transcript: list[tuple[str, Text]] = []  # speaker, text
        self._note = ""
        self._last_paint = -math.inf
        self._began = time.monotonic()  # start of the current step
        self._terminal: list | None = None  # the terminal's settings before the live view
        self._lines = list(history)
        self._signs = {sign.name for sign in signs(self._lines)}  # already shown
        self._solved = solved_step(self._lines) is not None
        for metrics in self._lines:
            self._remember(with_val_em(metrics))
        self._progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("passed"),
            TimeRemainingColumn(),
            TextColumn("to go"),
            console=screen,
            # the pace of all steps here, evaluations and checkpoints included
            speed_estimate_period=math.inf,
        )
        self._progress.add_task("", total=steps, completed=self._last.get(STEP_KEY, 0))

    def __enter__(self) -> Dashboard:
        if not self.plain:
            self._terminal = _without_marks(self.console.file)
            self._live = Live(
                self._view(), console=self.console, auto_refresh=False, vertical_overflow="crop"
            )
            self._live.start(refresh=True)
        return self

    def __exit__(self, *error: object) -> None:
        if self._live:
            self._live.update(self._view(), refresh=True)
            self._live.stop()
        if self._terminal:
            _set_terminal(self.console.file, self._terminal)

    # ---------------------------------------------------------------------------------------- input

    def step(self, metrics: Mapping[str, Any]) -> list[Sign]:
        """Show one RL step. Return the signs of trouble that are new.

        `metrics` is the step's line in metrics.jsonl.
        """
        self._lines.append(metrics)
        self._began = time.monotonic()
        metrics = with_val_em(metrics)
        self._remember(metrics)
        self._progress.update(self._progress.task_ids[0], completed=metrics[STEP_KEY])
        if self.plain:
            self._say(plain_line(metrics, self.steps, self._progress.tasks[0].time_remaining))
        self._paint()
        new = [sign for sign in new_signs(self._lines) if sign.name not in self._signs]
        self._signs |= {sign.name for sign in new}
        for sign in new:
            self.note(str(sign))
        if not self._solved and is_solved(self._lines):
            self._solved = True
            self.note(
                "solved: all samples of each group have equal scores, and nearly all are right; "
                "more steps change nothing"
            )
        return new

    def transcript(self, question: str, steps: Sequence[Mapping[str, Any]], reward: float) -> None:
        """Show one sampled episode; `steps` are those of a rollout line.

        Such a step is {"text": ..., "info": {"tool_calls": ...}}.

        Plain output omits it; rollouts/ has the whole text.
        """
        self._transcript = [
            ("asked", Text(f"{_one_line(question)} (reward {reward:.2f})", style="bold"))
        ]
        for step in steps:
            self._transcript.append(("agent", style_turn(self._parts(step["text"]))))
            for call in step["info"].get("tool_calls", []):
                self._transcript.append(("tool", Text(_one_line(call["content"]), style="dim")))
        self._paint()

    def note(self, text: str) -> None:
        """Show one line that is not about a step (a checkpoint, a warning)."""
        self._note = _one_line(text)
        if self.plain:
            self._say(self._note)
        self._paint(now=True)

    def finishing(self) -> None:
        """Acknowledge Ctrl-C at once: the current step ends and is saved first."""
        seconds = self._last.get("timing_s/step", 0) - (time.monotonic() - self._began)
        about = f", about {duration(seconds)}" if seconds >= 1 else ""
        self.note(
            f"finishing step {self._last.get(STEP_KEY, 0) + 1}{about}; press Ctrl-C again to stop "
            "now"
        )

    # ---------------------------------------------------------------------------------- bookkeeping

    def _remember(self, metrics: Mapping[str, Any]) -> None:
        self._last = metrics
        for kind, key in validation_kinds(metrics).items():
            if key not in self._values:
                self._values[key] = []
                self._gauge_list.append(Gauge(key, f"val, {kind}", 2))
        for key in (gauge.key for gauge in self._gauge_list):
            value = metrics.get(key)
            values = self._values[key]
            # NaN, infinity and a missing evaluation leave the number unchanged: a diverging run
            # must not crash the screen.
            if value is not None and math.isfinite(value):
                values.append(value)
            elif values:
                values.append(values[-1])

    def _say(self, line: str) -> None:
        # The reader may be gone (`| head`, a closed terminal). The run goes on, and metrics.jsonl
        # has the numbers.
        with suppress(OSError, ValueError):
            say(line, self.console.file)

    # -------------------------------------------------------------------------------- the live view

    def _paint(self, now: bool = False) -> None:
        if self._live and (now or time.monotonic() - self._last_paint >= _SECONDS_BETWEEN_PAINTS):
            self._last_paint = time.monotonic()
            self._live.update(self._view(), refresh=True)

    def _view(self) -> Group:
        """Compose the screen. The top matters most: a low terminal cuts off the bottom."""
        times = " · ".join(f"{name} {s:.2f} s" for name, s in step_times(self._last).items() if s)
        lines = [
            Text.assemble(
                ("agent-r1", "bold cyan"),
                "  ",
                (clean(self.name), "bold"),
                (f"   {self.about}", "dim"),
            ),
            self._progress,
            self._gauges(),
            Text(times, style="dim"),
            Text(self._note, style="dim italic"),
            *(Text(line, style="dim") for line in LEGEND),
        ]
        for line in lines:
            if isinstance(line, Text):
                line.truncate(self.console.width, overflow="ellipsis")
        return Group(*lines, self._episode())

    def _gauges(self) -> Table:
        """List the gauges: value now, at the start and ten steps ago."""
        table = Table("", box=None, padding=(0, 2, 0, 0), header_style="dim")
        for name, style in (("now", "bold"), ("start", ""), ("10 ago", "")):
            table.add_column(name, style=style, justify="right")
        for column in table.columns:
            column.no_wrap = True
        for gauge in self._gauge_list:
            if values := self._values[gauge.key]:
                ago = _figure(gauge, values[-11]) if len(values) > 10 else ""
                table.add_row(
                    gauge.label, _figure(gauge, values[-1]), _figure(gauge, values[0]), ago
                )
        return table

    def _episode(self) -> Table:
        """Show the question and the last turns of the transcript, one line each."""
        room = max(2, self.console.height - sum(map(bool, self._values.values())) - 9)
        table = Table.grid(padding=(0, 2, 0, 0))
        for label, text in self._transcript[:1] + self._transcript[1:][1 - room :]:
            text = text[
                : 2 * self.console.width
            ]  # rich reads every word, and a hostile turn can be very long
            text.truncate(max(1, self.console.width - 8), overflow="ellipsis")
            table.add_row(Text(label, style="bright_black"), text)
        return table


# -------------------------------------------------------------------------------------- small parts


def plain_line(metrics: Mapping[str, Any], steps: int, eta: float | None) -> str:
    """Format a step as one line of text.

    Example: `step  12/100  em 0.41  reward 0.38  calls 1.62  entropy 0.31  kl 0.0020  s 0.61  eta
    54 s`. A step with a validation ends with `val 1-hop 1.00, 2-hop 0.67`.
    """
    values = [(g, metrics[g.key]) for g in GAUGES if g.short and metrics.get(g.key) is not None]
    numbers = "".join(f"  {gauge.short} {_figure(gauge, value)}" for gauge, value in values)
    line = f"step {metrics[STEP_KEY]:>{len(str(steps))}}/{steps}{numbers}"
    if eta is not None:
        line += f"  eta {duration(eta)}"
    kinds = [f"{kind} {metrics[key]:.2f}" for kind, key in validation_kinds(metrics).items()]
    return f"{line}  val {', '.join(kinds)}" if kinds else line


def _without_marks(screen: IO[str]) -> list | None:
    """Disable the terminal's echo of `^C`. Return the settings before."""
    # The echo would wrap the last line, and the frame would then be drawn one line too low.
    with suppress(OSError, ValueError, termios.error):
        before = termios.tcgetattr(screen.fileno())
        _set_terminal(screen, [*before[:3], before[3] & ~termios.ECHOCTL, *before[4:]])
        return before


def _set_terminal(screen: IO[str], settings: list) -> None:
    with suppress(OSError, ValueError, termios.error):
        if os.tcgetpgrp(screen.fileno()) == os.getpgrp():  # a background job would be stopped
            termios.tcsetattr(screen.fileno(), termios.TCSANOW, settings)


_STYLES = {"think": "dim italic", "tool_call": "cyan", "answer": "bold green", "text": ""}


def style_turn(parts: Sequence[Part]) -> Text:
    """Format a turn on one line, with styles instead of tags."""
    words_and_styles = [(_one_line(part.text), _STYLES[part.kind]) for part in parts]
    return Text(" ").join(Text(words, style) for words, style in words_and_styles if words)


def _one_line(text: str) -> str:
    return " ".join(clean(text).split())


def _figure(gauge: Gauge, value: float) -> str:
    return f"{round(value, gauge.digits) + 0.0:,.{gauge.digits}f}"  # + 0.0: no -0.00
