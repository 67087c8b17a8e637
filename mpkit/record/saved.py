"""What a forward saves for its backward, counted as activations.

Autograd tells through two hooks what it saves, tensor by tensor. Calling Python for each costs microseconds, which is a
few percent of a small micro-batch; and the answer is the same for every micro-batch of one shape. So forwards of a
shape are *measured* with the hooks on until the backward of one of them is over; the later ones *reuse* its numbers:

    measured    each storage enters the ledger as it is saved, and leaves it as backward lets go of it
    reused      the total enters when the forward is over; it leaves when backward is over (`Saved.release`),
                and before that, where a gradient is made that was not there, as much of it as had left by then
                in the measured pass: a peak can only hide where memory is added

Parameters, buffers and whatever else is in the ledger already is not counted again, so a pipeline that keeps
a stage's inputs tracks them before the forward, and its outputs as soon as it has them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
from torch.autograd.graph import saved_tensors_hooks

from mpkit.record.ledger import Claim, Ledger

if TYPE_CHECKING:
    from mpkit.record.recorder import Recorder

__all__ = ["Measured", "Saved", "Savings", "saving"]


class Measured:
    """What one measured forward and its backward told of a shape.

    Attributes:
        claim: the storages that the forward saved.
        left: bytes of them still alive when the gradient of the parameter of that number was made.
    """

    def __init__(self) -> None:
        self.claim = Claim()
        self.left: dict[int, int] = {}


class Savings:
    """What was measured so far, by stage and shape, and what is saved for which micro-batch.

    Attributes:
        measuring: how many measured forwards wait for the end of their backward.
    """

    def __init__(self) -> None:
        self.measured: dict[Hashable, Measured] = {}
        self.under_way: WeakValueDictionary[tuple[int, int], Saved] = WeakValueDictionary()
        self.measuring = 0

    def gradient_made(self, place: tuple[int, int], number: int) -> None:
        """The backward of this stage and micro-batch made the gradient of the parameter of this number."""
        saved = self.under_way.get(place)
        if saved is not None:
            saved.gradient_made(number)


class Saved:
    """What one forward saved. Keep it with the micro-batch and release it when its backward is over."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    @property
    def nbytes(self) -> int:
        """Bytes held for this forward now, without its stage's tracked inputs and outputs."""
        return 0

    def release(self) -> None:
        """The backward is over, or never comes: nothing is held any more."""

    def gradient_made(self, number: int) -> None:
        """Backward made the gradient of the parameter of this number."""


class _MeasuredSaved(Saved):
    """The ledger sees its storages one by one."""

    def __init__(self, ledger: Ledger, savings: Savings, key: Hashable) -> None:
        super().__init__(ledger)
        self.measured = Measured()
        self._savings, self._key = savings, key
        self._open = True
        savings.measuring += 1

    @property
    def nbytes(self) -> int:
        return self.measured.claim.alive

    def release(self) -> None:
        if self._open:
            self._savings.measured.setdefault(self._key, self.measured)
            self._close()

    def gradient_made(self, number: int) -> None:
        self.measured.left[number] = self.measured.claim.alive

    def _close(self) -> None:
        if self._open:
            self._open = False
            self._savings.measuring -= 1

    def __del__(self) -> None:
        self._close()  # given up without a backward: it told only half of it


class _ReusedSaved(Saved):
    """The ledger sees a sum."""

    def __init__(self, ledger: Ledger, measured: Measured) -> None:
        super().__init__(ledger)
        self._measured = measured
        self._held = 0

    @property
    def nbytes(self) -> int:
        return self._held

    def hold(self) -> None:
        self._set(self._measured.claim.nbytes)

    def release(self) -> None:
        self._set(0)

    def gradient_made(self, number: int) -> None:
        self._set(min(self._held, self._measured.left.get(number, self._held)))

    def _set(self, nbytes: int) -> None:
        if nbytes != self._held:
            self._ledger.change("activations", nbytes - self._held)
            self._held = nbytes

    def __del__(self) -> None:
        self._set(0)  # given up


@contextmanager
def saving(recorder: Recorder, stage: int, key: Hashable, *, every: bool = False) -> Iterator[Saved]:
    """Count what autograd saves inside, as activations.

    Args:
        stage: whose forward it is.
        key: what makes two forwards of the stage save the same: shapes and dtypes of its inputs.
        every: measure each time, not only the first of a key; exact, also where the key says too little.

    Yields:
        What is saved, to be released after the backward.
    """
    savings, ledger = recorder.savings, recorder.ledger
    if not torch.is_grad_enabled():
        yield Saved(ledger)  # nothing is saved
        return
    place = recorder.place()[:2]
    measured = None if every else savings.measured.get((stage, key))
    if measured is not None:
        savings.under_way[place] = reused = _ReusedSaved(ledger, measured)
        yield reused
        reused.hold()
    else:
        savings.under_way[place] = saved = _MeasuredSaved(ledger, savings, (stage, key))
        with _measuring(ledger, saved.measured.claim):
            yield saved


def _measuring(ledger: Ledger, claim: Claim) -> saved_tensors_hooks:
    """The hooks that see each tensor as autograd saves it."""

    # The tensor itself must not be handed back: an output that its own node saves would hold itself. And since
    # autograd leaves the check for writes in place to those who hook in, it is made here.
    def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        ledger.claim(tensor, "activations", claim)
        return tensor.detach(), tensor._version

    def unpack(packed: tuple[torch.Tensor, int]) -> torch.Tensor:
        tensor, version = packed
        if tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a tensor of shape {list(tensor.shape)} is at version {tensor._version}; expected version "
                f"{version} instead. Write `x = x + y` for `x += y` where backward needs the old x"
            )
        return tensor

    return saved_tensors_hooks(pack, unpack)
