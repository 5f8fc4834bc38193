"""Play the same tasks in our loop and through the gateway, one at a time."""

from __future__ import annotations

import asyncio

from agents import (
    FreshEnv,
    LongWindedEnv,
    StrictEnv,
    fresh_agent,
    gateway_flow,
    lenient,
    long_winded_agent,
    sampler,
    search_agent,
)
from conftest import make_env_loop

from agent_r1 import (
    AdvantageConfig,
    Sampling,
    Task,
    collate,
    derive_seed,
    grpo,
    run_episodes,
    trajectory_rows,
)

KINDS = {
    "search": (StrictEnv, search_agent, {"max_tokens_per_turn": 80}),
    "fresh": (FreshEnv, fresh_agent, {"max_tokens_per_turn": 80}),
    "long-winded": (LongWindedEnv, long_winded_agent, {"max_tokens_per_turn": 40}),
}


def played(flow, rows, policy, at_once=1, run_seed=7):
    """Play two samples of each row."""
    tasks = []
    for number, row in enumerate(rows):
        for sample in range(2):
            session = f"{number}-{sample}"
            seed = derive_seed(run_seed, number, sample)
            tasks.append(Task(row, str(number), session, seed))
    policy.sync(policy.model)
    sampling = Sampling(flow.limits.max_tokens_per_turn)
    return asyncio.run(run_episodes(flow, tasks, sampling, max_concurrent=at_once))


def numbers(trajectories):
    """Everything that training reads."""
    rows = []
    for index, trajectory in enumerate(trajectories):
        rows += trajectory_rows(trajectory, index)
    batch = collate(rows, trajectories)
    advantages, _ = grpo(batch, AdvantageConfig())
    ids = [row.input_ids for row in rows]
    masks = [row.action_mask for row in rows]
    logprobs = [row.logprobs for row in rows]
    rewards = [row.rewards for row in rows]
    return ids, masks, logprobs, rewards, advantages.tolist()


def both(kind, micro, chat, model, rows, seed=7):
    """Play the same tasks in our loop and through the gateway."""
    world, agent, limits = KINDS[kind]
    config = lenient(micro.config.env)
    limits = {"max_tokens_per_turn": 48, "max_context": 500, "timeout_s": 60.0} | limits

    def make_env(row):
        return world(micro.tools, config)

    policy = sampler(model, chat)
    loop = make_env_loop(policy, make_env, chat, **limits)
    ours = played(loop, rows, policy, run_seed=seed)
    policy = sampler(model, chat)
    flow = gateway_flow(policy, chat, agent, make_env, **limits)
    theirs = played(flow, rows, policy, run_seed=seed)
    return ours, theirs, flow
