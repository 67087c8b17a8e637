"""The backward in two halves, which can be scheduled separately, as zero-bubble schedules do.

    I   the gradients of a stage's inputs, which the stage before waits for
    W   the gradients of its weights, which nobody waits for

In autograd's graph a linear layer, y = x A + b, is a node with an edge to x and edges to A and b. The backward calls
the node with the gradient of y, and it computes only what its edges are asked for. So

    cut      the nodes on the way to the inputs are the *path*, and those of them with edges to weights the *frontier*
             (`mpkit.strategies.stage.split_backward`)
    I        the backward follows the path down to the inputs; the gradient that arrives at each frontier node is kept
    let go   what the other nodes of the path had saved is released, since nobody needs it any more: an attention's
             scores, a GELU's input; a linear layer's input stays
    W        each node of the frontier is called again with the gradient that was kept, for its edges to weights

    x ──── layer 1 ──── gelu ──── layer 2 ──── y       path, gone down in I
              │                      │                 frontier: layer 1 and layer 2
             A, b                   A, b               edges to weights, in W

No product is computed twice, and none in the wrong half. An exception is a weight that the path leads to by one edge
from two places, such as a bias used twice: its gradients are summed where they meet, in I, and W adds the sum to
`.grad`. A stage whose inputs need no gradient, such as the first one, has no path to them; there the nodes that lead
to more than one weight serve as the path.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.1 and figure 1.

The cut through the graph of a forward that lets its backward be done in two halves.

    path       the nodes that lead to the inputs, along which the gradient is propagated first
    frontier   those nodes of the path that also have edges off the path, to weights
    met        weights whose gradients arrive from several places and meet off the path: they have to be summed at once

A set of weights is represented by an integer with one bit per weight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from mpkit.strategies.stage.recompute import Saved
from mpkit.trace.record.memory import PackedTensor


class GraphCut:
    """The cut of the graph of a stage's forward into two halves.

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


@dataclass
class _Part:
    """A node of the frontier, and the gradients to call it with, by number of its output.

    Attributes:
        edges: the node's edges that lead to weights.
        own: those weights, if no other node leads to them; else empty.
        hooked: whether the gradients have already passed through the hooks that users put on tensors; otherwise they do
            so now.
    """

    node: Node
    gradients: dict[int, Tensor]
    edges: list[GradientEdge]
    own: list[Tensor]
    hooked: bool

    def run(self) -> None:
        """Add to the weights' gradients."""
        outputs = [GradientEdge(self.node, k) for k in self.gradients]
        gradients = list(self.gradients.values())
        handle = self.node.register_prehook(_replace_gradients(self.gradients)) if self.hooked else None
        if self.own:
            torch.autograd.backward(outputs, gradients, inputs=self.own)
        else:  # the path from here may lead to the same weights: stop at its end
            grads = torch.autograd.grad(outputs, self.edges, gradients, allow_unused=True)
            _add_to_weights(self.edges, grads)
        if handle is not None:
            handle.remove()


@dataclass
class WeightGrads:
    """The work of W, ready to run.

    Attributes:
        parts: nodes of the frontier, from the outputs down.
        sums: gradients that are known already, each with the edge where it goes on.
    """

    parts: list[_Part] = field(default_factory=list)
    sums: list[tuple[GradientEdge, Tensor]] = field(default_factory=list)

    def held_gradients(self) -> list[Tensor]:
        """Return the gradients that are kept until W."""
        return [gradient for part in self.parts for gradient in part.gradients.values()] + [
            gradient for _, gradient in self.sums
        ]

    def run(self) -> None:
        """Add the weights' gradients to their `.grad`, and release what was saved for that on the way."""
        for edge, gradient in self.sums:
            _add_to_weights([edge], [gradient])
        self.sums.clear()
        self.parts.reverse()
        while self.parts:
            self.parts.pop().run()


