"""Write report.html: one run on one page, for a newcomer.

In: a run directory, finished or interrupted. Out: `runs/<name>/report.html`, a single file without
scripts or links, so it opens offline. Each run writes it at its end, and `agent-r1 report` on
demand. This module reads the files, picks what is shown and draws the curves; the page's text is in
`report.html.j2`.

All content comes from a model or a tool. jinja2 escapes it and `clean` removes control characters,
in one place for the whole page. The page also forbids scripts and network for itself
(Content-Security-Policy).
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from operator import itemgetter
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import yaml
from jinja2 import ChainableUndefined, Environment, PackageLoader
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

import agent_r1
from agent_r1.config.renamed import translate_card
from agent_r1.ground import bounds
from agent_r1.ground.clean import clean
from agent_r1.ground.errors import AgentR1Error
from agent_r1.ground.files import read_jsonl, write_whole
from agent_r1.ground.ui import duration
from agent_r1.watch.log import STEP_KEY, VAL_EM, step_times, validation_kinds, with_val_em
from agent_r1.watch.sentinel import Sign, signs, solved_step
from agent_r1.watch.tokens import TOKEN_CSS, tokens_html

JsonObject = dict[str, Any]
Points = list[tuple[float, float]]

# ----------------------------------------------------------------------------------- files of a run


UNDER = {
    "closed_book": "no tools",
    "empty": "a search that finds nothing",
    "random": "random passages",
}
"""Suffix of a card's file name -> the agent's tools in that evaluation."""


@dataclass
class RunFiles:
    """Hold the files of a run.

    It may have been interrupted, so only the configuration must exist.
    """

    path: Path
    config: JsonObject
    """config.yaml as plain dicts: a report must also open runs of another version."""
    config_text: str
    metrics: list[JsonObject] = field(default_factory=list)
    before: JsonObject | None = None
    """eval_before.json, the card of the model that RL started from."""
    after: JsonObject | None = None
    """eval.json, the card of the trained model."""
    under: dict[str, list[JsonObject | None]] = field(default_factory=dict)
    """Condition of the tools -> the cards before and after RL from `eval` with `--closed-book`,
    `--retriever` or `--poison`."""
    rollouts_before: list[JsonObject] = field(default_factory=list)
    rollouts_after: list[JsonObject] = field(default_factory=list)
    rollouts_train: list[JsonObject] = field(default_factory=list)
    """Rollouts of the last dumped training step; these have advantages."""
    missing: list[str] = field(default_factory=list)
    """A sentence for each thing that the report cannot show."""

    @property
    def cards(self) -> list[JsonObject]:
        return [card for card in (self.before, self.after) if card]

    @property
    def score_name(self) -> str:
        """Return the name of the evaluations' score: em, reward, or the environment's own."""
        return next((card["score_name"] for card in reversed(self.cards)), "em")

    @property
    def tools(self) -> list[str]:
        """List the tools: the configured ones, and methods that the run counted or called."""
        settings = self.config.get("env", {}).get("tools") or ()
        names = [name.rpartition(":")[2] for name in settings]
        for line in self.metrics:
            names += [key.removeprefix(CALLS) for key in line if key.startswith(CALLS)]
        for record in (*self.rollouts_after, *self.rollouts_before, *self.rollouts_train):
            for step in record["steps"]:
                calls = step["info"].get("tool_calls", ())
                names += [call["name"] for call in calls if call["ok"]]
        return list(dict.fromkeys(names))

    def series(self, key: str) -> Points:
        """Return (step, value) of every line of metrics.jsonl that has a number at `key`."""
        return [
            (line[STEP_KEY], line[key])
            for line in self.metrics
            if STEP_KEY in line and line.get(key) is not None
        ]


def load_run(run_dir: Path) -> RunFiles:
    """Read a run directory. Raises AgentR1Error if it has no readable config.yaml."""
    try:
        text = bounds.read_file(run_dir / "config.yaml").decode()
        config = bounds.parse_yaml(text)
    except (OSError, ValueError, yaml.YAMLError):
        config = None
    if not isinstance(config, dict):
        there = (
            ", ".join(sorted(path.parent.name for path in run_dir.parent.glob("*/config.yaml")))
            or "none yet"
        )
        raise AgentR1Error(
            f"{run_dir} has no readable config.yaml; name a run with --run (there are: {there})",
            code="missing_run",
        )
    run = RunFiles(run_dir, config, text)
    run.metrics = [
        with_val_em(m) for m in _lines(run, "metrics.jsonl", "there are no learning curves")
    ]
    run.before = _card(run, "eval_before.json", "the model that RL started from was not evaluated")
    run.after = _card(
        run, "eval.json", "the trained model was not evaluated; was the run interrupted?"
    )
    rates = {path.stem.partition("_poison_")[2] for path in run_dir.glob("eval*_poison_*.json")}
    conditions = dict(UNDER)
    for rate in sorted(rates):
        conditions[f"poison_{rate}"] = f"hostile documents in a share of {rate} of the searches"
    for name, words in conditions.items():
        cards = [_card(run, f"{card}_{name}.json") for card in ("eval_before", "eval")]
        if any(cards):
            run.under[words] = cards
    run.rollouts_before = _lines(
        run, "rollouts/eval_before.jsonl", "there are no transcripts from before RL"
    )
    run.rollouts_after = _lines(
        run, "rollouts/eval.jsonl", "there are no transcripts from after RL"
    )
    last = max(
        (path.name for path in (run_dir / "rollouts").glob("step_*.jsonl")), default="step_*.jsonl"
    )
    run.rollouts_train = _lines(run, f"rollouts/{last}", "there is no training batch to show")
    return run


def _lines(run: RunFiles, name: str, consequence: str) -> list[JsonObject]:
    lines = read_jsonl(run.path / name)
    if not lines:
        run.missing.append(f"{name} is missing or empty: {consequence}.")
    return lines


def _card(run: RunFiles, name: str, consequence: str | None = None) -> JsonObject | None:
    try:
        return translate_card(bounds.read_json(run.path / name))
    except FileNotFoundError:
        if consequence:
            run.missing.append(f"{name} is missing: {consequence}.")
        return None
    except ValueError:
        raise AgentR1Error(
            f"{run.path / name} is not an eval card; make it again with `agent-r1 eval`",
            code="bad_card",
        ) from None


# ---------------------------------------------------------------------------------------- selection


def pick_pairs(
    before: Iterable[JsonObject], after: Iterable[JsonObject]
) -> list[tuple[str, JsonObject, JsonObject]]:
    """Pick questions to show, as (reason, before, after).

    Two that were learned, one that was known, one that is still wrong.
    """
    earlier: dict[str, JsonObject] = {}
    for record in before:
        earlier.setdefault(record["question"], record)
    names = {  # (right before, right after) -> the heading of such a pair
        (False, True): "learned: wrong before, right now",
        (True, True): "right before and after",
        (False, False): "still wrong",
        (True, False): "lost",
    }
    most = dict.fromkeys(names.values(), 1) | {names[False, True]: 2}
    pairs: dict[str, list[tuple[str, JsonObject, JsonObject]]] = {name: [] for name in most}
    for record in after:
        old = earlier.pop(record["question"], None)
        if old is None:
            continue
        why = names[bool(_right(old)), bool(_right(record))]
        if len(pairs[why]) < most[why]:
            pairs[why].append((why, old, record))
    result = []
    for of_one_kind in pairs.values():
        result += of_one_kind
    return result


def pick_group(rollouts: Iterable[JsonObject]) -> tuple[JsonObject, JsonObject] | None:
    """Return the best and worst attempt of the group with the largest difference, or None."""
    groups: dict[str, list[JsonObject]] = {}
    for record in rollouts:
        groups.setdefault(record["group_id"], []).append(record)
    pairs = [(max(records, key=_reward), min(records, key=_reward)) for records in groups.values()]
    return max(pairs, key=lambda pair: _reward(pair[0]) - _reward(pair[1]), default=None)


_reward = itemgetter("reward")


def _right(record: JsonObject) -> bool:
    """Return whether an episode is right, by its environment's score, exact match or reward."""
    return (record["metrics"] | record["reward_parts"]).get(
        record.get("score_name") or "em", record["reward"]
    ) > 0


