"""Draw the museum's curves, docs/images/museum.svg: python -m lab.pictures.museum

A panel per exhibit shows exact match of each step, smoothed over three steps. Red curves are the
exhibit's runs, and green curves those that it is compared with.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import fmean

from agent_r1_recipes.diagnose.archive import unpack
from agent_r1_recipes.diagnose.files import read_evidence
from agent_r1_recipes.museum.record import RECORDINGS, score_of
from agent_r1_recipes.museum.run import read_exhibits
from lab.pictures.book import ROOT, Drawing

OUT = ROOT / "docs" / "images" / "museum.svg"
COLUMNS, WIDE, HIGH, MARGIN, TOP = 4, 222, 130, 14, 58


def curves(name: str, recordings: Path) -> list[list[float]]:
    folders = sorted(recordings.glob(f"{name}-s*"))
    runs = [score_of(read_evidence(folder).lines) for folder in folders]
    return [[fmean(run[max(0, at - 1) : at + 2]) for at in range(len(run))] for run in runs]


def museum() -> str:
    with tempfile.TemporaryDirectory() as folder:
        recordings = unpack(RECORDINGS, Path(folder))
        curves_of = {name: curves(name, recordings) for name in read_exhibits()}
    exhibits = [
        exhibit for exhibit in read_exhibits().values() if exhibit.patch and curves_of[exhibit.name]
    ]
    rows = -(-len(exhibits) // COLUMNS)
    d = Drawing(
        MARGIN + COLUMNS * WIDE,
        TOP + rows * HIGH + 6,
        "Exact match in training: each exhibit and the runs without its bug",
    )
    d.text(MARGIN, 24, "Exact match in training (0 to 1) over 32 steps", 16)
    d.text(MARGIN, 43, "green: without the bug; red: with it; one curve per seed", 12, "dim")
    for number, exhibit in enumerate(exhibits):
        x, y = MARGIN + number % COLUMNS * WIDE, TOP + number // COLUMNS * HIGH
        w, h = WIDE - 22, HIGH - 42
        d.text(x, y + 14, exhibit.name, 12)
        d.rect(x, y + 22, w, h, "box")
        for name, kind in ((exhibit.compare, "good"), (exhibit.name, "bad")):
            for curve in curves_of[name]:
                last = len(curve) - 1
                d.path(
                    [(x + w * at / last, y + 22 + h * (1 - em)) for at, em in enumerate(curve)],
                    kind,
                    1.5,
                )
    return d.done()


if __name__ == "__main__":
    Path(OUT).write_text(museum())
