"""Learning curves for the report.

In: `RunFiles`. Out: SVG elements, hand-made, so that they take the page's colours in light and dark.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from agent_r1.inspect.run_files import RunFiles
from agent_r1.training.log import STEP, VAL_EM

Point = tuple[float, float]
EM_SAMPLED, EM_GREEDY, CALLS = "reward/em", VAL_EM, "tool_calls/mean"

_WIDTH, _HEIGHT = 520, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 14, 12, 30
_MOST_POINTS = 240


@dataclass(frozen=True)
class Line:
    """One curve of a chart. `look` is its CSS class; the same class colours its entry in the legend."""

    name: str
    points: Sequence[Point]
    look: str
    faint: bool = False
    """Draw the noisy points faintly and their moving average over them."""


@dataclass(frozen=True)
class Mark:
    """A measured value with its confidence interval, drawn as a dot with whiskers."""

    name: str
    x: float
    y: float
    low: float
    high: float


class Axes:
    """Data to pixels."""

    def __init__(self, points: Sequence[Point], floor: float | None = None, top: float | None = None):
        xs, ys = [x for x, _ in points] or [0, 1], [y for _, y in points] or [0, 1]
        self.x0, self.x1 = min(xs), max(xs)
        low = min(ys) if floor is None else min(floor, min(ys))
        high = max(ys) if top is None else max(top, max(ys))
        if self.x1 == self.x0:
            self.x1 += 1
        if high == low:
            high += 1
        self.ticks = _ticks(low, high, 4)
        self.y0, self.y1 = min(low, self.ticks[0]), max(high, self.ticks[-1])

    def x(self, value: float) -> float:
        return _LEFT + (value - self.x0) / (self.x1 - self.x0) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (_HEIGHT - _TOP - _BOTTOM)

    def path(self, points: Sequence[Point]) -> str:
        return "M" + "L".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)

    def grid(self) -> str:
        parts = []
        for value in self.ticks:
            y = self.y(value)
            parts.append(f'<path class="grid" d="M{_LEFT},{y:.1f}H{_WIDTH - _RIGHT}"/>')
            parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_tick(value)}</text>')
        for value in _ticks(self.x0, self.x1, 5):
            if self.x0 <= value <= self.x1:
                x = self.x(value)
                parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - 10}" text-anchor="middle">{_tick(value)}</text>')
        return "".join(parts)


def line_chart(
    lines: Sequence[Line], marks: Sequence[Mark] = (), *, floor: float | None = None, top: float | None = None
) -> str:
    """Curves over RL steps as one `<svg>`. `floor` and `top` are values that the axis must at least reach."""
    lines = [Line(line.name, thin(line.points), line.look, line.faint) for line in lines if line.points]
    everything = [point for line in lines for point in line.points]
    everything += [(mark.x, y) for mark in marks for y in (mark.low, mark.high)]
    axes = Axes(everything, floor, top)
    parts = [axes.grid()]
    for line in lines:
        if line.faint:
            parts.append(f'<path class="line faint {line.look}" d="{axes.path(line.points)}"/>')
        bold = smooth(line.points) if line.faint else line.points
        parts.append(f'<path class="line {line.look}" d="{axes.path(bold)}"/>')
        parts += [_dot(axes, point, line) for point in line.points]
    parts += [_whiskers(axes, mark) for mark in marks]
    return _svg(parts)


def stacked_chart(lines: Sequence[Line]) -> str:
    """Areas on top of one another, for parts of a whole. All lines must have the same x."""
    lines = [Line(line.name, thin(line.points), line.look) for line in lines if line.points]
    base = [(x, 0.0) for x, _ in lines[0].points] if lines else []
    layers = []
    for line in lines:
        upper = [(x, below + y) for (x, below), (_, y) in zip(base, line.points, strict=True)]
        layers.append((line, base, upper))
        base = upper
    axes = Axes(base, floor=0.0)
    parts = [axes.grid()]
    for line, lower, upper in layers:
        outline = axes.path([*upper, *reversed(lower)])
        parts.append(f'<path class="area {line.look}" d="{outline}Z"><title>{html.escape(line.name)}</title></path>')
    return _svg(parts)


def smooth(points: Sequence[Point], share: float = 0.12) -> list[Point]:
    """Centred moving average over `share` of the points (at the ends over what there is)."""
    half = max(1, round(len(points) * share / 2))
    windows = (points[max(0, i - half) : i + half + 1] for i in range(len(points)))
    return [(x, sum(y for _, y in window) / len(window)) for (x, _), window in zip(points, windows, strict=True)]


def thin(points: Sequence[Point], most: int = _MOST_POINTS) -> list[Point]:
    """At most `most` points: neighbours are averaged."""
    if len(points) <= most:
        return list(points)
    edges = [i * len(points) // most for i in range(most + 1)]
    groups = [points[a:b] for a, b in pairwise(edges)]
    return [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]


def _svg(parts: list[str]) -> str:
    return f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(parts)}</svg>'


def _dot(axes: Axes, point: Point, line: Line) -> str:
    """Invisible, but something to point at: browsers show the title of what is under the mouse."""
    x, y = point
    tip = html.escape(f"step {x:g}: {line.name} {y:.4g}")
    place = f'cx="{axes.x(x):.1f}" cy="{axes.y(y):.1f}" r="4"'
    return f'<circle class="dot {line.look}" {place}><title>{tip}</title></circle>'


def _whiskers(axes: Axes, mark: Mark) -> str:
    x, y, low, high = axes.x(mark.x), axes.y(mark.y), axes.y(mark.low), axes.y(mark.high)
    tip = html.escape(f"{mark.name}: {mark.y:.3f}, 95 % interval {mark.low:.3f} to {mark.high:.3f}")
    bars = f"M{x:.1f},{low:.1f}V{high:.1f}M{x - 4:.1f},{low:.1f}h8M{x - 4:.1f},{high:.1f}h8"
    circle = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5"><title>{tip}</title></circle>'
    return f'<g class="mark"><path d="{bars}"/>{circle}</g>'


def _ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers from at most `low` to at least `high`."""
    raw = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(m * unit for m in (1, 2, 2.5, 5, 10) if m * unit >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def _tick(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def em_marks(run: RunFiles) -> list[Mark]:
    """The scores of the evaluations before and after RL, at step 0 and at the last step."""
    last = max([step for step, _ in run.series(STEP)], default=1)
    cards = (("before RL", 0, run.before), ("after RL", last, run.after))
    return [
        Mark(name, x, card["score"], *(card.get("em_ci95") or [card["score"]] * 2)) for name, x, card in cards if card
    ]
