"""Show an album of two coloured pictures, a world to check by hand.

In: `look`, or `answer: red, blue`. Out: the next picture, or the end. The reward is 1 for the right
colours. `env_kwargs.keep` says what the second context has:

    all        everything so far, and the second picture
    pictures   both pictures, without the agent's turn: the context is rewritten
    last       the second picture only: the context is rewritten
"""

from __future__ import annotations

from typing import Any

from PIL import Image

from agent_r1 import Action, AgentEnv, Message, Observation, Outcome, Row, StepResult, StopReason
from agent_r1_recipes.pictures.files import picture_part, png
from agent_r1_recipes.pictures.rows import row_messages, verl_columns

QUESTION = "Which colours does the album have? Write look to turn the page."
SIZES = ((80, 60), (60, 140))
"""Width and height of the pictures, so that they have different numbers of tokens."""


def draw(colour: str, size: tuple[int, int]) -> bytes:
    """Return a PNG file with a square on white."""
    picture = Image.new("RGB", size, "white")
    side = min(size) // 2
    picture.paste(Image.new("RGB", (side, side), colour), (side // 2, side // 2))
    return png(picture)


def album_row(colours: tuple[str, str] = ("red", "blue"), keep: str = "all") -> Row:
    """Make a row in verl's form. The first picture is in it, the second one in the world."""
    first = picture_part(draw(colours[0], SIZES[0]))
    message = {"role": "user", "content": [{"type": "text", "text": QUESTION}, first]}
    return {
        "data_source": "album",
        "ability": "pictures",
        "reward_model": {"style": "rule", "ground_truth": [", ".join(colours)]},
        "extra_info": {"index": 0, "split": "test"},
        "agent_name": "album",
        "env_kwargs": {"colours": list(colours), "keep": keep},
        **verl_columns([message]),
    }


class Album(AgentEnv):
    """One album."""

    shows_pictures = True

    def __init__(self, *_: Any):
        self.pages = 1
        self.reward = 0.0

    def reset(self, row: Row) -> Observation:
        self.row = row
        self.prompt = row_messages(row)
        return Observation(self.prompt)

    async def step(self, action: Action) -> StepResult:
        if action.finish_reason == "length":
            return StepResult(None, done=True, stop_reason=StopReason.MAX_TOKENS)
        if action.text.strip() == "look" and self.pages < 2:
            self.pages += 1
            return StepResult(self._turn_page())
        answer = action.text.strip().removeprefix("answer: ")
        self.reward = float([answer] == self.row["reward_model"]["ground_truth"])
        return StepResult(None, done=True, stop_reason=StopReason.ANSWERED)

    def _turn_page(self) -> Observation:
        """Show the second picture, in the context that the row asks for."""
        page = picture_part(draw(self.row["env_kwargs"]["colours"][1], SIZES[1]))
        message: Message = {"role": "user", "content": [{"type": "text", "text": "Page 2: "}, page]}
        keep = self.row["env_kwargs"]["keep"]
        if keep == "all":
            return Observation([message])
        earlier = self.prompt if keep == "pictures" else [{"role": "user", "content": QUESTION}]
        return Observation([*earlier, message], rewrite=True)

    def outcome(self, stop_reason: StopReason) -> Outcome:
        return Outcome(self.reward, {"colours": self.reward}, {"em": self.reward})
