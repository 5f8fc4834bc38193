"""Chat messages to token ids, so that text stays data.

In: messages from an environment. Out: the ids of an observation. Next: `episode.py` hands them to a policy.

Two things go wrong when one simply calls `apply_chat_template(..., tokenize=True)` in an agent loop:

1. *Injection.* A tokenizer turns the characters `<|im_end|>` into the control token wherever they stand, also inside a
   web page that a tool returned. Whoever writes the page can then close the turn and forge the user's next one.
2. *Re-tokenization.* Rendering the whole conversation again in each turn re-encodes what the model sampled, and
   encode(decode(ids)) != ids in general.

So this module renders the template only once for each *shape* of a conversation (the roles, not the words), with a
placeholder for each content. The control tokens of the rendered skeleton become ids; every stretch of text between
two control tokens, template text and contents joined, is encoded as *data*. Joining before encoding matters: it gives
the same ids as `apply_chat_template` for harmless contents (a test compares them). Later turns are encoded as
continuations, so that sampled ids are never touched.

A template may also mark the place of data with words that are no control token: in Qwen2.5's vocabulary
`<tool_response>` is spelled in ordinary ones. The template's own tags stay as they are; in data they are broken up.
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

# A placeholder is a number between two private-use characters, which no chat template contains.
_OPEN, _CLOSE = "\ue0f0", "\ue0f1"
_PLACEHOLDER = re.compile(f"{_OPEN}(\\d+){_CLOSE}")
_BESIDE_DATA = re.compile(f"(<[^<>\\s]+>)\\s*(?={_OPEN})|(?<={_CLOSE})\\s*(<[^<>\\s]+>)")

TURN_ENDS = {"<|end|>": ("<|call|>", "<|return|>")}
"""Control token that closes one of several messages in a turn -> those that end such a turn.

A model with these tokens was trained so, and ends its turns so whatever `env.name` is: the vocabulary decides.
"""

RENDER_S = 3.0
"""Within which a chat template must be rendered; it takes milliseconds, and a loop of a stranger's need not end."""
Skeleton = tuple[list[int | str], list[str]]


