"""Sample from a local model, with continuous batching and a KV cache for each episode.

In: prompts from many episodes, as they come. Out: `Generation`s. It implements `Policy`; at scale
vLLM does. `decoder.py` is the network, `kv_cache.py` its cache, `sampling.py` the choice of a
token.

An agent's episode alternates between a few dozen sampled tokens and a tool result. Two methods make
this cheap:

* **Continuous batching.** Each pass decodes one token of every running episode. An episode that
  calls a tool leaves the batch and returns with the result.
* **A cache across turns.** The next prompt is all tokens so far plus the tool's result. The cache
  has the keys and values of the former, so only the new tokens are read (the *extension*).
  Frameworks that send each turn as a new request read the whole conversation again, unless a prefix
  cache still has it.

One trap: the last sampled token, usually `<|im_end|>`, was never fed to the model, so the cache is
one token short of the conversation. The extension starts at the first token that the cache lacks,
not at the tool's text.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass, field
from operator import itemgetter

import torch
from torch import Tensor

from agent_r1.core import Generation, Policy, Sampling
from agent_r1.ground.device import SAMPLING_HERE
from agent_r1.ground.errors import AgentR1Error
from agent_r1.model.decoder import Decoder
from agent_r1.model.kv_cache import KVCache
from agent_r1.model.sampling import draw_noise, sample_tokens


@dataclass
class _Request:
    """One call of `generate` in the sampler."""

    session: str
    prompt_ids: list[int]
    sampling: Sampling
    noise: list[float]  # one uniform number per token that may be sampled
    future: asyncio.Future
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass
class SamplerStats:
    """Counts since the last `sync`; the loop reports them per step."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    entropy: float = 0.0  # sum over the sampled tokens, in nats
    seconds: float = (
        0.0  # in the model; the rest of a rollout's time goes to environments and the event loop
    )

    def mean_entropy(self) -> dict[str, float]:
        """Return the step's metric: the mean entropy in nats."""
        return {"actor/entropy": self.entropy / max(self.decode_tokens, 1)}


IDLE_TURNS = 100
"""Passes of the event loop without a request to decode, after which the sampler begins to sleep."""


