"""ZeRO-2, P_os+g: as ZeRO-1, and each rank keeps the gradients of its shards only.

    backward      as soon as a flat tensor of gradients is full: reduce-scatter it, add to the shard, free the rest
    update        the shard, with this rank's optimizer states (`mpkit.strategies.update`)
    all-gather    the updated shards, into everybody's parameters

The volume is DDP's, 2 psi, where a step has one micro-batch; with m of them, every backward reduces: (m + 1) psi. Of
the gradients a rank holds 2 psi / n bytes, and what is being reduced. `mpkit.strategies.reference.zero2` is the
algorithm in 20 lines. This module adds what `mpkit.strategies.zero.zero1` adds.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020,
section 5.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mpkit.strategies.data_parallel.replicated_part import ReplicatedPart
from mpkit.strategies.stage.gradient_sync import Half
from mpkit.strategies.zero.flat import Flat
from mpkit.strategies.zero.gradients import ShardedGradients
from mpkit.strategies.zero.units import by_bucket, sites_of
from mpkit.strategies.zero.zero import Zero

__all__ = ["Zero2"]


class Zero2(Zero):
    """P_os+g: parameters stay whole; each rank keeps its shard of the gradients, and updates its shard.

    Args:
        held: this rank's part of the model, and its replicas.
    """

    flat_params = Flat
    flat_grads = ShardedGradients

    def __init__(self, held: ReplicatedPart) -> None:
        sites = sites_of(held.stages, held.whole)
        super().__init__(held, by_bucket(sites, held.bucket_bytes, held.tied, held.unit_kinds))

    @contextmanager
    def backward(self, stage: int = 0, last: bool = True, half: Half = "") -> Iterator[None]:
        """Reduce-scatter the gradients of every backward; their sums accumulate in the shards."""
        arriving = [grads for grads in self._grads if grads.stage == stage and half != "I"]
        with self._reducer.reducing_all(arriving, last=last):
            yield

    def finish(self) -> None:
        """Wait for the reduce-scatter of tied weights; the other shards are complete.

        Raises:
            MpkitError: a parameter has no gradient, and the plan does not allow that.
        """
        self._assign(self._reducer.finish())

    # The optimizer updates the pieces here.

    def renew(self) -> None:
        """All-gather the updated shards into every rank's parameters."""
        self._all_gather()
