"""Compare a step with its products, attention, softmax and optimiser alone.

    PYTHONPATH=src .venv/bin/python benchmarks/floor.py --steps 4 --warmup 3
    .venv/bin/python benchmarks/floor.py --draw    # docs/images/floor.svg from floor.jsonl

It needs data, index and cold start of the preset. The last step of a real run records every
operation with its shapes. Each distinct operation is then repeated alone, on inputs that are ready
in memory. The sum is the floor. The rest of a step goes to elementwise operations, copies, padding,
Python, and waiting. Adds a JSON line to benchmarks/floor.jsonl.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F

# As a script it finds `common` in its own folder, and `lab` at the root.
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from common import Setting, load_setting, make_parser, run
from lab.pictures.book import ROOT, Drawing

from agent_r1.env import make_env
from agent_r1.ground.device import resolve_device
from agent_r1.model import cpu_products, decoder, kv_cache, sampler
from agent_r1.model import files as model_files
from agent_r1.search.index import PassageIndex
from agent_r1.training import prefix_tree
from agent_r1.training.learner import make_learner
from agent_r1.training.loop import train
from agent_r1.training.parts import make_parts

OUT = Path(__file__).with_name("floor.jsonl")
ROLLOUT, UPDATE = "rollout", "update"
Operation = tuple
"""(phase, kind, sizes); a phase of a pass with gradients is UPDATE."""


@contextmanager
def recorded(calls: Counter[Operation]) -> Iterator[None]:
    """Count the operations of the model."""
    real_product, real_attention = decoder.product, decoder.attend
    real_decode, real_sample = kv_cache.KVCache.decode, sampler.sample_tokens

    def phase() -> str:
        return UPDATE if torch.is_grad_enabled() else ROLLOUT

    def product(x, weight, bias=None):
        calls[phase(), "product", (x.numel() // x.shape[-1], *reversed(weight.shape))] += 1
        return real_product(x, weight, bias)

    def attention(q, k, v, visible=None):
        if q.shape[2] > 1:  # `decode` counts single queries
            calls[phase(), "attention", (*q.shape, *k.shape[1:3], visible is not None)] += 1
        return real_attention(q, k, v, visible)

    def decode(cache, next_ids):
        s, end = cache.model.shape, int(cache.lengths[: max(next_ids) + 1].max()) + 1
        sizes = (max(next_ids) + 1, s.kv_heads, s.heads // s.kv_heads, end, s.head_dim)
        calls[ROLLOUT, "attention to the cache", sizes] += s.layers
        return real_decode(cache, next_ids)

    def sample(logits, *rest):
        calls[ROLLOUT, "softmax", tuple(logits.shape)] += 1
        return real_sample(logits, *rest)

    places = [(module, "attend", attention) for module in (decoder, kv_cache, prefix_tree)]
    places += [(module, "product", product) for module in (decoder, cpu_products)]
    places += [
        (sampler, "sample_tokens", sample),
        (kv_cache.KVCache, "decode", decode),
    ]
    with ExitStack() as patches:
        for place in places:
            patches.enter_context(patch.object(*place))
        yield


def seconds(work: Callable[[], object], budget: float = 0.05) -> float:
    """Return the least time of `work`, repeated for about `budget` seconds."""
    work()
    best, end = math.inf, time.perf_counter() + budget
    while time.perf_counter() < end:
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best


def alone(phase: str, kind: str, sizes: tuple, dtype: torch.dtype) -> float:
    """Time one operation; in the update with its backward pass."""
    learns = phase == UPDATE
    new = partial(torch.randn, dtype=dtype, requires_grad=learns)
    if kind == "product":
        rows, inside, outside = sizes
        x, weight = new(rows, inside), new(outside, inside)
        multiply = F.linear if dtype is torch.bfloat16 else decoder.product
        work = partial(multiply, x, weight)
    elif kind == "attention":
        B, H, A, width, K, T, masked = sizes
        q, k, v = new(B, H, A, width), new(B, K, T, width), new(B, K, T, width)
        mask = torch.ones(A, T, dtype=torch.bool).tril(T - A) if masked else None
        work = partial(decoder.attend, q, k, v, mask)
    elif kind == "softmax":
        work = partial(F.log_softmax, torch.randn(sizes, dtype=dtype), dim=-1)
    else:
        slots, K, group, end, width = sizes
        q, k, v = new(slots, K, group, width), new(slots, K, end, width), new(slots, K, end, width)
        work = lambda: (q @ k.transpose(2, 3)).softmax(dim=-1) @ v  # noqa: E731
    if not learns:
        with torch.inference_mode():
            return seconds(work)
    out = work()
    gradient = torch.ones_like(out)
    inputs = [
        t for t in getattr(work, "args", ()) if isinstance(t, torch.Tensor) and t.requires_grad
    ]
    return seconds(lambda: torch.autograd.grad(work(), inputs, gradient))


def last_step(
    setting: Setting,
) -> tuple[Counter[Operation], dict, list[list[str]], torch.nn.Module]:
    """Run real steps. Return the last step's operations, metrics and searches, and the model."""
    learner = make_learner(model_files.load_model(setting.model), setting.config.actor, None)
    calls: Counter[Operation] = Counter()
    metrics: list[dict] = []
    searches: list[list[str]] = []
    real_search = PassageIndex.search

    def search(index, queries, top_k):
        searches.append(list(queries))
        return real_search(index, queries, top_k)

    def steps(number: int, on_step: Callable) -> None:
        setting.config.trainer.steps = number
        env_of = partial(make_env, tools=setting.tools, config=setting.config.env)
        train(
            setting.config,
            make_parts(setting.config, learner.actor, setting.chat, env_of, setting.questions),
            learner,
            on_step,
            lambda _: {},
            lambda _: None,
        )

    total = setting.config.trainer.steps
    steps(total, lambda *_: None)
    with recorded(calls), patch.object(PassageIndex, "search", search):
        steps(total + 1, lambda measured, *_: metrics.append(measured))
    return calls, metrics[0], searches, learner.actor


