"""Compute equal beginnings of a batch's rows only once.

In: a batch, and the rows of an update. Out: micro-batches (`micro_batches_of`), some of them
`SharedRows`. Next: `forward.py` computes with both kinds.

The samples of a prompt begin with the same tokens, and a trained agent often samples the same
turns. In a causal model the state at a token depends on the tokens before it only, so equal
beginnings have equal states:

    row 0   question  search(A)  result  search(B)  result  answer(x)
    row 1   question  search(A)  result  answer(y)
    row 2   question  search(A)  result  search(B)  result  answer(x)

    the tree has each beginning once:

    question - search(A) - result -+- search(B) - result - answer(x)
                                   +- answer(y)

A node is a distinct beginning. It attends to its ancestors, and its position is its depth. So
log-probabilities and gradient are those of the rows alone, up to rounding: the rows' losses add up
at the nodes. SGLang shares prefixes in inference in the same way (RadixAttention, 2312.07104).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from agent_r1.model.decoder import Attention, Decoder, attend
from agent_r1.rollout.training_rows import Batch
from agent_r1.training.batches import micro_batches

WORTH_IT = 0.8
"""Share of distinct tokens up to which trees are used.

Attention costs more in a tree: each node is compared with all.
"""


def micro_batches_of(
    batch: Batch, max_tokens: int, rows_B: Tensor | None = None
) -> Iterator[tuple[Tensor, Batch]]:
    """Cut (some) rows into micro-batches of at most `max_tokens` computed tokens, padding included.

    Yields the rows' indices and the rows. With trees, all rows of a prompt are in one micro-batch.
    """
    if rows_B is None:
        rows_B = torch.arange(len(batch), device=batch.lengths_B.device)
    if not len(rows_B):
        return
    rows_of, new_of = _new_tokens(batch, rows_B)
    sizes_P = torch.tensor([int(new_GT.sum()) for new_GT in new_of.values()])
    saves = int(sizes_P.sum()) <= WORTH_IT * int(batch.lengths_B[rows_B].sum())
    # A tree that is larger than a micro-batch would need too much memory: nodes x nodes.
    fits = int(sizes_P.max()) <= max_tokens
    if not (saves and fits):
        for index_B in micro_batches(batch.lengths_B, max_tokens, rows_B):
            yield index_B, batch[index_B]
        return
    groups = list(rows_of.values())
    for trees in micro_batches(sizes_P, max_tokens):
        index_B = torch.cat([groups[i] for i in trees.tolist()])
        yield index_B, share_beginnings(batch[index_B])


@dataclass
class PrefixTree:
    """The trees of a micro-batch: P prompts of at most N nodes."""

    ids_PN: Tensor  # int64, the token of each node; 0 on padding
    depths_PN: Tensor  # int64, its position in its rows
    visible_PNN: Tensor  # bool, the ancestors of each node, and itself
    node_BT: Tensor  # int64, p * N + n: the node of each token of a row; any number on padding

    def before_actions(self, model: Decoder, where_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the states at the parents of action nodes [A, D], and their tokens [A].

        The third result is each action's number among these nodes. Rows that share a node have the
        same number there.
        """
        nodes_A, number_A = self.node_BT[where_BT].unique(return_inverse=True)
        # The state at a node's parent predicts the node, as position t - 1 predicts token t. Rows
        # that share a node share the parent, too, so they all write the same number here.
        parents_A = torch.empty_like(nodes_A)
        parents_A[number_A] = self.node_BT[:, :-1][where_BT[:, 1:]]
        parents_PN = torch.zeros_like(self.ids_PN, dtype=torch.bool)
        parents_PN.view(-1)[parents_A] = True
        at_PA, _ = places_of(parents_PN)
        attention = tree_attention(self.visible_PNN, at_PA)
        hidden_PAD = model(self.ids_PN, self.depths_PN, attention, at_PA)
        # Several actions may have one parent: count the needed nodes up to it to find its state.
        rank_A = parents_PN.cumsum(dim=1).view(-1)[parents_A] - 1
        tree_A = parents_A // self.ids_PN.shape[1]
        # Its row among the states of all trees, of which each tree has as many as the fullest.
        state_A = tree_A * hidden_PAD.shape[1] + rank_A
        hidden_AD = select_rows(hidden_PAD.flatten(0, 1), state_A)
        return hidden_AD, self.ids_PN.view(-1)[nodes_A], number_A


