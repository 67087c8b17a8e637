"""Gradients of one unit, from autograd to this rank's shard of their sum: two policies.

    copy         a gradient that autograd made is copied to its place in a flat tensor
    reduce       the flat tensor's sum over ranks is computed, of which each rank keeps its shard
    free         what the policy does not keep is freed
    replicate    in hybrid sharding the shard is summed over the groups, once per step

    Accumulated    stage 1, and tied weights in every stage: gradients stay whole and accumulate over micro-batches in
                   the flat tensor, which is reduced once per step
    Sharded        stages 2 and 3 (P_g): only the shard stays. So each backward reduces its own gradients, as in
                   DeepSpeed, and the sums accumulate in the shard.

`mpkit.strategies.zero.reducer` decides which unit is reduced when.

Source: Rajbhandari et al. 2020, section 5.2: "as each gradient ... becomes available, we only reduce them on the data
parallel process responsible for updating the corresponding parameters. After the reduction we no longer need the
gradients and their memory can be released."
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from mpkit.strategies.comm.communicator import Communicator
from mpkit.strategies.comm.process_group import PendingWork
from mpkit.strategies.zero.flat import Flat, FlatLayout, ShardedFlat
from mpkit.trace.record.recorder import Recorder

__all__ = ["AccumulatedGradients", "Gradients", "ShardedGradients"]


class Gradients(ABC):
    """The gradients of a unit's parameters, in a flat tensor that has no memory between steps.

    Args:
        layout: that of the unit's parameters.
        record: this rank's recorder.
        shard_group: the ranks that share the work.
        stage: the model's stage whose backwards produce the gradients; None if several do, which share a tied weight.
        replicate_group: the ranks of other groups that keep the same shard; None if there are none.

    Attributes:
        layout, stage: as given.
        flat: the flat tensor; after `complete` its shard is this rank's shard of the sum, (k,).
        ready: parameters that have had a gradient in this step.
        missing: parameters whose gradient has not arrived yet, of those that `Reducer` waits for.
        several: whether gradients have arrived more than once in a backward, so that only its end shows that they are
            complete. Backwards within the backward do that, if they compute a block again that is used several times.
    """

    flat: Flat

    def __init__(
        self,
        layout: FlatLayout,
        record: Recorder,
        shard_group: Communicator,
        stage: int | None,
        replicate_group: Communicator | None = None,
    ) -> None:
        self.layout, self.stage = layout, stage
        self._shard_group, self._replicate_group = shard_group, replicate_group
        self.ready: set[nn.Parameter] = set()
        self.missing: set[nn.Parameter] = set()
        self.several = False
        self._work: PendingWork | None = None
        self._is_replicated = False  # whether the sum over the groups has been started in this step
        self._replicating: PendingWork | None = None
        self.flat = self._new_flat(record)
        self.flat.drop()
        self._views = dict(zip(layout.parameters, self.flat.views, strict=True))

    @abstractmethod
    def _new_flat(self, record: Recorder) -> Flat:
        """Return a new flat tensor."""

    def begin_step(self) -> None:
        """Drop all gradients and their memory; the backward allocates it as the forward's activations go."""
        if self._work is not None:  # of a backward that failed
            self._work.wait()
            self._work = None
        self.finish_replicate()
        self._is_replicated = False
        self.ready.clear()
        self.flat.drop()

    @property
    def is_full(self) -> bool:
        """Whether all gradients have arrived, as far as that shows before the end of the backward."""
        return not (self.missing or self.several)

    @abstractmethod
    def copy(self, parameter: nn.Parameter) -> None:
        """Take the gradient that autograd has made or added to."""

    @abstractmethod
    def start_reduce(self) -> None:
        """Start the reduce-scatter of the flat tensor; a parameter without a gradient counts as 0."""

    @abstractmethod
    def complete(self) -> None:
        """Wait for the reduce-scatter, if it has been started, and free what does not stay."""

    def start_replicate(self) -> None:
        """Start the sum of the step's shard over the groups, if there are several and it has not been started yet."""
        if self._replicate_group is not None and not self._is_replicated:
            self._is_replicated = True
            self._replicating = self._replicate_group.all_reduce(self.flat.shard, async_op=True)

    def finish_replicate(self) -> None:
        """Wait for the sum over the groups, if it has been started."""
        if self._replicating is not None:
            self._replicating.wait()
            self._replicating = None

    def reduce_late(self, late: dict[nn.Parameter, Tensor]) -> None:
        """Add gradients that arrived after the others had been reduced to the shard; every rank calls it."""
        self.complete()
        whole = torch.zeros_like(self.flat.whole)
        for parameter, view in zip(self.layout.parameters, self.layout.views(whole), strict=True):
            if parameter in late:
                view.copy_(late[parameter])
        self._add_to_shard(self._shard_group.reduce_scatter(whole))

    def _add_to_shard(self, more: Tensor) -> None:
        """Add a sum over this group to the shard, which may be the sum over all groups already."""
        if self._is_replicated and self._replicate_group is not None:
            self.finish_replicate()
            self._replicate_group.all_reduce(more)
        self.flat.shard.add_(more)


