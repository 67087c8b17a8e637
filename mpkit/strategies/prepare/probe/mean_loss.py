"""Detect whether the loss is one of torch's means, so that its divisor is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mpkit.strategies.data.microbatch import Value, leaves
from mpkit.strategies.loss.mean import INDEXED, SummedMeans

__all__ = ["MeanLossDetector"]


class MeanLossDetector:
    """A loss that returns (total, count) if it is a single call of a mean of torch.nn.functional.

    Args:
        loss: the loss to call.

    Attributes:
        pair: the (total, count) of the last call; None if the loss is something else.
    """

    def __init__(self, loss: Callable[[Any, Any], Any]) -> None:
        self.loss = loss
        self.pair: tuple[Tensor, Tensor] | None = None
        self._targets: Value = ()
        self._call: tuple[Callable[..., Any], dict[str, Any]] | None = None

    def __call__(self, outputs: Any, targets: Any) -> Any:
        """Return (total, count) if it is known, otherwise what the loss returns."""
        with SummedMeans() as reduced:
            value = self.loss(outputs, targets)
        self.pair, self._targets = reduced.pair_of(value), targets
        if self.pair is None:
            return self.loss(outputs, targets)
        self._call = next((func, given) for total, _, func, given in reduced.calls if total is value)
        return self.pair

    def constant(self, batches: Any) -> bool:
        """Return whether each sample certainly has the same count, so that the mean is a mean over samples.

        Args:
            batches: all batches; a list can be inspected, but batches that are loaded later cannot.
        """
        assert self.pair is not None and self._call is not None
        func, given = self._call
        target = given.get("target")
        place = _place(target, self._targets)
        if place is None or not isinstance(target, Tensor):
            return False
        if func not in INDEXED:
            return int(self.pair[1]) in (target.numel(), target.shape[0])
        if target.is_floating_point():
            return True
        if given["weight"] is not None or not isinstance(batches, list):
            return False
        ignored = given["ignore_index"]
        return not any(bool((leaves(batch)[place] == ignored).any()) for _, batch in batches)


def _place(target: Any, targets: Value) -> int | None:
    """Return the index of the target tensor that the loss was called with as a whole, in whatever shape."""
    for place, leaf in enumerate(leaves(targets)):
        same = isinstance(target, Tensor) and target.data_ptr() == leaf.data_ptr()
        if same and target.numel() == leaf.numel() and target.dtype == leaf.dtype:
            return place
    return None
