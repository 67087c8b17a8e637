"""Resharding: the bytes that ranks have to fetch when a training goes on under another plan.

    pieces     the embedding, the layers and the head, divided among stages
    interval   of a piece, tensor parallelism holds 1 / tp, and ZeRO a part of that: an interval of [0, 1)
    fetch      what a rank needs and does not hold: for weights and for the optimizer's states

A rank keeps its number. Ranks beyond those of the plan before hold nothing, and those that are lost are lost.
"""

from __future__ import annotations

from mpkit.prediction.cost_model.architecture import Architecture
from mpkit.prediction.cost_model.layout import Layout
from mpkit.prediction.cost_model.stack import Stack

__all__ = ["resharding_bytes"]

Interval = tuple[float, float]


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
    """
    sizes = _pieces(model)
    return [_fetched_bytes(sizes, before, after, stack, rank) for rank in range(after.ranks)]


def _pieces(model: Architecture) -> list[int]:
    """Return the parameters of the embedding, of each layer and of the head."""
    layers = [model.layer_parameters(first) for first, count in model.kinds() for _ in range(count)]
    return [model.embedding_parameters, *layers, model.head_parameters]


def _fetched_bytes(sizes: list[int], before: Layout, after: Layout, stack: Stack, rank: int) -> float:
    """Return the bytes that a rank fetches."""
    needed = 0.0
    for element, sharded_from in ((stack.element, 3), (stack.states, 1)):
        new = _interval(after, rank, sharded_from)
        old = _interval(before, rank, sharded_from) if rank < before.ranks else (0.0, 0.0)
        both = max(0.0, min(new[1], old[1]) - max(new[0], old[0]))
        held = _stage_pieces(before, rank, len(sizes)) if rank < before.ranks else set()
        for piece in _stage_pieces(after, rank, len(sizes)):
            share = new[1] - new[0] - (both if piece in held else 0.0)
            needed += element * sizes[piece] * share
    return needed


def _interval(layout: Layout, rank: int, sharded_from: int) -> Interval:
    """Return what a rank holds of each piece: of weights from ZeRO-3 on a part, of states from ZeRO-1 on.

    The ranks of a mesh are numbered with tp innermost, then cp, dp and pp.
    """
    begin, width = (rank % layout.tp) / layout.tp, 1 / layout.tp
    if layout.zero < sharded_from:
        return begin, begin + width
    part = rank // layout.tp % layout.replicas % layout.shards
    return begin + width * part / layout.shards, begin + width * (part + 1) / layout.shards


def _stage_pieces(layout: Layout, rank: int, pieces: int) -> set[int]:
    """Return the pieces of a rank's stage."""
    stage = rank // (layout.tp * layout.replicas)
    counts = layout.stage_layers(pieces - 2)
    begin = 1 + sum(counts[:stage])
    held = set(range(begin, begin + counts[stage]))
    if stage == 0:
        held.add(0)
    if stage == layout.pp - 1:
        held.add(pieces - 1)
    return held
