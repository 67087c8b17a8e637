"""The cut through the graph of a forward that lets its backward be done in two halves.

    path       the nodes that lead to the inputs, along which the gradient is propagated first
    frontier   those nodes of the path that also have edges off the path, to weights
    met        weights whose gradients arrive from several places and meet off the path: they have to be summed at once

A set of weights is represented by an integer with one bit per weight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from operator import or_

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

__all__ = ["GraphCut"]


class GraphCut:
    """The cut of the graph of a stage's forward into two halves.

    Args:
        roots: the edges where the stage's outputs are in the graph.
        inputs: leaves that require a gradient.

    Attributes:
        path: the nodes that lead to the inputs.
        used: by node, which of its outputs were used.
        frontier: by node of the path, its edges to weights, from the outputs down.
        own: by node of the frontier, those weights, if no other edge from the path leads to them.
        ends: nodes of the frontier below which no gradient is wanted: autograd calls only the hooks there.
        beside: outputs that are not on the path at all: their number, and the edge where their gradient goes on.
        met: the weights whose gradients from several places meet in one edge.
    """

    def __init__(self, roots: list[GradientEdge], inputs: Sequence[Tensor]) -> None:
        below = _nodes_below(root.node for root in roots)
        # ---- path
        leads, leaves, path = _lead(below, inputs)
        self.path = path or {node: None for node in below if leads[node].bit_count() > 1}
        # ---- edges, to be used or left by
        self.used: defaultdict[Node, set[int]] = defaultdict(set)
        above: defaultdict[Node, set[Node | None]] = defaultdict(set)
        for root in roots:
            above[root.node].add(None)
            self.used[root.node].add(root.output_nr)
        leaving: dict[Node, list[GradientEdge]] = {}
        for node, edges in below.items():
            for inner, k in edges:
                above[inner].add(node)
                self.used[inner].add(k)
            if node in self.path:
                out = dict.fromkeys(edge for edge in edges if edge[0] not in self.path and leads[edge[0]])
                leaving[node] = [GradientEdge(*edge) for edge in out]
        beside = [(i, r) for i, r in enumerate(roots) if r.node not in self.path and leads[r.node]]
        # ---- met
        crossing = [edge for edges in leaving.values() for edge in edges] + [edge for _, edge in beside]
        met = _meeting_weights(crossing, leads, above)
        self.met = [leaves[i] for i in _bits(met)]
        self.beside = [(i, edge) for i, edge in beside if not leads[edge.node] & met]
        # ---- frontier
        self.frontier: dict[Node, list[GradientEdge]] = {}
        weights: dict[Node, int] = {}
        once = twice = _all(leads[edge.node] for _, edge in self.beside)
        for node in reversed(leaving):
            late = [edge for edge in leaving[node] if not leads[edge.node] & met]
            if late:
                self.frontier[node] = late
                weights[node] = _all(leads[edge.node] for edge in late)
                once, twice = once | weights[node], twice | once & weights[node]
        self.own = {
            node: [] if mine & twice else [_weight(leaves[i]) for i in _bits(mine)]
            for node, mine in weights.items()
        }
        self.ends = set() if path else self.frontier.keys() - _nodes_over(below, {*self.frontier, *self.met})


def _lead(
    below: dict[Node, list[tuple[Node, int]]], inputs: Sequence[Tensor]
) -> tuple[dict[Node, int], list[Node], dict[Node, None]]:
    """Return the weights each node leads to; those weights' nodes, by number; and the nodes that lead to the inputs."""
    ids = {id(tensor) for tensor in inputs}
    leads: dict[Node, int] = {}
    leaves: list[Node] = []
    path: dict[Node, None] = {}
    for node, edges in below.items():
        leads[node] = 0
        variable = None if edges else getattr(node, "variable", None)
        if variable is not None and id(variable) in ids:
            path[node] = None
        elif variable is not None:
            leads[node] = 1 << len(leaves)
            leaves.append(node)
        for inner, _ in edges:
            leads[node] |= leads[inner]
            if inner in path:
                path[node] = None
    return leads, leaves, path


def _nodes_over(below: dict[Node, list[tuple[Node, int]]], wanted: set[Node]) -> set[Node]:
    """Return the nodes that lead to a wanted node."""
    nodes: set[Node] = set()
    for node, edges in below.items():
        if any(inner in wanted or inner in nodes for inner, _ in edges):
            nodes.add(node)
    return nodes


def _weight(leaf: Node) -> Tensor:
    """Return the tensor to which an AccumulateGrad node adds."""
    weight = getattr(leaf, "variable")  # noqa: B009 (only nodes of this kind have it, and torch's stubs none)
    assert isinstance(weight, Tensor)
    return weight


def _all(sets: Iterable[int]) -> int:
    return reduce(or_, sets, 0)


def _bits(weights: int) -> Iterator[int]:
    """Yield the numbers in a set.

    >>> list(_bits(0b1010))
    [1, 3]
    """
    while weights:
        lowest = weights & -weights
        yield lowest.bit_length() - 1
        weights ^= lowest


def _nodes_below(roots: Iterable[Node]) -> dict[Node, list[tuple[Node, int]]]:
    """Return every node that the roots lead to, with its edges, after all nodes that it leads to."""
    edges: dict[Node, list[tuple[Node, int]]] = {}
    edges_below: dict[Node, list[tuple[Node, int]]] = {}
    todo = list(roots)
    while todo:
        node = todo[-1]
        if node not in edges:
            edges[node] = [(inner, k) for inner, k in node.next_functions if inner is not None]
            todo += [inner for inner, _ in edges[node] if inner not in edges]
        else:
            edges_below.setdefault(todo.pop(), edges[node])
    return edges_below


def _meeting_weights(
    crossing: list[GradientEdge], leads: dict[Node, int], above: dict[Node, set[Node | None]]
) -> int:
    """Return the weights whose gradients meet up to the end of the path, and those that share an edge with them."""
    met = 0
    for edge in crossing:
        if len(above[edge.node]) > 1:
            met |= leads[edge.node]
    before = -1
    while met != before:
        before = met
        for edge in crossing:
            if leads[edge.node] & met:
                met |= leads[edge.node]
    return met
