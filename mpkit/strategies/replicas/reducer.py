"""Replicas' gradients: one reducer for DDP and all stages of ZeRO.

    unit         parameters side by side in one flat tensor (`flat`), in the order in which their gradients arrive
    ready        autograd has made a gradient: copy it to its place
    reduce       while the backward goes on, reduce full units in their order, which is the same on every rank
    finish       count a gradient that never came as 0; reduce tied weights last, whose gradients are complete only
                 when all stages are done
    replicate    in hybrid sharding, sum each shard over the groups once it holds the whole step's gradients

Strategies differ in what they keep:

                 which sum                  reduced                           stays
    DDP          all of it: all-reduce      in the step's last backward       the flat tensor, as in PyTorch's DDP
    ZeRO-1       a shard: reduce-scatter    in the step's last backward       the flat tensor, until the next step
    ZeRO-2, 3    a shard: reduce-scatter    in every backward, as DeepSpeed   the shard, in which sums accumulate

The first two are `WholeGradients`, the last `ShardedGradients`. A reduce-scatter needs memory of its own, so at most
one is pending while the next unit fills; of sharded gradients at most two units are whole at a time.

Source: Rajbhandari et al. 2020, section 5.2: "as each gradient ... becomes available, we only reduce them on the data
parallel process responsible for updating the corresponding parameters. After the reduction we no longer need the
gradients and their memory can be released."
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mpkit.strategies.comm.communicator import Communicator
from mpkit.strategies.comm.wire import PendingWork
from mpkit.strategies.replicas.flat import Flat, FlatLayout, ShardedFlat
from mpkit.strategies.replicas.part import arrived_late, unused_error
from mpkit.strategies.stage.gradient_sync import Half
from mpkit.trace.record.recorder import Recorder

# ---------------------------------------------------------------- one unit


class Gradients(ABC):
    """The gradients of a unit's parameters, in a flat tensor.

    Args:
        stage: the model's stage whose backwards produce the gradients; None if several do, which share a tied weight.
        replicate_group: the ranks of other groups that keep the same shard; None if there are none.
    """

    kind_of_flat: ClassVar[type[Flat]] = Flat
    is_urgent = True  # to free memory: between steps, and by completing a reduction before the next but one

    def __init__(
        self, layout: FlatLayout, record: Recorder, shard_group: Communicator, stage: int | None,
        replicate_group: Communicator | None = None,
    ) -> None:  # fmt: skip
        self.layout, self.stage = layout, stage
        self._shard_group, self._replicate_group = shard_group, replicate_group
        self.ready: set[nn.Parameter] = set()  # have had a gradient in this step
        self.missing: set[nn.Parameter] = set()  # `Reducer` still waits for their gradients
        self._work: PendingWork | None = None
        self._is_replicated = False  # whether the sum over the groups has been started in this step
        self._replicating: PendingWork | None = None
        # After `complete`, its shard (k,) is this rank's shard of the sum.
        self.flat = self.kind_of_flat(layout, record, "grads", shard_group)
        if self.is_urgent:
            self.flat.drop()
        self._views = dict(zip(layout.parameters, self.flat.views, strict=True))

    def begin_step(self) -> None:
        """Drop all gradients and their memory; the backward allocates it as the forward's activations go."""
        if self._work is not None:  # of a backward that failed
            self._work.wait()
            self._work = None
        self.finish_replicate()
        self._is_replicated = False
        self.ready.clear()
        self._drop()

    def _drop(self) -> None:
        if self.is_urgent:
            self.flat.drop()

    @abstractmethod
    def copy(self, parameter: nn.Parameter) -> None:
        """Copy the gradient that autograd has made or added to."""

    @abstractmethod
    def start_reduce(self) -> None:
        """Start the sum over ranks; a parameter without a gradient counts as 0."""

    def complete(self) -> None:
        """Wait for the sum, if it has been started, and free temporary memory."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def start_replicate(self) -> None:
        """Start summing the step's shard over the groups, if there are several, once per step."""
        if self._replicate_group is not None and not self._is_replicated:
            self._is_replicated = True
            self._replicating = self._replicate_group.all_reduce(self.flat.shard, async_op=True)

    def finish_replicate(self) -> None:
        """Wait for the sum over the groups, if it has been started."""
        if self._replicating is not None:
            self._replicating.wait()
            self._replicating = None


