"""DDP: every rank has the whole model and a part of the batch; the gradients are summed while the backward goes on.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020, section 3.2.
The whole of it in 30 lines: `mpkit.reference.bucketed_ddp`. This module adds: shares of unequal size, micro-batches,
parameters that get no gradient, frozen and tied parameters, the state of BatchNorm, and buckets in the order in which
gradients really come.

    broadcast   at the start everybody takes the first one's parameters and buffers
    buckets     gradients lie in buckets of `bucket_mb`, in reverse order of use: the last layer's come first
    reduce      as soon as a bucket is full, its sum over ranks starts, and backward goes on
    wait        the step waits for what is still under way: the communication that backward could not hide
    rebuild     after the first step, in the order in which the gradients really came

Each rank's loss is its share of the mean over the batch (`mpkit.parallel.pipeline`), so a sum over ranks is right
also where their shares are not of one size. While gradients accumulate (all micro-batches but the last) nothing
is sent.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mpkit.errors import MpkitError
from mpkit.parallel.axis import Axis
from mpkit.parallel.bucket import Bucket, fill_buckets
from mpkit.parallel.replica import Replica
from mpkit.parallel.stage import Stage
from mpkit.parallel.stateful import StatefulBuffers
from mpkit.plan import Plan

if TYPE_CHECKING:
    from mpkit.launch.context import Context

__all__ = ["DDP", "broadcast_all", "unused_error", "unused_message"]

AT_ONCE = 8 * 2**20
"""Bytes that are broadcast at once at the start: large enough for the link, and little beside a model."""


class DDP(Replica):
    """A replica whose gradients are summed with the others'.

    Args:
        context: of this rank.
        plan: bucket_mb, unused, batchnorm.
        stages: what it holds of the model, on this rank's device.
        replicas: the ranks that hold the same.
        late: parameters that several stages use, whose gradients are complete only after all backwards.
    """

    def __init__(
        self,
        context: Context,
        plan: Plan,
        stages: dict[int, Stage],
        replicas: Axis,
        late: Collection[nn.Parameter] = (),
    ) -> None:
        super().__init__(stages)
        self._replicas, self._ledger = replicas, context.record.ledger
        self._late = set(late)
        self._alike = {piece.parameter for piece in self.pieces if piece.shard is None}
        self._bucket_bytes = int(plan.bucket_mb * 2**20)
        self._allows_unused = plan.unused == "allow"
        self._names = {piece.parameter: piece.name for piece in self.pieces}
        self._sends = False  # whether this backward's gradients are complete
        self._came: dict[nn.Parameter, None] = {}  # whose gradient came in this step, in order
        self._order: list[nn.Parameter] = []  # that which the buckets are in
        self._rebuilt = False
        # ---- broadcast
        module = nn.ModuleList(stage.layers for stage in stages.values())
        broadcast_all(replicas, module)
        self._stateful = StatefulBuffers(replicas, plan, module)
        # ---- buckets
        self._build([piece.parameter for piece in reversed(self.pieces)])
        for parameter in self._names:
            parameter.register_post_accumulate_grad_hook(self._arrived)

    def _build(self, order: list[nn.Parameter]) -> None:
        """Lay the gradients out in buckets, in this order; autograd adds into them in place."""
        for parameter in order:
            parameter.grad = None  # the old buckets go before the new ones come
        self._buckets: list[Bucket] = []
        self._order = order
        early = [parameter for parameter in order if parameter not in self._late]
        late = [parameter for parameter in order if parameter in self._late]
        self._buckets = [
            bucket
            for parameters in (early, late)
            for bucket in fill_buckets(parameters, self._bucket_bytes, self._alike)
        ]
        self._of = {parameter: bucket for bucket in self._buckets for parameter in bucket.views}
        for bucket in self._buckets:
            self._ledger.track(bucket.flat, "grads")

    @property
    def layout(self) -> list[str]:
        """Names of the parameters in the buckets' order."""
        return [self._names[parameter] for parameter in self._order]

    def lay_out(self, names: list[str]) -> None:
        """Take the buckets' order from an earlier training, which has seen a step."""
        place = {name: parameter for parameter, name in self._names.items()}
        mine = [name for name in names if name in place]  # the others are other stages'
        if len(mine) == len(place):
            self._rebuilt = True
            self._build([place[name] for name in mine])

    # ---- a step -------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Take the first replica's buffers where they changed; zero the buckets."""
        self._stateful.synchronize()
        self._came.clear()
        self._next = 0  # the bucket whose turn it is
        for bucket in self._buckets:
            bucket.begin()

    def before_backward(self, last: bool, stage: int = 0) -> None:
        """Only the gradients of a stage's last backward are sent."""
        self._sends = last

    def _arrived(self, parameter: Tensor) -> None:
        """Autograd has added a gradient into its bucket."""
        assert isinstance(parameter, nn.Parameter)
        self._came[parameter] = None
        if self._sends and parameter not in self._late:
            self._of[parameter].missing.discard(parameter)
            # ---- reduce, in the buckets' order, which is the same on every rank
            while self._next < len(self._buckets) and not self._buckets[self._next].missing:
                self._reduce()

    def _reduce(self) -> None:
        bucket = self._buckets[self._next]
        bucket.work = self._replicas.start_all_reduce(bucket.flat)
        self._next += 1

    def finish(self) -> None:
        """Send what is left, and wait for all sums.

        Raises:
            MpkitError: a parameter has no gradient, and the plan does not allow that.
        """
        self._sends = False
        missing = [parameter for parameter in self._order if parameter not in self._came]
        if missing and not self._allows_unused:
            raise unused_error([self._names[parameter] for parameter in reversed(missing)])
        while self._next < len(self._buckets):
            self._reduce()
        # ---- wait
        for bucket in self._buckets:
            bucket.wait()
        if self._allows_unused:
            self._drop_unused()
        # ---- rebuild; nobody has to ask the others: the first rank's order is everybody's
        if not self._rebuilt:
            self._rebuilt = True
            self._rebuild()

    def _drop_unused(self) -> None:
        """What no rank used has no gradient, as in serial training: an optimizer then leaves it alone."""
        used = torch.tensor([parameter in self._came for parameter in self._order], dtype=torch.int32)
        used = self._replicas.all_reduce(used.to(self._buckets[0].flat.device)) if self._buckets else used
        for parameter, count in zip(self._order, used.tolist(), strict=True):
            if count == 0:
                parameter.grad = None

    def _rebuild(self) -> None:
        """Buckets in the order in which the first replica's gradients came. This step's gradients move with them."""
        place = {parameter: i for i, parameter in enumerate(self._order)}
        came = [place[p] for p in self._came]
        rest = [i for i in range(len(self._order)) if self._order[i] not in self._came]
        order = torch.tensor(came + rest, device=self._buckets[0].flat.device) if self._buckets else None
        if order is None:
            return
        indices = self._replicas.broadcast(order).tolist()
        if indices == list(range(len(indices))):
            return
        old = {parameter: parameter.grad for parameter in self._order}
        self._build([self._order[i] for i in indices])
        for bucket in self._buckets:
            bucket.take(old)

    # ---- the end ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """The state on the first replica, nothing on the others, which have the same."""
        self._stateful.synchronize()
        return super().state_dict() if self._replicas.index == 0 else {}


