"""Tool-integrated reasoning in mathematics (ToRA, 2309.17452; Qwen2.5-Math): programs and their output in fenced blocks.

    The product first.
    ```python
    print(17 * 23)
    ```                                ends the turn; the next message is

    ```output
    391
    ```

    So it is \\boxed{395}.              ends the episode

The tool `python` runs them. A turn with a program is no answer, whatever it boxes: the result may change it.
"""

from __future__ import annotations

from agent_r1.env.hermes import HermesToolEnv, broken_up
from agent_r1.tool.base import ToolCall, ToolResult
from agent_r1.types import Message


def blocks_of(text: str) -> tuple[list[tuple[str, str, bool]], str, str]:
    """(language, content, closed) of each fenced block, the text outside of all, and the text behind the last."""
    blocks: list[tuple[str, str, bool]] = []
    outside, inside, behind, language = [], [], [], None
    for line in text.splitlines():
        mark = line.strip()
        if language is None and mark.startswith("```"):
            language, inside, behind = mark[3:].strip().lower(), [], []
        elif language is not None and mark == "```":
            blocks.append((language, "\n".join(inside), True))
            language = None
        elif language is not None:
            inside.append(line)
        else:
            outside.append(line)
            behind.append(line)
    if language is not None:
        blocks.append((language, "\n".join(inside), False))
    return blocks, "\n".join(outside), "\n".join(behind)


def boxes_of(text: str) -> list[str]:
    """What each closed \\boxed{...} holds."""
    found, start = [], 0
    while (start := text.find("\\boxed{", start)) >= 0:
        start += len("\\boxed{")
        depth = 1
        for place in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                found.append(text[start:place].strip())
                start = place
                break
        else:  # it is never closed, and neither is one inside of it that we could pay for
            break
    return found


class MathTirEnv(HermesToolEnv):
    """One program a turn, and an answer in a box."""

    def extract_tool_calls(self, text: str) -> list[ToolCall]:
        blocks, _, behind = blocks_of(text)
        programs = [(content, closed) for language, content, closed in blocks if language == "python"]
        if not programs:
            return []
        content, closed = programs[0]
        if not closed:
            return [ToolCall("", {}, error="the program is not closed with ```")]
        if len(blocks) > 1 or behind.strip():
            return [
                ToolCall("", {}, error="end your turn behind the program; what it prints comes in the next message")
            ]
        return [ToolCall("python", {"code": content})]

    def format_tool_response(self, calls: list[ToolCall], results: list[ToolResult]) -> list[Message]:
        printed = "\n".join(broken_up(result.content, "```") for result in results)
        return [{"role": "user", "content": f"```output\n{printed}\n```"}]

    def answer_in(self, text: str) -> tuple[str | None, bool]:
        blocks, outside, _ = blocks_of(text)
        boxes = boxes_of(outside)
        if not boxes or not boxes[-1] or any(language == "python" for language, _, _ in blocks):
            return None, False
        return boxes[-1], len(boxes) == 1 and not blocks
