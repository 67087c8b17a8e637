"""Machines of any size: a device of the catalogue, so many per node, so many nodes, and a network card.

mk.hardware("h100", nodes=64, nic="ndr")     64 nodes of 8 H100, a 400 Gb/s card for each
mk.hardware("64x8-h100-ndr")                 the same by name
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import get_close_matches

from mpkit.devices.catalogue import machines
from mpkit.devices.catalogue.machines import GIGA, INFINIBAND, gpu
from mpkit.devices.catalogue.tables import one
from mpkit.devices.hardware import RAMP, Device, Hardware, Link
from mpkit.plan.kinds import whole
from mpkit.trace import Kind

__all__ = ["DEVICES", "NICS", "build_machine", "by_name"]

DEVICES: Mapping[str, tuple[str, str | None]] = {
    "a100": ("A100 SXM 80GB", "A100 SXM"),
    "a100-40": ("A100 SXM 40GB", "A100 SXM"),
    "a100-pcie": ("A100 PCIe 80GB", "A100 PCIe"),
    "a10g": ("A10G", None),
    "b200": ("B200 SXM", "B200 SXM"),
    "b300": ("B300 SXM", "B300 SXM"),
    "gaudi2": ("Intel Gaudi 2", "Intel Gaudi 2"),
    "gaudi3": ("Intel Gaudi 3", "Intel Gaudi 3"),
    "gb200": ("GB200 (per GPU)", "GB200 SXM"),
    "gb300": ("GB300 (per GPU)", "GB200 SXM"),
    "h100": ("H100 SXM", "H100 SXM"),
    "h100-hbm2e": ("H100 SXM 96GB HBM2e", "H100 SXM"),
    "h100-pcie": ("H100 PCIe", "H100 SXM"),
    "h20": ("H20 SXM", "H100 SXM"),
    "h200": ("H200 SXM", "H100 SXM"),
    "h800": ("H800 SXM", "H100 SXM"),
    "l40s": ("L40S", None),
    "mi300x": ("MI300X", "MI300X"),
    "rtx-3090": ("RTX 3090", None),
    "rtx-4090": ("RTX 4090", None),
    "rtx-5090": ("RTX 5090", None),
    "t4": ("T4", None),
    "titan-rtx": ("TITAN RTX", None),
    "tpu-v5e": ("TPU v5e", None),
    "v100": ("V100 SXM2 32GB", None),
    "v100-pcie": ("V100 PCIe", None),
}
"""By short name: the row of devices.csv, and that of mamf.csv if large products were measured."""

EFA, ETHERNET = 55e-6, 30e-6
"""Seconds per hop: that of "4x8-b200-efa", fitted to its all-reduce; assumed."""

NICS: Mapping[str, tuple[float, float, str]] = {
    "edr": (12.5, INFINIBAND, "InfiniBand EDR"),
    "hdr": (25.0, INFINIBAND, "InfiniBand HDR"),
    "ndr": (50.0, INFINIBAND, "InfiniBand NDR"),
    "ib": (50.0, INFINIBAND, "InfiniBand NDR"),
    "xdr": (100.0, INFINIBAND, "InfiniBand XDR"),
    "efa": (50.0, EFA, "EFA v2 or v4"),
    "roce-1600": (25.0, INFINIBAND, "RoCE, 1600 Gb/s per node of 8"),
    "100gbe": (12.5 / 8, ETHERNET, "100 Gb/s Ethernet, a card per node of 8"),
    "10gbe": (1.25 / 8, ETHERNET, "10 Gb/s Ethernet, a card per node of 8"),
}
"""By name: GB/s per device in one direction, seconds per hop, and what it is."""

REACHED = 0.85
"""The share of the line rate that a card reaches: 0.74 to 0.95 of it on the measured clusters; assumed."""


def build_machine(
    device: str | Device, *, nodes: int = 1, per_node: int = 8, nic: str | float | None = None
) -> Hardware:
    """Return a machine of any size.

    Args:
        device: a name such as "h100" (`mpkit.devices.catalogue.clusters.DEVICES`), or a Device.
        nodes: the number of nodes.
        per_node: devices per node.
        nic: the network card of each device: a name of `NICS`, such as "ndr", or GB/s in one direction. It is needed
            where there are several nodes.

    Raises:
        ValueError: there is no such device or card, or a number is none.

    >>> machine = build_machine("h100", nodes=64, nic="ndr")
    >>> machine.devices, machine.name
    (512, '64x8-h100-ndr')
    """
    for name, value in (("nodes", nodes), ("per_node", per_node)):
        if (whole(value) or 0) < 1:
            raise ValueError(f"hardware({name}={value!r}): a whole number, 1 or more, such as {name}=8")
    if isinstance(device, Device):
        short, made, link = device.name, device, _through_host(device)
    else:
        short, made, link = device, *_device(device)
    between, called = None, "nvlink"
    if nodes > 1:
        if nic is None:
            raise ValueError(
                f"hardware({short!r}, nodes={nodes}) has no network between its nodes: give nic=, one of "
                f"{', '.join(NICS)}, or its GB/s for each device, such as nic=25"
            )
        between, called = _card(nic)
    title = f"{nodes}x{per_node}-{short}-{called}" if nodes > 1 else f"{per_node}x-{short}"
    return Hardware(title, made, link, between, per_node, nodes)


def by_name(name: str) -> Hardware | None:
    """Return the machine of a name such as "64x8-h100-ndr", "4x-l40s" or "h100" (a node of 8); None for another form.

    Raises:
        ValueError: it is of this form, and there is no such device or card.

    >>> by_name("4x8-h100-ib").devices
    32
    """
    several = re.fullmatch(r"(\d+)x(\d+)-([a-z0-9-]+?)-(" + "|".join(map(re.escape, NICS)) + ")", name)
    if several:
        return replace(
            build_machine(several[3], nodes=int(several[1]), per_node=int(several[2]), nic=several[4]),
            name=name,
        )
    if name in DEVICES:
        return build_machine(name)
    one_node = re.fullmatch(r"(\d+)x-([a-z0-9-]+?)(-nvlink)?", name)
    if one_node and one_node[2] in DEVICES:
        return replace(build_machine(one_node[2], per_node=int(one_node[1])), name=name)
    return None


def _device(short: str) -> tuple[Device, Link]:
    """Return a device of the catalogue, and the link between such devices inside a node."""
    if short not in DEVICES:
        near = get_close_matches(str(short).lower(), DEVICES, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"hardware({short!r}): the catalogue has {', '.join(DEVICES)}.{hint}")
    row, mamf = DEVICES[short]
    device = gpu(row, mamf)
    measured: dict[str, Callable[[], Hardware]] = {
        "a100": machines.a100, "a100-40": machines.a100, "h100": machines.h100, "h100-hbm2e": machines.h100,
        "h200": machines.h200, "b200": machines.b200, "b300": machines.b200, "gb200": machines.b200,
        "gb300": machines.b200, "h100-pcie": machines.h100_pcie, "h20": machines.h100,
    }  # fmt: skip
    if short in measured:
        return device, measured[short]().link
    line = one("devices", device=row)["link_GBps"]
    if not line:
        return device, _through_host(device)
    source = f"assumed: 0.78 of the line rate of {line} GB/s, as rings reach on NVLink 3"
    rate = 0.78 * float(line) * GIGA
    return device, Link(
        f"link of {row}", 4e-6, rate, {}, {"latency": "assumed: NVLink 3's", "bandwidth": source}, RAMP
    )


def _through_host(device: Device) -> Link:
    """Return the link of devices that reach each other over PCIe, with the shares that eight A100 reach over it."""
    shares = {
        Kind.ALL_REDUCE: 0.4176,
        Kind.ALL_GATHER: 0.4497,
        Kind.REDUCE_SCATTER: 0.3688,
        Kind.ALL_TO_ALL: 0.2754,
    }
    source = "assumed: the shares of the line rate that 8 A100 reach over PCIe 4 (MooreThreads/SimuMax)"
    return Link(
        "PCIe through the host", 10e-6, 0.8 * device.host,
        {kind: share * device.host for kind, share in shares.items()},
        {"latency": "assumed: 10 us", "bandwidth": source, "bus": source}, RAMP,
    )  # fmt: skip


def _card(nic: str | float) -> tuple[Link, str]:
    """Return the link of a network card for each device, and how a machine's name calls it."""
    if isinstance(nic, str):
        if nic.lower() not in NICS:
            raise ValueError(
                f"nic={nic!r}: one of {', '.join(NICS)}, or GB/s for each device, such as nic=25"
            )
        rate, latency, what = NICS[nic.lower()]
        called = nic.lower()
    elif isinstance(nic, bool) or not nic > 0:
        raise ValueError(
            f"nic={nic!r}: GB/s for each device in one direction, such as nic=25, or a name: {', '.join(NICS)}"
        )
    else:
        rate, latency, what, called = (
            float(nic),
            INFINIBAND,
            f"network, {nic:g} GB/s per device",
            f"{nic:g}GBps",
        )
    source = f"assumed: {REACHED} of the published line rate, {rate:g} GB/s per device"
    return Link(
        what, latency, REACHED * rate * GIGA, {}, {"bandwidth": source, "latency": "assumed"}, RAMP
    ), called
