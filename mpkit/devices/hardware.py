"""Hardware: what an operation, a message and a collective take on a machine, or on several.

Device. It runs an op in the time of its arithmetic or of its memory traffic, whichever is longer (the roofline:
Williams, Waterman and Patterson 2009).

Link. The time of a message or a collective between devices that are equally far from each other:

    t = hops x latency + wire factor x payload / rate + ramp x sqrt(payload)

The wire factor is the fraction of the payload that each rank has to send, and hops is how often it has to wait for a
neighbour: on a ring of n ranks, each rank sends 2(n-1)/n of the payload in an all-reduce, in 2(n-1) rounds.

Sources: wire factors, nccl-tests, doc/PERFORMANCE.md; rounds of the ring, Thakur, Rabenseifner and Gropp 2005, section
3; the last term, sweeps of stas00/ml-engineering.

Collective. Its time on one node or on several. A ring of n ranks waits n - 1 times for a neighbour, and most neighbours
share a node: with 8 devices per node, 7 of 8 hops stay inside. Between nodes all devices of a group in one node send
through their own network cards, so the rate is the sum of theirs, and at most that of the link inside. An all-reduce of
many nodes goes along a tree if that is faster, which has as many hops between nodes as the tree is deep.

    ring    calls x (hops inside x latency + hops between x latency) + wire factor x bytes / rate
    tree    calls x 2 (devices per node x latency + 1.5 log2(nodes) x latency) + wire factor x bytes / (TREE x rate)

and the ramp of the link (`Link.ramp`). In an all-to-all each rank sends a part to each other one: inside its node by
the node's link, to all others by its own network card, both at once. The slower of the two counts; with uneven parts,
that of the rank which sends or receives most over it. Replays, plays and estimates all take their times from here.

Sources: NCCL's rings and trees; Sanders, Speck and Traff 2009.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from mpkit.common.arrays import Numbers, larger, log2, smaller, where
from mpkit.common.tracebacks import public
from mpkit.trace import Kind


@public
@dataclass(frozen=True)
class Device:
    """A device that computes: a GPU, or a core of a CPU.

    Attributes:
        name: the name of the device, such as "H100 SXM".
        flops: floating-point operations per second that large matrix products really reach, by dtype.
        bandwidth: bytes per second to and from its memory.
        memory: bytes of its memory; 0 if unknown.
        host: bytes per second between it and the host's memory.
        sources: by attribute, where its value is from: published, fitted or assumed.
        peak: published floating-point operations per second, by dtype: the unit of model FLOPs utilization.
        half: the precision of 16 bits that its matrix units have: "bf16", or "fp16" alone (Volta, Turing).
        blocked_convolutions: whether its convolutions are oneDNN's, whose kernels take memory for blocked copies
            (`mpkit.trace.record.workspace`).
    """

    name: str
    flops: Mapping[str, float] = field(hash=False)
    bandwidth: float
    memory: int = 0
    host: float = 10e9
    sources: Mapping[str, str] = field(default_factory=dict, hash=False, compare=False)
    peak: Mapping[str, float] = field(default_factory=dict, hash=False, compare=False)
    blocked_convolutions: bool = False
    half: str = "bf16"

    def rate(self, dtype: str = "float32") -> float:
        """Return the FLOPs per second in a dtype; a dtype for which the device has no units runs as float32.

        >>> Device("toy", {"float32": 1e12, "bfloat16": 8e12}, bandwidth=1e11).rate("bfloat16") / 1e12
        8.0
        """
        return self.flops.get(dtype, self.flops["float32"])

    def time(self, flops: float, nbytes: float = 0.0, dtype: str = "float32") -> float:
        """Return the seconds that an op takes: its arithmetic or its memory traffic, whichever is longer.

        >>> Device("toy", {"float32": 1e12}, bandwidth=1e11).time(flops=1e12, nbytes=2e11)
        2.0
        """
        return max(flops / self.rate(dtype), nbytes / self.bandwidth)


RAMP = 5e-9
"""The ramp of links whose rates were measured with large payloads; fitted to nccl-tests on NVLink and EFA."""
_MESSAGES = Kind.SEND, Kind.RECV
_PARTS = Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL, Kind.SCATTER, Kind.GATHER
T = TypeVar("T", float, NDArray[np.float64])


def wire_factor(kind: int, n: T) -> T:
    """Return what each of n ranks sends in this operation, as a fraction of the payload.

    The payload is the whole tensor: what every rank has after an all-gather, or before a reduce-scatter.

    >>> wire_factor(Kind.ALL_REDUCE, 4), wire_factor(Kind.ALL_GATHER, 4), wire_factor(Kind.SEND, 2)
    (1.5, 0.75, 1.0)
    """
    if kind == Kind.ALL_REDUCE:
        return 2 * (n - 1) / n
    if kind in _PARTS:
        return (n - 1) / n
    all_of_it: T = where(n > 1, 1.0, 0.0)  # a message, broadcast, reduce: once
    return all_of_it


def hops(kind: int, n: T) -> T:
    """Return how many times a rank waits for a neighbour on a ring of n ranks; 1 for a message, which has two ends.

    >>> hops(Kind.ALL_REDUCE, 8), hops(Kind.ALL_GATHER, 8), hops(Kind.SEND, 2)
    (14, 7, 1)
    """
    return 2 * (n - 1) if kind in (Kind.ALL_REDUCE, Kind.BARRIER) else n - 1


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
        ramp = 0.0 if kind in _MESSAGES else self.ramp * nbytes**0.5
        return hops(kind, n) * self.latency + self.transfer(kind, nbytes, n) + ramp

    def transfer(self, kind: int, nbytes: float, n: int = 2) -> float:
        """Return the seconds that the payload keeps the wire busy at the link's rate."""
        return wire_factor(kind, n) * nbytes / self.rate(kind)

    def rate(self, kind: int) -> float:
        """Return the bytes per second on the wire that a collective, or a message, reaches.

        Raises:
            ValueError: the kind is a word.
        """
        if isinstance(kind, str):
            known = {each.word: each.name for each in Kind}
            name = known.get(kind, "ALL_REDUCE")
            raise ValueError(
                f"the kind of a collective is a member of mpkit.trace.Kind, and {kind!r} is a word: "
                f"from mpkit.trace import Kind; link.rate(Kind.{name})"
            )
        return self.bus.get(kind, self.bandwidth)  # type: ignore[call-overload,no-any-return]


