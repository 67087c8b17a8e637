"""Replicated: the part of the model that several ranks would hold alike. DDP keeps it equal, ZeRO shards it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from mpkit.plan.plan import Plan
from mpkit.strategies.comm.communicator import Communicator
from mpkit.strategies.comm.mesh_axes import MeshAxes
from mpkit.strategies.stage.gradient_sync import named_parameters
from mpkit.strategies.stage.stage import Stage

if TYPE_CHECKING:
    from mpkit.strategies.rank_context import Context

__all__ = ["Replicated", "ShardGroups", "shard_groups"]


class ShardGroups(NamedTuple):
    """Hybrid sharding, from one rank's point of view.

    Attributes:
        shard: the ranks of its group, among which ZeRO shards.
        replicate: the ranks of the other groups that hold the same shard, and this one.
    """

    shard: Communicator
    replicate: Communicator


def shard_groups(plan: Plan, axes: MeshAxes) -> ShardGroups | None:
    """Return this rank's groups under hybrid sharding; None if ZeRO shards among all replicas.

    Every rank makes this call at the same time.
    """
    if plan.dp_shard is None:
        return None
    return ShardGroups(axes.communicator_of("dp_shard", "cp"), axes.communicator_of("dp_replicate"))


@dataclass(frozen=True, eq=False)
class Replicated:
    """A rank's part of the model, and the ranks that hold the same part.

    Attributes:
        context: this rank's context.
        plan: read for zero, offload, bucket_mb, prefetch, unused and batchnorm.
        stages: this rank's part of the model by number of the stage, on its device.
        replicas: the ranks that hold the same part, or would without ZeRO.
        groups: the replicas by groups, where ZeRO shards within each; None: it shards among all replicas.
        tied: parameters that several stages of the model use, whose gradients are complete only after all backwards.
        whole: parameters that ZeRO leaves alone; something else keeps them equal.
        allow_unused: what lets a parameter have no gradient, for the error that asks for it.
    """

    context: Context
    plan: Plan
    stages: dict[int, Stage]
    replicas: Communicator
    tied: Collection[nn.Parameter] = ()
    whole: Collection[nn.Parameter] = ()
    allow_unused: str = "unused='allow' in the Plan"
    groups: ShardGroups | None = None

    @property
    def shard_group(self) -> Communicator:
        """The ranks among which ZeRO shards."""
        return self.groups.shard if self.groups else self.replicas

    @property
    def replicate_group(self) -> Communicator | None:
        """The ranks that hold the same shard; None if no others do."""
        return self.groups.replicate if self.groups else None

    @property
    def module(self) -> nn.ModuleList:
        """The layers of all stages."""
        return nn.ModuleList(stage.layers for stage in self.stages.values())

    @property
    def bucket_bytes(self) -> int:
        """The most bytes that are sent together."""
        return int(self.plan.bucket_mb * 2**20)

    @property
    def allows_unused(self) -> bool:
        """Whether a parameter may have no gradient in a step."""
        return self.plan.unused == "allow"

    @property
    def unsharded_parameters(self) -> set[nn.Parameter]:
        """The parameters that tensor parallelism leaves whole on each of its ranks."""
        shards = next(iter(self.stages.values())).sharded.shards
        return {parameter for name, parameter in named_parameters(self.stages).items() if name not in shards}
