"""Try four claims of papers in the world Stop, where the truth is known.

    python -m lab.experiments.claims                 all four, twenty seeds (six CPU minutes)
    python -m lab.experiments.claims k3 --seeds 3    one of them

In: claims.yaml, which was committed before the first run: each claim, its paper's figure, the
precondition, the margin and the bet. Out: docs/lab/exact/claims.json, with an effect for each seed.
`logbooks.py` writes the table of docs/answer-key.md from it.

Stop's 618 plays are all that can happen, for any weights. So training needs no environment: plays
are drawn with their exact probabilities, and after each step all probabilities are computed anew.
J is the exact mean score, not a sample. An effect is the difference of two runs of one seed.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import yaml
from torch import Tensor

from agent_r1.ground.files import write_whole
from agent_r1.model.decoder import Decoder
from agent_r1_recipes.exact.frozen import load_frozen
from agent_r1_recipes.exact.gradient import Plays, play_logprobs, push, token_logprobs_of
from agent_r1_recipes.exact.stop import minimize, stop_trees
from lab.experiments.ten_seeds import half_width

BETS = Path(__file__).with_name("claims.yaml")
RECORD = Path(__file__).parents[2] / "docs" / "lab" / "exact" / "claims.json"
GROUP = 8
"""Plays of each of Stop's six questions in a step."""
LR = 3e-3
"""Of Adam (1412.6980), if a claim says nothing else."""


# ---------------------------------------------------------------------------------------- the world


@dataclass
class World:
    """Stop's plays, and a model that is trained on them."""

    model: Decoder
    plays: Plays
    right_N: Tensor
    """float64: 1 for a play that ends with the right answer, else 0."""
    fools_N: Tensor
    """bool: a play that ends with the word by which the judge is fooled."""


def open_world(name: str) -> World:
    """Open a frozen checkpoint. The score is 1 or 0: going on pays nothing here."""
    agent, _ = load_frozen(name)
    plays = Plays.of(stop_trees(agent))
    names = agent.chat.tokenizer.convert_ids_to_tokens(range(agent.model.shape.vocab_size))
    right = []
    fools = []
    for play in plays.trajectories:
        word = names[play.steps[-1].action_ids[0]]
        right.append(float(word == play.row["reward_model"]["ground_truth"][0]))
        fools.append(word == "nothing")
    right_N = torch.tensor(right, dtype=torch.float64)
    return World(agent.model, plays, right_N, torch.tensor(fools))


def chances_of(world: World) -> Tensor:
    """Compute the probability of each play: [N]. They add up to 1 for each question."""
    with torch.no_grad():
        return play_logprobs(world.model, world.plays.batch, 1.0).exp()


def scores_of(world: World, chance_N: Tensor, score_N: Tensor) -> Tensor:
    """Compute the exact mean score of each question: [Q]."""
    zero_Q = torch.zeros(world.plays.questions, dtype=torch.float64)
    return zero_Q.index_add(0, world.plays.question_N, chance_N * score_N)


def mean_score(world: World, chance_N: Tensor, score_N: Tensor) -> float:
    """Compute J, the exact mean score over questions."""
    return float(scores_of(world, chance_N, score_N).mean())


def kl_of(world: World, chance_N: Tensor, reference_N: Tensor) -> float:
    """Compute the exact KL of a play, in nats, from the reference's log-probabilities."""
    possible_N = chance_N > 0
    apart_N = torch.where(possible_N, chance_N.clamp(min=1e-300).log() - reference_N, 0.0)
    return float((chance_N * apart_N).sum()) / world.plays.questions


def draw(world: World, chance_N: Tensor, generator: torch.Generator) -> Tensor:
    """Draw `GROUP` plays of each question. Returns their numbers: [questions, GROUP]."""
    groups = []
    for question in range(world.plays.questions):
        members = (world.plays.question_N == question).nonzero()[:, 0]
        places = torch.multinomial(chance_N[members], GROUP, True, generator=generator)
        groups.append(members[places])
    return torch.stack(groups)


