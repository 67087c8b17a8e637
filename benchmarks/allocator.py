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
from typing import Any, NamedTuple

__all__ = ["Peak", "peak_of"]


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


def peak_of(run: Callable[[], object]) -> Peak:
    """Return the peak of torch's allocator while a function runs. What was allocated before is not in it."""
    from torch.autograd import profiler

    with profiler.profile(profile_memory=True) as profile:
        run()
        gc.collect()  # what is left of it is released here
    changes = _changes(profile)
    seen = _released(changes)
    held = most = certain = least = 0
    live: dict[int, int] = {}
    for i, (address, nbytes) in enumerate(changes):
        held -= live.pop(address, 0)
        if nbytes > 0:
            live[address] = nbytes
            held += nbytes
        if i in seen:
            certain += nbytes
        most, least = max(most, held), max(least, certain)
    return Peak(least, most)


def _changes(profile: Any) -> list[tuple[int, int]]:
    """Return what was allocated (bytes above 0) and released (below), by address, in the order in which it happened."""
    found, tree = [], list(profile.kineto_results.experimental_event_tree())
    while tree:
        event = tree.pop()
        tree += event.children
        if type(event.extra_fields).__name__ == "_ExtraFields_Allocation":
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    return [(address, nbytes) for _, address, nbytes in sorted(found, key=lambda change: change[0])]


def _released(changes: list[tuple[int, int]]) -> set[int]:
    """Return the places of allocations whose release was seen, and of these releases."""
    seen: set[int] = set()
    allocated: dict[int, int] = {}
    for i, (address, nbytes) in enumerate(changes):
        if nbytes > 0:
            allocated[address] = i
        elif address in allocated:
            seen |= {allocated.pop(address), i}
    return seen
