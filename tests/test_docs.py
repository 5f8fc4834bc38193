"""What README and docs say, held against the code."""

from __future__ import annotations

import json
import re
import runpy

import pytest
from PIL import Image
from runs import ROOT, TINY

from agent_r1.config import load_config
from agent_r1.data.build import build
from agent_r1.data.storage import read_corpus, read_rows
from agent_r1.workspace import Workspace
from agent_r1_recipes.laptop.demonstrator import lookups_of
from agent_r1_recipes.laptop.tinyhop import HEADS, TAILS

README, LAPTOP = (ROOT / "README.md").read_text(), (ROOT / "docs/laptop.md").read_text()


def made_of(picture) -> list[dict]:
    return json.loads(Image.open(picture).text["agent-r1"])


def test_the_curve_is_of_the_preset_as_it_stands():
    [facts] = made_of(ROOT / "docs/images/laptop.png")
    config = load_config(str(ROOT / "lab/laptop.yaml"), algorithm="ppo")
    assert facts["steps"] == config.trainer.steps
    assert (facts["preset"], facts["algorithm"]) == ("laptop", "ppo")
    before, after = (f"{facts[name]:.3f}".lstrip("0") for name in ("before", "after"))
    text = (ROOT / "docs/lab/laptop.md").read_text()
    # the row of its seed
    assert re.search(rf"\| {facts['seed']} \| {before} \|.*\| {after} \|", text)


def test_no_training_question_is_about_the_test_world(produced, monkeypatch):
    """What docs/laptop.md says, by the table that its measurement of what is *read* stands on."""
    monkeypatch.setenv("AGENT_R1_HOME", str(produced))
    tool = runpy.run_path(str(ROOT / "lab/experiments/held_out_reading.py"))
    config = load_config("small", TINY[1:])
    worlds = tool["world_of"](config)
    for split in ("train", "val", "test", "cold"):
        asked = {
            lookup["entity"]
            for row in Workspace(config).load_rows(split)
            for lookup in lookups_of(row)
        }
        assert asked and {worlds[name] for name in asked} == {split}


@pytest.fixture(scope="session")
def laptop_world(tmp_path_factory):
    """(test questions, passages by title) of the default preset's world, seed 0: the one that a
    newcomer has."""
    folder = tmp_path_factory.mktemp("default") / "data"
    build(load_config().data, 0, folder)
    asked = {row["prompt"][-1]["content"] for row in read_rows(folder / "test.parquet")}
    return asked, {passage.title: passage.text for passage in read_corpus(folder / "corpus.jsonl")}


def told() -> list[str]:
    """All that a newcomer reads before the first question: README, docs, help texts (they stand in
    the source)."""
    places = (
        "README.md",
        "CONTRIBUTING.md",
        "*.sh",
        "docs/**/*.md",
        "docs/**/*.py",
        "src/**/*.py",
        "notebooks/*.ipynb",
    )
    return [path.read_text() for place in places for path in sorted(ROOT.glob(place))]


def test_every_example_question_can_be_answered(laptop_world):
    questions, passages = laptop_world
    example = re.compile(
        r"""(?:--question|openai_client\.py) \\?"([^"\\….]+)"""
        r"""\\?"|\*((?:Who|Where|Which|In)\b[^*]+\?)\*"""
    )
    found = [match[1] or match[2] for text in told() for match in example.finditer(text)]
    assert len(found) >= 8 and set(found) <= questions
    # And every made-up name is somebody's, where it is used as an example.
    name = re.compile(rf"\b(?:{'|'.join(HEADS)})(?:{'|'.join(TAILS)})\b", re.IGNORECASE)
    text = "\n".join(
        (
            README,
            LAPTOP,
            (ROOT / "docs/architecture.md").read_text(),
            (ROOT / "docs/data.md").read_text(),
        )
    )
    names = {word for word in name.findall(text) if word.istitle()}
    assert {"Sosnum", "Bumvel"} <= names <= passages.keys()
    for quoted in re.findall(r"^> (.+)$", LAPTOP, re.MULTILINE):
        assert quoted in passages.values()
    assert not any("vexlor" in text.lower() for text in told())


