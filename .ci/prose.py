"""Check the English of pages, docstrings and comments.

    python .ci/prose.py            check every file of the project
    python .ci/prose.py PATH...    check these files
    python .ci/prose.py --list     print the names of the project's files, for codespell

`make lint` lets ruff check moods of docstrings (D401), and codespell check single words
(.ci/words.txt). This script checks the rest: phrases, and how long sentences are.
"""

from __future__ import annotations

import ast
import inspect
import io
import os
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
KINDS = (".md", ".py", ".sh")
MOST_WORDS = 25
"""Of a sentence."""
MOST_FIRST_WORDS = 15
"""Of a docstring's first sentence."""
UNCHECKED = {"tests", "conftest.py", "CHANGELOG.md", "notebooks"}
"""Folders and files whose English is not checked. Test names say what a test does."""
NOT_OURS = {"__pycache__", "artifacts", "build", "evals", "logs", "node_modules", "runs", "wandb"}
"""Folders that git would ignore; needed where there is no git."""

PHRASES = re.compile(
    r"\b((?<!room )behind(?! (an?|the) (\w+ )?(proxy|mirror|firewall|gateway))"
    r"|of one's own|in the place of|h[oe]ld(s|ing)?( \w+){0,4} against)\b",
    re.IGNORECASE,
)
FIRST_WORDS = re.compile(
    r"(th[ai]t|th[ei]se|its?|if|as|in|of|for|from|with|by|wh\w+|how"
    r"|every|each|all|no|one|the|an?)\b",
    re.IGNORECASE,
)
"""Words that begin no imperative. D401 knows verbs in a wrong form, such as *returns*."""
DIRECTIVE = re.compile(r"#!|# (fmt|noqa|type|pyright|ruff)\b")
CODE = re.compile(
    r"^[ >]*(```|~~~).*?^[ >]*\1`*$"  # a fenced block
    r"|\A---\n.*?\n---\n"  # the head of a page
    r"|<!--.*?-->"
    r"|\$\$.*?\$\$|(`+)[^`]+?\2|\$[^$\n]+\$",
    re.DOTALL | re.MULTILINE,
)
LINK = re.compile(r"!?\[([^]]*)\]\([^)]*\)|https?://\S+|</?\w[^>\n]*>")
LIST_ENTRY = re.compile(r"\s*([-*+]|\d+\.|[\w*`./-]+:)\s")
"""Also `name: text` of a docstring."""
ABBREVIATION = re.compile(r"\b(e\.g|i\.e|et al|vs|cf|approx|[Ff]ig|[Ee]q|No)\.")
SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]*_]*\s+(?=[\"'(\[*_`]*[A-Z0-9`])")


# ---------------------------------------------------------------------------------- which files


def files_of_git(root: Path) -> list[Path] | None:
    """List what git tracks or would track; None without a checkout at `root`."""
    top = ["git", "-C", str(root), "rev-parse", "--show-toplevel"]
    names = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        place = subprocess.run(top, capture_output=True, text=True)
        if place.returncode or Path(place.stdout.strip()).resolve() != root.resolve():
            return None
        listed = subprocess.run(names, capture_output=True, text=True, check=True)
    except OSError:  # there is no git
        return None
    paths = [root / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.is_file()]  # a deleted file is still tracked


def files_without_git(root: Path) -> list[Path]:
    """List the files below `root`, without those of environments and without hidden folders."""
    paths = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if is_ours(Path(folder, name))]
        paths += [Path(folder, name) for name in names]
    return paths


def is_ours(folder: Path) -> bool:
    """Tell a folder of the project from an environment, a cache or results."""
    if folder.name in (".ci", ".github"):
        return True
    hidden = folder.name.startswith(".")
    environment = (folder / "pyvenv.cfg").exists()
    return not (hidden or environment or folder.name in NOT_OURS)


def project_files(root: Path) -> list[Path]:
    """List the project's files."""
    paths = files_of_git(root)
    if paths is None:
        paths = files_without_git(root)
    return sorted(paths)


def is_checked(path: Path) -> bool:
    """Tell whether the English of this file, relative to the root, is checked."""
    return path.suffix in KINDS and not UNCHECKED.intersection(path.parts)


# ------------------------------------------------------------------------------ from file to text


def prose_of(text: str, kind: str) -> str:
    """Return the prose of a file on its own lines; lines of code are empty."""
    if kind == ".md":
        return text
    if kind == ".sh":
        return "\n".join(shell_comments(text))
    return "\n".join(python_prose(text))


def shell_comments(text: str) -> Iterator[str]:
    """Yield each line's comment, if the line is nothing else."""
    for row in text.splitlines():
        if row.startswith("# "):
            yield row[2:]
        else:
            yield ""


