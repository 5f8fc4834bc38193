"""Hostile clients: no row is wrong, and each cut was theirs."""

from __future__ import annotations

from hostile_client import play_hostile


def test_hostile_conversations(micro, chat):
    figures = play_hostile(micro, chat, 40, seed=1)
    assert figures["cuts"] == figures["cuts_expected"] > 0, figures
    assert figures["sampled"] == figures["accounted"] > 0
    assert figures["retries"] > 0 and figures["edits"] > 0 and figures["failures"] == 0