class WholeGradients(Gradients):
    """Whole gradients that accumulate in the flat tensor, and are reduced once per step.

    Args:
        reduction: "sum" or "mean" for an all-reduce in place, whose memory stays, since a backend's thread may hold it;
            "" for a reduce-scatter, after which the shard is a view of the flat tensor.
    """

    def __init__(
        self, layout: FlatLayout, record: Recorder, shard_group: Communicator, stage: int | None,
        replicate_group: Communicator | None = None, reduction: str = "",
    ) -> None:  # fmt: skip
        self._reduction, self.is_urgent = reduction, not reduction
        self.zeroed: set[nn.Parameter] = set()  # had no gradient when they were reduced
        super().__init__(layout, record, shard_group, stage, replicate_group)

    def _drop(self) -> None:
        super()._drop()
        for parameter in self.layout.parameters:
            parameter.grad = None

    def copy(self, parameter: nn.Parameter) -> None:
        """Copy the step's first gradient to its place, to which autograd adds the others."""
        view = self._views[parameter]
        if parameter.grad is not view:
            assert parameter.grad is not None
            self.flat.allocate()
            view.copy_(parameter.grad)
            parameter.grad = view
        self.ready.add(parameter)

    def start_reduce(self) -> None:
        """Start the reduction. In a user's own loop, gradients of earlier backwards may be elsewhere."""
        self.flat.allocate()
        self.zeroed = {parameter for parameter in self._views if parameter.grad is None}
        for parameter, view in self._views.items():
            gradient = parameter.grad
            if gradient is None:
                view.zero_()
            elif gradient is not view:
                view.copy_(gradient)
            parameter.grad = view
        whole, group = self.flat.whole, self._shard_group
        if self._reduction:
            self._work = group.all_reduce(whole, async_op=True, op=self._reduction)
        else:
            self._work = group.reduce_scatter(whole, async_op=True, out=self.flat.shard)


class ShardedGradients(Gradients):
    """Gradients of one backward, reduced at once; their sums accumulate in the shard."""

    flat: ShardedFlat
    kind_of_flat = ShardedFlat
    _has_sum = False  # whether the shard holds the sum of an earlier backward
    _more: Tensor | None = None  # (k,), where the next sum is written if it does

    def _drop(self) -> None:
        super()._drop()
        self._has_sum = False

    def copy(self, parameter: nn.Parameter) -> None:
        """Copy the gradient to its place, or add it to an earlier one of this backward, and drop autograd's own."""
        assert parameter.grad is not None
        self.flat.allocate()
        view = self._views[parameter]
        _ = view.copy_(parameter.grad) if parameter in self.missing else view.add_(parameter.grad)
        parameter.grad = None
        self.ready.add(parameter)

    def start_reduce(self) -> None:
        """Start to reduce-scatter this backward's gradients, into the shard or beside the sum that it holds."""
        self.flat.allocate()
        for parameter in self.missing:
            self._views[parameter].zero_()
        if not self._has_sum:
            self.flat.allocate_shard()
        self._more = torch.empty_like(self.flat.shard) if self._has_sum else None
        out = self.flat.shard if self._more is None else self._more
        self._work = self._shard_group.reduce_scatter(self.flat.whole, async_op=True, out=out)

    def complete(self) -> None:
        """Wait for the reduce-scatter, if it has been started, add it to the shard, and free the flat tensor."""
        if self._work is not None:
            super().complete()
            if self._more is not None:
                self.flat.shard.add_(self._more)
                self._more = None
            self._has_sum = True
            self.flat.free()


# ---------------------------------------------------------------- all units