def broadcast_all(replicas: Axis, module: nn.Module) -> None:
    """Give everybody the first one's parameters and buffers, in few broadcasts, none of which holds much memory."""
    groups: list[list[Tensor]] = []
    open_groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        group = open_groups.get(tensor.dtype, [])
        if not group or sum(t.nbytes for t in group) + tensor.nbytes > AT_ONCE:
            group = open_groups[tensor.dtype] = []
            groups.append(group)
        group.append(tensor.detach())
    for group in groups:
        flat = torch.cat([tensor.reshape(-1) for tensor in group])
        replicas.broadcast(flat)
        for tensor, part in zip(group, flat.split([t.numel() for t in group]), strict=True):
            tensor.copy_(part.view_as(tensor))


def unused_error(names: list[str]) -> MpkitError:
    """The error of parameters without a gradient."""
    return MpkitError(unused_message(names, "in this step", "on this rank"))


def unused_message(names: list[str], when: str = "in any step", where: str = "for any sample") -> str:
    """What is said of parameters without a gradient."""
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return (
        f"No gradient came for {shown} {when}: the loss does not depend on "
        f"{'it' if len(names) == 1 else 'them'} {where}, and the other ranks wait for the sum. If that is meant, "
        "unused='allow' in the Plan; if not, use them in the forward, or freeze them: parameter.requires_grad_(False)."
    )
