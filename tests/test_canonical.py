"""Pages quote one run of seed 0: docs/lab/canonical.json, made by lab/experiments/canonical.py."""

from __future__ import annotations

import json
import re

import pytest
from runs import ROOT

from agent_r1.config import load_config, presets

FACTS = json.loads((ROOT / "docs/lab/canonical.json").read_text())
BEFORE, AFTER, SECONDS = FACTS["before"], FACTS["after"], FACTS["seconds"]


def share(value: float) -> str:
    """A share as pages write it: .960"""
    return f"{value:.3f}".lstrip("0")


def interval(figures: dict) -> str:
    low, high = figures["interval"]
    return f"{share(low)} to {share(high)}"


def hops(figures: dict) -> str:
    return ", ".join(f"{kind} {share(em)}" for kind, em in figures["hops"].items())


EM = [share(BEFORE["em"]), share(AFTER["em"])]
PASS = [share(BEFORE["pass^8"]), share(AFTER["pass^8"])]
RIGHT = round(AFTER["em"] * FACTS["questions"])
QUOTED = {
    "README.md": [
        f"rose from {EM[0]} to {EM[1]} (95 % {interval(AFTER)}). "
        f"Pass^8 rose from {PASS[0]} to {PASS[1]}.",
        f" | {SECONDS['whole']} s |",
        f"on {FACTS['questions']} test questions",
    ],
    "docs/laptop.md": [
        f"the canonical run | {SECONDS['whole']} s | {SECONDS['cold start']} s "
        f"| {SECONDS['RL']} s | {EM[0]} → {EM[1]} |",
        f"greedy {EM[0]} (95 %: {interval(BEFORE)}), sampled {share(BEFORE['sampled'])}",
        f"greedy {EM[1]} ({interval(AFTER)}), sampled {share(AFTER['sampled'])}; {hops(AFTER)}",
        f"in the canonical run: {hops(BEFORE)}",
    ],
    "docs/lab/experiments.md": [f"| {EM[0]} | {EM[1]} | {interval(AFTER)} | `{FACTS['command']}`"],
    "docs/inference/inference.md": [f"answers {EM[1]} of its {FACTS['questions']} test questions"],
    "docs/lessons/10-inference.md": [
        f"| {EM[1]} | {share(AFTER['sampled'])} |",
        f"A score of {EM[1]} is {RIGHT} right answers to {FACTS['questions']} questions",
        f"wilson_interval({RIGHT} / {FACTS['questions']}, {FACTS['questions']})",
    ],
    "recipes/laptop/README.md": [f"| {EM[0]} | {EM[1]} | {SECONDS['whole']} s |"],
}


@pytest.mark.parametrize("page", QUOTED)
def test_a_page_quotes_the_canonical_run(page):
    text = (ROOT / page).read_text()
    assert [quote for quote in QUOTED[page] if quote not in text] == []


def test_the_canonical_run_is_the_command_of_the_readme():
    """The README leaves out the algorithm, which is the default."""
    *plain, algorithm = FACTS["command"].split()
    assert load_config(presets.DEFAULT).algorithm == algorithm
    readme = (ROOT / "README.md").read_text()
    assert re.search(rf"^{re.escape(' '.join(plain))} +#", readme, re.MULTILINE)
    assert AFTER["em"] > BEFORE["em"] and SECONDS["whole"] > SECONDS["RL"]


def strangers(text: str) -> list[str]:
    """Lines about the plain command or the canonical run with a score that is not its own."""
    own = {
        share(em) for f in (BEFORE, AFTER) for em in (f["em"], f["sampled"], *f["hops"].values())
    }
    own |= {share(f["pass^8"]) for f in (BEFORE, AFTER)}
    own |= {share(bound) for figures in (BEFORE, AFTER) for bound in figures["interval"]}
    about = re.compile(
        r"speedrun-nodocker\.sh(?: grpo)?`|canonical run|grpo`?, seed 0|seed 0, grpo", re.I
    )
    return [
        line
        for line in text.splitlines()
        if about.search(line) and set(re.findall(r"(?<![\d.])\.\d{3}\b", line)) - own
    ]


def test_no_other_run_of_seed_0_is_quoted_outside_the_lab():
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("docs/lessons/*.md")]
    pages += [*ROOT.glob("docs/inference/*.md"), ROOT / "recipes/laptop/README.md"]
    assert {page.name: found for page in pages if (found := strangers(page.read_text()))} == {}


@pytest.mark.parametrize(
    "line",
    [
        "That agent of `bash speedrun-nodocker.sh` answers .948 of its questions.",
        "That agent of `bash speedrun-nodocker.sh grpo` answers .948 of its questions.",
        "Seed 0, grpo: greedy .962.",
        "The canonical run rose from .330 to .960.",
    ],
)
def test_a_planted_figure_is_found(line):
    assert strangers(line) == [line]
