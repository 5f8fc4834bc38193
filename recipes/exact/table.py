"""Print a row per estimator, and score your own: `agent-r1 exact table` and `score`.

In: names of estimators, ours, verl's or FILE.py:NAME, and a world: a frozen checkpoint of Stop, or
the plays of a run. Out: a table in the terminal, in LaTeX, and as a figure.
"""

from __future__ import annotations

import json
import math
import runpy
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor

from agent_r1 import (
    AdvantageConfig,
    AgentR1Error,
    Batch,
    ConfigError,
    Estimator,
    Row,
    load_config,
    make_estimator,
    write_whole,
)
from agent_r1_recipes.credit.estimators import remax
from agent_r1_recipes.exact.estimators import return_to_go, turn_index
from agent_r1_recipes.exact.frozen import STEPS_OF, load_frozen, truth_of
from agent_r1_recipes.exact.gradient import Plays, shown_by_constant, true_gradient
from agent_r1_recipes.exact.replay import Script
from agent_r1_recipes.exact.report import by_kind, enumerate_rows, open_agent
from agent_r1_recipes.exact.rows import (
    EstimatorRow,
    Weigh,
    World,
    episode_mean,
    episode_sum,
    fit_critic,
    kl_rows,
    make_row,
    token_mean,
)
from agent_r1_recipes.exact.tree import Agent

CRITIC_EPISODES = 256


@dataclass(frozen=True)
class Entry:
    """An estimator with its settings, as a row of the table."""

    name: str
    estimator: Estimator
    advantage: AdvantageConfig
    weigh: Weigh = episode_sum
    exact_values: bool = False
    """Give it the exact V instead of the frozen critic's."""


def entry(name: str, algorithm: str, *overrides: str, **changes: Any) -> Entry:
    """Make the entry of an estimator of ours."""
    config = load_config("small", list(overrides), algorithm=algorithm)
    return Entry(name, make_estimator(config), config.advantage, **changes)


def own_entries() -> list[Entry]:
    """Return the entries of all our estimators."""
    plain = load_config("small").advantage
    return [
        entry("grpo", "grpo"),
        entry("grpo-no-division", "grpo", "advantage.normalize_std=false"),
        entry("grpo-token-mean", "grpo", weigh=token_mean),
        entry("grpo-episode-mean", "grpo", weigh=episode_mean),
        entry("rloo", "rloo"),
        entry("reinforce++", "reinforce++"),
        entry("reinforce++-baseline", "reinforce++-baseline"),
        entry("remax", "remax"),
        entry("gigpo", "gigpo"),
        entry("steppo", "steppo"),
        entry("ppo", "ppo"),
        entry("ppo-.95", "ppo", "advantage.lam=0.95"),
        entry("ppo-.95-exact-V", "ppo", "advantage.lam=0.95", exact_values=True),
        Entry("return-to-go", return_to_go, plain),
        Entry("turn-index", turn_index, plain),
    ]


def verl_entries() -> list[Entry]:
    """Return entries of verl's own functions; none where verl is not installed."""
    if find_spec("verl") is None:
        return []
    from verl.trainer.ppo import core_algos

    config = SimpleNamespace(gamma=1.0)
    plain = load_config("small").advantage

    def groups(batch: Batch) -> dict[str, Any]:
        return {"index": np.array(batch.groups)}

    def discounts(batch: Batch) -> dict[str, Any]:
        return {"config": config}

    def values(batch: Batch) -> dict[str, Any]:
        return {"values": batch.values_BT, "gamma": 1.0, "lam": 0.95}

    def greedy(batch: Batch) -> dict[str, Any]:
        return {"reward_baselines": batch.columns["baseline_B"]}

    functions = {
        "verl grpo": (core_algos.compute_grpo_outcome_advantage, groups),
        "verl rloo": (core_algos.compute_rloo_outcome_advantage, groups),
        "verl reinforce++": (core_algos.compute_reinforce_plus_plus_outcome_advantage, discounts),
        "verl reinforce++-baseline": (
            core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage,
            groups,
        ),
        "verl remax": (core_algos.compute_remax_outcome_advantage, greedy),
        "verl gae-.95": (core_algos.compute_gae_advantage_return, values),
    }
    entries = []
    for name, (function, inputs) in functions.items():
        estimator = verl_estimator(function, inputs)
        if inputs is greedy:
            estimator = replace(estimator, columns=remax.columns)
        entries.append(Entry(name, estimator, plain))
    return entries