class Reducer:
    """Reduces units of gradients.

    Args:
        replicas: all ranks that share the batch.
        units: in the order in which they fill.
        names: the names of all trained parameters, for errors; one that is in no unit has no replica.
        allow_unused: what the user can set so that parameters may have no gradient, for the error.
    """

    def __init__(
        self, replicas: Communicator, units: Sequence[Gradients], names: Mapping[nn.Parameter, str],
        *, allows_unused: bool, allow_unused: str,
    ) -> None:  # fmt: skip
        self._replicas, self._units = replicas, units
        self._names, self._allows_unused, self._allow_unused = names, allows_unused, allow_unused
        self._unit_of = {parameter: unit for unit in units for parameter in unit.layout.parameters}
        self._alone: set[Any] = set()  # parameters in no unit that have had a gradient
        self._queue: list[Gradients] = []  # to be reduced, in this order
        self._next = 0  # the next unit of the queue to reduce
        self._reducing = False
        self._arrive_once = True  # whether each gradient arrives once in the backward that is running
        self._last = True  # whether the step's sums are complete when the queue has been reduced
        for parameter in self._names:
            unit = self._unit_of.get(parameter)
            note = self._alone.add if unit is None else partial(self._on_grad_ready, unit)
            parameter.register_post_accumulate_grad_hook(note)

    def begin_step(self) -> None:
        """Drop all gradients, and queue all units for the step."""
        self._alone.clear()
        for unit in self._units:
            unit.begin_step()
        self.expect()

    def expect(self, stage: int | None = None) -> None:
        """Queue the units of a stage, or of all stages, to be reduced next, with all gradients missing."""
        self._queue = [u for u in self._units if u.stage is not None and stage in (None, u.stage)]
        self._next = 0
        for unit in self._queue:
            unit.missing = set(unit.layout.parameters)

    # ---- a backward

    @contextmanager
    def backward(self, last: bool, half: Half) -> Iterator[None]:
        """Within the block, a backward, reduce units as they fill if it is a stage's last in this step.

        Of a split backward, half "W" makes a gradient in several parts, and "I" none.
        """
        self._reducing, self._arrive_once = last and half != "I", half != "W"
        yield
        if self._reducing:
            self._reduce_full()
        self._reducing = False

    @contextmanager
    def backward_of(self, stage: int, last: bool, half: Half) -> Iterator[None]:
        """Within the block, any backward of a stage, reduce its units as they fill, and at its end the others."""
        if half == "I":
            yield
            return
        self.expect(stage)
        self._last = last
        with self.backward(True, half):
            yield
        self._reduce_rest()

    def _on_grad_ready(self, unit: Gradients, parameter: Any) -> None:
        if not (self._reducing and unit.stage is not None):
            unit.copy(parameter)
            return
        if self._arrive_once and parameter not in unit.missing:
            raise arrived_late(self._names[parameter])
        unit.copy(parameter)
        unit.missing.discard(parameter)
        if self._arrive_once and not unit.missing:
            self._reduce_full()

    def _reduce_full(self) -> None:
        while self._next < len(self._queue) and not self._queue[self._next].missing:
            self._reduce()

    def _reduce(self) -> None:
        """Start the next unit's reduction, and complete the one before if that is urgent."""
        unit = self._queue[self._next]
        with self._replicas.wire.sending_for(unit.flat.layer, unit.flat.names):
            unit.start_reduce()
        self._next += 1
        if self._next > 1 and self._queue[self._next - 2].is_urgent:
            self._complete(self._queue[self._next - 2])

    def _complete(self, unit: Gradients) -> None:
        unit.complete()
        if self._last:
            with self._replicas.wire.sending_for(unit.flat.layer):
                unit.start_replicate()

    @torch.no_grad()
    def _reduce_rest(self) -> None:
        """Reduce the units that are still queued, and wait for all of them."""
        while self._next < len(self._queue):
            self._reduce()
        for unit in self._queue:
            self._complete(unit)

    # ---- finish

    @torch.no_grad()
    def finish(self) -> set[nn.Parameter]:
        """Wait until all sums hold the whole batch's gradients; return the parameters that no rank used.

        Raises:
            MpkitError: a parameter has no gradient, and the plan does not allow that.
        """
        unused = [name for parameter, name in self._names.items() if not self._is_ready(parameter)]
        if unused and not self._allows_unused:
            raise unused_error(unused, self._allow_unused)
        self._reduce_rest()
        self._last = True
        self._queue, self._next = [unit for unit in self._units if unit.stage is None], 0
        for unit in self._queue:
            unit.missing = {p for p in unit.layout.parameters if not self._is_ready(p)}
        self._reduce_rest()
        for unit in self._units:
            unit.finish_replicate()
        if not (self._allows_unused and self._units):
            return set()
        # A parameter that no rank used has no gradient, as in serial training.
        used = torch.tensor([self._is_ready(parameter) for parameter in self._unit_of], dtype=torch.int32)
        counts = self._replicas.all_reduce(used.to(self._units[0].flat.whole.device)).tolist()
        return {parameter for parameter, count in zip(self._unit_of, counts, strict=True) if count == 0}

    def _is_ready(self, parameter: nn.Parameter) -> bool:
        unit = self._unit_of.get(parameter)
        return parameter in (self._alone if unit is None else unit.ready)
