"""AveragedGradients: DDP whose gradients stay in `parameter.grad`, as torch's conventions ask, until they are zeroed.

`mpkit.strategies.replicas.ddp` trains: it knows its steps, zeroes its buckets, and sums shares of a batch. In a
loop of one's own

    zero_grad     drops the gradients or zeroes them, whenever the user wants
    backward      gradients that autograd made elsewhere move into their bucket
    reduce        the mean over replicas of what has accumulated; parameters that are already equal stay so
"""

from __future__ import annotations

from mpkit.strategies.replicas.ddp import DDP

__all__ = ["AveragedGradients"]


class AveragedGradients(DDP):
    """Gradients averaged over replicas in each backward that synchronizes.

    Args:
        held: the module, and its replicas.
    """

    reduction = "mean"

    @property
    def has_replicas(self) -> bool:
        """Whether other ranks hold the module too."""
        return self._replicas.size > 1

    def begin_backward(self) -> None:
        """Expect the gradients of one backward, which autograd adds to those that are there."""
        for bucket in self._buckets:
            bucket.complete()  # of a backward that failed
            bucket.ready.clear()
        self._reducer.expect()
