"""Print what a run would do and need, before it starts: `agent-r1 train --dry-run`.

In: a configuration. Out: a page with stages, memory, disk, time and cost. The estimates are the
engine's (`engine.py`).
"""

from __future__ import annotations

from pathlib import Path

from agent_r1.app.engine import engine_of
from agent_r1.config import Config, tables, to_yaml
from agent_r1.data.source import source_of
from agent_r1.env import dialect_of
from agent_r1.env.hermes import Hermes
from agent_r1.ground import hub
from agent_r1.ground.errors import AgentR1Error


def describe_template(config: Config) -> str:
    """Describe how exact the start model's chat template is; "" for one of ours.

    Raises AgentR1Error for a template that training would refuse.
    """
    path = config.model.path
    if path is None or tables.scheme_of(path) is not None:
        # A new model and a package have templates for Hermes: their plan need not wait for PyTorch.
        if type(dialect_of(config.env)) is Hermes:
            return ""
    elif hub.is_repo_name(path):
        try:
            hub.fetch_chat(path)
        except AgentR1Error:
            return f"not seen, because {path} cannot be downloaded now"
    from agent_r1.chat.start import describe_start_chat

    return describe_start_chat(config)


def print_plan(
    config: Config, run_name: str, gpu_hour: float | None = None, is_verbose: bool = False
) -> None:
    """Print stages and estimates, and with `is_verbose` all settings after them.

    Args:
        gpu_hour: Price of one GPU for one hour.
    """
    from agent_r1.ground.ui import say
    from agent_r1.training.run_dir import RunDir, check_same_settings
    from agent_r1.workspace import Workspace

    workspace = Workspace(config)
    if not workspace.data.exists():
        source = source_of(config.data)
        source.check_split_by(config.data)
        source.check_settings(config.data, config.seed)
    episodes = config.cold_start.episodes
    if episodes and not workspace.start_model.exists() and not Path(episodes).is_file():
        raise AgentR1Error(
            f"cold_start.episodes={episodes}: there is no such file, nor is it next to the preset",
            code="unreadable_file",
        )
    run = RunDir(workspace.run(run_name))
    engine = engine_of(config)
    page = engine.plan(config, gpu_hour)
    template = describe_template(config)  # raises before anything is printed
    if template:
        say(f"chat template      {template}")
    for title, path in (
        ("data", workspace.data),
        ("index", workspace.index if workspace.needs_index else None),
        ("start model", workspace.start_model),
        ("evaluation before", run.card_before),
        ("training", run.checkpoints / f"step_{config.trainer.steps:06d}"),
        ("evaluation after", run.card),
        ("report", run.path / "report.html"),
    ):
        if path is None:
            say(
                f"{title:18} not "
                f"needed{f': {config.search.url} has one' if config.search.url else ''}"
            )
        else:
            say(f"{title:18} {'done' if path.exists() else 'to do':6} {path}")
    try:
        check_same_settings(run, config)
    except AgentR1Error as error:  # the artefacts listed above belong to another configuration
        say(f"\n{error}")
    say(page)
    settings = engine.settings_page(workspace, run)
    if settings:
        say(settings)
    say(f"\n{to_yaml(config).rstrip()}" if is_verbose else "\n--verbose prints all settings")