def _example(run: RunFiles, sign: Sign) -> str:
    """Return the last turn of an episode that shows the sign."""
    for record in run.rollouts_train:
        if record["stop_reason"] == sign.stop_reason and record["steps"]:
            return record["steps"][-1]["text"]
    return ""


def _worse_kinds(run: RunFiles) -> list[tuple[str, float, float]]:
    """Return (kind, before, after) of kinds of questions that got worse; the mean hides them.

    Only a fall beyond chance counts: by two standard errors of the difference, if both scores were
    shares of right answers. One of 75 questions is not a fall.
    """
    before = (run.before or {}).get("by_kind") or {}
    after = (run.after or {}).get("by_kind") or {}
    worse = []
    for kind in before:
        if kind not in after:
            continue
        old = round(before[kind]["score"], 2)
        new = round(after[kind]["score"], 2)
        questions = before[kind].get("n") or 1
        share = min(max((old + new) / 2, 0.0), 1.0)
        chance = 2 * math.sqrt(2 * share * (1 - share) / questions)
        if old - new > max(chance, 1 / questions):
            worse.append((kind, old, new))
    return sorted(worse)


def _with_token_spans(record: JsonObject) -> JsonObject:
    """Add `tokens` as HTML to a rollout: per row prompt length, prompt, episode."""
    tokens = []
    for row in record["rows"]:
        start = row["action_mask"].index(1)
        tokens.append((start, Markup(tokens_html(row, 0, start)), Markup(tokens_html(row, start))))
    return record | {"tokens": tokens}


