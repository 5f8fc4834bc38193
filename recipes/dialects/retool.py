"""ReTool's dialect (2504.11536): programs in tags, in the midst of a thought.

    ... <code>
    ```python
    print(17 * 23)
    ```
    </code>                            ends the turn; the next message is

    <interpreter>
    391
    </interpreter>

    ... <answer>395</answer>           ends the episode

The tool `python` runs them. In the paper, sampling pauses at `</code>`. Here a turn ends with its
own token. A program with text after it is not run, because that text can only be an invented
result.
"""

from __future__ import annotations

from agent_r1 import BaseTool, Hermes, Message, ToolCall, ToolResult


class ReTool(Hermes):
    """One program a turn, and answers between <answer> tags."""

    describes_format = True
    tags = ("code", "interpreter")
    tool_parser = None

    def system_prompt(self, tools: dict[str, BaseTool]) -> str:
        program = (
            "To compute, write Python between <code> and </code>, print what you want to know, and "
            "end your turn there; the output comes back between <interpreter> and </interpreter>. "
        )
        example = program if "python" in tools else ""
        return f"{example}Write the answer between <answer> and </answer>."

    def calls(self, text: str, tools: dict[str, BaseTool]) -> list[ToolCall]:
        parts = self.parts(text)
        programs = [place for place, part in enumerate(parts) if part.kind == "tool_call"]
        if not programs:
            return []
        part, after = parts[programs[0]], parts[programs[0] + 1 :]
        if not part.closed:
            return [ToolCall("", {}, error="the program is not closed with </code>")]
        if any(later.text.strip() for later in after):
            return [
                ToolCall(
                    "",
                    {},
                    error="end your turn behind </code>; what the program prints comes in the next "
                    "message",
                )
            ]
        return [ToolCall("python", {"code": _without_fence(part.text)})]

    def write_turn(self, message: ToolCall | str, thought: str = "") -> str | None:
        if isinstance(message, str):
            return super().write_turn(message, thought)
        return (
            f"{thought}\n<code>\n{message.arguments['code']}\n</code>".lstrip()
            if "code" in message.arguments
            else None
        )

    def responses(
        self, calls: list[ToolCall], results: list[ToolResult], tools: dict[str, BaseTool]
    ) -> list[Message]:
        output = "\n".join(
            self.escape(result.content, "<interpreter>", "</interpreter>") for result in results
        )
        return [{"role": "user", "content": f"<interpreter>\n{output}\n</interpreter>"}]


def _without_fence(code: str) -> str:
    """Remove the lines ```python and ``` that models put around a program."""
    lines = code.strip().splitlines()
    has_fence = len(lines) >= 2 and lines[0].startswith("```") and lines[-1].strip() == "```"
    return "\n".join(lines[1:-1]) if has_fence else code.strip("\n")