def python_prose(text: str) -> list[str]:
    """Return docstrings and comments, line by line."""
    rows = [""] * len(text.splitlines())
    new_line = True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        line, column = token.start
        if token.type == tokenize.STRING and new_line:  # a docstring begins a line of code
            docstring = inspect.cleandoc(token.string.strip('"'))
            for i, row in enumerate(docstring.splitlines(), line - 1):
                rows[i] = row
        elif token.type == tokenize.COMMENT and not DIRECTIVE.match(token.string):
            comment = re.sub(r"^# ?-*", "", token.string)
            trailing = bool(token.line[:column].strip())
            rows[line - 1] = f"- {comment}" if trailing else comment  # each its own paragraph
        if token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            new_line = True
        elif token.type not in (tokenize.COMMENT, tokenize.NL):
            new_line = False
    return rows


def without_code(text: str) -> str:
    """Replace code, formulas and links by a word or nothing; lines keep their numbers."""

    def stand_in(match: re.Match[str]) -> str:
        word = "Code" if match[2] is not None else ""
        return word + "\n" * match[0].count("\n")

    return LINK.sub(r"\1", CODE.sub(stand_in, text))


# ------------------------------------------------------------------------- from text to sentences


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of paragraphs, list entries, headings and table rows, without code."""
    rows: list[str] = []
    start = 1
    for number, row in enumerate([*without_code(text).splitlines(), ""], 1):
        bare = row.strip(" >")
        entry = bool(LIST_ENTRY.match(row))
        code = is_code(row, entry, rows)
        if rows and (code or entry or not bare or bare[0] in "|#" or rows[0][0] in "|#"):
            yield start, " ".join(rows)
            rows = []
        if bare and not code:
            if not rows:
                start = number
            rows.append(bare)


def is_code(row: str, entry: bool, before: list[str]) -> bool:
    """Tell whether a row is indented code or a table of columns."""
    columns = "   " in row.strip(" >")
    indented = row.startswith("    ") and not entry
    return columns or (indented and (not before or before[-1].endswith(":")))


def sentences(paragraph: str) -> list[str]:
    """Split a paragraph at its full stops."""
    return SENTENCE_END.split(ABBREVIATION.sub(r"\1", paragraph))


def word_count(sentence: str) -> int:
    """Count the words that have a letter or a digit."""
    return len(re.findall(r"\S*\w\S*", sentence))


# ------------------------------------------------------------------------------------- the checks


def phrase_findings(line: int, paragraph: str) -> list[str]:
    """Report each phrase that is not plain English."""
    return [f"{line}: {match[0]!r}" for match in PHRASES.finditer(paragraph)]


def length_findings(line: int, paragraph: str) -> list[str]:
    """Report long sentences; headings and table rows have none."""
    if paragraph[0] in "|#":
        return []
    findings = []
    for sentence in sentences(paragraph):
        words = word_count(sentence)
        if words > MOST_WORDS:
            findings.append(f"{line}: {words} words: {sentence}")
    return findings


def docstring_findings(text: str) -> list[str]:
    """Report first sentences that are long, and those of functions that are no imperative."""
    findings = []
    for node in ast.walk(ast.parse(text)):
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if not function and not isinstance(node, ast.ClassDef | ast.Module):
            continue
        docstring = ast.get_docstring(node)
        if not docstring:
            continue
        first = sentences(docstring.split("\n\n")[0])[0]
        words = word_count(first)
        if words > MOST_FIRST_WORDS:
            line = node.body[0].lineno
            findings.append(f"{line}: {words} words in the first sentence: {first}")
        if function and not node.decorator_list and FIRST_WORDS.match(first):
            findings.append(f"{node.lineno}: not an imperative: {first}")
    return findings


def findings(text: str, kind: str) -> list[str]:
    """Check the text of a file that ends in .md, .py or .sh."""
    found = []
    for line, paragraph in paragraphs(prose_of(text, kind)):
        found += phrase_findings(line, paragraph)
        found += length_findings(line, paragraph)
    if kind == ".py":
        found += docstring_findings(text)
    return found


def file_findings(path: Path) -> list[str]:
    """Check a file; bytes that are not UTF-8 are its only finding."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        return [f"1: not UTF-8: {error.reason} at byte {error.start}"]
    return findings(text, path.suffix)


def main(words: list[str]) -> int:
    """Print the findings of these files, or of all; return 1 if there are any."""
    if words == ["--list"]:
        for path in project_files(ROOT):
            print(path.relative_to(ROOT))
        return 0
    paths = [Path(word).resolve() for word in words]
    if not words:
        paths = [path for path in project_files(ROOT) if is_checked(path.relative_to(ROOT))]
    count = 0
    for path in paths:
        name = os.path.relpath(path, ROOT)
        for finding in file_findings(path):
            print(f"{name}:{finding}")
            count += 1
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