def centre(score_QG: Tensor) -> Tensor:
    """Compare each play with the mean of its group (Dr. GRPO's advantage)."""
    return score_QG - score_QG.mean(1, keepdim=True)


def divide(score_QG: Tensor) -> Tensor:
    """Compare, and divide by the group's standard deviation (GRPO's advantage)."""
    return centre(score_QG) / (score_QG.std(1, keepdim=True) + 1e-6)


def weights_of(world: World, play_QG: Tensor, advantage_QG: Tensor) -> Tensor:
    """Add up the advantages of each play, over the number drawn: [N]."""
    weight_N = torch.zeros(len(world.plays.trajectories), dtype=torch.float64)
    weight_N.index_add_(0, play_QG.flatten(), advantage_QG.double().flatten())
    return weight_N / play_QG.numel()


class Adam:
    """Adam on one vector. PyTorch's own imports its compiler first, for seconds."""

    def __init__(self, model: Decoder, lr: float):
        self.model = model
        self.lr = lr
        self.step_number = 0
        self.mean: Tensor | float = 0.0
        self.square: Tensor | float = 0.0

    def ascend(self, gradient: Tensor, scale: float = 1.0) -> None:
        """Take one step up. `scale` multiplies its length."""
        self.step_number += 1
        self.mean = 0.9 * self.mean + 0.1 * gradient
        self.square = 0.999 * self.square + 0.001 * gradient**2
        mean = self.mean / (1 - 0.9**self.step_number)
        root = (self.square / (1 - 0.999**self.step_number)).sqrt() + 1e-8
        move = self.lr * scale * mean / root
        with torch.no_grad():
            place = 0
            for weight in self.model.parameters():
                weight += move[place : place + weight.numel()].view_as(weight)
                place += weight.numel()


def train(
    world: World,
    seed: int,
    steps: int,
    score_N: Tensor,
    advantage: Callable[[Tensor], Tensor],
    lr: float = LR,
) -> list[Tensor]:
    """Train on samples of the model itself. Returns the chances of all plays after each step."""
    generator = torch.Generator().manual_seed(seed)
    adam = Adam(world.model, lr)
    chances = [chances_of(world)]
    for _ in range(steps):
        play_QG = draw(world, chances[-1], generator)
        weight_N = weights_of(world, play_QG, advantage(score_N[play_QG]))
        adam.ascend(push(world.model, world.plays.batch, world.plays.on_tokens(weight_N), 1.0))
        chances.append(chances_of(world))
    return chances


# --------------------------------------------------------------------------------------- the claims


def try_deviation(seed: int) -> dict[str, float]:
    """Train with and without the division, where half of the questions are nearly solved."""
    figures = {}
    for name, advantage in (("divided", divide), ("not divided", centre)):
        world = open_world("stop-start")
        easy_N = world.plays.question_N < world.plays.questions // 2

        def loss(world: World = world, easy_N: Tensor = easy_N) -> Tensor:
            chance_N = play_logprobs(world.model, world.plays.batch, 1.0).exp()
            return -(chance_N * world.right_N)[easy_N].sum()

        minimize(world.model, loss, 12)
        chances = train(world, seed, 40, world.right_N, advantage)
        score_Q = scores_of(world, chances[0], world.right_N)
        figures[name] = mean_score(world, chances[-1], world.right_N)
        half = len(score_Q) // 2
        figures["apart at the start"] = float(score_Q[:half].mean() - score_Q[half:].mean())
    figures["effect"] = figures["not divided"] - figures["divided"]
    figures["precondition"] = figures["apart at the start"]
    return figures


KL_WEIGHT = 0.1


