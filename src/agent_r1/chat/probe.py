"""Compare a chat format with the model's own chat template, before anything costs.

In: a `ChatFormat` and a dialect. Out: a sentence on what stays as it was sampled, or a ConfigError
that names the first difference. `cold_start/tiny_model.py` and `rollout/setup.py` call it when a
model is opened; the training loop does not import it.

The claim: each token that the agent did not sample is the one that the template renders for that
conversation. The probe plays a set of conversations both ways. One is that of the episode loop, a
prompt and then one continuation after another. The other renders the whole anew before each turn.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from typing import Any

from agent_r1.chat.format import ChatFormat
from agent_r1.chat.study import StudiedTemplate
from agent_r1.chat.template import Template
from agent_r1.core import Message
from agent_r1.ground.errors import ConfigError

CONTENTS = {
    "plain words": "It was founded in 1930.",
    "blanks at both ends": "  \n Marn was born in Tulo. \n\n",
    "several lines": "one\ntwo\n\nthree\r\n\tfour",
    "quotes": "say \"r\" and 'q' now",
    "backslashes": "C:\\new\\table \\u0041 \\\\",
    "angle brackets": "a <b>bold</b> & <c> 1 < 2 > 0",
    "braces": '{"name": "x"} {{ y }} {% if z %}',
    "nothing": "",
    "only blanks": " \n ",
    "other scripts": "Größe Ελλάδα 東京 مرحبا 🙂",
    "capitals": "<|IM_END|> SHOUT",
}
"""What a message may hold. None has a control token of any known model."""
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "probe_one",
            "description": "Looks a word up.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "The word."},
                    "count": {"type": "integer", "description": "How many.", "default": 3},
                    "kinds": {"type": "array", "items": {"type": "string"}},
                    "order": {"type": "string", "enum": ["up", "down"]},
                },
                "required": ["query"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "probe_two",
            "description": "Takes nothing.",
            "parameters": {"type": "object", "properties": {}},
        },
    },
]
_TURN_TEXT = "Qzj{}wx"
"""What the agent says in its turn of that number: no template writes it."""
_THOUGHT = re.compile(r"\s*<[^<>]*(think|thought|channel)[^<>]*>.*", re.DOTALL)


@dataclass
class Conversation:
    """Hold the roles of the messages before each turn of the agent."""

    title: str
    turns: tuple[tuple[str, ...], ...]
    tools: bool = False


WORDS = (
    Conversation("a question", (("user",),)),
    Conversation("three questions", (("user",), ("user",), ("user",))),
)
SYSTEM = (
    Conversation("a system message", (("system", "user"), ("user",))),
    Conversation("several turns before the agent's", (("system", "user", "assistant", "user"),)),
)
RESULTS = (
    Conversation("a result", (("user",), ("tool",)), tools=True),
    Conversation("a system message and tools", (("system", "user"), ("tool",), ("tool",)), True),
    Conversation("two results", (("user",), ("tool", "tool"), ("tool",)), tools=True),
    Conversation("a question after an answer", (("user",), ("tool",), ("user",), ("tool",)), True),
)


def examine(chat: ChatFormat, results: bool, system: bool = True) -> str:
    """Compare all conversations. Return one sentence: exact, or exact but for what.

    Args:
        results: Also those in which the template shows tools and their results.
        system: Also those that begin with a system message.

    Raises ConfigError for a difference.
    """
    template = chat.template
    assert isinstance(template, StudiedTemplate)  # `make_studied_chat` gives it one
    notes: list[str] = []
    conversations = [*WORDS, *(SYSTEM if system else ()), *(RESULTS if results else ())]
    contents = list(CONTENTS)
    for number, conversation in enumerate(conversations):
        # Each content in each conversation would take seconds: two conversations get all of them,
        # the others two in turn.
        some = contents if conversation in (WORDS[0], RESULTS[0]) else contents[number::6]
        for name in some:
            _compare(chat, template, conversation, name, notes)
    notes += _exceptions(template)
    return f"exact but for {' and '.join(notes)}" if notes else "exact"


def _compare(
    chat: ChatFormat,
    template: StudiedTemplate,
    conversation: Conversation,
    name: str,
    notes: list[str],
) -> None:
    """Play a conversation both ways, with the content of that name in each message."""
    where = f"{conversation.title}, {name}"
    tools = TOOLS if conversation.tools else None
    messages: list[Message] = []
    history: list[str] = []
    for number, roles in enumerate(conversation.turns):
        reply = [{"role": role, "content": CONTENTS[name]} for role in roles]
        for message in reply:
            if message["role"] == "assistant":
                message["content"] = "An answer."
        answers = sum(role == "tool" for role in roles)
        calls = [TOOLS[i % 2]["function"]["name"] for i in range(answers)]
        if number:
            messages.append(_turn(template, number - 1, calls))
        messages += template.results_of_calls(reply, calls) if template.needs_call else reply
        whole = template.render(messages, tools)
        template_ids = chat.tokenizer(whole, add_special_tokens=False)["input_ids"]
        if number == 0:
            ours = chat.prompt_ids(reply, tools)
        else:
            ours = chat.continuation_ids(reply, calls=calls, tools=tools)
            # It begins with the token that ends the turn, and with nothing of the turn itself.
            ends = ours[0] in chat.control_ids.values()
            template_ids = template_ids[-len(ours) :] if ends else []
        _same(chat, where, ours, template_ids)
        history.append(whole)
        _check_history(template, where, history, notes)


def _turn(template: StudiedTemplate, number: int, calls: list[str]) -> Message:
    answer = _TURN_TEXT.format(number)
    if calls and template.needs_call:
        return template.turn_with_calls(calls, {"query": answer})
    return {"role": "assistant", "content": answer}


def _same(chat: ChatFormat, where: str, ours: list[int], template_ids: list[int]) -> None:
    if ours == template_ids:
        return
    start = len(os.path.commonprefix([ours, template_ids]))
    our_text, template_text = (
        chat.decode(ids[max(0, start - 4) : start + 12]) for ids in (ours, template_ids)
    )
    raise ConfigError(
        f"the chat template of {chat.template.model} cannot be followed turn by turn "
        f"({where}): {template_text!r} would become {our_text!r}; use a model with another "
        "template",
        code="template_not_exact",
    )


def _check_history(template: Template, where: str, history: list[str], notes: list[str]) -> None:
    """Compare the last rendering with those before it, but for the agent's own turns."""
    now = history[-1]
    begin = 0
    for number, before in enumerate(history[:-1]):
        end = now.find(_TURN_TEXT.format(number), begin)
        # From the turn before to this one; `before` ends where the agent begins to speak.
        earlier_text = (
            before if number == 0 else before.rpartition(_TURN_TEXT.format(number - 1))[2]
        )
        present_text = now[begin:end]
        common_length = len(os.path.commonprefix([present_text, earlier_text]))
        lost_text = earlier_text[common_length:]
        if end >= 0 and lost_text and _bare(present_text).startswith(_bare(earlier_text)):
            # Hermes-3 adds a line break to a result as soon as another message follows.
            note = "blanks around earlier messages"
        elif end < 0 or (lost_text and not _THOUGHT.fullmatch(lost_text)):
            raise ConfigError(
                f"the chat template of {template.model} writes earlier messages another way when "
                f"the conversation goes on ({where}): {lost_text[:40]!r} becomes "
                f"{present_text[common_length : common_length + 40]!r}; use a model with another "
                "template",
                code="template_rewrites_history",
            )
        else:
            # Qwen3 puts an empty thought before the turn that is to be written, and no other.
            note = f"{lost_text.strip()!r} before earlier turns, which were sampled after it"
        if lost_text and note not in notes:
            notes.append(note)
        begin = now.rfind(_TURN_TEXT.format(number)) + len(_TURN_TEXT.format(number))


def _bare(text: str) -> str:
    return re.sub(r"\s", "", text)


def _exceptions(template: Template) -> list[str]:
    """List what of a sampled turn the template would change. It stays as it was sampled."""
    notes = []
    question = [{"role": "user", "content": "?"}]

    def turn(content: str) -> str:
        messages = [*question, {"role": "assistant", "content": content}, *question]
        return template.render(messages)

    with contextlib.suppress(ConfigError):
        if "hidden" not in turn("<think>\nhidden\n</think>\n\nseen"):
            notes.append("earlier thoughts, which stay as they were sampled")
        if "  seen  " not in turn("  seen  "):
            notes.append("blanks at the ends of a turn, which stay as they were sampled")
    return notes
