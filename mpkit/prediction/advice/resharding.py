"""Resharding: the bytes that ranks have to fetch when a training goes on under another plan.

    pieces     the embedding, the layers, their experts and the head, divided among stages
    interval   of a piece, tensor parallelism holds 1 / tp, of experts expert parallelism 1 / ep, and ZeRO a part of
               that: an interval of [0, 1)
    fetch      what a rank needs and does not hold: for weights and for the optimizer's states

A rank keeps its number. Ranks beyond those of the plan before hold nothing, and those that are lost are lost.
"""

from __future__ import annotations

from typing import NamedTuple

from mpkit.prediction.cost_model.architecture import Architecture
from mpkit.prediction.cost_model.layout import Layout
from mpkit.prediction.cost_model.stack import Stack

__all__ = ["resharding_bytes"]

Interval = tuple[float, float]


class _PieceSize(NamedTuple):
    """The parameters of a piece, and whether they are experts'."""

    parameters: int
    experts: bool


def resharding_bytes(model: Architecture, before: Layout, after: Layout, stack: Stack) -> list[float]:
    """Return the bytes that each rank of the plan after has to fetch.

    >>> model = Architecture(2, 64, 4)
    >>> plain, sharded = Layout(dp=2), Layout(dp=2, zero=3)
    >>> resharding_bytes(model, plain, sharded, Stack("pytorch"))  # every rank holds its part already
    [0.0, 0.0]
    >>> states = 12 * model.parameters
    >>> fetched = resharding_bytes(model, Layout(dp=2, zero=1), plain, Stack("pytorch"))
    >>> fetched == [states / 2, states / 2]  # the other half
    True
    >>> mixture = Architecture(2, 64, 4, experts=4, top_k=2)
    >>> fetched = resharding_bytes(mixture, Layout(dp=2, ep=2), plain, Stack("pytorch"))
    >>> fetched[0] == (2 + 12) * 2 * mixture.expert_parameters() / 2  # weights and states of the other experts
    True
    """
    sizes = _pieces(model)
    return [_fetched_bytes(sizes, before, after, stack, rank) for rank in range(after.ranks)]


def _pieces(model: Architecture) -> list[_PieceSize]:
    """Return the sizes of the embedding, of each layer and its experts, and of the head."""
    pieces = [_PieceSize(model.embedding_parameters, experts=False)]
    for first, count in model.kinds():
        experts = model.expert_parameters(first)
        rest = model.layer_parameters(first) - experts
        pieces += [_PieceSize(rest, experts=False), _PieceSize(experts, experts=True)] * count
    return [*pieces, _PieceSize(model.head_parameters, experts=False)]


def _fetched_bytes(sizes: list[_PieceSize], before: Layout, after: Layout, stack: Stack, rank: int) -> float:
    """Return the bytes that a rank fetches."""
    needed = 0.0
    for element, sharded_from in ((stack.element, 3), (stack.states, 1)):
        held = _stage_pieces(before, rank, len(sizes)) if rank < before.ranks else set()
        for piece in _stage_pieces(after, rank, len(sizes)):
            new = _interval(after, rank, sharded_from, experts=sizes[piece].experts)
            share = new[1] - new[0]
            if piece in held:
                old = _interval(before, rank, sharded_from, experts=sizes[piece].experts)
                share -= max(0.0, min(new[1], old[1]) - max(new[0], old[0]))
            needed += element * sizes[piece].parameters * share
    return needed


def _interval(layout: Layout, rank: int, sharded_from: int, *, experts: bool) -> Interval:
    """Return what a rank holds of each piece: of weights from ZeRO-3 on a part, of states from ZeRO-1 on.

    The ranks of a mesh are numbered with tp innermost, then cp, dp and pp. Neighbours divide experts; they are tp apart
    where the ranks along tp share an expert or hold the same ones.
    """
    tp, ep = (layout.expert_tp, layout.ep) if experts else (layout.tp, 1)
    apart = layout.tp if layout.alike else tp
    among = rank % (layout.replicas * layout.tp) // apart  # its number among those that hold such parts
    width = 1 / (tp * ep)
    begin = (among % ep * tp + rank % layout.tp % tp) * width
    if layout.zero < sharded_from:
        return begin, begin + width
    n = layout.expert_shards if experts else layout.shards
    part = among // ep % n
    return begin + width * part / n, begin + width * (part + 1) / n


def _stage_pieces(layout: Layout, rank: int, pieces: int) -> set[int]:
    """Return the pieces of a rank's stage; a layer is two."""
    stage = rank // (layout.tp * layout.replicas)
    counts = layout.stage_layers((pieces - 2) // 2)
    begin = 1 + 2 * sum(counts[:stage])
    held = set(range(begin, begin + 2 * counts[stage]))
    if stage == 0:
        held.add(0)
    if stage == layout.pp - 1:
        held.add(pieces - 1)
    return held
