"""docs/metrics.md, compared with what runs write. tests/test_verl_train.py does the same for
verl."""

from __future__ import annotations

import fnmatch
import json

import pytest
from runs import lines, metric_patterns, undocumented


@pytest.fixture(scope="module")
def written(produced) -> dict[str, set[str]]:
    return {
        name: {key for line in lines(produced / "runs" / name) for key in json.loads(line)}
        for name in ("grpo", "ppo")
    }


def test_every_key_of_the_local_loop_is_explained(written):
    assert undocumented(written["grpo"] | written["ppo"]) == []


UNASKED = (
    "val-aux/*/*/acc/mean@1",
    "actor/reward_kl_penalty",
    "reward/process_scale",
    "episode/exposed",
    "rollout/episodes_played",
    "rollout/score_chosen",
    "training/rollout_kl",
    "training/rollout_ratio_max",
    "actor/rollout_is_weight",
    "gateway/*",
    "gateway/trained_tokens",
    "gateway/undelivered_tokens",
    "gateway/edited_tokens",
    "gateway/failed_tokens",
)
"""Of settings that the runs looked at here leave at their default."""


def test_what_is_said_of_the_local_loop_is_written(written):
    """No line of the page outlives its metric."""
    for name, where in metric_patterns().items():
        if "L" in where.split() and not ("opt" in where.split() and name in UNASKED):
            found = [alg for alg, keys in written.items() if fnmatch.filter(keys, name)]
            assert "ppo" in found if "ppo" in where.split() else found, f"nobody writes {name}"
