"""The backward in two halves, which can be scheduled separately, as zero-bubble schedules do.

    I   the gradients of a stage's inputs, which the stage before waits for
    W   the gradients of its weights, which no stage waits for

In autograd's graph a linear layer, y = x A + b, is a node with an edge to x and edges to A and b. The backward calls
the node with the gradient of y, and the node computes the gradients of the requested edges only. So

    cut      the nodes that lead to the inputs are the *path*; those of them with edges to weights, the *frontier*
    I        the backward follows the path down to the inputs, and keeps the gradient that reaches each frontier node
    let go   the other nodes of the path release what they saved: an attention's scores, a GELU's input; a linear
             layer's input stays
    W        each frontier node is called again with its kept gradient, for its edges to weights

    x ──── layer 1 ──── gelu ──── layer 2 ──── y       path, gone down in I
              │                      │                 frontier: layer 1 and layer 2
             A, b                   A, b               edges to weights, in W

No product is computed twice, and none in the wrong half, with one exception: gradients of a weight that meet in one
edge off the path, such as those of a bias used twice (*met*), are summed in I, and W adds the sum to `.grad`. If a
stage's inputs need no gradient, as in the first stage, the nodes that lead to several weights serve as the path.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.1 and figure 1.

An integer with one bit per weight represents a set of weights.
"""

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
        used: the numbers of each node's outputs that were used.
        frontier: the edges to weights of each frontier node, from the outputs down.
        own: those weights, by frontier node, if no other edge from the path leads to them.
        ends: frontier nodes below which no gradient is wanted: autograd calls only the hooks there.
        beside: outputs that are not on the path: their numbers, and the edges where their gradients go on.
        met: the weights whose gradients from several places meet in one edge.
    """

    def __init__(self, roots: list[GradientEdge], inputs: Sequence[Tensor]) -> None:
        below = _nodes_below(root.node for root in roots)
        # ---- path
        leads, leaves, path = _lead(below, inputs)
        self.path = path or {node: None for node in below if leads[node].bit_count() > 1}
        # ---- edges: used, and leaving the path
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
    """Return the weights that each node leads to, the weights' own nodes, and the nodes that lead to the inputs."""
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
    """Yield the numbers in a set: 1 and 3 of 0b1010."""
    while weights:
        lowest = weights & -weights
        yield lowest.bit_length() - 1
        weights ^= lowest


def _nodes_below(roots: Iterable[Node]) -> dict[Node, list[tuple[Node, int]]]:
    """Return the edges of every node that the roots lead to, each after all nodes that it leads to."""
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
    """Return the weights whose gradients meet before the path ends, and those that share an edge with them."""
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
    """A frontier node, with what to call it with."""

    node: Node
    gradients: dict[int, Tensor]  # by number of the node's output
    edges: list[GradientEdge]  # those that lead to weights
    own: list[Tensor]  # those weights, if no other node leads to them; else empty
    hooked: bool  # the gradients have already passed through the hooks that users put on tensors

    def run(self) -> None:
        """Add to the weights' gradients."""
        outputs = [GradientEdge(self.node, k) for k in self.gradients]
        gradients = list(self.gradients.values())
        handle = self.node.register_prehook(_replace_gradients(self.gradients)) if self.hooked else None
        if self.own:
            torch.autograd.backward(outputs, gradients, inputs=self.own)
        else:  # the path may lead from here to the same weights: stop where it ends
            grads = torch.autograd.grad(outputs, self.edges, gradients, allow_unused=True)
            _add_to_weights(self.edges, grads)
        if handle is not None:
            handle.remove()


@dataclass
class WeightGrads:
    """The work of W, ready to run."""

    parts: list[_Part] = field(default_factory=list)  # from the outputs down
    sums: list[tuple[GradientEdge, Tensor]] = field(default_factory=list)  # gradients, and where they go on

    def held_gradients(self) -> list[Tensor]:
        """Return the gradients that are kept until W."""
        of_parts = [gradient for part in self.parts for gradient in part.gradients.values()]
        return of_parts + [gradient for _, gradient in self.sums]

    def run(self) -> None:
        """Add the weights' gradients to their `.grad`, releasing on the way what was saved for them."""
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
        inputs: leaves that require a gradient, which is None if the outputs do not depend on them.

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
    again = bool(cut.frontier or cut.beside)
    grads: Iterator[Tensor | None] = iter(
        torch.autograd.grad(outputs, wanted, gradients, retain_graph=again, allow_unused=True)
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
    for node in cut.path if again else ():
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
    pairs = [(edge, g) for edge, g in zip(edges, gradients, strict=True) if g is not None]
    if pairs:
        torch.autograd.backward([edge for edge, _ in pairs], [g for _, g in pairs], retain_graph=True)


def _let_go(node: Node) -> None:
    """Drop what a node saved that is not called again."""
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