TREE = 0.9  # the share of the ring's rate that a tree reaches


def collective_time(
    kind: int, nbytes: Numbers, n: Numbers, nodes: Numbers, inside: Link, between: Link | None, calls: Numbers = 1,
    busiest: tuple[float, float] | None = None,
) -> Numbers:  # fmt: skip
    """Return the seconds that a collective takes, or a message between two ranks; of one plan or of many.

    >>> bus, network = Link("bus", 1e-6, 100e9), Link("network", 10e-6, 10e9)
    >>> round(collective_time(Kind.ALL_GATHER, 8e9, 8, 2, bus, network), 6)  # 40 GB/s; 5 hops inside, 2 between
    0.175025
    >>> round(collective_time(Kind.ALL_TO_ALL, 8e9, 8, 2, bus, network), 6)  # half of it leaves the node, 10 GB/s
    0.400025

    Args:
        kind, n: the collective, and its number of ranks.
        nbytes: its payload in bytes, over all calls, as for `wire_factor`.
        nodes: the nodes that the ranks are on, each with as many.
        inside: the link inside a node.
        between: each device's share of the link between nodes; None if all are on one.
        calls: the calls that share the payload, one after the other.
        busiest: what `find_busiest` returns for an all-to-all of uneven parts; None: all parts are equal.
    """
    twice = 2 if kind in (Kind.ALL_REDUCE, Kind.BARRIER) else 1
    sent = wire_factor(kind, n) * nbytes if busiest is None else sum(busiest)
    alone = calls * hops(kind, n) * inside.latency + sent / inside.rate(kind)
    alone = alone + inside.ramp * (calls * nbytes) ** 0.5
    if between is None:
        return where(n < 2, 0.0, alone)
    per_node = larger(1, n // nodes)
    transfer = sent / smaller(inside.rate(kind), per_node * between.rate(kind))
    if kind == Kind.ALL_TO_ALL:
        near, away = busiest or ((per_node - 1) / n * nbytes, (n - per_node) / n * nbytes)
        transfer = larger(near / inside.rate(kind), away / between.rate(kind))
    crossing = smaller(nodes, n - 1)
    ring = calls * twice * ((n - 1 - crossing) * inside.latency + crossing * between.latency) + transfer
    if kind == Kind.ALL_REDUCE:
        tree = twice * ((per_node - 1) * inside.latency + 1.5 * log2(nodes) * between.latency)
        ring = smaller(ring, calls * tree + transfer / TREE)
    crossed = ring + between.ramp * (calls * nbytes) ** 0.5
    return where(n < 2, 0.0, where(nodes < 2, alone, crossed))


def find_busiest(parts: Sequence[Sequence[float]], nodes: Sequence[int]) -> tuple[float, float]:
    """Return the most bytes of an all-to-all that one rank sends or receives inside its node, and across nodes.

    `parts` has the bytes by sender and receiver, of which what a rank keeps does not count; `nodes` the node of each.

    >>> find_busiest([[9, 1, 2], [3, 9, 4], [5, 6, 9]], [0, 0, 1])  # rank 2 is on the other node, and sends 5 + 6
    (3.0, 11.0)
    """
    sent, node = np.array(parts, float), np.asarray(nodes)
    np.fill_diagonal(sent, 0)
    near = np.where(node[:, None] == node, sent, 0)
    most_near, most_away = (float(max(each.sum(0).max(), each.sum(1).max())) for each in (near, sent - near))
    return most_near, most_away


@public
@dataclass(frozen=True)
class Hardware:
    """One machine or several: devices and the links between them. Device d is on node d // per_node.

    Attributes:
        name: the name by which `mpkit.hardware` finds it.
        device: the device, of which every rank has one of its own.
        link: the link between the devices of a node.
        between: each device's share of the link between nodes; None for a single node.
        per_node: devices per node.
        nodes: the number of nodes.
        order: for each device, the rank on it; () puts rank d on device d. `Mesh.order` sorts ranks by their places.
    """

    name: str
    device: Device
    link: Link
    between: Link | None = None
    per_node: int = 8
    nodes: int = 1
    order: tuple[int, ...] = ()

    def node_of(self, rank: int) -> int:
        """Return the number of the node that a rank is on.

        >>> device, link = Device("d", {"float32": 1e12}, 1e11), Link("bus", 1e-6, 80e9)
        >>> pairs = Hardware("toy", device, link, per_node=2, nodes=2, order=(0, 2, 1, 3))
        >>> [pairs.node_of(rank) for rank in range(4)]
        [0, 1, 0, 1]
        """
        device = self.order.index(rank) if rank in self.order else rank
        return device // self.per_node

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.per_node * self.nodes

    def link_of(self, ranks: Sequence[int]) -> Link:
        """Return the link that paces these ranks' messages and collectives.

        Inside a node that is the node's link. Across nodes it is the slower of the two links: rings are laid so that
        each device of a node uses its own network card, so a group with k ranks per node has the bandwidth of k cards,
        as long as the node's link is not slower.

        >>> wire = Link("network", 5e-6, 25e9)
        >>> nodes = Hardware("toy", Device("d", {"float32": 1e12}, 1e11), Link("bus", 1e-6, 80e9), wire, per_node=4)
        >>> nodes.link_of([0, 3]).name, nodes.link_of([0, 4]).bandwidth / 1e9, nodes.link_of(range(8)).bandwidth / 1e9
        ('bus', 25.0, 80.0)
        """
        nodes = {self.node_of(rank) for rank in ranks}
        between = self.between
        if len(nodes) < 2 or between is None:
            return self.link
        cards = max(1, len(ranks) // len(nodes))
        kinds = {*between.bus, *self.link.bus}
        bus = {kind: min(cards * between.rate(kind), self.link.rate(kind)) for kind in kinds}
        bandwidth = min(cards * between.bandwidth, self.link.bandwidth)
        return Link(between.name, between.latency, bandwidth, bus, between.sources, between.ramp)

    def time(
        self, kind: int, nbytes: float, ranks: Sequence[int], parts: Sequence[Sequence[float]] | None = None
    ) -> float:
        """Return the seconds of a collective, or of a message between two ranks (`mpkit.devices.hardware`).

        Args:
            kind, nbytes: what it is, and its payload.
            ranks: who takes part.
            parts: of an all-to-all of uneven parts, what each of `ranks` sends to each.
        """
        inside, between, n = self.link, self.between, len(ranks)
        node = [self.node_of(rank) for rank in ranks]
        busiest = None if parts is None else find_busiest(parts, [0] * n if between is None else node)
        took: float = collective_time(kind, nbytes, n, len(set(node)), inside, between, busiest=busiest)
        return took