def verl_estimator(
    function: Callable[..., tuple[Tensor, Tensor]], inputs: Callable[[Batch], dict[str, Any]]
) -> Estimator:
    """Make an estimator of verl's function; `inputs` makes its further arguments."""

    def credit(batch: Batch, advantage: AdvantageConfig) -> tuple[Tensor, Tensor]:
        advantages_BT, returns_BT = function(
            batch.rewards_BT.clone(), response_mask=batch.mask_BT, **inputs(batch)
        )
        return advantages_BT * batch.mask_BT, returns_BT

    return Estimator(credit)


def entries_named(names: list[str]) -> list[Entry]:
    """Return the named entries; all of ours and of verl's without names.

    Raises ConfigError for an unknown name, and for code that is missing or fails.
    """
    every = own_entries()
    if not names or any(name.startswith("verl") for name in names):
        every += verl_entries()
    if not names:
        return every
    by_name = {one.name: one for one in every}
    entries = []
    for name in names:
        if ":" in name:
            entries.append(Entry(name, load_estimator(name), load_config("small").advantage))
        elif name in by_name:
            entries.append(by_name[name])
        else:
            raise ConfigError(
                f"there is no estimator {name!r}; name your own as FILE.py:NAME, or one of "
                f"{', '.join(by_name)}",
                code="unknown_name",
            )
    return entries


def load_estimator(name: str) -> Estimator:
    """Run the user's file, which the user named, and return its estimator."""
    file, _, attribute = name.rpartition(":")
    if not Path(file).is_file():
        raise ConfigError(
            f"{name}: there is no file {file}; give FILE.py:NAME", code="missing_attribute"
        )
    try:
        value = runpy.run_path(file).get(attribute)
    except Exception as error:
        raise ConfigError(
            f"{file} fails ({type(error).__name__}: {error}); fix it first", code="wrong_code"
        ) from error
    if not callable(value):
        raise ConfigError(
            f"{file} has no function {attribute!r}; define it, or name another",
            code="missing_attribute",
        )
    return value if isinstance(value, Estimator) else Estimator(value)


# --------------------------------------------------------------------------------------- the worlds


def stop_world(name: str) -> World:
    """Open a frozen checkpoint with all of its histories."""
    agent, facts = load_frozen(name)
    plays, now = truth_of(agent)
    # The frozen truth is of another machine: the last digits may differ.
    if not math.isclose(now["reward"], facts["reward"], abs_tol=1e-4):
        raise AgentR1Error(
            f"{name} is worth {now['reward']:.6f} here, and {facts['reward']:.6f} on file; report "
            "this, because the world must not change",
            code="damaged_model",
        )
    rows = [plays.trajectories[int(i)].row for i in first_plays(plays)]
    return make_world(name, agent, plays, rows)


def first_plays(plays: Plays) -> list[int]:
    """Return the number of the first play of each question."""
    numbers = plays.question_N.tolist()
    return [numbers.index(question) for question in range(plays.questions)]


def make_world(name: str, agent: Agent, plays: Plays, rows: list[Row], **facts: Any) -> World:
    """Add the greedy plays and a frozen critic. `facts`: further fields of the world."""
    player = agent.player(samples=True)
    player.temperature = 0.0
    jobs = [(row, str(number), Script(())) for number, row in enumerate(rows)]
    greedy = [trajectory.reward for trajectory in player.play_whole(jobs)]
    critic_BT, share = fit_critic(agent.model, plays, CRITIC_EPISODES, seed=0)
    print(
        f"{name}: mean reward {float(plays.value_Q().mean()):.4f}; the frozen critic explains "
        f"{share:.2f} of the exact values' variance"
    )
    return World(name, agent.model, agent.temperature, plays, greedy, critic_BT, **facts)


def worlds_of(a: Namespace) -> list[World]:
    """Return the world of a run, or the frozen worlds."""
    if a.run is None and a.checkpoint_dir is None and a.model is None and a.step is None:
        return [stop_world(name) for name in STEPS_OF]
    agent, rows = open_agent(a, a.step)
    return [run_world(a, agent, rows)]


