"""Compute the true policy gradient by adding up all plays.

    J        = sum over plays of p(play) R(play)
    grad J   = sum over plays of p(play) (R(play) - b) grad log p(play)       for any constant b

In: plays with their probabilities. Out: gradients as one vector. Next: `rows.py` compares the
direction of an estimator with them. The plays of a tree give the covered part exactly; sampled
plays that leave the tree give the rest without bias (each counts rest / samples).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agent_r1 import (
    Batch,
    Decoder,
    Trajectory,
    collate,
    micro_batches_of,
    states_before_actions,
    trajectory_rows,
)
from agent_r1_recipes.exact.tree import Tree

MICRO_TOKENS = 6000
"""Tokens of one pass, after equal beginnings were joined."""
PART_TOKENS = 1500
"""Distinct tokens of the plays that are joined. Attention compares each of them with all."""


def passes_of(batch: Batch, rows_B: Tensor | None = None) -> Iterator[tuple[Tensor, Batch]]:
    """Cut (some) rows into passes in which equal beginnings are read once.

    Yields the rows' indices and the rows. A question whose plays have more than `PART_TOKENS`
    distinct tokens is cut into parts, in lexical order, so that neighbours share most.
    """
    if rows_B is None:
        rows_B = torch.arange(len(batch))
    lengths = batch.lengths_B.tolist()
    ids = {row: batch.ids_BT[row, : lengths[row]].tolist() for row in rows_B.tolist()}
    groups = list(batch.groups)
    part = size = 0
    above: list[int] = []
    for row in sorted(ids, key=lambda row: (batch.groups[row], ids[row])):
        new = len(ids[row]) - len(os.path.commonprefix([above, ids[row]]))
        if size + new > PART_TOKENS:
            part += 1
            size = 0
            new = len(ids[row])
        size += new
        above = ids[row]
        groups[row] = f"{batch.groups[row]}, part {part}"
    yield from micro_batches_of(replace(batch, groups=groups), MICRO_TOKENS, rows_B)


def action_logprobs(model: Decoder, part: Batch, temperature: float) -> Tensor:
    """Compute log pi of each action token: [B, T], in the model's own dtype.

    Training rounds logits to float32 before the softmax. A check by finite differences requires
    float64 throughout.
    """
    hidden_AD, tokens_A, action_A = states_before_actions(model, part)
    logprobs_AV = (model.logits(hidden_AD) / temperature).log_softmax(-1)
    logprobs_A = logprobs_AV.gather(1, tokens_A[:, None])[:, 0]
    where_BT = part.mask_BT.bool()
    out_BT = torch.zeros(where_BT.shape, dtype=logprobs_A.dtype)
    return out_BT.masked_scatter(where_BT, logprobs_A.index_select(0, action_A))


def play_logprobs(model: Decoder, batch: Batch, temperature: float) -> Tensor:
    """Compute the logarithm of each play's probability, float64 [N]. The rows are whole plays."""
    index_B, N = batch.number_trajectories()
    total_N = torch.zeros(N, dtype=torch.float64)
    for rows_B, part in passes_of(batch):
        logprobs_BT = action_logprobs(model, part, temperature)
        total_N = total_N.index_add(0, index_B[rows_B], logprobs_BT.double().sum(1))
    return total_N


def token_logprobs_of(model: Decoder, batch: Batch, temperature: float) -> Tensor:
    """Compute log pi of the action tokens of all rows, float64 [B, T]."""
    out_BT = torch.zeros(batch.mask_BT.shape, dtype=torch.float64)
    for rows_B, part in passes_of(batch):
        logprobs_BT = action_logprobs(model, part, temperature)
        out_BT[rows_B, : logprobs_BT.shape[1]] = logprobs_BT.double()
    return out_BT


def push(model: Decoder, batch: Batch, weights_BT: Tensor, temperature: float) -> Tensor:
    """Compute the sum over action tokens of weight times grad log pi, as one vector."""
    return push_all(model, batch, [weights_BT], temperature)[0]


def push_all(
    model: Decoder, batch: Batch, all_weights: Sequence[Tensor], temperature: float
) -> list[Tensor]:
    """Compute the same for several weights [B, T] of the tokens. All share one forward pass."""
    parameters = list(model.parameters())
    nothing = torch.cat([torch.zeros_like(p).flatten() for p in parameters])
    totals = [nothing.clone() for _ in all_weights]
    # Rows whose weights are zero have no gradient.
    used = [(weights_BT != 0).any(dim=1) for weights_BT in all_weights]
    for rows_B, part in passes_of(batch, torch.stack(used).any(dim=0).nonzero()[:, 0]):
        logprobs_BT = action_logprobs(model, part, temperature)
        for total, weights_BT, used_B in zip(totals, all_weights, used, strict=True):
            if not used_B[rows_B].any():
                continue
            weights = weights_BT[rows_B, : logprobs_BT.shape[1]].to(logprobs_BT.dtype)
            grads = torch.autograd.grad(
                (logprobs_BT * weights).sum(), parameters, retain_graph=True, materialize_grads=True
            )
            total += torch.cat([grad.flatten() for grad in grads])
    return totals


@contextmanager
def at_offset(model: Decoder, direction: Tensor, step: float) -> Iterator[None]:
    """Move the weights by `step` times `direction`, and restore them at the end."""
    before = [weight.detach().clone() for weight in model.parameters()]
    try:
        with torch.no_grad():
            place = 0
            for weight in model.parameters():
                piece = direction[place : place + weight.numel()]
                weight += step * piece.view_as(weight)
                place += weight.numel()
        yield
    finally:
        with torch.no_grad():
            for weight, old in zip(model.parameters(), before, strict=True):
                weight.copy_(old)