CASES = (ROOT / "docs/lab/cases.md").read_text()


def test_every_test_that_a_page_names_is_there():
    """A page that cites a test as evidence must not outlive it: files, functions, and parts of
    `make long`."""
    files = [*ROOT.glob("tests/*.py"), *ROOT.glob("recipes/*/tests/*.py")]
    tests = "\n".join(path.read_text() for path in files)
    there = {path.name for path in files} | set(re.findall(r"^def (test_\w+)", tests, re.MULTILINE))
    parts = {path.stem for path in ROOT.glob("lab/rehearsals/[a-z]*.py")}
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("notebooks/*.ipynb")]
    named = {str(page.relative_to(ROOT)): page.read_text() for page in pages}
    cited = {
        (page, name)
        for page, text in named.items()
        for name in re.findall(r"\btest_\w+(?:\.py)?", text)
    }
    # `agent-r1 new` writes this file into the task of the tutorial.
    cited.remove(("docs/tutorial/your-own-task-in-30-minutes.md", "test_task.py"))
    cited.remove(("docs/from-agent-r1-0.1.md", "test_freq"))  # a setting of the original
    long = r"make long`?(?: PART=|, part )'?(\w+)"
    run = {(page, name) for page, text in named.items() for name in re.findall(long, text)}
    assert len(cited) > 15 and {pair for pair in cited if pair[1] not in there} == set()
    assert len(run) > 3 and {pair for pair in run if pair[1] not in parts} == set()


def test_a_test_that_is_cited_with_its_file_is_in_that_file():
    """As `tests/test_x.py::test_y`, or as a link to the file."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    cited = set()
    for page in pages:
        text = page.read_text()
        cited |= {(ROOT / file, name) for file, name in re.findall(r"`(\S+\.py)::(\w+)`", text)}
        links = re.findall(r"\[`(test_\w+)`\]\((\S+\.py)\)", text)
        cited |= {(page.parent / file, name) for name, file in links}
    for file, name in cited:
        assert re.search(rf"^(async )?def {name}\(", file.read_text(), re.MULTILINE), (file, name)
    assert len(cited) > 60


def test_each_case_of_the_page_names_its_test():
    """The cases are those of the two reviews."""
    rows = re.findall(r"^\| ([NC]?\d[^|]*|N, small) \|.*\| `(\S+)::(\w+)` \|$", CASES, re.MULTILINE)
    assert len(rows) == len(re.findall(r"^\| (?!case|-)", CASES, re.MULTILINE))
    listed = {number for case, _, _ in rows for number in re.findall(r"[NC]?\d+", case)}
    expected = {f"N{n}" for n in (2, 4, 6, 8, 9, 10, 11, 12)} | {f"C{n}" for n in range(1, 18)}
    assert listed == expected | {str(n) for n in range(1, 18)}


def test_serving_without_vllm_is_on_the_pages_that_name_serve():
    pages = ("tutorial/your-own-task-in-30-minutes.md", "inference/inference.md", "commands.md")
    for page in pages:
        words = (ROOT / "docs" / page).read_text()
        assert re.search(r"agent-r1 serve [^`\n]*--backend local", words), page


def test_the_page_counts_its_files():
    words = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    words += ("eleven", "twelve")
    folder = ROOT / "recipes" / "browser"
    c_files, js_files = (len(list(folder.glob(pattern))) for pattern in ("c/*.c", "js/*.js"))
    sentence = f"These are {words[c_files]} C files and {words[js_files]} JavaScript files"
    assert sentence in (folder / "README.md").read_text()


STATUS = re.compile(r"^Status: \[\*\*(supported|example|experiment)\*\*\]", re.MULTILINE)
ROW = re.compile(r"^\| \[(\w+)\]\(\1/README\.md\) \| (\w+) \|", re.MULTILINE)


def test_each_recipe_says_its_status_as_the_list_of_recipes_does():
    said = {
        page.parent.name: STATUS.findall(page.read_text())
        for page in (ROOT / "recipes").glob("*/README.md")
    }
    listed = ROW.findall((ROOT / "recipes/README.md").read_text())
    assert {name: [status] for name, status in listed} == said
    assert len(listed) == len(said) > 30
