"""Encode chat messages as token ids, and keep data from becoming control tokens.

In: messages from an environment. Out: the ids of an observation. Next: `env/base.py`; `episode.py`
passes the ids to a policy.

An agent loop that calls `apply_chat_template(..., tokenize=True)` in each turn has two faults:

1. *Injection.* A tokenizer encodes the characters `<|im_end|>` as the control token, also inside a
   web page that a tool returned. The page can then close the turn and forge the user's next
   message.
2. *Re-tokenization.* Rendering the whole conversation again encodes what the model sampled a second
   time, and encode(decode(ids)) != ids in general.

Here `template.py` renders a conversation in which placeholders stand for the contents, or for those
parts of them that spell a control token: its *skeleton*. The control tokens of a skeleton become
ids. Each stretch of text between two control tokens, template and contents joined, is encoded as
*data*. So each token that the agent did not sample is the one that `apply_chat_template` gives.
Later turns are encoded as continuations, and sampled ids are never touched. `probe.py`
compares both ways when a model is opened, and refuses a template for which they differ.

A template may also enclose data in tags of ordinary tokens, such as `<tool_response>` in Qwen2.5's
vocabulary. The template's own tags stay whole; the same tag inside data is split.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Protocol

from agent_r1.chat.template import PLACEHOLDER, Template
from agent_r1.chat.turn_ends import find_turn_ends
from agent_r1.core import Message, Observation
from agent_r1.ground.errors import ConfigError


class TurnForm(Protocol):
    """What an encoder asks a dialect (`env/dialect.py`) about a turn."""

    @property
    def tag_words(self) -> frozenset[str]: ...

    def tag_places(self, turn: str) -> list[tuple[int, int]]: ...

    def end_token(self, turn: str) -> str | None: ...


class ChatFormat:
    """Encoder of observations for one fast Hugging Face tokenizer with a chat template."""

    def __init__(self, tokenizer, end_ids: Iterable[int] = (), template: type[Template] = Template):
        """Take `end_ids`, more tokens that end a turn of this model (`tokenizer.load_chat`).

        `template`: how its chat template is rendered; `study.py` has the way for a stranger's.
        """
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                f"the tokenizer of {getattr(tokenizer, 'name_or_path', '?')!r} has no chat "
                "template; use an instruct model, or set tokenizer.chat_template and save it again",
                code="no_chat_template",
            )
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigError(
                "only fast tokenizers (tokenizer.json) are supported; convert this tokenizer first",
                code="slow_tokenizer",
            )
        self.tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        # tokenizer.json may say that texts are cut at 512 tokens, or filled up. `transformers`
        # ignores that until it is told otherwise, and so do we.
        self._backend.no_truncation()
        self._backend.no_padding()
        self.template = template(tokenizer)
        """The chat template, as `probe.py` compares it."""
        self.control_ids = self.template.control_ids
        """Every special or added token that is no word of a text.

        Encoded data never contains one.
        """
        # Text may have characters that the vocabulary lacks.
        self._control_set = frozenset(self.control_ids.values()) - {tokenizer.unk_token_id}
        # A skeleton's parts, which are looked up here, are numbers or text.
        self._spelling: dict[int | str, str] = {
            index: token for token, index in self.control_ids.items()
        }
        # A control token that takes no blanks next to it: text is encoded after it.
        plain: list[str] = []
        for token in tokenizer.added_tokens_decoder.values():
            if token.content in self.control_ids and not (token.lstrip or token.rstrip):
                plain.append(token.content)
        self._fence = plain[0] if plain else ""
        # Samples of one prompt share it, and often a tool's result.
        self._data_ids = functools.lru_cache(maxsize=1024)(self._encode_data)
        self.turn_end_id = self._end_before("user")
        """The control token after an assistant turn in the template: `<|im_end|>` for Qwen. For GLM
        it is the token that begins the user's turn."""
        template_ends = {self.turn_end_id}
        with contextlib.suppress(ConfigError):  # a template may take no results
            template_ends.add(self._end_before("tool"))
        model_ends = (tokenizer.eos_token_id, *end_ids)
        self.ends = find_turn_ends(self.control_ids, template_ends, model_ends)
        """All tokens that end a turn: one for Qwen, several for a few other families."""
        self.stop_ids = self.ends.stop
        """Sampling one of these ends the turn, for every policy."""
        parts, _ = self.template.prompt([{"role": "user", "content": "?"}])
        prompt = "".join(self._spelling[p] if isinstance(p, int) else p for p in parts)
        thought = re.search(r"<think>\s*\Z", prompt)
        self.opening = thought[0] if thought else ""
        """The template's own beginning of each agent turn: `<think>` for some thinking models."""

    def _end_before(self, role: str) -> int:
        """Return the control token after an agent's turn, if a message of this role follows."""
        parts, _ = self.template.continuation([{"role": role, "content": "?"}])
        if not parts or not isinstance(parts[0], int):
            raise ConfigError(
                f"the chat template of {self.template.model} does not close an assistant turn with "
                "a control token; use an instruct model with another template",
                code="template_leaves_turns_open",
            )
        return parts[0]

    # --------------------------------------------------------------------------------- observations

    @functools.cached_property
    def longest_token(self) -> int:
        """Characters of the vocabulary's longest token. No token covers more of a text."""
        return max(map(len, self._backend.get_vocab()))

    def prompt_ids(
        self, messages: list[Message], tools: list[dict[str, Any]] | None = None
    ) -> list[int]:
        """Encode a conversation up to the point where the assistant speaks."""
        # The template is rendered once per shape of a conversation: once for 128 first prompts.
        return self._fill(*self.template.prompt(messages, tools))

    def continuation_ids(
        self,
        messages: list[Message],
        *,
        calls: Sequence[str] = (),
        tools: list[dict[str, Any]] | None = None,
    ) -> list[int]:
        """Encode what follows a turn without its end: that, `messages`, and the next opening.

        `messages` are tool results or a user's message. The first token closes the assistant's
        turn. `calls`: names of the calls that the messages answer. `tools`: as in the prompt.
        """
        return self._fill(*self.template.continuation(messages, tools, calls))

    def reply_ids(self, action_ids: list[int], reply: Observation) -> list[int]:
        """Encode what follows the sampled turn `action_ids`."""
        ids = self.continuation_ids(reply.messages, calls=reply.calls, tools=reply.tools)
        # A turn is closed once. If the policy sampled its end, that is an action already: a second
        # one would close an empty turn. Else it is added here, as part of the observation, because
        # the policy did not choose it (lesson 3).
        return ids[1:] if self.ends.is_closed(action_ids, ids[0]) else ids

    def encode_data(self, text: str, template_tags: frozenset[int] = frozenset()) -> list[int]:
        """Encode text without control tokens, and split any tag of the template inside it.

        `template_tags`: offsets in `text` of the template's own tags, which stay whole.
        """
        return list(self._data_ids(text, template_tags, self._fence, ""))

    def _encode_data(
        self, text: str, template_tags: frozenset[int], before: str, after: str
    ) -> tuple[int, ...]:
        """`before`, `after`: the control tokens next to the text, or nothing."""
        # Cut a control token's characters in two. Whole, `<|im_end|>` on a web page would become
        # the token, end the tool's turn and let the page speak as the user (lesson 2).
        cuts, start = [0], 0
        while match := self.template.guard_pattern.search(text, start):
            start = match.start() + 1
            if match[0] in self.control_ids:
                # The tokenizer finds control tokens within one string only, so one cut is enough.
                cuts.append(start)
            elif match.start() not in template_tags:
                # A tag of ordinary tokens is split everywhere. The template's own stays whole: cut,
                # it would have other ids.
                cuts += range(start, match.end())
        ids: list[int] = []
        for begin, end in pairwise([*sorted(set(cuts)), len(text)]):
            fence_before = before if begin == 0 else self._fence
            fence_after = after if end == len(text) else ""
            ids += self._encode(text[begin:end], fence_before, fence_after)
        return tuple(ids)

    def encode_trusted(self, text: str) -> list[int]:
        """Encode text with its control tokens. Never use it for text from outside."""
        ids = self._backend.encode(self._fence + text, add_special_tokens=False).ids
        return ids[bool(self._fence) :]

    def turn_ids(self, text: str, dialect: TurnForm) -> list[int]:
        """Encode a turn that a demonstrator wrote or that was recorded, and its end token.

        Only the tags that give the turn its form (`Dialect.tag_places`) become control tokens. The
        rest is data: a demonstrator may quote a web page.
        """
        # A thinking model's prompt ends with `<think>`, so its turn begins after it.
        start = 0
        if self.opening and text.startswith("<think>"):
            start = len("<think>")
            rest = self.opening[start:]
            start += len(rest) if text.startswith(rest, start) else 0
        ids = self._encode_turn(text, start, dialect.tag_places(text))
        # Cloning a turn without its end token would teach the model never to end one.
        if ids and ids[-1] in self.stop_ids:
            return ids
        end = dialect.end_token(text) or ""
        return [*ids, self.control_ids.get(end, self.turn_end_id)]

    def foreign_token(self, text: str, dialect: TurnForm) -> str | None:
        """Return the first control token that a turn must not spell, or None."""
        places = set(dialect.tag_places(text))
        for match in self.template.control.finditer(text):
            if match.span() not in places and match[0] not in dialect.tag_words:
                return match[0]
        return None

    def _encode_turn(self, text: str, start: int, places: list[tuple[int, int]]) -> list[int]:
        """Encode a turn from `start` on; `places` are those of its tags."""
        spans = [match.span() for match in self.template.control.finditer(text, start)]
        places = [span for span in places if span in spans]
        tags = [self.control_ids[text[begin:end]] for begin, end in places]
        if places == spans:
            ids = self.encode_trusted(text[start:])
            if [i for i in ids if i in self._control_set] == tags:
                return ids
        # The text between two tags is encoded as data, in the context of those tags.
        ids = []
        before = self._fence
        for (begin, end), tag in zip(places, tags, strict=True):
            ids += self._encode_between(text[start:begin], before, text[begin:end])
            ids.append(tag)
            start = end
            before = text[begin:end]
        return ids + self._encode_between(text[start:], before, "")

    def _encode_between(self, text: str, before: str, after: str) -> list[int]:
        """Encode a stretch of a turn. Tags of ordinary tokens are the agent's own words."""
        matches = self.template.guard_pattern.finditer(text)
        own_words = {match.start() for match in matches if match[0] not in self.control_ids}
        return list(self._data_ids(text, frozenset(own_words), before, after))

    def decode(self, ids: list[int]) -> str:
        """Decode sampled ids, control tokens included, for parsing and display.

        Never encode the result.
        """
        return self._backend.decode(ids, skip_special_tokens=False)

    def turn_text(self, ids: list[int]) -> str:
        """Decode a sampled turn, with the template's opening and without the end token."""
        # The end token is no text: `finish_reason` tells whether the turn ended by itself.
        has_end_token = bool(ids) and ids[-1] in self.stop_ids
        return self.opening + self.decode(ids[:-1] if has_end_token else ids)

    # --------------------------------------------------------------------------------------- inside

    def _encode(self, text: str, before: str, after: str) -> list[int]:
        """Encode a text between two control tokens, and drop those.

        Alone, it could have other ids. Some tokenizers put a blank before the first word of a
        string, and a control token may take the blanks next to it (`rstrip`, `lstrip`).
        """
        # A lone surrogate (broken unicode from a web page) has no UTF-8 form: replace it.
        text = text.encode("utf-8", "replace").decode("utf-8") if not text.isascii() else text
        ids = self._backend.encode(before + text + after, add_special_tokens=False).ids
        fences = [self.control_ids[token] for token in (before, after) if token]
        # Normalisation can dissolve a control token: `>` and a combining stroke are one character.
        if fences != [*ids[: bool(before)], *ids[len(ids) - bool(after) :]]:
            return self._encode(text, "", "")
        ids = ids[bool(before) : len(ids) - bool(after)]
        if self._control_set.isdisjoint(ids):
            return ids
        # Normalisation (such as NFC) can still assemble a control token from similar characters:
        # encode each by itself.
        single: list[int] = []
        for character in text:
            single += self._backend.encode(character, add_special_tokens=False).ids
        return [i for i in single if i not in self._control_set]

    def _fill(self, skeleton: list[int | str], contents: list[str]) -> list[int]:
        """Fill the text runs of a skeleton with `contents`, and encode them as data."""
        ids: list[int] = []
        for place, part in enumerate(skeleton):
            if isinstance(part, int):
                ids.append(part)
                continue
            # Join first, encode then: at a seam, two pieces alone may have other ids than together.
            text = ""
            template_tags: set[int] = set()
            # Template text and numbers of placeholders alternate.
            for number, piece in enumerate(PLACEHOLDER.split(part)):
                if number % 2:
                    text += contents[int(piece)]
                    continue
                for tag in self.template.guard_pattern.finditer(piece):
                    template_tags.add(len(text) + tag.start())
                text += piece
            # Between two text runs there is always a control token.
            before = self._spelling[skeleton[place - 1]] if place else ""
            after = self._spelling[skeleton[place + 1]] if place + 1 < len(skeleton) else ""
            ids += self._data_ids(text, frozenset(template_tags), before, after)
        return ids
