"""Show a conversation: thoughts dimmed, tool calls with their results, the answer in a box.

In: the turns of an episode as they stream, and finished `Exchange`s (conversation.py). Out: a
terminal, or plain text if there is none or NO_COLOR is set.

Everything printed here comes from a model, a document or a file, so all of it passes through
`clean`. An escape sequence in a web page must not move the reader's cursor.
"""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.text import Text

from agent_r1.config.settings import EnvConfig
from agent_r1.core import Action, StepResult
from agent_r1.ground.clean import clean
from agent_r1.inference.conversation import Exchange, Watcher, read_turn

LABELS = {
    "text": ("", ""),
    "think": ("thought: ", "dim italic"),
    "answer": ("answer: ", "bold green"),
}
"""Text before a part of a turn, and its style."""
MAX_LINES = 12
MAX_CHARS = 1500
"""Most lines and characters of a tool's result to print."""


class Screen(Watcher):
    """Show a conversation. Without a terminal, or with NO_COLOR, the console writes plain text."""

    def __init__(self, console: Console, env: EnvConfig):
        self.console = console
        self.env = env
        self._part_texts: list[str] = []
        """Printed text of each part of the running turn."""

    def say(self, text: str, style: str = "") -> None:
        """Print one of the program's own lines; it may contain the model's words."""
        self.end_turn()
        self.console.print(Text(clean(text), style), soft_wrap=True)

    def note(self, text: str) -> None:
        self.say(f"* {text}", "yellow")

    def stream(self, text: str) -> None:
        self._write(
            read_turn(self.env, text, whole=False)
        )  # parts only grow, so printed text stays right

    def turn(self, action: Action) -> None:
        self._write(read_turn(self.env, action.text, whole=action.finish_reason == "stop"))
        self.end_turn()

    def results(self, result: StepResult) -> None:
        for call in result.info.get("tool_calls", []):
            self.console.print(call_text(call), soft_wrap=True)

    def _write(self, parts: list[tuple[str, str]]) -> None:
        for number, (kind, text) in enumerate(part for part in parts if part[0] != "tool_call"):
            label, style = LABELS[kind]
            if number == len(self._part_texts):
                if number:
                    self.console.print()
                self._part_texts.append("")
                self.console.print(Text(label, style), end="", soft_wrap=True)
            self.console.print(
                Text(clean(text[len(self._part_texts[number]) :]), style), end="", soft_wrap=True
            )
            self._part_texts[number] = text

    def end_turn(self) -> None:
        if self._part_texts:
            self.console.print()
        self._part_texts = []


def call_text(call: dict[str, Any]) -> Text:
    """Format a tool call: arguments, duration, result. The agent read the whole result."""
    seconds = call["seconds"]
    duration = f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
    arguments = []
    for name, value in call["arguments"].items():
        text = value if isinstance(value, str) else json.dumps(value)
        arguments.append(f"{name}: {text}")
    lines = call["content"][:MAX_CHARS].splitlines()[:MAX_LINES]
    hidden = len(call["content"]) - sum(map(len, lines)) - max(0, len(lines) - 1)
    if hidden > 0:
        lines.append(f"... {hidden} more characters, which /trace shows")
    head = f"{call['name'] or 'malformed call'}({', '.join(arguments)})  {duration}"
    body = "".join(f"\n  | {clean(line)}" for line in lines)
    if not call["ok"]:
        return Text(clean(head), "red") + Text(body, "red")
    return Text(clean(head), "cyan") + Text(body, "")


def footer(exchange: Exchange) -> str:
    steps = exchange.trajectory.steps
    calls = sum(len(step.info.get("tool_calls", [])) for step in steps)
    tokens = sum(len(step.action_ids) for step in steps)
    counts = ((len(steps), "turn"), (calls, "tool call"), (tokens, "sampled token"))
    return (
        " · ".join(f"{n} {word}{'' if n == 1 else 's'}" for n, word in counts)
        + f" · {exchange.seconds:.2f} s"
    )