def try_k3(seed: int) -> dict[str, float]:
    """Train with a KL penalty: k3 in the loss, or k1 in the reward.

    The second has the gradient of the KL (docs/answer-key.md). Both end at the exact objective.
    """
    figures = {}
    reference = open_world("stop-start")
    reference_N = chances_of(reference).log()
    for name in ("k1 in the reward", "k3 in the loss"):
        world = open_world("stop-middle")
        batch = world.plays.batch
        with torch.no_grad():
            reference_BT = token_logprobs_of(reference.model, batch, 1.0)
        generator = torch.Generator().manual_seed(seed)
        adam = Adam(world.model, LR)
        chance_N = chances_of(world)
        figures["KL at the start"] = kl_of(world, chance_N, reference_N)
        for _ in range(40):
            play_QG = draw(world, chance_N, generator)
            with torch.no_grad():
                apart_BT = token_logprobs_of(world.model, batch, 1.0) - reference_BT
            play_N = torch.zeros_like(chance_N).index_add(
                0, batch.trajectory_B, (apart_BT * batch.mask_BT).sum(1)
            )
            in_reward = name.startswith("k1")
            # With Stop's own reward: at this checkpoint the agent goes on, and hardly answers.
            score_N = world.plays.reward_N
            if in_reward:
                score_N = score_N - KL_WEIGHT * play_N
            weight_N = weights_of(world, play_QG, centre(score_N[play_QG]))
            weights_BT = world.plays.on_tokens(weight_N)
            if not in_reward:
                # The derivative of k3 = exp(-d) - 1 + d by log pi, with the clamp of the trainer.
                slope_BT = torch.where(
                    torch.expm1(-apart_BT) + apart_BT < 10, 1 - (-apart_BT).exp(), 0
                )
                count_N = weights_of(world, play_QG, torch.ones(play_QG.shape))
                weights_BT = weights_BT - KL_WEIGHT * world.plays.on_tokens(count_N) * slope_BT
            adam.ascend(push(world.model, batch, weights_BT, 1.0))
            chance_N = chances_of(world)
        objective = mean_score(world, chance_N, world.plays.reward_N)
        figures[f"{name}: score"] = objective
        figures[f"{name}: KL"] = kl_of(world, chance_N, reference_N)
        figures[name] = objective - KL_WEIGHT * figures[f"{name}: KL"]
    figures["effect"] = figures["k1 in the reward"] - figures["k3 in the loss"]
    figures["precondition"] = figures["KL at the start"]
    return figures


LAG = 8
CAP = 2.0


def try_stale(seed: int) -> dict[str, float]:
    """Train on samples `LAG` steps old, with constant and with scaled steps.

    The ratio of a whole play corrects for the age, up to `CAP`. The step is scaled by the root of
    the effective sample size, as a share of the sample. As a control, it is scaled by the mean of
    these factors in every step.
    """
    figures = {}
    figures["fresh"], _ = train_stale(seed, 0, lambda share: 1.0)
    figures["constant"], _ = train_stale(seed, LAG, lambda share: 1.0)
    figures["scaled"], scales = train_stale(seed, LAG, math.sqrt)
    mean = fmean(scales)
    figures["mean scale"] = mean
    figures["mean scale in every step"], _ = train_stale(seed, LAG, lambda share: mean)
    figures["effect"] = figures["scaled"] - figures["constant"]
    figures["precondition"] = figures["fresh"] - figures["constant"]
    return figures


def train_stale(
    seed: int, lag: int, scale: Callable[[float], float], steps: int = 60, lr: float = 1e-2
) -> tuple[float, list[float]]:
    """Train on samples of `lag` steps ago. Returns the mean of J over the steps, and the scales."""
    world = open_world("stop-start")
    generator = torch.Generator().manual_seed(seed)
    adam = Adam(world.model, lr)
    chances = [chances_of(world)]
    scales = []
    scores = []
    for step in range(steps):
        now_N = chances[-1]
        old_N = chances[max(0, step - lag)]
        play_QG = draw(world, old_N, generator)
        ratio_QG = now_N[play_QG] / old_N[play_QG]
        share = float(ratio_QG.sum() ** 2 / (ratio_QG**2).sum()) / ratio_QG.numel()
        scales.append(scale(share))
        advantage_QG = centre(world.right_N[play_QG]) * ratio_QG.clamp(max=CAP)
        weight_N = weights_of(world, play_QG, advantage_QG)
        gradient = push(world.model, world.plays.batch, world.plays.on_tokens(weight_N), 1.0)
        adam.ascend(gradient, scales[-1])
        chances.append(chances_of(world))
        scores.append(mean_score(world, chances[-1], world.right_N))
    return fmean(scores), scales


