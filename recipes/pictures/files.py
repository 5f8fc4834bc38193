"""Decode pictures from outside, within limits.

In: the bytes of a file, from a tool, a user or a data set. Out: a decoded picture, or a sentence
why there is none. Next: `chat.py` puts decoded pictures into messages, and nothing decodes them
again.
"""

from __future__ import annotations

import io
from typing import Any

from PIL import Image

from agent_r1 import AgentR1Error, first_line

MAX_BYTES = 2**23
"""Of a file: 8 MiB."""
MAX_PIXELS = 2**22
"""Of a picture, checked before it is decoded: a PNG of 20 kB may claim 100 million pixels."""
MAX_RATIO = 200
"""Of the sides: Qwen's image processor raises an error beyond it."""
MAX_SCANS = 100
"""Of a JPEG. A progressive file has about ten; each scan of a hostile file costs a whole pass."""
FORMATS = ("PNG", "JPEG")


def open_picture(content: bytes) -> Image.Image:
    """Decode a PNG or JPEG file. Raise AgentR1Error for any other and beyond the limits."""
    if len(content) > MAX_BYTES:
        raise _refusal(f"it has {len(content)} bytes, and {MAX_BYTES} are allowed")
    # In a JPEG, these two bytes are a marker wherever they stand.
    scans = content.count(b"\xff\xda")
    if content.startswith(b"\xff\xd8") and scans > MAX_SCANS:
        raise _refusal(f"it has {scans} scans, and {MAX_SCANS} are allowed")
    try:
        # Reads the header only. Without `formats`, Pillow would try forty decoders.
        image = Image.open(io.BytesIO(content), formats=FORMATS)
    except Image.DecompressionBombError:
        raise _refusal(f"it has more than {MAX_PIXELS} pixels") from None
    except Exception:  # of a broken header: OSError, SyntaxError, ValueError, struct.error
        raise _refusal("it is no PNG or JPEG file") from None
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise _refusal(f"it has {width} x {height} pixels, and {MAX_PIXELS} are allowed")
    if max(width, height) > MAX_RATIO * min(width, height):
        raise _refusal(f"its sides are {width} and {height}; a ratio of {MAX_RATIO} is allowed")
    try:
        image.load()
    except Exception as error:  # a decoder may fail anywhere
        raise _refusal(f"it cannot be decoded ({first_line(error)})") from None
    return image.convert("RGB")


def _refusal(why: str) -> AgentR1Error:
    return AgentR1Error(
        f"a picture is refused: {why}; send a smaller or another PNG or JPEG file",
        code="picture_refused",
    )


def picture_part(content: bytes) -> dict[str, Any]:
    """Return the part of a content for a file: its picture, or a text."""
    try:
        return {"type": "image", "image": open_picture(content)}
    except AgentR1Error as error:
        return {"type": "text", "text": f"[{error}]"}


def png(picture: Image.Image) -> bytes:
    """Encode a picture without loss."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()