def reliability_rows(part: JsonObject) -> list[tuple[str, str]]:
    """List the rows (key, meaning) of the table of a card's `reliability`."""
    rows = [("mean@1", "share of the samples that are right")]
    # k = 1 is the mean for both measures.
    ks = [k for k in (2, 4, 8) if f"pass@{k}" in part]
    rows += [(f"pass@{k}", f"at least one of {k} is right") for k in ks]
    rows += [(f"pass^{k}", f"all {k} are right") for k in ks]
    return rows


def _number(value: Any) -> str:
    if not isinstance(value, int | float):
        return "–"
    return f"{value:.2f}"


def _percent(share: float) -> str:
    return f"{100 * min(1.0, max(0.0, share)):.1f}%"


# --------------------------------------------------------------------------------------- the curves

CALLS = "episode/calls/"
"""Metrics of `BaseToolEnv.calls_by_tool`, one per tool; an agent with one tool has none."""
COLOURS = {
    "c1": "#0f766e",
    "c2": "#2563eb",
    "c3": "#c2570c",
    "c4": "#be185d",
    "c5": "#7c3aed",
    "c6": "#6b7280",
}
LINES = tuple(COLOURS)
COLOURS |= {"star": "#c47f00", "rule": "#e4e1d8"}
"""Names in the page, where they have other values in dark mode."""


@dataclass(frozen=True)
class Curve:
    """Describe one line of a chart. A `noisy` line is faint, under its moving average."""

    name: str
    points: Points
    colour: str
    """A name in COLOURS."""
    noisy: bool = False


@dataclass(frozen=True)
class Chart:
    """Hold a drawn chart: its curves for the legend, and an `<svg>`."""

    curves: list[Curve]
    svg: Markup


@dataclass(frozen=True)
class Mark:
    """Hold a score with its confidence interval, at the step of its model."""

    name: str
    x: float
    y: float
    low: float
    high: float


def marks(run: RunFiles) -> list[Mark]:
    """Return the scores before and after RL, at step 0 and at the last step."""
    last = max((step for step, _ in run.series(STEP_KEY)), default=1)
    cards = (("before RL", 0, run.before), ("after RL", last, run.after))
    return [Mark(name, x, card["score"], *card["score_ci95"]) for name, x, card in cards if card]


def training_score(run: RunFiles) -> Points:
    """Return (step, score) of the training episodes."""
    keys = {"em": "reward/em", "reward": "critic/score/mean"}
    return run.series(keys.get(run.score_name, f"episode/{run.score_name}"))


