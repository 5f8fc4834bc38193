"""Make a step's batch, its minibatches, and micro-batches that compute equal beginnings only once.

In: a step's episodes. Out: a `Batch`; parts of it, some with a `PrefixTree`. Next: `forward.py`
computes with them. All choices depend only on the seed and the step's number, so a resumed run
repeats them.

The samples of a prompt begin with the same tokens, and a trained agent often samples the same
turns. In a causal model the state at a token depends on the tokens before it only, so equal
beginnings have equal states:

    row 0   question  search(A)  result  search(B)  result  answer(x)      the tree has each of these once:
    row 1   question  search(A)  result  answer(y)                         question - search(A) - result -+- search(B) ...
    row 2   question  search(A)  result  search(B)  result  answer(x)                                     +- answer(y)

A node is a distinct beginning. It attends to its ancestors, and its position is its depth. So
log-probabilities and gradient are those of the rows alone, up to rounding: the rows' losses add up
at the nodes. SGLang shares prefixes in inference in the same way (RadixAttention, 2312.07104).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agent_r1.config.settings import algorithm_has
from agent_r1.core import Trajectory
from agent_r1.ground.errors import AgentR1Error
from agent_r1.rollout.columns import Column
from agent_r1.rollout.decoder import Attention, Decoder, attend
from agent_r1.rollout.training_rows import Batch, collate, trajectory_rows


def make_batch(played: list[Trajectory], algorithm: str, columns: Sequence[Column] = ()) -> Batch:
    """Make the batch of a step from its usable episodes, with the estimator's columns."""
    usable = usable_trajectories(played, algorithm)
    rows = [
        row
        for number, trajectory in enumerate(usable)
        for row in trajectory_rows(trajectory, number, columns)
    ]
    return collate(rows, usable, columns)


def usable_trajectories(trajectories: list[Trajectory], algorithm: str) -> list[Trajectory]:
    """Drop episodes that failed or sampled nothing, and groups of one if groups are compared.

    Raises AgentR1Error if none remains.
    """
    usable = [
        t for t in trajectories if not t.stop_reason.failed and any(s.action_ids for s in t.steps)
    ]
    if algorithm_has(algorithm, "groups"):
        members = Counter(t.group_id for t in usable)
        usable = [t for t in usable if members[t.group_id] > 1]
    if not usable:
        ends = ", ".join(
            f"{n} {reason}" for reason, n in Counter(t.stop_reason for t in trajectories).items()
        )
        raise AgentR1Error(
            f"there is nothing to learn from: the episodes ended with {ends}; raise "
            "rollout.max_context (the prompts may "
            "overflow it) or env.episode_timeout_s",
            code="nothing_to_learn",
        )
    return usable


def minibatches(batch: Batch, count: int, epochs: int, seed: int) -> Iterator[Tensor]:
    """Yield the row indices of each optimiser step: `count` equal parts, `epochs` times.

    Trajectories are shuffled and never split: the rows of an episode share its advantage.
    """
    g = torch.Generator().manual_seed(seed % 2**63)
    trajectory_B = batch.trajectory_B.cpu()
    for _ in range(epochs):
        order = torch.randperm(int(trajectory_B.max()) + 1, generator=g)
        for part in order.tensor_split(min(count, len(order))):  # chunk(4) of 5 would make 3 parts
            yield torch.isin(trajectory_B, part).nonzero()[:, 0].to(batch.ids_BT.device)