def run_world(a: Namespace, agent: Agent, rows: list[Row]) -> World:
    """Enumerate a run's questions, and print how far the true gradient is known, by kind."""
    trees = enumerate_rows(a, agent, rows)
    plays = Plays.of(trees)
    noise_of = {}
    known: dict[str, Any] = {}
    numbers = {tree.name: number for number, tree in enumerate(trees)}
    for kind, members in by_kind(trees).items():
        questions = [numbers[tree.name] for tree in members]
        truth = true_gradient(agent.model, plays, agent.temperature, questions)
        noise_of[kind] = truth.noise_ratio
        known[kind] = {
            "questions": len(members),
            "share": fmean(tree.share for tree in members),
            "reward": float(plays.value_Q()[questions].mean()),
            "gradient_norm": float(truth.whole.norm()),
            "rest": truth.rest_ratio,
            "noise": truth.noise_ratio,
            "inside_cosine": truth.inside_cosine,
        }
        print(
            f"{kind}, {len(members)} questions: enumerated {known[kind]['share']:.3f}, mean reward "
            f"{known[kind]['reward']:.4f}; the true gradient is {truth.certainty}: rest / whole "
            f"{truth.rest_ratio:.3f}, noise / whole {truth.noise_ratio:.3f}"
        )
    *_, overall = noise_of.values()  # the last one is of all questions
    known["constant_baseline"] = shown_by_constant(agent.model, plays, agent.temperature)
    print(
        f"a constant baseline, which has no bias, shows {known['constant_baseline']:.3f} here; "
        "smaller ones are no evidence"
    )
    name = f"{a.run or 'newest run'}, step {'last' if a.step is None else a.step}"
    return make_world(name, agent, plays, rows, noise_ratio=overall, noise_of=noise_of, known=known)


# ---------------------------------------------------------------------------------------- the table


def report_table(a: Namespace) -> None:
    """Print the rows of each world, and those of the KL for frozen worlds."""
    entries = entries_named(a.estimators)
    worlds = worlds_of(a)
    tables: dict[str, list[EstimatorRow]] = {}
    records = {}
    for world in worlds:
        start_s = time.process_time()
        row_s = 0.0
        print("\n" + head(world))
        tables[world.name] = []
        for one in entries:
            row = row_of(world, one, a.batches, a.seed)
            tables[world.name].append(row)
            print(line(row), flush=True)
            row_s = (time.process_time() - start_s) / len(tables[world.name])
            records[world.name] = {
                "known": world.known,
                "batches": a.batches,
                "cpu_seconds_a_row": round(row_s, 1),
                "cpu_seconds": round(time.process_time()),
                "rows": [asdict(row) for row in tables[world.name]],
            }
            if a.json:  # each row, because a table of a run may take an hour
                write_records(a.json, records)
        print(f"{row_s:.1f} CPU seconds a row; {time.process_time():.0f} in all")
    if len(worlds) > 1:
        records["kl"] = report_kl(worlds)
    if a.json:
        write_records(a.json, records)
    if a.latex:
        write_whole(a.latex, latex(tables))
    if a.figure:
        draw(tables, a.figure)


def row_of(world: World, one: Entry, batches: int, seed: int) -> EstimatorRow:
    """Compute the row of an entry."""
    return make_row(
        world,
        one.name,
        one.estimator,
        one.advantage,
        weigh=one.weigh,
        values_BT=world.exact_BT if one.exact_values else None,
        batches=batches,
        seed=seed,
    )


def head(world: World) -> str:
    """Return the heading of a table."""
    kinds = " ".join(f"{'gain ' + kind:>17s}" for kind in sorted({*world.plays.kinds, "all"}))
    return f"{'estimator':26s} {'bias':>14s} cosine  a batch variance  w(low) w(high) {kinds}"


def line(row: EstimatorRow) -> str:
    """Format a row for the terminal."""
    gains = " ".join(
        f"{f'{mean:+.4f} ± {error:.4f}':>17s}" for _, (mean, error) in sorted(row.gains.items())
    )
    low, high = end_weights(row)
    return (
        f"{row.name:26s} {number(row.bias)} ± {number(row.bias_noise)} "
        f"{number(row.mean_cosine)} {number(row.batch_cosine):>7s} {row.variance:8.1f} "
        f"{low:7.2f} {high:7.2f} {gains}"
    )


