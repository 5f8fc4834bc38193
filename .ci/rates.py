"""Print idioms per 1,000 code lines, for src, recipes and every PATH.

    .venv/bin/python .ci/rates.py                 # src and recipes
    .venv/bin/python .ci/rates.py src/agent_r1/env tests
    .venv/bin/python .ci/rates.py --root ../other_checkout --by-file src

The rates tell how densely code is written. A code line is not blank, not a comment alone and not
part of a docstring. With `--docstrings` each docstring counts as one line; surveys often count so,
and the rates are then a tenth lower. Files in a folder `tests` are not
counted, unless PATH is such a folder or a file. No test enforces the rates.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

LINE = 100  # columns: longer lines are counted
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SCOPES = (ast.Module, *FUNCTIONS)
COLUMNS = (
    "packed assignment",  # a, b = x, y
    "conditional",  # x if y else z
    "conditional in conditional",
    "comprehension",  # with generator expressions
    "nested comprehension",  # one comprehension within another
    "two loops in one",  # a comprehension with two `for`
    "walrus",
    "starred",  # *x at a call, in a display or as a target; neither a signature nor **x
    "lambda",
    "map or filter",
    "splat of a pack",  # a call with *name or **name, where name was built for it
    "line over 100",
)


def python_files(path: Path) -> list[Path]:
    """List the Python files of `path`, without environments, caches and (below a package) tests."""
    if path.is_file():
        return [path]
    files = []
    for file in sorted(path.rglob("*.py")):
        folders = file.relative_to(path).parts[:-1]
        hidden = any(folder.startswith(".") for folder in folders)
        if not hidden and "tests" not in folders and "__pycache__" not in folders:
            files.append(file)
    return files


def docstring_lines(tree: ast.Module) -> set[int]:
    """Return the numbers of all lines that belong to a docstring or another bare string."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        if isinstance(node.value.value, str):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def code_lines(text: str, tree: ast.Module, docstrings: bool = False) -> int:
    """Count the lines that hold code; with `docstrings`, the first line of each docstring too."""
    lines: set[int] = set()
    starts: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            starts.add(token.start[0])
            lines.update(range(token.start[0], token.end[0] + 1))
    if docstrings:
        return len(starts)
    return len(lines - docstring_lines(tree))


def is_display(value: ast.expr | None) -> bool:
    """Say whether `value` builds a tuple, list or dict at this place."""
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id in ("dict", "tuple", "list")
    if isinstance(value, ast.IfExp):
        return is_display(value.body) or is_display(value.orelse)
    return isinstance(value, ast.Tuple | ast.List | ast.Dict)


def scope_nodes(scope: ast.AST) -> list[ast.AST]:
    """List what is in `scope`, without the inside of functions defined there."""
    nodes = []
    waiting = list(ast.iter_child_nodes(scope))
    while waiting:
        node = waiting.pop()
        nodes.append(node)
        if not isinstance(node, FUNCTIONS):
            waiting.extend(ast.iter_child_nodes(node))
    return nodes


def splatted_packs(tree: ast.Module) -> list[ast.Call]:
    """List the calls whose arguments were put into a tuple or dict first.

    A list or dict that later statements extend, or that a loop reads too, is data and no pack.
    """
    calls = []
    for scope in ast.walk(tree):
        if not isinstance(scope, SCOPES):
            continue
        nodes = scope_nodes(scope)
        packs = set()
        other_uses: Counter[str] = Counter()
        splats: list[tuple[str, ast.Call]] = []
        stars = set()
        for node in nodes:
            if isinstance(node, ast.Assign) and is_display(node.value):
                packs.update(target.id for target in node.targets if isinstance(target, ast.Name))
            if isinstance(node, ast.Call):
                spread = [arg.value for arg in node.args if isinstance(arg, ast.Starred)]
                spread += [keyword.value for keyword in node.keywords if keyword.arg is None]
                for value in spread:
                    stars.add(value)
                    if isinstance(value, ast.Name):
                        splats.append((value.id, node))
        for node in nodes:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node not in stars:
                other_uses[node.id] += 1
        calls += [call for name, call in splats if name in packs and not other_uses[name]]
    return calls


def holds_comprehension(node: ast.AST) -> bool:
    """Say whether a comprehension has another comprehension inside."""
    inside = [child for child in ast.walk(node) if child is not node]
    return any(isinstance(child, COMPREHENSIONS) for child in inside)


def is_packed(node: ast.AST) -> bool:
    """Say whether `node` assigns several values to several names in one statement."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    return any(isinstance(target, ast.Tuple) for target in node.targets)


def count(text: str, docstrings: bool = False) -> Counter[str]:
    """Count the idioms of one file; `code` is its number of code lines."""
    tree = ast.parse(text)
    counts: Counter[str] = Counter(code=code_lines(text, tree, docstrings))
    counts["line over 100"] = sum(len(line) > LINE for line in text.splitlines())
    counts["splat of a pack"] = len(splatted_packs(tree))
    for node in ast.walk(tree):
        if is_packed(node):
            counts["packed assignment"] += 1
        elif isinstance(node, ast.IfExp):
            counts["conditional"] += 1
            inside = [child for child in ast.walk(node) if child is not node]
            if any(isinstance(child, ast.IfExp) for child in inside):
                counts["conditional in conditional"] += 1
        elif isinstance(node, COMPREHENSIONS):
            counts["comprehension"] += 1
            counts["nested comprehension"] += holds_comprehension(node)
            counts["two loops in one"] += len(node.generators) > 1
        elif isinstance(node, ast.NamedExpr):
            counts["walrus"] += 1
        elif isinstance(node, ast.Lambda):
            counts["lambda"] += 1
        elif isinstance(node, ast.Starred):
            counts["starred"] += 1
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            counts["map or filter"] += node.func.id in ("map", "filter")
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description="Print idioms per 1,000 code lines.")
    parser.add_argument("paths", nargs="*", default=["src", "recipes"], metavar="PATH")
    parser.add_argument("--root", default=".", type=Path, help="the checkout to read")
    parser.add_argument("--by-file", action="store_true", help="absolute counts of each file")
    parser.add_argument("--absolute", action="store_true", help="counts, not rates")
    parser.add_argument("--docstrings", action="store_true", help="count each as one code line")
    args = parser.parse_args()

    rows: list[tuple[str, Counter[str]]] = []
    for path in args.paths:
        total: Counter[str] = Counter()
        for file in python_files(args.root / path):
            counts = count(file.read_text(encoding="utf-8"), args.docstrings)
            total.update(counts)
            if args.by_file:
                rows.append((str(file.relative_to(args.root)), counts))
        rows.append((path, total))

    width = max(len(name) for name, _ in rows)
    if args.by_file:
        print("counts; columns as below:", ", ".join(COLUMNS))
        for name, counts in rows:
            numbers = "".join(f"{counts[column]:6d}" for column in COLUMNS)
            print(f"{name:{width}s} {counts['code']:7d}{numbers}")
        return
    kind = "counts" if args.absolute else "per 1,000 code lines"
    print(f"{kind:28s}" + "".join(f"{name:>24s}" for name, _ in rows))
    print(f"{'code lines':28s}" + "".join(f"{counts['code']:24,d}" for _, counts in rows))
    for column in COLUMNS:
        cells = ""
        for _, counts in rows:
            if args.absolute:
                cells += f"{counts[column]:24d}"
            else:
                cells += f"{1000 * counts[column] / max(1, counts['code']):24.1f}"
        print(f"{column:28s}{cells}")


if __name__ == "__main__":
    main()
