"""Draw the SVGs of README and lessons from code and recorded data.

python lab/pictures/book.py

They have colours for light and dark mode, and are stored in docs/images/. tests/test_lessons.py
draws them again.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
import textwrap
from html import escape
from pathlib import Path
from typing import Any

import torch

from agent_r1.training.losses import policy_loss

ROOT = Path(__file__).parents[2]
LESSONS = ROOT / "docs" / "lessons"
STYLE = """<style>
svg{font-family:system-ui,sans-serif;background:var(--page);--page:#fff;--ink:#1d2327;--dim:#6b747b;--line:#c4cbd0;
--read:#eceff1;--sampled:#bfe6da;--reward:#c47f00;--good:#0f766e;--bad:#c23b33}
@media (prefers-color-scheme:dark){svg{--page:#14191d;--ink:#e6eaed;--dim:#98a2aa;--line:#46525b;
--read:#252d33;--sampled:#1d5c4e;--reward:#f0b13c;--good:#4fd1b8;--bad:#f0827a}}
text{fill:var(--ink)}.dim{fill:var(--dim)}.mono{font-family:ui-monospace,Menlo,monospace}.page{fill:var(--page)}
.read{fill:var(--read)}.sampled{fill:var(--sampled)}.box{fill:var(--page);stroke:var(--line)}
.line{stroke:var(--line);fill:none}.good{stroke:var(--good);fill:none}.bad{stroke:var(--bad);fill:none}
.tgood{fill:var(--good)}.tbad{fill:var(--bad)}.reward{fill:var(--reward)}
</style>"""


class Drawing:
    """Build an SVG; lengths in pixels."""

    def __init__(self, width: int, height: int, title: str):
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
            f"<title>{escape(title)}</title>",
            STYLE,
            f'<rect class="page" width="{width}" height="{height}"/>',
        ]

    def text(
        self, x: float, y: float, words: str, size: int = 13, kind: str = "", anchor: str = "start"
    ) -> None:
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" class="{kind}" '
            f'text-anchor="{anchor}">{escape(words)}</text>'
        )

    def rect(self, x: float, y: float, w: float, h: float, kind: str, round: int = 3) -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{round}" class="{kind}"/>'
        )

    def path(self, points: list[tuple[float, float]], kind: str, width: float = 2) -> None:
        way = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        self.parts.append(f'<path d="{way}" class="{kind}" stroke-width="{width:g}"/>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float, kind: str = "line") -> None:
        a = math.atan2(y2 - y1, x2 - x1)
        head = [(x2 - 7 * math.cos(a + d), y2 - 7 * math.sin(a + d)) for d in (0.45, -0.45)]
        self.path([(x1, y1), (x2, y2)], kind, 1.5)
        self.path([head[0], (x2, y2), head[1]], kind, 1.5)

    def box(
        self, x: float, y: float, w: float, h: float, title: str, *lines: str, kind: str = "box"
    ) -> None:
        self.rect(x, y, w, h, kind, 6)
        self.text(x + 10, y + 20, title)
        for number, line in enumerate(lines):
            self.text(x + 10, y + 38 + 16 * number, line, 11, "dim")

    def done(self) -> str:
        return "\n".join([*self.parts, "</svg>\n"])


def episodes() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (LESSONS / "group.jsonl").read_text().splitlines()]


def before_after() -> str:
    """Draw one test question before and after RL, from two lines of `agent-r1 chat --json`."""
    answers = [
        json.loads(line) for line in (LESSONS / "before_after.jsonl").read_text().splitlines()
    ]
    searches = max(len(answer["tool_calls"]) for answer in answers)
    height = 192 + 150 * searches  # a search with three passages takes 150
    d = Drawing(900, height, "One question before and after reinforcement learning")
    d.text(14, 28, answers[0]["question"], 17)
    # Below the title, which may be as wide as the picture: fonts differ.
    for x, kind, words in (
        (14, "sampled", "written by the model"),
        (194, "read", "returned by the search tool"),
    ):
        d.rect(x, 40, 14, 14, kind)
        d.text(x + 20, 52, words, 12, "dim")
    for x, title, answer in zip((14, 460), ("Before RL", "After RL"), answers, strict=True):
        right = answer["reward"] == 1
        d.text(
            x,
            86,
            f"{title}: {len(answer['tool_calls'])} search{'es' * (len(answer['tool_calls']) > 1)}",
            14,
        )
        y = 98
        for turn, call in itertools.zip_longest(answer["turns"], answer["tool_calls"]):
            thought = re.search("<think>(.*?)</think>", turn)
            assert thought, turn
            action = (
                f"search({call['arguments']['query']})" if call else f"answer: {answer['answer']}"
            )
            d.rect(x, y, 426, 26, "sampled")
            d.text(x + 10, y + 18, thought[1].strip(), 12, "mono")
            y += 30
            d.rect(x, y, 270, 26, "sampled")
            d.text(x + 10, y + 18, action, 13, "mono")
            if not call:
                d.text(
                    x + 426,
                    y + 18,
                    "right: reward 1" if right else "wrong: reward 0",
                    13,
                    "tgood" if right else "tbad",
                    "end",
                )
            y += 32
            for passage in call["content"].splitlines() if call else ():
                d.rect(x + 20, y, 406, 24, "read")
                d.text(x + 30, y + 16, passage, 12)
                y += 26
            y += 10
    d.text(
        14,
        height - 16,
        "Greedy decoding. A language model of half a million parameters, trained on two CPU cores.",
        12,
        "dim",
    )
    return d.done()


def stairs() -> str:
    """Draw the canonical run's validation by the number of searches that a question needs."""
    facts = json.loads((ROOT / "docs" / "lab" / "canonical.json").read_text())
    curves = {0: facts["before"]["hops"]}
    curves |= {int(step): kinds for step, kinds in facts["validation"].items()}
    last = max(curves)
    left, right, top, bottom = 60, 680, 60, 330

    def place(step: int, em: float) -> tuple[float, float]:
        return left + (right - left) * step / last, bottom - (bottom - top) * em

    d = Drawing(900, 400, "Questions of one, two and three searches over training")
    d.text(14, 28, "What no demonstration shows: questions of two and three searches", 17)
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = place(0, share)[1]
        d.path([(left, y), (right, y)], "line", 1)
        d.text(left - 8, y + 4, f"{share:.2f}", 11, "dim", "end")
    for step in curves:
        d.text(place(step, 0)[0], bottom + 18, str(step), 11, "dim", "middle")
    d.text((left + right) / 2, bottom + 38, "RL step", 12, "dim", "middle")
    names = {
        "1-hop": ("line", "1 search: demonstrated"),
        "2-hop": ("good", "2 searches: not shown"),
        "3-hop": ("bad", "3 searches: not shown"),
    }
    for number, (kind, (colour, words)) in enumerate(names.items()):
        d.path([place(step, curves[step][kind]) for step in sorted(curves)], colour, 2.5)
        y = top + 20 + 26 * number
        d.path([(right + 14, y), (right + 36, y)], colour, 2.5)
        d.text(right + 42, y + 4, words, 12)
    d.text(
        14,
        bottom + 60,
        f"Exact match, greedy. Step 0: {facts['questions']} test questions. Later: 200 other "
        "questions, which choose nothing.",
        12,
        "dim",
    )
    return d.done()


def row() -> str:
    """Draw the sequence of a real episode in reading order."""
    tokens = next(e for e in episodes() if e["reward"] == 1)["rows"][0]
    size, width, left, line, top = 7.25, 900, 14, 34, 78
    boxes, x, y = [], left, top
    for text, is_action, reward in zip(
        tokens["tokens"], tokens["action_mask"], tokens["rewards"], strict=True
    ):
        piece = text.replace("\n", "↵").replace(" ", "\u00a0")
        w = size * len(piece) + 6
        if x + w > width - left:
            x, y = left, y + line
        boxes.append((x, y, w, piece, is_action, reward))
        x += w + 2
    d = Drawing(width, int(y + 44), "The training sequence of a real episode and its mask")
    d.rect(left, 14, 14, 14, "sampled")
    d.text(left + 20, 26, "sampled by the policy: mask 1, carries loss and advantage")
    d.rect(left + 440, 14, 14, 14, "read")
    d.text(left + 460, 26, "only read (prompt, template, tool): mask 0")
    d.text(
        left,
        54,
        "One episode with two searches, as training sees it. Under each token: its mask.",
        12,
        "dim",
    )
    for x, y, w, piece, is_action, reward in boxes:
        d.rect(x, y - 14, w, 19, "sampled" if is_action else "read")
        d.text(x + 3, y, piece, 12, "mono")
        d.text(x + w / 2, y + 15, str(is_action), 9, "" if is_action else "dim", "middle")
        if reward:
            d.text(x + w + 8, y, f"reward +{reward:g}", 13, "reward")
    return d.done()


def masks() -> str:
    """Draw eight attempts as strips: mask, reward position, advantage."""
    group = sorted(episodes(), key=lambda e: -e["reward"])
    d = Drawing(
        900,
        90 + 30 * len(group),
        "Mask, reward and advantage of the eight attempts at one question",
    )
    d.text(
        14,
        28,
        "Eight attempts at one question. Each square is a token; coloured: sampled, grey: read.",
    )
    d.text(
        14,
        50,
        "All eight are equal up to token 71. Every sampled token of an attempt gets the attempt's "
        "advantage.",
        12,
        "dim",
    )
    for number, episode in enumerate(group):
        (sequence,) = episode["rows"]
        y = 70 + 30 * number
        for i, is_action in enumerate(sequence["action_mask"]):
            d.rect(14 + 5.6 * i, y, 5, 18, "sampled" if is_action else "read", 1)
        end = 14 + 5.6 * len(sequence["action_mask"]) + 8
        advantage = max(sequence["advantages"], key=abs)
        d.text(end, y + 14, f"reward {episode['reward']:g}", 12, "reward")
        d.text(end + 72, y + 14, f"A {advantage:+.2f}", 12, "tgood" if advantage > 0 else "tbad")
    return d.done()


def exact_turns() -> str:
    """Draw the exact advantage of each turn of two episodes, next to GRPO's."""
    record = json.loads((LESSONS / "exact_turns.json").read_text())
    episodes = record["episodes"]
    longest = max(abs(episode["grpo"]) for episode in episodes)
    rows = sum(len(episode["turns"]) for episode in episodes)
    d = Drawing(900, 96 + 44 * len(episodes) + 34 * rows, "The exact advantage of each turn")
    d.text(14, 26, record["question"], 16)
    columns = ((540, "exact", 1.0), (750, "GRPO", longest))
    for middle, title, _ in columns:
        d.text(middle, 56, title, 13, "dim", "middle")
    y = 76
    for episode in episodes:
        d.text(14, y + 16, f"reward {episode['reward']:g}", 13, "dim")
        y += 28
        for turn in episode["turns"]:
            d.rect(14, y, 420, 26, "sampled")
            d.text(22, y + 18, write_short(turn["text"]), 12, "mono")
            for (middle, _, scale), value in zip(
                columns, (turn["A"], episode["grpo"]), strict=True
            ):
                width = 60 * abs(value) / scale
                d.rect(middle - (width if value < 0 else 0), y + 4, width, 18, "reward", 2)
                d.path([(middle, y), (middle, y + 26)], "line", 1)
                d.text(middle + 66, y + 18, f"{value:+.3f}", 12)
            y += 34
        y += 16
    return d.done()


def write_short(turn: str) -> str:
    """Write a turn as its thought's last two items, and what it does."""
    thought = re.search("<think>(.*?)</think>", turn)
    assert thought, turn
    query = re.search('"query": "(.*?)"', turn)
    answer = re.search("<answer>(.*?)</answer>", turn)
    action = f"search({query[1]})" if query else f"answer {answer[1] if answer else ''}"
    _, colon, rest = thought[1].partition(": ")
    return f"{(rest if colon else thought[1]).strip()}: {action}"


def clip() -> str:
    """Draw the clipped loss as `policy_loss` computes it."""
    d = Drawing(900, 330, "PPO's clipped loss over the ratio")
    ratios = torch.linspace(0.01, 4, 400)
    for panel, (A, name) in enumerate(
        [(1.0, "A = +1: the token was better than expected"), (-1.0, "A = -1: it was worse")]
    ):
        loss, _ = policy_loss(
            ratios.log(), torch.zeros(400), torch.full((400,), A), torch.ones(400), 0.2, 0.28, 3.0
        )
        x0, y0 = 50 + 450 * panel, (70 if A > 0 else 280)

        def place(r: float, value: float, x0: float = x0, y0: float = y0) -> tuple[float, float]:
            # 56, so that no point is half-way between two tenths, which machines round differently.
            return x0 + 90 * r, y0 - 56 * value

        d.text(x0, 30, name)
        d.path([place(0, 0), place(4, 0)], "line", 1)
        d.path([place(0, 0), place(0, 3.6 * (-1 if A > 0 else 1))], "line", 1)
        d.path([place(1, 0), place(1, -A)], "line", 1)
        d.path(
            [
                place(r, v)
                for r, v in zip(ratios.tolist(), (-A * ratios).tolist(), strict=True)
                if abs(v) < 3.6
            ],
            "line",
            1,
        )
        kind = "good" if A > 0 else "bad"
        d.path([place(r, v) for r, v in zip(ratios.tolist(), loss.tolist(), strict=True)], kind, 3)
        for r in (1, 2, 3, 4):
            d.text(
                *place(r, 0.12 if A > 0 else -0.3),
                f"ratio {r}" if r == 4 else str(r),
                11,
                "dim",
                "middle",
            )
        marks = (
            [(1.28, "1.28: clipped")] if A > 0 else [(0.8, "0.8: clipped"), (3.0, "3: dual clip")]
        )
        for r, words in marks:
            value = loss[(ratios - r).abs().argmin()].item()
            x, y = place(r, value)
            d.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" class="reward"/>')
            d.text(x + 8, y + (18 if r < 2 else -10), words, 12, "reward")
    d.text(
        50,
        318,
        "Thick: the loss. Thin: -A x ratio, without a clip. Where the thick line is level, the "
        "gradient is 0.",
        12,
        "dim",
    )
    return d.done()


def step() -> str:
    """Draw the data flow of one training step."""
    d = Drawing(900, 330, "Data flow of one training step")
    boxes = [
        (
            14,
            40,
            "1 sample",
            "G episodes per question",
            "policy <-> environment",
            "rollout/episode.py",
        ),
        (238, 40, "2 rows", "ids, action mask,", "rewards, log pi_old", "rollout/training_rows.py"),
        (
            462,
            40,
            "3 predict",
            "critic: V at actions (ppo)",
            "reference: log pi_ref (KL)",
            "training/forward.py",
        ),
        (
            686,
            40,
            "4 credit",
            "grpo: against the group",
            "ppo: GAE over actions",
            "training/advantages.py",
        ),
        (686, 200, "5 critic", "fit V to returns (ppo)", "", "training/losses.py"),
        (462, 200, "6 policy", "clipped loss on actions", "minibatches, AdamW", "training/loop.py"),
        (
            238,
            200,
            "7 record",
            "metrics, transcripts,",
            "evaluation, checkpoint",
            "training/run.py",
        ),
        (14, 200, "new weights", "the sampler takes them", "over, and the next step", "begins"),
    ]
    for x, y, title, *lines in boxes:
        d.box(x, y, 196, 92, title, *lines)
    for x in (210, 434, 658):
        d.arrow(x + 3, 86, x + 25, 86)
        d.arrow(x + 25, 246, x + 3, 246)
    d.arrow(784, 135, 784, 197)
    d.arrow(112, 197, 112, 135)
    d.text(14, 24, "One step of training/loop.py. Only 1 and 2 are specific to agents.")
    d.text(
        14,
        318,
        "From 2 on, the action mask accompanies every tensor: only sampled tokens count.",
        12,
        "dim",
    )
    return d.done()


def verl() -> str:
    """Draw which verl process holds what."""
    d = Drawing(900, 400, "The processes of a run with verl")
    d.text(
        14, 24, "One run with --engine verl: processes, what they hold, what moves between them."
    )
    d.box(
        14,
        44,
        250,
        120,
        "agent-r1 (launcher)",
        "run folder, metrics.jsonl, signals",
        "starts Ray, watches it, cleans up",
        "questions in the order of training",
        "no weights",
    )
    d.box(
        324,
        44,
        250,
        120,
        "verl's trainer (driver)",
        "the step: nine calls",
        "advantages: our estimators",
        "batch of tensors (TransferQueue)",
        "no weights",
    )
    d.box(
        324,
        244,
        250,
        130,
        "FSDP workers, one per GPU",
        "actor: weights, gradients, Adam",
        "critic (ppo), reference (KL)",
        "policy loss: ours",
        "old log-probs, micro-batches",
    )
    d.box(
        634,
        244,
        250,
        130,
        "vLLM servers",
        "a copy of the actor's weights",
        "KV cache, prefix cache",
        "samples ids and log-probs",
        "",
    )
    d.box(
        634,
        44,
        250,
        120,
        "agent-loop workers",
        "our episode loop, environments,",
        "tools, rewards, masks",
        "no weights",
        "",
    )
    d.arrow(264, 104, 321, 104)
    d.text(292, 96, "config", 11, "dim", "middle")
    d.arrow(574, 88, 631, 88)
    d.text(603, 80, "prompts", 11, "dim", "middle")
    d.arrow(631, 124, 577, 124)
    d.text(603, 142, "rows", 11, "dim", "middle")
    d.arrow(740, 166, 740, 241)
    d.text(732, 208, "ids", 11, "dim", "end")
    d.arrow(780, 241, 780, 167)
    d.text(788, 208, "ids, log-probs", 11, "dim")
    d.arrow(430, 166, 430, 241)
    d.text(422, 208, "batch, advantages", 11, "dim", "end")
    d.arrow(470, 241, 470, 167)
    d.text(478, 208, "log-probs, losses", 11, "dim")
    d.arrow(577, 310, 631, 310)
    d.text(604, 302, "weights", 11, "dim", "middle")
    return d.done()


def collapse() -> str:
    """Draw a healthy and a collapsed run (higher learning rate) from one cold start."""
    runs = {
        kind: [json.loads(line) for line in (LESSONS / f"{kind}.jsonl").read_text().splitlines()]
        for kind in ("healthy", "collapsed")
    }
    panels = [
        ("reward/em", "exact match, sampled"),
        ("actor/entropy", "entropy, nats"),
        ("actor/ppo_kl", "KL while a batch is used"),
        ("tool_calls/mean", "calls per question"),
        ("groups/zero_advantage", "share with advantage 0"),
        ("stop/answered", "share that ends with an answer"),
    ]
    d = Drawing(900, 420, "A healthy run and a collapsed run")
    d.path([(20, 22), (50, 22)], "good", 3)
    d.text(58, 27, "healthy: actor.lr = 5e-4")
    d.path([(260, 22), (290, 22)], "bad", 3)
    d.text(298, 27, "collapsed: actor.lr = 3e-3, all else equal")
    for number, (name, title) in enumerate(panels):
        x0, y0 = 50 + 290 * (number % 3), 190 + 190 * (number // 3)
        top = max(max(line.get(name, 0.0) for line in run) for run in runs.values())
        bottom = min(0.0, min(min(line.get(name, 0.0) for line in run) for run in runs.values()))
        d.text(x0, y0 - 132, title)
        d.path([(x0, y0 - 120), (x0, y0), (x0 + 240, y0)], "line", 1)
        d.text(x0 - 5, y0 - 112, f"{top:.2g}", 10, "dim", "end")
        d.text(x0 - 5, y0, f"{bottom:.1g}", 10, "dim", "end")
        for kind, run in runs.items():
            points = [
                (
                    x0 + 240 * i / (len(run) - 1),
                    y0 - 120 * (line.get(name, 0.0) - bottom) / (top - bottom),
                )
                for i, line in enumerate(run)
            ]
            d.path(points, "good" if kind == "healthy" else "bad")
    d.text(
        50, 404, "32 steps, from left to right. Preset small, grpo, seed 0, one thread.", 12, "dim"
    )
    return d.done()


def architecture() -> str:
    """Draw the layers and packages of the source from the tree in docs/architecture.md."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    tree = re.search(r"^src/agent_r1/\n((?:  .*\n)+)", text, re.MULTILINE)
    assert tree, "docs/architecture.md has no tree"
    storeys: dict[str, list[tuple[list[str], list[str]]]] = {}
    for line in tree[1].splitlines():
        if entry := re.match(r"  (\w*) +((?:[\w.]+(?:/|\.py) ?)+) *(\d?) +(.*?)(?:  .*)?$", line):
            storey, names, number, words = entry.groups()
            rooms = storeys.setdefault(storey or list(storeys)[-1], [])
            title = textwrap.wrap(
                names.strip() + f"   {number}" * bool(number), 27, drop_whitespace=False
            )
            rooms.append((title, textwrap.wrap(words, 30)))
    bands, y = [], 104
    for storey, rooms in storeys.items():
        rows = [rooms[i : i + 4] for i in range(0, len(rooms), 4)]
        heights = [18 + 16 * max(len(title) + len(lines) for title, lines in row) for row in rows]
        bands.append((storey, y, rows, heights))
        y += sum(heights) + 8 * len(rows) + 22
    d = Drawing(900, y + 18, "The layers of the source and the packages in each")
    d.text(
        14,
        24,
        "src/agent_r1: a file imports from its own layer and from lower layers, never from higher "
        "ones.",
    )
    d.box(
        14,
        38,
        872,
        46,
        "recipes/   one folder each: data sets, worlds, tools, dialects, rewards, estimators, "
        "presets",
        "They import public names of agent_r1. The core imports none of them: a name in a setting "
        "leads to a recipe.",
    )
    for storey, top, rows, heights in bands:
        d.rect(14, top, 872, sum(heights) + 8 * len(rows) + 8, "read", 6)
        d.text(24, top + 26, storey, 14, "tgood")
        y = top + 8
        for row, height in zip(rows, heights, strict=True):
            for number, (title, lines) in enumerate(row):
                d.rect(92 + 197 * number, y, 190, height, "box", 6)
                for i, line in enumerate([*title, *lines]):
                    kind = (12, "") if i < len(title) else (11, "dim")
                    d.text(100 + 197 * number, y + 20 + 16 * i + 2 * (i >= len(title)), line, *kind)
            y += height + 8
        if storey != list(storeys)[-1]:
            d.arrow(44, y - 8, 44, y + 18)
    d.text(14, bands[-1][1] + sum(bands[-1][3]) + 8 * len(bands[-1][2]) + 28,
           "The numbers give the order in a run.", 12, "dim")  # fmt: skip
    return d.done()


PICTURES = {
    "before_after": before_after,
    "stairs": stairs,
    "architecture": architecture,
    "row": row,
    "masks": masks,
    "exact_turns": exact_turns,
    "clip": clip,
    "step": step,
    "verl": verl,
    "collapse": collapse,
}


def main(folder: Path = ROOT / "docs" / "images") -> None:
    for name, draw in PICTURES.items():
        (folder / f"{name}.svg").write_text(draw())


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
