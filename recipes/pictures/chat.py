"""Encode messages with pictures as token ids.

In: messages whose content may be a list of parts, in the form of the processors of `transformers`:

    {"role": "user", "content": [{"type": "text", "text": "What is this?"},
                                 {"type": "image", "image": PICTURE}]}

Out: a `PicturePrompt`. Where a picture stands, it has `<|vision_start|>`, one `<|image_pad|>` for
each stretch of the picture, and `<|vision_end|>`. Next: `loop.py`.

Such a token comes from a part of type image only. In a text, `<|image_pad|>` is data, as any
control token is (`chat/format.py` of the core): encoded, it is several ordinary tokens. It also
gets a blank, `< |image_pad|>`. The reason is that verl's worker decodes a row and encodes it again.
Without the blank it would find a placeholder that has no picture.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from PIL import Image

from agent_r1 import AgentR1Error, ChatFormat, ConfigError, Message

START = "<|vision_start|>"
PAD = "<|image_pad|>"
END = "<|vision_end|>"
READ_ONLY = (START, PAD, END, "<|video_pad|>")
"""Tokens that stand for something that is shown. The agent reads them and never says them."""
TAGS = re.compile("|".join(re.escape(token) for token in READ_ONLY))


class PicturePrompt(list[int]):
    """The ids of a prompt, with the pictures of its placeholders in order."""

    def __init__(self, ids: Iterable[int], pictures: Iterable[Image.Image]):
        super().__init__(ids)
        self.pictures = tuple(pictures)


class PictureChat(ChatFormat):
    """A chat format that also reads pictures, for a template and processor of Qwen2.5-VL's form."""

    def __init__(
        self, tokenizer: Any, image_processor: Any, end_ids: Iterable[int] = (), **more: Any
    ):
        """Take the arguments of `ChatFormat`, and the image processor of the model."""
        super().__init__(tokenizer, end_ids, **more)
        for token in (START, PAD, END):
            if token not in self.control_ids:
                raise ConfigError(
                    f"the tokenizer of {self.template.model} has no token {token}; use a model of "
                    "Qwen2.5-VL's form",
                    code="missing_control_tokens",
                )
        self.image_processor = image_processor
        self.pad_id = self.control_ids[PAD]
        self._picture_ids = [self.control_ids[token] for token in (START, PAD, END)]
        # Stands for a picture in a text. A page from outside cannot know it.
        self._mark = f"\ue0f3{secrets.token_hex(16)}\ue0f3"
        self._compare_with_template()

    def _compare_with_template(self) -> None:
        """Raise ConfigError if the template writes more of a picture than its three tokens."""
        parts = [{"type": "text", "text": "a "}, {"type": "image"}, {"type": "text", "text": " b"}]
        flat = f"a {START}{PAD}{END} b"
        texts = [
            self.template.render([{"role": "user", "content": content}])
            for content in (parts, flat)
        ]
        if texts[0] != texts[1]:
            raise ConfigError(
                f"the chat template of {self.template.model} writes a picture as {texts[0]!r}; use "
                "a model of Qwen2.5-VL's form",
                code="template_not_exact",
            )

    # --------------------------------------------------------------------------------- observations

    def prompt_ids(
        self, messages: list[Message], tools: list[dict[str, Any]] | None = None
    ) -> list[int]:
        """Encode a conversation, as `ChatFormat` does."""
        ids = super().prompt_ids(self._flatten(messages), _break_up_tools(tools))
        return self._expand(ids, messages)

    def continuation_ids(
        self,
        messages: list[Message],
        *,
        calls: Sequence[str] = (),
        tools: list[dict[str, Any]] | None = None,
    ) -> list[int]:
        """Encode what follows a turn, as `ChatFormat` does."""
        flat = self._flatten(messages)
        safe_tools = _break_up_tools(tools)
        ids = super().continuation_ids(flat, calls=calls, tools=safe_tools)
        return self._expand(ids, messages)

    def count_tokens(self, picture: Image.Image) -> int:
        """Return how many placeholders a picture takes."""
        patches = self.image_processor.get_number_of_image_patches(
            picture.height, picture.width, {}
        )
        return patches // self.image_processor.merge_size**2

    def _flatten(self, messages: list[Message]) -> list[Message]:
        """Write each content as one text, with a mark where a picture stands."""
        flat = []
        for message in messages:
            text = ""
            for part in parts_of(message):
                text += self._mark if is_picture(part) else break_up(part["text"])
            flat.append(message | {"content": text})
        return flat

    def _encode_data(
        self, text: str, template_tags: frozenset[int], before: str, after: str
    ) -> tuple[int, ...]:
        """Encode the texts between marks as data, and each mark as a picture's three tokens."""
        ids: list[int] = []
        pieces = text.split(self._mark)
        start = 0
        for number, piece in enumerate(pieces):
            end = start + len(piece)
            tags = frozenset(tag - start for tag in template_tags if start <= tag < end)
            fence_before = END if number else before
            fence_after = START if number + 1 < len(pieces) else after
            if number:
                ids += self._picture_ids
            ids += super()._encode_data(piece, tags, fence_before, fence_after)
            start = end + len(self._mark)
        return tuple(ids)

    def _expand(self, ids: list[int], messages: list[Message]) -> list[int]:
        """Repeat each placeholder as often as its picture requires."""
        pictures = pictures_in(messages)
        # Data never becomes a placeholder, so the k-th one belongs to the k-th picture.
        if ids.count(self.pad_id) != len(pictures):
            raise ConfigError(
                f"the chat template of {self.template.model} drops or repeats a picture; use a "
                "model of Qwen2.5-VL's form",
                code="template_not_exact",
            )
        counts = [self.count_tokens(picture) for picture in pictures]
        all_ids: list[int] = []
        for token in ids:
            times = counts.pop(0) if token == self.pad_id else 1
            all_ids += [token] * times
        return all_ids


