"""Open a question for a person who plays it: `agent-r1 try`.

In: a configuration and a question's number. Out: the question, its tools and a chat format. Next:
`inference/play.py` plays the episode.
"""

from __future__ import annotations

from agent_r1.app.own_code import check_own
from agent_r1.chat.tokenizer import byte_chat, load_chat
from agent_r1.config import Config
from agent_r1.env import add_class_tools, make_env
from agent_r1.ground.errors import ConfigError
from agent_r1.ground.ui import say
from agent_r1.inference.play import NO_LIMIT, play_by_hand
from agent_r1.workspace import Workspace


def run_by_hand(config: Config, split: str, index: int, table: bool) -> None:
    """Let a person play one episode: question `index` of `split`, from 0.

    The tokens are those of the start model, or bytes if there is no model yet. `table` shows them
    in a table. Raises ConfigError for an index outside the split.
    """
    check_own(config)
    paths = Workspace(config)
    paths.make_task()
    rows = paths.load_rows(split)
    if not 0 <= index < len(rows):
        raise ConfigError(
            f"--index {index}: {split} has questions 0 to {len(rows) - 1}",
            code="index_out_of_range",
        )
    rollout = config.rollout
    limits = (
        f"a turn has at most {rollout.max_tokens_per_turn} tokens (rollout.max_tokens_per_turn), "
        f"an episode {rollout.max_context} (rollout.max_context)"
    )
    start = paths.start_model
    if (start / "config.json").exists():
        chat = load_chat(start)
        say(f"as in training: {limits}, of the tokenizer in {start}")
    else:
        say(
            f"{start} does not exist yet: each token is one byte here, and token limits are off. "
            f"In training {limits}, of a tokenizer that `agent-r1 cold-start` makes"
        )
        chat = byte_chat()
        # An episode of ten turns without limits fits into the context.
        no_limits = {"max_context": 10 * NO_LIMIT, "max_tokens_per_turn": NO_LIMIT}
        rollout = rollout.model_copy(update=no_limits)
    tools = paths.load_tools()
    agent_tools = add_class_tools(tools, config.env)
    play_by_hand(
        rows[index],
        chat,
        agent_tools,
        rollout,
        config.env,
        lambda row: make_env(row, tools, config.env),
        table,
    )
