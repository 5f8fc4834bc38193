"""Hold an opened model with everything that it acts with.

`inference/agent.py` opens one; evaluation and chat play episodes with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agent_r1.chat.format import ChatFormat
from agent_r1.config import Config
from agent_r1.core import Message, Policy
from agent_r1.tool import BaseTool


@dataclass
class Agent:
    """Hold an opened model and everything that it acts with."""

    policy: Policy
    chat: ChatFormat
    tools: dict[str, BaseTool]
    config: Config
    """As trained: environment, limits, sampling."""
    model: Path
    max_concurrent: int = 1
    """Concurrent episodes: as many as all engines decode at a time."""
    own_config: Config | None = None
    """The settings that are next to the model: those that it was trained with. None for others."""
    leading_messages: list[Message] | None = None
    """Messages before each question, instead of those in the rows; None: those."""

    @property
    def starts_from_nothing(self) -> bool:
        """Return whether this is our tiny model.

        It was trained on single questions only. A second question in a conversation it answers at
        once, from the first question's passages.
        """
        model = self.config.model
        tiny = model.path is None and len(self.chat.tokenizer) <= model.vocab_size
        return tiny and self.model.is_dir()  # a model that somebody else serves has no folder
