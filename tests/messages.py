"""List every error code with its messages in tests/messages.txt: `python tests/messages.py` writes
the file again.

A person reads the list as a whole; tests compare codes, so a message can be rewritten without
editing tests.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
SNAPSHOT = Path(__file__).with_name("messages.txt")
ERRORS = ("AgentR1Error", "ConfigError", "LostConnection", "StalledError")


def raised() -> list[tuple[str, str | None, str]]:
    """List (place, code, message) of every error of ours in the source; the code is None if there
    is none."""
    found = []
    files = [
        *(ROOT / "src").rglob("*.py"),
        *(p for p in (ROOT / "recipes").rglob("*.py") if "tests" not in p.relative_to(ROOT).parts),
    ]
    for path in sorted(files):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ERRORS and node.args:
                code = next((word.value for word in node.keywords if word.arg == "code"), None)
                value = code.value if isinstance(code, ast.Constant) else code and ast.unparse(code)
                found.append(
                    (f"{path.relative_to(ROOT)}:{node.lineno}", value, template(node.args[0]))
                )
    return found


def template(message: ast.expr) -> str:
    """Return the message with `{...}` for each value."""
    if isinstance(message, ast.Constant):
        return str(message.value)
    if isinstance(message, ast.JoinedStr):
        return "".join(template(part) for part in message.values)
    if isinstance(message, ast.FormattedValue):
        return "{" + ast.unparse(message.value) + "}"
    if isinstance(message, ast.BinOp) and isinstance(message.op, ast.Add):
        return template(message.left) + template(message.right)
    return "{" + ast.unparse(message) + "}"


def listed() -> str:
    """Return the text of messages.txt: codes in alphabetical order, each with its messages."""
    messages = defaultdict(set)
    for _, code, message in raised():
        messages[code].add(" ".join(message.split()))
    return (
        "\n".join(
            "\n".join([str(code), *(f"    {m}" for m in sorted(messages[code]))])
            for code in sorted(messages, key=str)
        )
        + "\n"
    )


if __name__ == "__main__":
    SNAPSHOT.write_text(listed(), encoding="utf-8")
