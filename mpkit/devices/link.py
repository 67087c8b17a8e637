"""Link: how long a message or a collective takes between devices that are equally far from each other.

    t = hops x latency + wire factor x payload / rate + ramp x sqrt(payload)

The wire factor is the fraction of the payload that each rank has to send, and hops is how often it has to wait for a
neighbour: on a ring of n ranks, each rank sends 2(n-1)/n of the payload in an all-reduce, in 2(n-1) rounds.

Sources: wire factors, nccl-tests, doc/PERFORMANCE.md; rounds of the ring, Thakur, Rabenseifner and Gropp 2005, section
3; the last term, sweeps of stas00/ml-engineering.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt

from mpkit.common.tracebacks import public
from mpkit.trace import Kind

__all__ = ["RAMP", "Link", "hops", "wire_factor"]

RAMP = 5e-9
"""The ramp of links whose rates were measured with large payloads; fitted to nccl-tests on NVLink and EFA."""

_MESSAGES = Kind.SEND, Kind.RECV


def wire_factor(kind: int, n: int) -> float:
    """Return what each rank sends, as a fraction of the payload, when n ranks run this operation together.

    The payload is the whole tensor: for an all-gather, what every rank ends with; for a reduce-scatter, what it begins
    with.

    >>> wire_factor(Kind.ALL_REDUCE, 4), wire_factor(Kind.ALL_GATHER, 4), wire_factor(Kind.SEND, 2)
    (1.5, 0.75, 1.0)
    """
    if kind == Kind.ALL_REDUCE:
        return 2 * (n - 1) / n
    if kind in _PARTS:
        return (n - 1) / n
    return 1.0 if n > 1 else 0.0  # a message, broadcast, reduce: all of it, once


_PARTS = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL, Kind.SCATTER, Kind.GATHER)


def hops(kind: int, n: int) -> int:
    """Return how many times a rank waits for a neighbour on a ring of n ranks.

    >>> hops(Kind.ALL_REDUCE, 8), hops(Kind.ALL_GATHER, 8), hops(Kind.SEND, 2)
    (14, 7, 1)
    """
    if kind in (Kind.ALL_REDUCE, Kind.BARRIER):
        return 2 * (n - 1)
    return n - 1  # a message has two ends and thus one hop


@public
@dataclass(frozen=True)
class Link:
    """The connection between two devices; it is equally fast in both directions at once.

    Attributes:
        name: the name of the link, such as "NVLink 3".
        latency: seconds per hop.
        bandwidth: bytes per second in one direction, as a message reaches it.
        bus: bytes per second that a collective reaches, by kind; kinds that are left out reach `bandwidth`. This is
            what nccl-tests calls bus bandwidth: the rate on the wire, whatever the number of ranks.
        sources: by attribute, where its value is from: published, fitted or assumed.
        ramp: seconds per square root of a byte, since measured sweeps reach their rate gradually; 0 for none.
    """

    name: str
    latency: float
    bandwidth: float
    bus: Mapping[Kind, float] = field(default_factory=dict, hash=False)
    sources: Mapping[str, str] = field(default_factory=dict, hash=False, compare=False)
    ramp: float = 0.0

    def time(self, kind: int, nbytes: float, n: int = 2) -> float:
        """Return the seconds that a message, or a collective of n ranks, takes for a payload of `nbytes`.

        >>> link = Link("example", latency=1e-6, bandwidth=1e9)
        >>> round(link.time(Kind.ALL_REDUCE, 8e6, n=4) * 1e6)  # 6 hops, 1.5 * 8 MB
        12006
        """
        if n < 2:
            return 0.0  # a single rank does not communicate
        ramp = 0.0 if kind in _MESSAGES else self.ramp * sqrt(nbytes)
        return hops(kind, n) * self.latency + self.transfer(kind, nbytes, n) + ramp

    def transfer(self, kind: int, nbytes: float, n: int = 2) -> float:
        """Return the seconds that the payload keeps the wire busy at the link's rate."""
        return wire_factor(kind, n) * nbytes / self.rate(kind)

    def rate(self, kind: int) -> float:
        """Return the bytes per second on the wire that a collective, or a message, reaches."""
        return self.bus.get(kind, self.bandwidth)  # type: ignore[call-overload,no-any-return]
