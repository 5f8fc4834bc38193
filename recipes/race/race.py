"""Race methods against each other: `agent-r1 race ARM ARM --seeds N`.

In: arms, each an algorithm with settings, and seeds. Out: a run per arm and seed, and their paired
differences. A seed's runs have one data set, one start model and equally many episodes. So a
difference between two of them is a difference of method, or chance. Runs are ordinary runs of
`agent-r1 train` and `eval`: finished ones are read, interrupted ones continue.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from agent_r1 import (
    AgentR1Error,
    Config,
    ConfigError,
    Workspace,
    command,
    load_config,
    open_run,
    option,
    say,
    student_quantile,
    write_whole,
)
from agent_r1_recipes.race.stair import Climb, Stair, climb, compare_stair, print_stair

SAMPLES = 8
"""Of each test question, for pass^8."""
MEASURES = ("score", "pass^8")


@dataclass(frozen=True)
class Arm:
    """One method: an algorithm and its own settings, written `grpo+actor.lr=1e-4`."""

    name: str
    algorithm: str
    settings: tuple[str, ...]

    @classmethod
    def parse(cls, word: str) -> Arm:
        """Parse an arm. `reinforce++` is a name, so a setting begins after a `+` that has a `=`."""
        first, *settings = re.split(r"\+(?=[\w.]+=)", word)
        return cls(word, first, tuple(settings))

    def run_name(self, preset: str, seed: int) -> str:
        """Return the folder of this arm's run."""
        arm = re.sub(r"[^\w.+-]", "-", self.name)
        return f"race-{Path(preset).name.removesuffix('.yaml')}-{arm}-s{seed}"


@command(
    "race", "train two or more methods from equal starts, with equal episodes, and compare them",
    [
        "grpo ppo --preset small --seeds 3",
        "grpo grpo+actor.lr=1e-4 grpo+advantage.normalize_std=false --preset smoke --seeds 5",
        "grpo rloo --recipe my-task --seeds 5 --episodes 4000 trainer.threads=1",
        "grpo gigpo --preset smoke --seeds 20 --stair '3-hop>=.5' trainer.eval_every=3",
    ],
    option("settings", nargs="*", metavar="ARM|section.key=value",
           help="two arms or more, each ALGORITHM[+section.key=value ...], and settings of all"),
    option("--preset", help="preset of all runs"),
    option("--seeds", type=int, default=3, metavar="N", help="runs of each arm (default: 3)"),
    option("--first-seed", type=int, default=0, metavar="SEED", help="default: 0"),
    option("--episodes", type=int, metavar="N",
           help="training episodes of each run (default: as many as the first arm's preset has)"),
    option("--stair", metavar="KIND>=SHARE",
           help="also test which arm's validation reaches a share of right answers sooner"),
    option("--report", action="store_true", help="train nothing; compare the finished runs"),
    option("--json", type=Path, metavar="FILE", help="also write all figures to a file"),
)  # fmt: skip
def race(a: Namespace) -> None:
    words = a.settings or []
    arms = [Arm.parse(word) for word in words if "=" not in word.partition("+")[0]]
    common = [word for word in words if "=" in word.partition("+")[0]]
    if len({arm.name for arm in arms}) < 2 or len({arm.name for arm in arms}) < len(arms):
        raise ConfigError(
            "a race has two different arms or more, such as: agent-r1 race grpo ppo --seeds 3",
            code="missing_name",
        )
    if a.seeds < 1 or (a.episodes is not None and a.episodes < 1):
        raise ConfigError("--seeds and --episodes are at least 1", code="out_of_range")
    stair = Stair.parse(a.stair) if a.stair else None
    preset = a.preset or load_config().preset
    steps = equal_steps(arms, preset, common, a.episodes)
    cards: dict[tuple[str, int], dict[str, Any]] = {}
    for seed in range(a.first_seed, a.first_seed + a.seeds):
        # All arms of a seed, then the next seed: an interrupted race has whole pairs.
        for arm in arms:
            settings = [*common, *arm.settings, f"trainer.steps={steps[arm.name]}"]
            card = read_card(arm, preset, seed, settings)
            if card is None and not a.report:
                run(arm, preset, seed, settings)
                card = read_card(arm, preset, seed, settings)
            if card is not None:
                cards[arm.name, seed] = card
    figures = compare(arms, cards)
    print_comparison(arms, figures)
    if stair:
        figures["stair"] = race_to_stair(stair, arms, preset, common, steps, list(cards))
        print_stair(figures["stair"])
    if a.json:
        write_whole(a.json, json.dumps(figures, indent=1) + "\n")


# ----------------------------------------------------------------------------------- equal episodes


def equal_steps(
    arms: list[Arm], preset: str, common: list[str], episodes: int | None
) -> dict[str, int]:
    """Compute the steps of each arm that play equally many episodes, and print them.

    With dynamic sampling, a step counts the most episodes that it may play.
    """
    steps = {}
    for arm in arms:
        config = load_config(preset, [*common, *arm.settings], algorithm=arm.algorithm)
        per_step = episodes_per_step(config)
        if episodes is None:
            steps_of_first: int = config.trainer.steps
            episodes = per_step * steps_of_first
        steps[arm.name] = max(1, round(episodes / per_step))
        most = "at most " if config.rollout.replaces_equal_groups else ""
        say(
            f"{arm.name}: {steps[arm.name]} steps of {most}{per_step} episodes, "
            f"{most}{steps[arm.name] * per_step:,} in all"
        )
    return steps


