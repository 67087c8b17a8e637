"""Resharding: what is sent where a layer wants its input divided in another way than the layer before left it.

With layouts A (what there is) and B (what is wanted), each dimension of which is cut into more or fewer parts:

    forward     same parts             nothing
                only more parts        slice: each device keeps a part of what it has
                only fewer parts       all-gather among those that share a part of B
                more here, fewer there all-to-all among these
    backward    the same from B to A for gradients; where q devices have parts of a sum, a reduce-scatter first, so that
                the gradient arrives in q parts (reduce-scatter and all-gather are an all-reduce)

Of the parts of B that a device wants it has 1/n, where n counts the parts of A that meet in one of B. For a chain that
can be arranged for each pair of neighbours: devices are edges between parts of A and of B that overlap, and this
bipartite graph is regular, so it is a union of perfect matchings. Groups are priced as on neighbouring devices.

Source: Jia, Zaharia, Aiken 2019, section 5 (tasks of communication wherever devices that produce and consume a part
differ); the operations, Thakur, Rabenseifner and Gropp 2005.
"""

from __future__ import annotations

from math import lcm
from typing import NamedTuple

from examples.flexflow.layer import TensorLayout
from mpkit.trace import Kind


class ReshardingCollective(NamedTuple):
    """One collective: its kind, the payload in bytes (as `mpkit.devices` counts it), and the size of each group."""

    kind: Kind
    nbytes: float
    n: int


def forward(nbytes: float, there: TensorLayout, wanted: TensorLayout) -> list[ReshardingCollective]:
    """Return the collectives that take a tensor of `nbytes` from one layout to another.

    >>> forward(64.0, TensorLayout(4), TensorLayout(4, 1, 2))  # a slice
    []
    >>> [forward(64.0, TensorLayout(4), to)[0].kind.word for to in (TensorLayout(2), TensorLayout(1, 1, 4))]
    ['all_gather', 'all_to_all']
    """
    n, finer = 1, False
    for has, wants in zip(there, wanted, strict=True):
        pieces = lcm(has, wants)
        n *= pieces // wants
        finer = finer or pieces > has
    if n == 1:
        return []
    return [ReshardingCollective(Kind.ALL_TO_ALL if finer else Kind.ALL_GATHER, nbytes / wanted.parts, n)]


def backward(
    nbytes: float, there: TensorLayout, wanted: TensorLayout, partial_sums: int
) -> list[ReshardingCollective]:
    """Return the collectives that take the gradient of the wanted layout back to the layout that was there.

    >>> [message.kind.word for message in backward(64.0, TensorLayout(), TensorLayout(), 4)]  # Megatron's f
    ['all_reduce']
    >>> [message.kind.word for message in backward(64.0, TensorLayout(1, 1, 4), TensorLayout(), 4)]
    ['reduce_scatter']

    Args:
        nbytes: of the whole tensor.
        there: the layout of the output of the layer before.
        wanted: the layout of the input of the layer after.
        partial_sums: the number of devices that each have a part of the sum, q.
    """
    if partial_sums == 1:
        return forward(nbytes, wanted, there)
    part = nbytes / wanted.parts
    reduced = TensorLayout(wanted.sample, wanted.attribute, wanted.channel * partial_sums)
    rest = forward(nbytes, reduced, there)
    if rest == [ReshardingCollective(Kind.ALL_GATHER, part, partial_sums)]:
        return [ReshardingCollective(Kind.ALL_REDUCE, part, partial_sums)]
    return [ReshardingCollective(Kind.REDUCE_SCATTER, part, partial_sums), *rest]
