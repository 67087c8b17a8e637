"""ResolvedPlan: a plan together with everything that follows from it for one model and its batches.

`mpkit.strategies.prepare.resolve` builds it once. Whatever comes after (the checks, the metadata, the ranks)
reads it, and nobody works out again where the model is cut, what crosses the boundaries, or what a stage computes.

    mesh, schedule        which rank is where, and the order of its actions
    stages                the layers of each stage, or the partition of a model that is no chain
    boundary, routes      the shapes of what crosses from stage to stage
    flops, block_cost     FLOPs and bytes of a stage, and of a recomputed block
    held, parameters      which stage computes with which parameters, and how many a rank holds
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from mpkit.plan.mesh import Mesh
from mpkit.plan.plan import Plan
from mpkit.plan.schedule import Schedule
from mpkit.strategies.partition.graph import PartitionedModel
from mpkit.strategies.partition.value import Boundary, LayerNumbers, Route, SharedWeight
from mpkit.strategies.stage.shard import ShardedModel
from mpkit.trace.record.flops import Flops, total


@dataclass(frozen=True)
class ResolvedPlan:
    """The outcome of a plan for one model and the batches of a training. It is data, and travels to the ranks.

    Attributes:
        plan: the plan that was asked for.
        schedule: the order of the actions on each place along pp.
        stages: the layers of each stage, by number; `range(1)` for each stage of a partitioned model.
        placed: the names of each stage's layers; of its blocks in a partitioned model.
        held: the names of the parameters that each stage computes with.
        shared: tied weights that several stages compute with.
        numbers_of: what each layer does to a micro-batch, and last the loss, by the micro-batch's signature; one such
            dict by a rank's place along tp, only one if all are equal.
        partitions: how a model that is no chain is divided among the stages, likewise; None for a chain.
        sharded: which parameters are divided, likewise.
        parameters: by rank, the number of elements of the trained parameters that it would hold without ZeRO.
        loss_sends: the bytes that the loss of the largest micro-batch all-reduces and all-gathers on a tp rank.
        place: the place whose numbers the methods return.
    """

    plan: Plan
    schedule: Schedule
    stages: tuple[range, ...]
    placed: tuple[tuple[str, ...], ...]
    held: tuple[tuple[str, ...], ...]
    shared: tuple[SharedWeight, ...]
    numbers_of: tuple[dict[Hashable, list[LayerNumbers]], ...]
    partitions: tuple[PartitionedModel | None, ...]
    sharded: tuple[ShardedModel, ...]
    parameters: tuple[int, ...]
    loss_sends: tuple[int, int]
    place: int = 0

    @property
    def mesh(self) -> Mesh:
        """The mesh of ranks."""
        return self.plan.mesh

    def for_place(self, place: int) -> ResolvedPlan:
        """Return the same outcome as the ranks at this place see it."""
        return replace(self, place=place)

    @property
    def computes_loss_at_once(self) -> bool:
        """Whether one rank computes the loss of all samples of a batch at once."""
        plan = self.plan
        return plan.microbatches == 1 and plan.cp == 1 and (plan.dp == 1 or plan.data_parallel == "dp")

    @property
    def numbers(self) -> dict[Hashable, list[LayerNumbers]]:
        """What each layer does to a micro-batch here, and last the loss, by the micro-batch's signature."""
        return self.numbers_of[self.place % len(self.numbers_of)]

    @property
    def partition(self) -> PartitionedModel | None:
        """How a model that is not a chain is divided among the stages; None for a chain."""
        return self.partitions[self.place % len(self.partitions)]

    # ---- boundaries ---------------------------------------------------------------------------------------

    def boundary(self, key: Hashable, stage: int) -> Boundary:
        """Return what crosses from a stage of a chain to the next, for micro-batches of this signature."""
        output = self.numbers[key][self.stages[stage].stop - 1].output
        assert output is not None, "a chain whose layers hand on something else is partitioned"
        return output

    def incoming_routes(self, key: Hashable, stage: int) -> list[Route]:
        """Return the routes that end at a stage for this signature; in a chain, from the stage before."""
        if self.partition is not None:
            return [route for route in self.partition.divisions[key].routes if route.target == stage]
        return [] if stage == 0 else self.outgoing_routes(key, stage - 1)

    def outgoing_routes(self, key: Hashable, stage: int) -> list[Route]:
        """Return the routes that begin at a stage, for micro-batches of this signature."""
        if self.partition is not None:
            return [route for route in self.partition.divisions[key].routes if route.source == stage]
        if stage == len(self.stages) - 1:
            return []
        specs = self.boundary(key, stage).specs
        return [Route(stage, stage + 1, tuple(range(len(specs))), specs)]

    # ---- FLOPs --------------------------------------------------------------------------------------------

    def flops(self, key: Hashable, stage: int, *, loss: bool = True) -> Flops:
        """Return FLOPs and bytes of a stage for micro-batches of this signature.

        Args:
            loss: whether the last stage computes the loss too.
        """
        if self.partition is not None:
            return self.partition.divisions[key].flops(stage)
        numbers = self.numbers[key]
        held = [numbers[layer].flops for layer in self.stages[stage]]
        if loss and stage == len(self.stages) - 1:
            held.append(numbers[-1].flops)
        return total(held)

    def flops_of_a_sample(self) -> float:
        """Return the FLOPs of one sample's forward through the whole model."""
        key = next(iter(self.numbers))
        assert isinstance(key, tuple)
        samples: int = key[0][1][0]
        return sum(self.flops(key, stage).forward for stage in range(len(self.stages))) / samples

    def block_cost(self, key: Hashable, stage: int, names: list[str], block: str) -> tuple[float, int]:
        """Return FLOPs and bytes of a block's forward for this signature, as far as they were counted.

        Args:
            stage, names: the block's stage, and the names of the stage's layers.
            block: the block's name.
        """
        if self.partition is not None:
            nodes = self.partition.divisions[key].graph.nodes
            costs = [node.flops for node in nodes if node.block and f"{node.name}.".startswith(f"{block}.")]
            return sum(flops.forward for flops in costs), sum(flops.forward_bytes for flops in costs)
        for name, i in zip(names, self.stages[stage], strict=True):
            flops = self.numbers[key][i].flops
            if name == block:
                return flops.forward, flops.forward_bytes
            if not name or block.startswith(f"{name}."):
                return flops.layers.get(block.removeprefix(f"{name}.") if name else block, (0.0, 0))
        return 0.0, 0
