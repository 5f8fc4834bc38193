"""one_file.py computes what the training loop computes, and its agent learns.

The recorded batch is docs/lessons/group.jsonl: eight attempts at one question, as lab/laptop.yaml
sampled them. Both sides replay the recorded turns, against the recorded search results.
"""

from __future__ import annotations

import ast
import asyncio
import copy
import json
import os
import re
import shutil
import subprocess
import sys
import types
from functools import partial

import pytest
import torch
from runs import ROOT, environment

from agent_r1 import (
    BaseTool,
    Generation,
    Sampling,
    Task,
    ToolOutput,
    load_chat,
    make_env,
    standardize,
)
from agent_r1.config import load_config
from agent_r1.model.files import load_model, to_hf
from agent_r1.model.policies import load_transformers
from agent_r1.rollout.setup import make_flow
from agent_r1.training import loop
from agent_r1.training.batches import make_batch
from agent_r1.training.learner import Learner
from agent_r1.training.losses import token_ratios
from agent_r1.training.parts import make_estimator
from agent_r1_recipes.laptop.settings import LAPTOP_AGENT

SOURCE = (ROOT / "one_file.py").read_text()
CONFIG = load_config(
    str(ROOT / "lab/laptop.yaml"),
    ["actor.minibatches=1", "actor.kl_coef=0", "actor.loss_aggregation=token-mean"]
    # one_file.py has no dual clip, and the optimiser below must see the gradient as it is
    + ["actor.clip_dual=0", "actor.grad_clip=1e9"],
    algorithm="grpo",
)
RECORDS = [json.loads(line) for line in (ROOT / "docs/lessons/group.jsonl").open()]
SAMPLES = 4  # the eight attempts count as two groups of four, with different means


def load_file(source: str = SOURCE) -> types.ModuleType:
    """Run the text of one_file.py as a module of that name."""
    module = types.ModuleType("one_file")
    exec(compile(source, "one_file.py", "exec"), module.__dict__)
    module.SAMPLES = SAMPLES
    return module


class RecordedSearch(BaseTool):
    """Returns what the search of the recorded episodes returned."""

    name = "search"
    description = "Search for passages about a query."
    parameters = {"type": "object", "properties": {"query": {"type": "string"}}}

    def __init__(self):
        super().__init__()
        calls = [c for r in RECORDS for s in r["steps"] for c in s["info"].get("tool_calls", [])]
        self.contents = {c["arguments"]["query"]: c["content"] for c in calls}

    async def execute(self, args):
        return ToolOutput(self.contents[args["query"]])


def question() -> dict:
    """The row of the recorded question."""
    return {
        "data_source": "tinyhop",
        "prompt": [{"role": "user", "content": RECORDS[0]["question"]}],
        "ability": "qa",
        "reward_model": {"style": "rule", "ground_truth": RECORDS[0]["ground_truth"]},
        "extra_info": {"index": 0, "split": "train", "kind": "2-hop"},
        "agent_name": "hermes",
        "env_kwargs": {},
    }


def recorded_turns(record: dict) -> list[tuple[list[int], list[float]]]:
    """The sampled ids of each turn, and their log-probabilities."""
    [row] = record["rows"]
    turns = []
    for number in range(len(record["steps"])):
        steps = zip(row["action_mask"], row["step_ids"], strict=True)
        places = [i for i, (mask, step) in enumerate(steps) if mask and step == number]
        ids = [row["input_ids"][i] for i in places]
        turns.append((ids, [row["logprobs"][i] for i in places]))
    return turns


class RecordedPolicy:
    """Says the recorded turns; the session is the number of the record."""

    def __init__(self):
        self.turns = {str(n): iter(recorded_turns(record)) for n, record in enumerate(RECORDS)}

    async def generate(self, prompt_ids, sampling, session):
        ids, logprobs = next(self.turns[session])
        return Generation(ids, logprobs, "stop")

    def release(self, session):
        assert next(self.turns[session], None) is None