def curves_by_kind(run: RunFiles) -> list[Curve]:
    """Return a curve for each kind of questions: validation, and the test at both ends."""
    keys: dict[str, str] = {}
    for line in run.metrics:
        keys |= validation_kinds(line)
    last = max((step for step, _ in run.series(STEP_KEY)), default=1)
    curves = []
    for (kind, key), colour in zip(sorted(keys.items()), cycle(LINES), strict=False):
        points = run.series(key)
        for step, card in ((0, run.before), (last, run.after)):
            part = ((card or {}).get("by_kind") or {}).get(kind)
            if part and step not in dict(points):
                points.append((step, part["score"]))
        curves.append(Curve(kind, sorted(points), colour))
    return curves


def charts(run: RunFiles) -> dict[str, Chart]:
    """Draw the charts that this run has points for, by their names in the template."""
    returns = run.series("critic/score/mean")
    score = [
        Curve("train, sampled", training_score(run), "c1", noisy=True),
        Curve("validation, greedy", run.series(VAL_EM), "c2"),
    ]
    kl = [
        Curve("KL to the sampling policy", run.series("actor/ppo_kl"), "c4", noisy=True),
        Curve("KL to the start", run.series("actor/kl_loss"), "c2", noisy=True),
    ]
    parts = [
        (line[STEP_KEY], step_times(line))
        for line in run.metrics
        if "timing_s/step" in line and STEP_KEY in line
    ]
    times = []
    colours = iter(COLOURS)
    for name in parts[0][1] if parts else ():
        points = [(step, part[name]) for step, part in parts]
        if len(times) < len(COLOURS) and any(seconds for _, seconds in points):
            times.append(Curve(name, points, next(colours)))
    tools = set()
    for line in run.metrics:
        tools.update(key for key in line if key.startswith(CALLS))
    by_tool = [
        Curve(k.removeprefix(CALLS), run.series(k), c, noisy=True)
        for k, c in zip(sorted(tools), cycle(LINES), strict=False)
    ]
    rewards = [
        Curve("mean return of a trajectory", returns, "c1", noisy=True),
        Curve("of it on the way", run.series("reward/process"), "c2", noisy=True),
    ]
    drawings = {
        "score": draw(score, marks(run), floor=0, top=1),
        "by_kind": draw(curves_by_kind(run), floor=0, top=1),
        "reward": draw(rewards, floor=0, top=1),
        "calls": draw(
            [Curve("calls per question", run.series("tool_calls/mean"), "c5", noisy=True)]
        ),
        "by_tool": draw(by_tool, floor=0),
        "entropy": draw([Curve("entropy", run.series("actor/entropy"), "c3")], floor=0),
        "kl": draw(kl, floor=0),
        "times": draw(times, floor=0, is_stacked=True),
    }
    if run.score_name == "reward":
        drawings["reward"] = None  # equal to the score
    return {name: chart for name, chart in drawings.items() if chart}


