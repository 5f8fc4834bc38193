"""Encode chat messages as token ids, and keep data from becoming control tokens.

In: messages from an environment. Out: the ids of an observation. Next: `env/base.py`; `episode.py` passes the ids to a policy.

An agent loop that calls `apply_chat_template(..., tokenize=True)` in each turn has two faults:

1. *Injection.* A tokenizer encodes the characters `<|im_end|>` as the control token, also inside a web page that a tool
   returned. The page can then close the turn and forge the user's next message.
2. *Re-tokenization.* Rendering the whole conversation again encodes what the model sampled a second time, and
   encode(decode(ids)) != ids in general.

Here the template is rendered once for each *shape* of a conversation (its roles), with a placeholder for each content.
The control tokens of this skeleton become ids. Each stretch of text between two control tokens, template and contents
joined, is encoded as *data*. Joined text gives the same ids as `apply_chat_template` for harmless contents (a test
compares them). Later turns are encoded as continuations, and sampled ids are never touched.

A template may also enclose data in tags of ordinary tokens, such as `<tool_response>` in Qwen2.5's vocabulary. The
template's own tags stay whole; the same tag inside data is split.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from agent_r1.core import Message
from agent_r1.ground.errors import ConfigError, first_line

# A placeholder is a number between two private-use characters, which no chat template has.
_OPEN, _CLOSE = "\ue0f0", "\ue0f1"
_PLACEHOLDER = re.compile(f"{_OPEN}(\\d+){_CLOSE}")
_BESIDE_DATA = re.compile(f"(<[^<>\\s]+>)\\s*(?={_OPEN})|(?<={_CLOSE})\\s*(<[^<>\\s]+>)")

TURN_ENDS = {"<|end|>": ("<|call|>", "<|return|>")}
"""Control token that ends a message, if a turn may have several -> the tokens that end the turn.

