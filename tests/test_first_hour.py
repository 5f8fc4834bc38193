"""The first hour of docs/index.md is short, and README's table has one rule.

Words are counted as `wc -w` counts them, code and tables included, over the pages that the table of
the first hour links to, and docs/index.md up to "Stop here". README counts whole.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from pathlib import Path

import pytest

from agent_r1.config import Config
from agent_r1.evaluation.reliability import student_quantile

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
INDEX = (DOCS / "index.md").read_text()
BEFORE_STOP = INDEX[: INDEX.index("**Stop here.**")]
TABLE = BEFORE_STOP[BEFORE_STOP.index("## The first hour") :]
MOST_WORDS, MOST_SETTINGS, MOST_LINKS = 6200, 5, 60
"""Before this page 17,200 words, 55 settings and 160 links stood before the twelve files."""


def texts() -> dict[str, str]:
    """Return what is read in the first hour, by file, in its order."""
    read = {"docs/index.md": BEFORE_STOP}
    for link in re.findall(r"\]\(([^)#]+)\)", TABLE):
        path = (DOCS / link).resolve()
        read[str(path.relative_to(ROOT))] = path.read_text()
    return read


def test_the_first_hour_leads_to_the_end_of_lesson_2():
    assert list(texts())[1:] == [
        "README.md",
        "one_file.py",
        "docs/lessons/00-reinforcement-learning.md",
        "docs/lessons/01-agents.md",
        "docs/lessons/02-a-rollout.md",
    ]
    rows = [line for line in TABLE.splitlines() if re.match(r"\| \d", line)]
    assert len(rows) == 8
    for row in rows:  # each step says what to do, what to look at, and where to stop
        assert all(cell.strip() for cell in row.strip("|").split("|")), row


def test_the_first_hour_is_short():
    words = sum(len(text.split()) for text in texts().values())
    [stated] = re.findall(r"about ([\d,]+) words with the code", TABLE)
    assert words <= int(stated.replace(",", "")) <= words + 500 <= MOST_WORDS
    assert len(settings_in("\n".join(texts().values()))) <= MOST_SETTINGS
    assert len(settings_in((DOCS / "laptop.md").read_text())) > 20  # it does find them
    links = set()
    for name, page in texts().items():
        links |= {(Path(name).parent / link) for link in re.findall(r"\]\(([^)#]+)", page)}
    assert len(links) <= MOST_LINKS


def settings_in(text: str) -> set[str]:
    found = set()
    for section, field in Config.model_fields.items():
        for name in getattr(field.annotation, "model_fields", ()):
            if re.search(rf"\b{section}\.{name}\b", text):
                found.add(f"{section}.{name}")
    return found


def test_lesson_2_quotes_an_episode_of_the_default_run():
    page = (DOCS / "lessons/02-a-rollout.md").read_text()
    turns = json.loads((DOCS / "lessons/before_after.jsonl").read_text().splitlines()[1])["turns"]
    for turn in turns:
        thought = turn[: turn.index("</think>") + len("</think>")]
        query = re.search(r'"query": ("\w+")', turn)
        end = f"<tool_call> ... {query[1]} ...\n" if query else turn[len(thought) :] + "\n"
        assert f"{thought}{end}" in page


def share(value: float) -> str:
    return f"{value:.3f}".lstrip("0")


def seeds_of(name: str) -> tuple[list[float], list[float]]:
    """Return greedy exact match before and after RL, a value a seed."""
    seeds = json.loads((DOCS / f"lab/{name}.json").read_text())["seeds"].values()
    key = "em" if name == "pocket" else "greedy"
    return [one["before"][key] for one in seeds], [one["after"][key] for one in seeds]


@pytest.mark.parametrize("name", ["discover", "smoke", "pocket"])
def test_a_row_of_the_readme_is_the_mean_over_its_seeds(name):
    before, after = seeds_of(name)
    count, mean = len(after), statistics.mean(after)
    margin = student_quantile(0.975, count - 1) * statistics.stdev(after) / math.sqrt(count)
    figures = f"{share(statistics.mean(before))} → {share(mean)}"
    interval = f"({share(mean - margin)} to {share(mean + margin)})"
    lines = (ROOT / "README.md").read_text().splitlines()
    [row] = [line for line in lines if re.match(rf"\| two CPU cores \| \[?`{name}`", line)]
    assert f"| {figures} {interval} | {count} |" in row


def test_the_figures_of_smoke_are_its_means_or_say_their_seed():
    """Three pages once gave three starts of it, each of another run."""
    before, after = seeds_of("smoke")
    means = (share(statistics.mean(before)), share(statistics.mean(after)))
    laptop = (DOCS / "laptop.md").read_text()
    start = f"mean {means[0]} before RL (at most {share(max(before))})"
    assert f"{start} and {means[1]} after (at least {share(min(after))})" in laptop
    pages = [ROOT / "README.md", *DOCS.glob("*.md"), *(DOCS / "lessons").glob("*.md")]
    lines = [line for page in pages for line in page.read_text().splitlines()]
    rows = [line for line in lines if re.match(r"\|.*(`smoke`|--preset smoke)", line)]
    figures = [pair for row in rows for pair in re.findall(r"(\.\d{3}) → (\.\d{3})", row)]
    assert figures.count(means) == 2  # README and the page of presets
    [seed_0] = [pair for pair in figures if pair != means]
    table = laptop.partition(f"{seed_0[0]} → {seed_0[1]}")[0]
    assert "test EM, seed 0 |" in table.rpartition("\n\n")[2]
