"""Make a page of a module: docstrings and comments next to the code. Nothing is written twice, so nothing drifts."""

from __future__ import annotations

import ast
import html
import inspect
import re
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

import markdown
from latex2mathml.converter import convert
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

_BANNER = re.compile(r"^# -{5,} ?(.*)$")
_GREEK = {
    "gamma": r"\gamma",
    "lam": r"\lambda",
    "delta": r"\delta",
    "pi": r"\pi",
    "max": r"\max",
    "min": r"\min",
    "log": r"\log",
}


LESSONS = {
    int(page.name[:2]): page.stem
    for page in (Path(__file__).parents[1] / "lessons").glob("[0-9][0-9]-*.md")
}
"""Number of a lesson -> its page, without suffix."""
_LESSON = re.compile(r"\blesson (\d+)\b")


@dataclass
class Segment:
    """Prose, and the code that it is about."""

    prose: list[str] = field(default_factory=list)
    code: list[str] = field(default_factory=list)
    heading: str = ""


def annotated(source: str, name: str) -> str:
    """Markdown of the page: headings for the table of contents, and between them finished HTML."""
    parts = [f"---\nhide: [navigation, toc]\n---\n\n# {name.removeprefix('src/agent_r1/')}"]
    first, *others = segments(source)
    parts.append(f'<div class="introduction">{_html(first.prose)}</div>')
    imports, code = _split_imports(source, first.code)
    if imports:
        parts.append(f"<details><summary>Imports</summary>{_block(imports)}</details>")
    for segment in [Segment(code=code), *others]:
        if segment.heading:
            parts.append(segment.heading)
        code = "\n".join(segment.code).strip("\n")
        if code or segment.prose:
            notes = link_lessons(_html(segment.prose), name)
            prose = f'<div class="prose">{notes}</div>'
            parts.append(f'<div class="annotated">{prose}<div class="code">{_block(code)}</div></div>')
    return "\n\n".join(parts)


def link_lessons(notes: str, name: str) -> str:
    """Link each "lesson 5" of a file's notes to that lesson. An unknown number raises KeyError."""
    # The page of src/a.py is code/src/a.py.html, and that of a lesson is lessons/05-advantages.html.
    root = "../" * (name.count("/") + 1)

    def link(match: re.Match) -> str:
        page = LESSONS[int(match[1])]
        return f'<a class="lesson" href="{root}lessons/{page}.html">{match[0]}</a>'

    return _LESSON.sub(link, notes)


def _split_imports(source: str, code: list[str]) -> tuple[str, list[str]]:
    """Split the code of the first segment after its imports."""
    lines, nodes = source.splitlines(), ast.parse(source).body
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    imported = {line for node in imports for line in lines[node.lineno - 1 : node.end_lineno]}
    end = next((i for i, line in enumerate(code) if line and line not in imported), len(code))
    return "\n".join(code[:end]).strip("\n"), code[end:]


def _block(code: str) -> str:
    return f'<div class="highlight"><pre><code>{_coloured(code)}</code></pre></div>' if code else ""


def segments(source: str) -> list[Segment]:
    """Split a module where prose begins. Docstrings and comment lines are prose; all code lines stay, in order."""
    lines = source.splitlines()
    docs, starts, headings = _docstrings(ast.parse(source), lines)
    found, doc_lines = [Segment()], {n for first, last, _ in docs.values() for n in range(first, last + 1)}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if banner := _BANNER.match(text):
            title = banner[1].strip("- ")
            shown = title if f"def {title}(" in source else title.capitalize()  # the name of a function as it is
            found.append(Segment(heading=f"## {shown}" if title else ""))
            continue
        if number in starts:
            first, last, doc = docs[starts[number]]
            before = found[-1] if not found[-1].code else Segment()
            if before is not found[-1]:
                found.append(before)
            before.prose += [*([""] if before.prose else []), *doc.splitlines()]
            before.heading = headings.get(number, before.heading)
        if number in doc_lines or text.startswith("# fmt:"):
            continue
        if text.startswith("#") and not text.startswith("#!"):
            if found[-1].code and any(c.strip() for c in found[-1].code):
                found.append(Segment())
            found[-1].prose.append(text.lstrip("#").removeprefix(" "))
        else:
            found[-1].code.append(line)
    return [s for s in found if s.heading or any(p.strip() for p in s.prose) or any(c.strip() for c in s.code)]