def episodes_per_step(config: Config) -> int:
    """Count the most episodes that a step plays, the greedy ones of remax included."""
    samples = config.rollout.samples_per_prompt
    # Each round of dynamic sampling plays at most all prompts once more.
    samples *= 1 + getattr(config.rollout, "dynamic_sampling_rounds", 0)
    return config.rollout.prompts_per_step * (samples + bool(config.algorithm_has("greedy")))


# --------------------------------------------------------------------------------------------- runs


def run(arm: Arm, preset: str, seed: int, settings: list[str]) -> None:
    """Train and evaluate one run in processes of its own. Raise AgentR1Error if one fails."""
    name = arm.run_name(preset, seed)
    options = ["--preset", preset, "--seed", str(seed), "--run", name, arm.algorithm, *settings]
    options.append(f"trainer.eval_samples={SAMPLES}")
    for stage in (["train", "--plain", "--resume"], ["eval"]):
        say(f"{name}: {stage[0]}")
        done = subprocess.run([sys.executable, "-m", "agent_r1", *stage, *options], check=False)
        if done.returncode:
            raise AgentR1Error(
                f"{name}: agent-r1 {stage[0]} ended with code {done.returncode}; fix the cause, "
                "and start the race again: finished runs are kept",
                code="stage_failed",
            )


def read_card(arm: Arm, preset: str, seed: int, settings: list[str]) -> dict[str, Any] | None:
    """Return the eval card of a finished run, or None.

    Raises AgentR1Error for a run that was trained with other settings.
    """
    pairs = dict(setting.split("=", 1) for setting in settings)
    run_name = arm.run_name(preset, seed)
    opened_run = open_run(preset, arm.algorithm, seed, run_name, **pairs)
    folder = opened_run.workspace.run(run_name)
    if not (folder / "eval.json").is_file():
        return None
    return json.loads((folder / "eval.json").read_text())


def race_to_stair(
    stair: Stair,
    arms: list[Arm],
    preset: str,
    common: list[str],
    steps: dict[str, int],
    runs: list[tuple[str, int]],
) -> dict[str, Any]:
    """Read what the finished runs needed to reach the stair, and compare the arms."""
    climbs: dict[str, dict[int, Climb]] = {}
    budget = 0
    for arm in arms:
        config = load_config(preset, [*common, *arm.settings], algorithm=arm.algorithm)
        per_step = episodes_per_step(config)
        budget = budget or per_step * steps[arm.name]
        climbs[arm.name] = {}
        for name, seed in runs:
            if name == arm.name:
                folder = Workspace(config).run(arm.run_name(preset, seed))
                climbs[name][seed] = climb(folder, stair, config, per_step)
    return compare_stair(stair, climbs, budget)


# --------------------------------------------------------------------------------------- comparison


def figure_of(card: dict[str, Any], measure: str) -> float:
    """Return the greedy score of a card, or its pass^8; nan without samples."""
    if measure == "score":
        return card["score"]
    return card.get("reliability", {}).get(measure, math.nan)


def compare(arms: list[Arm], cards: dict[tuple[str, int], dict[str, Any]]) -> dict[str, Any]:
    """Compute each arm's figures, and its paired differences from the first arm."""
    figures: dict[str, Any] = {}
    for arm in arms:
        seeds = sorted(seed for name, seed in cards if name == arm.name)
        entry: dict[str, Any] = {"seeds": seeds}
        for measure in MEASURES:
            entry[measure] = [figure_of(cards[arm.name, seed], measure) for seed in seeds]
            pairs = [seed for seed in seeds if (arms[0].name, seed) in cards]
            differences = []
            for seed in pairs:
                own = figure_of(cards[arm.name, seed], measure)
                difference = own - figure_of(cards[arms[0].name, seed], measure)
                # A card of one sample has no pass^8.
                if not math.isnan(difference):
                    differences.append(difference)
            entry[f"{measure} difference"] = interval(differences)
        figures[arm.name] = entry
    return figures


def interval(differences: list[float]) -> dict[str, float]:
    """Return mean and 95 % interval (Student's t) of paired differences."""
    n = len(differences)
    if not n:
        return {"pairs": 0}
    mean = fmean(differences)
    if n == 1:
        return {"pairs": 1, "mean": mean}
    half = student_quantile(0.975, n - 1) * stdev(differences) / math.sqrt(n)
    return {"pairs": n, "mean": mean, "low": mean - half, "high": mean + half}


def print_comparison(arms: list[Arm], figures: dict[str, Any]) -> None:
    """Print a line per arm and measure."""
    for measure in MEASURES:
        say(f"\n{measure}, and the paired difference from {arms[0].name}")
        for arm in arms:
            values = figures[arm.name][measure]
            if not values:
                say(f"  {arm.name:32s} no finished run")
                continue
            difference = figures[arm.name][f"{measure} difference"]
            text = ""
            if arm is not arms[0] and difference["pairs"]:
                text = f"  {difference['mean']:+.3f} over {difference['pairs']} pairs"
                if "low" in difference:
                    text += f" (95 % {difference['low']:+.3f} to {difference['high']:+.3f})"
                else:
                    text += " (one pair has no interval)"
            say(f"  {arm.name:32s} {fmean(values):.3f}, {len(values)} seeds{text}")
