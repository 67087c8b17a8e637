"""ReplicatedPart: the part of the model that several ranks would hold alike. DDP keeps it equal, ZeRO shards it.

What is said of parameters that get no gradient, or several in one backward.
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
    """Return the error for parameters without a gradient, with what would allow that."""
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return MpkitError(
        f"No gradient came for {shown} in this step: the loss does not depend on "
        f"{'it' if len(names) == 1 else 'them'} on this rank, and the other ranks wait for the sum. If that is meant, "
        f"{allow}; if not, use them in the forward, or freeze them: parameter.requires_grad_(False)."
    )


def arrived_late(name: str) -> MpkitError:
    """Return the error for a parameter that got another gradient when the sum over ranks was under way."""
    return MpkitError(
        f"{name} got another gradient in the same backward, when its first one was being summed over ranks already. A "
        "checkpoint that runs a backward within the backward does that, around a block that is used several times: "
        "torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or Plan(recompute='full') in its place"
    )


class Holders(NamedTuple):
    """The ranks that hold a part of the model, from one rank's point of view.

    Attributes:
        replicas: those that hold the same part, or would without ZeRO.
        shard: those among which ZeRO shards it: all replicas, or a group of them in hybrid sharding.
        replicate: the ranks of the other groups that hold the same shard, and this one; None: there is one group.
    """

    replicas: Communicator
    shard: Communicator
    replicate: Communicator | None = None


def holders_of(plan: Plan, axes: MeshAxes) -> tuple[Holders, Holders | None]:
    """Return the ranks that hold this rank's part of the model, and its experts; None if the same hold these.

    Every rank makes this call at the same time.
    """
    replicas = axes.communicator_of("dp", "cp")
    if plan.dp_shard is None:
        of_model = Holders(replicas, replicas)
    else:
        groups = axes.communicator_of("dp_shard", "cp"), axes.communicator_of("dp_replicate")
        of_model = Holders(replicas, *groups)
    if plan.ep == 1:
        return of_model, None
    replicas = axes.communicator_of("dp_replicate", "edp")
    if plan.dp_shard is None:
        return of_model, Holders(replicas, replicas)
    return of_model, Holders(replicas, axes.communicator_of("edp"), axes.communicator_of("dp_replicate"))


@dataclass(frozen=True, eq=False)
class ReplicatedPart:
    """A rank's part of the model, and the ranks that hold the same part.

    Attributes:
        plan: read for zero, offload, bucket_mb, prefetch, unused and batchnorm.
        stages: this rank's part of the model by number of the stage, on its device.
        tied: parameters that several stages of the model use, whose gradients are complete only after all backwards.
        allow_unused: what lets a parameter have no gradient, for the error that asks for it.
        experts: the ranks that hold the same experts; None if the same ranks do.
        by_owner: whether ZeRO-1 gives each parameter whole to one rank.
    """

    context: Context
    plan: Plan
    stages: dict[int, Stage]
    holders: Holders
    tied: Collection[nn.Parameter] = ()
    allow_unused: str = "unused='allow' in the Plan"
    experts: Holders | None = None
    by_owner: bool = False

    @property
    def replicas(self) -> Communicator:
        """The ranks that hold the same part, or would without ZeRO."""
        return self.holders.replicas

    @cached_property
    def expert_parameters(self) -> set[nn.Parameter]:
        """The parameters that are divided by expert."""
        names = next(iter(self.stages.values())).sharded.experts
        return {parameter for name, parameter in named_parameters(self.stages).items() if name in names}

    def holders_of(self, parameter: nn.Parameter) -> Holders:
        """Return the ranks that hold the parameter."""
        return self.experts if self.experts and parameter in self.expert_parameters else self.holders

    def by_replicas(self) -> Iterator[tuple[Communicator, list[Tensor]]]:
        """Yield all parameters and buffers, with the ranks that hold them."""
        own, module = self.expert_parameters if self.experts else set(), self.module
        yield (
            self.replicas,
            [tensor for tensor in (*module.parameters(), *module.buffers()) if tensor not in own],
        )
        if self.experts:
            yield self.experts.replicas, [parameter for parameter in module.parameters() if parameter in own]

    def first_of_replicas(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the entries of a state dict of which this rank is the first holder."""
        names = next(iter(self.stages.values())).sharded.experts
        experts = self.experts.replicas if self.experts else self.replicas
        return {
            name: value for name, value in state.items()
            if (experts if name in names else self.replicas).index == 0
        }  # fmt: skip

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
    def unit_kinds(self) -> dict[nn.Parameter, str]:
        """The parameters that share no flat tensor with others: those that tp leaves whole, and experts."""
        kinds: dict[nn.Parameter, str] = dict.fromkeys(self.unsharded_parameters, "unsharded")
        return kinds | dict.fromkeys(self.expert_parameters, "experts")

    @property
    def unsharded_parameters(self) -> set[nn.Parameter]:
        """The parameters that tensor parallelism leaves whole on each of its ranks."""
        sharded = next(iter(self.stages.values())).sharded
        divided = sharded.shards.keys() - sharded.experts
        return {parameter for name, parameter in named_parameters(self.stages).items() if name not in divided}
