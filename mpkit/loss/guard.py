"""A loss that is right as long as no target is masked, of data that nobody has seen yet: a rank looks at it first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mpkit.errors import MpkitError
from mpkit.parallel.microbatch import Value, leaves

__all__ = ["Guarded", "Masked"]


@dataclass(frozen=True)
class Masked:
    """How masked data is recognized.

    Attributes:
        side: 0 of the inputs, 1 of the targets.
        place: which tensor of theirs.
        number: what is put in place of a target that does not count; None for a mask, or weights.
    """

    side: int
    place: int
    number: int | None

    def leaf(self, inputs: Value, targets: Value) -> Tensor:
        """The tensor of a batch that it is about."""
        return leaves((inputs, targets)[self.side])[self.place]

    def uneven(self, inputs: Value, targets: Value) -> bool:
        """Whether samples of this batch count differently."""
        leaf = self.leaf(inputs, targets)
        counted = leaf if self.number is None else leaf == self.number
        return bool((counted != counted[:1]).any())

    def there(self, inputs: Value, targets: Value) -> bool:
        """Whether anything is masked in a part of a batch, which cannot be compared with the others."""
        leaf = self.leaf(inputs, targets)
        return bool(((leaf != 1) if self.number is None else (leaf == self.number)).any())


class Guarded:
    """Looks at what a rank is about to compute.

    Args:
        loss: of the training.
        masked: what it would be wrong for.
        message: what is said then.
    """

    def __init__(self, loss: Callable[[Any, Any], Any], masked: list[Masked], message: str) -> None:
        self.loss, self.masked, self.message = loss, masked, message

    def __call__(self, outputs: Any, targets: Any) -> Any:
        """The loss."""
        return self.loss(outputs, targets)

    def check(self, inputs: Value, targets: Value) -> None:
        """Look at a micro-batch.

        Raises:
            MpkitError: something in it does not count.
        """
        if any(masked.there(inputs, targets) for masked in self.masked):
            raise MpkitError(self.message)
