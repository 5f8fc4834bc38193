"""Ask a model of an OpenAI-compatible API: politely, within a budget, and never twice.

In: a request's body and its key in the ledger. Out: the answer. Next: `flow.py` makes turns of
answers.

Each attempt runs to its end, also if the episode that wants it is cancelled. Its answer is paid
for, so it must reach the ledger. The API's key is read from the environment. It is in no setting,
file or message: what a server sends back is searched for it first (`keys.py`).
"""

from __future__ import annotations

import asyncio
import email.utils
import hashlib
import json
import math
import os
import random
import re
import sys
import time
from argparse import Namespace
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from agent_r1 import AgentR1Error, Config, ConfigError, LostConnection, first_line, send
from agent_r1_recipes.api.keys import KeyFilter, key_from
from agent_r1_recipes.api.ledger import Ledger, Prices, is_count
from agent_r1_recipes.api.settings import ApiSettings

MAX_BYTES = 8 << 20
"""Of one answer."""
THOUGHTS = ("reasoning_content", "reasoning")
"""Fields of a message in which servers return the thought."""
RETRIED_STATUSES = (408, 409, 429, 500, 502, 503, 504, 529)
"""Statuses of a server that may answer later."""
MAX_REASON = 10_000
"""Characters of an error's body that are looked at."""
FULL_STATUSES = (400, 413, 422, 500)
"""Statuses with which servers refuse a conversation that is too long; llama.cpp sends 500, too."""
UNCHARGED_STATUSES = (400, 401, 402, 403, 404, 405, 408, 409, 413, 422, 429)
"""Statuses that no API charges."""
BYTES_OF_A_TOKEN = 16
"""At most, on average over a text: English has four to five.

A count of fewer tokens than this implies is not believed.
"""
FIRST_WAIT_S = 0.5
"""Before the second attempt, if the server names no time; then twice as long each time."""


class ContextFullError(Exception):
    """The conversation is longer than the model's context."""


@dataclass(frozen=True)
class Failure:
    """An attempt without an answer."""

    cause: str
    retried: bool
    wait_s: float | None = None
    """What the server asked for."""
    status: int = 0
    reached: bool = True
    """Whether the request may have reached the server."""
    is_full: bool = False
    """Whether the conversation is longer than the model's context."""

    @property
    def may_be_charged(self) -> bool:
        return self.reached and self.status not in UNCHARGED_STATUSES


