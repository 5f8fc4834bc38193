"""`make docs`: the book is built strict, loads nothing from elsewhere, and its annotated source is the source."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from runs import ROOT

sys.path.insert(0, str(ROOT / "docs" / "site"))
from annotate import segments  # noqa: E402

pytestmark = pytest.mark.slow  # the whole book is built
PATH = re.findall(r"\((src/agent_r1/[\w/]+\.py)\)", (ROOT / "README.md").read_text().split("## What is special")[0])


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("book") / "site"
    (command,) = re.findall(r"\$\(BIN\)/(mkdocs .*) -d", (ROOT / "Makefile").read_text(), re.MULTILINE)
    built = subprocess.run(
        [f"{sys.prefix}/bin/{command.split()[0]}", *command.split()[1:], "-d", folder],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert built.returncode == 0, built.stdout + built.stderr  # a link or an anchor that leads nowhere is an error
    return folder


def test_every_page_loads_nothing_from_elsewhere(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 30
    loading = re.compile(r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?((?:https?:)?//[^"'>\s]+)""")
    sheets = re.compile(
        r"""<link\b(?=[^>]*rel=["']?(?:stylesheet|preload|preconnect|icon))[^>]*href=["']?((?:https?:)?//\S+)"""
    )
    for page in pages:
        text = page.read_text()
        assert not loading.findall(text) and not sheets.findall(text), page.name
    for sheet in site.rglob("*.css"):
        assert not re.findall(r"url\([\"']?(?:https?:)?//", sheet.read_text()), sheet.name


def test_formulas_are_drawn_and_the_book_can_be_searched(site):
    lesson = (site / "lessons" / "01-agents.html").read_text()
    assert (
        lesson.count("<math") > 10
        and "arithmatex" not in lesson
        and "$" not in re.sub(r"<script.*?</script>", "", lesson)
    )
    index = (site / "search" / "search_index.js").read_text()
    assert "A real episode" in index and "lessons/01-agents.html" in index


class Prose(HTMLParser):
    """Of a page's article: its prose (no code, formula or heading), with \x01 before and \x02 behind a word that is linked."""

    def __init__(self, page: str):
        super().__init__()
        self.open, self.said, self.words = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        if tag not in ("br", "img", "input", "meta", "link", "hr"):
            self.open.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        while any(tag == name for name, _ in self.open) and self.open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        tags = [tag for tag, _ in self.open]
        if "article" in tags and not {"code", "pre", "math", "h1", "h2", "h3", "summary"} & set(tags):
            links = [attrs for tag, attrs in self.open if tag == "a"]
            if links and links[-1].get("class") == "word":
                self.words.append((data, links[-1]["href"].split("#")[1]))
                self.said.append(f"\x01{data}\x02")
            elif not links:
                self.said.append(data)


def test_a_lessons_first_use_of_a_word_leads_to_the_glossary(site):
    there = (site / "glossary.html").read_text()
    words = re.findall(r"^\| ([^|]+?) \| ", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)[1:]
    for page in sorted((site / "lessons").glob("[0-9]*.html")):
        prose = Prose(page.read_text())
        anchors = [anchor for _, anchor in prose.words]
        assert len(set(anchors)) == len(anchors) > 5, "linked once each"
        assert all(f'id="{a}"' in there or f"id={a}>" in there for a in anchors)
        text = " ".join("".join(prose.said).split())
        for word in ("action mask", "advantage", "group", "GRPO", "reward", "policy", "episode", "entropy"):
            first = re.search(rf"\b{word}s?\b", text, 0 if word.isupper() else re.IGNORECASE)
            longer = [w for w in words if w != word and word in w]  # "advantage mask" is a word of its own
            if first and not any(text[max(0, first.start() - 20) : first.end() + 20].count(w) for w in longer):
                assert text[first.start() - 1] == "\x01" and text[first.end()] == "\x02", (page.name, word)


@pytest.mark.parametrize("name", PATH)
def test_the_annotated_source_is_the_source(site, name):
    """All code of a module on the reading path stands on its page, in order; all else of it is prose there."""
    source = (ROOT / name).read_text()
    shown = [line for s in segments(source) for line in s.code if line.strip()]
    rest = iter(source.splitlines())
    assert all(line in rest for line in shown), "the page has a line that the source has not, or in another order"
    prose = " ".join(" ".join(p for s in segments(source) for p in s.prose).split())
    for line in source.splitlines():
        words = line.strip().strip('"').lstrip("#").strip().replace("\\\\", "\\")
        if words and line not in shown and not words.startswith("---"):
            assert " ".join(words.split()) in prose, line
    page = html.unescape(re.sub(r"<[^>]+>", "", (site / "code" / f"{name}.html").read_text()))
    for line in shown:
        assert line.strip() in page
