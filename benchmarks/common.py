"""Share task, model and measurements between both sides of a benchmark.

In: command line options. Out: a `Setting` (configuration, questions, tools, model folder) and, at
the end, a `Result` as a table and as one JSON line. Next: `step_time.py` (ours) and
`trl_compare/run.py` (TRL) time a training step with it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import torch
from transformers.utils import get_json_schema

from agent_r1.chat.format import ChatFormat
from agent_r1.chat.tokenizer import load_chat
from agent_r1.config import Config, load_config
from agent_r1.core import Row
from agent_r1.data.storage import read_rows
from agent_r1.evaluation.evaluate import evaluate
from agent_r1.ground.errors import AgentR1Error
from agent_r1.ground.shapes import Shape, find_shape
from agent_r1.model.decoder import Decoder
from agent_r1.model.sampler import LocalPolicy
from agent_r1.rollout.setup import make_loop
from agent_r1.search.index import PassageIndex
from agent_r1.search.searcher import Searcher
from agent_r1.tool import BaseTool, make_tools
from agent_r1.workspace import Workspace

PHASES = ("rollout", "environment", "old log-probs", "update", "overhead")
"""Parts of a step's wall time. On both sides they add up to `step`; see benchmarks/README.md."""


@dataclass(frozen=True)
class Setting:
    """Hold one task and one model for either side."""

    config: Config
    model: Path
    questions: list[Row]
    validation: list[Row]
    test: list[Row]
    tools: dict[str, BaseTool]
    chat: ChatFormat

    @property
    def episodes(self) -> int:
        """Count the trajectories of one step."""
        return self.config.rollout.prompts_per_step * self.config.rollout.samples_per_prompt


@dataclass
class StepRecord:
    """Hold the figures of one training step."""

    seconds: dict[str, float]
    """`step`, each of PHASES, and `cpu`: processor time of all threads, which a busy machine
    disturbs less."""
    agent_tokens: int
    """Tokens that the policy sampled, over all trajectories."""
    learnt: tuple[int, int]
    """Tokens of the trained trajectories, without padding, and how many of them the policy
    sampled."""
    all_tokens: int
    """Tokens of all trajectories: prompts, sampled tokens and tool results, without padding."""
    reward: float
    """Mean over the trajectories."""


@dataclass
class Result:
    """Hold what one side prints."""

    side: str
    threads: int
    warmup: int
    steps: list[StepRecord]
    memory_gb: float
    """Largest resident set of the whole process, model and index included."""
    em_before: float | None = None
    em_after: float | None = None
    """Greedy exact match on the test questions, measured by our evaluator on both sides."""
    notes: dict[str, float] = field(default_factory=dict)


