"""What it costs that BatchNorm takes its statistics over the whole batch: said when it happens, and measured."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mpkit.parallel.axis import Axis
from mpkit.parallel.sync_batchnorm import batch_norms

if TYPE_CHECKING:
    from mpkit.launch.context import Context

__all__ = ["SyncCost"]


class SyncCost:
    """The communication of synchronized BatchNorms, with its time taken; rank 0 prints a line at both ends of a run.

    Args:
        context: of this rank.
        replicas: who shares the batch.
        model: as the rank holds it before it is cut.

    Attributes:
        seconds: that this rank has waited for statistics.
    """

    def __init__(self, context: Context, replicas: Axis, model: nn.Module) -> None:
        self._replicas = replicas
        played = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        self._says = context.rank == 0 and not played and bool(batch_norms(model))
        # A GPU does not wait for what the host has only asked for.
        self._times = self._says and context.device.type == "cpu"
        self._began = perf_counter()
        self.seconds = 0.0
        if self._says:
            print(
                f"The statistics of {len(batch_norms(model))} BatchNorms are taken over the whole batch, as in serial "
                f"training: {replicas.size} replicas wait for each other at each of them, forward and backward. "
                "torch's DDP takes each rank's own: batchnorm='local' in the Plan."
            )

    def all_gather(self, tensor: Tensor) -> Tensor:
        """As an `Axis` does it."""
        began = perf_counter()
        found = self._replicas.all_gather(tensor)
        self.seconds += perf_counter() - began
        return found

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """As an `Axis` does it."""
        began = perf_counter()
        found = self._replicas.all_reduce(tensor)
        self.seconds += perf_counter() - began
        return found

    def begin(self) -> None:
        """The first step begins."""
        self._began = perf_counter()

    def end(self) -> None:
        """The last step is over."""
        if self._times and self.seconds:
            share = self.seconds / (perf_counter() - self._began)
            print(
                f"BatchNorm's synchronization took {share:.0%} of rank 0's time (measured, with waits for others)."
            )
