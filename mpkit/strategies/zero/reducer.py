"""The reducer: starts the reduce-scatter of each unit of gradients as soon as it is full, while the backward goes on.

    expect    which units are reduced next, in which order: the same on every rank
    ready     autograd has made a gradient: copy it, and reduce the units that are full
    late      it made another one when the unit had been reduced: that one is reduced at the end, and from the next
              backward on the unit waits for the end
    rest      at the end, reduce the units of which some gradients never came
    finish    reduce tied weights, whose gradients are complete only when all stages are done

In hybrid sharding each shard is also summed over the groups, as soon as it holds the gradients of the whole step.

At most one reduce-scatter is pending while the next unit fills, so at most two units are whole at a time where
gradients are sharded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from mpkit.strategies.comm.communicator import Communicator
from mpkit.strategies.data_parallel.unused_parameters import arrived_late, unused_error
from mpkit.strategies.zero.gradients import Gradients

__all__ = ["Reducer"]


class Reducer:
    """The units of gradients, on their way to their shards.

    Args:
        replicas: all ranks that share the batch.
        units: all of them, in the order in which they fill.
        names: the parameters' names, for errors.
        allows_unused: whether a parameter may have no gradient.
        allow_unused: what would allow that, for the error.
        arrive_once: as in `ReplicatedPart`.
    """

    def __init__(
        self,
        replicas: Communicator,
        units: list[Gradients],
        names: Mapping[nn.Parameter, str],
        *,
        allows_unused: bool,
        allow_unused: str,
        arrive_once: bool = False,
    ) -> None:
        self._replicas, self._units = replicas, units
        self._names, self._allows_unused, self._allow_unused = names, allows_unused, allow_unused
        self._unit_of = {parameter: unit for unit in units for parameter in unit.layout.parameters}
        self._queue: list[Gradients] = []  # to be reduced, in this order
        self._next = 0  # the next unit of the queue to reduce
        self._reducing = False
        self._last = True  # whether the shards are complete for this step when the queue has been reduced
        self._late: dict[nn.Parameter, Tensor] = {}
        self._sets_late_aside = not arrive_once  # by a hook, which costs some microseconds per gradient
        for parameter in self._unit_of:
            if self._sets_late_aside:
                parameter.register_hook(partial(self._before_grad, parameter))
            parameter.register_post_accumulate_grad_hook(self._on_grad_ready)

    def begin_step(self) -> None:
        """Drop all gradients and their memory."""
        self._late.clear()
        for unit in self._units:
            unit.begin_step()

    # ---- expect

    def expect(self, units: list[Gradients]) -> None:
        """Queue these units to be reduced next, with all gradients missing."""
        self._queue, self._next = units, 0
        for unit in units:
            unit.missing = set(unit.layout.parameters)

    @contextmanager
    def reduce_arriving(self, now: bool = True) -> Iterator[None]:
        """Within the block, a gradient that arrives is complete (unless `now` is False), and full units are reduced."""
        self._reducing = now
        yield
        self._reducing = False

    @contextmanager
    def reducing_all(self, units: list[Gradients], *, last: bool) -> Iterator[None]:
        """Within the block, a backward, reduce these units as they fill; at its end, those that did not fill.

        Args:
            units: the units that this backward fills.
            last: whether it is the last in this step that fills them.
        """
        self.expect(units)
        self._last = last
        with self.reduce_arriving():
            yield
        self.reduce_rest()

    # ---- ready

    @torch.no_grad()
    def _before_grad(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor | None:
        """Set a gradient aside that arrives when its unit has been reduced; autograd then adds zeros."""
        unit = self._unit_of[parameter]
        if not (self._reducing and unit.stage is not None and parameter not in unit.missing):
            return None
        unit.several = True
        if unit not in self._queue[: self._next]:
            return None
        unit.complete()
        self._late[parameter] = self._late.get(parameter, 0) + gradient
        return torch.zeros_like(gradient)

    @torch.no_grad()
    def _on_grad_ready(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        unit = self._unit_of[parameter]
        if parameter in self._late:
            parameter.grad = None
            return
        reducing = self._reducing and unit.stage is not None
        if reducing and not self._sets_late_aside and parameter not in unit.missing:
            if unit in self._queue[: self._next]:
                raise arrived_late(self._names.get(parameter, "a parameter"))
            unit.several = True
        unit.copy(parameter)  # or add, if it is not missing
        if reducing:
            unit.missing.discard(parameter)
            while self._next < len(self._queue) and self._queue[self._next].is_full:
                self._reduce()

    def _reduce(self) -> None:
        """Start the next unit's reduction, and complete the one before."""
        unit = self._queue[self._next]
        with self._replicas.wire.sending_for(unit.flat.layer, unit.flat.names):
            unit.start_reduce()
        self._next += 1
        if self._next > 1:
            self._complete(self._queue[self._next - 2])

    def _complete(self, unit: Gradients) -> None:
        unit.complete()
        if self._last:
            with self._replicas.wire.sending_for(unit.flat.layer):
                unit.start_replicate()

    # ---- rest

    @torch.no_grad()
    def reduce_rest(self) -> None:
        """Reduce the units that are still queued, and wait for all of them."""
        while self._next < len(self._queue):
            self._reduce()
        if self._queue:
            self._complete(self._queue[-1])
        for unit in [unit for unit in self._queue if any(p in self._late for p in unit.layout.parameters)]:
            unit.reduce_late(self._late)
        self._late.clear()

    # ---- finish

    @torch.no_grad()
    def finish(self) -> set[nn.Parameter]:
        """Wait until all shards hold the whole batch's gradients; return the parameters that have none.

        Raises:
            MpkitError: a parameter has no gradient, and the plan does not allow that.
        """
        missing = [name for parameter, name in self._names.items() if not self._is_ready(parameter)]
        if missing and not self._allows_unused:
            raise unused_error(missing, self._allow_unused)
        self.reduce_rest()
        self._last = True
        self.expect([unit for unit in self._units if unit.stage is None])
        self.reduce_rest()
        for unit in self._units:
            unit.finish_replicate()
        if not (self._allows_unused and self._units):
            return set()
        # A parameter that no rank used has no gradient, as in serial training.
        used = torch.tensor([self._is_ready(parameter) for parameter in self._unit_of], dtype=torch.int32)
        used = self._replicas.all_reduce(used.to(self._units[0].flat.whole.device))
        return {
            parameter for parameter, count in zip(self._unit_of, used.tolist(), strict=True) if count == 0
        }

    def _is_ready(self, parameter: nn.Parameter) -> bool:
        return parameter in self._unit_of[parameter].ready
