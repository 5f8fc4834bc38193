"""Names stay plain: how many participles and empty shortenings there are (.ci/names.py)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST = {"variables": 15.0, "functions": 15.0}
"""Per 10,000 lines, and per 1,000 functions: the rates of src. Parameters and fields may be public
names, which stay."""


@pytest.fixture(scope="module")
def names():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / ".ci"))
        patch.delitem(sys.modules, "names", raising=False)
        spec = importlib.util.spec_from_file_location("ci_names", ROOT / ".ci" / "names.py")
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


@pytest.mark.parametrize("folder", ["src", "recipes", "lab"])
def test_few_names_are_participles(names, folder):
    poor, rates = names.count(ROOT / folder, ROOT)
    for kind, most in MOST.items():
        assert rates[kind] <= most, "\n".join(poor[kind])


def test_participles_and_shortenings_are_found(names, tmp_path):
    lines = [
        "def _tried(asked):",
        "    kept_BT, tmp = asked",
        "    for seen in kept_BT:",
        "        merged_config, is_closed = seen, f'{(res := tmp)}'",
        "    return merged_config, is_closed, res",
    ]
    (tmp_path / "poor.py").write_text("\n".join(lines) + "\n")
    poor, rates = names.count(tmp_path, tmp_path)
    found = {kind: [place.split()[-1] for place in places] for kind, places in poor.items()}
    assert sorted(found["variables"]) == ["kept_BT", "res", "seen", "tmp"]
    assert found["signatures"] == ["asked"]
    assert found["functions"] == ["_tried()"]
    assert rates == {"variables": 8_000, "signatures": 2_000, "functions": 1_000}
