"""The memory of a step: measured once, and then played back.

Seeing each tensor as it is made takes time: hooks on saved tensors and on gradients make a small step some 10 %
longer, a dispatch mode that sees every operator 40 %. So steps are

    measured    the ledger sees each storage when it is made and when it is freed. The changes between one action's
                begin or end and the next one's are a `Segment`, whose times are relative to the ops inside it
    played      a later step with the same batch shapes, without hooks or modes; the ledger counts, but is quiet. At
                each begin and end of an action, the measured step's segment is written, scaled to the action's time

so that the peak, the memory held at the peak and the curve are those of a measured step: to the byte.

The first two steps are measured (the first one makes the optimizer's states, and ZeRO-3 learns its order), each step
with new shapes, each after one that made further states, and steps 4, 8, 16 and so on. If such a repetition differs,
shapes do not determine what a step holds, and from then on each step of its kind is measured. A played step that begins
an action other than the measured one's is measured from there on.

Code that knows what a tensor is for calls `Ledger.track`. Tensors that autograd saves in a forward count as activations
(`StepMemory.saving`), and gradients count when they are made. On a GPU the ledger follows torch's allocator after each
action, which also knows temporaries, workspaces and the batch: they are in "buffers".
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from mpkit.trace import HEADER, OP
from mpkit.trace.record.curve import Curve, Segment
from mpkit.trace.record.files import RecordFile
from mpkit.trace.record.ledger import Ledger

LAG = 100_000_000
"""Nanoseconds after which a long played step writes its curve for a live view, before the step ends."""


class Instrument(Protocol):
    """An observer that sees tensors being made in measured steps."""

    def install(self) -> None:
        """Begin to observe, and count the tensors that are there already."""

    def uninstall(self) -> None:
        """Stop observing."""


class StepMemory:
    """The memory of one rank's steps. The recorder calls `begin` and `end` for each outermost action of a known step.

    Attributes:
        active: whether a step is under way whose actions are measured or played.
        playing: whether it is played.
        detail: what else distinguishes the action that begins next from others.
        checks: whether steps 4, 8, 16 and so on are measured again.
        before_end: called before a measured action ends.
    """

    def __init__(self, ledger: Ledger, ops: RecordFile, allocated: DeviceAllocator | None = None) -> None:
        self._ledger, self._ops, self._allocated = ledger, ops, allocated
        self.active = self.playing = False
        self.detail: Hashable = None
        self.instruments: list[Instrument] = []  # installed in measured steps, and outside of known steps
        self.checks = True
        self.before_end: Callable[[], None] = lambda: None
        self._installed = True
        self._known: dict[Hashable, Curve] = {}
        self._varying: set[Hashable] = set()
        self._steps = 0
        self._key: Hashable = None
        self._levels: dict[str, int] = {}  # bytes by category before a measured step
        self._segments: list[Segment] = []  # of the measured step
        self._curve = Curve({}, [])  # the one that is played
        self._complete = False  # whether the whole step is measured
        self._from = 0, 0  # where the segment began: ops begun, time
        self._written = 0  # when the curve was last written

    def begin_step(self, key: Hashable, now: int, *, varies: bool = False) -> None:
        """Begin to measure a step, or to play one; the recorder ends it.

        Steps with equal keys (shapes and dtypes of their batches) hold the same, unless what they hold `varies`.
        """
        step, self._steps = self._steps, self._steps + 1
        self._key, self._from, self.active = key, (self._ops.count, now), True
        again = self.checks and step > 2 and not step & (step - 1)
        known = self._known.get(key)
        grown = known is not None and self._ledger.held["optimizer"] > known.levels["optimizer"]
        self.playing = known is not None and not (again or varies or grown or key in self._varying)
        if self.playing:
            self._uninstall()
            self._ledger.on_use = None
            self._ledger.be_quiet()
            self._curve, self._written = self._known[key], now
            self._curve.rewind()
            if self._curve.levels != self._ledger.held:
                self._ledger.set_levels(self._curve.levels)
        else:
            self._measure()
            self._ledger.captured, self._complete = [], True
            self._levels, self._segments = dict(self._ledger.held), []

    def end_step(self, now: int) -> None:
        """End the step."""
        self.follow("step ends")
        self._cut("step ends", now)
        self.active = False
        if self.playing:
            self.flush()
            self.playing = False
            self._ledger.on_use = self._measure
            return
        self._ledger.captured = None
        if not self._complete or self._steps < 2:
            return
        before, curve = self._known.get(self._key), Curve(self._levels, self._segments)
        if before is not None and not curve.repeats(before):
            self._varying.add(self._key)
        self._known[self._key] = curve

    def _measure(self) -> None:
        """Observe everything from here on."""
        self._ledger.on_use = None
        self._install()
        self._ledger.be_awake()

    def _install(self) -> None:
        if not self._installed:
            self._installed = True
            for instrument in self.instruments:
                instrument.install()

    def _uninstall(self) -> None:
        if self._installed:
            self._installed = False
            for instrument in self.instruments:
                instrument.uninstall()

    def add(self, instrument: Instrument) -> None:
        """Install another instrument, now and in measured steps."""
        self.instruments.append(instrument)
        if self._installed:
            instrument.install()

    def remove(self, instrument: Instrument) -> None:
        """Remove an instrument."""
        self.instruments.remove(instrument)
        if self._installed:
            instrument.uninstall()

    def begin(self, kind: int, name: str, now: int) -> None:
        """End the segment before an action, whose op is about to be written, and begin the one inside it."""
        mark, self.detail = (kind, name, self.detail), None
        self.follow(mark)
        self._cut(mark, now)
        self._from = self._ops.count + 1, now

    def end(self, now: int) -> None:
        """End the present action."""
        if not self.playing:
            self.before_end()
        self._cut(None, now)
        self._from = self._ops.count, now

    def follow(self, mark: Hashable) -> None:
        """Measure the rest of the step if its next boundary is not that of the played step."""
        if self.playing and self._curve.marks[self._curve.next] != mark:
            self.flush()
            self._known.pop(self._key, None)
            self.playing, self._complete = False, False
            self._measure()

    def _cut(self, mark: Hashable, now: int) -> None:
        if self.playing:
            self._curve.play(*self._from, self._ops.count, now)
            if self._allocated is not None or now - self._written > LAG:
                self._written = now
                self.flush()
        elif self._complete:
            first, begin = self._from
            times = [begin, *self._starts(first, self._ops.count - first), now]
            changes, self._ledger.captured = self._ledger.captured or [], []
            self._segments.append(Segment.measured(mark, changes, first, times))

    def _starts(self, first: int, count: int) -> list[int]:
        """Return the starts of these ops."""
        at = HEADER.itemsize + OP.itemsize * first
        starts: list[int] = np.frombuffer(self._ops.map[at : at + OP.itemsize * count], OP)["start"].tolist()
        return starts

    def flush(self) -> None:
        """Write what has been played so far."""
        if not (self.playing and self._curve.is_pending):
            return
        spike = 0
        if self._allocated is not None:  # then a single segment is pending
            held = sum(self._ledger.held.values()) + self._curve.pending_peak
            spike = self._allocated.take_peak() - held
        self._ledger.write_all(*self._curve.take(self._starts, spike))

    def saving(self) -> AbstractContextManager[Any]:
        """Return a context in which the tensors that autograd saves count as activations, if the step is measured."""
        if self.playing or not torch.is_grad_enabled():
            return nullcontext()
        return saved_tensors_hooks(self._pack, PackedTensor.unpack)

    # Do not return the tensor itself: an output that its own node saves would keep itself alive. Autograd leaves the
    # check for in-place writes to the hooks.
    def _pack(self, tensor: Tensor) -> PackedTensor:
        self._ledger.track(tensor, "activations")
        return PackedTensor(tensor.detach(), tensor._version)

    @property
    def held(self) -> dict[str, int]:
        """The bytes held by category; in a played action, at its peak."""
        self.flush()
        levels = dict(self._ledger.held)
        if self.playing:
            for name, nbytes in self._curve.next_peak.items():
                levels[name] += nbytes
        return levels


class PackedTensor:
    """A tensor that autograd saved, with its version counter at that time."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor, version: int) -> None:
        self.tensor: Tensor | None = tensor
        self.version = version

    def drop(self) -> None:
        """Free the tensor, which is not needed again."""
        self.tensor = None

    @property
    def shape(self) -> torch.Size:
        """Its shape."""
        assert self.tensor is not None
        return self.tensor.shape

    def unpack(self) -> Tensor:
        """Return the tensor, unless it has been written into since."""
        tensor, version = self.tensor, self.version
        assert tensor is not None, "a node whose saved tensors were let go of is not called again"
        if tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a tensor of shape {list(tensor.shape)} is at version {tensor._version}; expected version "
                f"{version} instead. Write `x = x + y` for `x += y` where backward needs the old x"
            )
        return tensor


