"""Count participles and empty shortenings as names, for src, recipes, lab or every PATH.

    .venv/bin/python .ci/names.py               # rates of src, recipes and lab
    .venv/bin/python .ci/names.py --list src    # file:line name, one a line
    .venv/bin/python .ci/names.py --root ../other_checkout

A participle alone does not say what a value is: `found` may be an index, a path or a flag. It does
not say what a function does either (`_tried`). A name is a noun for a value and a verb for a
function. Counted are

* variables: places that bind a participle alone (`kept`, `_asked`, `seen_BT`) or an empty
  shortening (`res`, `tmp`), by assignment, loop, `with`, walrus or comprehension;
* parameters and fields, likewise: some are public names, which stay;
* functions whose name is or begins with a participle (`stated`, `_made_by`).

Not in the list are words of the field: `done` and `truncated` (an episode's flags), `hidden` (a
layer's output), `split` (of a data set). A participle with a noun or an auxiliary verb
(`merged_config`, `is_closed`) is a good name.
Files in a folder `tests` are not counted, as in rates.py. tests/test_rates.py holds the rates.
"""

from __future__ import annotations

import argparse
import ast
import re
from pathlib import Path

from rates import FUNCTIONS, python_files

IRREGULAR = """
    been begun bent bitten blown bought broken brought built burnt caught chosen clung come dealt
    dealt done drawn driven dug eaten fallen fed felt flown forbidden forgiven forgotten fought
    found frozen given gone got gotten ground grown heard held hidden hung kept knelt known laid
    lain learnt led left lent lost made meant met mistaken overridden overwritten owed paid proven
    put redone rebuilt resent rewritten ridden risen rung said seen sent set sewn shaken shot shown
    shrunk shut slept sold sought spent spoken spread sprung spun stolen stood stuck struck sung
    sunk sworn swept swum taken taught thrown told torn undone understood unknown unseen untold
    withdrawn withheld woken won worn woven written
""".split()  # noqa: SIM905 (a list of words is easier to read so)
# A function may be called after these: as its first word they are verbs.
VERBS = {"come", "put", "set", "shut", "spread"}
# Variables only: as the first word of a function each is a verb.
VARIABLES_ONLY = {"read", "cut", "put", "hurt", "let", "cast"}
# Words in -ed that are no participles, and participles that became nouns or flags of the field.
NOUNS = {
    "bed", "breed", "done", "embed", "exceed", "feed", "ground", "hidden", "hundred", "indeed",
    "need", "proceed", "red", "sacred", "seed", "set", "shed", "shred", "sled", "speed", "spread",
    "succeed", "truncated", "unembed", "weed",
}  # fmt: skip
EMPTY = {"res", "tmp", "item", "items", "data", "obj", "val", "vals", "ret", "rv", "thing", "stuff"}
# The letters of a tensor's dimensions: logprobs_BT. A constant (READ_TOKENS) has none.
SHAPE = re.compile(r"(?<=[a-z\d])(_[A-Z]+)+$")


def is_participle(word: str) -> bool:
    if word in NOUNS or "_" in word:
        return False
    return word in IRREGULAR or (len(word) > 3 and word.endswith("ed"))


def is_poor_variable(name: str) -> bool:
    """Say whether a variable's name is a participle alone or an empty shortening."""
    word = SHAPE.sub("", name).strip("_").lower()
    return is_participle(word) or word in VARIABLES_ONLY or word in EMPTY


def is_poor_function(name: str) -> bool:
    """Say whether a function's name begins with a participle."""
    word = name.strip("_").split("_")[0].lower()
    return is_participle(word) and word not in VERBS


def bound_names(tree: ast.Module) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """List the line and the name of every binding: variables, then parameters and fields."""
    fields: set[ast.AST] = set()
    variables = []
    signatures = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            fields.update(part.target for part in node.body if isinstance(part, ast.AnnAssign))
        elif isinstance(node, ast.arg):
            signatures.append((node.lineno, node.arg))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            signatures.append((node.lineno, node.attr))
        elif isinstance(node, ast.ExceptHandler) and node.name:
            variables.append((node.lineno, node.name))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names = signatures if node in fields else variables
            names.append((node.lineno, node.id))
    return variables, signatures


def functions(tree: ast.Module) -> list[tuple[int, str]]:
    return [(node.lineno, node.name) for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]


def count(path: Path, root: Path) -> tuple[dict[str, list[str]], dict[str, float]]:
    """Return the places of poor names in `path`, and their rates, by kind.

    Variables, and parameters and fields, are counted per 10,000 lines; functions per 1,000.
    """
    lines = 0
    all_functions = 0
    poor: dict[str, list[str]] = {"variables": [], "signatures": [], "functions": []}
    for file in python_files(path):
        text = file.read_text(encoding="utf-8")
        tree = ast.parse(text)
        place = file.relative_to(root)
        lines += len(text.splitlines())
        variables, signatures = bound_names(tree)
        for kind, bindings in (("variables", variables), ("signatures", signatures)):
            for line, name in bindings:
                if is_poor_variable(name):
                    poor[kind].append(f"{place}:{line}: {name}")
        for line, name in functions(tree):
            all_functions += 1
            if is_poor_function(name):
                poor["functions"].append(f"{place}:{line}: {name}()")
    rates = {
        "variables": 10_000 * len(poor["variables"]) / max(1, lines),
        "signatures": 10_000 * len(poor["signatures"]) / max(1, lines),
        "functions": 1_000 * len(poor["functions"]) / max(1, all_functions),
    }
    return poor, rates


def main() -> None:
    parser = argparse.ArgumentParser(description="Count participles as names.")
    parser.add_argument("paths", nargs="*", default=["src", "recipes", "lab"], metavar="PATH")
    parser.add_argument("--root", default=".", type=Path, help="the checkout to read")
    parser.add_argument("--list", action="store_true", help="print each place")
    args = parser.parse_args()

    for path in args.paths:
        poor, rates = count(args.root / path, args.root)
        for kind, rate in rates.items():
            if args.list:
                print(f"# {path}: {kind}", *poor[kind], sep="\n")
            name = "parameters and fields" if kind == "signatures" else kind
            per = "1,000" if kind == "functions" else "10,000 lines"
            print(f"{path}: {len(poor[kind])} {name}: {rate:.1f} per {per}")


if __name__ == "__main__":
    main()
