"""A sampler in this process: continuous batching, and a KV cache that lives as long as the episode.

In: prompts from many episodes, as they come. Out: `Generation`s. It implements `Policy`, as vLLM's server does at
scale.

An agent's episode alternates between a few dozen sampled tokens and a tool result. Two habits make that cheap:

* **Continuous batching.** All running episodes decode side by side, one token each per pass. An episode that calls a
  tool leaves the batch and comes back when it has its result; nobody waits for the slowest.
* **The cache is kept across turns.** The next prompt of an episode is everything so far plus the tool's result, and
  keys and values of everything so far are already there: only the new tokens are read (the *extension*). Frameworks
  that send each turn as a new request read the whole conversation again (unless their prefix cache still holds it).

One trap: the last sampled token, usually `<|im_end|>`, was never fed to the model, so the cache ends one token short
of the conversation. The extension therefore starts at the first token that the cache lacks, not at the tool's text.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from agent_r1.core import Generation, Policy, Sampling
from agent_r1.ground.device import SAMPLING_HERE
from agent_r1.ground.errors import AgentR1Error
from agent_r1.rollout.decoder import Decoder


class KVCache:
    """Keys and values of `slots` conversations, [layer][slot, kv head, position, head_dim]; a slot is a row."""

    def __init__(self, model: Decoder, slots: int, length: int):
        s, weight = model.shape, model.embed.weight
        shape = (s.layers, slots, s.kv_heads, length, s.head_dim)
        self.keys = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        self.values = torch.zeros_like(self.keys)
        self.lengths = torch.zeros(slots, dtype=torch.long, device=weight.device)
        """Tokens of each slot that are in the cache."""

    def copy(self, sources: list[int], targets: list[int], length: int) -> None:
        """Give `targets` the conversations of `sources`, of which `length` positions are in use at most."""
        source, target = torch.tensor([sources, targets], device=self.lengths.device)
        self.keys[:, target, :, :length] = self.keys[:, source, :, :length]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]
        self.lengths[target] = self.lengths[source]


@dataclass
class _Request:
    """One call of `generate` on its way through the sampler."""

    session: str
    prompt_ids: list[int]
    sampling: Sampling
    noise: np.ndarray
    """One uniform number for each token that may be sampled."""
    future: asyncio.Future
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass
class SamplerStats:
    """What the sampler did since the last `sync`; the loop reports it per step."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    entropy: float = 0.0
    """Of the distributions that tokens were drawn from, summed up, in nats."""
    seconds: float = 0.0
    """Time in the model. The rest of a rollout's wall time goes to environments and the event loop."""

    def mean_entropy(self) -> dict[str, float]:
        """As the metric of a step."""
        return {"actor/entropy": self.entropy / max(self.decode_tokens, 1)}


IDLE_TURNS = 100
"""Turns of the event loop without anything to decode, after which a tool must be one that waits for something."""