def _in_time() -> Callable[..., Any]:
    """Make a trace function (`sys.settrace`) that ends a template `RENDER_S` seconds after its first line."""
    until: list[float] = []

    def line(frame: Any, event: str, arg: Any) -> Callable[..., Any] | None:
        if frame.f_code.co_filename != "<template>":  # Jinja's name for all of them
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
    """Encodes observations for one tokenizer (any fast Hugging Face tokenizer that has a chat template)."""

    def __init__(self, tokenizer, end_ids: Iterable[int] = ()):
        """`end_ids`: tokens that end a turn for this model beside the tokenizer's own (see `tiny_model.load_chat`)."""
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
        """Every special or added token: what must never come out of encoding data."""
        self._control_set = frozenset(self.control_ids.values())
        self._control = _any_of(self.control_ids)
        self._guarded = _any_of({*self.control_ids, *self._tags_beside_data()})
        """What data must not spell: control tokens, and the tags by which the template marks where data stand."""
        self._skeletons: dict[tuple, Skeleton] = {}
        after_action, _ = self._skeleton(("user", "assistant"), None, continuation=True)
        if not after_action or not isinstance(after_action[0], int):
            raise ConfigError(
                "the chat template does not close an assistant turn with a control token",
                code="template_leaves_turns_open",
            )
        self.turn_end_id: int = after_action[0]
        """The control token that the template writes after an assistant turn (`<|im_end|>` for Qwen)."""
        own_ends = [self._ids_of(tokens) for tokens in TURN_ENDS.values()]
        self.closing_ids = {self.turn_end_id}.union(*own_ends)
        """Turns that end with one of these get no end of the template's added."""
        # A policy that stopped where a message of several ends would stop after its thought, before it calls or answers.
        only_close = self._ids_of(token for token, ends in zip(TURN_ENDS, own_ends, strict=True) if ends)
        ends = {tokenizer.eos_token_id, *end_ids} | self.closing_ids
        self.stop_ids = tuple(sorted(ends - {None} - only_close))
        """Whichever of these is sampled ends the turn, for every policy."""
        opening = "".join(p if isinstance(p, str) else self.decode([p]) for p in self._skeleton(("user",), None)[0])
        self._opened = re.search(r"(<think>\s*)?\Z", opening)[0]
        """What the template itself writes at the beginning of each turn of the agent: for some thinking models `<think>`."""

    def _ids_of(self, tokens: Iterable[str]) -> set[int]:
        """The ids of those `tokens` that are control tokens of the vocabulary."""
        return {self.control_ids[token] for token in tokens if token in self.control_ids}

    def check_tools(self) -> None:
        """Raises ConfigError where the template shows an agent no tools: it would never hear of them."""
        self.prompt_ids([{"role": "user", "content": ""}], [_PROBE])

    # -------------------------------------------------------------------------------------------- observations

    def prompt_ids(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> list[int]:
        """The ids of a whole conversation that ends where the assistant is to speak."""
        roles = tuple(m["role"] for m in messages)
        skeleton, spelled = self._skeleton(roles, tools)
        return self._fill(skeleton, [m["content"] for m in messages] + spelled)

    def continuation_ids(self, messages: list[Message], *, closed: bool) -> list[int]:
        """The ids that follow an assistant turn: `messages` (tool results, a user's reply) and the next opening.

        `closed` says whether the action already ends with the turn's end token. If the policy sampled it, it belongs to
        the action; if not, it is added here, as an observation that nobody is trained on.
        """
        roles = ("user", "assistant", *(m["role"] for m in messages))
        skeleton, _ = self._skeleton(roles, None, continuation=True)
        return self._fill(skeleton[1:] if closed else skeleton, ["", "", *(m["content"] for m in messages)])

    def encode_data(self, text: str, own: frozenset[int] = frozenset()) -> list[int]:
        """Encode text so that no control token comes out, nor a tag of the template's as the template writes it.

        `own`: where in `text` the template's own tags begin.
        """
        cuts, start = [0], 0
        while match := self._guarded.search(text, start):
            start = match.start() + 1
            if match[0] in self.control_ids:
                # One cut is enough: the tokenizer matches control tokens within one string only, so a piece of one is
                # ordinary text to it.
                cuts.append(start)
            elif match.start() not in own:  # ordinary text as it is: spelled by the character, it has other ids
                cuts += range(start, match.end())
        pieces = itertools.pairwise([*sorted(set(cuts)), len(text)])
        return [i for begin, end in pieces for i in self._encode(text[begin:end])]

    def encode_trusted(self, text: str) -> list[int]:
        """Encode text in which control tokens are meant (a demonstrator's turn). Never for text from outside."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def turn_ids(self, text: str, end: str | None = None) -> list[int]:
        """Encode a whole turn of a demonstrator's, with the token that ends it.

        `end`: that token, where the dialect says so (`Dialect.end_of`) and the vocabulary has it.
        """
        ids = self.encode_trusted(text)
        return ids if ids and ids[-1] in self.stop_ids else [*ids, self.control_ids.get(end, self.turn_end_id)]

    def decode(self, ids: list[int]) -> str:
        """The text of sampled ids, control tokens visible. For parsing and display; never encode the result."""
        return self._backend.decode(ids, skip_special_tokens=False)

    def turn_text(self, ids: list[int]) -> str:
        """A sampled turn as its reader should see it: with the thought that the template opened in its place, without
        the token that ended it."""
        ended = bool(ids) and ids[-1] in self.stop_ids
        return self._opened + self.decode(ids[:-1] if ended else ids)

    # ------------------------------------------------------------------------------------------------- inside

    def _encode(self, text: str) -> list[int]:
        # A lone surrogate (broken unicode from a web page) cannot be encoded as UTF-8: replace it.
        text = text.encode("utf-8", "replace").decode("utf-8") if not text.isascii() else text
        ids = self._backend.encode(text, add_special_tokens=False).ids
        if not any(i in self._control_set for i in ids):
            return ids
        # Normalisation (NFC and the like) can still assemble a control token out of look-alikes: go by character.
        single = (i for c in text for i in self._backend.encode(c, add_special_tokens=False).ids)
        return [i for i in single if i not in self._control_set]

    def _fill(self, skeleton: list[int | str], contents: list[str]) -> list[int]:
        """Skeleton to ids: control ids stay, each text run is filled with the contents and encoded as data."""
        ids: list[int] = []
        for part in skeleton:
            if isinstance(part, int):
                ids.append(part)
                continue
            text, own = "", set()
            for number, piece in enumerate(_PLACEHOLDER.split(part)):  # the template's words and numbers by turns
                if number % 2:
                    text += str(contents[int(piece)])
                else:
                    own |= {len(text) + tag.start() for tag in self._guarded.finditer(piece)}
                    text += piece
            ids += self.encode_data(text, frozenset(own))
        return ids

    def _render(self, roles: tuple[str, ...], tools=None) -> str:
        """The template's text of a conversation with these roles, a placeholder in the place of each content."""
        messages = [{"role": role, "content": f"{_OPEN}{i}{_CLOSE}"} for i, role in enumerate(roles)]
        # Qwen3 without its own thinking mode: its template then opens each turn with an empty thought, and a turn of
        # some hundred tokens is not used up by thinking. Other templates do not know the word.
        before = sys.gettrace()
        sys.settrace(_in_time())
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=True, tokenize=False, enable_thinking=False
            )
        except Exception as error:  # a template is a program, which came with the model
            raise ConfigError(
                f"the chat template of {getattr(self.tokenizer, 'name_or_path', '?')!r} cannot be rendered "
                f"({type(error).__name__}: {first_line(error)}); take an instruct model with another template",
                code="broken_template",
            ) from None
        finally:
            sys.settrace(before)

    def _tags_beside_data(self) -> set[str]:
        """Each literal `<...>` that the template puts directly before or behind a content."""
        tags: set[str] = set()
        for roles in (("user", "assistant"), ("system", "user"), ("user", "assistant", "tool", "tool")):
            with contextlib.suppress(ConfigError):  # a template may refuse a role, and then it has no tags for it
                tags |= {tag for pair in _BESIDE_DATA.findall(self._render(roles)) for tag in pair if tag}
        return tags

    def _skeleton(self, roles: tuple[str, ...], tools, continuation: bool = False) -> Skeleton:
        """Control ids and text runs (with placeholders) of a conversation with these roles; rendered once, then kept.

        With `continuation`, only what follows the content of message 1 (the assistant's). The second of the pair is what
        the descriptions of `tools` spell of control tokens and tags: they are data too, and get placeholders behind
        those of the messages.
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