def end_weights(row: EstimatorRow) -> tuple[float, float]:
    """Return the weights of the questions with the lowest and the highest mean reward."""
    if not row.weights:
        return math.nan, math.nan
    return row.weights[0][1], row.weights[-1][1]


def number(value: float) -> str:
    """Format a cosine or a bias."""
    return "undefined" if math.isnan(value) else f"{value:6.3f}"


def report_kl(worlds: list[World]) -> dict[str, tuple[float, float]]:
    """Print the KL's estimators between the first and the last frozen checkpoint."""
    start, *_, later = worlds
    rows = kl_rows(later, start.model)
    print(f"\nKL({later.name} || {start.name}): gradient, cosine with the true one, ratio of norms")
    for name, (angle, ratio) in rows.items():
        print(f"  {name:10s} {angle:6.3f} {ratio:6.2f}")
    return rows


def score(a: Namespace) -> int:
    """Print whether each estimator is biased in the frozen worlds. Return 1 if one is."""
    any_bias = False
    entries = entries_named(a.estimators)
    for world in [stop_world(name) for name in STEPS_OF]:
        for one in entries:
            row = row_of(world, one, a.batches, a.seed)
            any_bias = any_bias or row.is_biased
            mean, error = row.gains["all"]
            print(
                f"{one.name} in {world.name}: {row.verdict} (bias {row.bias:.3f}, noise "
                f"{row.bias_noise:.3f}); cosine {row.mean_cosine:.3f}; a step gains {mean:+.4f} ± "
                f"{error:.4f}"
            )
    return int(any_bias)


# -------------------------------------------------------------------------------------------- files


def write_records(file: Path, records: dict[str, Any]) -> None:
    """Write a table's numbers. What is not defined becomes null, because JSON has no nan."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    write_whole(file, json.dumps(plain(records), indent=1) + "\n")


def latex(tables: dict[str, list[EstimatorRow]]) -> str:
    """Format the tables for a paper (booktabs)."""
    lines = [
        r"\begin{tabular}{llrrrrr}",
        r"\toprule",
        r"world & estimator & bias & cosine & one batch & variance & gain \\",
    ]
    for world, rows in tables.items():
        lines.append(r"\midrule")
        for row in rows:
            mean, error = row.gains["all"]
            numbers = [
                f"${row.bias:.3f} \\pm {row.bias_noise:.3f}$",
                number(row.mean_cosine).strip(),
                number(row.batch_cosine).strip(),
                f"{row.variance:.1f}",
                f"${mean:+.4f} \\pm {error:.4f}$",
            ]
            name = row.name.replace("_", r"\_")
            lines.append(f"{world} & {name} & {' & '.join(numbers)} " + r"\\")
    lines += [r"\bottomrule", r"\end{tabular}"]
    return "\n".join(lines) + "\n"


def draw(tables: dict[str, list[EstimatorRow]], file: Path) -> None:
    """Draw bias and gain of each estimator, a colour per world. Equal rows give equal bytes."""
    import matplotlib
    from matplotlib.figure import Figure

    rows = max(len(rows) for rows in tables.values())
    figure = Figure(figsize=(9, 1 + 0.3 * rows), layout="constrained")
    biases, gains_axis = figure.subplots(1, 2, sharey=True)
    for place, (world, rows) in enumerate(tables.items()):
        heights = [-i + 0.2 * place for i in range(len(rows))]
        noise = [row.bias_noise for row in rows]
        biases.errorbar([row.bias for row in rows], heights, xerr=noise, fmt="o", label=world)
        gains = [row.gains["all"] for row in rows]
        errors = [error for _, error in gains]
        gains_axis.errorbar([mean for mean, _ in gains], heights, xerr=errors, fmt="o")
        biases.set_yticks(heights, [row.name for row in rows])
    biases.set_xlabel("bias, as a share of the mean direction")
    gains_axis.set_xlabel("exact gain of one step at equal KL")
    biases.legend(frameon=False)
    with matplotlib.rc_context({"svg.hashsalt": "exact", "svg.fonttype": "none"}):
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
