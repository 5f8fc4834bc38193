"""What a person sees of a conversation: thoughts dimmed, tool calls as cards, the answer set apart.

In: the turns of an episode as they stream, and finished `Exchange`s (conversation.py). Out: a terminal, or plain text
where there is none or NO_COLOR is set. Next: the person.

Everything printed here was written by a model, a document or a file, so all of it goes through `clean`: an escape
sequence in a web page must not move the cursor of the person who reads the page.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from agent_r1.env import hermes
from agent_r1.inference.agent import Agent
from agent_r1.inference.conversation import Exchange, Listener
from agent_r1.inspect.tokens import token_table
from agent_r1.rollout.chat_format import ChatFormat
from agent_r1.rollout.rows import trajectory_rows
from agent_r1.types import StopReason, Trajectory
from agent_r1.ui import clean

# ------------------------------------------------------------------------------------------------ reading what is there

Kind = Literal["text", "thought", "call", "answer"]
_KINDS: dict[str, Kind] = {"think": "thought", "tool_call": "call", "answer": "answer", "text": "text"}
_HALF_TAG = re.compile(r"</?[a-z_]*\Z")


@dataclass(frozen=True)
class Part:
    """A stretch of a turn."""

    kind: Kind
    text: str


def split_turn(text: str, whole: bool) -> list[Part]:
    """The parts of a turn, or of as much of it as has come (`whole` False); never raises, whatever the model wrote.

    Parts only grow while a turn streams. In a whole turn without a call and without <answer> tags, the plain text is
    the answer: that is how a model speaks that was not trained to use them, and it ends the episode all the same.
    """
    if not whole:
        text = _HALF_TAG.sub("", text)
    parts = [Part(_KINDS[p.kind], p.text.strip()) for p in hermes.split_turn(text) if p.text.strip()]
    if whole and not {"call", "answer"} & {part.kind for part in parts}:
        parts = [Part("answer", p.text) if p.kind == "text" else p for p in parts]
    return parts


def answer_of(exchange: Exchange, chat: ChatFormat) -> str | None:
    """What the agent answered, or None if it did not come to an answer. In a conversation plain words are one, too."""
    if exchange.trajectory.stop_reason not in (StopReason.ANSWERED, StopReason.NO_ANSWER):
        return None
    text = chat.turn_text(exchange.trajectory.steps[-1].action_ids)
    return hermes.answer_of(text) or " ".join(p.text for p in split_turn(text, True) if p.kind == "answer") or None


def no_answer(exchange: Exchange, agent: Agent) -> str | None:
    """Why there is no answer, in a sentence; None if there is one."""
    env, rollout = agent.config.env, agent.config.rollout
    said = None if answer_of(exchange, agent.chat) else "no answer: its last turn is empty"
    return {
        StopReason.ANSWERED: said,
        StopReason.NO_ANSWER: said,
        StopReason.MAX_TURNS: f"no answer: its {env.max_turns} turns are used up",
        StopReason.MAX_TOKENS: f"cut off: a turn has {rollout.max_tokens_per_turn} tokens",
        StopReason.CONTEXT_OVERFLOW: f"no answer: the context of {rollout.max_context} tokens is full",
        StopReason.TOOL_BUDGET: f"no answer: it asked for more than {env.max_tool_calls} tool calls",
        StopReason.INVALID_CALLS: f"no answer: {env.max_invalid_calls} invalid calls in a row",
        StopReason.TIME_OUT: f"no answer within {env.episode_timeout_s:g} s",
        StopReason.ERROR: f"no answer: the environment failed ({exchange.trajectory.error})",
    }[exchange.trajectory.stop_reason]


def exchange_record(exchange: Exchange, chat: ChatFormat) -> dict[str, Any]:
    """One line of `--json`."""
    t = exchange.trajectory
    known = {"reward": t.reward, "reward_parts": t.reward_parts, "metrics": t.metrics} if exchange.known else {}
    return {
        "question": exchange.question,
        "answer": answer_of(exchange, chat),
        "stop_reason": t.stop_reason.value,
        "error": t.error,
        "turns": [chat.turn_text(step.action_ids) for step in t.steps],
        "tool_calls": [call for step in t.steps for call in step.info.get("tool_calls", [])],
        "tokens_before": exchange.start,
        "sampled_tokens": sum(len(step.action_ids) for step in t.steps),
        "seconds": round(exchange.seconds, 3),
        **known,
    }


# ------------------------------------------------------------------------------------------------------ showing it

_SHOWN_LINES, _SHOWN_CHARS = 12, 1500
_LABEL = {"text": "", "thought": "thought: ", "answer": "answer: "}


class Screen(Listener):
    """The listener for people. With `plain`, lines of text without colours, frames or moving parts."""

    def __init__(self, console: Console, plain: bool):
        self.console, self.plain = console, plain
        self._live: Live | None = None
        self._shown: list[str] = []  # plain: what was printed of each part of the running turn

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While an episode runs. What streams is replaced by its final form when the turn is whole."""
        self._shown = []
        if self.plain:
            try:
                yield
            finally:
                self._end_line()
            return
        with Live(_busy("thinking"), console=self.console, transient=True, refresh_per_second=12) as self._live:
            yield

    def stream(self, text: str) -> None:
        parts = split_turn(text, whole=False)
        if self.plain:
            self._write(parts)
        else:
            self._live.update(Group(*map(_show_part, parts), _busy("")))

    def turn(self, text: str, closed: bool) -> None:
        parts = split_turn(text, whole=closed)
        if self.plain:
            self._write(parts)
            self._end_line()
            return
        for part in parts:
            if part.kind != "call":  # its card comes with the result
                self.console.print(_show_part(part))
        self._live.update(_busy("waiting for the tool" if any(part.kind == "call" for part in parts) else ""))

    def results(self, calls: list[dict[str, Any]]) -> None:
        for call in calls:
            self.console.print(self._card(call), soft_wrap=self.plain)
        if not self.plain:
            self._live.update(_busy("thinking"))

    def note(self, text: str) -> None:
        self._end_line()
        self.console.print(Text(clean(f"* {text}"), "yellow"), soft_wrap=self.plain)

    def say(self, text: str, style: str = "") -> None:
        """A line of the program's own; it may hold words of the model's."""
        self.console.print(Text(clean(text), style), soft_wrap=self.plain)

    def _write(self, parts: list[Part]) -> None:
        """Plain: print what is new. Parts only grow, so what stands there stays right."""
        for number, part in enumerate(p for p in parts if p.kind != "call"):
            if number == len(self._shown):
                self._end_line(forget=False)
                self._shown.append("")
                self.console.out(_LABEL[part.kind], end="", highlight=False)
            self.console.out(clean(part.text[len(self._shown[number]) :]), end="", highlight=False)
            self._shown[number] = part.text

    def _end_line(self, forget: bool = True) -> None:
        if self._shown:
            self.console.out("")
        if forget:
            self._shown = []

    def _card(self, call: dict[str, Any]) -> RenderableType:
        """A tool call: what was asked, how long it took, what came back."""
        took = f"{call['seconds'] * 1000:.0f} ms" if call["seconds"] < 1 else f"{call['seconds']:.1f} s"
        name = call["name"] or "malformed call"
        arguments = [f"{k}: {v if isinstance(v, str) else json.dumps(v)}" for k, v in call["arguments"].items()]
        lines = [clean(line) for line in _shorten(call["content"])]
        if self.plain:
            return Text(clean(f"{name}({', '.join(arguments)})  {took}") + "".join(f"\n  | {line}" for line in lines))
        body = [Text(clean(argument), "bold") for argument in arguments]
        body += [Text(line, "" if call["ok"] else "red") for line in lines]
        color = "cyan" if call["ok"] else "red"
        title = Text(clean(f"{name} · {took}" + ("" if call["ok"] else f" · {call['error']}")))
        return Panel(Group(*body), title=title, title_align="left", border_style=color)

    # --------------------------------------------------------------------------------------------- finished exchanges

    def finish(self, exchange: Exchange, agent: Agent) -> None:
        """What is to be said when an episode is over: why there is no answer, and what it took."""
        reason = no_answer(exchange, agent)
        if reason is not None:
            self.note(f"{reason}; /retry samples anew, /clear forgets the conversation")
        self.say(_footer(exchange), "dim")

    def exchange(self, exchange: Exchange, chat: ChatFormat) -> Group:
        """A finished exchange as one block: for /load and /compare."""
        blocks: list[RenderableType] = []
        for step in exchange.trajectory.steps:
            parts = split_turn(chat.turn_text(step.action_ids), whole=step.finish_reason == "stop")
            show = _plain_part if self.plain else _show_part
            blocks += [show(part) for part in parts if part.kind != "call"]
            blocks += [self._card(call) for call in step.info.get("tool_calls", [])]
        if answer_of(exchange, chat) is None:
            blocks.append(Text(f"* no answer: {exchange.trajectory.stop_reason.value}", "yellow"))
        return Group(*blocks, Text(_footer(exchange), "dim"))

    def compare(self, question: str, columns: list[tuple[str, RenderableType]]) -> None:
        """The same question to several models, side by side (plain: one after another)."""
        self.say(question, "bold")
        if self.plain:
            for title, block in columns:
                self.say(f"--- {title}")
                self.console.print(block, soft_wrap=True)
            return
        table = Table.grid(padding=(0, 2, 0, 0), expand=True)
        for _ in columns:
            table.add_column(ratio=1)
        table.add_row(*(Text(clean(title), "bold") for title, _ in columns))
        table.add_row(*(block for _, block in columns))
        self.console.print(table)

    def trace(self, context: list[Exchange], chat: ChatFormat) -> None:
        """Every token of the last exchange with its mask and log-prob: the very row that training would be given."""
        last = context[-1]
        steps = [step for exchange in context for step in exchange.trajectory.steps]
        rows = trajectory_rows(Trajectory(steps, "chat", last.trajectory.stop_reason, last.trajectory.row), 0)
        for number, row in enumerate(rows):
            fields = {k: getattr(row, k) for k in ("input_ids", "action_mask", "logprobs", "rewards", "step_ids")}
            tokens = [chat.decode([i]) for i in row.input_ids]
            self.console.print(token_table(fields | {"tokens": tokens}, start=last.start if number == 0 else 0))

    def why(self, exchange: Exchange) -> None:
        """What the episode would have been paid, where the right answer is known."""
        t = exchange.trajectory
        self.say(f"it ended with: {t.stop_reason.value}")
        if not exchange.known:
            self.say("no reward: nobody told the program the right answer; /help lists questions that it knows")
            return
        self.say(f"expected: {' | '.join(t.row['reward_model']['ground_truth'])}")
        parts = t.reward_parts | {"calls": t.reward - sum(t.reward_parts.values())}
        said = "  ".join(
            f"{name} {value:+.2f}" for name, value in parts.items() if name != "calls" or abs(value) > 1e-9
        )
        self.say(f"reward {t.reward:+.2f}:  {said}")
        self.say("measured, not paid: " + ", ".join(f"{k} {v:g}" for k, v in t.metrics.items()), "dim")


