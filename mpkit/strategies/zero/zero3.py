"""ZeRO-3, P_os+g+p: each rank keeps its n-th of everything, and a layer's parameters are whole while it computes.

    forward     layer by layer: all-gather its parameters, compute, free them
    backward    layer by layer: all-gather again, compute; reduce-scatter the gradients, free both
    update      the shards, with this rank's optimizer states (`mpkit.strategies.update`)

With one micro-batch each parameter is gathered twice and its gradient reduced once: 3 psi, 1.5 times DDP's volume.
`mpkit.strategies.reference.zero3` is the algorithm in 30 lines. This module adds what `mpkit.strategies.zero.zero1`
adds, and prefetch, backwards in two halves, and models that use a parameter outside of its own layer (`gather`). Where
the shards lie in the host's memory, see `offload`.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020,
sections 5.3 and 7.2.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mpkit.strategies.data_parallel.replicated_part import ReplicatedPart
from mpkit.strategies.stage.gradient_sync import Half
from mpkit.strategies.zero.flat import ShardedFlat
from mpkit.strategies.zero.gather import GatherHooks
from mpkit.strategies.zero.gradients import ShardedGradients
from mpkit.strategies.zero.units import by_site, sites_of
from mpkit.strategies.zero.zero import Zero

__all__ = ["Zero3"]


class Zero3(Zero):
    """P_os+g+p: each rank keeps its shard of parameters, gradients and optimizer states.

    Args:
        held: this rank's part of the model, and its replicas.
    """

    flat_params = ShardedFlat
    flat_grads = ShardedGradients

    def __init__(self, held: ReplicatedPart) -> None:
        sites = sites_of(held.stages, held.whole)
        super().__init__(held, by_site(sites, held.tied, held.unit_kinds))
        # From here on hooks gather a layer's parameters before its forward and its backward, and free them after.
        self._gathering = GatherHooks(sites, self._params, prefetch=held.plan.prefetch)

    @contextmanager
    def backward(self, stage: int = 0, last: bool = True, half: Half = "") -> Iterator[None]:
        """Reduce-scatter the gradients of every backward; free the parameters that it gathered."""
        arriving = [grads for grads in self._grads if grads.stage == stage and half != "I"]
        with self._reducer.reducing_all(arriving, last=last):
            if half == "W":  # goes from node to node, and no hook shows which layer is next
                self._gathering.gather_stage(stage)
            yield
        self._gathering.after_backward()

    @contextmanager
    def evaluation_mode(self) -> Iterator[None]:
        """Take the first replica's buffers; afterwards, free the parameters that the forwards gathered."""
        self._expire()  # an evaluation may be of other parameters, such as averaged ones
        with super().evaluation_mode():
            yield
        self._gathering.after_backward()
        self._expire()

    def finish(self) -> None:
        """Wait for the reduce-scatter of tied weights; the other shards are complete.

        Raises:
            MpkitError: a parameter has no gradient, and the plan does not allow that.
        """
        self._assign(self._reducer.finish())

    # The optimizer updates the pieces here.

    def renew(self) -> None:
        """Free what is still whole, since it is out of date; the next forward gathers the updated shards."""
        self._gathering.after_backward()
        self._expire()

    def _expire(self) -> None:
        for flat in self._params:
            flat.expire()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Keep all parameters whole inside the block, which every rank enters. Changes to them are lost."""
        self._expire()
        with self._gathering.gather_all():
            yield
        self._expire()
