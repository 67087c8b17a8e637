"""Clocks of several hosts put on one: a collective ends on all of its ranks at the same moment.

For each pair of ranks the offset is the median, over the collectives that they share, of the difference of the ends: it
minimizes the sum of absolute residuals, so that a few late ends do not move it. Ranks that share no collective with the
first one are reached over others. Ranks of one host share a clock, and stay as they are.

Where what is left is not small beside the time between collectives, the n-th of one file is not the n-th of the other
(files that were sampled, or windows that differ): such clocks are left as they are.

Source: the same idea as in HolisticTraceAnalysis's and Scalasca's synchronization of time stamps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpkit.timeline.foreign.communication import Comm
from mpkit.timeline.foreign.kineto import Events
from mpkit.trace import Kind

Ends = dict[tuple[tuple[tuple[int, ...], int], int], int]
"""When each collective ended on a rank, by its members and kind, and its number."""


class ClockAlignment(NamedTuple):
    """How one rank's clock was put on the first one's.

    Attributes:
        offset: ns that are added to its times.
        residual: ns; the median of what is left of the differences of ends.
        shared: the number of collectives that this was found from; 0 if the clock is used as it is.
    """

    offset: int = 0
    residual: int = 0
    shared: int = 0


def align(parts: Sequence[Events], comms: Sequence[Sequence[Comm]]) -> list[ClockAlignment]:
    """Return each rank's clock; one whose host is not known is taken for one of its own."""
    ends = [_ends(mine, events.origin) for mine, events in zip(comms, parts, strict=True)]
    clocks: dict[int, ClockAlignment] = {}
    reached: list[int] = []
    while len(clocks) < len(ends):
        if not reached:
            reached.append(next(rank for rank in range(len(ends)) if rank not in clocks))
            clocks[reached[0]] = ClockAlignment()
        one = reached.pop(0)
        for other in set(range(len(ends))) - set(clocks):
            if parts[one].host and parts[one].host == parts[other].host:
                clocks[other] = clocks[one]
            elif (found := _offset(ends[one], ends[other])).shared:
                clocks[other] = found._replace(offset=found.offset + clocks[one].offset)
            else:
                continue
            reached.append(other)
    return [clocks[rank] for rank in range(len(ends))]


def _ends(comms: Sequence[Comm], origin: int) -> Ends:
    counted: Counter[tuple[tuple[int, ...], int]] = Counter()
    ends: Ends = {}
    for comm in comms:
        if comm.kind not in (Kind.SEND, Kind.RECV) and len(comm.members) > 1:
            key = comm.members, int(comm.kind)
            number = comm.sequence if comm.sequence >= 0 else counted[key]
            ends[key, number] = comm.end + origin
            counted[key] += 1
    return ends


def _offset(one: Ends, other: Ends) -> ClockAlignment:
    """Return the clock of `other` as seen by `one`; none if they do not share the same collectives."""
    # A file that begins later counts from another collective on: then the differences are all over the place.
    counts = [Counter(key for key, _ in ends) for ends in (one, other)]
    shared = one.keys() & other.keys()
    whole = [one[each] - other[each] for each in shared if counts[0][each[0]] == counts[1][each[0]]]
    if not whole:
        return ClockAlignment()
    offset = int(np.median(whole))
    residual = int(np.median(np.abs(np.array(whole) - offset)))
    between = np.median(np.diff(sorted(one.values()))) if len(one) > 1 else np.inf
    return ClockAlignment(offset, residual, len(whole)) if residual < between / 4 else ClockAlignment()