def smooth(values: Sequence[float], share: float = 0.12) -> np.ndarray:
    """Return the centred moving average over `share` of the values, shorter at the ends."""
    half = min(max(1, round(len(values) * share / 2)), (len(values) - 1) // 2)
    window = np.ones(2 * half + 1)
    return np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")


def draw(
    curves: list[Curve],
    marks: Sequence[Mark] = (),
    *,
    floor: float | None = None,
    top: float | None = None,
    is_stacked=False,
) -> Chart | None:
    """Draw curves over RL steps, or stacked shares; None without points.

    `floor` and `top` are values that the axis must include.
    """
    curves = [curve for curve in curves if curve.points]
    if not curves and not marks:
        return None
    figure = Figure(figsize=(520 / 72, 240 / 72))  # 72 SVG units per inch
    axes = figure.add_axes((0.09, 0.21, 0.89, 0.76))
    # clip_on=False: no point is outside, and clip paths would be links within the page.
    if is_stacked:
        xs = [x for x, _ in curves[0].points]
        columns = []
        for curve in curves:
            columns.append([y for _, y in curve.points])
        axes.stackplot(
            xs,
            columns,
            colors=[COLOURS[curve.colour] for curve in curves],
            alpha=0.8,
            clip_on=False,
        )
    lines = [] if is_stacked else curves
    for curve in lines:
        xs, ys = zip(*curve.points, strict=True)
        if curve.noisy:
            axes.plot(xs, ys, color=COLOURS[curve.colour], linewidth=1.2, alpha=0.35, clip_on=False)
            ys = smooth(ys)
        axes.plot(
            xs,
            ys,
            color=COLOURS[curve.colour],
            linewidth=2.4,
            solid_capstyle="round",
            clip_on=False,
        )
    for mark in marks:
        axes.vlines(mark.x, mark.low, mark.high, color=COLOURS["star"], linewidth=2, clip_on=False)
        # A dot: markers would be links within the page.
        axes.plot(
            [mark.x] * 2,
            [mark.y] * 2,
            color=COLOURS["star"],
            linewidth=9,
            solid_capstyle="round",
            clip_on=False,
        )
    low, high = axes.get_ylim()
    if floor is not None:
        low = min(floor, low)
    if top is not None:
        high = max(top, high)
    axes.set_ylim(low, high)
    axes.margins(x=0.015)  # so that a mark at step 0 does not cover the labels of the y axis
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter("{x:,.4g}")
    axes.set_xlabel("RL step", fontsize=12)
    axes.tick_params(length=0, labelsize=12, pad=7)
    axes.grid(axis="y", color=COLOURS["rule"], linewidth=1, clip_on=False)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    figure.patch.set_visible(False)
    axes.patch.set_visible(False)
    return Chart(curves, _svg(figure))


def _svg(figure: Figure) -> Markup:
    """Convert the figure to an `<svg>` without links, in the page's colours."""
    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(
            file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
    body = re.sub(
        r' id="[^"]*"|<defs>.*?</defs>', "", file.getvalue().split(">", 3)[-1], flags=re.DOTALL
    )
    for name, colour in COLOURS.items():
        body = body.replace(colour, f"var(--{name})")
    return Markup(f'<svg class="chart" viewBox="0 0 520 240" role="img">{body}')


# ----------------------------------------------------------------------------------------- the page


def _data_name(name: str) -> str:
    """Shorten `agent_r1_recipes.tinymath.questions:rows` to `tinymath`, likewise a file's name."""
    return name.split(":")[0].split("/")[-1].removeprefix("agent_r1_recipes.").split(".")[0]


def write_report(run_dir: Path) -> Path:
    """Write `run_dir/report.html` and return its path. Raises AgentR1Error if it is not a run."""
    run = load_run(run_dir)
    # A missing field of a record or card shows as nothing.
    page = Environment(
        loader=PackageLoader("agent_r1.watch", ""),
        autoescape=True,
        undefined=ChainableUndefined,
        trim_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else clean(str(value)),
    )
    page.filters |= {"number": _number, "percent": _percent, "duration": duration, "right": _right}
    pairs = pick_pairs(run.rollouts_before, run.rollouts_after)
    group = pick_group(run.rollouts_train)
    steps = [line for line in run.metrics if STEP_KEY in line]
    all_signs = signs(steps)
    text = page.get_template("report.html.j2").render(
        run=run,
        name=run_dir.resolve().name,
        data=_data_name(run.config.get("data", {}).get("name") or "tinyhop"),
        signs=[(sign, _example(run, sign)) for sign in all_signs],
        solved=solved_step(steps),
        over=all(sign.over for sign in all_signs),
        machine=next(
            (card["hardware"] for card in reversed(run.cards) if card.get("hardware")), None
        ),
        step_seconds=[seconds for _, seconds in run.series("timing_s/step")],
        eval_seconds=sum(card.get("wall_seconds") or 0 for card in run.cards),
        fallen=_worse_kinds(run),
        charts=charts(run) if run.metrics else {},
        marks=marks(run),
        pairs=[
            (why, _with_token_spans(before), _with_token_spans(after))
            for why, before, after in pairs
        ],
        group=[_with_token_spans(record) for record in group or ()],
        token_css=Markup(TOKEN_CSS),
        reliability_rows=reliability_rows,
        version=agent_r1.__version__,
    )
    write_whole(run_dir / "report.html", text)
    return run_dir / "report.html"