class LocalPolicy(Policy):
    """`Policy` over a `Decoder` in this process.

    One instance serves all episodes of its event loop.
    """

    has_trainer_weights = True
    """Whether it samples from the trainer's weights with the trainer's arithmetic, apart from a
    smaller dtype's rounding."""

    def __init__(self, model: Decoder, stop_ids: tuple[int, ...], *, slots: int, max_context: int):
        if max_context > model.shape.max_position:
            raise AgentR1Error(
                f"a context of {max_context} tokens is longer than the model's "
                f"{model.shape.max_position}; "
                "lower rollout.max_context",
                code="context_exceeds_model",
            )
        self.model = model
        self.stop_ids = frozenset(stop_ids)
        self.max_context = max_context
        self.slots = slots
        self.cache = KVCache(model, slots, max_context)
        self.stats = SamplerStats()
        self._slot_of: dict[str, int] = {}  # live sessions, also while a tool runs
        self._waiting: list[_Request] = []
        self._running: dict[int, _Request] = {}  # slot -> request
        self._task: asyncio.Task | None = None
        self._numbers = itertools.count()

    def sync(self, actor: Decoder) -> None:
        """Copy the trainer's weights, unless the model is shared, and reset the statistics."""
        if actor is not self.model:
            self.model.load_state_dict(actor.state_dict())
        self.stats = SamplerStats()

    # -------------------------------------------------------------------------- the Policy protocol

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, session: str | None = None
    ) -> Generation:
        """See `Policy.generate`. Raise AgentR1Error if the prompt leaves no room for a token."""
        if len(prompt_ids) >= self.max_context:
            raise AgentR1Error(
                f"a prompt of {len(prompt_ids)} tokens fills the context of {self.max_context}",
                code="prompt_too_long",
            )
        if session is None:
            session = f"one-shot-{next(self._numbers)}"
            try:
                return await self.generate(prompt_ids, sampling, session)
            finally:
                self.release(session)
        future = asyncio.get_running_loop().create_future()
        request = _Request(session, prompt_ids, sampling, draw_noise(sampling), future)
        self._waiting.append(request)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())
        return await request.future

    def release(self, session: str) -> None:
        """Free the session's slot, and drop its pending request."""
        self._waiting = [r for r in self._waiting if r.session != session]
        slot = self._slot_of.pop(session, None)
        if slot is not None:
            self._running.pop(slot, None)

    # ----------------------------------------------------------------------------------- scheduling

    async def _run(self) -> None:
        """Read new prompts, decode one token per request, let the episodes act; repeat."""
        idle = 0
        new_requests = []
        SAMPLING_HERE.add(asyncio.get_running_loop())
        try:
            while self._waiting or self._running:
                # A pass over few tokens costs nearly as much as one over many. So new requests wait
                # for some more while others are being decoded.
                start = time.perf_counter()
                if len(self._waiting) >= max(1, len(self._running) // 2):
                    new_requests = self._admit()
                    self._prefill(new_requests)
                idle = 0 if self._running else idle + 1
                if self._running:
                    self._decode()
                self.stats.seconds += time.perf_counter() - start
                # Yield twice: once for environments to send their tool calls, once for the search
                # that they share.
                await asyncio.sleep(0)
                # A timer would let the clock decide which requests join the next batch, and a
                # batch's size changes the last bits of a logit. So yield with sleep(0). After many
                # idle turns a tool is really waiting: sleep.
                await asyncio.sleep(0 if idle < IDLE_TURNS else 0.001)
        except Exception as error:
            self._fail(error, new_requests)

    def _fail(self, error: Exception, new_requests: list[_Request]) -> None:
        """Pass a failure to every waiting request; otherwise they would wait for ever."""
        for request in [*new_requests, *self._waiting, *self._running.values()]:
            if not request.future.done():
                request.future.set_exception(error)
        self._waiting = []
        self._running = {}

    def _admit(self) -> list[_Request]:
        """Return the waiting requests that have, or get, a slot. The rest keep waiting."""
        self._compact()
        free = sorted(set(range(self.slots)) - set(self._slot_of.values()), reverse=True)
        requests_with_slot = []
        still_waiting = []
        for request in self._waiting:
            if request.session not in self._slot_of and free:
                self._slot_of[request.session] = free.pop()
                self.cache.ids[self._slot_of[request.session]] = []
            (requests_with_slot if request.session in self._slot_of else still_waiting).append(
                request
            )
        self._waiting = still_waiting
        return requests_with_slot

    def _compact(self) -> None:
        """Move live slots to the front if finished episodes left gaps.

        Decoding covers slots 0..n-1.
        """
        live = sorted(self._slot_of.items(), key=itemgetter(1))
        if not live or len(live) > 0.75 * (live[-1][1] + 1):
            return
        old = [slot for _, slot in live]
        self.cache.copy(old, list(range(len(old))))
        new_slot = dict(zip(old, range(len(old)), strict=True))
        self._slot_of = {session: new_slot[slot] for session, slot in live}
        self._running = {new_slot[slot]: request for slot, request in self._running.items()}

    def _prefill(self, requests: list[_Request]) -> None:
        """Read the requests' new tokens, and sample each first token."""
        if not requests:
            return
        slots = [self._slot_of[r.session] for r in requests]
        hidden_BD, tokens = self.cache.read(slots, [r.prompt_ids for r in requests])
        self.stats.prefill_tokens += tokens
        self._running |= zip(slots, requests, strict=True)
        self._sample(requests, hidden_BD)

    def _decode(self) -> None:
        """Sample one more token for every running episode."""
        hidden_BD = self.cache.decode(
            {slot: request.token_ids[-1] for slot, request in self._running.items()}
        )
        self._sample([self._running[slot] for slot in sorted(self._running)], hidden_BD)

    @torch.inference_mode()
    def _sample(self, requests: list[_Request], hidden_BD: Tensor) -> None:
        """Sample one token for each request; finished requests leave the batch."""
        temperature = torch.tensor(
            [r.sampling.temperature for r in requests], device=hidden_BD.device
        )[:, None]
        uniform = torch.tensor(
            [r.noise[len(r.token_ids)] for r in requests], device=hidden_BD.device
        )
        tokens, logprobs, entropies = sample_tokens(
            self.model.logits(hidden_BD).float(), temperature, uniform
        )
        self.stats.decode_tokens += len(requests)
        self.stats.entropy += entropies.sum().item()
        for request, token, logprob in zip(
            requests, tokens.tolist(), logprobs.tolist(), strict=True
        ):
            request.token_ids.append(token)
            request.logprobs.append(logprob)
            if self.on_token is not None:
                self.on_token(request.session, [token])
            is_turn_end = request.sampling.is_turn_end
            ended = token in self.stop_ids
            if not ended and is_turn_end is not None:
                ended = is_turn_end(request.token_ids)
            if ended:
                self._finish(request, "stop")
            elif (
                len(request.token_ids) == request.sampling.max_tokens
                or len(request.prompt_ids) + len(request.token_ids) >= self.max_context
            ):
                self._finish(request, "length")

    def _finish(self, request: _Request, reason: str) -> None:
        self._running.pop(self._slot_of[request.session])
        if not request.future.done():
            request.future.set_result(Generation(request.token_ids, request.logprobs, reason))
