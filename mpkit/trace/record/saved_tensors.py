"""What a forward saves for its backward, counted as activations.

Autograd's saved-tensor hooks show what it saves, tensor by tensor. Calling Python for each one takes time,
which counts in a small micro-batch, and the result is the same for every micro-batch of one shape. So
forwards of a shape are *measured* with the hooks on until the backward of one of them is over; later ones *reuse* its
numbers:

    measured    each storage enters the ledger when it is saved, and leaves it when backward frees it; each
                gradient enters when it is made
    reused      the sum enters when the forward is over, after what was held beyond it at the measured forward's peak;
                when backward is over, the ledger records what was held at the measured backward's peak, then that
                the sum is freed and which gradients exist

If the backward is split in two (`mpkit.strategies.stage.split_backward`), a part of the sum is freed when the first
half is over.

Parameters, buffers and anything else that is in the ledger already are not counted again. So a pipeline that keeps a
stage's inputs tracks them before the forward, and its outputs as soon as it has them.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.autograd.graph import saved_tensors_hooks

from mpkit.trace.record.gradients import RecordedGradients
from mpkit.trace.record.ledger import Claim, Ledger

if TYPE_CHECKING:
    from mpkit.trace.record.allocator import DeviceAllocator
    from mpkit.trace.record.recorder import Recorder

__all__ = ["PackedTensor", "SavedTensors", "Savings", "count_saved"]


@dataclass
class MeasuredShape:
    """What one measured forward and its backward showed about a shape.

    Attributes:
        claim: the storages that the forward saved.
        most: bytes of activations that the rank held at the forward's peak.
        beyond: bytes of these that were freed before the forward was over.
        peaks: (bytes of these storages still alive, bytes of gradients made) when their sum was largest, for a
            backward that made gradients to keep (True: there were none) and for one that did not (False).
        half: bytes of these storages still alive between the halves of a split backward.
    """

    claim: Claim = field(default_factory=Claim)
    most: int = 0
    beyond: int = 0
    half: int = 0
    peaks: dict[bool, tuple[int, int]] = field(default_factory=lambda: {True: (0, 0), False: (0, 0)})


class Savings:
    """What has been measured so far, by stage and shape, and what is needed for measuring.

    Attributes:
        gradients: the gradients of the watched modules.
        under_way: the measured forward of each stage and micro-batch.
        measuring: how many of those wait for the end of their backward.

    Args:
        allocated: the allocator of a GPU.
    """

    def __init__(self, allocated: DeviceAllocator | None = None) -> None:
        self._allocated = allocated
        self.measured: dict[Hashable, MeasuredShape] = {}
        self.gradients: list[RecordedGradients] = []
        self.under_way: dict[tuple[int, int], weakref.ref[MeasuredTensors]] = {}
        self.measuring = 0

    def look(self) -> None:
        """Count what a GPU's allocator held beside what is in the ledger, before the ledger changes."""
        if self._allocated is not None:
            self._allocated.look()

    def gradient_made(self, place: tuple[int, int]) -> None:
        """Sample the memory when the backward of this stage and micro-batch makes a gradient, or has made it."""
        reference = self.under_way.get(place)
        saved = reference() if reference is not None else None
        if saved is not None:
            saved.sample()

    def collect(self) -> int:
        """Enter new gradients into the ledger, and return their bytes; the caller writes that change."""
        new = 0
        for gradients in self.gradients:
            new += gradients.collect()
        return new


class SavedTensors:
    """What one forward saved: `with saving(...) as saved`, and `saved.release()` when its backward is over."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass

    @property
    def nbytes(self) -> int:
        """Bytes held for this forward now, without its stage's tracked inputs and outputs."""
        return 0

    def halve(self) -> None:
        """Drop what only the first half of a split backward needed, once that half is over."""

    def release(self) -> None:
        """Drop everything, once the backward is over or will never run."""


