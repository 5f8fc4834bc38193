"""Play the model's side of one episode: answer the calls of an agent.

In: requests of the agent. Out: answers, and at the end the trajectory. `flow.py` starts the agent.

Call number t of a conversation gets the noise of turn t in our loop, `derive_seed(seed, t)`. So an
agent that asks as our loop does gets the same tokens, to the bit.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import re
import secrets
import unicodedata
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from agent_r1 import (
    AgentR1Error,
    ChatFormat,
    Generation,
    Hermes,
    Policy,
    Sampling,
    Task,
    ToolCall,
    check_reward,
    derive_seed,
    first_line,
)
from agent_r1_recipes.gateway.matching import Answer, Conversations, fewest_tokens, prompt_of
from agent_r1_recipes.gateway.server import Reply, Request
from agent_r1_recipes.gateway.wire import (
    Call,
    Refusal,
    Turn,
    answer_body,
    parse_body,
    read_call,
    usage_of,
)


class GatewayEpisode:
    """One episode: its keys, its conversations, its reward."""

    def __init__(
        self,
        task: Task,
        sampling: Sampling,
        policy: Policy,
        chat: ChatFormat,
        dialect: Hermes,
        max_context: int,
        env: Any,
    ):
        self.task = task
        self.sampling = sampling
        self.policy = policy
        self.chat = chat
        self.dialect = dialect
        self.max_context = max_context
        self.env = env
        self.key = secrets.token_urlsafe(24)
        self.reward_key = secrets.token_urlsafe(24)
        self.conversations = Conversations()
        self.events: Counter[str] = Counter()
        """What was overridden, ignored or refused, by kind."""
        self.reward: float | None = None
        self.over = False
        """After the reward or the agent's end, nothing is sampled any more."""
        self.refusals: list[str] = []
        """Why requests were refused, in words."""
        self.argument: str | None = None
        """The agent's answer, if it is the argument of a sampled call."""
        self.has_overflow = False
        """Whether a call was refused because the context was full."""
        self.failure: BaseException | None = None
        """Of the policy; it ends the run, not only the call."""
        self.generations: list[tuple[list[int], Generation]] = []
        """Everything that the policy returned, for `books.py`."""
        self._running: set[asyncio.Task[None]] = set()
        # One call at a time: an episode has one slot in the sampler, with the cache of its
        # conversation. With a slot per call, episodes could wait for each other's slots for ever.
        self._turn = asyncio.Lock()

    # ------------------------------------------------------------------------------------ the calls

    async def complete(self, request: Request) -> Reply:
        """Answer a request for a completion. Raise Refusal if there is no answer."""
        call = read_call(request.body)
        names = [f"overridden_{name}" for name in call.overridden_names]
        names += [f"ignored_{name}" for name in call.ignored_names]
        count_names(self.events, Counter(names))
        if self.over or self.reward is not None:
            self.events["late_calls"] += 1
            raise Refusal("this episode is over: its reward is known", 401, "episode_over")
        # Before anything looks at the messages one by one: they hold the sampler's event loop.
        least = fewest_tokens(call.messages, self.chat)
        if least >= self.max_context:
            raise self._overflow(f"at least {least}")
        place = self.conversations.locate(call.messages, call.tools)
        key = json.dumps([place.digest, call.max_tokens, call.stop])
        answer = self._find_retry(key, request)
        if answer is None:
            ids = self._prompt(place, call)
            before = self.conversations.answers
            number = len(before) if place.last is None else place.last.number + 1
            answer = Answer(
                place.digest, key, number, ids, place.last, place.rest, tools=call.tools
            )
            # A client whose connection breaks may ask again. The task goes on meanwhile, so that no
            # sampled token is lost.
            work = asyncio.create_task(self._sample(answer, call))
            answer.work = work
            self._running.add(work)
            self.conversations.answers.append(answer)
        answer.connection = request
        if answer.work is None:
            raise RuntimeError("an answer is kept, and nothing samples it")
        await asyncio.shield(answer.work)
        usage = usage_of(len(answer.prompt_ids), len(answer.require_generation().token_ids))
        number = self.conversations.answers.index(answer)

        def on_sent(whole: bool) -> None:
            answer.is_delivered = whole

        return Reply(
            200,
            answer_body(answer.require_turn(), call, f"chatcmpl-{number}", usage),
            call.stream,
            on_sent,
        )

    def _find_retry(self, key: str, request: Request) -> Answer | None:
        """Return the answer that this request asks for again, or None.

        It does if the connection was lost, or if the client says so in a header. Otherwise an equal
        request wants another sample, such as three candidates for one turn.
        """
        says_so = request.headers.get("x-stainless-retry-count", "0") != "0"
        for answer in reversed(self.conversations.answers):
            if answer.request != key or answer.is_continued:
                continue
            if says_so or (not answer.is_delivered and answer.is_abandoned):
                self.events["retries"] += 1
                return answer
        return None

    def _prompt(self, place: Any, call: Call) -> list[int]:
        """Encode the request, and refuse it if the context is full."""
        try:
            ids = prompt_of(place, call.tools, self.chat)
        except AgentR1Error as error:  # the chat template refuses these messages
            raise Refusal(str(error)) from None
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            # A schema of odd types, which only a template reads.
            cause = f"{type(error).__name__}: {first_line(error)}"
            raise Refusal(f"these messages or tools cannot be written: {cause[:200]}") from None
        if len(ids) >= self.max_context:
            raise self._overflow(str(len(ids)))
        return ids

    def _overflow(self, tokens: str) -> Refusal:
        """Count a request that does not fit, and return its refusal."""
        self.has_overflow = True
        self.events["refused_context"] += 1
        return Refusal(
            f"this model's maximum context length is {self.max_context} tokens, and the messages "
            f"have {tokens}",
            code="context_length_exceeded",
        )

    async def _sample(self, answer: Answer, call: Call) -> None:
        """Sample a turn for `answer`, and keep it."""
        limit = min(self.sampling.max_tokens, self.max_context - len(answer.prompt_ids))
        if call.max_tokens is not None:
            limit = min(limit, call.max_tokens)
        seed = None
        if self.task.seed is not None:
            before = self.conversations.answers[: self.conversations.answers.index(answer)]
            twins = [other for other in before if other.place == answer.place]
            seed = derive_seed(self.task.seed, answer.number)
            if twins:  # a second sample of the same turn needs other noise
                seed = derive_seed(self.task.seed, answer.number, len(twins))
        is_turn_end = self._ends(call.stop)
        turn = replace(self.sampling, max_tokens=limit, seed=seed, is_turn_end=is_turn_end)
        try:
            generation = await self._generate(answer, turn)
            self.generations.append((answer.prompt_ids, generation))
            if not all(math.isfinite(logprob) for logprob in generation.logprobs):
                raise AgentR1Error(
                    "the model's log-probabilities are not finite: its weights are corrupt. Use an "
                    "earlier checkpoint, or train again with a smaller learning rate",
                    code="broken_weights",
                )
        except BaseException as error:
            self.failure = error
            raise
        answer.generation = generation
        answer.turn = self.read_turn(generation, call.stop)
        names = {call.name for _, call in answer.turn.calls}
        if call.required and not (call.required == "any" and names or call.required in names):
            self.events["unmet_tool_choice"] += 1

    async def _generate(self, answer: Answer, turn: Sampling) -> Generation:
        async with self._turn:
            return await self.policy.generate(answer.prompt_ids, turn, self.task.session)

    def _ends(self, stop: list[str]) -> Callable[[list[int]], bool] | None:
        """Return the test that ends sampling at a stop string; None without stop strings."""
        if not stop:
            return None

        def has_stop(ids: list[int]) -> bool:
            text = self.chat.turn_text(ids)
            return any(word in text for word in stop)

        return has_stop

    def read_turn(self, generation: Generation, stop: list[str]) -> Turn:
        """Split a sampled turn into thought, calls and content.

        A call that cannot be parsed is content.
        """
        text = self.chat.turn_text(generation.token_ids)
        finish_reason = generation.finish_reason
        places = [text.find(word) for word in stop if word in text]
        if places:
            text = text[: min(places)]
            finish_reason = "stop"
        calls = []
        if finish_reason != "length" or places:
            calls = self.dialect.calls(text, {})
        content = ""
        thought = ""
        number = 0
        for part in self.dialect.parts(text):
            if part.kind == "think":
                thought += part.text
            elif part.kind == "tool_call":
                good = number < len(calls) and calls[number].error is None
                number += 1
                if not good:
                    content += f"<tool_call>{part.text}" + "</tool_call>" * part.closed
            elif part.kind == "answer":
                content += f"<answer>{part.text}" + "</answer>" * part.closed
            else:
                content += part.text
        good_calls: list[tuple[str, ToolCall]] = []
        for call in calls:
            if call.error is None:
                good_calls.append((f"call_{secrets.token_hex(8)}", call))
        if good_calls and finish_reason == "stop":
            finish_reason = "tool_calls"
        return Turn(content.strip(), thought, good_calls, finish_reason)

    # --------------------------------------------------------------------------- tools and reward

    async def run_tool(self, name: str, body: bytes) -> Reply:
        """Run a tool of our environment for the agent. Raise Refusal for a malformed request."""
        if self.over:
            raise Refusal("this episode is over", 401, "episode_over")
        try:
            arguments = parse_body(body)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise Refusal("the body must be a JSON object, the tool's arguments, each key once")
        [result] = await self.env.execute([ToolCall(name, arguments)])
        return Reply.of({"content": result.content, "ok": result.ok})

    def tools(self) -> list[dict[str, Any]]:
        return [tool.schema() for tool in self.env.tools.values()]

    def set_reward(self, value: Any) -> None:
        """Take the first reward. Raise Refusal for a second, late or impossible one."""
        if self.over or self.reward is not None:
            self.events["refused_reward"] += 1
            raise Refusal("the reward is known already; the first one counts", 400, "second_reward")
        try:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError("a reward must be a number")
            self.reward = check_reward(value)
        except (ValueError, OverflowError) as error:  # an integer may be too large for a float
            self.events["refused_reward"] += 1
            raise Refusal(str(error)) from None

    def post_reward(self, request: Request) -> Reply:
        """Read a posted reward. It needs the second key, which no prompt and no tool sees."""
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(key.encode(), self.reward_key.encode()):
            self.events["refused_reward"] += 1
            raise Refusal("wrong reward key", 401, "wrong_key")
        try:
            value = parse_body(request.body)["reward"]
        except (ValueError, RecursionError, KeyError, TypeError):
            value = None
        self.set_reward(value)
        return Reply.of({"ok": True})

    async def finish(self) -> None:
        """Refuse further calls, and wait for those that are being sampled: their tokens count."""
        self.over = True
        if self._running:
            await asyncio.gather(*self._running, return_exceptions=True)
        self.policy.release(self.task.session)
        if self.failure is not None:
            raise self.failure