@dataclass(kw_only=True)
class SharedRows(Batch):
    """A micro-batch whose rows share beginnings."""

    tree: PrefixTree

    def __getitem__(self, index: Tensor) -> Batch:
        """Return the rows at `index` as a plain batch: other rows have another tree."""
        return Batch(**{field.name: getattr(self, field.name) for field in fields(Batch)})[index]


def select_rows(values_N: Tensor, index_A: Tensor) -> Tensor:
    """Return `values_N[index_A]`: rows of the first dimension, some of them several times.

    Differentiable.

    The gradient of a row that was selected several times is a sum. With plain indexing, several
    CPU threads add to it in any order, so that a run does not repeat to the bit. `index_select`
    has one order, and is faster.
    """
    return values_N.index_select(0, index_A)


def places_of(where_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return [B, A], the places where each row is true; and bool [B, A].

    The second is false for the unused places at the end of rows with fewer places.
    """
    counts_B = where_BT.sum(dim=1)
    place_BA = where_BT.byte().argsort(dim=1, descending=True, stable=True)[
        :, : int(counts_B.max())
    ]
    return place_BA, torch.arange(place_BA.shape[1], device=place_BA.device) < counts_B[:, None]


def share_beginnings(batch: Batch) -> SharedRows:
    """Return the same rows with their trees."""
    return SharedRows(**vars(batch), tree=grow_trees(batch))


def _new_tokens(batch: Batch, rows_B: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return each prompt's rows in lexical order, and where they are new: bool [rows, T].

    A token is new if no row above begins with the same tokens up to it. In that order, a row shares
    its longest beginning with the row above.
    """
    members: dict[str, list[int]] = {}
    for row in rows_B.tolist():
        members.setdefault(batch.groups[row], []).append(row)
    ids = batch.ids_BT.tolist()
    lengths = batch.lengths_B.tolist()
    rows_of: dict[str, Tensor] = {}
    new_of: dict[str, Tensor] = {}
    for group, rows in members.items():
        rows.sort(key=lambda row: ids[row][: lengths[row]])
        index_G = torch.tensor(rows, device=rows_B.device)
        ids_GT = batch.ids_BT[index_G]
        lengths_G = batch.lengths_B[index_G]
        real_GT = torch.arange(ids_GT.shape[1], device=rows_B.device) < lengths_G[:, None]
        same_GT = (ids_GT[1:] == ids_GT[:-1]) & real_GT[1:] & real_GT[:-1]
        new_GT = real_GT.clone()
        # The product is 1 up to the first difference from the row above, and 0 from there on.
        new_GT[1:] &= same_GT.long().cumprod(dim=1) == 0
        rows_of[group] = index_G
        new_of[group] = new_GT
    return rows_of, new_of


def grow_trees(batch: Batch) -> PrefixTree:
    """Make the trees of a micro-batch: one for each prompt."""
    device = batch.ids_BT.device
    B, T = batch.ids_BT.shape
    rows_of, new_of = _new_tokens(batch, torch.arange(B, device=device))
    order_B = torch.cat(list(rows_of.values()))
    new_BT = torch.cat(list(new_of.values()))
    rows_P = torch.tensor([len(rows) for rows in rows_of.values()])
    tree_B = torch.repeat_interleave(rows_P).to(device)
    # Number the nodes row by row. A token that is not new has the node of the nearest row above
    # that has a new one there.
    new_number_BT = new_BT.flatten().cumsum(0).view(B, T) - 1
    number_BT = torch.where(new_BT, new_number_BT, -1).cummax(dim=0).values
    # Now the numbers begin at 0 in each tree.
    sizes_P = torch.tensor([int(new_GT.sum()) for new_GT in new_of.values()], device=device)
    first_P = sizes_P.cumsum(0) - sizes_P
    node_BT = number_BT - first_P[tree_B][:, None]
    P = len(sizes_P)
    N = int(sizes_P.max())
    row_M, depth_M = new_BT.nonzero(as_tuple=True)  # of each of the M nodes of all trees
    tree_M = tree_B[row_M]
    node_M = node_BT[row_M, depth_M]
    ids_PN = torch.zeros(P, N, dtype=torch.long, device=device)
    depths_PN = torch.zeros_like(ids_PN)
    row_PN = torch.zeros_like(ids_PN)
    ids_PN[tree_M, node_M] = batch.ids_BT[order_B][row_M, depth_M]
    depths_PN[tree_M, node_M] = depth_M
    row_PN[tree_M, node_M] = row_M
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
