"""Print what is exactly true of one agent: `agent-r1 exact plays`.

In: a checkpoint. Out: chances of success, rewards, entropy, values and the true gradient, each with
the share of the probability that was enumerated.
"""

from __future__ import annotations

import json
import math
import random
import time
from argparse import Namespace
from statistics import fmean
from typing import Any

from agent_r1 import ConfigError, Row, Workspace, find_model, say, write_whole
from agent_r1_recipes.exact.gradient import Plays, true_gradient
from agent_r1_recipes.exact.rare import rare_chance
from agent_r1_recipes.exact.tree import Agent, Tree, enumerate_plays
from agent_r1_recipes.exact.truth import (
    KS,
    Truth,
    average,
    entropy,
    expectation,
    is_success,
    of_k,
    pass_all,
    pass_at,
    reward_range,
    turn_values,
)


def open_agent(a: Namespace, step: int | None) -> tuple[Agent, list[Row]]:
    """Load the checkpoint of a step, and the chosen questions. Step 0 is the start model."""
    model, config = find_model(
        run=a.run, step=step or None, checkpoint_dir=a.checkpoint_dir, hf_path=a.model,
        preset=a.preset, overrides=a.overrides,
    )  # fmt: skip
    workspace = Workspace(config)
    if step == 0:
        model = workspace.start_model
    rows = workspace.load_rows(a.split)
    count = min(a.questions, len(rows))
    rows = random.Random(a.seed).sample(rows, count)
    return Agent.load(model, config, workspace.load_tools()), rows


def enumerate_rows(a: Namespace, agent: Agent, rows: list[Row]) -> list[Tree]:
    """Enumerate the questions' plays, with a line of progress per part."""

    def tell(done: int) -> None:
        print(f"  {done} of {len(rows)} questions", flush=True)

    return enumerate_plays(
        agent, rows, a.mass, samples=a.samples, seed=a.seed, max_tokens=a.max_tokens,
        on_done=tell if len(rows) > 16 else None,
    )  # fmt: skip


def report_plays(a: Namespace) -> None:
    """Enumerate, and print each quantity by kind of question."""
    agent, rows = open_agent(a, a.step)
    seconds = time.process_time()
    trees = enumerate_rows(a, agent, rows)
    seconds = time.process_time() - seconds
    shares = [tree.share for tree in trees]
    print(
        f"enumerated {fmean(shares):.4f} of the probability (least {min(shares):.4f}): "
        f"{fmean(len(tree.plays) for tree in trees):.0f} plays and "
        f"{fmean(tree.tokens for tree in trees):,.0f} tokens a question, "
        f"{seconds / len(trees):.2f} CPU seconds a question"
    )
    below = sum(share < a.mass for share in shares)
    if below:
        print(f"{below} questions stopped below --mass {a.mass:g}, at --max-tokens {a.max_tokens}")
    records: dict[str, Any] = {"questions": [], "kinds": {}}
    for kind, members in by_kind(trees).items():
        records["kinds"][kind] = describe(a, agent, members)
        print(f"\n{kind}, {len(members)} questions")
        for name, truth in records["kinds"][kind].items():
            print(f"  {name:10s} {truth}")
    if a.guide is not None:
        records["rare"] = report_rare(a, agent, trees)
    if a.gradient:
        records["gradient"] = report_gradient(agent, trees)
    if a.show is not None:
        show_values(agent, trees, a.show)
    if a.json:
        records["questions"] = [record_of(tree) for tree in trees]
        write_whole(a.json, json.dumps(records, default=vars, indent=1) + "\n")


def by_kind(trees: list[Tree]) -> dict[str, list[Tree]]:
    """Group trees by the kind of their question, and all together."""
    kinds: dict[str, list[Tree]] = {}
    for tree in trees:
        kind = str((tree.row.get("extra_info") or {}).get("kind", "all"))
        kinds.setdefault(kind, []).append(tree)
    kinds = dict(sorted(kinds.items()))
    return kinds if len(kinds) == 1 else kinds | {"all": trees}


def describe(a: Namespace, agent: Agent, trees: list[Tree]) -> dict[str, Truth]:
    """Compute the truths of some questions."""
    success = is_success(agent.config.trainer.eval_threshold)
    chances = [expectation(tree, success, 0.0, 1.0) for tree in trees]
    truths = {"success": average(chances)}
    for k in KS:
        truths[f"pass@{k}"] = of_k(chances, pass_at, k)
        truths[f"pass^{k}"] = of_k(chances, pass_all, k)
    bounds = a.range or reward_range(agent.config, trees[0], agent.tools)
    least, most = bounds or (-math.inf, math.inf)
    rewards = [expectation(tree, lambda t: t.reward, least, most) for tree in trees]
    truths["reward"] = average(rewards)
    truths["entropy"] = average([entropy(tree) for tree in trees])
    return truths


