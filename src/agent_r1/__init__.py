"""Train LLM agents with multi-turn reinforcement learning, and read how it works.

The names in `PUBLIC` are the interface for recipes, notebooks and your own code: `from agent_r1 import AgentEnv`. Each is imported
on first use. The decorator `tool` has the name of its package: `from agent_r1.tool import tool`.
"""

from typing import Any

__version__ = "0.1.0"

PUBLIC = {
    "app.parser": ("RECIPE", "command", "flag", "option"),
    "config": ("Config", "load_config"),
    "config.setting_types": ("Address", "Shares", "algorithm_has"),
    "config.settings": ("ActorConfig", "AdvantageConfig", "DataConfig", "EnvConfig", "OutsideFingerprint",
                        "RolloutConfig", "Section", "Trusted"),
    "core": ("Action", "AgentEnv", "Generation", "Message", "Observation", "Outcome", "Policy", "Row", "Sampling", "Step",
             "StepResult", "StopReason", "ToolErrorKind", "Trajectory"),
    "data.corpora": ("published_passages",),
    "data.draw": ("distinct", "split_numbers"),
    "data.json_files": ("checked_records", "json_records"),
    "data.storage": ("Passage",),
    "data.source": ("Asked", "Made", "Source"),
    "data.spellings": ("title_key",),
    "data.splits": ("RecordSource",),
    "env": ("brings_tools", "dialect_of", "make_env", "without_tools"),
    "env.base": ("BaseToolEnv",),
    "env.dialect": ("Dialect", "Part"),
    "env.hermes": ("Hermes", "HermesToolEnv", "Tags", "answer", "call", "parse_call"),
    "env.stateful_env": ("WorldEnv",),
    "ground.bounds": ("TooLongError", "cap_body", "fetch", "fetch_async", "in_background", "parse_json"),
    "ground.errors": ("AgentR1Error", "ConfigError", "extra", "first_line", "nearest"),
    "ground.files": ("home", "make_once", "sha256", "write_sums", "write_whole", "writing"),
    "ground.hub": ("with_retries",),
    "ground.ui": ("clean", "say"),
    "reward.scorers": ("exact_match",),
    "rollout.chat_format": ("ChatFormat",),
    "rollout.decoder": ("Decoder", "causal_attention"),
    "rollout.columns": ("Column",),
    "rollout.episode": ("AgentEnvLoop", "AgentFlowBase", "Task", "derive_seed"),
    "rollout.evaluate": ("score_of",),
    "rollout.policies": ("load_any", "token_logprobs"),
    "rollout.rollouts": ("Played", "Rollouts", "run_episodes"),
    "rollout.training_rows": ("Batch", "TrainingRow", "collate", "trajectory_rows"),
    "rollout.sampler": ("LocalPolicy",),
    "rollout.setup": ("make_loop",),
    "search.coalescer": ("Coalescer",),
    "search.index": ("Hit",),
    "search.searcher": ("Searcher",),
    "tool.arguments": ("SchemaChecker",),
    "tool.base": ("BaseTool", "InvalidArgumentsError", "ToolCall", "ToolOutput", "ToolResult", "call_tool"),
    "tool.batch": ("BatchTool",),
    "tool.search": ("SearchTool",),
    "training.advantages": ("Estimator", "estimator", "gae", "grpo", "members_of", "ppo", "standardize", "whiten"),
    "training.parts": ("make_estimator",),
    "training.sentinel": ("signs",),
    "training.settings": ("ColdStartConfig",),
    "training.tiny_model": ("load_chat", "save_tokenizer", "tools_template", "train_tokenizer"),
    "viewer.tokens": ("read_trajectories", "token_cells"),
    "workspace": ("Workspace", "any_index", "load_passages", "load_rows", "load_tools", "make_task"),
}  # fmt: skip
"""Module -> the names that it makes public."""
_MODULES = {name: module for module, names in PUBLIC.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'agent_r1' has no attribute {name!r}")
    from agent_r1.config.plugins import import_object

    return import_object(f"agent_r1.{_MODULES[name]}:{name}", "import")


def __dir__() -> list[str]:
    return sorted([*_MODULES, "PUBLIC", "__version__"])