@pytest.fixture(scope="module")
def chat():
    return load_chat(LAPTOP_AGENT)


@pytest.fixture(scope="module")
def env_of():
    return partial(make_env, tools={"search": RecordedSearch()}, config=CONFIG.env)


def soften(last_norm):
    """Halve the logits. The shipped agent is so sure of itself that nearly all ratios of this batch
    are clipped, and rounding would be .00002 of the gradient that is left."""
    with torch.no_grad():
        last_norm.weight.mul_(0.5)


class GradientTaken(Exception):
    """Raised instead of an optimiser's step."""


@pytest.fixture(scope="module")
def by_the_loop(chat, env_of):
    """Batch and gradient of the loop, by the names of Hugging Face's weights."""
    flow = make_flow(RecordedPolicy(), chat, env_of, CONFIG.rollout, CONFIG.env)

    async def play():
        tasks = [Task(question(), f"group {n // SAMPLES}", str(n)) for n in range(len(RECORDS))]
        return [
            await flow.run(task, Sampling(CONFIG.rollout.max_tokens_per_turn)) for task in tasks
        ]

    estimate = make_estimator(CONFIG)
    batch = make_batch(asyncio.run(play()), estimate)
    batch.advantages_BT, batch.returns_BT = estimate(batch, CONFIG.advantage)
    model = load_model(LAPTOP_AGENT)
    soften(model.norm)
    gradient = copy.deepcopy(model)

    class Taker(torch.optim.SGD):
        def step(self):
            with torch.no_grad():
                for place, weight in zip(gradient.parameters(), model.parameters(), strict=True):
                    place.copy_(weight.grad)
            raise GradientTaken

    learner = Learner(model, Taker(model.parameters(), lr=0.0))
    with pytest.raises(GradientTaken):
        loop.update_actor(learner, batch, CONFIG, step=1, dtype=torch.float32, ratios=token_ratios)
    return batch, to_hf(gradient)


def replayed(one_file, chat, env_of) -> list:
    """The recorded episodes, played by one_file.py."""
    world = types.SimpleNamespace(chat=chat, make_env=env_of)
    episodes = []
    for record in RECORDS:
        episode = one_file.Episode(world, question())
        for ids, logps in recorded_turns(record):
            asyncio.run(episode.act(ids, logps))
        episode.finish()
        episodes.append(episode)
    return episodes


def check_against_the_loop(one_file, chat, env_of, batch, gradient):
    """Compare rows, masks, rewards, advantages and gradient."""
    episodes = replayed(one_file, chat, env_of)
    ids, mask, old = one_file.make_rows(episodes)
    assert ids.tolist() == batch.ids_BT.tolist()
    assert mask.tolist() == batch.mask_BT.bool().tolist()
    torch.testing.assert_close(old, batch.logprobs_BT)
    advantages = one_file.compute_advantages(torch.tensor([e.reward for e in episodes]))
    torch.testing.assert_close(batch.to_tokens(advantages), batch.advantages_BT)
    assert len(set(advantages.tolist())) == 4  # two groups of two kinds: nothing here is trivial

    model = load_transformers(LAPTOP_AGENT)
    soften(model.model.norm)
    loss, ratio = one_file.compute_loss(model, episodes)
    clipped = (ratio < 1 - one_file.CLIP_LOW) | (ratio > 1 + one_file.CLIP_HIGH)
    assert 0 < clipped.float().mean() < 1  # the trained agent's ratios: the clip acts on some
    loss.backward()
    weights = dict(model.named_parameters())
    mine = torch.cat([weights[name].grad.flatten() for name in gradient])
    theirs = torch.cat([value.flatten() for value in gradient.values()])
    assert theirs.norm() > 0
    assert (mine - theirs).norm() / theirs.norm() < 1e-5


