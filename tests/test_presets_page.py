"""The table of docs/presets.md has every preset for a CPU, and figures that are recorded."""

from __future__ import annotations

import json
import re
from statistics import fmean

import pytest
from runs import ROOT

from agent_r1.config import load_config, presets

PAGE = (ROOT / "docs/presets.md").read_text()
COLUMNS = 7


def table_rows(page: str) -> dict[str, list[str]]:
    """The rows of the presets for CPUs, by name: world, seeds, scores, seconds, room, links."""
    found: dict[str, list[str]] = {}
    part = page.partition("## Presets for CPUs")[2].partition("\n## ")[0]
    for line in part.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        name = re.fullmatch(r"`([\w-]+)`", cells[0])
        if name:
            assert len(cells) == COLUMNS and name[1] not in found, line
            found[name[1]] = cells[1:]
    return found


ROWS = table_rows(PAGE)


def share(value: float) -> str:
    """A share as pages write it: .960"""
    return f"{value:.3f}".lstrip("0")


def scores(row: list[str]) -> tuple[str, ...]:
    """The scores before and after RL."""
    found = re.match(r"(\S+) → (\S+)", row[2])
    assert found
    return found.groups()


def seeds_of(file: str) -> list[dict]:
    return list(json.loads((ROOT / "docs/lab" / file).read_text())["seeds"].values())


def mean(seeds: list[dict], when: str, score: str = "greedy") -> str:
    return share(fmean(seed[when][score] for seed in seeds))


def test_every_preset_for_a_cpu_has_a_row():
    on_cpu = set()
    for name in presets.preset_names():
        if load_config(name, algorithm="grpo").trainer.device == "cpu":
            on_cpu.add(name)
    assert "discover" in on_cpu and "gsm8k" not in on_cpu
    assert ROWS.keys() == on_cpu


@pytest.mark.parametrize("preset", ["smoke", "shuffled", "small"])
def test_figures_are_the_recorded_ones(preset):
    seeds = seeds_of(f"{preset}.json")
    row = ROWS[preset]
    assert row[1] == str(len(seeds))
    assert scores(row) == (mean(seeds, "before"), mean(seeds, "after"))
    if "pass^8" in seeds[0]["after"]:
        assert row[4] == f"pass^8 {mean(seeds, 'after', 'pass^8')}"


def test_figures_of_discover():
    row = ROWS["discover"]
    seeds = seeds_of("discover.json")
    assert row[1] == str(len(seeds))
    assert scores(row) == (mean(seeds, "before"), mean(seeds, "after"))
    assert row[4] == f"pass^8 {mean(seeds, 'after', 'pass^8')}"


def test_figures_of_pocket():
    seeds = seeds_of("pocket.json")
    assert ROWS["pocket"][1] == str(len(seeds))
    assert scores(ROWS["pocket"]) == (mean(seeds, "before", "em"), mean(seeds, "after", "em"))


def test_seconds_are_those_of_the_whole_runs():
    text = (ROOT / "docs/laptop.md").read_text()
    [seconds] = re.findall(
        r"^\| `bash speedrun-nodocker\.sh grpo --preset smoke` \| (\d+) s \|",
        text,
        re.MULTILINE,
    )
    assert ROWS["smoke"][3] == f"{seconds}, EPYC with AVX-512"


def test_a_row_has_its_room_and_its_source_or_says_that_it_was_not_run():
    for name, (world, seeds, figures, seconds, room, links) in ROWS.items():
        assert ";" in world and "](" in links, name
        if figures == "*not run*":
            assert (seeds, seconds, room) == ("", "", ""), name
        elif not room.startswith("pass^8"):
            after = scores(ROWS[name])[1]
            assert room.split()[0] == share(1 - float(after)), name


def test_the_commands_for_a_harder_world_are_accepted():
    part = PAGE.partition("## A harder world")[2]
    commands = re.findall(r"--preset discover --run (\w+) (.+)", part)
    settings = {}
    for run, words in commands:
        overrides = [a or b for a, b in re.findall(r'"([^"]+)"|(\S+=\S+)', words)]
        settings[run] = load_config("discover", overrides, algorithm="grpo")
    assert settings.keys() == {"four", "long", "crowd", "tested"}
    four, plain = settings["four"], load_config("discover", algorithm="grpo")
    assert four.data.mix == {"4-hop": 1}
    practised = {kind for kind, part in four.data.train_mix.items() if part}
    assert practised == {"3-hop", "4-hop"}
    assert four.env.max_turns > 4 and settings["long"].search.top_k > plain.search.top_k
    assert settings["long"].rollout.max_context > plain.rollout.max_context
    assert settings["crowd"].data.entities > plain.data.entities
    assert settings["tested"].trainer.eval_conditions == ["passages 8", "hops 5"]