def record_of(tree: Tree) -> dict[str, Any]:
    """Return what `--json` keeps of a question."""
    return {
        "name": tree.name,
        "share": tree.share,
        "tokens": tree.tokens,
        "plays": [
            {"logprob": play.logprob, "reward": play.trajectory.reward,
             "score": play.trajectory.score, "turns": len(play.trajectory.steps),
             "stop_reason": play.trajectory.stop_reason}
            for play in sorted(tree.plays, key=lambda play: -play.logprob)
        ],
    }  # fmt: skip


def report_rare(a: Namespace, agent: Agent, trees: list[Tree]) -> dict[str, dict[str, float]]:
    """Print the chance of success with a guide, by kind of question."""
    guide, rows = open_agent(a, a.guide)
    guide_trees = enumerate_plays(guide, rows, a.mass, max_tokens=a.max_tokens)
    success = is_success(agent.config.trainer.eval_threshold)
    samples = max(a.samples, 2)
    chance_of = {}
    for tree, other in zip(trees, guide_trees, strict=True):
        chance_of[tree.name] = rare_chance(agent, guide, tree, other, success, samples, a.seed)
    print(f"\nsuccess with the guide of step {a.guide}, {samples} samples a question")
    records = {}
    for kind, members in by_kind(trees).items():
        chances = [chance_of[tree.name] for tree in members]
        n = len(chances)
        bound = fmean(chance.bound for chance in chances)
        estimate = fmean(chance.estimate for chance in chances)
        error = math.sqrt(sum(chance.error**2 for chance in chances)) / n
        relative = error / estimate if estimate else math.inf
        print(
            f"  {kind:10s} at least {bound:.3g}, by {sum(c.plays for c in chances)} known plays; "
            f"estimate {estimate:.3g}, relative error {relative:.2g}"
        )
        records[kind] = {"bound": bound, "estimate": estimate, "error": error}
    return records


def report_gradient(agent: Agent, trees: list[Tree]) -> dict[str, dict[str, float]]:
    """Print how far the true gradient is known, by kind of question."""
    if any(len(tree.rest_plays) < 2 for tree in trees if tree.rest):
        raise ConfigError(
            "--gradient estimates the rest from two halves of samples; set --samples to 2 or more",
            code="out_of_range",
        )
    plays = Plays.of(trees)
    print("\nthe gradient of the mean reward: norm; rest / whole; noise / whole; covered and whole")
    records = {}
    numbers = {tree.name: number for number, tree in enumerate(trees)}
    for kind, members in by_kind(trees).items():
        questions = [numbers[tree.name] for tree in members]
        truth = true_gradient(agent.model, plays, agent.temperature, questions)
        norm = float(truth.whole.norm())
        print(
            f"  {kind:10s} {norm:.4f}; {truth.rest_ratio:.3f}; {truth.noise_ratio:.3f}; cosine "
            f"{truth.inside_cosine:.4f}: {truth.certainty}"
        )
        records[kind] = {
            "norm": norm,
            "rest": truth.rest_ratio,
            "noise": truth.noise_ratio,
            "cosine": truth.inside_cosine,
        }
    return records


def show_values(agent: Agent, trees: list[Tree], number: int) -> None:
    """Print V of each state and Q of each choice along a question's likeliest play."""
    if not 0 <= number < len(trees):
        raise ConfigError(
            f"--show {number}: the questions are numbered 0 to {len(trees) - 1}",
            code="out_of_range",
        )
    tree = trees[number]
    values, choices = turn_values(tree.plays)
    play = max(tree.plays, key=lambda play: play.logprob)
    question = tree.row["prompt"][-1]["content"]
    say(f"\nquestion {number}: {question}")
    print(f"its likeliest play has the probability {math.exp(play.logprob):.3f}")
    turns: tuple[tuple[int, ...], ...] = ()
    for number, step in enumerate(play.trajectory.steps):
        state = values[turns]
        print(f"turn {number + 1}: V {state.value:.3f}")
        here = {key: choice for key, choice in choices.items() if key[:-1] == turns}
        likeliest = sorted(here, key=lambda key: -here[key].chance)[:4]
        for key in likeliest:
            mark = ">" if key[-1] == tuple(step.action_ids) else " "
            text = " ".join(agent.chat.turn_text(list(key[-1])).split())
            share = here[key].chance / state.chance
            line = f"  {mark} {share:.3f}  Q {here[key].value:.3f}  {text[:100]}"
            say(line)
        turns = (*turns, tuple(step.action_ids))