def test_a_recorded_batch_has_the_loops_masks_advantages_and_gradient(chat, env_of, by_the_loop):
    check_against_the_loop(load_file(), chat, env_of, *by_the_loop)


FAULTS = {
    "the loss takes the mask of the token before": ("mask = mask[:, 1:]", "mask = mask[:, :-1]"),
    "a turn's mask begins one token late": (
        "self.mask += [mask] * len(ids)",
        "self.mask += [0] + [mask] * (len(ids) - 1)",
    ),
    "tool results count as sampled": ("self.append(reply, mask=0)", "self.append(reply, mask=1)"),
    "the ratio takes the old log-probability before": ("old_logp[:, 1:]", "old_logp[:, :-1]"),
}


@pytest.mark.parametrize(("right", "wrong"), FAULTS.values(), ids=FAULTS)
def test_a_shifted_mask_is_caught(chat, env_of, by_the_loop, right, wrong):
    assert SOURCE.count(right) == 1
    with pytest.raises(AssertionError):
        check_against_the_loop(load_file(SOURCE.replace(right, wrong)), chat, env_of, *by_the_loop)


def test_groups_that_agree_have_exactly_no_advantage():
    groups = torch.tensor([[-0.2] * 8, [0.8] * 8, [1.0, 0.0] * 4, [0.3] * 8])
    one_file = load_file()
    one_file.SAMPLES = 8
    advantages = one_file.compute_advantages(groups.flatten()).view(4, 8)
    assert torch.equal(advantages, torch.stack([standardize(group, True) for group in groups]))
    assert (advantages == 0).all(dim=1).tolist() == [True, True, False, True]


def test_importing_it_runs_nothing(tmp_path):
    code = "import one_file; print(sorted(vars(one_file)).__len__())"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(tmp_path) | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0 and int(done.stdout) > 20, done.stderr
    assert not list(tmp_path.iterdir())


def test_without_the_package_it_says_what_is_missing(tmp_path):
    """In an environment with PyTorch and transformers, but without agent_r1."""
    hide = "import sys; sys.modules['agent_r1'] = None; import runpy; runpy.run_path('one_file.py')"
    done = subprocess.run(
        [sys.executable, "-c", hide], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "needs the package agent_r1" in done.stderr


def test_it_is_short_and_every_part_is_a_function():
    tree = ast.parse(SOURCE)
    functions = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    assert {"play", "make_rows", "compute_advantages", "compute_loss", "update"} <= functions
    strings = [
        n for n in ast.walk(tree)
        if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)
    ]  # fmt: skip
    prose = {line for n in strings for line in range(n.lineno, n.end_lineno + 1)}
    lines = enumerate(SOURCE.splitlines(), 1)
    code = [n for n, line in lines if line.strip() and not line.lstrip().startswith("#")]
    assert len(set(code) - prose) <= 145


STAIRS = re.compile(r"\(by searches 1: (\S+), 2: (\S+), 3: (\S+)\)")


@pytest.mark.slow
def test_it_shows_a_stair_that_no_demonstration_solved(smoke, tmp_path):
    """It begins with the data, index and start model that the smoke run has made."""
    shutil.copytree(smoke[0] / "artifacts", tmp_path / "artifacts")
    made = sorted(os.listdir(tmp_path / "artifacts"))
    done = subprocess.run(
        [sys.executable, "one_file.py"], cwd=ROOT, env=environment(tmp_path),
        capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    before, after = [list(map(float, found)) for found in STAIRS.findall(done.stdout)]
    assert before[0] > 0.9 and before[1] < 0.05 and before[2] < 0.05
    assert after[0] > 0.75 and after[1] > before[1] + 0.2
    assert sorted(os.listdir(tmp_path)) == ["artifacts"]
    assert sorted(os.listdir(tmp_path / "artifacts")) == made, "it made another start"
    assert done.stdout.count("\n") == 32  # without the line about the data, index and start
