"""Sample from a local model, with continuous batching and a KV cache for each episode.

In: prompts from many episodes, as they come. Out: `Generation`s. It implements `Policy`; at scale vLLM does. The
reading path ends here; `decoder.py` is the network, and `training/run.py` makes a run of the loop.

An agent's episode alternates between a few dozen sampled tokens and a tool result. Two methods make this cheap:

* **Continuous batching.** Each pass decodes one token of every running episode. An episode that calls a tool leaves the
  batch and returns with the result.
* **A cache across turns.** The next prompt is all tokens so far plus the tool's result. The cache has the keys and
  values of the former, so only the new tokens are read (the *extension*). Frameworks that send each turn as a new
  request read the whole conversation again, unless a prefix cache still has it.

One trap: the last sampled token, usually `<|im_end|>`, was never fed to the model, so the cache is one token short of
the conversation. The extension starts at the first token that the cache lacks, not at the tool's text.
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
    """Keys and values of `slots` conversations: [layer][slot, kv head, position, head_dim]."""

    def __init__(self, model: Decoder, slots: int, length: int):
        s, weight = model.shape, model.embed.weight
        shape = (s.layers, slots, s.kv_heads, length, s.head_dim)
        self.keys = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        self.values = torch.zeros_like(self.keys)
        self.lengths = torch.zeros(slots, dtype=torch.long, device=weight.device)  # cached tokens of each slot

    def copy(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copy the conversations of `sources` to `targets`, up to `length` positions."""
        source, target = torch.tensor([sources, targets], device=self.lengths.device)
        self.keys[:, target, :, :length] = self.keys[:, source, :, :length]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]
        self.lengths[target] = self.lengths[source]


@dataclass
class _Request:
    """One call of `generate` in the sampler."""

    session: str
    prompt_ids: list[int]
    sampling: Sampling
    noise: np.ndarray  # one uniform number per token that may be sampled
    future: asyncio.Future
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass
class SamplerStats:
    """Counts since the last `sync`; the loop reports them per step."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    entropy: float = 0.0  # sum over the sampled tokens, in nats
    seconds: float = 0.0  # in the model; the rest of a rollout's time goes to environments and the event loop

    def mean_entropy(self) -> dict[str, float]:
        """Return the step's metric: the mean entropy in nats."""
        return {"actor/entropy": self.entropy / max(self.decode_tokens, 1)}


IDLE_TURNS = 100
"""Passes of the event loop without a request to decode, after which the sampler begins to sleep."""


