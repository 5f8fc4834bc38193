"""Tables of names: every name resolves, and a wrong one is refused with the nearest."""

from __future__ import annotations

import sys

import pytest

from agent_r1.config import plugins, tables
from agent_r1.ground.errors import ConfigError

KINDS = [kind for kind in tables._tables()]


@pytest.mark.parametrize("kind", KINDS)
def test_every_name_of_a_table_is_code_that_exists(kind):
    for name in tables.names(kind):
        assert (
            "publishers" in tables.entries(kind)[name]
            or tables.resolve(kind, name, "here") is not None
        )


def test_an_unknown_name_is_refused_with_the_nearest_one():
    with pytest.raises(
        ConfigError, match=r"env.name='hermess' is unknown \(did you mean 'hermes'\?\)"
    ):
        tables.resolve("env", "hermess", "env.name")


def test_our_own_names_are_never_looked_for_in_the_working_directory(tmp_path, monkeypatch):
    """A file there that is called like a library would be imported in its place."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    assert tables.resolve("env", "hermes", "env.name") and "" not in sys.path
    (tmp_path / "mine_alone.py").write_text("class World: pass\n")
    plugins.trust(["mine_alone:World"])
    assert (
        tables.resolve("env", "mine_alone:World", "env.name").__name__ == "World" and "" in sys.path
    )
