"""Graph: what a model's forward does to a micro-batch of one shape, as its dry run saw it.

Nodes are the calls of the model's blocks, and between them operations on what these make. What follows from the model's
inputs alone is no node: every rank has the inputs, and computes it itself. All of it plain data.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from mpkit.parallel.anymodel.structure import Shape
from mpkit.parallel.job import Route, Shared, Spec
from mpkit.record.flops import Flops

__all__ = ["Constant", "Division", "Given", "Graph", "Leaf", "New", "Node", "Opened"]


@dataclass(frozen=True)
class New:
    """A leaf of a node's result: a value that it makes."""

    number: int


@dataclass(frozen=True)
class Given:
    """A leaf of a node's result: the very object that it was given as this leaf of its arguments."""

    place: int


@dataclass(frozen=True)
class Constant:
    """A leaf of a node's result that is no tensor: None, a number, a name."""

    value: Any


Leaf = New | Given | Constant


@dataclass
class Node:
    """A call of a block, or an operation between blocks.

    Attributes:
        name: of the block, such as "transformer.h.0"; or of the operation, such as "add".
        block: which of the two it is.
        scope: the module in whose forward it happens.
        arguments: the values that it is given, by number, in order.
        parameters: the parameters that an operation is given, by name.
        result: how the leaves of its result are put together.
        leaves: of its result.
        written: (argument, number): arguments that it writes into, by their place among its arguments' leaves, and the
            values that they are from then on.
        random: it draws random numbers.
        flops: and bytes; of the backward, what products of matrices take: twice the forward's.
    """

    name: str
    block: bool
    scope: str
    arguments: tuple[int, ...]
    parameters: tuple[str, ...]
    result: Shape
    leaves: tuple[Leaf, ...]
    written: tuple[tuple[int, int], ...] = ()
    random: bool = False
    flops: Flops = field(default_factory=Flops)

    @property
    def made(self) -> list[int]:
        """The values that it makes, by number."""
        fresh = dict.fromkeys(leaf.number for leaf in self.leaves if isinstance(leaf, New))
        return [*fresh, *(number for _, number in self.written)]


@dataclass
class Graph:
    """What a forward does.

    Attributes:
        nodes: in the order in which they happen.
        specs: of the values, by number.
        wanted: the values that the loss looks at.
        loss: FLOPs of the loss.
    """

    nodes: list[Node] = field(default_factory=list)
    specs: dict[int, Spec] = field(default_factory=dict)
    wanted: tuple[int, ...] = ()
    loss: Flops = field(default_factory=Flops)

    @property
    def blocks(self) -> list[int]:
        """The nodes that are calls of blocks."""
        return [k for k, node in enumerate(self.nodes) if node.block]


@dataclass
class Division:
    """A graph divided among stages.

    Attributes:
        graph: that is divided.
        stage_of: the stage that does each node.
        outputs: by stage, the values that others need of it, by number.
        routes: everything that goes from one stage to another.
    """

    graph: Graph
    stage_of: list[int]
    outputs: list[tuple[int, ...]]
    routes: list[Route]

    def flops(self, stage: int) -> Flops:
        """FLOPs and bytes of a stage; of the last one, the loss too."""
        done = [node.flops for node, s in zip(self.graph.nodes, self.stage_of, strict=True) if s == stage]
        if stage == len(self.outputs) - 1:
            done.append(self.graph.loss)
        return Flops(
            sum(flops.forward for flops in done),
            sum(flops.backward for flops in done),
            sum(flops.forward_bytes for flops in done),
            sum(flops.backward_bytes for flops in done),
        )


@dataclass
class Opened:
    """A model that is no chain, opened and divided among stages; what ranks need to know of it.

    Attributes:
        modules: the opened ones, by name.
        blocks: the modules that are called as a whole, by name.
        divisions: by signature of a micro-batch.
        held: by stage, the parameters that it computes with, by their first name in the model.
        placed: by stage, the blocks that it calls.
        state: the stage that gives each entry of the state dict.
        starts: the first call of each stage but stage 0: a block, and which of its calls.
    """

    modules: tuple[str, ...]
    blocks: tuple[str, ...]
    divisions: dict[Hashable, Division]
    held: list[tuple[str, ...]]
    placed: list[tuple[str, ...]]
    state: dict[str, int]
    starts: list[tuple[str, int]]

    @property
    def shared(self) -> list[Shared]:
        """The weights that several stages compute with."""
        at: dict[str, dict[int, str]] = {}
        for stage, names in enumerate(self.held):
            for name in names:
                at.setdefault(name, {})[stage] = name
        return [Shared(names) for names in at.values() if len(names) > 1]
