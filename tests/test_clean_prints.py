"""Whatever may be a stranger's words loses its control characters before it is printed.

The syntax tree is searched for `print` with something computed in it. It must be `clean`ed, or its
file prints only numbers and words of ours. Consoles of rich must be `CleanConsole`s.
"""

from __future__ import annotations

import ast
import io
import sys

import pytest
from rich.console import Group
from rich.markdown import Markdown
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from runs import ROOT

from agent_r1.app import cli
from agent_r1.ground.clean_console import CleanConsole

OURS = {
    "src/agent_r1/ground/ui.py": "`say` and progress of ours",
    "src/agent_r1/ground/preflight.py": "facts of this machine, before the package is installed",
    "src/agent_r1/app/cli.py": "a preset for this machine's GPUs",
    "recipes/browser/build.py": "our compiler's record",
    "recipes/browser/measure.py": "our figures",
    "recipes/browser/page.py": "sizes and a path that you gave",
    "recipes/exact/table.py": "numbers and names of ours",
    "recipes/exact/report.py": "numbers; its two texts are cleaned",
    "recipes/museum/record.py": "folders of ours",
    "recipes/museum/run.py": "exhibits of ours",
}
"""File -> what it prints without `clean`."""


def unclean(text: str) -> list[str]:
    """Prints whose first value is neither a literal, nor JSON, nor `clean`."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if not (isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "Console")):
            continue
        if ast.unparse(node.func) == "Console":
            found.append(ast.unparse(node))
        for value in node.args:
            words = ast.unparse(value)
            literal = isinstance(value, ast.Constant)
            if not literal and not words.startswith("json.dumps(") and "clean(" not in words:
                found.append(words)
    return found


def test_nothing_is_printed_that_was_not_cleaned():
    for folder in ("src/agent_r1", "recipes"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            name = str(file.relative_to(ROOT))
            if not {"tests", "template"} & {*file.relative_to(ROOT).parts} and name not in OURS:
                assert unclean(file.read_text()) == [], f"{name}: use agent_r1.say"


@pytest.mark.parametrize(
    "line", ["print(f'{name}')", "print(name)", "print('a', b)", "print(*names)", "Console()"]
)
def test_a_planted_print_is_found(line):
    assert unclean(line)
    assert not unclean("print(clean(name)), print('done'), print(json.dumps(name)), say(name)")


HOSTILE = "a\x1b]0;title\x07\x1b[31mred\x9b2Jb\r\x08c\u202etxt"
RENDERED = [
    HOSTILE,
    Text(HOSTILE, "red"),
    Panel(HOSTILE, title=HOSTILE),
    Group(Text(HOSTILE), HOSTILE),
    Markdown(HOSTILE),
]


@pytest.mark.parametrize("what", RENDERED, ids=lambda what: type(what).__name__)
def test_a_console_prints_no_control_character_of_others(what):
    for colours in (None, "truecolor"):
        out = io.StringIO()
        console = CleanConsole(
            file=out, color_system=colours, force_terminal=bool(colours), width=200
        )
        console.print(what, markup=False)
        table = Table(HOSTILE)
        table.add_row(HOSTILE)
        console.print(table)
        printed = out.getvalue()
        assert "red" in printed and printed.count("\n") >= 2  # the words are still there
        for sign in ("\x1b]", "\x07", "\x9b", "\x08", "\u202e", "\r"):
            assert sign not in printed
        assert ("\x1b[" in printed) == bool(colours)  # its own colours
        assert "\x1b[31mred" not in printed


def test_a_traceback_of_a_command_cannot_steer_the_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["agent-r1", "doctor"])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def fail(words):
        raise RuntimeError(HOSTILE)

    monkeypatch.setattr(cli, "run_command", fail)
    with pytest.raises(RuntimeError) as caught:
        cli.main()
    sys.excepthook(caught.type, caught.value, caught.tb)
    printed = capsys.readouterr().err
    assert "Traceback" in printed and "red" in printed
    assert "\x1b" not in printed and "\u202e" not in printed