class Client:
    """One model of one API. `flow.py` plays episodes with it."""

    def __init__(self, model: str, settings: ApiSettings):
        """Open the ledger in `rollout.api_records`. Raise ConfigError for an unusable address."""
        self.model = model
        self.settings = settings
        self.url = check_address(settings.api)
        self.key = key_from(settings.api_key)
        self.filter = KeyFilter(self.key, settings.api_key)
        price_in = settings.api_price_in or 0.0
        cached_price = settings.api_price_cached
        prices = Prices(
            price_in,
            price_in if cached_price is None else cached_price,
            settings.api_price_out or 0.0,
        )
        self.ledger = Ledger(Path(settings.api_records or "evals") / "calls.jsonl", prices)
        self.max_concurrent = settings.api_concurrent
        self.requests = 0
        self.retries = 0
        self.replayed = 0
        """Answers that came from the ledger."""
        self.answered = False
        """Whether this model has answered at all."""
        self._running: set[asyncio.Task[Any]] = set()
        self._reserved = 0.0
        """Upper bound of the cost of all running attempts, in US dollars."""
        self._warned = False
        self._not_before = 0.0
        """Time at which a busy server wants the next request, of any episode."""

    # ------------------------------------------------------------------------------------- one call

    async def ask(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to `body`: message, finish_reason, usage.

        `name` says which call of which episode this is. Raise LostConnection if no attempt brings
        an answer, ContextFullError, and AgentR1Error if asking again is of no use.
        """
        body = {"model": self.model} | body
        bound = self._bound(body)
        for field in self.settings.api_omit:
            body.pop(field, None)
        digest = hashlib.sha256(json.dumps([self.url, body]).encode()).hexdigest()[:16]
        key = f"{name}/{digest}"
        if key in self.ledger.answers:
            self.replayed += 1
            return self.ledger.answers[key]
        failure = Failure("it was never asked", False)
        for attempt in range(self.settings.api_attempts):
            if attempt:
                self.retries += 1
            while (wait := self._not_before - time.monotonic()) > 0:
                await asyncio.sleep(wait)
            dollars = self.ledger.cost_of_bound(*bound)
            await self._within_budget(dollars)
            self._reserved += dollars
            result = await self._to_its_end(self._attempt(key, body, bound, dollars))
            if isinstance(result, dict):
                return result
            failure = result
            if not failure.retried:
                break
            if attempt + 1 < self.settings.api_attempts:
                self._wait(failure, attempt)
        raise self._error(failure)

    def _bound(self, body: dict[str, Any]) -> tuple[int, int]:
        """Return the most tokens of prompt and turn. A token has at least one byte."""
        return size_of(body), body[self.settings.api_limit]

    async def _within_budget(self, dollars: float) -> None:
        """Wait or stop if this request might exceed the budget. Raise AgentR1Error to stop."""
        budget = self.settings.api_budget
        while budget is not None and self.ledger.spent + self._reserved + dollars > budget:
            if self._running:  # their answers will cost less than the most that they may cost
                await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
                continue
            raise AgentR1Error(
                f"the budget of ${budget:g} is spent: ${self.ledger.spent:.4f} so far, and the "
                f"next request may cost up to ${dollars:.4f}. Every answer is kept; the same "
                "command with a larger --budget goes on from here",
                code="budget_spent",
            )

    async def _to_its_end(self, attempt: Coroutine[Any, Any, Any]) -> Any:
        """Await an attempt. If the episode is cancelled meanwhile, finish it all the same."""
        task = asyncio.create_task(attempt)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.done():
                if not self._warned:
                    print("waiting for answers that are already being paid for", file=sys.stderr)
                self._warned = True
                await asyncio.wait([task])
            raise

    async def _attempt(
        self, key: str, body: dict[str, Any], bound: tuple[int, int], dollars: float
    ) -> dict[str, Any] | Failure:
        """Send one request, and enter its answer or failure into the ledger."""
        self.requests += 1
        try:
            result = await self._send(body)
            if isinstance(result, dict):
                self.answered = True
                most = most_tokens(bound, size_of(result["message"]))
                least = least_tokens(body["messages"]), least_tokens([result["message"]])
                result["usage"] = check_usage(result["usage"], least, most)
                usage = result["usage"]
                record: dict[str, Any] = {"key": key, "usage": usage, "answer": result}
                if usage is None:
                    record["bound"] = most
                self.ledger.write(record)
            else:
                record_of_failure: dict[str, Any] = {"key": key, "failed": result.cause}
                if result.may_be_charged:
                    record_of_failure["bound"] = bound
                self.ledger.write(record_of_failure)
            return result
        finally:
            self._reserved -= dollars

    async def _send(self, body: dict[str, Any]) -> dict[str, Any] | Failure:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            response = await asyncio.wrap_future(
                send(
                    "POST",
                    f"{self.url}/chat/completions",
                    body=body,
                    headers=headers,
                    within_s=self.settings.api_timeout_s,
                    max_bytes=MAX_BYTES,
                )
            )
        except httpx.InvalidURL as error:
            return Failure(self.filter.text(first_line(error)), False, reached=False)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            cause = self.filter.text(f"no connection ({first_line(error)})")
            return Failure(cause, True, reached=False)
        except (httpx.HTTPError, TimeoutError, ValueError, OSError) as error:
            return Failure(self.filter.text(f"{type(error).__name__}: {first_line(error)}"), True)
        # In a thread: megabytes of a hostile answer take seconds, and other episodes go on.
        body = await asyncio.to_thread(self._decode, response.body)
        if response.status != 200:
            words = error_words(body)
            # A 429 of an empty account stays one, and a conversation that is too long stays so.
            stays = "insufficient_quota" in words or tells_context(words)
            return Failure(
                f"HTTP {response.status}: {short(words)}",
                response.status in RETRIED_STATUSES and not stays,
                wait_in(response.headers),
                response.status,
                is_full=response.status in FULL_STATUSES and tells_context(words),
            )
        try:
            return read_answer(body)
        except (ValueError, RecursionError) as error:
            return Failure(f"not an answer: {first_line(error)}", True)

    def _decode(self, content: bytes) -> Any:
        """Return a body without the key: its JSON, or the text of another one."""
        text = content.decode("utf-8", "replace")
        try:
            return self.filter.value(json.loads(text))
        except (ValueError, RecursionError):
            return self.filter.text(text)

    def _wait(self, failure: Failure, attempt: int) -> None:
        """Choose the time of the next request. Raise AgentR1Error if it is too far away."""
        longest = self.settings.api_longest_wait_s
        seconds = failure.wait_s
        if seconds is None:  # at random, so that the episodes do not all come back at once
            seconds = min(longest, FIRST_WAIT_S * 2**attempt * random.uniform(0.5, 1.5))
        if seconds > longest:
            raise AgentR1Error(
                f"{self.url} wants no request for {seconds:.0f} s ({failure.cause}). Every answer "
                "is kept; the same command goes on later, or raise rollout.api_longest_wait_s",
                code="api_busy",
            )
        self._not_before = max(self._not_before, time.monotonic() + seconds)

    def _error(self, failure: Failure) -> Exception:
        """Return the error for a request without an answer."""
        if failure.is_full:
            return ContextFullError(failure.cause)
        what = f"{self.url} refused {self.model!r}: {failure.cause}"
        if failure.status in (401, 403):
            state = "is not set" if not self.key else "is set, and was refused"
            name = self.settings.api_key
            return AgentR1Error(
                f"{what}. The environment variable {name} {state}; rollout.api_key names another",
                code="key_refused",
            )
        if not failure.retried and not self.answered:
            # It refuses every request, and not only this conversation.
            return AgentR1Error(
                f"{what}. If it refuses a field, name it in rollout.api_omit, or see "
                "rollout.api_limit; a shorter turn is rollout.max_tokens_per_turn",
                code="api_refused",
            )
        if not failure.retried:  # it refuses this conversation, and would again
            return LostConnection(what, code="request_refused")
        return LostConnection(
            f"{self.url} gave no answer in {self.settings.api_attempts} attempts: {failure.cause}",
            code="lost_connection",
        )

    # ------------------------------------------------------------------------------------ the card

    def usage(self) -> dict[str, Any]:
        """Return the facts for the evaluation card: tokens, cost and requests of all its parts."""
        ledger = self.ledger
        settings = self.settings
        has_prices = settings.api_price_in is not None and settings.api_price_out is not None
        facts: dict[str, Any] = dict(ledger.tokens)
        facts["usd"] = round(ledger.dollars, 6) if has_prices else None
        facts["usd_uncertain"] = round(ledger.uncertain_dollars, 6) if has_prices else None
        facts["usd_per_million"] = [settings.api_price_in, settings.api_price_out]
        facts |= {"answers": len(ledger.answers), "failed_attempts": ledger.failures}
        facts["answers_without_usage"] = ledger.without_usage
        facts |= {"requests": self.requests, "retries": self.retries, "replayed": self.replayed}
        return {"api": self.url, "usage": facts}


def read_options(a: Namespace) -> None:
    """Turn `eval --api` into settings. Raise ConfigError for options that need the weights."""
    others = {"--before": a.before, "--backend": a.backend, "--agent": a.agent}
    for option, value in others.items():
        if value:
            raise ConfigError(
                f"{option} is about a model with weights, and --api about one without; leave one "
                "of them out",
                code="exclusive_options",
            )
    if not a.model:
        raise ConfigError(
            "--api needs the model's name at that address: --model NAME", code="missing_option"
        )
    a.backend = "api"
    if a.out is None:  # what was paid for is kept, also if no one asked for it
        name = re.sub(r"\W+", "-", "-".join(a.model))
        a.out = Path(os.environ.get("AGENT_R1_HOME") or ".") / "evals" / f"api-{name}"
    a.settings += settings_of(a.api, a.out, a.budget)


def settings_of(api: str, records: Path, budget: float | None) -> list[str]:
    """Return the settings of --api, --out and --budget."""
    settings = [f"rollout.api={json.dumps(api)}"]
    settings.append(f"rollout.api_records={json.dumps(str(records))}")
    if budget is not None:
        settings.append(f"rollout.api_budget={budget}")
    return settings


@contextmanager
def open_model(
    model: Path, config: Config, stop_ids: tuple[int, ...], all_gpus: bool
) -> Iterator[tuple[Client, int]]:
    """Open a model of `rollout.api`; its answers are kept in `rollout.api_records`.

    Yield its client, and how many episodes it plays at a time. The other arguments are for models
    that run here.
    """
    client = Client(str(model), config.rollout)
    try:
        yield client, client.max_concurrent
    finally:
        client.ledger.close()


def check_address(url: str | None) -> str:
    """Return the address without a slash at its end. Raise ConfigError if it may hold a key."""
    parts = httpx.URL(url or "")
    if parts.scheme not in ("http", "https") or not parts.host:
        raise ConfigError(
            f"--api {url!r} is not an address; write it as https://api.example.com/v1",
            code="bad_address",
        )
    if parts.userinfo or parts.query or parts.fragment:
        raise ConfigError(
            "--api must be an address without user, password and query, because it is written to "
            "the card; a key comes from the environment (rollout.api_key)",
            code="bad_address",
        )
    return str(url).rstrip("/").removesuffix("/chat/completions")


# ------------------------------------------------------------------------------ what a server sends


def read_answer(body: Any) -> dict[str, Any]:
    """Read the body of an answer: message, finish_reason, usage (None if it has none).

    Raise ValueError for anything else: no choices, no message.
    """
    if not isinstance(body, dict):
        raise ValueError(f"the body is not a JSON object: {short(error_words(body))}")
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices:
        raise ValueError(f"it has no choices: {short(error_words(body))}")
    choice = choices[0]
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(message, dict):
        raise ValueError("its choice has no message")
    reason = choice.get("finish_reason")
    # A lone surrogate has no UTF-8 form, and the message is sent back in the next turn.
    clean = json.dumps(message, ensure_ascii=False).encode("utf-8", "replace")
    return {
        "message": json.loads(clean),
        "finish_reason": reason if isinstance(reason, str) else "stop",
        "usage": read_usage(body.get("usage")),
    }


def read_usage(usage: Any) -> dict[str, int] | None:
    """Return prompt, cached and sampled tokens; None if the server does not tell them."""
    if not isinstance(usage, dict):
        return None
    details = usage.get("prompt_tokens_details")
    cached_tokens = details.get("cached_tokens") if isinstance(details, dict) else 0
    counts: dict[str, Any] = {
        "prompt_tokens": usage.get("prompt_tokens"),
        "cached_tokens": cached_tokens or 0,
        "completion_tokens": usage.get("completion_tokens"),
    }
    return counts if all(is_count(count) for count in counts.values()) else None


def size_of(value: Any) -> int:
    """Return the bytes of a value as JSON."""
    return len(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))


def least_tokens(messages: list[dict[str, Any]]) -> int:
    """Return the least tokens that messages have: of their contents, thoughts and arguments."""
    texts: list[Any] = []
    for message in messages:
        texts += [message.get(name) for name in ("content", *THOUGHTS)]
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else []:
            function = call.get("function") if isinstance(call, dict) else None
            texts.append(function.get("arguments") if isinstance(function, dict) else None)
    size = sum(size_of(text) for text in texts if text)
    return math.ceil(size / BYTES_OF_A_TOKEN)


def most_tokens(bound: tuple[int, int], answer_bytes: int) -> tuple[int, int]:
    """Return the most tokens of prompt and turn, after an answer of so many bytes.

    A longer answer than the limit allows shows that the server did not keep it.
    """
    prompt_tokens, sampled_tokens = bound
    if answer_bytes > BYTES_OF_A_TOKEN * sampled_tokens + 1000:
        sampled_tokens = answer_bytes
    return prompt_tokens, sampled_tokens


def check_usage(
    usage: dict[str, int] | None, least: tuple[int, int], most: tuple[int, int]
) -> dict[str, int] | None:
    """Return the usage, or None if its counts are outside `least` and `most`."""
    if usage is None:
        return None
    counts = (usage["prompt_tokens"], usage["completion_tokens"])
    for count, low, high in zip(counts, least, most, strict=True):
        if not low <= count <= high:
            return None
    if usage["cached_tokens"] > usage["prompt_tokens"]:
        return usage | {"cached_tokens": 0}
    return usage


def error_words(body: Any) -> str:
    """Return message, code and type of an error body, or the beginning of another body."""
    if isinstance(body, list) and body:  # Gemini's errors
        body = body[0]
    error = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(error, dict):
        message = str(error.get("message") or json.dumps(error))[:MAX_REASON]
        marks = [error.get(name) for name in ("code", "type")]
        return " ".join([message, *(f"({mark})"[:60] for mark in marks if mark)])
    return re.sub(r"<[^>]*>", " ", str(error)[:MAX_REASON])  # perhaps a page of HTML


def short(words: str) -> str:
    """Return words in one line of at most 200 characters."""
    return " ".join(words.split())[:200] or "an empty body"


CONTEXT_WORDS = (
    "context_length",  # OpenAI's code, and the gateway's
    "context length",  # vLLM, OpenAI
    "context window",  # Anthropic, SGLang
    "context size",  # llama.cpp
    "exceed_context_size",  # llama.cpp's type
    "context limit",
    "prompt is too long",
    "prompt exceeds max length",
    "input is too long",
    "maximum model length",
    "maximum prompt length",
    "range of input length",
    "reduce the length of the messages",
    "tokens in the prompt cannot exceed",  # Anthropic
    "maximum number of tokens",  # Gemini
    "input token count",  # Gemini
    "`inputs` must have less than",  # TGI
    "`max_new_tokens` must be <=",  # TGI
)
"""What servers write when a conversation is longer than the model's context, in small letters."""


def tells_context(cause: str) -> bool:
    """Return whether an API says that the conversation is too long."""
    cause = cause.lower()
    return any(words in cause for words in CONTEXT_WORDS)


def wait_in(headers: dict[str, str]) -> float | None:
    """Return the seconds that a server asks for: Retry-After in seconds or as a date."""
    milliseconds = headers.get("retry-after-ms", "")
    if milliseconds.isascii() and milliseconds.isdigit():
        return int(milliseconds) / 1000
    value = headers.get("retry-after", "").strip()
    if re.fullmatch(r"\d{1,9}(\.\d+)?", value, re.ASCII):
        return float(value)
    try:
        date = email.utils.parsedate_to_datetime(value)
    except (ValueError, TypeError):
        return None
    return max(0.0, date.timestamp() - time.time())
