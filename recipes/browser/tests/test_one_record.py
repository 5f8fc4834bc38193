"""A record is taken out of a proposed change alone, and nothing of the change runs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from agent_r1_recipes.browser.page import HERE

PROGRAM = HERE.parents[1] / ".ci" / "one_record.py"
RECORD = "recipes/browser/records/mine.json"


@pytest.fixture
def repository(tmp_path):
    def git(*words):
        settings = ["-c", "user.name=a", "-c", "user.email=a@b.invalid"]
        command = ["git", *settings, *words]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q", "-b", "main")
    (tmp_path / "README.md").write_text("text")
    git("add", ".")
    git("commit", "-qm", "first")
    git("checkout", "-qb", "change")
    (tmp_path / RECORD).parent.mkdir(parents=True)
    return tmp_path, git


def propose(repository):
    """Commit what lies in the folder, go back to main, and take the record out."""
    folder, git = repository
    git("add", ".")
    git("commit", "-qm", "record")
    git("checkout", "-q", "main")
    command = [sys.executable, PROGRAM, "main", "change"]
    done = subprocess.run(command, cwd=folder, capture_output=True)
    assert not (folder / RECORD).exists()
    return done.returncode, done.stdout, done.stderr.decode()


def test_the_bytes_of_one_new_record_come_out(repository):
    (repository[0] / RECORD).write_bytes(b'{"format": 1}\r\n\0')
    assert propose(repository) == (0, b'{"format": 1}\r\n\0', "")


def with_code(folder):
    (folder / RECORD).write_text("{}")
    (folder / "conftest.py").write_text("boom")


def a_link(folder):
    os.symlink("/etc/passwd", folder / RECORD)


def a_program(folder):
    (folder / RECORD).write_text("{}")
    (folder / RECORD).chmod(0o755)


CHANGES = {
    "2 files; a record is proposed alone": with_code,
    "new ordinary file": a_link,
    "not a new ordinary file": a_program,
    "more than 4096 bytes": lambda folder: (folder / RECORD).write_text(" " * 4097),
    "not recipes/browser/records": lambda folder: (folder / "README.md").write_text("other"),
    "NAME.json": lambda folder: (folder / RECORD).with_name("a b.json").write_text("{}"),
}


@pytest.mark.parametrize("reason", CHANGES)
def test_any_other_change_is_refused(repository, reason):
    CHANGES[reason](repository[0])
    code, out, error = propose(repository)
    assert code and not out and reason in error


def test_the_job_uses_no_secret_and_the_code_of_the_base_branch():
    text = (HERE.parents[1] / ".github/workflows/record.yml").read_text()
    assert "secrets." not in text and "permissions: {contents: read}" in text
    assert "pull_request.base.sha" in text and "head.sha" not in text
    assert "timeout-minutes: 30" in text and "MemoryMax" in text
