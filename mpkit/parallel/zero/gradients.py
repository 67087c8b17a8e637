"""Gradients under ZeRO, reduce-scattered while the backward pass runs.

    copy      a gradient that autograd made is copied to its place in a flat tensor, and dropped
    reduce    when a flat tensor is full, its sum over ranks starts, of which each rank keeps its shard
    free      when the sum is complete, the flat tensor is freed; at most one sum is pending while the next tensor fills

That is P_g. In stage 1 the flat tensors stay, and gradients accumulate in them until the last micro-batch. Stages 2 and
3 can only accumulate in the shard, and so reduce in each micro-batch, as DeepSpeed does. A rank of a pipeline may have
several of the model's stages; each backward produces the gradients of one. A weight that several stages use accumulates
in any case, and is reduced when they are all done.

Source: Rajbhandari et al. 2020, section 5.2: "as each gradient ... becomes available, we only reduce them on the data
parallel process responsible for updating the corresponding parameters. After the reduction we no longer need the
gradients and their memory can be released."
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from mpkit.comm.communicator import Communicator
from mpkit.comm.process_group import Pending
from mpkit.parallel.data_parallel.ddp import unused_error
from mpkit.parallel.zero.flat import Flat

__all__ = ["Gradients"]


@dataclass(eq=False)
class _Unit:
    """A flat tensor of gradients.

    Attributes:
        stage: the model's stage whose backwards produce the gradients; None if several do.
        keeps_whole: whether gradients accumulate in the flat tensor.
        missing: parameters whose gradient has not arrived yet in this backward.
        has_sum: whether the shard holds the sum of an earlier micro-batch.
        work: the pending reduction, if any.
        more: (k,), where the reduction is written if the shard holds a sum already; else None.
    """

    flat: Flat
    stage: int | None
    keeps_whole: bool
    missing: set[nn.Parameter] = field(default_factory=set)
    has_sum: bool = False
    work: Pending | None = None
    more: Tensor | None = None


class Gradients:
    """The gradients of parameters that require them.

    Args:
        replicas: the ranks that share the work.
        flats: flat tensors of gradients, in the order in which they fill; each with the stage that produces them.
        names: the parameters' names, for errors.
        keeps_whole: whether whole gradients stay, as in stage 1.
        allows_unused: whether a parameter may have no gradient.
    """

    def __init__(
        self,
        replicas: Communicator,
        flats: list[tuple[Flat, int | None]],
        names: Mapping[nn.Parameter, str],
        *,
        keeps_whole: bool,
        allows_unused: bool,
    ) -> None:
        self._replicas, self._names = replicas, names
        self._keeps_whole, self._allows_unused = keeps_whole, allows_unused
        self._units = [_Unit(flat, stage, keeps_whole or stage is None) for flat, stage in flats]
        self._place = {
            parameter: (unit, view)
            for unit in self._units
            for parameter, view in zip(unit.flat.layout.parameters, unit.flat.views, strict=True)
        }
        self._grads_ready: set[nn.Parameter] = set()
        self._queue: list[_Unit] = []  # to be reduced, in this order
        self._next = 0  # the next unit of the queue to reduce
        self._sync_this_backward = False
        for parameter in self._place:
            parameter.register_post_accumulate_grad_hook(self._on_grad_ready)

    def begin_step(self) -> None:
        """Drop all gradients and their memory; the backward allocates it as the forward's activations go."""
        self._grads_ready.clear()
        for unit in self._units:
            unit.has_sum = False
            unit.flat.drop()
        for parameter, (unit, _) in self._place.items():
            if unit.keeps_whole:
                parameter.grad = None
        if self._keeps_whole:
            self._await([unit for unit in self._units if unit.stage is not None])

    def _await(self, units: list[_Unit]) -> None:
        """Queue these units to be reduced next, with all gradients missing."""
        self._queue, self._next = units, 0
        for unit in units:
            unit.missing = set(unit.flat.layout.parameters)

    def before_backward(self, last: bool, stage: int) -> None:
        """Begin a backward; its gradients are reduced if they are complete, or if they cannot be kept."""
        self.after_backward()
        self._sync_this_backward = last or not self._keeps_whole
        if not self._keeps_whole:
            self._await([unit for unit in self._units if unit.stage == stage])

    @torch.no_grad()
    def _on_grad_ready(self, parameter: Tensor) -> None:
        """Take a gradient that autograd has made or added to, and reduce the units that are full."""
        assert isinstance(parameter, nn.Parameter)
        unit, view = self._place[parameter]
        # ---- copy
        if parameter.grad is not view:
            assert parameter.grad is not None
            unit.flat.allocate()
            view.copy_(parameter.grad)
            parameter.grad = view if unit.keeps_whole else None
        self._grads_ready.add(parameter)
        if self._sync_this_backward and unit.stage is not None:
            unit.missing.discard(parameter)
            # ---- reduce, in an order that is the same on every rank
            while self._next < len(self._queue) and not self._queue[self._next].missing:
                self._reduce()

    def _reduce(self) -> None:
        unit = self._queue[self._next]
        unit.flat.allocate()
        for parameter in unit.missing:
            if not (unit.keeps_whole and parameter in self._grads_ready):  # unless an earlier micro-batch did
                self._place[parameter][1].zero_()
        if not unit.has_sum:
            unit.flat.allocate_shard()
        unit.more = torch.empty_like(unit.flat.shard) if unit.has_sum else None
        out = unit.flat.shard if unit.more is None else unit.more
        unit.work = self._replicas.reduce_scatter(unit.flat.whole, async_op=True, out=out)
        self._next += 1
        # ---- free the one before
        if self._next > 1:
            self._complete(self._queue[self._next - 2])

    def _complete(self, unit: _Unit) -> None:
        if unit.work is not None:
            unit.work.wait()
            unit.work = None
            if unit.more is not None:
                unit.flat.shard.add_(unit.more)
                unit.more = None
            unit.has_sum = True
            unit.flat.free()

    @torch.no_grad()
    def after_backward(self) -> None:
        """Reduce the remaining units, whose parameters did not all get a gradient in this backward."""
        if self._sync_this_backward and not self._keeps_whole:
            self._reduce_rest()
        self._sync_this_backward = False

    def _reduce_rest(self) -> None:
        while self._next < len(self._queue):
            self._reduce()
        if self._queue:
            self._complete(self._queue[-1])

    @torch.no_grad()
    def finish(self) -> set[nn.Parameter]:
        """Wait until all shards hold the whole batch's gradients; return the parameters that have none.

        Raises:
            MpkitError: a parameter has no gradient, and the plan does not allow that.
        """
        missing = [name for parameter, name in self._names.items() if parameter not in self._grads_ready]
        if missing and not self._allows_unused:
            raise unused_error(missing)
        self._reduce_rest()
        self._await([unit for unit in self._units if unit.stage is None])
        self._reduce_rest()
        if not (self._allows_unused and self._units):
            return set()
        # A parameter that no rank used has no gradient, as in serial training.
        used = torch.tensor([parameter in self._grads_ready for parameter in self._place], dtype=torch.int32)
        used = self._replicas.all_reduce(used.to(self._units[0].flat.whole.device))
        return {parameter for parameter, count in zip(self._place, used.tolist(), strict=True) if count == 0}
