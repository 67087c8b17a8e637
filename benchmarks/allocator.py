"""The most that torch's allocator held, by torch.profiler.

The profiler counts what is allocated and freed on threads that carry its state. A thread of gloo does not while it lets
go of a collective's tensors; so if the rank's own thread has let go of them before, their release is never seen. Such
memory shows by its address, which is given out again later, or never. Somewhere between the two moments it was freed:

    most     it was held until its address was given out again, or to the end
    least    it was not held at all
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from math import inf
from operator import itemgetter
from typing import Any, NamedTuple

import torch


class Peak(NamedTuple):
    """The most bytes held at a time; somewhere from `least` to `most`, which are equal where every release was seen."""

    least: int
    most: int

    def off(self, nbytes: float) -> float:
        """Return by how much the peak lies beyond `nbytes`, relative to these; 0 if they lie within.

        >>> Peak(100, 120).off(110), Peak(100, 120).off(80), Peak(100, 120).off(160)
        (0.0, 0.25, -0.25)
        """
        return min(max(nbytes, self.least), self.most) / nbytes - 1


def peak_of(run: Callable[[], object], during: str = "") -> Peak:
    """Return the peak of torch's allocator while a function runs. What was allocated before is not in it.

    Args:
        run: the function.
        during: look for the peak within the last `torch.profiler.record_function` of this name; "": all the time.
    """
    from torch.autograd import profiler

    with profiler.profile(profile_memory=True) as profile:
        run()
        gc.collect()  # what is left of it is released here
        alive = _alive()
    changes, (start, end) = _changes(profile, during)
    seen = _released(changes, alive)
    held = most = certain = least = 0
    live: dict[int, int] = {}
    for i, (time, address, nbytes) in enumerate(changes):
        held -= live.pop(address, 0)
        if nbytes > 0:
            live[address] = nbytes
            held += nbytes
        if i in seen:
            certain += nbytes
        if start <= time <= end:
            most, least = max(most, held), max(least, certain)
    return Peak(least, most)


def _changes(profile: Any, during: str) -> tuple[list[tuple[int, int, int]], tuple[float, float]]:
    """Return what was allocated (bytes above 0) and released (below) by time and address, in order; and the time that
    is meant by `during`.
    """
    found, tree = [], list(profile.kineto_results.experimental_event_tree())
    extent = (-inf, inf)
    while tree:
        event = tree.pop()
        tree += event.children
        if type(event.extra_fields).__name__ == "_ExtraFields_Allocation":
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
        elif during and event.name == during:
            extent = max(extent, (event.start_time_ns, event.end_time_ns))
    return sorted(found, key=itemgetter(0)), extent


def _alive() -> set[int]:
    """Return the addresses of all tensors that Python knows of."""
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    tensors += [
        each.grad for each in tensors if isinstance(each, torch.nn.Parameter) and each.grad is not None
    ]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if _has_an_address(tensor)}


def _has_an_address(tensor: torch.Tensor) -> bool:
    """Say whether a tensor has memory of its own: not what a compiler traces with (which torch.compile keeps)."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    traced = isinstance(tensor, FakeTensor | FunctionalTensor) or torch._is_functional_tensor(tensor)
    return tensor.layout == torch.strided and not traced


def _released(changes: list[tuple[int, int, int]], alive: set[int]) -> set[int]:
    """Return the places of allocations whose release was seen, of these releases, and of what is alive at the end."""
    seen: set[int] = set()
    allocated: dict[int, int] = {}
    for i, (_, address, nbytes) in enumerate(changes):
        if nbytes > 0:
            allocated[address] = i
        elif address in allocated:
            seen |= {allocated.pop(address), i}
    return seen | {i for address, i in allocated.items() if address in alive}