def micro_batches(
    lengths_B: Tensor, max_tokens: int, rows: Tensor | None = None
) -> Iterator[Tensor]:
    """Group (some) rows by length into micro-batches of at most `max_tokens`, padding included."""
    rows = torch.arange(len(lengths_B), device=lengths_B.device) if rows is None else rows
    order = rows[lengths_B[rows].argsort(descending=True, stable=True)]
    start = 0
    while start < len(order):
        count = max(1, max_tokens // int(lengths_B[order[start]]))
        yield order[start : start + count]
        start += count


WORTH_IT = 0.8
"""Share of distinct tokens up to which trees are used. Attention costs more in a tree: each node is
compared with all."""


def micro_batches_of(
    batch: Batch, max_tokens: int, rows_B: Tensor | None = None
) -> Iterator[tuple[Tensor, Batch]]:
    """Cut (some) rows into micro-batches of at most `max_tokens` computed tokens, padding included.

    Yields the rows' indices and the rows. With trees, all rows of a prompt are in one micro-batch.
    """
    rows_B = torch.arange(len(batch), device=batch.lengths_B.device) if rows_B is None else rows_B
    if not len(rows_B):
        return
    rows_of, new_of = _distinct(batch, rows_B)
    sizes_P = torch.tensor([int(new_GT.sum()) for new_GT in new_of.values()])
    shares = int(sizes_P.sum()) <= WORTH_IT * int(batch.lengths_B[rows_B].sum())
    if (
        shares and int(sizes_P.max()) <= max_tokens
    ):  # a larger tree would need too much memory: nodes x nodes
        groups = list(rows_of.values())
        for trees in micro_batches(sizes_P, max_tokens):
            index_B = torch.cat([groups[i] for i in trees.tolist()])
            part = batch[index_B]
            yield index_B, replace(part, tree=grow_trees(part))
    else:
        for index_B in micro_batches(batch.lengths_B, max_tokens, rows_B):
            yield index_B, batch[index_B]


@dataclass
class PrefixTree:
    """The trees of a micro-batch: P prompts of at most N nodes."""

    ids_PN: Tensor  # int64, the token of each node; 0 on padding
    depths_PN: Tensor  # int64, its position in its rows
    visible_PNN: Tensor  # bool, the ancestors of each node, and itself
    node_BT: Tensor  # int64, p * N + n: the node of each token of a row; any number on padding

    def before_actions(self, model: Decoder, where_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `forward._before_actions`; A are the distinct nodes of actions, each predicted by its
        parent."""
        nodes_A, action_A = self.node_BT[where_BT].unique(return_inverse=True)
        parents_A = torch.empty_like(nodes_A)
        parents_A[action_A] = self.node_BT[:, :-1][where_BT[:, 1:]]
        needed_PN = torch.zeros_like(self.ids_PN, dtype=torch.bool)
        needed_PN.view(-1)[parents_A] = True
        at_PA, _ = places_of(needed_PN)
        hidden_PAD = model(
            self.ids_PN, self.depths_PN, tree_attention(self.visible_PNN, at_PA), at_PA
        )
        rank_A = needed_PN.cumsum(dim=1).view(-1)[parents_A] - 1
        return (
            hidden_PAD[parents_A // self.ids_PN.shape[1], rank_A],
            self.ids_PN.view(-1)[nodes_A],
            action_A,
        )


def places_of(where_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return [B, A], the places where each row is true; and bool [B, A].

    The second is false for the unused places at the end of rows with fewer places.
    """
    counts_B = where_BT.sum(dim=1)
    place_BA = where_BT.byte().argsort(dim=1, descending=True, stable=True)[
        :, : int(counts_B.max())
    ]
    return place_BA, torch.arange(place_BA.shape[1], device=place_BA.device) < counts_B[:, None]


def _distinct(batch: Batch, rows_B: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return each prompt's rows in lexical order, and where they are new: bool [rows, T].

    A token is new if no row above begins with the same tokens up to it. In that order, a row shares
    its longest beginning with the row above.
    """
    members: dict[str, list[int]] = {}
    for row in rows_B.tolist():
        members.setdefault(batch.groups[row], []).append(row)
    ids, lengths = batch.ids_BT.tolist(), batch.lengths_B.tolist()
    rows_of, new_of = {}, {}
    for group, rows in members.items():
        rows.sort(key=lambda row: ids[row][: lengths[row]])
        index_G = torch.tensor(rows, device=rows_B.device)
        ids_GT, lengths_G = batch.ids_BT[index_G], batch.lengths_B[index_G]
        real_GT = torch.arange(ids_GT.shape[1], device=rows_B.device) < lengths_G[:, None]
        same_GT = (ids_GT[1:] == ids_GT[:-1]) & real_GT[1:] & real_GT[:-1]
        new_GT = real_GT.clone()
        new_GT[1:] &= (
            same_GT.long().cumprod(dim=1) == 0
        )  # the first difference, and everything after it
        rows_of[group], new_of[group] = index_G, new_GT
    return rows_of, new_of


def grow_trees(batch: Batch) -> PrefixTree:
    """Make the trees of a micro-batch: one for each prompt."""
    device, (B, T) = batch.ids_BT.device, batch.ids_BT.shape
    rows_of, new_of = _distinct(batch, torch.arange(B, device=device))
    order_B, new_BT = torch.cat(list(rows_of.values())), torch.cat(list(new_of.values()))
    tree_B = torch.repeat_interleave(torch.tensor([len(rows) for rows in rows_of.values()])).to(
        device
    )
    # Number the nodes row by row. A token that is not new has the node of the nearest row above
    # that has a new one there.
    number_BT = (
        torch.where(new_BT, new_BT.flatten().cumsum(0).view(B, T) - 1, -1).cummax(dim=0).values
    )
    sizes_P = torch.tensor([int(new_GT.sum()) for new_GT in new_of.values()], device=device)
    node_BT = number_BT - (sizes_P.cumsum(0) - sizes_P)[tree_B][:, None]
    P, N = len(sizes_P), int(sizes_P.max())
    row_B, depth_B = new_BT.nonzero(as_tuple=True)  # of each node
    place = tree_B[row_B], node_BT[row_B, depth_B]
    ids_PN, depths_PN, row_PN = (
        torch.zeros(P, N, dtype=torch.long, device=device) for _ in range(3)
    )
    ids_PN[place] = batch.ids_BT[order_B][row_B, depth_B]
    depths_PN[place], row_PN[place] = depth_B, row_B
    # m is an ancestor of n if m is the node at m's depth on the way to n. Padding counts as the
    # first row's first token, so it sees that node, and attention has no empty row.
    on_the_way_PNN = node_BT[row_PN].gather(2, depths_PN[:, None].expand(P, N, N))
    visible_PNN = (on_the_way_PNN == torch.arange(N, device=device)) & (
        depths_PN[:, None] <= depths_PN[:, :, None]
    )
    of_rows_BT = torch.empty_like(node_BT)
    of_rows_BT[order_B] = node_BT + tree_B[:, None] * N
    return PrefixTree(ids_PN, depths_PN, visible_PNN, of_rows_BT)


def tree_attention(visible_PNN: Tensor, at_PA: Tensor) -> Attention:
    """Attend to ancestors; in the last layer, only from `at_PA`, fewer than N nodes."""
    at_PAN = visible_PNN.gather(1, at_PA[:, :, None].expand(-1, -1, visible_PNN.shape[2]))

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        visible = visible_PNN if q.shape[2] == k.shape[2] else at_PAN
        return attend(q, k, v, visible[:, None])

    return attention