# ------------------------------------------------------------------------------ parts of a content


def parts_of(message: Message) -> list[dict[str, Any]]:
    """Return the parts of a content; a text is one part. Raise AgentR1Error for other parts.

    A path or an address instead of a picture is refused: a processor would open it.
    """
    content = message["content"]
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    for part in content:
        is_text = part["type"] == "text" and isinstance(part.get("text"), str)
        image = part.get("image")
        # `Image.open` returns a subclass, which is not decoded yet.
        is_decoded = type(image) is Image.Image and image.mode == "RGB"
        if not is_text and not (part["type"] == "image" and is_decoded):
            raise AgentR1Error(
                f"a message has a part of type {part['type']!r} that is neither a text nor a "
                "decoded picture; pass the file's bytes through picture_part (recipes/pictures)",
                code="picture_not_decoded",
            )
    return content


def break_up(text: str) -> str:
    """Put a blank into each placeholder that a text spells."""
    return TAGS.sub(lambda match: f"< {match[0][1:]}", text)


def _break_up_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    return json.loads(break_up(json.dumps(tools, ensure_ascii=False))) if tools else None


def is_picture(part: dict[str, Any]) -> bool:
    """Return whether a part is a picture."""
    return part["type"] == "image"


def pictures_in(messages: Iterable[Message]) -> list[Image.Image]:
    """Return the pictures of messages, in order."""
    pictures = []
    for message in messages:
        pictures += [part["image"] for part in parts_of(message) if is_picture(part)]
    return pictures


def describe(messages: Iterable[Message]) -> str:
    """Return a text that is equal for equal messages, whatever objects their pictures are."""
    words: list[str] = []
    for message in messages:
        words.append(message["role"])
        for part in parts_of(message):
            if is_picture(part):
                pixels = hashlib.sha256(part["image"].tobytes())
                words.append(f"picture {part['image'].size} {pixels.hexdigest()}")
            else:
                words.append(part["text"])
    return str(words)
