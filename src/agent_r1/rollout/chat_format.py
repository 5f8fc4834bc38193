"""Encode chat messages as token ids, and keep data from becoming control tokens.

In: messages from an environment. Out: the ids of an observation. Next: `env/base.py`; `episode.py`
passes the ids to a policy.

An agent loop that calls `apply_chat_template(..., tokenize=True)` in each turn has two faults:

1. *Injection.* A tokenizer encodes the characters `<|im_end|>` as the control token, also inside a
   web page that a tool returned. The page can then close the turn and forge the user's next
   message.
2. *Re-tokenization.* Rendering the whole conversation again encodes what the model sampled a second
   time, and encode(decode(ids)) != ids in general.

Here the template is rendered once for each *shape* of a conversation (its roles), with a
placeholder for each content: its *skeleton* (`template.py`). The control tokens of a skeleton
become ids. Each stretch of text between two control tokens, template and contents joined, is
encoded as *data*. Joined text gives the same ids as `apply_chat_template` for harmless contents (a
test compares them). Later turns are encoded as continuations, and sampled ids are never touched.

A template may also enclose data in tags of ordinary tokens, such as `<tool_response>` in Qwen2.5's
vocabulary. The template's own tags stay whole; the same tag inside data is split.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable
from typing import Any

from agent_r1.core import Message
from agent_r1.ground.errors import ConfigError
from agent_r1.rollout.template import PLACEHOLDER, Template

TURN_ENDS = {"<|end|>": ("<|call|>", "<|return|>")}
"""Control token that ends a message, if a turn may have several -> the tokens that end the turn.

