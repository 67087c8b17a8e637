"""Graph: what a model's forward does with a micro-batch of one shape, as the dry run recorded it.

Nodes are the calls of the model's blocks, and the operations between them on their results. What follows from the
model's inputs alone is not a node: every rank has the inputs, and computes it itself. All of this is plain data.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from mpkit.strategies.models.nested_values import Shape
from mpkit.strategies.partition.value import Route, SharedWeight, Spec
from mpkit.trace.record.flops import Flops, total


@dataclass(frozen=True)
class New:
    """A leaf of a node's result: a value that it makes."""

    number: int


@dataclass(frozen=True)
class PassedArgument:
    """A leaf of a node's result that is the same object as one leaf of its arguments."""

    place: int


@dataclass(frozen=True)
class Constant:
    """A leaf of a node's result that is not a tensor: None, a number, a name."""

    value: Any


Leaf = New | PassedArgument | Constant


@dataclass
class CallNode:
    """A call of a block, or an operation between blocks."""

    name: str  # of the block, such as "transformer.h.0", or of the operation, such as "add"
    block: bool  # whether it is a call of a block
    scope: str  # the module in whose forward it runs
    arguments: tuple[int, ...]  # the values that it receives, by number, in order
    parameters: tuple[str, ...]  # the parameters that an operation receives, by name
    result: Shape  # how the leaves of its result are nested
    leaves: tuple[Leaf, ...]  # of its result
    # Arguments that it writes into: the place among the arguments' leaves, and the number of the new value.
    written: tuple[tuple[int, int], ...] = ()
    random: bool = False  # whether it draws random numbers
    flops: Flops = field(default_factory=Flops)

    @property
    def made_values(self) -> list[int]:
        """The numbers of the values that it makes."""
        fresh = dict.fromkeys(leaf.number for leaf in self.leaves if isinstance(leaf, New))
        return [*fresh, *(number for _, number in self.written)]


@dataclass
class Graph:
    """The nodes of a forward, and the values between them."""

    nodes: list[CallNode] = field(default_factory=list)  # in the order in which they run
    specs: dict[int, Spec] = field(default_factory=dict)  # of the values, by number
    wanted: tuple[int, ...] = ()  # the values that the loss uses
    loss: Flops = field(default_factory=Flops)

    @property
    def blocks(self) -> list[int]:
        """The nodes that are calls of blocks."""
        return [k for k, node in enumerate(self.nodes) if node.block]


@dataclass
class Division:
    """A graph divided among stages."""

    graph: Graph
    stage_of: list[int]  # the stage that runs each node
    outputs: list[tuple[int, ...]]  # by stage, the numbers of its values that other stages need
    routes: list[Route]  # everything that is sent from one stage to another

    def flops(self, stage: int) -> Flops:
        """Return FLOPs and bytes of a stage; the last one includes the loss."""
        done = [node.flops for node, s in zip(self.graph.nodes, self.stage_of, strict=True) if s == stage]
        if stage == len(self.outputs) - 1:
            done.append(self.graph.loss)
        return total(done)


@dataclass
class PartitionedModel:
    """A model that is not a chain, opened and divided among stages; what ranks need to know about it."""

    modules: tuple[str, ...]  # names of the opened modules
    blocks: tuple[str, ...]  # names of the modules that are called as a whole
    divisions: dict[Hashable, Division]  # by the signature of a micro-batch
    held: list[tuple[str, ...]]  # by stage, the first names of the parameters that it computes with
    placed: list[tuple[str, ...]]  # by stage, the blocks that it calls
    state: dict[str, int]  # the stage that returns each entry of the state dict
    stage_of_blocks: list[int]  # the stage of each call of a block

    @property
    def shared_weights(self) -> list[SharedWeight]:
        """The weights that several stages compute with."""
        at: dict[str, dict[int, str]] = {}
        for stage, names in enumerate(self.held):
            for name in names:
                at.setdefault(name, {})[stage] = name
        return [SharedWeight(names) for names in at.values() if len(names) > 1]
