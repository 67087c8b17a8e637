"""Clocks of several hosts put on one: a collective ends on all of its ranks at the same moment.

For each pair of ranks the offset is the median, over the collectives that they share, of the difference of the ends: it
minimizes the sum of absolute residuals, so that a few late ends do not move it. Ranks that share no collective with the
first one are reached over others. Ranks of one host share a clock, and stay as they are.

Where what is left is not small beside the time between collectives, the n-th of one file is not the n-th of the other
(files that were sampled, or windows that differ): such clocks are left as they are.

Source: the same idea as in HolisticTraceAnalysis's and Scalasca's synchronization of time stamps.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpkit.timeline.foreign.communication import Comm
from mpkit.trace import Kind

__all__ = ["ClockAlignment", "align"]

Ends = dict[tuple[tuple[int, ...], int, int], int]
"""When each collective ended on a rank, by members, kind and number."""


@dataclass(frozen=True)
class ClockAlignment:
    """How one rank's clock was put on the first one's.

    Attributes:
        offset: ns that are added to its times.
        residual: ns; the median of what is left of the differences of ends.
        shared: the number of collectives that this was found from; 0 if the clock is used as it is.
    """

    offset: int = 0
    residual: int = 0
    shared: int = 0


def align(
    comms: Sequence[Sequence[Comm]], origins: Sequence[int], hosts: Sequence[str]
) -> list[ClockAlignment]:
    """Return each rank's clock.

    Args:
        comms: each rank's communications.
        origins: ns of each rank's clock at which its times begin.
        hosts: each rank's host; "" if unknown, and then its clock is taken for one of its own.
    """
    ends = [_ends(mine, origin) for mine, origin in zip(comms, origins, strict=True)]
    clocks: dict[int, ClockAlignment] = {}
    while len(clocks) < len(ends):
        first = next(rank for rank in range(len(ends)) if rank not in clocks)
        clocks[first] = ClockAlignment()
        reached = [first]
        while reached:
            one = reached.pop(0)
            for other in range(len(ends)):
                if other in clocks:
                    continue
                if hosts[one] and hosts[one] == hosts[other]:
                    clocks[other] = clocks[one]
                elif (found := _offset(ends[one], ends[other])).shared:
                    clocks[other] = ClockAlignment(
                        found.offset + clocks[one].offset, found.residual, found.shared
                    )
                else:
                    continue
                reached.append(other)
    return [clocks[rank] for rank in range(len(ends))]


def _ends(comms: Sequence[Comm], origin: int) -> Ends:
    counted: Counter[tuple[tuple[int, ...], int]] = Counter()
    ends: Ends = {}
    for comm in comms:
        if comm.kind in (Kind.SEND, Kind.RECV) or len(comm.call.members) < 2:
            continue
        key = comm.call.members, int(comm.kind)
        number = comm.call.sequence if comm.call.sequence >= 0 else counted[key]
        ends[(*key, number)] = comm.end + origin
        counted[key] += 1
    return ends


def _offset(one: Ends, other: Ends) -> ClockAlignment:
    """Return the clock of `other` as seen by `one`; none if they do not share the same collectives."""
    per_group: dict[tuple[tuple[int, ...], int], list[int]] = defaultdict(list)
    for members, kind, number in one.keys() & other.keys():
        per_group[members, kind].append(one[members, kind, number] - other[members, kind, number])
    # A file that begins later counts from another collective on: then the differences are all over the place.
    whole = [
        each for key, many in per_group.items() if _count(one, key) == _count(other, key) for each in many
    ]
    if not whole:
        return ClockAlignment()
    offset = int(np.median(whole))
    residual = int(np.median(np.abs(np.array(whole) - offset)))
    between = np.median(np.diff(sorted(one.values()))) if len(one) > 1 else np.inf
    return ClockAlignment(offset, residual, len(whole)) if residual < between / 4 else ClockAlignment()


def _count(ends: Ends, key: tuple[tuple[int, ...], int]) -> int:
    return sum(1 for members, kind, _ in ends if (members, kind) == key)