The vocabulary decides, not `env.name`: a model with these tokens was trained to end its turns with them.
"""

RENDER_S = 3.0
"""Limit for rendering a chat template, which takes milliseconds. A downloaded template could loop for ever."""
Skeleton = tuple[list[int | str], list[str]]


def _in_time() -> Callable[..., Any]:
    """Make a trace function (`sys.settrace`) that stops a template after `RENDER_S` seconds."""
    until: list[float] = []

    def line(frame: Any, event: str, arg: Any) -> Callable[..., Any] | None:
        if frame.f_code.co_filename != "<template>":  # Jinja's name for every template
            return None
        if not until:
            until.append(time.monotonic() + RENDER_S)
        elif time.monotonic() > until[0]:
            raise TimeoutError(f"not done after {RENDER_S:g} s")
        return line

    return line


def _any_of(words: Iterable[str]) -> re.Pattern:
    return re.compile("|".join(re.escape(word) for word in sorted(words, key=len, reverse=True)))


_PROBE = {
    "type": "function",
    "function": {"name": "probe_it", "description": "A tool.", "parameters": {"type": "object", "properties": {}}},
}


class ChatFormat:
    """Encoder of observations for one fast Hugging Face tokenizer with a chat template."""

    def __init__(self, tokenizer, end_ids: Iterable[int] = ()):
        """`end_ids`: more tokens that end a turn of this model (`tiny_model.load_chat`)."""
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                f"the tokenizer of {getattr(tokenizer, 'name_or_path', '?')!r} has no chat template; "
                "use an instruct model, or set tokenizer.chat_template and save it again",
                code="no_chat_template",
            )
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigError(
                "only fast tokenizers (tokenizer.json) are supported; convert this one first", code="slow_tokenizer"
            )
        self.tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self.control_ids: dict[str, int] = {
            token.content: index for index, token in tokenizer.added_tokens_decoder.items()
        }
        """Every special or added token. Encoded data never contains one."""
        self._control_set = frozenset(self.control_ids.values())
        self._control = _any_of(self.control_ids)
        self._guarded = _any_of({*self.control_ids, *self._tags_beside_data()})
        """What data must not spell: control tokens, and the tags in which the template encloses data."""
        self._skeletons: dict[tuple, Skeleton] = {}
        after_action, _ = self._skeleton(("user", "assistant"), None, continuation=True)
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
        # Not a stop: a token that closes one of several messages. The turn would stop after its thought.
        only_close = self._ids_of(token for token, ends in zip(TURN_ENDS, own_ends, strict=True) if ends)
        ends = {tokenizer.eos_token_id, *end_ids} | self.closing_ids
        self.stop_ids = tuple(sorted(ends - {None} - only_close))
        """Sampling one of these ends the turn, for every policy."""
        opening = "".join(p if isinstance(p, str) else self.decode([p]) for p in self._skeleton(("user",), None)[0])
        self._opened = re.search(r"(<think>\s*)?\Z", opening)[0]
        """The template's own beginning of each agent turn: `<think>` for some thinking models."""

    def _ids_of(self, tokens: Iterable[str]) -> set[int]:
        """Return the ids of those `tokens` that are control tokens of the vocabulary."""
        return {self.control_ids[token] for token in tokens if token in self.control_ids}

    def check_tools(self) -> None:
        """Raise ConfigError if the template does not show tools to the model."""
        self.prompt_ids([{"role": "user", "content": ""}], [_PROBE])

    # -------------------------------------------------------------------------------------------- observations

    def prompt_ids(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Encode a conversation up to the point where the assistant speaks."""
        roles = tuple(m["role"] for m in messages)
        skeleton, spelled = self._skeleton(roles, tools)
        return self._fill(skeleton, [m["content"] for m in messages] + spelled)

    def continuation_ids(self, messages: list[Message], *, closed: bool) -> list[int]:
        """Encode what follows an assistant turn: `messages` (such as tool results) and the next opening.

        `closed`: the action already ends with the turn's end token, because the policy sampled it. Otherwise that token
        is added here, as part of the observation.
        """
        roles = ("user", "assistant", *(m["role"] for m in messages))
        skeleton, _ = self._skeleton(roles, None, continuation=True)
        return self._fill(skeleton[1:] if closed else skeleton, ["", "", *(m["content"] for m in messages)])

    def encode_data(self, text: str, template_tags: frozenset[int] = frozenset()) -> list[int]:
        """Encode text without control tokens, and split any tag of the template inside it.

        `template_tags`: offsets in `text` of the template's own tags, which stay whole.
        """
        cuts, start = [0], 0
        while match := self._guarded.search(text, start):
            start = match.start() + 1
            if match[0] in self.control_ids:
                # The tokenizer finds control tokens within one string only, so one cut is enough.
                cuts.append(start)
            elif match.start() not in template_tags:  # the template's own tag stays whole: cut, it would have other ids
                cuts += range(start, match.end())
        pieces = itertools.pairwise([*sorted(set(cuts)), len(text)])
        return [i for begin, end in pieces for i in self._encode(text[begin:end])]

    def encode_trusted(self, text: str) -> list[int]:
        """Encode text with its control tokens (a demonstrator's turn). Never use it for text from outside."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def turn_ids(self, text: str, end: str | None = None) -> list[int]:
        """Encode a demonstrator's turn and its end token.

        `end`: the dialect's end token (`Dialect.end_token`), used if the vocabulary has it.
        """
        ids = self.encode_trusted(text)
        return ids if ids and ids[-1] in self.stop_ids else [*ids, self.control_ids.get(end, self.turn_end_id)]

    def decode(self, ids: list[int]) -> str:
        """Decode sampled ids, control tokens included, for parsing and display. Never encode the result."""
        return self._backend.decode(ids, skip_special_tokens=False)

    def turn_text(self, ids: list[int]) -> str:
        """Decode a sampled turn, with the template's opening and without the end token."""
        ended = bool(ids) and ids[-1] in self.stop_ids
        return self._opened + self.decode(ids[:-1] if ended else ids)

    # ------------------------------------------------------------------------------------------------- inside

    def _encode(self, text: str) -> list[int]:
        # A lone surrogate (broken unicode from a web page) has no UTF-8 form: replace it.
        text = text.encode("utf-8", "replace").decode("utf-8") if not text.isascii() else text
        ids = self._backend.encode(text, add_special_tokens=False).ids
        if not any(i in self._control_set for i in ids):
            return ids
        # Normalisation (such as NFC) can still assemble a control token from similar characters: encode each by itself.
        single = (i for c in text for i in self._backend.encode(c, add_special_tokens=False).ids)
        return [i for i in single if i not in self._control_set]

    def _fill(self, skeleton: list[int | str], contents: list[str]) -> list[int]:
        """Fill the text runs of a skeleton with `contents`, and encode them as data."""
        ids: list[int] = []
        for part in skeleton:
            if isinstance(part, int):
                ids.append(part)
                continue
            text, template_tags = "", set()
            for number, piece in enumerate(_PLACEHOLDER.split(part)):  # template text and placeholders alternate
                if number % 2:
                    text += str(contents[int(piece)])
                else:
                    template_tags |= {len(text) + tag.start() for tag in self._guarded.finditer(piece)}
                    text += piece
            ids += self.encode_data(text, frozenset(template_tags))
        return ids

    def _render(self, roles: tuple[str, ...], tools=None) -> str:
        """Render the template for these roles, with a placeholder for each content."""
        messages = [{"role": role, "content": f"{_OPEN}{i}{_CLOSE}"} for i, role in enumerate(roles)]
        # Without thinking, Qwen3's template opens each turn with an empty thought. Thinking would use up a turn of a
        # few hundred tokens. Other templates ignore the argument.
        before = sys.gettrace()
        sys.settrace(_in_time())
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=True, tokenize=False, enable_thinking=False
            )
        except Exception as error:  # a template is a program that came with the model
            raise ConfigError(
                f"the chat template of {getattr(self.tokenizer, 'name_or_path', '?')!r} cannot be rendered "
                f"({type(error).__name__}: {first_line(error)}); take an instruct model with another template",
                code="broken_template",
            ) from None
        finally:
            sys.settrace(before)

    def _tags_beside_data(self) -> set[str]:
        """Find each literal `<...>` that the template puts directly before or after a content."""
        tags: set[str] = set()
        for roles in (("user", "assistant"), ("system", "user"), ("user", "assistant", "tool", "tool")):
            with contextlib.suppress(ConfigError):  # a template may refuse a role
                tags |= {tag for pair in _BESIDE_DATA.findall(self._render(roles)) for tag in pair if tag}
        return tags

    def _skeleton(self, roles: tuple[str, ...], tools, continuation: bool = False) -> Skeleton:
        """Return control ids and text runs (with placeholders) for these roles, rendered once and cached.

        `continuation` keeps only what follows message 1, the assistant's. The second result is every control token or
        tag spelled in the descriptions of `tools`: data, whose placeholders follow those of the messages.
        """
        key = (roles, json.dumps(tools) if tools else None, continuation)
        if key not in self._skeletons:
            spelled: list[str] = []

            def mark(match: re.Match) -> str:
                spelled.append(match[0])
                return f"{_OPEN}{len(roles) + len(spelled) - 1}{_CLOSE}"

            hostile = re.compile(f"{self._guarded.pattern}|{_OPEN}|{_CLOSE}")
            tools = tools and json.loads(hostile.sub(mark, json.dumps(tools, ensure_ascii=False)))
            text = self._render(roles, tools)
            missing = [i for i in range(len(roles)) if f"{_OPEN}{i}{_CLOSE}" not in text]
            if missing:
                raise ConfigError(
                    f"the chat template drops message {missing[0]} (role {roles[missing[0]]!r})",
                    code="template_drops_messages",
                )
            bare = self._render(roles) if tools else ""
            for name in (tool["function"]["name"] for tool in tools or ()):
                if text.count(name) <= bare.count(name):
                    raise ConfigError(
                        f"the chat template of {getattr(self.tokenizer, 'name_or_path', '?')!r} shows the model no tools, so it "
                        "would never hear of them; take a model whose template does, tell it in the prompt (env.name=react), or go "
                        "without: env.tools=[]",
                        code="template_shows_no_tools",
                    )
            if continuation:
                text = text[text.index(f"{_OPEN}1{_CLOSE}") + len(f"{_OPEN}1{_CLOSE}") :]
            self._skeletons[key] = self._split(text), spelled
        return self._skeletons[key]

    def _split(self, text: str) -> list[int | str]:
        parts: list[int | str] = []
        start = 0
        for match in self._control.finditer(text):
            if match.start() > start:
                parts.append(text[start : match.start()])
            parts.append(self.control_ids[match[0]])
            start = match.end()
        return parts + ([text[start:]] if start < len(text) else [])
