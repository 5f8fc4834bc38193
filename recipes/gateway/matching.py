"""Find the conversation that a request continues, and the training rows of an episode.

In: the messages of a request, as the client spells them. Out: the ids to sample from. At the end of
the episode: its steps. Next: `books.py` counts the tokens.

A client sends the whole conversation again in each request. The model's turns in it are texts; what
the model sampled are ids, and texts encoded again may give other ids. So each answer is kept in a
tree under its *place*: a digest of everything before it. A request is walked from its first
message. At an assistant message, the answers kept at this place are compared with it. If one
matches, the walk continues below that answer, and the prompt has its sampled ids, thought included.
Otherwise the message is the client's own text: data, without control tokens and with mask 0.

Two messages match if they differ only in what clients change by habit:

    the thought is dropped
    the content is absent, null, empty or in parts; blanks at its ends differ
    the arguments of a call are spelled anew

The id of a call, which we issued, decides first.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from agent_r1 import ChatFormat, Generation, Message, Observation, Step
from agent_r1_recipes.gateway.server import Request
from agent_r1_recipes.gateway.wire import Turn, unique_keys


@dataclass(eq=False)
class Answer:
    """One call and what was sampled for it."""

    place: str
    """Digest of the conversation before it."""
    request: str
    """Digest of everything that would make a retry the same request."""
    number: int
    """Of its turn.

    A conversation that begins anew, as after a summary, counts on, as in our loop.
    """
    prompt_ids: list[int]
    parent: Answer | None = None
    """The answer that its conversation continues."""
    rest: list[Message] = field(default_factory=list)
    """The messages after `parent`, as the client wrote them."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """What the client offered with it."""
    work: asyncio.Task[None] | None = None
    """The sampling; it goes on if the client leaves."""
    connection: Request | None = None
    """The newest request for it."""
    generation: Generation | None = None
    """None until the sampler has finished."""
    turn: Turn | None = None
    is_delivered: bool = False
    """Whether the client has read all of it, as far as the connection shows."""
    is_continued: bool = False
    """Whether a later request has it."""
    is_edited: bool = False
    """Whether a later request has something else in its place."""

    @property
    def loss(self) -> str | None:
        """Return why its tokens are not trained, or None."""
        if self.is_continued:  # whatever happened to a copy of it
            return None
        if self.is_edited:
            return "edited"
        return None if self.is_delivered else "undelivered"

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.require_generation().token_ids

    @property
    def is_abandoned(self) -> bool:
        """Return whether the connection of its newest request is closed or lost."""
        return self.connection is not None and self.connection.is_closed

    def require_generation(self) -> Generation:
        """Return what was sampled. Raise RuntimeError before the sampler has finished."""
        if self.generation is None:
            raise RuntimeError("this answer has no generation yet")
        return self.generation

    def require_turn(self) -> Turn:
        """Return the sampled turn. Raise RuntimeError before the sampler has finished."""
        if self.turn is None:
            raise RuntimeError("this answer has no turn yet")
        return self.turn


@dataclass
class Place:
    """Where a request stands in the tree."""

    digest: str
    last: Answer | None
    """The answer that it continues."""
    rest: list[Message]
    """The messages after it."""


@dataclass
class Conversations:
    """The tree of one episode. Sub-agents, branches and retries are other paths in it."""

    answers: list[Answer] = field(default_factory=list)
    """In the order of their calls."""
    cuts: Counter[str] = field(default_factory=Counter)
    """Assistant messages that did not match, by cause: edited, ambiguous, rewritten, inserted."""
    examples: set[str] = field(default_factory=set)
    """Places after assistant messages that stood in a request before anything was sampled."""
    newest_wins: bool = False
    """Whether the newest of several equal answers is continued, instead of none. In training each
    would be another row; a server has no rows."""

    def locate(self, messages: list[Message], tools: list[dict[str, Any]]) -> Place:
        """Walk through a request, and count what does not match."""
        digest = _digest("tools", json.dumps(tools, sort_keys=True))
        place = Place(digest, None, [])
        for message in messages:
            if message["role"] == "assistant":
                after = _digest(place.digest, *spelling(message))
                if not self.answers:
                    self.examples.add(after)
                answer = None
                if after not in self.examples:  # an example of the prompt is no cut
                    answer = self._matching(message, place.digest)
                if answer is not None:
                    answer.is_continued = True
                    number = str(self.answers.index(answer))
                    digest = _digest(place.digest, "answer", number)
                    place = Place(digest, answer, [])
                    continue
            place.digest = _digest(place.digest, *spelling(message))
            place.rest.append(message)
        return place

    def _matching(self, message: Message, digest: str) -> Answer | None:
        """Return the answer that `message` is, or None after counting the cause."""
        sampled_answers = [answer for answer in self.answers if answer.turn is not None]
        here = [answer for answer in sampled_answers if answer.place == digest]
        quotations = [answer for answer in here if quotes(message, answer)]
        if quotations:
            return quotations[-1]
        owner = _owner(message, sampled_answers)
        if owner is not None and owner in here:
            # The id says which one it is. Content next to calls is often dropped.
            if _same_calls(message, owner) and message["content"].strip() in ("", _content(owner)):
                return owner
            return self._count("edited", owner)
        same = [answer for answer in here if is_same(message, answer)]
        if len(same) == 1 or (same and self.newest_wins):
            return same[-1]
        if same:
            return self._count("ambiguous")
        # It is an answer of this episode in another place: something before it was changed.
        elsewhere = [answer for answer in sampled_answers if is_same(message, answer)]
        if elsewhere:
            for answer in elsewhere:
                answer.is_continued = True
            return self._count("rewritten")
        if owner is not None:
            return self._count("edited", owner)
        if here:
            return self._count("edited", here[-1])
        return self._count("inserted") if sampled_answers else None

    def _count(self, cause: str, answer: Answer | None = None) -> None:
        """Count a cut. `answer`: the one that was edited, if it is known."""
        self.cuts[cause] += 1
        if answer is not None:
            answer.is_edited = True

    def rows(self, answers: list[Answer]) -> list[list[Answer]]:
        """Group answers into rows. One that continues all tokens of a row joins it."""
        rows: list[list[Answer]] = []
        for answer in answers:
            longest: list[Answer] | None = None
            for row in rows:
                context = row[-1].ids
                if answer.prompt_ids[: len(context)] == context and (
                    longest is None or len(context) > len(longest[-1].ids)
                ):
                    longest = row
            if longest is None:
                rows.append([answer])
            else:
                longest.append(answer)
        return rows

    def steps(self) -> tuple[list[Step], Step | None]:
        """Return the steps to train on, row by row, and the last sampled one.

        `trajectory_rows` compares a step with the last row only, so interleaved conversations are
        put one after the other.
        """
        trained_answers = [answer for answer in self.answers if answer.turn and answer.loss is None]
        steps: list[Step] = []
        last: Step | None = None
        for row in self.rows(trained_answers):
            for answer in row:
                generation = answer.require_generation()
                step = Step(
                    answer.prompt_ids,
                    generation.token_ids,
                    generation.logprobs,
                    finish_reason=generation.finish_reason,
                    info={"tool_calls": _records(answer.require_turn())},
                    extra={"state": int(answer.place[:15], 16)},
                )
                steps.append(step)
                if answer is trained_answers[-1]:
                    last = step
        return steps, last


def prompt_of(place: Place, tools: list[dict[str, Any]], chat: ChatFormat) -> list[int]:
    """Encode a request: sampled ids as they are, and the client's texts as data."""
    messages = [{"role": m["role"], "content": as_text(m)} for m in place.rest]
    if place.last is None:
        return chat.prompt_ids(messages, tools)
    names = {key: call.name for key, call in place.last.require_turn().calls}
    calls = [names.get(m.get("tool_call_id"), "") for m in place.rest if m["role"] == "tool"]
    action_ids = place.last.require_generation().token_ids
    reply = chat.reply_ids(action_ids, Observation(messages, tools=tools, calls=calls))
    return place.last.prompt_ids + action_ids + reply


