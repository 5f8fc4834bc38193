"""Every error of ours has a code, and tests/messages.txt shows all messages to a person."""

from __future__ import annotations

import re

import pytest
from conftest import fails_with
from messages import SNAPSHOT, listed, raised

from agent_r1.ground.errors import ConfigError


def test_every_error_has_a_code():
    without = [place for place, code, _ in raised() if not code]
    assert len(raised()) > 250 and not without, without
    # `error.code`: an error that is raised again with more context keeps its code.
    form = re.compile(r"[a-z][a-z0-9_]*|error\.code|'\w+' if \w+ else '\w+'")
    assert [code for _, code, _ in raised() if not form.fullmatch(code)] == []


def test_the_list_of_messages_is_up_to_date():
    assert SNAPSHOT.read_text(encoding="utf-8") == listed(), (
        "python tests/messages.py writes it again: read the diff"
    )


@pytest.mark.parametrize(
    "raised_here",
    [None, ConfigError("x", code="another"), ConfigError("two\nlines", code="wanted")],
)
def test_an_error_that_a_test_asks_for_has_this_code_and_one_line(raised_here):
    with pytest.raises((AssertionError, pytest.fail.Exception)), fails_with("wanted"):
        if raised_here:
            raise raised_here
