"""Communication: how long the collectives and messages of an estimate take on a machine.

A ring of n ranks waits n - 1 times for a neighbour, and most neighbours share a node: with 8 devices per node, 7 of 8
hops stay inside. Between nodes all devices of a group in one node send through their own network cards, so the rate is
the sum of theirs, and at most that of the link inside. An all-reduce of many nodes goes along a tree where that is
faster, which has as many hops between nodes as the tree is deep (NCCL; Sanders, Speck and Traff 2009).

    t = calls x latency + factor x bytes / rate + RAMP sqrt(calls x bytes)

Source of the last term: measured sweeps reach their rate gradually (COLLECTIVES: stas00/ml-engineering).
"""

from __future__ import annotations

from math import log2, sqrt

from mpkit.devices.hardware import Hardware, Link, wire_factor
from mpkit.trace import Kind

__all__ = ["Network"]

RAMP = 5e-9
TREE = 0.9
"""The share of the ring's rate that a tree reaches."""


class Network:
    """The network of a machine, as an estimate asks for it.

    Args:
        hardware: the machine.
    """

    def __init__(self, hardware: Hardware) -> None:
        self.per_node = hardware.per_node
        self._inside = hardware.link
        self._between = hardware.between

    def time(self, kind: Kind, nbytes: float, n: int, per_node: int, calls: int = 1) -> float:
        """Return the seconds that a collective takes.

        Args:
            kind: of the collective.
            nbytes: its payload, over all calls: what every rank has before a reduce-scatter or after an all-gather.
            n: ranks.
            per_node: of them, those in one node.
            calls: calls that the payload is sent in, one after the other.
        """
        if n < 2 or nbytes <= 0:
            return 0.0
        twice = 2 if kind == Kind.ALL_REDUCE else 1
        sent = wire_factor(kind, n) * nbytes
        ramp = RAMP * sqrt(calls * nbytes)
        link, nodes = self._inside, max(1, n // per_node)
        rate = _rate(link, kind)
        if nodes == 1 or self._between is None:
            return calls * twice * (n - 1) * link.latency + sent / rate + ramp
        card = self._between
        rate = min(rate, per_node * _rate(card, kind))
        ring = twice * ((n - nodes) * link.latency + nodes * card.latency)
        ringing = calls * ring + sent / rate
        if kind != Kind.ALL_REDUCE:
            return ringing + ramp
        tree = twice * ((per_node - 1) * link.latency + 1.5 * log2(nodes) * card.latency)
        return min(ringing, calls * tree + sent / (TREE * rate)) + ramp

    def message(self, nbytes: float, crosses: bool) -> float:
        """Return the seconds of a message from one rank to another.

        Args:
            nbytes: its size.
            crosses: whether the other rank is on another node.
        """
        link = self._between if crosses and self._between is not None else self._inside
        return link.latency + nbytes / link.bandwidth


def _rate(link: Link, kind: Kind) -> float:
    return link.bus.get(kind, link.bandwidth)
