"""ZeRO-3, P_os+g+p: each rank keeps its n-th of everything, and a layer's parameters are whole while it computes.

    forward     layer by layer: all-gather its parameters, compute, free them
    backward    layer by layer: all-gather again, compute; reduce-scatter the gradients, free both
    update      the shards, with this rank's optimizer states (`mpkit.strategies.update`)

With one micro-batch each parameter is gathered twice and its gradient reduced once: 3 psi, 1.5 times DDP's volume.
`mpkit.strategies.reference.zero3` is the algorithm in 30 lines. This module adds what `mpkit.strategies.replicas.zero`
adds, and prefetch, backwards in two halves, and models that use a parameter outside of its own layer (`gather`). Where
the shards lie in the host's memory (`offload="params"`), a gather copies this rank's shard to the device first, and the
update happens on the host.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020,
sections 5.3 and 7.2.2; of offloading: Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme
Scale Deep Learning", SC 2021.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mpkit.strategies.comm.process_group import PendingWork
from mpkit.strategies.replicas.flat import ShardedFlat
from mpkit.strategies.replicas.gather import GatherHooks
from mpkit.strategies.replicas.part import ReplicatedPart
from mpkit.strategies.replicas.reducer import ShardedGradients
from mpkit.strategies.replicas.units import by_site, sites_of
from mpkit.strategies.replicas.zero import Zero, Zero1, Zero2
from mpkit.strategies.stage.gradient_sync import Half
from mpkit.trace import Kind

__all__ = ["OffloadedZero3", "Zero3", "zero_sync"]


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
        with self._reducer.backward_of(stage, last, half):
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


class OffloadedFlat(ShardedFlat):
    """A flat tensor whose shard is in the host's memory, which the device's ledger does not count."""

    def _new_shard(self, category: str) -> Tensor:
        # Pinned, so that the device can read it without the CPU.
        return torch.zeros(self.layout.k, dtype=self.whole.dtype, device="cpu", pin_memory=self.whole.is_cuda)

    def start_all_gather(self) -> PendingWork:
        """Copy the shard to its place on the device, and start gathering the others."""
        op = self._record.begin(Kind.COPY_TO_DEVICE, nbytes=self.shard.nbytes)
        self.mine.copy_(self.shard, non_blocking=True)
        self._record.end(op)
        return self.shard_group.all_gather(self.mine, async_op=True, out=self.whole)


class OffloadedZero3(Zero3):
    """Stage 3 whose pieces, and their gradients after `finish`, are on the host.

    Args:
        held: this rank's part of the model, and its replicas.
    """

    flat_params = OffloadedFlat

    def __init__(self, held: ReplicatedPart) -> None:
        super().__init__(held)
        self._host = [torch.empty_like(grads.flat.shard, device="cpu") for grads in self._grads]
        self._gradient_of = self._pair(
            [grads.layout.parts(host) for grads, host in zip(self._grads, self._host, strict=True)]
        )

    def finish(self) -> None:
        """Wait for the gradients of this rank's pieces, and copy them to the host.

        Raises:
            MpkitError: a parameter has no gradient, and the plan does not allow that.
        """
        super().finish()
        shards = [grads.flat.shard for grads in self._grads]
        op = self._record.begin(Kind.COPY_TO_HOST, nbytes=sum(shard.nbytes for shard in shards))
        for host, shard in zip(self._host, shards, strict=True):
            host.copy_(shard)
        self._record.end(op)


def zero_sync(held: ReplicatedPart) -> Zero:
    """Return the stage of ZeRO that the plan asks for.

    Args:
        held: this rank's part of the model, and its replicas.
    """
    offloads = held.plan.offload == "params"
    return {1: Zero1, 2: Zero2, 3: OffloadedZero3 if offloads else Zero3}[held.plan.zero](held)
