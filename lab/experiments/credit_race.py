"""Race estimators in Stop, where the mean reward after each step is exact.

    python -m lab.experiments.credit_race trap       grpo, where going on pays: none gets there
    python -m lab.experiments.credit_race tune       grpo: each setting, two seeds
    python -m lab.experiments.credit_race screen     each method: each of its settings, two seeds
    python -m lab.experiments.credit_race final      the best against tuned grpo, twenty seeds

In: credit_race.yaml, which says what each stage runs; stair, test and bet of the final were
committed before it. Out: docs/lab/race/credit.json. `logbooks.py` writes the tables of
docs/answer-key.md from it.

Stop's 618 plays are all that can happen. A step draws episodes with their exact probabilities,
gives them to the estimator as training does, and takes one step of Adam. All arms of a seed begin
with the same weights and the same generator, and play equally many episodes.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from agent_r1.config.settings import AdvantageConfig
from agent_r1.ground.files import write_whole
from agent_r1.rollout.training_rows import Batch
from agent_r1.training.advantages import Estimator
from agent_r1_recipes.exact.frozen import load_frozen
from agent_r1_recipes.exact.gradient import Plays, token_logprobs_of
from agent_r1_recipes.exact.rows import Sampler, World, direction_weights, episode_sum, fit_critic
from agent_r1_recipes.exact.stop import Stop, stop_trees
from agent_r1_recipes.exact.table import entries_named, first_plays, make_world
from agent_r1_recipes.race.stair import Climb, Stair, compare_stair, print_stair, summarize
from lab.experiments.claims import Adam

SETTING = Path(__file__).with_name("credit_race.yaml")
RECORD = Path(__file__).parents[2] / "docs" / "lab" / "race" / "credit.json"
CRITIC_EPISODES = 48
"""A critic is fitted to so many further episodes in each step. They count."""


def open_stop(pay: float) -> World:
    """Open stop-start, whose turns that go on are paid `pay`."""
    agent, _ = load_frozen("stop-start")
    plays = Plays.of(stop_trees(replace(agent, make_env=lambda row: Stop(pay))))
    rows = [plays.trajectories[number].row for number in first_plays(plays)]
    return make_world("stop-start", agent, plays, rows)


def climb_in_stop(
    method: str, settings: dict[str, Any], seed: int, episodes: int, pay: float, level: float
) -> Climb:
    """Train one method from stop-start. Returns the exact mean reward over episodes.

    Settings: `lr` of Adam, `entropy` (weight of the tokens' entropy) and `group` (plays of each of
    the six questions).
    """
    [entry] = entries_named([method])
    world = open_stop(pay)
    world.group_size = settings.get("group", 8)
    has_critic = method in ("ppo", "ppo-.95", "steppo")
    per_step = world.group_size * world.plays.questions + CRITIC_EPISODES * has_critic
    estimator = with_entropy(entry.estimator, settings.get("entropy", 0.0))
    sampler = Sampler(world, estimator, world.critic_BT, seed)
    adam = Adam(world.model, settings["lr"])
    points = []
    start_s = time.process_time()
    follow(world, sampler)
    for step in range(1, episodes // per_step + 1):
        if has_critic:
            sampler.table.values_BT, _ = fit_critic(
                world.model, world.plays, CRITIC_EPISODES, seed * 1000 + step
            )
        weights_BT = direction_weights(sampler, estimator, entry.advantage, episode_sum)
        adam.ascend(world.push(weights_BT))
        reward = follow(world, sampler)
        points.append((step * per_step, time.process_time() - start_s, reward))
    return Climb.of(points, level, time.process_time() - start_s)


def follow(world: World, sampler: Sampler) -> float:
    """Compute all probabilities for the weights of now. Returns the exact mean reward."""
    plays = world.plays
    with torch.no_grad():
        logprobs_BT = token_logprobs_of(world.model, plays.batch, world.temperature)
    sampler.table.logprobs_BT = logprobs_BT.float()
    # In Stop, each play is one row: its turns extend one conversation.
    plays.chance_N = (logprobs_BT * plays.batch.mask_BT).sum(1).exp()
    return float(plays.value_Q().mean())


def with_entropy(inner: Estimator, weight: float) -> Estimator:
    """Add the gradient of the tokens' entropy: -log pi of a token is its advantage."""
    if not weight:
        return inner

    def credit(batch: Batch, advantage: AdvantageConfig) -> tuple[Tensor, Tensor]:
        advantages_BT, returns_BT = inner(batch, advantage)
        assert batch.logprobs_BT is not None, "the trainer gives every batch its log-probabilities"
        return advantages_BT - weight * batch.logprobs_BT * batch.mask_BT, returns_BT

    return replace(inner, credit=credit)


