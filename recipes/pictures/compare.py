"""Run `agent-r1 pictures`: an episode with two pictures, compared with `transformers`.

In: nothing. Out: a line for each training row, and for each way to keep a context (`album.py`). A
row is compared, token by token, with what the processor of `transformers` makes of the same
conversation. The model is tiny and random (`tiny.py`). Nothing is trained.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from PIL import Image

from agent_r1 import (
    Action,
    AgentR1Error,
    Message,
    Observation,
    Row,
    Sampling,
    StepResult,
    Task,
    TrainingRow,
    Trajectory,
    command,
    say,
    trajectory_rows,
)
from agent_r1_recipes.pictures.album import Album, album_row
from agent_r1_recipes.pictures.chat import PictureChat
from agent_r1_recipes.pictures.loop import PictureLoop
from agent_r1_recipes.pictures.rows import model_inputs

KEEPS = ("all", "pictures", "last")
TURNS = ("look", "answer: red, blue")
ROUNDING = 1e-4
"""Largest difference of two log-probabilities of the same token, computed in float32."""


@dataclass
class Kit:
    """What an episode needs: model, processor and chat format."""

    model: Any
    processor: Any
    chat: PictureChat


def make_kit() -> Kit:
    """Make a tiny model and its processor."""
    from agent_r1_recipes.pictures.tiny import make_model, make_processor

    processor = make_processor()
    chat = PictureChat(processor.tokenizer, processor.image_processor)
    return Kit(make_model(processor.tokenizer), processor, chat)


class Recorder(Album):
    """An album that keeps its observations, for the comparison."""

    def __init__(self, contexts: list[list[Message]]):
        super().__init__()
        self.contexts = contexts

    def reset(self, row: Row) -> Observation:
        observation = super().reset(row)
        self.contexts.append(list(observation.messages))
        return observation

    async def step(self, action: Action) -> StepResult:
        result = await super().step(action)
        turn = {"role": "assistant", "content": action.text}
        self.contexts[-1].append(turn)
        if result.observation and result.observation.rewrite:
            self.contexts.append(list(result.observation.messages))
        elif result.observation:
            self.contexts[-1] += result.observation.messages
        return result


def play(kit: Kit, keep: str) -> tuple[Trajectory, list[list[Message]]]:
    """Play the scripted episode; return it, and the conversation of each of its rows."""
    from agent_r1_recipes.pictures.tiny import TinyPolicy

    turns = [[*kit.chat.encode_data(turn), kit.chat.turn_end_id] for turn in TURNS]
    contexts: list[list[Message]] = []
    limits = SimpleNamespace(max_tokens_per_turn=64, max_context=512, timeout_s=60.0)
    policy = TinyPolicy(kit.model, kit.chat, turns)
    loop = PictureLoop(policy, kit.chat, limits, lambda row: Recorder(contexts))
    task = Task(album_row(keep=keep), group_id="0", session="0")
    return asyncio.run(loop.play(task, Sampling(max_tokens=64))), contexts


def processor_inputs(kit: Kit, messages: list[Message]) -> dict[str, Any]:
    """Return what the processor of `transformers` makes of a conversation that a turn ends."""
    text = kit.processor.apply_chat_template(messages, tokenize=False)
    pictures = []
    for message in messages:
        if isinstance(message["content"], list):
            pictures += [part["image"] for part in message["content"] if "image" in part]
    # A row ends with the token that ends the turn; the template adds a line break.
    return kit.processor(text=[text.removesuffix("\n")], images=pictures, return_tensors="pt")


def turn_mask(kit: Kit, ids: list[int]) -> list[int]:
    """Return 1 where the agent speaks, up to the token that ends its turn."""
    header = kit.processor.tokenizer("<|im_start|>assistant\n")["input_ids"]
    mask = [0] * len(ids)
    speaks = False
    for place, token in enumerate(ids):
        mask[place] = int(speaks)
        if speaks and token == kit.chat.turn_end_id:
            speaks = False
        if ids[max(0, place + 1 - len(header)) : place + 1] == header:
            speaks = True
    return mask


@dataclass
class Comparison:
    """How a row differs from the processor's own."""

    tokens: int
    pictures: int
    same: dict[str, bool]
    """For ids, mask, grid, pixels and positions: whether they are equal."""
    rounding: float
    """Largest difference of a log-probability, sampled and recomputed."""
    other: float
    """Largest difference of a log-probability after another picture of the same size."""


def compare_row(
    kit: Kit, row: TrainingRow, pictures: tuple[Image.Image, ...], messages: list[Message]
) -> Comparison:
    """Compare a row with the conversation that it stands for."""
    from agent_r1_recipes.pictures.tiny import logprobs_of

    ours = model_inputs(kit.chat, row.input_ids, pictures)
    theirs = dict(processor_inputs(kit, messages))
    same = {name: torch.equal(ours[name], theirs[name]) for name in ours if name in theirs}
    if ours.keys() != theirs.keys():
        same["the names of the inputs"] = False
    theirs_ids = theirs["input_ids"][0].tolist()
    same["action_mask"] = row.action_mask == turn_mask(kit, theirs_ids)
    positions = []
    for inputs in (ours, theirs):
        place, _ = kit.model.model.get_rope_index(
            inputs["input_ids"], inputs["mm_token_type_ids"], inputs["image_grid_thw"]
        )
        positions.append(place)
    same["positions"] = torch.equal(positions[0], positions[1])
    actions = torch.tensor(row.action_mask).bool()
    logprobs = logprobs_of(kit.model, theirs)
    blank = [Image.new("RGB", picture.size, "black") for picture in pictures]
    other = logprobs_of(kit.model, model_inputs(kit.chat, row.input_ids, tuple(blank)))
    return Comparison(
        tokens=len(row.input_ids),
        pictures=len(pictures),
        same=same,
        rounding=(torch.tensor(row.logprobs) - logprobs)[actions].abs().max().item(),
        other=(other - logprobs)[actions].abs().max().item(),
    )


def compare(kit: Kit, keep: str) -> list[Comparison]:
    """Play the episode and compare each of its rows."""
    trajectory, contexts = play(kit, keep)
    rows = trajectory_rows(trajectory, 0)
    pictures = trajectory.extra["pictures"]
    return [
        compare_row(kit, row, row_pictures, messages)
        for row, row_pictures, messages in zip(rows, pictures, contexts, strict=True)
    ]


@command(
    "pictures",
    "play an episode with two pictures, and compare it with the processor of transformers",
    [""],
)
def pictures(a: Namespace) -> None:
    """Print the comparison of each row. Raise AgentR1Error if a row differs."""
    kit = make_kit()
    print("a tiny random model of Qwen2.5-VL's architecture; nothing is trained")
    failures: list[str] = []
    for keep in KEEPS:
        for number, row in enumerate(compare(kit, keep)):
            title = f"keep={keep}, row {number}"
            differences = [name for name, equal in row.same.items() if not equal]
            verdict = f"differs in {', '.join(differences)}" if differences else "equal"
            say(
                f"{title}: {row.tokens} tokens, {row.pictures} pictures; "
                f"{', '.join(row.same)}: {verdict}; log-probabilities: sampled and recomputed "
                f"differ by {row.rounding:.1e}, with another picture by {row.other:.2f}"
            )
            if differences or row.rounding > ROUNDING or row.other < 100 * ROUNDING:
                failures.append(title)
    if failures:
        raise AgentR1Error(
            f"not as transformers has it: {'; '.join(failures)}; report it with the versions of "
            "torch and transformers",
            code="pictures_differ",
        )
