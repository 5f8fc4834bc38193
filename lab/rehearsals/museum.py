"""Check that each exhibit's tests fail with its patch, and pass without a patch."""

from __future__ import annotations

import tempfile
from pathlib import Path

from agent_r1_recipes.museum.run import copy_source, read_exhibits
from lab.rehearsals.mutation import pytest


def run() -> dict[str, int]:
    exhibits = [exhibit for exhibit in read_exhibits().values() if exhibit.tests]
    wrong = []
    for exhibit in (read_exhibits()["healthy"], *exhibits):
        selections = (
            [exhibit.tests] if exhibit.tests else sorted({other.tests for other in exhibits})
        )
        exit_code = 1 if exhibit.tests else 0
        with tempfile.TemporaryDirectory() as folder:
            source = copy_source(exhibit, Path(folder))
            for tests in selections:
                code, _ = pytest(source, tests.split())
                wrong += [f"{exhibit.name}: {tests} ended with {code}"] if code != exit_code else []
        print(
            f"  {exhibit.name}: {'its tests fail' if exit_code else 'all tests pass'}", flush=True
        )
    if wrong:
        raise AssertionError("; ".join(wrong))
    return {"exhibits": len(exhibits), "guarded": len(exhibits)}
