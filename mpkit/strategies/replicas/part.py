"""ReplicatedPart: a part of the model with several holders. DDP keeps their replicas equal, ZeRO shards it.

The errors for parameters with no gradient, or with several in one backward, are here too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor, nn

from mpkit.errors import MpkitError
from mpkit.plan.plan import Plan
from mpkit.strategies.comm.communicator import Communicator
from mpkit.strategies.comm.mesh_axes import MeshAxes
from mpkit.strategies.stage.gradient_sync import named_parameters
from mpkit.strategies.stage.stage import Stage

if TYPE_CHECKING:
    from mpkit.strategies.rank_context import Context


def unused_error(names: list[str], allow: str = "unused='allow' in the Plan") -> MpkitError:
    """Return the error for parameters without a gradient; `allow` is what the user can do to allow that."""
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return MpkitError(
        f"No gradient came for {shown} in this step: the loss does not depend on "
        f"{'it' if len(names) == 1 else 'them'} on this rank, and the other ranks wait for the sum. If that is meant, "
        f"{allow}; if not, use them in the forward, or freeze them: parameter.requires_grad_(False)."
    )


def arrived_late(name: str) -> MpkitError:
    """Return the error for a parameter that got another gradient while ranks were summing the first."""
    return MpkitError(
        f"{name} got another gradient in the same backward, when its first one was being summed over ranks already. A "
        "checkpoint that runs a backward within the backward does that, around a block that is used several times: "
        "torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or Plan(recompute='full') in its place"
    )


class Holders(NamedTuple):
    """The ranks that hold a part of the model, from one rank's point of view."""

    replicas: Communicator  # hold the same part, or would without ZeRO
    shard: Communicator  # shard it under ZeRO: all replicas, or a group of them in hybrid sharding
    replicate: Communicator | None = None  # hold the same shard, one rank per group; None for one group


def holders_of(plan: Plan, axes: MeshAxes) -> tuple[Holders, Holders | None]:
    """Return the holders of this rank's part of the model, and of its experts (None for the same ranks).

    Every rank makes this call at the same time.
    """

    def holders(replicas: tuple[str, str], shard: tuple[str, ...]) -> Holders:
        every = axes.communicator_of(*replicas)
        if plan.dp_shard is None:
            return Holders(every, every)
        return Holders(every, axes.communicator_of(*shard), axes.communicator_of("dp_replicate"))

    of_model = holders(("dp", "cp"), ("dp_shard", "cp"))
    return of_model, holders(("dp_replicate", "edp"), ("edp",)) if plan.ep > 1 else None


@dataclass(frozen=True, eq=False)
class ReplicatedPart:
    """A rank's part of the model, and the ranks that hold the same part."""

    context: Context
    plan: Plan
    stages: dict[int, Stage]
    holders: Holders
    tied: Collection[nn.Parameter] = ()  # used by several stages: complete gradients after all backwards only
    allow_unused: str = "unused='allow' in the Plan"  # advice in the error for a parameter without a gradient
    experts: Holders | None = None  # None if `holders` hold the experts, too
    by_owner: bool = False  # whether ZeRO-1 gives each parameter whole to one rank

    @property
    def replicas(self) -> Communicator:
        """The ranks that hold the same part, or would without ZeRO."""
        return self.holders.replicas

    @cached_property
    def expert_parameters(self) -> set[nn.Parameter]:
        """The parameters that ep divides."""
        names = next(iter(self.stages.values())).sharded.experts
        return {parameter for name, parameter in named_parameters(self.stages).items() if name in names}

    def holders_of(self, parameter: nn.Parameter) -> Holders:
        """Return a parameter's holders."""
        return self.experts if self.experts and parameter in self.expert_parameters else self.holders

    def by_replicas(self) -> Iterator[tuple[Communicator, list[Tensor]]]:
        """Yield all parameters and buffers, with the ranks that hold them."""
        own, module = self.expert_parameters if self.experts else set(), self.module
        yield self.replicas, [each for each in (*module.parameters(), *module.buffers()) if each not in own]
        if self.experts:
            yield self.experts.replicas, [parameter for parameter in module.parameters() if parameter in own]

    def first_of_replicas(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the entries of a state dict of which this rank is the first holder."""
        names = next(iter(self.stages.values())).sharded.experts
        own = self.replicas.index == 0
        of_experts = self.experts.replicas.index == 0 if self.experts else own
        return {name: value for name, value in state.items() if (of_experts if name in names else own)}

    @property
    def module(self) -> nn.ModuleList:
        """The layers of all stages."""
        return nn.ModuleList(stage.layers for stage in self.stages.values())

    @property
    def bucket_bytes(self) -> int:
        """The most bytes to send together."""
        return int(self.plan.bucket_mb * 2**20)

    @property
    def allows_unused(self) -> bool:
        """Whether a parameter may have no gradient in a step."""
        return self.plan.unused == "allow"

    @property
    def unit_kinds(self) -> dict[nn.Parameter, str]:
        """The parameters that may not share a flat tensor with others: those that tp leaves whole, and experts."""
        sharded = next(iter(self.stages.values())).sharded
        divided = sharded.shards.keys() - sharded.experts
        kinds = {p: "unsharded" for name, p in named_parameters(self.stages).items() if name not in divided}
        return kinds | dict.fromkeys(self.expert_parameters, "experts")
