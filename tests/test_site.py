"""`make docs`: the book is built strict, loads nothing from elsewhere, and its annotated source is
the source."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from pathlib import Path

import pytest
from runs import ROOT

sys.path.insert(0, str(ROOT / "docs" / "site"))
from annotate import annotated, segments  # noqa: E402

pytestmark = pytest.mark.slow  # the whole book is built
PATH = ["one_file.py"] + re.findall(
    r"^\d+\. \[[\w./]+\]\((src/agent_r1/[\w/]+\.py)\)",
    (ROOT / "README.md").read_text(),
    re.MULTILINE,
)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("book") / "site"
    (command,) = re.findall(
        r"\$\(BIN\)/(mkdocs .*) -d", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    built = subprocess.run(
        [f"{sys.prefix}/bin/{command.split()[0]}", *command.split()[1:], "-d", folder],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert built.returncode == 0, (
        built.stdout + built.stderr
    )  # a link or an anchor that leads nowhere is an error
    return folder


def test_the_book_loads_nothing_from_elsewhere_and_draws_its_formulas(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 30
    loading = re.compile(
        r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?((?:https?:)?//[^"'>\s]+)"""
    )
    sheets = re.compile(
        r"""<link\b(?=[^>]*rel=["']?(?:stylesheet|preload|preconnect|icon))[^>]*href=["']?((?:https?:)?//\S+)"""
    )
    for page in pages:
        text = page.read_text()
        assert not loading.findall(text) and not sheets.findall(text), page.name
    for sheet in site.rglob("*.css"):
        assert not re.findall(r"url\([\"']?(?:https?:)?//", sheet.read_text()), sheet.name
    assert (site / "lessons" / "01-agents.html").read_text().count("<math") > 10
    assert "lessons/01-agents.html" in (site / "search" / "search_index.js").read_text()


@pytest.mark.parametrize("name", PATH)
def test_the_annotated_source_is_the_source(site, name):
    """All code of a module on the reading path stands on its page, in order; all else of it is
    prose there."""
    source = (ROOT / name).read_text()
    shown = [line for s in segments(source) for line in s.code if line.strip()]
    rest = iter(source.splitlines())
    assert all(line in rest for line in shown), (
        "the page has a line that the source has not, or in another order"
    )
    prose = " ".join(" ".join(p for s in segments(source) for p in s.prose).split())
    for line in source.splitlines():
        words = line.strip().strip('"').lstrip("#").strip().replace("\\\\", "\\")
        if words and line not in shown and not words.startswith(("---", "fmt:")):
            assert " ".join(words.split()) in prose, line
    page = html.unescape(re.sub(r"<[^>]+>", "", (site / "code" / f"{name}.html").read_text()))
    for line in shown:
        assert line.strip() in page


def test_a_note_links_to_its_lesson(site):
    page = annotated('"""X."""\n\nA = 1\n# Why (lesson 5).\nB = 2\n', "src/x.py")
    assert '<a class="lesson" href="../../lessons/05-advantages.html">lesson 5</a>' in page
    links = 0
    for name in PATH:
        file = site / "code" / f"{name}.html"
        for target in re.findall(r'class="lesson" href="([^"]+)"', file.read_text()):
            assert (file.parent / target).resolve().is_file(), (name, target)
            links += 1
    assert links >= 12


def test_a_list_item_of_a_docstring_stays_whole_and_a_block_keeps_its_lines():
    page = annotated('"""Count.\n\n* one, that\n  goes on\n\n    a block\n"""\n', "x.py")
    assert (
        re.search(r"<li>one, that\s+goes on</li>", page)
        and "<pre class='aside'>a block</pre>" in page
    )
