"""ZeRO-1, P_os: each of n replicas keeps the optimizer states of its n-th of every parameter.

    backward          gradients accumulate, whole, until the last micro-batch
    reduce-scatter    in the last backward, as soon as a flat tensor is full: rank r gets the sum of its shard
    update            the shard, with this rank's optimizer states (`mpkit.strategies.update`)
    all-gather        the updated shards, into everybody's parameters

The volume is DDP's, 2 psi. `mpkit.strategies.reference.zero1` is the algorithm in 20 lines. This module adds
micro-batches, buckets, overlap with the backward, parameters whose size is no multiple of n, several stages per rank,
and tied, frozen and unused parameters.

An optimizer that needs whole parameters, such as Muon, gets them: each parameter's states are on one rank, its owner
(`FlatLayout`). Then a stage's gradients are one flat tensor, so that owners have about equally much, and are reduced
at the end of the backward.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020,
section 5.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mpkit.strategies.data_parallel.replicated_part import ReplicatedPart
from mpkit.strategies.stage.gradient_sync import Half
from mpkit.strategies.zero.flat import Flat
from mpkit.strategies.zero.gradients import AccumulatedGradients
from mpkit.strategies.zero.units import by_bucket, by_stage, sites_of
from mpkit.strategies.zero.zero import Zero

__all__ = ["Zero1"]


class Zero1(Zero):
    """P_os: parameters and gradients stay whole; each rank updates its shard.

    Args:
        held: this rank's part of the model, and its replicas.
    """

    flat_params = Flat
    flat_grads = AccumulatedGradients

    def __init__(self, held: ReplicatedPart) -> None:
        sites = sites_of(held.stages, held.whole)
        units = (
            by_stage(sites, held.tied, held.unit_kinds)
            if held.by_owner
            else by_bucket(sites, held.bucket_bytes, held.tied, held.unit_kinds)
        )
        super().__init__(held, units)

    def drop_gradients(self) -> None:
        """Drop all gradients, and expect those of the whole step."""
        super().drop_gradients()
        self._reducer.expect([grads for grads in self._grads if grads.stage is not None])

    @contextmanager
    def backward(self, stage: int = 0, last: bool = True, half: Half = "") -> Iterator[None]:
        """Reduce-scatter gradients in a stage's last backward; in the others they accumulate."""
        with self._reducer.reduce_arriving(last and half != "I"):
            yield

    def finish(self) -> None:
        """Wait for the reduce-scatter of this rank's shards.

        Raises:
            MpkitError: a parameter has no gradient, and the plan does not allow that.
        """
        self._assign(self._reducer.finish())

    # The optimizer updates the pieces here.

    def renew(self) -> None:
        """All-gather the updated shards into every rank's parameters."""
        self._all_gather()
