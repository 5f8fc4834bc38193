"""Make the configured episode loop.

In: a policy, tools, settings. Out: the loop, or a ConfigError for a wrong flow. `episode.py`
has the loop, which knows no environment.
"""

from __future__ import annotations

from collections.abc import Callable

from agent_r1.chat.format import ChatFormat
from agent_r1.config import plugins, tables
from agent_r1.config.settings import EnvConfig, RolloutConfig
from agent_r1.core import AgentEnv, Policy, Row
from agent_r1.env import make_env
from agent_r1.ground.errors import ConfigError
from agent_r1.rollout.episode import AgentEnvLoop, AgentFlowBase, Limits
from agent_r1.tool import BaseTool


def make_flow(
    policy: Policy,
    chat: ChatFormat,
    make_env: Callable[[Row], AgentEnv],
    rollout: RolloutConfig,
    env: EnvConfig,
) -> AgentFlowBase:
    """Make the flow that `rollout.flow` or a recipe's setting names, or the generic loop."""
    limits = Limits.from_settings(rollout, env)
    for make in tables.for_changed_settings("flow", rollout=rollout):
        return make(policy, chat, limits, make_env, rollout)
    flow = load_flow(rollout.flow) if rollout.flow else AgentEnvLoop
    return flow(policy, chat, limits, make_env)


def load_flow(name: str) -> type[AgentFlowBase]:
    """Load a user-defined flow. Raise ConfigError if `name` is not a subclass of AgentFlowBase."""
    flow = plugins.load_trusted(name, "rollout.flow")
    if not (isinstance(flow, type) and issubclass(flow, AgentFlowBase)):
        raise ConfigError(
            f"rollout.flow={name} is not a flow; write a subclass of AgentFlowBase "
            "(agent_r1.rollout.episode)",
            code="wrong_code",
        )
    return flow


def make_loop(
    policy: Policy,
    chat: ChatFormat,
    tools: dict[str, BaseTool],
    rollout: RolloutConfig,
    env: EnvConfig,
) -> AgentEnvLoop:
    """Make the configured loop: for cold start, training, verl, evaluation and chat."""
    return make_flow(policy, chat, lambda row: make_env(row, tools, env), rollout, env)
