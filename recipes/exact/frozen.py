"""Open the frozen checkpoints of the world Stop, whose truth is on file.

In: a name. Out: an `Agent`, with its weights as they were frozen. `frozen/NAME.json` has the
version, the hash of the weights, and what all histories add up to. Next: `table.py`, whose `score`
tries an estimator on each of them.

    python -m agent_r1_recipes.exact.frozen      makes the files again (a minute of CPU)
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from agent_r1 import AgentR1Error, say, write_whole
from agent_r1_recipes.exact.gradient import Plays, play_logprobs, push
from agent_r1_recipes.exact.stop import BEST, minimize, stop_agent, stop_trees
from agent_r1_recipes.exact.tree import Agent

FOLDER = Path(__file__).parent / "frozen"
VERSION = 1
"""Of files and world. A change of Stop's rules, rows or tokens makes another version."""
SEED = 0
STEPS_OF = {"stop-start": 0, "stop-early": 10, "stop-middle": 25}
"""Steps along the true gradient after the start, with Adam."""


def load_frozen(name: str) -> tuple[Agent, dict[str, Any]]:
    """Return a frozen agent and its facts. Raise AgentR1Error for missing or changed files."""
    weights = FOLDER / f"{name}.safetensors"
    if not weights.is_file():
        raise AgentR1Error(
            f"{weights} does not exist; make the frozen checkpoints, in a minute: "
            "python -m agent_r1_recipes.exact.frozen",
            code="missing_checkpoint",
        )
    facts = json.loads((FOLDER / f"{name}.json").read_text())
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    if facts["version"] != VERSION or facts["sha256"] != digest:
        raise AgentR1Error(
            f"{weights.name} is not the frozen checkpoint of version {VERSION}; restore it from "
            "the package, or make all of them again: python -m agent_r1_recipes.exact.frozen",
            code="damaged_model",
        )
    agent = stop_agent(SEED, clone_steps=0)
    agent.model.load_state_dict(load_file(weights))
    return agent, facts


def truth_of(agent: Agent) -> tuple[Plays, dict[str, Any]]:
    """Enumerate all histories. Return them, and what they add up to."""
    plays = Plays.of(stop_trees(agent))
    every_N = torch.ones(len(plays.trajectories), dtype=torch.bool)
    weights_BT = plays.score_weights(every_N) / plays.questions
    gradient = push(agent.model, plays.batch, weights_BT, agent.temperature)
    facts = {
        "plays": len(plays.trajectories),
        "reward": round(float(plays.value_Q().mean()), 6),
        "best": BEST,
        "reward_of_questions": [round(value, 6) for value in plays.value_Q().tolist()],
        "gradient_norm": round(float(gradient.norm()), 5),
    }
    return plays, facts


def ascend(agent: Agent, steps: int) -> None:
    """Train along the true gradient: no estimator, no sample, no noise."""
    plays = Plays.of(stop_trees(agent))

    def loss() -> Tensor:
        # Autograd differentiates the sum over all plays itself.
        chance_N = play_logprobs(agent.model, plays.batch, agent.temperature).exp()
        return -plays.value_Q(chance_N).mean()

    minimize(agent.model, loss, steps)


def freeze() -> None:
    """Make the files of all frozen checkpoints."""
    FOLDER.mkdir(exist_ok=True)
    for name, steps in STEPS_OF.items():
        # Each from the start: Adam's means begin at zero in every call.
        agent = stop_agent(SEED)
        ascend(agent, steps)
        weights = FOLDER / f"{name}.safetensors"
        save_file(agent.model.state_dict(), weights)
        facts = {
            "version": VERSION,
            "sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
            "command": "python -m agent_r1_recipes.exact.frozen",
            "seed": SEED,
            "steps": steps,
        }
        facts |= truth_of(agent)[1]
        write_whole(FOLDER / f"{name}.json", json.dumps(facts, indent=1) + "\n")
        say(f"{name}: {facts['plays']:,} plays, mean reward {facts['reward']:.4f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    freeze()
