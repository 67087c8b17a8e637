"""Where the graph of a forward is cut, so that its backward can be done in two halves.

    path       the nodes that lead to the inputs: the gradient goes down there first
    frontier   those of them that also have edges off the path, to weights
    met        weights whose gradients come from several places and meet off the path: they have to be summed at once

A set of weights is an integer here, a bit for each.
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
    """Where the graph of a stage's forward is cut in two.

    Args:
        roots: where its outputs are in the graph.
        inputs: leaves that require a gradient.

    Attributes:
        path: the nodes that lead to the inputs.
        used: by node of the path, which of its outputs were used.
        frontier: by node of the path, its edges to weights, from the outputs down.
        own: by node of the frontier, those weights, if no other edge from the path leads to them.
        ends: those of the frontier below which nothing is wanted: autograd calls the hooks there, and not the node.
        beside: outputs that are not on the path at all: their number, and where their gradient goes on.
        met: the weights whose gradients from several places meet in one edge.
    """

    def __init__(self, roots: list[GradientEdge], inputs: Sequence[Tensor]) -> None:
        below = _below(root.node for root in roots)
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
        met = _meeting(crossing, leads, above)
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
        self.ends = set() if path else self.frontier.keys() - _over(below, {*self.frontier, *self.met})


def _lead(
    below: dict[Node, list[tuple[Node, int]]], inputs: Sequence[Tensor]
) -> tuple[dict[Node, int], list[Node], dict[Node, None]]:
    """To which weights each node leads; those weights' nodes, by number; and the nodes that lead to the inputs."""
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


def _over(below: dict[Node, list[tuple[Node, int]]], wanted: set[Node]) -> set[Node]:
    """The nodes that lead to one of these."""
    found: set[Node] = set()
    for node, edges in below.items():
        if any(inner in wanted or inner in found for inner, _ in edges):
            found.add(node)
    return found


def _weight(leaf: Node) -> Tensor:
    """What an AccumulateGrad node adds to."""
    weight = getattr(leaf, "variable")  # noqa: B009 (only nodes of this kind have it, and torch's stubs none)
    assert isinstance(weight, Tensor)
    return weight


def _all(sets: Iterable[int]) -> int:
    return reduce(or_, sets, 0)


def _bits(weights: int) -> Iterator[int]:
    """The numbers in a set.

    >>> list(_bits(0b1010))
    [1, 3]
    """
    while weights:
        lowest = weights & -weights
        yield lowest.bit_length() - 1
        weights ^= lowest


def _below(roots: Iterable[Node]) -> dict[Node, list[tuple[Node, int]]]:
    """Every node that the roots lead to, after all that it leads to itself, with its edges."""
    edges: dict[Node, list[tuple[Node, int]]] = {}
    found: dict[Node, list[tuple[Node, int]]] = {}
    todo = list(roots)
    while todo:
        node = todo[-1]
        if node not in edges:
            edges[node] = [(inner, k) for inner, k in node.next_functions if inner is not None]
            todo += [inner for inner, _ in edges[node] if inner not in edges]
        else:
            found.setdefault(todo.pop(), edges[node])
    return found


def _meeting(
    crossing: list[GradientEdge], leads: dict[Node, int], above: dict[Node, set[Node | None]]
) -> int:
    """The weights whose gradients meet before or where they leave the path, a bit each; and whoever goes with them."""
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