def make_parser(description: str) -> argparse.ArgumentParser:
    """Add the options of both sides."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--preset", default="lab/laptop.yaml")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=10, help="measured RL steps")
    parser.add_argument("--warmup", type=int, default=3, help="RL steps before them, not counted")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--eval",
        type=int,
        default=0,
        metavar="N",
        help="greedy EM on N test questions, before, after",
    )
    parser.add_argument(
        "--until",
        type=float,
        metavar="EM",
        help="end at this greedy EM on the validation questions, and time no steps",
    )
    parser.add_argument(
        "--look-every",
        type=int,
        default=5,
        metavar="N",
        help="with --until: steps between two looks at the validation questions",
    )
    parser.add_argument(
        "--model", type=Path, help="model folder (default: the preset's cold start)"
    )
    parser.add_argument(
        "--data", type=Path, help="folder with *.parquet and corpus.jsonl (default: the preset's)"
    )
    parser.add_argument("--index", type=Path, help="index folder (default: the preset's)")
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="section.key=value",
        help="settings, for example actor.lr=1e-4",
    )
    return parser


def load_setting(arguments: argparse.Namespace) -> Setting:
    """Load task and model of the options. Sets PyTorch's threads before it starts any."""
    torch.set_num_threads(arguments.threads)
    total = arguments.warmup + arguments.steps
    fixed = [
        f"trainer.steps={total}",
        "trainer.eval_every=0",
        f"trainer.save_every={total}",
        "trainer.device=cpu",
    ]
    config = load_config(
        arguments.preset, [*arguments.settings, *fixed], algorithm="grpo", seed=arguments.seed
    )
    workspace = Workspace(config)
    data, index = arguments.data or workspace.data, arguments.index or workspace.index
    model = arguments.model or workspace.start_model
    for path in (data, index, model):
        if not path.exists():
            raise AgentR1Error(
                f"{path} is missing; run `agent-r1 data`, `index` and `cold-start` with --preset "
                f"{arguments.preset} "
                f"--seed {arguments.seed}, or name other folders with --data, --index and --model"
            )
    searcher = Searcher(PassageIndex.load(index, data / "corpus.jsonl"))
    tools = make_tools(config.env.tools, searcher=searcher, top_k=config.search.top_k)
    tools["search"].schema = lambda: get_json_schema(
        search
    )  # a template that shows schemas shows the same to both sides
    train, test = read_rows(data / "train.parquet"), read_rows(data / "test.parquet")
    # Questions without tools (pocket's open-book ones) are left out: TRL gives every prompt the
    # same tools.
    train = [row for row in train if row["env_kwargs"]["tools"] != []]
    # Only --until looks at them, and a folder of --data may have none.
    validation = read_rows(data / "val.parquet") if arguments.until else []
    return Setting(
        config, model, train, validation, test[: arguments.eval], tools, load_chat(model)
    )


def search(query: str):
    """Search for passages about a query.

    Args:
        query: What to look for.
    """


def update_flops(shape: Shape, learnt: tuple[int, int]) -> float:
    """Count an update's minimum operations: layer weights per token, the vocabulary per sampled
    token.

    Forward, and twice that backward. Attention's own products, a few per cent, are omitted.
    """
    tokens, sampled = learnt
    return 6 * (shape.layers * shape.layer * tokens + shape.vocab * shape.hidden * sampled)


def matmul_rate(shape: Shape, tokens: int = 1024) -> float:
    """Measure FLOP/s of this model's float32 products: a layer's, and the vocabulary's."""
    D, heads = shape.hidden, shape.heads * shape.head_dim
    qkv = heads + 2 * shape.kv_heads * shape.head_dim
    sizes = [
        (D, qkv),
        (heads, D),
        (D, 2 * shape.intermediate),
        (shape.intermediate, D),
    ] * shape.layers
    pairs = {
        size: (torch.randn(tokens, size[0]), torch.randn(*size))
        for size in (*sizes, (D, shape.vocab))
    }
    for a, b in pairs.values():
        a @ b
    began = time.perf_counter()
    for size in (*sizes, (D, shape.vocab)):
        torch.mm(*pairs[size])
    return 2 * tokens * shape.matmul_weights / (time.perf_counter() - began)


def run(main: Callable[[], None]) -> None:
    """Call `main`, and print user errors in one line instead of a traceback."""
    try:
        main()
    except AgentR1Error as error:
        sys.exit(f"benchmark: {error}")


def greedy_em(setting: Setting, model: Decoder, rows: list[Row]) -> float:
    """Return exact match on the questions at temperature 0."""
    r = setting.config.rollout
    policy = LocalPolicy(
        model, setting.chat.stop_ids, slots=r.max_concurrent_episodes, max_context=r.max_context
    )
    loop = make_loop(
        policy, setting.chat, setting.tools, setting.config.rollout, setting.config.env
    )
    trajectories = evaluate(loop, rows, temperature=0.0, seed=setting.config.seed)
    return fmean(t.metrics["em"] for t in trajectories)