def _docstrings(tree: ast.Module, lines: list[str]):
    """Find docstrings and headings by line.

    docs: line -> first, last, text; starts: first line of the object -> line of its docstring;
    headings: classes and functions of the module.
    """
    docs, starts, headings = {}, {}, {}
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for position, statement in enumerate(body):
            if not (isinstance(statement, ast.Expr) and isinstance(getattr(statement.value, "value", None), str)):
                continue
            docs[statement.lineno] = statement.lineno, statement.end_lineno, inspect.cleandoc(statement.value.value)
            about = node if position == 0 else body[position - 1]
            first = (
                min([about.lineno, *(d.lineno for d in getattr(about, "decorator_list", []))])
                if hasattr(about, "lineno")
                else 1
            )
            starts[first] = statement.lineno
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            headings[first] = f"### `{node.name}`"
    return docs, starts, headings


def _coloured(code: str) -> str:
    return highlight(code, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True)).rstrip("\n")


def _html(prose: list[str]) -> str:
    """Render docstrings as Markdown, with `<` as text.

    Indented lines stay as written, except in a list item.
    """
    text, out, block, item = textwrap.dedent("\n".join(prose)), [], [], False
    for line in [*text.splitlines(), ""]:
        item = bool(line.strip()) and (item or re.match(r"([*-]|\d+\.) ", line) is not None)
        if not item and (line.startswith("  ") or (block and not line.strip())):
            block.append(line)
            continue
        if block:
            out += ["", _laid_out(block), ""]
            block = []
        pieces = re.split(r"(`[^`]*`)", line)
        out.append("".join(p if p.startswith("`") else html.escape(p, quote=False) for p in pieces))
    if block:
        out += ["", _laid_out(block)]
    return markdown.markdown("\n".join(out), extensions=["tables", "sane_lists"])


def _laid_out(block: list[str]) -> str:
    """Render equations as formulas and other blocks with their spaces, in one line of HTML."""
    lines = textwrap.dedent("\n".join(block)).strip("\n").splitlines()
    formulas = [_equations(line) for line in lines if line.strip()]
    if formulas and all(formulas):
        rows = "".join(f"<tr>{formula}</tr>" for formula in formulas)
        return f"<div class='equations'><table class='equations'>{rows}</table></div>"
    return "<pre class='aside'>" + "&#10;".join(html.escape(line) or " " for line in lines) + "</pre>"


def _equations(line: str) -> str:
    """Return the table cells of a line of equations, or an empty text."""
    cells = []
    for column in re.split(r"\s{4,}", re.sub(r" +=", " =", line.strip())):
        column, _, remark = column.partition(": ")
        if match := re.fullmatch(r"([\w\[\]()| ]{1,24}) = (.+)", column):
            tex = _tex(match[1]) + " = " + _tex(match[2])
            cells.append(f"<td>{convert(tex)}{html.escape(', ' + remark) if remark else ''}</td>")
        elif cells:
            cells.append(f"<td>{html.escape(column)}</td>")
        else:
            return ""
    return "".join(cells)


def _tex(text: str) -> str:
    """Translate an equation of the source to TeX: gamma * V_{t+1} -> \\gamma V_{t+1}."""

    def word(match: re.Match) -> str:
        name, _, index = match[0].partition("_")
        if match[0] in _GREEK or (len(name) == 1 and not index):
            return _GREEK.get(match[0], match[0]) + " "
        head = _GREEK.get(name) or (name if len(name) == 1 else rf"\text{{{name}}}")
        if len(index) > 1 and len(name) > 1:
            return rf"\text{{{match[0]}}} "
        return f"{head}_{{{index}}} " if len(index) < 2 else rf"{head}_{{\text{{{index}}}}} "

    braced = re.split(r"(_\{[^}]*\}|\^\w)", text)
    out = "".join(p if i % 2 else re.sub(r"[A-Za-z]\w*?(?:_\w+)?(?!\w)", word, p) for i, p in enumerate(braced))
    return re.sub(r" (?=[_^])", "", out).replace("*", "").replace("%", r"\%")
