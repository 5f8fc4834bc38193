"""Play episodes whose observations have pictures.

In: a policy that reads pictures, and an environment. Out: a `Trajectory` whose prompts have their
pictures, and in `extra["pictures"]` the pictures of each training row. Next: `rows.py` makes a
model's inputs of a row.

`rollout.flow=agent_r1_recipes.pictures.loop:PictureLoop` selects it for verl.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image

from agent_r1 import (
    AgentEnvLoop,
    AgentR1Error,
    ChatFormat,
    ConfigError,
    Generation,
    Observation,
    Policy,
    Sampling,
    Step,
    Task,
    Trajectory,
    trajectory_rows,
)
from agent_r1_recipes.pictures.chat import (
    TAGS,
    PictureChat,
    PicturePrompt,
    describe,
    pictures_in,
)


class PictureLoop(AgentEnvLoop):
    """The generic loop, for observations with pictures."""

    def __init__(self, policy: Policy, chat: ChatFormat, limits: Any, make_env: Any = None):
        if not getattr(policy, "reads_pictures", False):
            raise ConfigError(
                f"{type(policy).__name__} reads token ids and no pictures; train with --engine "
                "verl and a model of Qwen2.5-VL's form (recipes/pictures)",
                code="pictures_not_read",
            )
        picture_chat = chat if isinstance(chat, PictureChat) else open_chat(chat)
        super().__init__(PlaceholderGuard(policy, picture_chat), picture_chat, limits, make_env)

    async def run(self, task: Task, sampling: Sampling) -> Trajectory:
        """Run one episode, and note the pictures of its rows."""
        trajectory = await super().run(task, sampling)
        trajectory.extra["pictures"] = row_pictures(trajectory)
        return trajectory

    def observe(self, steps: list[Step], observation: Observation) -> list[int]:
        """Return the prompt of the next turn, with all pictures in it."""
        ids = super().observe(steps, observation)
        pictures = tuple(pictures_in(observation.messages))
        if steps and not observation.rewrite:
            pictures = pictures_of(steps[-1]) + pictures
        if steps and observation.rewrite:
            _refuse_replaced(steps[-1], ids, pictures)
        # The core's own default would contain the address of a picture's object.
        state = {"state": describe(observation.messages)}
        observation.extra = state | observation.extra
        return PicturePrompt(ids, pictures)


class PlaceholderGuard(Policy):
    """A policy whose turns end before a placeholder, sampled as a token or spelled.

    A sampled placeholder would have no picture, and every later one would get a wrong picture.
    Without it, the turn is cut off: most environments end the episode with `max_tokens`.
    """

    def __init__(self, policy: Policy, chat: PictureChat):
        self.policy = policy
        self.chat = chat

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, session: str | None = None
    ) -> Generation:
        """Ask the policy for a turn, and cut it off before a placeholder."""
        turn = await self.policy.generate(prompt_ids, sampling, session)
        ids = turn.token_ids
        if not TAGS.search(self.chat.decode(ids)):
            return turn
        end = 0
        while not TAGS.search(self.chat.decode(ids[: end + 1])):
            end += 1
        return Generation(ids[:end], turn.logprobs[:end], "length")

    def release(self, session: str) -> None:
        self.policy.release(session)


def open_chat(chat: ChatFormat) -> PictureChat:
    """Open the chat format of a model's folder again, with its image processor."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    folder = Path(chat.tokenizer.name_or_path)
    try:
        processor = Qwen2VLImageProcessorPil.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder} has no image processor that can be read ({error}); use a model of "
            "Qwen2.5-VL's form",
            code="pictures_not_read",
        ) from None
    return PictureChat(chat.tokenizer, processor, chat.stop_ids, template=type(chat.template))


def pictures_of(step: Step) -> tuple[Image.Image, ...]:
    """Return the pictures that the model saw in a turn."""
    return getattr(step.observation_ids, "pictures", ())


def row_pictures(trajectory: Trajectory) -> list[tuple[Image.Image, ...]]:
    """Return the pictures of each row that `trajectory_rows` makes, in order."""
    pictures_of_rows: list[tuple[Image.Image, ...]] = []
    for row in trajectory_rows(trajectory, 0):
        last = max(place for place, is_action in enumerate(row.action_mask) if is_action)
        first, *later = trajectory.steps[row.step_ids[last] :]
        pictures = pictures_of(first)
        # A step that sampled nothing adds its observation to the row, and no action.
        for step in later:
            ids = step.observation_ids
            if len(ids) > last and row.input_ids[: len(ids)] == ids:
                pictures = pictures_of(step)
        pictures_of_rows.append(pictures)
    return pictures_of_rows


def _refuse_replaced(last: Step, ids: list[int], pictures: tuple[Image.Image, ...]) -> None:
    """Raise AgentR1Error if the ids continue the row so far, and its pictures are others.

    The row rule compares ids. It would join the step to a row with the earlier pictures.
    """
    so_far = [*last.observation_ids, *last.action_ids]
    before = pictures_of(last)
    if ids[: len(so_far)] == so_far and pictures[: len(before)] != before:
        raise AgentR1Error(
            "a rewritten context shows another picture where the same tokens had one; keep the "
            "earlier picture, or change the text before it",
            code="picture_replaced",
        )