class Watch:
    """Look whether greedy EM on the validation questions has reached a target.

    It looks every few steps and after the last one, and prints a JSON line for each look.
    `trl_compare/equal_em.py` reads the lines and looks at the clock: from outside, so that Python's
    start and imports count, too.
    """

    def __init__(self, setting: Setting, target: float, look_every: int):
        self.setting = setting
        self.target = target
        self.look_every = look_every
        self.seconds = 0.0
        """Spent on looking. Both sides have the same evaluator, and it is not part of training."""

    def reached(self, step: int, load: Callable[[], Decoder]) -> bool:
        """Return whether the run may end. `load` returns the model as it is after `step`."""
        is_last = step == self.setting.config.trainer.steps
        if step % self.look_every and not is_last:
            return False
        began = time.perf_counter()
        model = load()
        em = greedy_em(self.setting, model, self.setting.validation)
        self.seconds += time.perf_counter() - began
        print(json.dumps({"step": step, "em": em, "evaluation_seconds": self.seconds}), flush=True)
        if em < self.target and not is_last:
            return False
        # The validation questions chose this moment, so they flatter it. The test questions do not.
        if self.setting.test:
            print(json.dumps({"test_em": greedy_em(self.setting, model, self.setting.test)}))
        return True


def max_memory_gb() -> float:
    """Return this process's largest resident set in GiB (Linux counts it in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def report(result: Result, setting: Setting) -> None:
    """Print a table, then one JSON line for `trl_compare/table.py` and your own scripts."""
    steps, n, shape = result.steps, setting.episodes, find_shape("", setting.model)
    rate = max(matmul_rate(shape) for _ in range(3))
    needed = sum(update_flops(shape, s.learnt) for s in steps)
    after = f"after {result.warmup} for warm-up"
    print(
        f"\n{result.side}, {result.threads} threads: {len(steps)} steps of {n} trajectories, "
        f"{after}"
    )
    print(f"  {'seconds':<16}{'mean':>8}{'min':>8}{'share':>8}")
    whole = fmean(s.seconds["step"] for s in steps)
    for name in ("step", *PHASES, "cpu"):
        values = [s.seconds[name] for s in steps]
        print(f"  {name:<16}{fmean(values):8.3f}{min(values):8.3f}{fmean(values) / whole:8.0%}")
    summary = {
        "agent tokens a trajectory": fmean(s.agent_tokens for s in steps) / n,
        "tokens a trajectory": fmean(s.all_tokens for s in steps) / n,
        "agent tokens/s, rollout and environment": _rate(
            steps, "agent_tokens", ("rollout", "environment")
        ),
        "batch tokens/s, update": _rate(steps, "all_tokens", ("old log-probs", "update")),
        "matmul rate at the model's shapes, GFLOP/s": rate / 1e9,
        "update, share of that rate": needed / sum(s.seconds["update"] for s in steps) / rate,
        "reward": fmean(s.reward for s in steps),
        "peak memory, GiB": result.memory_gb,
        **result.notes,
    }
    for moment, em in (("before", result.em_before), ("after", result.em_after)):
        if em is not None:
            summary[f"greedy EM {moment}"] = em
    for name, value in summary.items():
        print(f"  {name:<42}{value:10.3f}" if value < 1000 else f"  {name:<42}{value:10.0f}")
    line = {
        "side": result.side,
        "threads": result.threads,
        "malloc": _malloc_settings(),
        "seconds": [{name: round(value, 4) for name, value in s.seconds.items()} for s in steps],
        "summary": summary,
    }
    print(json.dumps(line), flush=True)


def _rate(steps: list[StepRecord], tokens: str, phases: tuple[str, ...]) -> float:
    return sum(getattr(s, tokens) for s in steps) / sum(
        s.seconds[phase] for s in steps for phase in phases
    )


def _malloc_settings() -> dict[str, str]:
    """Return glibc's allocator settings, which can make a large difference on a CPU."""
    relevant = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")
    return {name: value for name, value in os.environ.items() if name.startswith(relevant)}