class Gradients:
    """The gradients of some parameters, each counted as soon as it is made.

    The peak of a GPU's allocator is written before and after each gradient.
    """

    def __init__(
        self, ledger: Ledger, parameters: Iterable[nn.Parameter], allocated: DeviceAllocator | None
    ) -> None:
        self._ledger, self._allocated = ledger, allocated
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._hooks: list[RemovableHandle] = []

    def install(self) -> None:
        """Count the present gradients, and from now on each that is made."""
        self.collect()
        self._hooks = [p.register_post_accumulate_grad_hook(self._see) for p in self._parameters]

    def uninstall(self) -> None:
        """Stop counting new ones."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def collect(self) -> None:
        """Count the present gradients."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                self._ledger.track(parameter.grad, "grads")

    def _see(self, parameter: Tensor) -> None:
        if self._allocated is not None:
            self._allocated.look()
        if parameter.grad is not None:
            self._ledger.track(parameter.grad, "grads")
        if self._allocated is not None:
            self._allocated.look()


class HasStats(Protocol):
    """`torch.cuda`, `torch.xpu`: the module of a device whose allocator keeps statistics."""

    def memory_stats_as_nested_dict(self, device: Any = None) -> dict[str, Any]:
        """Return the statistics."""

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """Set the peak to what is allocated now."""