def fewest_tokens(messages: list[Message], chat: ChatFormat) -> int:
    """Return how many tokens a request has at least, without encoding it.

    To encode 8 MB of text took 13 to 19 s next to other work, and 30,000 messages took 146 s. Tools
    do not count: a template may print their names alone (`wire.py` bounds their length).
    """
    letters = sum(len(as_text(message)) for message in messages)
    return max(letters // chat.longest_token, len(messages))


def as_text(message: Message) -> str:
    """Write a message as data. Thought and calls of a turn that was not sampled become text."""
    text = message["content"]
    if message.get("thought"):
        text = f"<think>{message['thought']}</think>{text}"
    for _, name, arguments in message.get("tool_calls") or ():
        text += (
            f'\n<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'
        )
    return text


def spelling(message: Message) -> tuple[str, ...]:
    """Return what of a message the client wrote decides its place."""
    if message["role"] == "assistant":
        calls = [(name, canonical(arguments)) for _, name, arguments in message["tool_calls"]]
        return "assistant", message["content"].strip(), message.get("thought", ""), repr(calls)
    return message["role"], message["content"]


def is_same(message: Message, answer: Answer) -> bool:
    return _same_calls(message, answer) and message["content"].strip() == _content(answer)


def quotes(message: Message, answer: Answer) -> bool:
    """Return whether a message quotes the calls of an answer, as smolagents does.

    Their ids, which we issued, decide. Names and arguments must stand there, too, and the text that
    was sampled next to the calls.
    """
    calls = answer.require_turn().calls
    text = message["content"]
    if message["tool_calls"] or not calls or _content(answer) not in text:
        return False
    for key, call in calls:
        if key not in text or call.name not in text:
            return False
        for value in call.arguments.values():
            spellings = (str(value), repr(value), json.dumps(value), json.dumps(value)[1:-1])
            if not any(one in text for one in spellings):
                return False
    return True


def _content(answer: Answer) -> str:
    return answer.require_turn().content.strip()


def _same_calls(message: Message, answer: Answer) -> bool:
    calls = answer.require_turn().calls
    ours = [(call.name, canonical_value(call.arguments)) for _, call in calls]
    theirs = [(name, canonical(arguments)) for _, name, arguments in message["tool_calls"]]
    return ours == theirs


def _owner(message: Message, answers: list[Answer]) -> Answer | None:
    """Return the answer whose call ids a message has, or None."""
    ids = {call[0] for call in message["tool_calls"]}
    for answer in answers:
        if ids & {key for key, _ in answer.require_turn().calls}:
            return answer
    return None


def canonical(arguments: str) -> str:
    """Return one spelling for equal JSON; 1, "1" and true differ.

    Duplicate keys have no one meaning, so such arguments only match their own text.
    """
    try:
        value = json.loads(arguments, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError):
        return f"not JSON: {arguments}"
    return canonical_value(value)


def canonical_value(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _records(turn: Turn) -> list[dict[str, Any]]:
    """Describe a turn's calls as our loop does; their results are in the next observation."""
    records = []
    for _, call in turn.calls:
        record = {
            "name": call.name,
            "arguments": call.arguments,
            "ok": True,
            "error": None,
            "seconds": 0.0,
            "content": "",
        }
        records.append(record)
    return records


def _digest(*parts: str) -> str:
    # JSON, so that ("a", "bc") and ("ab", "c") differ.
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