def name_of(method: str, settings: dict[str, Any]) -> str:
    """Name an arm by its method and settings."""
    return " ".join([method, *(f"{key}={value:g}" for key, value in settings.items())])


def run_stage(stage: str, setting: dict[str, Any], out: Path) -> dict[str, Any]:
    """Run all arms of a stage on all of its seeds. Runs that are on file are not repeated."""
    record = json.loads(out.read_text()) if out.is_file() else {}
    runs = record.setdefault(stage, {}).setdefault("runs", {})
    plan = setting[stage]
    for seed in range(plan["first_seed"], plan["first_seed"] + plan["seeds"]):
        for method, settings in plan["arms"]:
            name = name_of(method, settings)
            mine = runs.setdefault(name, {})
            if str(seed) in mine:
                continue
            climb = climb_in_stop(
                method, settings, seed, plan["episodes"], plan["pay"], plan["level"]
            )
            line = climb.record()
            # One point in ten, and the last, is enough for a curve.
            curve = [*climb.scores[9::10], climb.scores[-1]]
            line["scores"] = [(count, round(reward, 4)) for count, reward in curve]
            for key in ("seconds", "training_seconds"):
                line[key] = line[key] and round(line[key], 1)
            mine[str(seed)] = line
            print(f"{name}, seed {seed}: {climb.episodes}, ends at {curve[-1][1]:.4f}", flush=True)
            write_whole(out, json.dumps(record, indent=1) + "\n")
    return record


def climbs_of(runs: dict[str, Any]) -> dict[str, dict[int, Climb]]:
    """Read the runs of a stage."""
    climbs: dict[str, dict[int, Climb]] = {}
    for name, mine in runs.items():
        climbs[name] = {int(seed): Climb.from_record(line) for seed, line in mine.items()}
    return climbs


def table(runs: dict[str, Any]) -> str:
    """Format a row for each arm of a stage, in Markdown."""
    return climb_table(climbs_of(runs), "mean reward at the end", "CPU s a run")


def climb_table(climbs: Mapping[str, Mapping[int, Climb]], score: str, seconds: str = "") -> str:
    """Format a row for each arm.

    `score` and `seconds` are titles. Without the latter, the table leaves the seconds out.
    """
    rows = [["arm", "seeds", "reached", "median episodes", score, seconds]]
    for name, by_seed in climbs.items():
        arm = summarize(list(by_seed.values()))
        never = math.isinf(arm.median_episodes)
        median = "never" if never else f"{arm.median_episodes:,.0f}"
        means = [f"{arm.last_score:.3f}", f"{arm.training_seconds:.1f}"]
        rows.append([name, str(len(by_seed)), str(arm.arrivals), median, *means])
    columns = 6 if seconds else 5
    titles, *lines = [f"| {' | '.join(row[:columns])} |" for row in rows]
    return "\n".join([titles, "|---" * columns + "|", *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=("trap", "tune", "screen", "final"))
    parser.add_argument("--out", type=Path, default=RECORD)
    options = parser.parse_args()
    torch.set_num_threads(1)
    setting = yaml.safe_load(SETTING.read_text())
    record = run_stage(options.stage, setting, options.out)
    runs = record[options.stage]["runs"]
    print(table(runs))
    if options.stage == "final":
        stair = Stair("mean reward", setting["final"]["level"])
        figures = compare_stair(stair, climbs_of(runs), setting["final"]["episodes"])
        print_stair(figures)
        record["final"]["tests"] = figures["tests"]
        record["final"]["deadline"] = figures["deadline"]
        write_whole(options.out, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
