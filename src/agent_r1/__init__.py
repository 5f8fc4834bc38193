"""Train LLM agents with multi-turn reinforcement learning, and read how it works.

The names in `PUBLIC` are the interface for recipes, notebooks and your own code: `from agent_r1
import AgentEnv`. Each is imported on first use. The decorator `tool` has the name of its package:
`from agent_r1.tool import tool`.
"""

from typing import Any

__version__ = "0.1.0"

PUBLIC = {
    "app.parser": ("command", "option"),
    "config": ("Config", "load_config"),
    "config.settings": (
        "ActorConfig",
        "AdvantageConfig",
        "DataConfig",
        "EnvConfig",
        "OutsideFingerprint",
        "RolloutConfig",
        "Trusted",
    ),
    "core": (
        "Action",
        "AgentEnv",
        "Generation",
        "Message",
        "Observation",
        "Outcome",
        "Policy",
        "Row",
        "Sampling",
        "Step",
        "StepResult",
        "StopReason",
        "Trajectory",
    ),
    "data.json_files": ("json_records",),
    "data.storage": ("Passage",),
    "data.source": ("Asked", "Made", "Source"),
    "data.spellings": ("title_key",),
    "data.splits": ("RecordSource",),
    "env": ("make_env",),
    "env.base": ("BaseToolEnv",),
    "env.dialect": ("Dialect", "Part"),
    "env.hermes": ("Hermes", "HermesToolEnv"),
    "env.stateful_env": ("WorldEnv",),
    "ground.bounds": ("TooLongError", "send"),
    "ground.errors": ("AgentR1Error", "ConfigError", "extra", "first_line"),
    "ground.files": ("make_once", "write_whole"),
    "rollout.chat_format": ("ChatFormat",),
    "rollout.decoder": ("Decoder",),
    "rollout.columns": ("Column",),
    "rollout.episode": ("AgentEnvLoop", "AgentFlowBase", "Task", "derive_seed"),
    "rollout.policies": ("load_any", "token_logprobs"),
    "rollout.rollouts": ("Rollouts", "run_episodes"),
    "rollout.training_rows": ("Batch", "TrainingRow", "collate", "trajectory_rows"),
    "rollout.sampler": ("LocalPolicy",),
    "rollout.setup": ("make_loop",),
    "search.index": ("Hit",),
    "tool.base": ("BaseTool", "InvalidArgumentsError", "ToolCall", "ToolOutput", "ToolResult"),
    "tool.batch": ("BatchTool",),
    "tool.search": ("SearchTool",),
    "training.advantages": ("Estimator", "gae", "grpo", "ppo", "standardize", "whiten"),
    "training.chat_tools": ("tools_template",),
    "training.parts": ("make_estimator",),
    "training.sentinel": ("signs",),
    "training.settings": ("ColdStartConfig",),
    "training.tiny_model": ("load_chat", "save_tokenizer", "train_tokenizer"),
    "workspace": ("Workspace",),
}
"""Module -> the names that it makes public."""
_MODULES = {name: module for module, names in PUBLIC.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'agent_r1' has no attribute {name!r}")
    from agent_r1.config.plugins import import_object

    return import_object(f"agent_r1.{_MODULES[name]}:{name}", "import")


def __dir__() -> list[str]:
    return sorted([*_MODULES, "PUBLIC", "__version__"])