EXPLOIT = 1.5
"""What the judge gives a play that ends with "nothing", right or not. A right answer gets 1."""


def try_judge(seed: int) -> dict[str, float]:
    """Train on a judge that one word fools, and follow the true score."""
    world = open_world("stop-start")
    verdict_N = torch.where(world.fools_N, EXPLOIT, world.right_N)
    chances = train(world, seed, 120, verdict_N, centre)
    scores = [mean_score(world, chance_N, world.right_N) for chance_N in chances]
    peak = max(scores)
    return {
        "at the start": scores[0],
        "fooled at the start": mean_score(world, chances[0], world.fools_N.double()),
        "peak": peak,
        "step of the peak": float(scores.index(peak)),
        "at the end": scores[-1],
        "judged at the end": mean_score(world, chances[-1], verdict_N),
        "effect": peak - scores[-1],
        "precondition": peak - scores[0],
    }


CLAIMS: dict[str, Callable[[int], dict[str, float]]] = {
    "deviation": try_deviation,
    "k3": try_k3,
    "stale": try_stale,
    "judge": try_judge,
}


# -------------------------------------------------------------------------------------- the verdict


def interval(values: list[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean (Student's t)."""
    half = half_width(values)
    return fmean(values) - half, fmean(values) + half


def verdict(effects: list[float], preconditions: list[float], bet: dict[str, Any]) -> str:
    """Compare effect and precondition with what was written before the run."""
    if fmean(preconditions) < bet["precondition_least"]:
        return "cannot show"
    low, high = interval(effects)
    if low > bet["margin"]:
        return "holds"
    if high < bet["margin"]:
        return "fails"
    return "not decided"


def table(record: dict[str, Any]) -> str:
    """Format a row for each claim, with what was written before."""
    lines = [
        "| claim, paper, its figure | what is measured | effect (95 % over seeds) | margin | "
        "precondition | bet | verdict |",
        "|---" * 7 + "|",
    ]
    bets = yaml.safe_load(BETS.read_text())
    for name, claim in record.items():
        bet = bets[name]
        mean, low, high = claim["effect"]
        least = fmean(run["precondition"] for run in claim["runs"])
        lines.append(
            f"| {bet['claim']} {bet['paper']}: {bet['figure']} | {bet['effect']} | {mean:+.3f} "
            f"({low:+.3f} to {high:+.3f}), {len(claim['runs'])} seeds | {bet['margin']:g} | "
            f"{bet['precondition']}: {least:.2f} | {bet['bet']} | **{claim['verdict']}** |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CLAIMS)} (default: all)")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RECORD)
    options = parser.parse_args()
    bets = yaml.safe_load(BETS.read_text())
    record = json.loads(options.out.read_text()) if options.out.is_file() else {}
    torch.set_num_threads(1)
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for name in options.names or CLAIMS:
            runs = record.setdefault(name, {"runs": []})["runs"]
            if any(run["seed"] == seed for run in runs):
                continue
            start_s = time.process_time()
            figures = {key: round(value, 5) for key, value in CLAIMS[name](seed).items()}
            seconds = round(time.process_time() - start_s, 1)
            runs.append({"seed": seed} | figures | {"cpu_seconds": seconds})
            print(name, json.dumps(runs[-1]), flush=True)
            # After each run, so that an interrupted command goes on where it was.
            write_whole(options.out, json.dumps(record, indent=1) + "\n")
    for name, claim in record.items():
        effects = [run["effect"] for run in claim["runs"]]
        if len(effects) < 2:
            continue
        claim["verdict"] = verdict(
            effects, [run["precondition"] for run in claim["runs"]], bets[name]
        )
        low, high = interval(effects)
        claim["effect"] = [round(x, 4) for x in (fmean(effects), low, high)]
        print(
            f"{name}: effect {fmean(effects):+.4f} ({low:+.4f} to {high:+.4f}): {claim['verdict']}"
        )
    write_whole(options.out, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
