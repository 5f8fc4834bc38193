"""Train LLM agents with multi-turn reinforcement learning, and read how it works.

    from agent_r1 import open_run

    run = open_run("discover", "grpo", seed=0)
    run.train()
    print(run.evaluate())

Two groups of names are public (docs/python.md lists them). `USERS` is for programs and notebooks
that train, play and write tools or environments. `AUTHORS` is for recipes that add an estimator, a
data source or a command. Both are imported in the same way: `from agent_r1 import AgentEnv`. Each
name is imported on first use. The decorator `tool` has the name of its package:
`from agent_r1.tool import tool`.
"""

from typing import Any

__version__ = "0.1.0"

USERS = {
    "app.open_run": ("Evaluation", "Run", "Training", "open_run"),
    "config": ("Config", "load_config"),
    "config.settings": ("AdvantageConfig",),
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
        "maybe_await",
    ),
    "env": ("make_env",),
    "env.hermes": ("Hermes", "HermesToolEnv"),
    "ground.errors": ("AgentR1Error", "ConfigError"),
    "ground.ui": ("say",),
    "chat.format": ("ChatFormat",),
    "rollout.episode": ("AgentEnvLoop", "AgentFlowBase", "Task", "check_reward", "derive_seed"),
    "model.policies": ("load_any",),
    "rollout.rollouts": ("run_episodes",),
    "model.sampler": ("LocalPolicy",),
    "rollout.setup": ("make_loop",),
    "chat.tokenizer": ("load_chat",),
    "rollout.training_rows": ("Batch", "TrainingRow", "collate", "trajectory_rows"),
    "tool": ("call_tool", "make_tools"),
    "tool.base": ("BaseTool", "InvalidArgumentsError", "ToolCall", "ToolOutput", "ToolResult"),
    "tool.batch": ("BatchTool",),
    "tool.search": ("SearchTool",),
    "training.advantages": ("grpo", "ppo"),
    "training.forward": ("action_logprobs", "states_before_actions"),
    "training.losses": ("aggregate_loss", "policy_loss"),
    "watch.tokens": ("TOKEN_CSS", "tokens_html"),
    "workspace": ("Workspace",),
}
"""Module -> names for all who train an agent, play episodes, or write a tool or environment."""

AUTHORS = {
    "app.parser": ("command", "option"),
    "config.settings": (
        "ActorConfig",
        "DataConfig",
        "EnvConfig",
        "NamesCode",
        "OutsideFingerprint",
        "OutsideWhileDefault",
        "Price",
        "RolloutConfig",
        "Trusted",
        "VariableName",
    ),
    "data.json_files": ("json_records",),
    "data.storage": ("Passage",),
    "data.source": ("SPLITS", "Asked", "Made", "Source"),
    "data.spellings": ("title_key",),
    "data.splits": ("RecordSource", "share_out"),
    "env.base": ("BaseToolEnv",),
    "env.dialect": ("Dialect", "Part"),
    "env.stateful_env": ("WorldEnv",),
    "ground.bounds": ("TooLongError", "is_local_host", "parse_yaml", "read_file", "send"),
    "ground.errors": ("LostConnection", "extra", "first_line"),
    "ground.fields": ("Fields", "describe_counts"),
    "ground.files": ("make_once", "write_whole"),
    "inference.agent": ("find_model",),
    "ground.clean": ("clean",),
    "rollout.columns": ("Column",),
    "model.decoder": ("Decoder", "DecoderShape", "attend"),
    "model.policies": ("token_logprobs",),
    "evaluation.reliability": ("student_quantile",),
    "rollout.rollouts": ("Rollouts",),
    "chat.tokenizer": ("save_tokenizer", "train_tokenizer"),
    "search.index": ("Hit",),
    "watch.tokens": ("episode_fault",),
    "training.advantages": ("Estimator", "gae", "standardize", "whiten"),
    "chat.tools_template": ("tools_template",),
    "training.parts": ("make_estimator",),
    "training.prefix_tree": ("micro_batches_of",),
    "watch.sentinel": ("Sign", "signs"),
    "training.settings": ("ColdStartConfig",),
}
"""Module -> further names for authors of recipes (CONTRIBUTING.md)."""

_MODULES: dict[str, str] = {}
for _group in (USERS, AUTHORS):
    for _module, _names in _group.items():
        _MODULES.update(dict.fromkeys(_names, _module))


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'agent_r1' has no attribute {name!r}")
    from agent_r1.config.plugins import import_object

    return import_object(f"agent_r1.{_MODULES[name]}:{name}", "import")


def __dir__() -> list[str]:
    return sorted([*_MODULES, "AUTHORS", "USERS", "__version__"])