class AccumulatedGradients(Gradients):
    """Whole gradients that accumulate in the flat tensor, and are reduced once per step."""

    def _new_flat(self, record: Recorder) -> Flat:
        return Flat(self.layout, record, "grads", self._shard_group)

    def begin_step(self) -> None:
        """Drop all gradients and their memory, those of the parameters too."""
        super().begin_step()
        for parameter in self.layout.parameters:
            parameter.grad = None

    def copy(self, parameter: nn.Parameter) -> None:
        """Copy the step's first gradient to its place, where autograd adds the others."""
        view = self._views[parameter]
        if parameter.grad is not view:
            assert parameter.grad is not None
            self.flat.allocate()
            view.copy_(parameter.grad)
            parameter.grad = view
        self.ready.add(parameter)

    def start_reduce(self) -> None:
        """Start the reduce-scatter of the step's gradients; the shard is a view of the flat tensor."""
        self.flat.allocate()
        for parameter, view in self._views.items():
            if parameter not in self.ready:
                view.zero_()
        self._work = self._shard_group.reduce_scatter(self.flat.whole, async_op=True, out=self.flat.shard)

    def complete(self) -> None:
        """Wait for the reduce-scatter, if it has been started; the flat tensor stays."""
        if self._work is not None:
            self._work.wait()
            self._work = None


class ShardedGradients(Gradients):
    """Gradients of one backward, reduced at once; their sums accumulate in the shard."""

    flat: ShardedFlat

    def __init__(
        self,
        layout: FlatLayout,
        record: Recorder,
        shard_group: Communicator,
        stage: int | None,
        replicate_group: Communicator | None = None,
    ) -> None:
        super().__init__(layout, record, shard_group, stage, replicate_group)
        self._has_sum = False  # whether the shard holds the sum of an earlier backward
        self._more: Tensor | None = None  # (k,), where the next sum is written if it does

    def _new_flat(self, record: Recorder) -> ShardedFlat:
        return ShardedFlat(self.layout, record, "grads", self._shard_group)

    def begin_step(self) -> None:
        """Drop all gradients and their memory, the shard too."""
        super().begin_step()
        self._has_sum = False

    def copy(self, parameter: nn.Parameter) -> None:
        """Copy the gradient to its place, or add it to an earlier one of this backward, and drop what autograd made."""
        assert parameter.grad is not None
        self.flat.allocate()
        view = self._views[parameter]
        _ = view.copy_(parameter.grad) if parameter in self.missing else view.add_(parameter.grad)
        parameter.grad = None
        self.ready.add(parameter)

    def start_reduce(self) -> None:
        """Start the reduce-scatter of this backward's gradients, into the shard or beside the sum that it holds."""
        self.flat.allocate()
        for parameter in self.missing:
            self._views[parameter].zero_()
        if not self._has_sum:
            self.flat.allocate_shard()
        self._more = torch.empty_like(self.flat.shard) if self._has_sum else None
        out = self.flat.shard if self._more is None else self._more
        self._work = self._shard_group.reduce_scatter(self.flat.whole, async_op=True, out=out)

    def complete(self) -> None:
        """Wait for the reduce-scatter, if it has been started; add it to the shard, and free the flat tensor."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            if self._more is not None:
                self._add_to_shard(self._more)
                self._more = None
            self._has_sum = True
            self.flat.free()