class MeasuredTensors(SavedTensors):
    """A measured forward: the ledger sees its storages one by one."""

    def __init__(self, recorder: Recorder, key: Hashable, *, every: bool) -> None:
        self.measured = MeasuredShape()
        self._ledger, self._savings = recorder.ledger, recorder.savings
        self._key, self._every = key, every
        self._grads_before = -1
        self._peak = (0, 0)
        self._hooks = _measuring_hooks(self._ledger, self.measured)
        self._open = True
        self._savings.measuring += 1
        self._savings.under_way[recorder.place()[:2]] = weakref.ref(self)
        for gradients in self._savings.gradients:
            gradients.watch()

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        self.measured.beyond = max(0, self.measured.most - self._ledger.held["activations"])

    @property
    def nbytes(self) -> int:
        return self.measured.claim.alive

    def sample(self) -> None:
        """Remember what is held if it is the most so far in this backward."""
        self._savings.look()
        alive, grads = self.measured.claim.alive, self._ledger.held["grads"]
        if self._grads_before < 0:
            self._grads_before = grads
        made = grads - self._grads_before
        if alive + made > sum(self._peak):
            self._peak = alive, made

    def halve(self) -> None:
        self.measured.half = self.measured.claim.alive

    def release(self) -> None:
        if not self._open:
            return
        self.sample()
        made = self._ledger.held["grads"] != self._grads_before
        measured = self._savings.measured.setdefault(self._key, self.measured)
        measured.peaks[made] = max(measured.peaks[made], self._peak, key=sum)
        self._close()
        if not (self._savings.measuring or self._every):
            for gradients in self._savings.gradients:
                gradients.unwatch()

    def _close(self) -> None:
        if self._open:
            self._open = False
            self._savings.measuring -= 1

    def __del__(self) -> None:
        self._close()  # dropped without a backward, so only half was measured


class ReusedMeasurement(SavedTensors):
    """A forward that reuses a measurement: the ledger sees one sum."""

    def __init__(self, recorder: Recorder, measured: MeasuredShape) -> None:
        self._ledger, self._savings = recorder.ledger, recorder.savings
        self._measured = measured
        self._held = 0

    def __exit__(self, *error: Any) -> None:
        self._held, beyond = self._measured.claim.nbytes, self._measured.beyond
        if beyond:
            self._ledger.change(("activations", self._held + beyond), ("activations", -beyond))
        else:
            self._ledger.change(("activations", self._held))

    @property
    def nbytes(self) -> int:
        return self._held

    def halve(self) -> None:
        held, self._held = self._held, self._measured.half
        self._ledger.change(("activations", self._held - held))

    def release(self) -> None:
        self._savings.look()
        held, self._held = self._held, 0
        new = self._savings.collect()
        left, made = self._measured.peaks[new > 0]
        if left + made > max(held, new):  # the peak was in between
            self._ledger.change(
                ("activations", left - held), ("grads", made), ("activations", -left), ("grads", new - made)
            )
        else:
            self._ledger.change(("activations", -held), ("grads", new))

    def __del__(self) -> None:
        if self._held:  # dropped without a backward
            self._ledger.change(("activations", -self._held))


def count_saved(recorder: Recorder, stage: int, key: Hashable, *, every: bool = False) -> SavedTensors:
    """Return a context manager that counts what autograd saves inside it as activations.

    Args:
        stage: the stage whose forward it is.
        key: two forwards of the stage with equal keys save the same: shapes and dtypes of its inputs.
        every: whether to measure every time, not only the first per key; this is exact even if the key says too little.

    Returns:
        the saved storages, to be released after the backward.
    """
    if not torch.is_grad_enabled():
        return SavedTensors()  # nothing is saved
    every = every or recorder.ledger.notices  # the sum of what was noticed would be counted twice
    measured = None if every else recorder.savings.measured.get((stage, key))
    if measured is not None:
        return ReusedMeasurement(recorder, measured)
    return MeasuredTensors(recorder, (stage, key), every=every)


def _measuring_hooks(ledger: Ledger, measured: MeasuredShape) -> saved_tensors_hooks:
    """Return the hooks that measure each tensor as autograd saves it."""

    # The tensor itself must not be returned: an output that its own node saves would keep itself alive. And since
    # autograd leaves the check for in-place writes to the hooks, it is made here.
    def pack(tensor: torch.Tensor) -> PackedTensor:
        ledger.claim(tensor, "activations", measured.claim)
        measured.most = max(measured.most, ledger.held["activations"])
        return PackedTensor(tensor.detach(), tensor._version)

    return saved_tensors_hooks(pack, _unpack)


class PackedTensor:
    """A tensor that autograd saved, with its version counter at that time."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor, version: int) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.version = version

    def drop(self) -> None:
        """Free the tensor, since it will not be needed again."""
        self.tensor = None


def _unpack(packed: PackedTensor) -> torch.Tensor:
    tensor, version = packed.tensor, packed.version
    assert tensor is not None, "a node whose saved tensors were let go of is not called again"
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a tensor of shape {list(tensor.shape)} is at version {tensor._version}; expected version "
            f"{version} instead. Write `x = x + y` for `x += y` where backward needs the old x"
        )
    return tensor