MOST_NAMES = 20
"""Names of a client's own fields that are counted one by one, in an episode and in a step."""


def count_names(counts: Counter[str], more: Counter[str]) -> None:
    """Add counts. Fields that a client made up become metrics, so their number is bounded."""
    for name, count in more.items():
        if name.startswith("ignored_") and name not in counts:
            name_count = sum(other.startswith("ignored_") for other in counts)
            if name_count >= MOST_NAMES or not re.fullmatch(r"\w{1,60}", name, re.ASCII):
                name = "ignored_others"
        counts[name] += count


def find_turn(answer: str, conversations: Conversations) -> tuple[Answer | None, str | None]:
    """Return the turn with the agent's answer, and the answer if a call has it.

    A marked answer, <answer>...</answer>, comes first. Then comes a turn or an argument of a call
    that is the answer. Last comes a turn that has it as whole words: "no" is not in "know". Of
    equals the newest is taken. Blanks are left to the client.
    """
    words = _one_line(answer)
    match = ANSWER_MARKS.fullmatch(words)
    words = (match[1] if match else words).strip()
    typed = _typed(words)
    turns = [one for one in reversed(conversations.answers) if one.turn is not None]
    for one in turns:
        marks = ANSWER_MARKS.findall(_one_line(one.require_turn().content))
        if words in [mark.strip() for mark in marks]:
            return one, None
    for one in turns:
        if words == _one_line(one.require_turn().content):
            return one, None
        for _, call in one.require_turn().calls:
            values = list(call.arguments.values())
            if words in [_one_line(str(value)) for value in values]:
                return one, words
            if typed is not None and typed in [call.arguments, *values]:
                return one, words
    for one in turns:
        if _has_whole_words(_one_line(one.require_turn().content), words):
            return one, None
    return None, None


def _has_whole_words(text: str, words: str) -> bool:
    # 5 is not in -5, 1,500 or 1.5.
    sign = "-" if words[:1].isdigit() else ""
    whole = re.compile(rf"(?<![\w.{sign}])(?<!\d,){re.escape(words)}(?!\w|[.,]\d)")
    for match in whole.finditer(text):
        # An accent or a vowel sign belongs to the letter before it, and is no letter in `re`.
        after = text[match.end() : match.end() + 1]
        if not after or not unicodedata.category(after).startswith("M"):
            return True
    return False


ANSWER_MARKS = re.compile(r"<answer>(.*?)(?:</answer>|$)")


def _one_line(text: str) -> str:
    """Return the visible letters, with one blank for many."""
    text = unicodedata.normalize("NFC", text)
    visible = "".join(letter for letter in text if unicodedata.category(letter) != "Cf")
    return re.sub(r"\s+", " ", visible).strip()


def _typed(words: str) -> Any:
    """Return the object or list of a typed answer, and None for a text."""
    try:
        value = json.loads(words)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict | list) else None
