"""The cost of BatchNorm's statistics over the whole batch: announced at the start of a run, measured, and printed."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

from torch import Tensor, nn

from mpkit.common.torch_private import _get_dispatch_mode, _TorchDispatchModeKey
from mpkit.strategies.comm.communicator import Communicator
from mpkit.strategies.data_parallel.sync_batchnorm import batch_norms

if TYPE_CHECKING:
    from mpkit.strategies.rank_context import Context

__all__ = ["SyncCost"]


class SyncCost:
    """Timed communication for synchronized BatchNorms; rank 0 prints a line at both ends of a run.

    Args:
        context: this rank's context.
        replicas: the ranks that share the batch.
        model: the rank's model before it is cut into stages.

    Attributes:
        seconds: time that this rank has waited for statistics.
    """

    def __init__(self, context: Context, replicas: Communicator, model: nn.Module) -> None:
        self._replicas = replicas
        played = _get_dispatch_mode(_TorchDispatchModeKey.FAKE) is not None
        self._says = context.rank == 0 and not played and bool(batch_norms(model))
        # With a GPU the host only enqueues the communication, and does not wait for it.
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
        """Gather as `Communicator.all_gather` does, and measure the time."""
        began = perf_counter()
        gathered = self._replicas.all_gather(tensor)
        self.seconds += perf_counter() - began
        return gathered

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum as `Communicator.all_reduce` does, and measure the time."""
        began = perf_counter()
        reduced = self._replicas.all_reduce(tensor)
        self.seconds += perf_counter() - began
        return reduced

    def begin(self) -> None:
        """Start the clock when the first step begins."""
        self._began = perf_counter()

    def end(self) -> None:
        """Print the measured share of time after the last step."""
        if self._times and self.seconds:
            share = self.seconds / (perf_counter() - self._began)
            print(
                f"BatchNorm's synchronization took {share:.0%} of rank 0's time (measured, with waits for others)."
            )
