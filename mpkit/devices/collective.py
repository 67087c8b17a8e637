"""Collective: how long a collective takes on one node or on several.

A ring of n ranks waits n - 1 times for a neighbour, and most neighbours share a node: with 8 devices per node, 7 of 8
hops stay inside. Between nodes all devices of a group in one node send through their own network cards, so the rate is
the sum of theirs, and at most that of the link inside. An all-reduce of many nodes goes along a tree where that is
faster, which has as many hops between nodes as the tree is deep.

    ring    calls x (hops inside x latency + hops between x latency) + wire factor x bytes / rate
    tree    calls x 2 (devices per node x latency + 1.5 log2(nodes) x latency) + wire factor x bytes / (TREE x rate)

and the ramp of the link (`Link.ramp`). In an all-to-all each rank sends a part to each other one: to those of its node
by the link inside, to all others by its own network card, both at once; the slower of them counts, and of uneven parts
the rank that sends or receives most over it. Replays, plays and estimates all take their times from here.

Sources: NCCL's rings and trees; Sanders, Speck and Traff 2009.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2, sqrt

import numpy as np

from mpkit.devices.link import Link, hops, wire_factor
from mpkit.trace import Kind

__all__ = ["collective_time", "find_busiest"]

TREE = 0.9
"""The share of the ring's rate that a tree reaches."""


def collective_time(
    kind: int, nbytes: float, n: int, nodes: int, inside: Link, between: Link | None, calls: int = 1,
    busiest: tuple[float, float] | None = None,
) -> float:  # fmt: skip
    """Return the seconds that a collective takes, or a message between two ranks.

    >>> bus, network = Link("bus", 1e-6, 100e9), Link("network", 10e-6, 10e9)
    >>> round(collective_time(Kind.ALL_GATHER, 8e9, 8, 2, bus, network), 6)  # 40 GB/s; 5 hops inside, 2 between
    0.175025
    >>> round(collective_time(Kind.ALL_TO_ALL, 8e9, 8, 2, bus, network), 6)  # half of it leaves the node, 10 GB/s
    0.400025

    Args:
        kind: of the collective.
        nbytes: its payload, over all calls: what every rank has before a reduce-scatter or after an all-gather.
        n: ranks.
        nodes: nodes that they are on, each with as many.
        inside: the link inside a node.
        between: each device's share of the link between nodes; None if all are on one.
        calls: calls that the payload is sent in, one after the other.
        busiest: of an all-to-all of uneven parts, what `find_busiest` returns; None: each part is as large.
    """
    if n < 2:
        return 0.0  # a single rank does not communicate
    sent = wire_factor(kind, n) * nbytes if busiest is None else sum(busiest)
    if nodes < 2 or between is None:
        rounds, rate, ramp = calls * hops(kind, n) * inside.latency, inside.rate(kind), inside.ramp
        return rounds + sent / rate + ramp * sqrt(calls * nbytes)
    twice = hops(kind, n) // (n - 1)
    per_node = max(1, n // nodes)
    rate = min(inside.rate(kind), per_node * between.rate(kind))
    if kind == Kind.ALL_TO_ALL:
        near, away = busiest or ((per_node - 1) / n * nbytes, (n - per_node) / n * nbytes)
        slower = max(near / inside.rate(kind), away / between.rate(kind))
        rate = sent / slower if slower else rate
    ramp = between.ramp * sqrt(calls * nbytes)
    crossing = min(nodes, n - 1)
    ring = twice * ((n - 1 - crossing) * inside.latency + crossing * between.latency)
    ringing = calls * ring + sent / rate
    if kind != Kind.ALL_REDUCE:
        return ringing + ramp
    tree = twice * ((per_node - 1) * inside.latency + 1.5 * log2(nodes) * between.latency)
    return min(ringing, calls * tree + sent / (TREE * rate)) + ramp


def find_busiest(parts: Sequence[Sequence[float]], nodes: Sequence[int]) -> tuple[float, float]:
    """Return the most bytes of an all-to-all that one rank sends or receives inside its node, and across nodes.

    >>> find_busiest([[9, 1, 2], [3, 9, 4], [5, 6, 9]], [0, 0, 1])  # rank 2 is on the other node, and sends 5 + 6
    (3.0, 11.0)

    Args:
        parts: by sender and receiver, as places in the group; what a rank keeps counts nowhere.
        nodes: the node of each.
    """
    sent, node = np.array(parts, float), np.asarray(nodes)
    np.fill_diagonal(sent, 0)
    near = np.where(node[:, None] == node, sent, 0)
    most_near, most_away = (float(max(each.sum(0).max(), each.sum(1).max())) for each in (near, sent - near))
    return most_near, most_away
