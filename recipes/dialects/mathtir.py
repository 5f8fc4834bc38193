"""Tool-integrated reasoning in mathematics (ToRA, 2309.17452; Qwen2.5-Math), in fenced blocks.

    The product first.
    ```python
    print(17 * 23)
    ```                                ends the turn; the next message is

    ```output
    391
    ```

    So it is \\boxed{395}.              ends the episode

The tool `python` runs them. A turn with a program is no answer, whatever it boxes: the result may
change it.
"""

from __future__ import annotations

import re

from agent_r1 import BaseTool, Dialect, Message, Part, ToolCall, ToolResult


def pieces_of(text: str) -> list[tuple[str | None, str, bool]]:
    """Split text into (language, content, closed) blocks; text outside has language None."""
    pieces: list[tuple[str | None, str, bool]] = []
    language, lines = None, []
    for line in text.split("\n"):  # and not at every character that Unicode ends a line with
        mark = line.strip()
        if mark == "```" or (language is None and mark.startswith("```")):
            pieces.append((language, "\n".join(lines), True))
            language, lines = mark[3:].strip().lower() if language is None else None, []
        else:
            lines.append(line)
    pieces.append((language, "\n".join(lines), language is None))
    return [piece for piece in pieces if piece[0] is not None or piece[1].strip()]


def boxes_of(text: str) -> list[str]:
    """Return the content of each closed \\boxed{...}."""
    boxes, start = [], 0
    while (start := text.find("\\boxed{", start)) >= 0:
        start += len("\\boxed{")
        depth = 1
        for place in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                boxes.append(text[start:place].strip())
                start = place
                break
        else:  # it is never closed, and no box inside it can be rewarded
            break
    return boxes


class MathTir(Dialect):
    """One program a turn, and an answer in a box."""

    describes_format = True

    def system_prompt(self, tools: dict[str, BaseTool]) -> str:
        program = (
            "To compute, write Python in a block between ```python and ```, print what you want to "
            "know, and end your turn there; the output comes back in a block between ```output and "
            "```. "
        )
        return f"{program if 'python' in tools else ''}Write the answer in \\boxed{{}}."

    partial_tag = re.compile(r"^[^\S\n]*`[^\n]*\Z", re.MULTILINE)

    def parts(self, text: str) -> list[Part]:
        return [
            Part("tool_call" if language == "python" else "text", content)
            for language, content, _ in pieces_of(text)
        ]

    def calls(self, text: str, tools: dict[str, BaseTool]) -> list[ToolCall]:
        pieces = pieces_of(text)
        blocks = [piece for piece in pieces if piece[0] is not None]
        programs = [
            (content, is_closed) for language, content, is_closed in blocks if language == "python"
        ]
        if not programs:
            return []
        content, is_closed = programs[0]
        if not is_closed:
            return [ToolCall("", {}, error="the program is not closed with ```")]
        if len(blocks) > 1 or pieces[-1][0] is None:
            return [
                ToolCall(
                    "",
                    {},
                    error="end your turn behind the program; what it prints comes in the next "
                    "message",
                )
            ]
        return [ToolCall("python", {"code": content})]

    def responses(
        self, calls: list[ToolCall], results: list[ToolResult], tools: dict[str, BaseTool]
    ) -> list[Message]:
        output = "\n".join(self.escape(result.content, "```") for result in results)
        return [{"role": "user", "content": f"```output\n{output}\n```"}]

    def answer_in(self, text: str) -> tuple[str | None, bool]:
        pieces = pieces_of(text)
        blocks = [language for language, _, _ in pieces if language is not None]
        # Each for itself: no box goes on after a block.
        boxes = [
            box for language, content, _ in pieces if language is None for box in boxes_of(content)
        ]
        if not boxes or not boxes[-1] or "python" in blocks:
            return None, False
        return boxes[-1], len(boxes) == 1 and not blocks

    def write_turn(self, message: ToolCall | str, thought: str = "") -> str | None:
        if isinstance(message, str):
            return f"{thought}\n\\boxed{{{message}}}".lstrip()
        return (
            f"{thought}\n```python\n{message.arguments['code']}\n```".lstrip()
            if "code" in message.arguments
            else None
        )
