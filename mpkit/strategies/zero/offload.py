"""ZeRO-3 with offload="params": shards lie in the host's memory.

    all-gather    copies this rank's shard to the device first
    finish        copies the gradients' shards to the host
    update        happens on the host, where the shards and their optimizer states are

Source: Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning", SC 2021.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mpkit.strategies.comm.process_group import PendingWork
from mpkit.strategies.data_parallel.replicated_part import ReplicatedPart
from mpkit.strategies.zero.flat import ShardedFlat
from mpkit.strategies.zero.zero3 import Zero3
from mpkit.trace import Kind

__all__ = ["OffloadedFlat", "OffloadedZero3"]


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
        unused = self._reducer.finish()
        shards = [grads.flat.shard for grads in self._grads]
        op = self._record.begin(Kind.COPY_TO_HOST, nbytes=sum(shard.nbytes for shard in shards))
        for host, shard in zip(self._host, shards, strict=True):
            host.copy_(shard)
        self._record.end(op)
        self._assign(unused)
