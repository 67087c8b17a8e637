"""AveragedGradients: DDP whose gradients stay in `parameter.grad`, as torch's conventions ask, until they are zeroed.

`mpkit.strategies.data_parallel.ddp` trains: it knows its steps, zeroes its buckets, and sums shares of a batch. In a
loop of one's own

    zero_grad     drops the gradients or zeroes them, whenever the user wants
    backward      gradients that autograd made elsewhere move into their bucket
    reduce        the mean over replicas of what has accumulated; parameters that are already equal stay so
"""

from __future__ import annotations

from torch import Tensor, nn

from mpkit.strategies.data_parallel.bucket import Bucket
from mpkit.strategies.data_parallel.ddp import DDP
from mpkit.strategies.data_parallel.replicated_part import ReplicatedPart

__all__ = ["AveragedGradients"]


class AveragedGradients(DDP):
    """Gradients averaged over replicas in each backward that synchronizes.

    Args:
        held: the module, and its replicas.
    """

    reduction = "mean"

    def __init__(self, held: ReplicatedPart) -> None:
        super().__init__(held)
        self._filled: set[nn.Parameter] = set()  # had no gradient before this reduction

    @property
    def has_replicas(self) -> bool:
        """Whether other ranks hold the module too."""
        return self._replicas.size > 1

    def begin_backward(self) -> None:
        """Expect the gradients of one backward."""
        self._next = 0
        self._late.clear()
        for bucket in self._buckets:
            bucket.wait()  # of a backward that failed
        self._rebuild()
        for bucket in self._buckets:
            bucket.missing = set(bucket.views)

    def _on_grad_ready(self, parameter: Tensor) -> None:
        """Move the gradient into its bucket, and reduce the buckets that are full."""
        assert isinstance(parameter, nn.Parameter)
        self._place(self._of[parameter], parameter)
        super()._on_grad_ready(parameter)

    def _place(self, bucket: Bucket, parameter: nn.Parameter) -> None:
        view = bucket.views[parameter]
        if parameter.grad is not view:
            if parameter.grad is None:
                view.zero_()
                self._filled.add(parameter)
            else:
                view.copy_(parameter.grad)
            parameter.grad = view

    def _reduce(self) -> None:
        bucket = self._buckets[self._next]
        for parameter in bucket.missing:  # not used in this backward
            self._place(bucket, parameter)
        super()._reduce()

    def _drop(self, parameter: nn.Parameter) -> None:
        """Drop the zeros of a parameter that no rank used; what it had before this backward stays."""
        if parameter in self._filled:
            parameter.grad = None

    def finish(self) -> None:
        """Wait for the means.

        Raises:
            MpkitError: a parameter has no gradient, and that was not allowed.
        """
        super().finish()
        self._filled.clear()
        self._grads_ready.clear()