class DeviceAllocator:
    """The allocator of a rank's device, which the ledger follows.

    The ledger knows tracked tensors: parameters, saved tensors, buckets. It does not know an operator's temporaries, a
    library's workspace, or a batch, which torch's caching allocator counts on a GPU, and nothing on a CPU. The largest
    total of a rank's records is then `torch.cuda.max_memory_allocated`.
    """

    def __init__(self, api: HasStats, device: torch.device, ledger: Ledger) -> None:
        self._api, self._device, self._ledger = api, device, ledger
        self._unnamed = 0

    def take_peak(self) -> int:
        """Return the most bytes that were allocated since the last look."""
        stats = self._api.memory_stats_as_nested_dict(self._device).get("allocated_bytes")
        self._api.reset_peak_memory_stats(self._device)
        return 0 if stats is None else int(stats["all"]["peak"])  # None: nothing has been allocated on it yet

    def look(self) -> int:
        """Write what came and went since the last look, a spike of "buffers"; return the bytes allocated now."""
        stats = self._api.memory_stats_as_nested_dict(self._device).get("allocated_bytes")
        if stats is None:
            return 0
        passed = stats["all"]["peak"] - sum(self._ledger.held.values())
        if passed > 0:
            self._ledger.correct(("buffers", passed), ("buffers", -passed))
        self._api.reset_peak_memory_stats(self._device)
        return int(stats["all"]["current"])

    def settle(self) -> None:
        """Write what came and went, and put into "buffers" what is allocated beyond the categories' bytes."""
        now, held = self.look(), self._ledger.held
        unnamed = min(self._unnamed, held["buffers"])  # less if the ledger has started anew
        by = max(now - sum(held.values()), -unnamed)
        self._ledger.correct(("buffers", by))
        self._unnamed = unnamed + by


def allocated_on(device: torch.device | None, ledger: Ledger) -> DeviceAllocator | None:
    """Return the allocator of a device; None if it keeps no statistics, as on the CPU."""
    api = None if device is None else getattr(torch, device.type, None)
    return DeviceAllocator(api, device, ledger) if hasattr(api, "memory_stats_as_nested_dict") else None  # type: ignore[arg-type]
