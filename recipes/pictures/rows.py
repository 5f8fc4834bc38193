"""Make a model's inputs, a request of vLLM or a row of verl's file.

In: ids and pictures of a prompt or a training row. Out: what each of the three reads. A picture is
never decoded here again.
"""

from __future__ import annotations

import base64
import re
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from agent_r1 import AgentR1Error, Message, Row
from agent_r1_recipes.pictures.chat import PictureChat, break_up, is_picture, parts_of
from agent_r1_recipes.pictures.files import picture_part, png

VERL_MARKS = re.compile("<image>|<video>|<audio>")
"""What verl's data set replaces in the texts of a prompt with pictures."""


def model_inputs(
    chat: PictureChat, ids: list[int], pictures: tuple[Image.Image, ...]
) -> dict[str, Tensor]:
    """Return the arguments of `Qwen2_5_VLForConditionalGeneration` for one row.

    `input_ids`, `attention_mask`, `mm_token_type_ids` are int64 [1, T]; `image_grid_thw` is int64
    [pictures, 3]; `pixel_values` is float32 [patches, values]. The last two need a picture.
    """
    check_placeholders(chat, ids, pictures)
    ids_1T = torch.tensor([ids])
    inputs = {
        "input_ids": ids_1T,
        "attention_mask": torch.ones_like(ids_1T),
        "mm_token_type_ids": (ids_1T == chat.pad_id).long(),
    }
    if pictures:
        pixels = chat.image_processor(images=list(pictures), return_tensors="pt")
        inputs["pixel_values"] = pixels["pixel_values"]
        inputs["image_grid_thw"] = pixels["image_grid_thw"]
    return inputs


def check_placeholders(
    chat: PictureChat, ids: list[int], pictures: tuple[Image.Image, ...]
) -> None:
    """Raise AgentR1Error unless the ids have exactly the pictures' placeholders, in order."""
    lengths: list[int] = []
    before = None
    for token in ids:
        if token == chat.pad_id and before != chat.pad_id:
            lengths.append(0)
        if token == chat.pad_id:
            lengths[-1] += 1
        before = token
    right_lengths = [chat.count_tokens(picture) for picture in pictures]
    if lengths != right_lengths:
        raise AgentR1Error(
            f"a row has placeholders of {lengths} tokens, and its pictures require "
            f"{right_lengths}; the row and its pictures do not belong together",
            code="wrong_pictures",
        )


# --------------------------------------------------------------------------------------------- vLLM


def engine_prompt(
    chat: PictureChat, ids: list[int], pictures: tuple[Image.Image, ...]
) -> dict[str, Any]:
    """Return vLLM's `TokensPrompt`: one placeholder for each picture, and the pictures.

    vLLM repeats the placeholders itself. verl's server makes the same request.
    """
    check_placeholders(chat, ids, pictures)
    short_ids: list[int] = []
    for token in ids:
        if token != chat.pad_id or short_ids[-1:] != [chat.pad_id]:
            short_ids.append(token)
    return {"prompt_token_ids": short_ids, "multi_modal_data": {"image": list(pictures)}}


def chat_messages(messages: list[Message]) -> list[Message]:
    """Return messages for a server's chat endpoint: each picture is an `image_url` of its bytes.

    The server encodes the conversation itself, so its ids are not ours: not for training.
    """
    chat_form = []
    for message in messages:
        parts = []
        for part in parts_of(message):
            if is_picture(part):
                code = base64.b64encode(png(part["image"])).decode()
                url = {"url": f"data:image/png;base64,{code}"}
                parts.append({"type": "image_url", "image_url": url})
            else:
                parts.append({"type": "text", "text": break_up(part["text"])})
        chat_form.append(message | {"content": parts})
    return chat_form


# --------------------------------------------------------------------------------------------- verl


def verl_columns(messages: list[Message]) -> dict[str, Any]:
    """Return the columns `prompt` and `images` of verl's data set.

    Raises AgentR1Error for a text with `<image>`, which verl would replace with a picture.
    """
    prompt: list[Message] = []
    images: list[dict[str, bytes]] = []
    for message in messages:
        text = ""
        for part in parts_of(message):
            if is_picture(part):
                text += "<image>"
                images.append({"bytes": png(part["image"])})
                continue
            if mark := VERL_MARKS.search(part["text"]):
                raise AgentR1Error(
                    f"a text of a prompt contains {mark[0]}, which verl replaces with a file; "
                    "write it in another way",
                    code="wrong_question",
                )
            text += part["text"]
        prompt.append(message | {"content": text})
    return {"prompt": prompt, "images": images}


def row_messages(row: Row) -> list[Message]:
    """Return a prompt's messages, of a row in a file or from verl's data set."""
    files = iter(row.get("images") or ())
    messages: list[Message] = []
    for message in row["prompt"]:
        content = message["content"]
        if not isinstance(content, str):  # from verl, which has put the files into the content
            parts = [picture_part(part["bytes"]) if is_picture(part) else part for part in content]
        elif row.get("images"):
            parts = []
            # Texts and marks alternate.
            for number, piece in enumerate(re.split("(<image>)", content)):
                if number % 2:
                    parts.append(picture_part(next(files)["bytes"]))
                elif piece:
                    parts.append({"type": "text", "text": piece})
        else:
            parts = content
        messages.append({"role": message["role"], "content": parts})
    return messages
