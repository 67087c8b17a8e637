"""Hardware: a machine or several, and what an op, a message and a collective take on it.

A device runs an op by the roofline (`device`), a link carries what devices of one node send (`link`), and collectives
of several nodes go over both (`collective`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpkit.common.tracebacks import public
from mpkit.devices.collective import collective_time, find_busiest
from mpkit.devices.device import Device
from mpkit.devices.link import Link, hops, wire_factor

__all__ = ["Device", "Hardware", "Link", "hops", "wire_factor"]


@public
@dataclass(frozen=True, init=False)
class Hardware:
    """One machine or several: devices and the links between them. Device d is on node d // per_node.

    Attributes:
        name: the name by which `mpkit.hardware` finds it.
        device: the device, of which every rank has one of its own; of unlike devices the slowest in float32, which
            paces whatever all of them do together.
        link: the link between the devices of a node.
        between: each device's share of the link between nodes; None for a single node.
        per_node: devices per node.
        nodes: the number of nodes.
        order: for each device, the rank on it; () puts rank d on device d. `Mesh.order` sorts ranks by their places.
        mixed: the devices one by one where they are unlike; () where all are `device`.
    """

    name: str
    device: Device
    link: Link
    between: Link | None
    per_node: int
    nodes: int
    order: tuple[int, ...]
    mixed: tuple[Device, ...]

    def __init__(
        self, name: str, device: Device | Sequence[Device] | None = None, link: Link | None = None,
        between: Link | None = None, per_node: int | None = None, nodes: int = 1, order: Sequence[int] = (),
        mixed: Sequence[Device] = (), *, devices: Sequence[Device] = (),
    ) -> None:  # fmt: skip
        """Make a machine of one kind of device, or of unlike `devices`.

        >>> old, new = Device("old", {"float32": 1e12}, 1e11), Device("new", {"float32": 4e12}, 4e11)
        >>> pair = Hardware("pair", devices=[new, old], link=Link("bus", 1e-6, 16e9))
        >>> pair.devices, pair.device.name, pair.device_of(0).name
        (2, 'old', 'new')

        Args:
            name, link, between, per_node, nodes, order: see the attributes; `per_node` is 8 by default, or what
                `devices` come to.
            device: the device of every rank; a sequence is taken as `devices`.
            devices: each device, node by node, where they are not all alike.
            mixed: the same as `devices`, for `dataclasses.replace`.

        Raises:
            ValueError: no device or link is given, something else than a Device is, or the number of devices is not
                that of the machine.
        """
        listed = tuple(devices) or tuple(mixed)
        if device is not None and not isinstance(device, Device):
            listed, device = listed or _list_devices(name, device), None
        if link is None or (device is None and not listed):
            missing = "link" if link is None else "device"
            raise ValueError(
                f"Hardware({name!r}) has no {missing}: Hardware({name!r}, device, link), or for unlike devices "
                f"Hardware({name!r}, devices=[new, new, old], link=link), such as those of mk.hardware('2x-rtx-4090')"
            )
        if listed:
            _check_listed(name, listed, per_node, nodes)
            slowest = min(listed, key=lambda each: each.rate())
            if device is not None and device != slowest:
                raise ValueError(
                    f"Hardware({name!r}, device={device.name!r}) has unlike devices as well "
                    f"({', '.join(each.name for each in listed)}): give devices= alone, one for each place"
                )
            device, per_node = slowest, len(listed) // nodes
        values = {
            "name": name, "device": device, "link": link, "between": between, "per_node": per_node or 8,
            "nodes": nodes, "order": tuple(order),
            "mixed": listed if any(each != device for each in listed) else (),
        }  # fmt: skip
        for field_name, value in values.items():
            object.__setattr__(self, field_name, value)

    def device_of(self, rank: int) -> Device:
        """Return the device that a rank is on; ranks beyond the last device begin with the first one again."""
        place = self.order.index(rank) if rank in self.order else rank
        return self.mixed[place % len(self.mixed)] if self.mixed else self.device

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
        bus = {
            kind: min(
                cards * between.bus.get(kind, between.bandwidth), self.link.bus.get(kind, self.link.bandwidth)
            )
            for kind in {*between.bus, *self.link.bus}
        }
        bandwidth = min(cards * between.bandwidth, self.link.bandwidth)
        return Link(between.name, between.latency, bandwidth, bus, between.sources, between.ramp)

    def time(
        self, kind: int, nbytes: float, ranks: Sequence[int], parts: Sequence[Sequence[float]] | None = None
    ) -> float:
        """Return the seconds of a collective, or of a message between two ranks (`mpkit.devices.collective`).

        Args:
            kind, nbytes: what it is, and its payload.
            ranks: who takes part.
            parts: of an all-to-all of uneven parts, what each of `ranks` sends to each.
        """
        of_ranks = [self.node_of(rank) for rank in ranks]
        nodes = len(set(of_ranks))
        one = self.between is None  # then all ranks share the link
        busiest = None if parts is None else find_busiest(parts, [0] * len(ranks) if one else of_ranks)
        return collective_time(kind, nbytes, len(ranks), nodes, self.link, self.between, busiest=busiest)


def _list_devices(name: str, devices: object) -> tuple[Device, ...]:
    """Return several devices that were given as a sequence."""
    if isinstance(devices, Sequence) and all(isinstance(each, Device) for each in devices):
        return tuple(devices)
    raise ValueError(
        f"Hardware({name!r}, device={devices!r}): give an mk.devices.Device, such as mk.hardware('2x-rtx-4090').device"
        ", or a list with one Device for each place"
    )


def _check_listed(name: str, devices: tuple[Device, ...], per_node: int | None, nodes: int) -> None:
    """Check that unlike devices are devices, and as many as the machine has places.

    Raises:
        ValueError: they are not.
    """
    _list_devices(name, devices)
    wanted = (len(devices) // max(1, nodes) if per_node is None else per_node) * nodes
    if wanted != len(devices):
        places = f"{nodes} nodes" if per_node is None else f"{nodes} x {per_node} = {wanted} places"
        said = ", ".join(each.name for each in devices)
        raise ValueError(
            f"Hardware({name!r}) lists {len(devices)} devices ({said}) for {places}: list one for each place, node by "
            f"node, or give nodes=1 and leave out per_node, which is then {len(devices)}"
        )