class LocalPolicy(Policy):
    """`Policy` over a `Decoder` in this process. One instance serves all episodes of the event loop that it runs in."""

    exact = True
    """Whether it samples from the trainer's weights with the trainer's arithmetic, but for the rounding of a smaller
    dtype."""

    def __init__(self, model: Decoder, stop_ids: tuple[int, ...], *, slots: int, max_context: int):
        if max_context > model.shape.max_position:
            raise AgentR1Error(
                f"a context of {max_context} tokens is longer than the model's {model.shape.max_position}; "
                "lower rollout.max_context",
                code="context_exceeds_model",
            )
        self.model, self.stop_ids, self.max_context = model, frozenset(stop_ids), max_context
        self.slots = slots
        self.cache = KVCache(model, slots, max_context)
        self.stats = SamplerStats()
        self._slot_of: dict[str, int] = {}  # live sessions, also those that wait for a tool
        self._cached_ids: dict[str, list[int]] = {}  # the tokens behind each session's cache entries
        self._waiting: list[_Request] = []
        self._running: dict[int, _Request] = {}  # slot -> request
        self._task: asyncio.Task | None = None
        self._numbers = itertools.count()

    def sync(self, actor: Decoder) -> None:
        """Take over the trainer's weights (nothing to do where both are one model) and start new statistics."""
        if actor is not self.model:
            self.model.load_state_dict(actor.state_dict())
        self.stats = SamplerStats()

    # ---------------------------------------------------------------------------------------- the Policy protocol

    async def generate(self, prompt_ids: list[int], sampling: Sampling, session: str | None = None) -> Generation:
        """See `Policy.generate`. Raises AgentR1Error when the prompt leaves no room for one token."""
        if len(prompt_ids) >= self.max_context:
            raise AgentR1Error(
                f"a prompt of {len(prompt_ids)} tokens fills the context of {self.max_context}", code="prompt_too_long"
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
        """Free the session's slot; a request of it that is still under way is dropped."""
        self._waiting = [r for r in self._waiting if r.session != session]
        slot = self._slot_of.pop(session, None)
        self._cached_ids.pop(session, None)
        if slot is not None:
            self._running.pop(slot, None)

    # --------------------------------------------------------------------------------------------------- scheduling

    async def _run(self) -> None:
        """The sampler's loop: read what is new, decode one token for each request, let the episodes act on it."""
        idle, reading = 0, []
        SAMPLING_HERE.add(asyncio.get_running_loop())
        try:
            while self._waiting or self._running:
                # A pass over few tokens costs nearly as much as one over many, so new requests wait until there are
                # some of them, as long as others are being decoded.
                start = time.perf_counter()
                if len(self._waiting) >= max(1, len(self._running) // 4):
                    reading = self._admit()
                    self._prefill(reading)
                idle = 0 if self._running else idle + 1
                if self._running:
                    self._decode()
                self.stats.seconds += time.perf_counter() - start
                # Give way to the event loop twice: once for environments to send their tool calls, once for the search
                # that those calls share.
                await asyncio.sleep(0)
                # Requests without a slot wait here. Yield with sleep(0): a timer would let the clock decide who joins
                # the next batch, and the size of a batch changes the last bits of a logit. After many idle turns a tool
                # is really waiting: leave the core to others.
                await asyncio.sleep(0 if idle < IDLE_TURNS else 0.001)
        except Exception as error:
            self._fail(error, reading)

    def _fail(self, error: Exception, reading: list[_Request]) -> None:
        """Hand a failure to everyone who waits for it; a silent one would leave them waiting for ever."""
        for request in [*reading, *self._waiting, *self._running.values()]:
            if not request.future.done():
                request.future.set_exception(error)
        self._waiting, self._running = [], {}

    def _admit(self) -> list[_Request]:
        """The waiting requests that have, or can get, a slot. The rest stay in line."""
        self._compact()
        free = sorted(set(range(self.slots)) - set(self._slot_of.values()), reverse=True)
        admitted, rest = [], []
        for request in self._waiting:
            if request.session not in self._slot_of and free:
                self._slot_of[request.session] = free.pop()
                self._cached_ids[request.session] = []
            (admitted if request.session in self._slot_of else rest).append(request)
        self._waiting = rest
        return admitted

    def _compact(self) -> None:
        """Move live slots to the front when finished episodes have left gaps: decoding works on slots 0..n-1."""
        live = sorted(self._slot_of.items(), key=lambda item: item[1])
        if not live or len(live) > 0.75 * (live[-1][1] + 1):
            return
        old = [slot for _, slot in live]
        self.cache.copy(old, list(range(len(old))), int(self.cache.lengths[old].max()))
        moved = dict(zip(old, range(len(old)), strict=True))
        self._slot_of = {session: moved[slot] for session, slot in live}
        self._running = {moved[slot]: request for slot, request in self._running.items()}

    # --------------------------------------------------------------------------------------------------- arithmetic

    @torch.inference_mode()
    def _prefill(self, requests: list[_Request]) -> None:
        """Read the tokens that each request's cache lacks, and sample each request's first token."""
        first_with: dict[tuple[int, ...], _Request] = {}
        twins: list[tuple[_Request, _Request]] = []
        todo: list[tuple[_Request, int]] = []
        for request in requests:
            cached = self._cached_ids[request.session]
            keep = _common_prefix(cached, request.prompt_ids)
            # Samples of one prompt arrive together: read it once, copy the cache to the others (GRPO's group).
            leader = first_with.setdefault(tuple(request.prompt_ids), request) if keep == 0 else request
            if leader is request:
                todo.append((request, min(keep, len(request.prompt_ids) - 1)))
            else:
                twins.append((leader, request))
        todo.sort(key=lambda item: len(item[0].prompt_ids) - item[1])  # alike lengths together: little padding
        hidden: dict[str, Tensor] = {}
        for chunk in _chunks(todo, max_tokens=4096):
            hidden |= self._extend(chunk)
        if twins:
            slots = self._slot_of
            longest = max(len(r.prompt_ids) for _, r in twins)
            self.cache.copy([slots[a.session] for a, _ in twins], [slots[b.session] for _, b in twins], longest)
            hidden |= {b.session: hidden[a.session] for a, b in twins}
        for request in requests:
            self._cached_ids[request.session] = list(request.prompt_ids)
            self._running[self._slot_of[request.session]] = request
        if requests:
            self._sample(requests, torch.stack([hidden[r.session] for r in requests]))

    def _extend(self, chunk: list[tuple[_Request, int]]) -> dict[str, Tensor]:
        """One pass over the new tokens of several conversations; returns each one's last hidden state [D]."""
        device = self.cache.lengths.device
        slots = torch.tensor([self._slot_of[r.session] for r, _ in chunk], device=device)
        starts = torch.tensor([keep for _, keep in chunk], device=device)
        counts = [len(r.prompt_ids) - keep for r, keep in chunk]
        T, end = max(counts), max(len(r.prompt_ids) for r, _ in chunk)
        ids = torch.tensor(
            [r.prompt_ids[k:] + [0] * (T - n) for (r, k), n in zip(chunk, counts, strict=True)], device=device
        )
        positions = starts[:, None] + torch.arange(T, device=device)
        # Padding writes behind the row's end, where the next tokens will overwrite it; it must only stay inside.
        positions = positions.clamp(max=self.max_context - 1)
        visible = torch.arange(end, device=device) <= positions[:, :, None]  # [B, T, end]: causal, own slot only
        rows = slots[:, None]

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.cache.keys[layer], self.cache.values[layer]
            keys[rows, :, positions] = k.transpose(1, 2)
            values[rows, :, positions] = v.transpose(1, 2)
            return _attend(q, keys[slots, :, :end], values[slots, :, :end], visible[:, None])

        hidden = self.model(ids, positions, attention)
        last = torch.tensor(counts, device=device) - 1
        self.cache.lengths[slots] = starts + last + 1
        self.stats.prefill_tokens += sum(counts)
        states = hidden[torch.arange(len(chunk), device=device), last]
        return {r.session: h for (r, _), h in zip(chunk, states, strict=True)}

    @torch.inference_mode()
    def _decode(self) -> None:
        """One token for every running episode, in one pass over slots 0..n-1.

        Slots in between whose episode waits for a tool ride along with a dummy token: its keys land one position behind
        the conversation, where the next real token overwrites them.
        """
        n = max(self._running) + 1
        device = self.cache.lengths.device
        ids = torch.tensor(
            [[self._running[s].token_ids[-1] if s in self._running else 0] for s in range(n)], device=device
        )
        positions = self.cache.lengths[:n].clamp(max=self.max_context - 1)
        end = int(positions.max()) + 1
        visible = torch.arange(end, device=device) <= positions[:, None]
        bias = torch.zeros(visible.shape, device=device, dtype=self.cache.keys.dtype).masked_fill_(~visible, -torch.inf)
        every = torch.arange(n, device=device)

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.cache.keys[layer], self.cache.values[layer]
            keys[every, :, positions] = k[:, :, 0]
            values[every, :, positions] = v[:, :, 0]
            return _attend(q, keys[:n, :, :end], values[:n, :, :end], bias[:, None, None])

        hidden = self.model(ids, positions[:, None], attention)[:, 0]
        slots = sorted(self._running)
        requests = [self._running[s] for s in slots]
        self.cache.lengths[slots] += 1
        for request in requests:
            self._cached_ids[request.session].append(request.token_ids[-1])
        self._sample(requests, hidden[slots])

    def _sample(self, requests: list[_Request], hidden_BD: Tensor) -> None:
        """Draw one token for each request; finished requests leave the batch."""
        temperature = torch.tensor([r.sampling.temperature for r in requests], device=hidden_BD.device)[:, None]
        uniform = torch.tensor([r.noise[len(r.token_ids)] for r in requests], device=hidden_BD.device)
        tokens, logprobs, entropies = sample_tokens(self.model.logits(hidden_BD).float(), temperature, uniform)
        self.stats.decode_tokens += len(requests)
        self.stats.entropy += entropies.sum().item()
        for request, token, logprob in zip(requests, tokens.tolist(), logprobs.tolist(), strict=True):
            request.token_ids.append(token)
            request.logprobs.append(logprob)
            if self.on_token is not None:
                self.on_token(request.session, [token])
            if token in self.stop_ids:
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


def draw_noise(sampling: Sampling) -> np.ndarray:
    """One uniform number for each token of a turn.

    Noise belongs to the request, not to the batch: what an episode samples does not depend on its neighbours or on the
    order in which tools answer. That is what makes a resumed run repeat an uninterrupted one.
    """
    seed = sampling.seed if sampling.seed is not None else int.from_bytes(np.random.bytes(8), "little")
    return np.random.Generator(np.random.Philox(key=seed)).random(sampling.max_tokens, dtype=np.float32)


def sample_tokens(logits_BV: Tensor, temperature_B1: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Draw from softmax(logits / temperature) by inverting its cumulative distribution at `uniform_B` in [0, 1).

    Returns tokens [B], and their log-probabilities [B] and the entropy [B] under the *tempered* distribution,
    which is what the trainer recomputes. Temperature 0 takes the most likely token, and both at temperature 1.
    """
    greedy = temperature_B1[:, 0] == 0
    logprobs = F.log_softmax(logits_BV / torch.where(temperature_B1 == 0, 1.0, temperature_B1), dim=-1)
    probs = logprobs.exp()
    entropies = -(probs * logprobs).nansum(dim=-1)  # 0 * -inf, of a forbidden token, counts as 0
    cdf = probs.cumsum(dim=-1)
    # Scaling by the last entry absorbs rounding; `right` skips tokens of probability 0.
    tokens = torch.searchsorted(cdf, (uniform_B * cdf[:, -1])[:, None], right=True)[:, 0].clamp(
        max=logits_BV.shape[-1] - 1
    )
    tokens = torch.where(greedy, logits_BV.argmax(dim=-1), tokens)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0], entropies


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def _common_prefix(a: list[int], b: list[int]) -> int:
    """How many leading tokens agree. Usually all of `a`: then one comparison of slices does it."""
    if b[: len(a)] == a:
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _chunks(todo: list, max_tokens: int):
    """Cut length-sorted work into batches whose padded size stays below `max_tokens`."""
    chunk: list = []
    for item in todo:
        if chunk and (len(chunk) + 1) * (len(item[0].prompt_ids) - item[1]) > max_tokens:
            yield chunk
            chunk = []
        chunk.append(item)
    if chunk:
        yield chunk
