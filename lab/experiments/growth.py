"""Measure how a step's time and memory grow with one factor at a time.

    PYTHONPATH=src OMP_NUM_THREADS=1 .venv/bin/python -m lab.experiments.growth run
    lab/experiments/growth.jsonl PYTHONPATH=src .venv/bin/python -m lab.experiments.growth table
    lab/experiments/growth.jsonl

Each cell is a process that runs a few steps of `training.loop.train`, on one thread, from random
weights. The base cell is a quarter of the laptop's step. A random model does not decide to search,
so the environment searches in each turn, and repeats or cuts the result to a fixed length. Rewards
are random, so no row is skipped. Seconds are CPU time of the fastest step, which other programs
disturb little. Its parts share the CPU time as they share the wall time. A cell that would take
longer than LIMIT_S is marked.
"""

from __future__ import annotations

import json
import math
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from agent_r1.chat import tokenizer
from agent_r1.chat.format import ChatFormat
from agent_r1.config import load_config
from agent_r1.core import Action, AgentEnv, Observation, Outcome, Row, StepResult, StopReason
from agent_r1.data.storage import Passage, write_corpus
from agent_r1.model.decoder import Decoder, DecoderShape
from agent_r1.search.encoders import make_encoder
from agent_r1.search.index import EXACT, PassageIndex, build_index
from agent_r1.search.searcher import Searcher
from agent_r1.training import loop
from agent_r1.training.learner import make_learner
from agent_r1.training.parts import make_parts

MODELS = {
    0.46: (128, 2, 256),
    3.7: (256, 4, 768),
    15: (384, 8, 1024),
    52: (512, 15, 1536),
    120: (576, 30, 1536),
}
"""M parameters -> width, layers, width of the MLP.

The last has the width and depth of SmolLM2-135M.
"""
FACTORS = {
    "context": (160, 512, 1024, 2048, 4096, 8192),  # tokens of an episode; longer results
    "turns": (2, 4, 8, 16),  # the context grows with them
    "group": (4, 8, 16, 32, 64),  # episodes of each prompt
    "passages": (3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000, 5_000_000),
    "model": tuple(MODELS),
}
BASE = {"context": 160, "turns": 3, "group": 8, "passages": 3_000, "model": 0.46}
PARTS = {"step": "step", "sampling": "gen", "environment": "env", "update": "update_actor"}
PROMPTS, TURN, VOCABULARY, STEPS = 4, 16, 1024, 4
LONG_S, LIMIT_S = 3, 100
"""Longer than LONG_S: only the first step is measured. Longer than LIMIT_S: not run."""


class Fixed(AgentEnv):
    """Search in each turn; after the last turn the reward is random."""

    def __init__(self, chat: ChatFormat, searcher: Searcher, turns: int, read: int):
        self.chat, self.searcher, self.turns, self.read, self.turn = chat, searcher, turns, read, 0

    def reset(self, row: Row) -> Observation:
        self.prompt = row["prompt"]
        return Observation(self.prompt)

    async def step(self, action: Action) -> StepResult:
        self.turn += 1
        if self.turn == self.turns:
            return StepResult(None, done=True, stop_reason=StopReason.ANSWERED)
        hits = await self.searcher.search(f"{self.prompt[0]['content']} {action.text}", 3)
        ids = self.chat.encode_data(" ".join(hit.text for hit in hits))
        text = self.chat.decode((ids * math.ceil(self.read / len(ids)))[: self.read])
        return StepResult(Observation([{"role": "tool", "content": text}]))

    def outcome(self, stop_reason: StopReason) -> Outcome:
        return Outcome(random.random())


def corpus(count: int) -> list[tuple[str, str]]:
    """Generate (title, text) of `count` passages about invented places."""
    rng, syllables = (
        random.Random(0),
        ("ba", "ko", "ri", "sel", "dun", "mar", "vi", "tos", "len", "quo"),
    )
    names = ("".join(rng.choices(syllables, k=4)).title() for _ in range(3 * count))
    return [(n, f"{n} is a city in {next(names)}. Its mayor is {next(names)}.") for n in names]


