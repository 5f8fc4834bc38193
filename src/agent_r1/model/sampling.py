"""Sample tokens, and measure the log-probabilities with which they were sampled.

In: logits. Out: tokens and their log-probabilities, which the trainer's ratios divide by. Next:
`rollout/training_rows.py`. `sampler.py` calls these functions; at scale vLLM samples.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from agent_r1.core import Sampling


def draw_noise(sampling: Sampling) -> list[float]:
    """Draw one uniform number for each token of a turn.

    Noise belongs to the request, not to the batch. So an episode's samples do not depend on other
    episodes or on the order of tool results, and a resumed run repeats an uninterrupted one.
    """
    seed = sampling.seed
    if seed is None:
        seed = int.from_bytes(np.random.bytes(8), "little")
    # Philox takes any 64-bit key and needs no warm-up: a new generator per turn costs microseconds.
    generator = np.random.Generator(np.random.Philox(key=seed))
    return generator.random(sampling.max_tokens, dtype=np.float32).tolist()


def sample_tokens(
    logits_BV: Tensor, temperature_B1: Tensor, uniform_B: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample from softmax(logits / temperature) by inverting its cumulative distribution.

    It is inverted at `uniform_B`, in [0, 1).

    Returns tokens [B], and their log-probabilities [B] and the entropy [B] under the *tempered*
    distribution, which the trainer recomputes. Temperature 0 takes the most likely token, with both
    measured at temperature 1.
    """
    greedy = temperature_B1[:, 0] == 0
    # Each request has its own temperature: one batch may hold greedy and sampled ones.
    divisor_B1 = torch.where(temperature_B1 == 0, 1.0, temperature_B1)
    logprobs = F.log_softmax(logits_BV / divisor_B1, dim=-1)
    probs = logprobs.exp()
    entropies = -(probs * logprobs).nansum(dim=-1)  # a forbidden token's 0 * -inf counts as 0
    cdf = probs.cumsum(dim=-1)
    # Scaling by the last entry absorbs rounding; right=True skips tokens of probability 0.
    target_B1 = (uniform_B * cdf[:, -1])[:, None]
    tokens = torch.searchsorted(cdf, target_B1, right=True)[:, 0]
    # In float32, a uniform number just below 1 times the last entry can round up to that entry.
    tokens = tokens.clamp(max=logits_BV.shape[-1] - 1)
    if greedy.any():
        tokens = torch.where(greedy, logits_BV.argmax(dim=-1), tokens)
    # The log-probability of what was sampled, at the time it was sampled: the ratio's denominator
    # in training (lesson 6). After the next update, the weights that gave it are gone.
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0], entropies
