"""Tables of names: every name resolves, and a wrong one is refused with the nearest."""

from __future__ import annotations

import subprocess
import sys

import pytest

from agent_r1.config import tables
from agent_r1.ground.errors import ConfigError
from agent_r1.training.advantages import ppo
from agent_r1.training.estimators import ESTIMATORS

KINDS = [kind for kind in tables._tables()]


@pytest.mark.parametrize("kind", KINDS)
def test_every_name_of_a_table_is_code_that_exists(kind):
    for name in tables.names(kind):
        assert tables.resolve(kind, name, "here") is not None


def test_an_unknown_name_is_refused_with_the_nearest_one():
    with pytest.raises(ConfigError, match=r"env.name='hermess' is unknown \(did you mean 'hermes'\?\)"):
        tables.resolve("env", "hermess", "env.name")


def test_facts_are_known_without_importing_torch():
    code = (
        "import sys; from agent_r1.config import tables; assert tables.facts('estimator', 'ppo', 'algorithm')['critic']; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_table_of_estimators_can_be_read_as_a_mapping():
    assert {"grpo", "ppo", "rloo"} <= set(ESTIMATORS) and ESTIMATORS["ppo"] is ppo
    with pytest.raises(KeyError):
        ESTIMATORS["grop"]