def measure(cell: dict[str, Any]) -> dict[str, Any]:
    """Run the steps of one cell in this process."""
    torch.set_num_threads(1)
    places, folder, began = corpus(cell["passages"]), Path(tempfile.mkdtemp()), time.perf_counter()
    write_corpus(
        folder / "corpus.jsonl", (Passage(str(i), *place) for i, place in enumerate(places))
    )
    encoder = make_encoder("ngram", 2048)
    build_index(folder / "corpus.jsonl", folder / "index", encoder)
    searcher = Searcher(PassageIndex.load(folder / "index", folder / "corpus.jsonl", encoder))
    index_s = time.perf_counter() - began

    chat = ChatFormat(tokenizer.train_tokenizer((text for _, text in places[:3000]), VOCABULARY))
    rows: list[Row] = [
        {
            "data_source": "growth",
            "prompt": [{"role": "user", "content": f"Who is the mayor of {title}?"}],
            "extra_info": {"index": i},
            "reward_model": {"ground_truth": [""]},
        }
        for i, (title, _) in enumerate(places[:1000])
    ]
    first = len(chat.prompt_ids(rows[0]["prompt"]))
    frame = len(chat.continuation_ids([{"role": "tool", "content": ""}]))
    results = BASE["turns"] - 1
    result = (cell["context"] - first - BASE["turns"] * TURN) // results - frame
    longest = first + cell["turns"] * (TURN + frame + result) + 32
    config = load_config(
        "lab/laptop.yaml",
        [
            f"rollout.prompts_per_step={PROMPTS}",
            f"rollout.samples_per_prompt={cell['group']}",
            "trainer.eval_every=0",
            f"rollout.max_tokens_per_turn={TURN}",
            f"rollout.max_context={longest}",
            f"trainer.steps={STEPS + 1}",
            f"trainer.max_tokens_per_microbatch={max(1500, longest)}",
            f"env.max_turns={cell['turns']}",
            f"rollout.max_concurrent_episodes={PROMPTS * cell['group']}",
            f"model.max_position={longest}",
        ],
        algorithm="grpo",
    )
    width, layers, wide = MODELS[cell["model"]]
    model = Decoder(
        DecoderShape(
            VOCABULARY, width, layers, width // 64, width // 64, wide, max_position=longest
        )
    )
    torch.nn.init.normal_(
        model.embed.weight, std=0.02
    )  # near-uniform sampling: the samples of a prompt all differ
    steps, cpu = [], time.process_time()

    def on_step(metrics: dict[str, float], *_: object) -> None:
        nonlocal cpu
        cpu, before = time.process_time(), cpu
        steps.append(metrics | {"cpu": cpu - before})
        if cpu - before > LONG_S:
            learner.step = config.trainer.steps

    def env_of(row: Row) -> Fixed:
        return Fixed(chat, searcher, cell["turns"], result)

    learner = make_learner(model, config.actor)
    loop.train(
        config,
        make_parts(config, learner.actor, chat, env_of, rows),
        learner,
        on_step,
        lambda policy: {},
        lambda learner: None,
    )
    measurements = steps[1:] or steps  # the first step warms up
    least = min(measurements, key=lambda step: step["cpu"])
    laps = {name: least[f"timing_s/{key}"] for name, key in PARTS.items()}
    laps["sampling"] -= laps["environment"]
    seconds = {name: least["cpu"] * lap / laps["step"] for name, lap in laps.items()}
    return cell | {
        "seconds": seconds,
        "steps": len(measurements),
        "tokens": round(measurements[-1]["sequence_length/mean"]),
        "parameters": model.parameter_count,
        "index_s": round(index_s, 1),
        "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def run(out: Path) -> None:
    """Measure all cells, each in a process, and write one JSON line per cell."""
    with out.open("w") as file:
        for factor, values in FACTORS.items():
            estimate = 0.0  # CPU seconds of a cell, if they grow in proportion
            for i, value in enumerate(values):
                line, before = {"factor": factor, "value": value}, children_s()
                estimate *= value / values[i - 1] if i else 1
                if estimate > LIMIT_S:
                    line["not_run"] = f"{estimate:.0f} s or more"
                elif factor == "passages" and value > EXACT:
                    line["not_run"] = "its approximate index takes minutes to build"
                else:
                    command = [
                        sys.executable,
                        "-m",
                        "lab.experiments.growth",
                        "cell",
                        json.dumps(BASE | {factor: value}),
                    ]
                    line |= json.loads(
                        subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
                    )
                    estimate = children_s() - before
                print(json.dumps(line), file=file, flush=True)


def children_s() -> float:
    """Return the CPU seconds of finished child processes."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def slope(points: list[tuple[float, float]]) -> float:
    """Fit y = c x^slope by least squares in logarithms."""
    x, y = ([math.log(value) for value in column] for column in zip(*points, strict=True))
    mx, my = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum(
        (a - mx) ** 2 for a in x
    )


def tables(file: Path) -> dict[str, str]:
    """Return a Markdown table per factor, relative to its first cell, with fitted exponents."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return {
        factor: table(factor, [line for line in lines if line["factor"] == factor])
        for factor in FACTORS
    }


def table(factor: str, cells: list[dict[str, Any]]) -> str:
    """Return the table of one factor. Cells that were not run share a row, and its reason."""
    out = [f"| {factor} | tokens | {' | '.join(PARTS)} | memory | index |"]
    out.append("|" + "---|" * (len(PARTS) + 4))
    ran = [cell for cell in cells if "not_run" not in cell]
    for cell in ran:
        ratios = [f"{cell['seconds'][part] / ran[0]['seconds'][part]:.2f}" for part in PARTS]
        out.append(
            f"| {cell['value']:,} | {cell['tokens']:,} | {' | '.join(ratios)} | "
            f"{cell['mib']:,} MiB | {cell['index_s']} s |"
        )
    rest = cells[len(ran) :]
    if rest:
        reason = rest[0]["not_run"]
        values = f"{rest[0]['value']:,} to {rest[-1]['value']:,}"
        out.append(f"| {values} | not run: {reason} |" + " |" * (len(PARTS) + 2))
    for name, some in (("exponent, all", ran), ("exponent, last two", ran[-2:])):
        fits = [f"{slope([(c['value'], c['seconds'][part]) for c in some]):.2f}" for part in PARTS]
        memory = slope([(c["value"], c["mib"]) for c in some])
        out.append(f"| *{name}* | | {' | '.join(fits)} | {memory:.2f} | |")
    return "\n".join(out)


def print_tables(file: Path) -> None:
    print("\n\n".join(tables(file).values()))


if __name__ == "__main__":
    action, argument = sys.argv[1:]
    if action == "cell":
        print(json.dumps(measure(json.loads(argument))))
    else:
        {"run": run, "table": print_tables}[action](Path(argument))
