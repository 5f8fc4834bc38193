"""Measure how predictable an episode's outcome is, and how fast the critic learns it.

    python lab/experiments/critic.py [PRESET] [BATCHES]    needs the cold start of seed 0

The results are in docs/lab/estimators.md. The start model plays batches of a ppo step and is not
trained, so the task does not change. Prints explained variance at action tokens of held-out
episodes. It compares a table by kind of question and turn, a linear probe on the policy's states,
and critics before each update.
"""

from __future__ import annotations

import asyncio
import sys
from collections import defaultdict
from dataclasses import replace
from statistics import fmean

import torch
from torch import Tensor

from agent_r1.chat.tokenizer import load_chat
from agent_r1.config import load_config
from agent_r1.core import Sampling
from agent_r1.model import decoder
from agent_r1.model import files as model_files
from agent_r1.model.sampler import LocalPolicy
from agent_r1.rollout.rollouts import run_episodes, tasks_of_step
from agent_r1.rollout.setup import make_loop
from agent_r1.rollout.training_rows import Batch
from agent_r1.training.advantages import ppo
from agent_r1.training.batches import make_batch
from agent_r1.training.forward import (
    action_values,
    in_micro_batches,
    states_before_actions,
)
from agent_r1.training.learner import make_learner
from agent_r1.training.loop import update_critic
from agent_r1.training.parts import get_estimator
from agent_r1.workspace import Workspace

SETTINGS = ([], ["critic.lr=3e-3"], ["critic.epochs=4"], ["critic.lr=3e-3", "critic.epochs=4"])


def explained_share(prediction_A: Tensor, returns_A: Tensor) -> float:
    return (1 - (returns_A - prediction_A).var() / returns_A.var()).item()


def states_and_returns(
    batches: list[Batch], model: decoder.Decoder
) -> tuple[Tensor, Tensor, list[tuple[str, int]]]:
    """Return the policy's states at all action tokens, their returns, kinds and turns."""
    states, returns, places = [], [], []
    for batch in batches:
        with torch.no_grad():
            # A whole batch shares no beginnings: its states are in the actions' order.
            state_AD, _, _ = states_before_actions(model, batch)
        where_BT = batch.mask_BT.bool()
        kinds = [t.row["extra_info"]["kind"] for t in batch.trajectories]
        assert batch.returns_BT is not None and batch.steps_BT is not None  # `main` fills them
        states.append(state_AD)
        returns.append(batch.returns_BT[where_BT])
        rows_A, turns_A = where_BT.nonzero()[:, 0].tolist(), batch.steps_BT[where_BT].tolist()
        places += [
            (kinds[batch.trajectory_B[row]], turn)
            for row, turn in zip(rows_A, turns_A, strict=True)
        ]
    return torch.cat(states), torch.cat(returns), places


def main(preset: str = "small", count: str = "16") -> None:
    torch.set_num_threads(1)
    config = load_config(preset, ["trainer.device=cpu"], algorithm="ppo")
    start, r = Workspace(config).start_model, config.rollout
    model, chat, rows = (
        model_files.load_model(start),
        load_chat(start),
        Workspace(config).load_rows("train"),
    )
    policy = LocalPolicy(
        model, chat.stop_ids, slots=r.max_concurrent_episodes, max_context=r.max_context
    )
    loop, batches = make_loop(policy, chat, Workspace(config).load_tools(), r, config.env), []
    for step in range(1, int(count) + 1):
        tasks = tasks_of_step(rows, step, r, config.seed)
        trajectories = asyncio.run(
            run_episodes(
                loop,
                tasks,
                Sampling(r.max_tokens_per_turn),
                max_concurrent=r.max_concurrent_episodes,
            )
        )
        batch = make_batch(trajectories, get_estimator("ppo"))
        batch.values_BT = torch.zeros_like(batch.rewards_BT)
        _, batch.returns_BT = ppo(batch, config.advantage)  # lambda 1: the rest of the reward
        batches.append(batch)

    half = len(batches) // 2
    (state_AD, return_A, place_A), (state_CD, return_C, place_C) = (
        states_and_returns(some, model) for some in (batches[:half], batches[half:])
    )
    returns_of = defaultdict(list)
    for place, value in zip(place_A, return_A.tolist(), strict=True):
        returns_of[place].append(value)
    mean = return_A.mean()
    table_C = torch.tensor(
        [fmean(returns_of[place]) if place in returns_of else mean.item() for place in place_C]
    )
    offset_AD, ridge_DD = state_AD - state_AD.mean(0), 100 * torch.eye(state_AD.shape[1])
    weight_D = torch.linalg.solve(
        offset_AD.T @ offset_AD + ridge_DD, offset_AD.T @ (return_A - mean)
    )
    probe_C = (state_CD - state_AD.mean(0)) @ weight_D + mean
    print(f"| kind and turn | {explained_share(table_C, return_C):.2f} |")
    print(f"| linear probe on the policy's states | {explained_share(probe_C, return_C):.2f} |")
    for settings in SETTINGS:
        c = load_config(preset, ["trainer.device=cpu", *settings], algorithm="ppo")
        learner, curve = make_learner(model_files.load_model(start), c.actor, c.critic), []
        assert learner.critic  # because of c.critic
        for step, batch in enumerate(batches, 1):
            values_BT = in_micro_batches(
                lambda part, critic=learner.critic: action_values(critic, part),
                batch,
                c.trainer.max_tokens_per_microbatch,
                torch.float32,
            )
            metrics = update_critic(
                learner, replace(batch, values_BT=values_BT), c, step, torch.float32
            )
            curve.append(metrics["critic/vf_explained_var"])
        print(
            f"| critic, {' '.join(settings) or 'as it is'} | "
            f"{' '.join(f'{value:.2f}' for value in curve)} |",
            flush=True,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