def _show_part(part: Part) -> RenderableType:
    text = clean(part.text)
    if part.kind == "answer":
        return Panel(Text(text, "bold"), title="answer", title_align="left", border_style="green")
    return Text(text, {"thought": "dim italic", "call": "dim cyan"}.get(part.kind, ""))


def _plain_part(part: Part) -> RenderableType:
    return Text(_LABEL[part.kind] + clean(part.text))


def _busy(what: str) -> Spinner:
    return Spinner("dots", Text(what, "dim"), style="cyan")


def _footer(exchange: Exchange) -> str:
    steps = exchange.trajectory.steps
    calls = sum(len(step.info.get("tool_calls", [])) for step in steps)
    tokens = sum(len(step.action_ids) for step in steps)
    counts = ((len(steps), "turn"), (calls, "tool call"), (tokens, "sampled token"))
    return " · ".join(f"{n} {word}{'' if n == 1 else 's'}" for n, word in counts) + f" · {exchange.seconds:.2f} s"


def _shorten(content: str) -> list[str]:
    """The lines of a tool result that fit on a screen, and how much was left out. The agent saw all of it."""
    lines = content[:_SHOWN_CHARS].splitlines()[:_SHOWN_LINES]
    hidden = len(content) - sum(map(len, lines)) - max(0, len(lines) - 1)
    return lines + ([f"... {hidden} more characters, which /trace shows"] if hidden > 0 else [])