The vocabulary decides, not `env.name`: a model with these tokens was trained to end its turns with
them.
"""

_PROBE = {
    "type": "function",
    "function": {
        "name": "probe_it",
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {}},
    },
}


class ChatFormat:
    """Encoder of observations for one fast Hugging Face tokenizer with a chat template."""

    def __init__(self, tokenizer, end_ids: Iterable[int] = ()):
        """`end_ids`: more tokens that end a turn of this model (`tiny_model.load_chat`)."""
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                f"the tokenizer of {getattr(tokenizer, 'name_or_path', '?')!r} has no chat "
                "template; "
                "use an instruct model, or set tokenizer.chat_template and save it again",
                code="no_chat_template",
            )
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigError(
                "only fast tokenizers (tokenizer.json) are supported; convert this tokenizer first",
                code="slow_tokenizer",
            )
        self.tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self.control_ids: dict[str, int] = {
            token.content: index for index, token in tokenizer.added_tokens_decoder.items()
        }
        """Every special or added token. Encoded data never contains one."""
        self._control_set = frozenset(self.control_ids.values())
        # Samples of one prompt share it, and often a tool's result.
        self._data_ids = functools.lru_cache(maxsize=1024)(self._encode_data)
        self._template = Template(tokenizer, self.control_ids)
        # What the template adds after an assistant turn begins with the token that closes the turn:
        # `<|im_end|>` and a line break in Qwen's.
        after_action, _ = self._template.skeleton(("user", "assistant"), None, continuation=True)
        if not after_action or not isinstance(after_action[0], int):
            raise ConfigError(
                "the chat template does not close an assistant turn with a control token",
                code="template_leaves_turns_open",
            )
        self.turn_end_id: int = after_action[0]
        """The control token after an assistant turn in the template (`<|im_end|>` for Qwen)."""
        own_ends = [self._ids_of(tokens) for tokens in TURN_ENDS.values()]
        self.closing_ids = {self.turn_end_id}.union(*own_ends)
        """The template's end is not added to a turn that ends with one of these."""
        # Not a stop: a token that closes one of several messages. The turn would stop after its
        # thought.
        only_close = self._ids_of(
            token for token, ends in zip(TURN_ENDS, own_ends, strict=True) if ends
        )
        ends = {tokenizer.eos_token_id, *end_ids} | self.closing_ids
        self.stop_ids = tuple(sorted(ends - {None} - only_close))
        """Sampling one of these ends the turn, for every policy."""
        opening = "".join(
            p if isinstance(p, str) else self.decode([p])
            for p in self._template.skeleton(("user",), None)[0]
        )
        self._opened = re.search(r"(<think>\s*)?\Z", opening)[0]
        """The template's own beginning of each agent turn: `<think>` for some thinking models."""

    def _ids_of(self, tokens: Iterable[str]) -> set[int]:
        """Return the ids of those `tokens` that are control tokens of the vocabulary."""
        return {self.control_ids[token] for token in tokens if token in self.control_ids}

    def check_tools(self) -> None:
        """Raise ConfigError if the template does not show tools to the model."""
        self.prompt_ids([{"role": "user", "content": ""}], [_PROBE])

    # --------------------------------------------------------------------------------- observations

    def prompt_ids(
        self, messages: list[Message], tools: list[dict[str, Any]] | None = None
    ) -> list[int]:
        """Encode a conversation up to the point where the assistant speaks."""
        # A skeleton depends on the roles and tools only: 128 episodes render the template once.
        roles = tuple(m["role"] for m in messages)
        skeleton, spelled = self._template.skeleton(roles, tools)
        return self._fill(skeleton, [m["content"] for m in messages] + spelled)

    def continuation_ids(self, messages: list[Message], *, closed: bool) -> list[int]:
        """Encode what follows an assistant turn: `messages` (such as tool results) and the next
        opening.

        `closed`: the action already ends with the turn's end token, because the policy sampled it.
        Otherwise that token is added here, as part of the observation.
        """
        roles = ("user", "assistant", *(m["role"] for m in messages))
        skeleton, _ = self._template.skeleton(roles, None, continuation=True)
        # The first part of a continuation closes the turn. If the policy sampled that token, it is
        # an action already: a second one would end a turn that nobody began (lesson 3).
        return self._fill(
            skeleton[1:] if closed else skeleton, ["", "", *(m["content"] for m in messages)]
        )

    def encode_data(self, text: str, template_tags: frozenset[int] = frozenset()) -> list[int]:
        """Encode text without control tokens, and split any tag of the template inside it.

        `template_tags`: offsets in `text` of the template's own tags, which stay whole.
        """
        return list(self._data_ids(text, template_tags))

    def _encode_data(self, text: str, template_tags: frozenset[int]) -> tuple[int, ...]:
        # Cut a control token's characters in two. Whole, `<|im_end|>` on a web page would become
        # the token, end the tool's turn and let the page speak as the user (lesson 2).
        cuts, start = [0], 0
        while match := self._template.guarded.search(text, start):
            start = match.start() + 1
            if match[0] in self.control_ids:
                # The tokenizer finds control tokens within one string only, so one cut is enough.
                cuts.append(start)
            elif (
                match.start() not in template_tags
            ):  # the template's own tag stays whole: cut, it would have other ids
                cuts += range(start, match.end())
        pieces = itertools.pairwise([*sorted(set(cuts)), len(text)])
        return tuple(i for begin, end in pieces for i in self._encode(text[begin:end]))

    def encode_trusted(self, text: str) -> list[int]:
        """Encode text with its control tokens (a demonstrator's turn). Never use it for text from
        outside."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def turn_ids(self, text: str, end: str | None = None) -> list[int]:
        """Encode a demonstrator's turn and its end token.

        `end`: the dialect's end token (`Dialect.end_token`), used if the vocabulary has it.
        """
        # Cloning a turn without its end token would teach the model never to end one.
        ids = self.encode_trusted(text)
        return (
            ids
            if ids and ids[-1] in self.stop_ids
            else [*ids, self.control_ids.get(end, self.turn_end_id)]
        )

    def decode(self, ids: list[int]) -> str:
        """Decode sampled ids, control tokens included, for parsing and display. Never encode the
        result."""
        return self._backend.decode(ids, skip_special_tokens=False)

    def turn_text(self, ids: list[int]) -> str:
        """Decode a sampled turn, with the template's opening and without the end token."""
        # The end token is no text: `finish_reason` tells whether the turn ended by itself.
        ended = bool(ids) and ids[-1] in self.stop_ids
        return self._opened + self.decode(ids[:-1] if ended else ids)

    # --------------------------------------------------------------------------------------- inside

    def _encode(self, text: str) -> list[int]:
        # A lone surrogate (broken unicode from a web page) has no UTF-8 form: replace it.
        text = text.encode("utf-8", "replace").decode("utf-8") if not text.isascii() else text
        ids = self._backend.encode(text, add_special_tokens=False).ids
        if not any(i in self._control_set for i in ids):
            return ids
        # Normalisation (such as NFC) can still assemble a control token from similar characters:
        # encode each by itself.
        single = (i for c in text for i in self._backend.encode(c, add_special_tokens=False).ids)
        return [i for i in single if i not in self._control_set]

    def _fill(self, skeleton: list[int | str], contents: list[str]) -> list[int]:
        """Fill the text runs of a skeleton with `contents`, and encode them as data."""
        ids: list[int] = []
        for part in skeleton:
            if isinstance(part, int):
                ids.append(part)
                continue
            # Join first, encode then: at a seam, two pieces alone may have other ids than together.
            text, template_tags = "", set()
            for number, piece in enumerate(
                PLACEHOLDER.split(part)
            ):  # template text and placeholders alternate
                if number % 2:
                    text += str(contents[int(piece)])
                else:
                    template_tags |= {
                        len(text) + tag.start() for tag in self._template.guarded.finditer(piece)
                    }
                    text += piece
            ids += self.encode_data(text, frozenset(template_tags))
        return ids
