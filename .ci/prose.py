"""Check the English of pages, docstrings and comments.

python .ci/prose.py            check every file
python .ci/prose.py PATH...    check these files
"""

import ast
import inspect
import re
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACES = "README* CONTRIBUTING* SECURITY* docs/**/* recipes/**/* benchmarks/**/* lab/**/* src/**/* one_file.py requirements/* .ci/* *.sh"
WORDS = r"\b(nobody|who(m|so)?ever|(?<!room )behind(?! (an?|the) (\w+ )?(proxy|mirror|firewall|gateway))|beside|mend(s|ed|ing)?|alike"
WORDS += r"|of one's own|in the place of|h[oe]ld(s|ing)?( \w+){0,4} against)\b"
NOT_IMPERATIVE = r"(the|an?|th[ai]t|th[ei]se?|its?|if|as|in|of|for|from|with|by|wh\w+|how|every|each|all|no|one|\w+[^s\W]s|\w+[^e\W]ed)\b"
CODE = re.compile(r"^[ >]*(```|~~~).*?^[ >]*\1`*$|\A---\n.*?\n---\n|<!--.*?-->|\$\$.*?\$\$|(`+)[^`]+?\2|\$[^$\n]+\$", re.DOTALL | re.MULTILINE)


def blocks(text: str):
    """Yield (line, text) of paragraphs, list items, headings and table rows, without code."""
    text = CODE.sub(lambda found: "Code" * (found[2] is not None) + "\n" * found[0].count("\n"), text)
    text = re.sub(r"!?\[([^]]*)\]\([^)]*\)|https?://\S+|</?\w[^>\n]*>", r"\1", text)
    block, start = [], 1
    for number, row in enumerate([*text.splitlines(), ""], 1):
        bare, item = row.strip(" >"), re.match(r"\s*([-*+]|\d+\.|[\w*`./-]+:)\s", row)  # or `name: text` of a docstring
        code = "   " in bare or row.startswith("    ") and not item and (not block or block[-1].endswith(":"))
        if block and (code or item or not bare or bare[0] in "|#" or block[0][0] in "|#"):
            yield start, " ".join(block)
            block = []
        if bare and not code:
            start, block = start if block else number, [*block, bare]


def sentences(text: str) -> list[tuple[int, str]]:
    """Split a paragraph at full stops, and count the words of each sentence."""
    text = re.sub(r"\b(e\.g|i\.e|et al|vs|cf|approx|[Ff]ig|[Ee]q|No)\.", r"\1", text)
    found = re.split(r"(?<=[.!?])[\"')\]*_]*\s+(?=[\"'(\[*_`]*[A-Z0-9`])", text)
    return [(len(re.findall(r"\S*\w\S*", sentence)), sentence) for sentence in found]


def findings(text: str, kind: str) -> list[str]:
    """Check the text of a file that ends in .md, .py or .sh."""
    found, fresh = [], True
    rows = [row.removeprefix("# ") if kind == ".md" or kind == ".sh" and row[:2] == "# " else "" for row in text.splitlines()]
    for token in tokenize.generate_tokens(iter(text.splitlines(True)).__next__) if kind == ".py" else ():
        line, column = token.start
        if token.type == tokenize.STRING and fresh:  # a docstring begins a line of code
            for i, row in enumerate(inspect.cleandoc(token.string.strip('"')).splitlines(), line - 1):
                rows[i] = row
        elif token.type == tokenize.COMMENT and not re.match(r"#!|# (fmt|noqa|type|pyright|ruff)\b", token.string):
            rows[line - 1] = "- " * bool(token.line[:column].strip()) + re.sub(r"^# ?-*", "", token.string)
        fresh = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, *(tokenize.COMMENT, tokenize.NL) * fresh)
    for line, block in blocks("\n".join(rows)):
        found += [f"{line}: {word[0]!r}" for word in re.finditer(WORDS, block, re.IGNORECASE)]
        found += [f"{line}: {n} words: {part}" for n, part in sentences(block) if n > 25 and block[0] not in "|#"]
    for node in ast.walk(ast.parse(text)) if kind == ".py" else ():
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if doc := function | isinstance(node, ast.ClassDef | ast.Module) and ast.get_docstring(node):
            n, first = sentences(doc.split("\n\n")[0])[0]
            found += [f"{node.body[0].lineno}: {n} words in the first sentence: {first}"] * (n > 15)
            if function and not node.decorator_list and re.match(NOT_IMPERATIVE, first, re.IGNORECASE):
                found.append(f"{node.lineno}: not an imperative: {first}")
    return found


if __name__ == "__main__":
    paths = {p for place in PLACES.split() for p in ROOT.glob(place) if p.suffix in (".md", ".py", ".sh")}
    paths = {Path(p).resolve() for p in sys.argv[1:]} or {p for p in paths if "tests" not in p.parts}
    found = [f"{path.relative_to(ROOT)}:{line}" for path in sorted(paths) for line in findings(path.read_text(), path.suffix)]
    print("\n".join(found), end="\n" if found else "")
    sys.exit(bool(found))