def floor(
    calls: Counter[Operation], actor: torch.nn.Module, updates: int, dtype: torch.dtype
) -> dict[str, float]:
    """Add up the seconds of all operations and of `updates` optimiser steps, by kind."""
    parts: Counter[str] = Counter()
    for (phase, kind, sizes), times in calls.items():
        parts[f"{phase}: {kind}"] += times * alone(phase, kind, sizes, dtype)
    copy = [torch.nn.Parameter(p.detach().clone()) for p in actor.parameters()]
    for p in copy:
        p.grad = torch.zeros_like(p)
    parts["update: optimiser"] = updates * seconds(torch.optim.AdamW(copy, fused=True).step)
    return {name: round(value, 5) for name, value in parts.items()}


def segments(line: dict) -> Iterator[tuple[str, float, str]]:
    """Yield the parts of a step in seconds, with their class in the drawing."""
    step, parts = line["step"], line["floor"][line.get("dtype", "float32")]
    for phase in (UPDATE, ROLLOUT):
        own = {
            name.partition(": ")[2]: value
            for name, value in parts.items()
            if name.startswith(phase)
        }
        products, attention = (
            own.pop("product"),
            sum(value for name, value in own.items() if "attention" in name),
        )
        yield f"{phase}: products", products, "sampled"
        yield f"{phase}: attention", attention, "sampled"
        others = sum(value for name, value in own.items() if "attention" not in name)
        yield f"{phase}: {'optimiser' if phase == UPDATE else 'softmax'}", others, "sampled"
        yield f"{phase}: between them", step[phase] - products - attention - others, "read"
    yield "environment: search", line["environment: search"], "sampled"
    yield (
        "environment: parsing, tokens, Python",
        step["environment"] - line["environment: search"],
        "read",
    )
    yield "credit, checks, records", step["rest"], "read"


def waterfall(lines: list[str]) -> str:
    """Draw the latest line of each preset, in shares of its step."""
    latest = {line["preset"]: line for line in map(json.loads, lines) if line["threads"] == 2}
    d = Drawing(
        900,
        40 + 290 * len(latest),
        "A training step: the operations alone, and what is between them",
    )
    d.text(
        14,
        26,
        "A GRPO step on two cores: operations alone (green), and the time between them (grey)",
        16,
    )
    for number, (preset, line) in enumerate(latest.items()):
        top, whole, x = 50 + 290 * number, sum(line["step"].values()), 300.0
        d.text(14, top + 14, f"{preset}, {line.get('dtype', 'float32')}: share of a step", 14)
        for row, (name, value, kind) in enumerate(segments(line)):
            y, width = top + 24 + 22 * row, 520 * value / whole
            d.text(286, y + 13, name, 12, anchor="end")
            d.rect(x, y, max(width, 1), 17, kind)
            d.text(x + max(width, 1) + 6, y + 13, f"{value / whole:.0%}", 12, "dim")
            x += width
    return d.done()


def main() -> None:
    if sys.argv[1:] == ["--draw"]:
        (ROOT / "docs" / "images" / "floor.svg").write_text(waterfall(OUT.read_text().splitlines()))
        return
    arguments = make_parser(__doc__.splitlines()[0]).parse_args()
    setting = load_setting(arguments)
    calls, measured, searches, actor = last_step(setting)
    spent = {name: measured[f"timing_s/{name}"] for name in ("step", "gen", "env", "update_actor")}
    index = setting.tools["search"].searcher.index
    line = {
        "preset": arguments.preset,
        "threads": arguments.threads,
        "dtype": str(
            resolve_device(setting.config.trainer.device, setting.config.trainer.dtype)[1]
        ).removeprefix("torch."),
        "step": {
            "rollout": spent["gen"] - spent["env"],
            "environment": spent["env"],
            "update": spent["update_actor"],
            "rest": spent["step"] - spent["gen"] - spent["update_actor"],
        },
        "environment: search": seconds(
            lambda: [index.search(queries, setting.config.search.top_k) for queries in searches]
        ),
        "floor": {
            str(dtype).removeprefix("torch."): floor(
                calls, actor, setting.config.actor.minibatches, dtype
            )
            for dtype in (torch.float32, torch.bfloat16)
        },
    }
    with OUT.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps(line, indent=1))


if __name__ == "__main__":
    run(main)