class LocalPolicy(Policy):
    """`Policy` over a `Decoder` in this process. One instance serves all episodes of its event loop."""

    exact = True
    """Whether it samples from the trainer's weights with the trainer's arithmetic, apart from a smaller dtype's rounding."""

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
        self._slot_of: dict[str, int] = {}  # live sessions, also while a tool runs
        self._cached_ids: dict[str, list[int]] = {}  # the tokens of each session's cache entries
        self._waiting: list[_Request] = []
        self._running: dict[int, _Request] = {}  # slot -> request
        self._task: asyncio.Task | None = None
        self._numbers = itertools.count()

    def sync(self, actor: Decoder) -> None:
        """Copy the trainer's weights, unless the model is shared, and reset the statistics."""
        if actor is not self.model:
            self.model.load_state_dict(actor.state_dict())
        self.stats = SamplerStats()

    # ---------------------------------------------------------------------------------------- the Policy protocol

    async def generate(self, prompt_ids: list[int], sampling: Sampling, session: str | None = None) -> Generation:
        """See `Policy.generate`. Raise AgentR1Error if the prompt leaves no room for a token."""
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
        """Free the session's slot, and drop its pending request."""
        self._waiting = [r for r in self._waiting if r.session != session]
        slot = self._slot_of.pop(session, None)
        self._cached_ids.pop(session, None)
        if slot is not None:
            self._running.pop(slot, None)

    # --------------------------------------------------------------------------------------------------- scheduling

    async def _run(self) -> None:
        """Read new prompts, decode one token per request, let the episodes act; repeat."""
        idle, reading = 0, []
        SAMPLING_HERE.add(asyncio.get_running_loop())
        try:
            while self._waiting or self._running:
                # A pass over few tokens costs nearly as much as one over many. So new requests wait for some more
                # while others are being decoded.
                start = time.perf_counter()
                if len(self._waiting) >= max(1, len(self._running) // 4):
                    reading = self._admit()
                    self._prefill(reading)
                idle = 0 if self._running else idle + 1
                if self._running:
                    self._decode()
                self.stats.seconds += time.perf_counter() - start
                # Yield twice: once for environments to send their tool calls, once for the search that they share.
                await asyncio.sleep(0)
                # A timer would let the clock decide which requests join the next batch, and a batch's size changes the
                # last bits of a logit. So yield with sleep(0). After many idle turns a tool is really waiting: sleep.
                await asyncio.sleep(0 if idle < IDLE_TURNS else 0.001)
        except Exception as error:
            self._fail(error, reading)

    def _fail(self, error: Exception, reading: list[_Request]) -> None:
        """Pass a failure to every waiting request; otherwise they would wait for ever."""
        for request in [*reading, *self._waiting, *self._running.values()]:
            if not request.future.done():
                request.future.set_exception(error)
        self._waiting, self._running = [], {}

    def _admit(self) -> list[_Request]:
        """Return the waiting requests that have, or get, a slot. The rest keep waiting."""
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
        """Move live slots to the front if finished episodes left gaps. Decoding covers slots 0..n-1."""
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
            # Samples of one prompt arrive together (GRPO's group): read it once and copy the cache.
            leader = first_with.setdefault(tuple(request.prompt_ids), request) if keep == 0 else request
            if leader is request:
                todo.append((request, min(keep, len(request.prompt_ids) - 1)))
            else:
                twins.append((leader, request))
        todo.sort(key=lambda item: len(item[0].prompt_ids) - item[1])  # similar lengths together: little padding
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
        """Read the new tokens of several conversations in one pass. Return each last hidden state [D]."""
        device = self.cache.lengths.device
        slots = torch.tensor([self._slot_of[r.session] for r, _ in chunk], device=device)
        starts = torch.tensor([keep for _, keep in chunk], device=device)
        counts = [len(r.prompt_ids) - keep for r, keep in chunk]
        T, end = max(counts), max(len(r.prompt_ids) for r, _ in chunk)
        ids = torch.tensor(
            [r.prompt_ids[k:] + [0] * (T - n) for (r, k), n in zip(chunk, counts, strict=True)], device=device
        )
        positions = starts[:, None] + torch.arange(T, device=device)
        # Padding writes after the row's end, where the next tokens overwrite it; it only has to stay in bounds.
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
        """Decode one token for every running episode, in one pass over slots 0..n-1.

        Slots that wait for a tool get a dummy token. Its keys are one position after the conversation, where the next
        real token overwrites them.
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
        """Sample one token for each request; finished requests leave the batch."""
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
    """Draw one uniform number for each token of a turn.

    Noise belongs to the request, not to the batch. So an episode's samples do not depend on other episodes or on the
    order of tool results, and a resumed run repeats an uninterrupted one.
    """
    seed = sampling.seed if sampling.seed is not None else int.from_bytes(np.random.bytes(8), "little")
    return np.random.Generator(np.random.Philox(key=seed)).random(sampling.max_tokens, dtype=np.float32)


def sample_tokens(logits_BV: Tensor, temperature_B1: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sample from softmax(logits / temperature) by inverting its cumulative distribution at `uniform_B` in [0, 1).

    Returns tokens [B], and their log-probabilities [B] and the entropy [B] under the *tempered* distribution, which the
    trainer recomputes. Temperature 0 takes the most likely token, with both measured at temperature 1.
    """
    greedy = temperature_B1[:, 0] == 0
    logprobs = F.log_softmax(logits_BV / torch.where(temperature_B1 == 0, 1.0, temperature_B1), dim=-1)
    probs = logprobs.exp()
    entropies = -(probs * logprobs).nansum(dim=-1)  # a forbidden token's 0 * -inf counts as 0
    cdf = probs.cumsum(dim=-1)
    # Scaling by the last entry absorbs rounding; right=True skips tokens of probability 0.
    tokens = torch.searchsorted(cdf, (uniform_B * cdf[:, -1])[:, None], right=True)[:, 0].clamp(
        max=logits_BV.shape[-1] - 1
    )
    tokens = torch.where(greedy, logits_BV.argmax(dim=-1), tokens)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0], entropies


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def _common_prefix(a: list[int], b: list[int]) -> int:
    """Count the leading tokens that agree. If all of `a` do, one comparison of slices is enough."""
    if b[: len(a)] == a:
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _chunks(todo: list, max_tokens: int):
    """Cut length-sorted work into batches whose padded size is at most `max_tokens`."""
    chunk: list = []
    for item in todo:
        if chunk and (len(chunk) + 1) * (len(item[0].prompt_ids) - item[1]) > max_tokens:
            yield chunk
            chunk = []
        chunk.append(item)
    if chunk:
        yield chunk
