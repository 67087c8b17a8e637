"""Gradients under ZeRO: reduce-scattered while the backward goes on.

    copy      a gradient that autograd made is copied to its place in a flat tensor, and dropped
    reduce    when a flat tensor is full, its sum over ranks is started, of which each rank keeps its shard
    free      when that is complete, the flat tensor goes; at most one is under way while the next one fills

That is P_g. In stage 1 the flat tensors stay, and gradients accumulate in them until the last micro-batch; stages 2
and 3 have nowhere to accumulate but in the shard, and so reduce in each micro-batch, as DeepSpeed does. A rank of a
pipeline may have several of the model's stages; a backward brings the gradients of one. A weight that several of them
use accumulates in any case, and is reduced when all are done.

Source: Rajbhandari et al. 2020, section 5.2: "as each gradient ... becomes available, we only reduce them on the data
parallel process responsible for updating the corresponding parameters. After the reduction we no longer need the
gradients and their memory can be released."
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from mpkit.parallel.axis import Axis, Waiting
from mpkit.parallel.ddp import unused_error
from mpkit.parallel.zero.flat import Flat

__all__ = ["Gradients"]


@dataclass(eq=False)
class _Unit:
    """A flat tensor of gradients.

    Attributes:
        stage: of the model, whose backwards bring them; None: several stages'.
        keeps_whole: gradients accumulate in it.
        missing: parameters whose gradient has not come in this backward.
        has_sum: the shard holds the sum of an earlier micro-batch.
        work: the reduction under way.
        more: (k,), where it ends if the shard is taken; else None.
    """

    flat: Flat
    stage: int | None
    keeps_whole: bool
    missing: set[nn.Parameter] = field(default_factory=set)
    has_sum: bool = False
    work: Waiting | None = None
    more: Tensor | None = None


class Gradients:
    """The gradients of parameters that require them.

    Args:
        replicas: who shares the work.
        flats: of gradients, in the order in which they come; each with the stage of the model that brings them.
        names: of the parameters, for errors.
        keeps_whole: stage 1.
        allows_unused: a parameter may be without a gradient.
    """

    def __init__(
        self,
        replicas: Axis,
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
        self._came: set[nn.Parameter] = set()
        self._queue: list[_Unit] = []  # to be reduced, in this order
        self._next = 0  # the unit of the queue whose turn it is
        self._sends = False
        for parameter in self._place:
            parameter.register_post_accumulate_grad_hook(self._arrived)

    def begin_step(self) -> None:
        """No gradient has come, and none has memory: that is there when the activations of the forward go."""
        self._came.clear()
        for unit in self._units:
            unit.has_sum = False
            unit.flat.drop()
        for parameter, (unit, _) in self._place.items():
            if unit.keeps_whole:
                parameter.grad = None
        if self._keeps_whole:
            self._await([unit for unit in self._units if unit.stage is not None])

    def _await(self, units: list[_Unit]) -> None:
        """These are to come next."""
        self._queue, self._next = units, 0
        for unit in units:
            unit.missing = set(unit.flat.layout.parameters)

    def before_backward(self, last: bool, stage: int) -> None:
        """A backward begins; its gradients are sent if they are complete, or if there is nowhere to keep them."""
        self.after_backward()
        self._sends = last or not self._keeps_whole
        if not self._keeps_whole:
            self._await([unit for unit in self._units if unit.stage == stage])

    @torch.no_grad()
    def _arrived(self, parameter: Tensor) -> None:
        """Autograd has made a gradient, or added to the one that it made before."""
        assert isinstance(parameter, nn.Parameter)
        unit, view = self._place[parameter]
        # ---- copy
        if parameter.grad is not view:
            assert parameter.grad is not None
            unit.flat.allocate()
            view.copy_(parameter.grad)
            parameter.grad = view if unit.keeps_whole else None
        self._came.add(parameter)
        if self._sends and unit.stage is not None:
            unit.missing.discard(parameter)
            # ---- reduce, in an order that is the same on every rank
            while self._next < len(self._queue) and not self._queue[self._next].missing:
                self._reduce()

    def _reduce(self) -> None:
        unit = self._queue[self._next]
        unit.flat.allocate()
        for parameter in unit.missing:
            if not (unit.keeps_whole and parameter in self._came):  # if not of an earlier micro-batch
                self._place[parameter][1].zero_()
        if not unit.has_sum:
            unit.flat.allocate_shard()
        unit.more = torch.empty_like(unit.flat.shard) if unit.has_sum else None
        out = unit.flat.shard if unit.more is None else unit.more
        unit.work = self._replicas.start_reduce_scatter(unit.flat.whole, out=out)
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
        """Send what is left: units with parameters that this backward had no gradient for."""
        if self._sends and not self._keeps_whole:
            self._reduce_rest()
        self._sends = False

    def _reduce_rest(self) -> None:
        while self._next < len(self._queue):
            self._reduce()
        if self._queue:
            self._complete(self._queue[-1])

    @torch.no_grad()
    def finish(self) -> set[nn.Parameter]:
        """Wait until all shards are those of the whole batch's gradients; returns parameters that have none.

        Raises:
            MpkitError: a parameter has no gradient, and the plan does not allow that.
        """
        missing = [name for parameter, name in self._names.items() if parameter not in self._came]
        if missing and not self._allows_unused:
            raise unused_error(missing)
        self._reduce_rest()
        self._await([unit for unit in self._units if unit.stage is None])
        self._reduce_rest()
        if not (self._allows_unused and self._units):
            return set()
        # What no rank used has no gradient, as in serial training.
        used = torch.tensor([parameter in self._came for parameter in self._place], dtype=torch.int32)
        used = self._replicas.all_reduce(used.to(self._units[0].flat.whole.device))
        return {parameter for parameter, count in zip(self._place, used.tolist(), strict=True) if count == 0}