@dataclass
class Plays:
    """Plays of several questions, as a batch, with their probabilities."""

    trajectories: list[Trajectory]
    batch: Batch
    """The rows of all plays, in order."""
    chance_N: Tensor
    """float64 [N].

    Probability of each play. A sampled play outside its tree has its share of the rest.
    """
    question_N: Tensor
    """int64 [N]."""
    outside_N: Tensor
    """bool [N]: a sampled play outside its tree."""
    reward_N: Tensor
    """float64 [N]."""
    kinds: list[str]
    """Of each question, such as 2-hop."""

    @classmethod
    def of(cls, trees: Sequence[Tree]) -> Plays:
        """Collect the plays of trees, sampled ones included."""
        trajectories: list[Trajectory] = []
        chances: list[float] = []
        questions: list[int] = []
        outside: list[bool] = []
        for question, tree in enumerate(trees):
            inside = [(play, math.exp(play.logprob), False) for play in tree.plays]
            share = tree.rest / max(len(tree.rest_plays), 1)
            for play, chance, is_outside in inside + [(p, share, True) for p in tree.rest_plays]:
                trajectories.append(play.trajectory)
                chances.append(chance)
                questions.append(question)
                outside.append(is_outside)
        rows = []
        for number, trajectory in enumerate(trajectories):
            rows += trajectory_rows(trajectory, number)
        return cls(
            trajectories,
            collate(rows, trajectories),
            torch.tensor(chances, dtype=torch.float64),
            torch.tensor(questions),
            torch.tensor(outside),
            torch.tensor([t.reward for t in trajectories], dtype=torch.float64),
            [str((tree.row.get("extra_info") or {}).get("kind", "all")) for tree in trees],
        )

    @property
    def questions(self) -> int:
        return len(self.kinds)

    def value_Q(self, chance_N: Tensor | None = None) -> Tensor:
        """Compute J of each question, for these probabilities of plays."""
        chance_N = self.chance_N if chance_N is None else chance_N
        zero_Q = torch.zeros(self.questions, dtype=torch.float64)
        return zero_Q.index_add(0, self.question_N, chance_N * self.reward_N)

    def score_weights(self, keep_N: Tensor) -> Tensor:
        """Return weights [B, T] whose `push` is the kept plays' part of grad J."""
        # The baseline: it changes nothing where all plays are kept, and less is left to chance.
        baseline_N = self.value_Q()[self.question_N]
        weight_N = torch.where(keep_N, self.chance_N * (self.reward_N - baseline_N), 0.0)
        return self.on_tokens(weight_N)

    def on_tokens(self, weight_N: Tensor) -> Tensor:
        """Copy the weight of each play to its action tokens: [B, T]."""
        return self.batch.mask_BT.double() * weight_N[self.batch.trajectory_B][:, None]


@dataclass(frozen=True)
class TrueGradient:
    """The gradient of J of some questions, and how far it is known."""

    whole: Tensor
    rest_ratio: float
    """Norm of the sampled rest over the norm of the whole. It contains the noise of the samples, so
    the true ratio is rather smaller."""
    noise_ratio: float
    """Standard error of the sampled rest over the norm of the whole."""
    inside_cosine: float
    """Cosine of the covered part with the whole: what truncation costs."""

    @property
    def certainty(self) -> str:
        if self.rest_ratio == 0:
            return "exact"
        return "nearly exact" if self.rest_ratio < 0.1 else "estimated"


def true_gradient(
    model: Decoder, plays: Plays, temperature: float, questions: Sequence[int]
) -> TrueGradient:
    """Compute the gradient of the mean J of these questions."""
    member_N = torch.isin(plays.question_N, torch.tensor(questions))
    inside_N = member_N & ~plays.outside_N
    outside_N = member_N & plays.outside_N
    scale = 1 / len(questions)
    inside = scale * push(model, plays.batch, plays.score_weights(inside_N), temperature)
    if not outside_N.any():
        return TrueGradient(inside, 0.0, 0.0, 1.0)
    # Two halves of the samples: their difference is the noise.
    even_N = torch.arange(len(outside_N)) % 2 == 0
    halves = []
    for half_N in (outside_N & even_N, outside_N & ~even_N):
        weights_BT = 2 * scale * plays.score_weights(half_N)
        halves.append(push(model, plays.batch, weights_BT, temperature))
    rest = (halves[0] + halves[1]) / 2
    whole = inside + rest
    norm = float(whole.norm())
    return TrueGradient(
        whole,
        float(rest.norm()) / norm if norm else math.inf,
        float((halves[0] - halves[1]).norm()) / 2 / norm if norm else math.inf,
        cosine(inside, whole),
    )


def shown_by_constant(model: Decoder, plays: Plays, temperature: float) -> float:
    """Return the bias that a constant baseline shows with these plays, though it has none.

    The mean of grad log p is zero over all plays, but not over a tree and a sample of the rest.
    Smaller biases of an estimator are no evidence. The baseline is the mean reward.
    """
    value_Q = plays.value_Q()
    apart_N = plays.chance_N * (value_Q[plays.question_N] - value_Q.mean())
    every_N = torch.ones(len(plays.trajectories), dtype=torch.bool)
    weights = [plays.score_weights(every_N), plays.on_tokens(apart_N)]
    truth, off = push_all(model, plays.batch, weights, temperature)
    return float(off.norm() / (truth + off).norm())


def cosine(a: Tensor, b: Tensor) -> float:
    """Compute the cosine of two vectors; nan if one is zero."""
    norms = float(a.norm() * b.norm())
    return float(a @ b) / norms if norms else math.nan
