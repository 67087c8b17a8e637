"""GuardedLoss: a loss that is correct only while no target is masked, and checks batches not seen before the start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mpkit.errors import MpkitError
from mpkit.strategies.data.microbatch import Value, leaves

__all__ = ["GuardedLoss", "MaskRule"]


@dataclass(frozen=True)
class MaskRule:
    """How to recognize masked data.

    Attributes:
        side: 0 for the inputs, 1 for the targets.
        place: the index of the tensor among them.
        number: the value of targets that do not count; None for a mask or weights.
    """

    side: int
    place: int
    number: int | None

    def leaf(self, inputs: Value, targets: Value) -> Tensor:
        """Return the tensor of a batch that may be masked."""
        return leaves((inputs, targets)[self.side])[self.place]

    def counts_unevenly(self, inputs: Value, targets: Value) -> bool:
        """Return whether the samples of this batch count differently."""
        leaf = self.leaf(inputs, targets)
        counted = leaf if self.number is None else leaf == self.number
        return bool((counted != counted[:1]).any())

    def masks_part(self, inputs: Value, targets: Value) -> bool:
        """Return whether anything is masked in a part of a batch, which cannot be compared with the other parts."""
        leaf = self.leaf(inputs, targets)
        return bool(((leaf != 1) if self.number is None else (leaf == self.number)).any())


class GuardedLoss:
    """A loss with a check of each micro-batch before a rank computes it.

    Args:
        loss: the loss of the training.
        masked: kinds of masked data for which the loss would be wrong.
        message: the error message for such data.
    """

    def __init__(self, loss: Callable[[Any, Any], Any], masked: list[MaskRule], message: str) -> None:
        self.loss, self.masked, self.message = loss, masked, message

    def __call__(self, outputs: Any, targets: Any) -> Any:
        """Return the loss."""
        return self.loss(outputs, targets)

    def check(self, inputs: Value, targets: Value) -> None:
        """Check a micro-batch.

        Raises:
            MpkitError: something in the micro-batch is masked.
        """
        if any(masked.masks_part(inputs, targets) for masked in self.masked):
            raise MpkitError(self.message)
