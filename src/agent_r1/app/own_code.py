"""Load the user-defined code of a configuration before a stage needs it.

In: a configuration. Out: nothing, or the error of code that breaks its contract. Next: `stages.py`
starts the first stage, and `plan.py` prints the plan. PyTorch is not needed, unless the user's code
imports it.
"""

from __future__ import annotations

from typing import Any

from agent_r1.config import Config, user_code_names
from agent_r1.config.plugins import import_object, is_user_code
from agent_r1.env import add_class_tools, brings_tools
from agent_r1.ground.errors import ConfigError
from agent_r1.tool import make_tools

LOADERS = {
    "env.name": "agent_r1.env:environment",
    "env.reward": "agent_r1.reward.named:reward_of",
    "rollout.flow": "agent_r1.rollout.setup:load_flow",  # PyTorch comes with it
    "cold_start.demonstrator": "agent_r1.cold_start.demonstrate:demonstrator_of",
}
"""Setting -> what loads and checks its code.

Other settings' code is loaded by the stage that uses it.
"""


def check_own(config: Config) -> None:
    """Load all user-defined code of the configuration before any stage starts.

    Raises ConfigError, with the remedy, for code that breaks its contract.
    """
    for name, setting in user_code_names(config).items():
        if setting in LOADERS:
            import_object(LOADERS[setting], setting)(name)
    if config.env.reward and brings_tools(config.env.name):
        raise ConfigError(
            f"env.name={config.env.name} computes its own reward and never uses "
            f"env.reward={config.env.reward}; unset one",
            code="unused_setting",
        )
    own: dict[str, Any] = make_tools([name for name in config.env.tools if is_user_code(name)])
    others = (name.rpartition(".")[2] for name in config.env.tools if not is_user_code(name))
    add_class_tools(own | dict.fromkeys(others), config.env)
