"""Make the configured episode loop, and check that the model can use its dialect.

In: a policy, tools, settings. Out: the loop, or a ConfigError. `episode.py` has the loop, which
knows no environment.
"""

from __future__ import annotations

from collections.abc import Callable

from agent_r1.config import plugins, tables
from agent_r1.config.settings import EnvConfig, RolloutConfig
from agent_r1.core import AgentEnv, Policy, Row
from agent_r1.env import dialect_of, make_env
from agent_r1.ground.errors import ConfigError
from agent_r1.rollout.chat_format import ChatFormat
from agent_r1.rollout.dialect_fit import check_fit
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


def check_dialect(chat: ChatFormat, env: EnvConfig, tools: bool, use_cache: bool = True) -> str:
    """Return one sentence on what is exact with this model and dialect.

    Raises ConfigError if the model cannot write this dialect, is not shown its tools, or has a chat
    template that cannot be followed exactly.
    """
    dialect = dialect_of(env)
    lacks = [token for token in dialect.control_tokens if token not in chat.control_ids]
    if lacks:
        raise ConfigError(
            f"env.name={env.name} requires the control token {lacks[0]}, which this model lacks; "
            "set model.path to a model that "
            "was trained with it (GPT-OSS for harmony), or choose another dialect, such as "
            "env.name=hermes",
            code="missing_control_tokens",
        )
    return check_fit(chat, env, tools, use_cache)
