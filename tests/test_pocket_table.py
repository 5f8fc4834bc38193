"""lab/experiments/pocket.py: the table of the page is that of the kept figures."""

from __future__ import annotations

from lab.experiments import pocket
from lab.experiments.seed_files import read_seeds
from runs import ROOT


def test_the_kept_figures_give_the_table_of_the_page():
    seeds = read_seeds(pocket.FILE)
    assert set(seeds) == {"0", "1", "2"}
    assert pocket.table(seeds) in (ROOT / "recipes/pocket/README.md").read_text()
    for run in seeds.values():
        for name in pocket.EVALUATIONS:
            kinds = run[name]["of_and_right"].values()
            assert sum(of for of, _ in kinds) == run[name]["questions"]
            assert sum(right for _, right in kinds) == round(
                run[name]["em"] * run[name]["questions"]
            )
