"""docs/metrics.md and docs/glossary.md, held against what runs write. tests/test_verl_train.py asks the same of verl."""

from __future__ import annotations

import fnmatch
import json
import re

import pytest
from runs import ROOT, lines, metric_patterns, undocumented


@pytest.fixture(scope="module")
def written(produced) -> dict[str, set[str]]:
    return {
        name: {key for line in lines(produced / "runs" / name) for key in json.loads(line)} for name in ("grpo", "ppo")
    }


def test_every_key_of_the_local_loop_is_explained(written):
    assert undocumented(written["grpo"] | written["ppo"]) == []


UNASKED = ("actor/reward_kl_penalty", "reward/process_scale", "rollout/episodes_played", "rollout/score_chosen",
           "training/rollout_kl", "training/rollout_ratio_max", "actor/rollout_is_weight")  # fmt: skip
"""Of settings that the runs looked at here leave at their default."""


def test_what_is_said_of_the_local_loop_is_written(written):
    """No line of the page outlives its metric."""
    for name, where in metric_patterns().items():
        if "L" in where.split() and not ("opt" in where.split() and name in UNASKED):
            found = [alg for alg, keys in written.items() if fnmatch.filter(keys, name)]
            assert "ppo" in found if "ppo" in where.split() else found, f"nobody writes {name}"


def test_a_key_that_is_not_there_is_noticed():
    assert undocumented(["actor/entropy", "reward/any", "actor/entropies"]) == ["actor/entropies"]


GLOSSARY, TROUBLE, EXPERIMENTS = (
    (ROOT / "docs" / f"{name}.md").read_text() for name in ("glossary", "troubleshooting", "lab/experiments")
)


def test_the_glossary_is_in_order():
    words = re.findall(r"^\| ([^|]+?) \| ", GLOSSARY, re.MULTILINE)[1:]
    assert words == sorted(words, key=str.lower)


def test_messages_under_troubleshooting_are_messages_of_ours():
    sources = "\n".join(p.read_text() for p in [*ROOT.glob("src/**/*.py"), *ROOT.glob("requirements/*.sh")])
    plain = " ".join(re.sub(r'"\s*f?"', "", sources).split())
    said = re.findall(r"^\| `([^`]+ [^`]+)` \|", TROUBLE, re.MULTILINE)
    assert len(said) >= 5
    for message in said:
        if not message.startswith("cannot import name"):  # Python's own
            assert all(part.strip() in plain for part in message.split("...")), message


def test_figures_of_the_experiments_stand_on_their_pages():
    """A figure is moved with the page that explains it."""
    for line in re.findall(r"^\| .*\[\w+(?: \d)?\]\(([^)]+)\) \|$", EXPERIMENTS, re.MULTILINE):
        assert (ROOT / "docs/lab" / line.split("#")[0]).exists()
    rows = re.findall(
        r"^\| (?:laptop|smoke)[^|]* \| [^|]* \| (\.\d{3}) \| (\.\d{3}).*\]\(([^)]+)\) \|$", EXPERIMENTS, re.MULTILINE
    )
    assert len(rows) >= 8
    for before, after, page in rows:
        text = (ROOT / "docs/lab" / page.split("#")[0]).read_text() + (ROOT / "docs/lab/leaderboard.md").read_text()
        text += "".join(p.read_text() for p in (ROOT / "docs/lessons").glob("*.md"))
        assert after in text or after.replace(".", "0.") in text, after
        assert before in text or before.replace(".", "0.") in text, before
