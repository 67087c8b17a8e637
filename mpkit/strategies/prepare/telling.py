"""Telling steps: later ones in which something happens for the first time, so that they are verified too.

    shapes      a batch of other shapes than all before
    targets     some targets have a value that the loss treats by itself (ignored, padded, a limit), or none has it
    mode        the first step after an evaluation, which leaves the model in another mode for a while

Data in memory is inspected before the start. Of data that is loaded later, only the sizes of the batches are known.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any, cast

from torch.utils._python_dispatch import TorchDispatchMode

from mpkit.strategies.data.microbatch import Value, leaves
from mpkit.strategies.data.stream import Stream
from mpkit.strategies.job.feed import BatchSource, WholeBatches

__all__ = ["SpecialValues", "telling_steps"]

MOST = 3
"""The most telling steps that are verified by default."""

COMPARES = ("eq", "ne", "lt", "le", "gt", "ge")
INDEXED = ("nll_loss_forward", "nll_loss2d_forward")


class SpecialValues:
    """A loss that notes the numbers with which it compares targets, or which it ignores.

    Args:
        loss: the loss to call.

    Attributes:
        found: the numbers.

    >>> import torch
    >>> heard = SpecialValues(lambda out, y: torch.nn.functional.cross_entropy(out, y, ignore_index=3))
    >>> _ = heard(torch.zeros(2, 5), torch.tensor([1, 3]))
    >>> heard.found
    {3}
    """

    def __init__(self, loss: Callable[[Any, Any], Any]) -> None:
        self.loss = loss
        self.found: set[float] = set()

    def __call__(self, outputs: Any, targets: Any) -> Any:
        """Return the loss."""
        with _Hearing(self.found):
            return self.loss(outputs, targets)


class _Hearing(TorchDispatchMode):
    def __init__(self, into: set[float]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._into = into

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in INDEXED:
            self._into.add(args[4])
        elif name in COMPARES and isinstance(args[1], (int, float)) and not isinstance(args[1], bool):
            self._into.add(args[1])
        return func(*args, **(kwargs or {}))


def telling_steps(
    batches: WholeBatches | BatchSource | Stream, steps: range, special: set[float], every: int | None
) -> tuple[int, ...]:
    """Return the telling steps, counted from 0.

    Args:
        batches: those of the training.
        steps: the steps that are done.
        special: the numbers that the loss treats by themselves.
        every: steps from one evaluation to the next; None: there is none.

    >>> import torch
    >>> a, b = ((torch.zeros(4, 1), torch.tensor([0, 1, 1, y])) for y in (0, 3))
    >>> telling_steps(WholeBatches([a, a, a, b]), range(8), {3}, every=5)
    (3, 5)
    """
    found = []
    seen: set[Hashable] = set()
    for step in steps if not isinstance(batches, Stream) else ():
        if step - steps.start >= len(cast(BatchSource, batches)):
            break  # from here on the batches repeat
        facts = set(_facts(batches, step, special))
        if seen and not facts <= seen:
            found.append(step)
        seen |= facts
    if every is not None and (first := (steps.start // every + 1) * every) in steps:
        found.append(first)
    return tuple(sorted(set(found))[:MOST])


def _facts(batches: Any, step: int, special: set[float]) -> Iterator[Hashable]:
    if not isinstance(batches, WholeBatches):
        yield batches.size(step)
        return
    yield batches.key(step, slice(None))
    targets: Value = batches[step % len(batches)][1]
    for place, leaf in enumerate(leaves(targets)):
        for number in () if leaf.is_complex() else special:
            for how in (leaf.lt, leaf.eq, leaf.gt):
                yield place, number, how.__name__, bool(how(number).any())