def input_grads(
    outputs: Sequence[Any], gradients: Sequence[Tensor], inputs: Sequence[Tensor]
) -> tuple[list[Tensor | None], WeightGrads]:
    """Run I: compute the gradients of a stage's inputs, and return them with the work of W.

    Args:
        outputs: those outputs of the stage's forward that require a gradient, or their edges.
        gradients: the gradient of the loss for each of them.
        inputs: leaves that require a gradient.

    Returns:
        The gradient of each input, None where the outputs do not depend on it; and the work of W.

    >>> x, layer = torch.ones(1, 2, requires_grad=True), torch.nn.Linear(2, 2, bias=False)
    >>> _ = torch.nn.init.eye_(layer.weight)
    >>> y = layer(x)
    >>> (gradient,), weights = input_grads([y], [torch.ones(1, 2)], [x])
    >>> gradient, layer.weight.grad
    (tensor([[1., 1.]]), None)
    >>> weights.run(); layer.weight.grad
    tensor([[1., 1.],
            [1., 1.]])
    """
    if not outputs:
        return [None for _ in inputs], WeightGrads()
    # ---- cut
    roots = [each if isinstance(each, GradientEdge) else get_gradient_edge(each) for each in outputs]
    cut = GraphCut(roots, inputs)
    edges = [GradientEdge(node, k) for node in cut.frontier for k in sorted(cut.used[node])]
    met = [GradientEdge(leaf, 0) for leaf in cut.met]
    # ---- I
    wanted: list[Any] = [*inputs, *edges, *met]
    grads: Iterator[Tensor | None] = iter(
        torch.autograd.grad(
            outputs, wanted, gradients, retain_graph=bool(cut.frontier or cut.beside), allow_unused=True
        )
        if wanted
        else ()
    )
    of_inputs: list[Tensor | None] = [next(grads) for _ in inputs]
    kept: defaultdict[Node, dict[int, Tensor]] = defaultdict(dict)
    for edge in edges:
        gradient = next(grads)
        if gradient is not None:
            kept[edge.node][edge.output_nr] = gradient
    sums = [(edge, gradient) for edge, gradient in zip(met, grads, strict=True) if gradient is not None]
    sums += [(edge, gradients[i]) for i, edge in cut.beside]
    # ---- let go
    for node in cut.path if cut.frontier or cut.beside else ():
        if node not in kept:
            _let_go(node)
    parts = [
        _Part(node, kept[node], edges, cut.own[node], node in cut.ends)
        for node, edges in cut.frontier.items()
        if node in kept
    ]
    return of_inputs, WeightGrads(parts, sums)


def _replace_gradients(
    gradients: dict[int, Tensor],
) -> Callable[[tuple[Tensor | None, ...]], tuple[Any, ...]]:
    return lambda given: tuple(gradients.get(k, gradient) for k, gradient in enumerate(given))


def _add_to_weights(edges: Sequence[GradientEdge], gradients: Sequence[Tensor | None]) -> None:
    """Propagate gradients from the end of the path to the weights, mostly through a transposition."""
    pairs = [
        (edge, gradient) for edge, gradient in zip(edges, gradients, strict=True) if gradient is not None
    ]
    if pairs:
        torch.autograd.backward([edge for edge, _ in pairs], [g for _, g in pairs], retain_graph=True)


def _let_go(node: Node) -> None:
    """Drop what the node saved, since it is not called again."""
    for name in _saved_by(type(node)):
        saved_values = getattr(node, name)
        for saved in saved_values if isinstance(saved_values, tuple) else (saved_values,):
            held = saved.data
            if isinstance(held, (PackedTensor, Saved)):
                held.drop()
            elif isinstance(held, Tensor) and not isinstance(held, torch.nn.Parameter):
                with suppress(RuntimeError):  # what was packed otherwise, such as by checkpointing, stays
                    saved.register_hooks(_do_nothing, _do_nothing)


@cache
def _saved_by(kind: type[Node]) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _do_nothing(_: Any) -> None:
    return None
