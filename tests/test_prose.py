"""The checks of the English: .ci/prose.py, codespell with .ci/words.txt, and ruff's pydocstyle."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest
from runs import ROOT

SPEC = util.spec_from_file_location("prose", ROOT / ".ci/prose.py")
prose = util.module_from_spec(SPEC)
SPEC.loader.exec_module(prose)

PHRASE = "The rows are held against the table."
LONG = "a " * 25 + "sentence."
AT_MOST = "A " + "b " * 23 + "c."


@pytest.mark.parametrize(
    ("kind", "text", "lines"),
    [
        (".md", f"# Title\n\nThe rows are\nheld against the table. {AT_MOST} {AT_MOST}", [3]),
        (
            ".md",
            f"`a` runs behind a proxy.\n\n```\n{PHRASE}\n```\n| {LONG} |\n- {AT_MOST}\n- {AT_MOST}",
            [],
        ),
        (".md", f"- one\n- {LONG}\n\n| a cell behind it |", [2, 4]),
        (
            ".py",
            f'"""Print a row."""\n\nx = "{PHRASE}"\n"""{PHRASE}"""\n\n# behind\n\ny = 1  # {LONG}',
            [4, 6, 8],
        ),
        (
            ".py",
            'def f():\n    """Add `a` to b, e.g. 1.5.\n\n        x = behind\n\n'
            '    It is a sum.\n    """',
            [],
        ),
        (".py", 'def f():\n    """The sum."""\n\n\ndef g():\n    """What it costs."""', [1, 5]),
        (".py", f'"""{"word " * 16}."""\n', [1]),
        (".sh", f"#!/bin/bash\n# {PHRASE}\necho behind", [2]),
    ],
)
def test_findings(kind, text, lines):
    assert [int(found.split(":")[0]) for found in prose.findings(text, kind)] == lines


def test_phrases():
    assert prose.phrase_findings(3, "It stands behind a row.") == ["3: 'behind'"]
    assert prose.phrase_findings(3, "It works behind a reverse proxy.") == []
    assert prose.phrase_findings(3, "room: The room behind it.") == []  # of a door


def test_lengths():
    assert prose.length_findings(1, AT_MOST) == [] == prose.length_findings(1, f"| {LONG} |")
    [finding] = prose.length_findings(1, f"Short. {LONG.capitalize()}")
    assert finding.startswith("1: 26 words: A a")


def test_first_sentences_of_docstrings():
    decorated = 'class A:\n    @property\n    def f(self):\n        """The sum."""\n'
    assert prose.docstring_findings(decorated) == []
    assert prose.docstring_findings('"""The file of a task is no function."""\n') == []
    [finding] = prose.docstring_findings(decorated.replace("    @property\n", ""))
    assert finding == "2: not an imperative: The sum."


def test_sentences():
    assert prose.sentences("One, e.g. 1.5. Two (as in *a*.) Three?") == [
        "One, e.g 1.5.",
        "Two (as in *a*.",
        "Three?",
    ]
    assert prose.word_count("Two words, - and 3 others.") == 5


def test_paragraphs_have_their_first_line_and_no_code():
    text = "One\ntwo.\n\n    code\n\n- three\n- `four`\n| five |"
    assert list(prose.paragraphs(text)) == [
        (1, "One two."),
        (6, "- three"),
        (7, "- Code"),
        (8, "| five |"),
    ]
    assert not prose.is_code("    - an entry", True, [])
    assert prose.is_code("    x = 1", False, ["Example:"])
    assert prose.is_code("name   value", False, ["A table"])


def test_code_and_links_are_left_out_and_lines_stay():
    text = "---\nhead\n---\nA `b` of $x$, see [c](d.md).\n```\nbehind\n```\nEnd"
    rows = ["", "", "", "A Code of , see c.", "", "", "", "End"]
    assert prose.without_code(text).splitlines() == rows


def test_prose_of_a_program():
    text = '#!/bin/sh\n# One.\nx = 1  # two\nif x:  # noqa\n    "text"\n'
    assert prose.python_prose(text) == ["", "One.", "- two", "", "text"]
    assert list(prose.shell_comments("#!/bin/sh\n# One.\necho # two")) == ["", "One.", ""]
    assert prose.prose_of("# A title", ".md") == "# A title"


@pytest.fixture
def project(tmp_path) -> Path:
    """A project with a finding, and two environments with files that are not ours."""
    folder = tmp_path / "project"
    for name in (".ci", ".venv/lib", "benchmarks/compare/env/lib", "docs/tests"):
        (folder / name).mkdir(parents=True)
    shutil.copy(ROOT / ".ci/prose.py", folder / ".ci")
    (folder / "README.md").write_text(f"{PHRASE}\n")
    (folder / "docs/tests/page.md").write_text(f"{PHRASE}\n")
    (folder / ".gitignore").write_text(".venv/\nenv/\n")
    (folder / "benchmarks/compare/env/pyvenv.cfg").touch()
    for name in (".venv/lib/foreign.py", "benchmarks/compare/env/lib/foreign.py"):
        (folder / name).write_bytes(b"# caf\xe9 behind\n")
    return folder


def checked(folder: Path, *words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, folder / ".ci/prose.py", *words]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("git", [True, False])
def test_environments_are_not_read(project, git):
    if git:
        subprocess.run(["git", "init", "-q", project], check=True)
    done = checked(project)
    assert done.returncode == 1 and done.stdout == "README.md:1: 'held against'\n", done.stderr
    listed = checked(project, "--list").stdout.split()
    assert {".ci/prose.py", "README.md", "docs/tests/page.md"} <= set(listed)
    assert not [name for name in listed if "foreign" in name]


def test_a_folder_in_a_foreign_checkout_is_read_as_one_without_git(project):
    """Git would list nothing there that the outer project ignores."""
    subprocess.run(["git", "init", "-q", project.parent], check=True)
    (project.parent / ".gitignore").write_text("project/\n")
    assert prose.files_of_git(project) is None
    assert checked(project).stdout == "README.md:1: 'held against'\n"


def test_a_deleted_file_is_not_read(project):
    subprocess.run(["git", "init", "-q", project], check=True)
    subprocess.run(["git", "-C", project, "add", "README.md"], check=True)
    (project / "README.md").unlink()
    assert checked(project).returncode == 0


def test_a_file_that_is_not_utf_8_is_a_finding_with_its_name(project):
    (project / "benchmarks/speed.py").write_bytes(b"# caf\xe9\n")
    done = checked(project)
    assert "benchmarks/speed.py:1: not UTF-8: invalid continuation byte at byte 5" in done.stdout
    assert done.returncode == 1 and not done.stderr


def linted(command: str, *words: str | Path) -> str:
    program = Path(sys.prefix) / "bin" / command
    return subprocess.run([program, *words], cwd=ROOT, capture_output=True, text=True).stdout


def test_codespell_knows_the_words(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("Nobody mends it, and teh end.\n")
    shown = linted("codespell", page)
    assert "Nobody ==> No one" in shown and "mends ==> " in shown and "teh ==> the" in shown


def test_ruff_knows_imperatives(tmp_path):
    file = tmp_path / "code.py"
    file.write_text('def f():\n    """Returns a sum."""\n')
    assert "D401" in linted("ruff", "check", "--config", ROOT / "pyproject.toml", file)
