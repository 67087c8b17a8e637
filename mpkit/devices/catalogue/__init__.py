"""The catalogue: machines by name.

machines    the tables of published and fitted figures, and machines of any size made from them
capacity    enough devices for all ranks, or the name of a larger machine
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import overload

from mpkit.common.safe_text import escape
from mpkit.common.tracebacks import public
from mpkit.devices.catalogue.machines import build_machine, by_name, measured_machine
from mpkit.devices.hardware import Device, Hardware

__all__ = ["Catalogue", "build_machine", "hardware"]

MEASURED = (
    "cpu", "2x-titan-rtx-nvlink", "2x-titan-rtx", "2x-rtx-4090", "8x-a100-nvlink", "8x-h100-nvlink", "8x-h100-pcie",
    "8x-h200-nvlink", "8x-b200-nvlink", "2x8-h100-ib", "4x8-b200-efa",
)  # fmt: skip
"""The rows of machines.csv."""
_OTHERS = (
    "8x-a100-40-nvlink", "8x-a100-pcie", "8x-b300-nvlink", "8x-gb200-nvlink", "8x-mi300x", "8x-l40s", "8x-h20-nvlink",
    "8x-h800-nvlink", "2x-v100-nvlink", "2x-v100-pcie", "4x-t4", "4x-a10g", "2x-rtx-3090", "2x-rtx-5090", "4x-tpu-v5e",
    "8x-gaudi2", "8x-gaudi3", "4x8-a100-hdr", "4x8-h100-ndr",
)  # fmt: skip
_ALL = MEASURED + _OTHERS


class Catalogue(Mapping[str, Hardware]):
    """All machines by name; it prints as a table.

    >>> list(Catalogue())[:3]
    ['cpu', '2x-titan-rtx-nvlink', '2x-titan-rtx']
    """

    def __getitem__(self, name: str) -> Hardware:
        try:
            found = _of_any_size(str(name))
        except ValueError:  # its form is right, and there is no such device
            found = None
        if found is None:
            raise KeyError(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(_ALL)

    def __len__(self) -> int:
        return len(_ALL)

    def rows(self) -> list[tuple[str, ...]]:
        """Return the head of the table and one row per machine."""
        head = (
            "name",
            "device",
            "float32 TFLOP/s",
            "memory GB/s",
            "link",
            "GB/s",
            "all-reduce GB/s",
            "us a hop",
        )
        return [head, *(_row(machine) for machine in self.values())]

    def __repr__(self) -> str:
        rows = self.rows()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )

    def _repr_html_(self) -> str:
        head, *body = self.rows()
        lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in body]
        return (
            f"<table><thead><tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr></thead>"
            f"<tbody>{''.join(f'<tr>{line}</tr>' for line in lines)}</tbody></table>"
        )


def _of_any_size(name: str) -> Hardware | None:
    """Return a machine by name: a measured one, also with another number of devices in its node, or any cluster.

    Raises:
        ValueError: the name is of the right form, and there is no such device or card.
    """
    if name in MEASURED:
        return measured_machine(name)
    cards = re.fullmatch(r"([1-9]\d*)(x-.+)", name)
    if cards and name not in _OTHERS:
        for known in MEASURED:
            if known.lstrip("0123456789") == cards[2]:
                return replace(measured_machine(known), name=name, per_node=int(cards[1]))
    return by_name(name)


def _row(machine: Hardware) -> tuple[str, ...]:
    from mpkit.trace import Kind

    link, device = machine.link_of(range(min(machine.devices, 1024))), machine.device
    reduce = link.bus.get(Kind.ALL_REDUCE, link.bandwidth)
    return (
        machine.name,
        device.name,
        f"{device.rate() / 1e12:.3g}",
        f"{device.bandwidth / 1e9:,.0f}",
        link.name,
        f"{machine.link.bandwidth / 1e9:.3g}",
        f"{reduce / 1e9:.3g}",
        f"{link.latency * 1e6:.3g}",
    )


@overload
def hardware() -> Catalogue: ...
@overload
def hardware(
    name: str | Hardware | Device,
    *,
    nodes: int | None = ...,
    per_node: int | None = ...,
    nic: str | float | None = ...,
) -> Hardware: ...
@public
def hardware(
    name: str | Hardware | Device | None = None,
    *,
    nodes: int | None = None,
    per_node: int | None = None,
    nic: str | float | None = None,
) -> Hardware | Catalogue:
    """Return the machine with this name; a `Hardware` is returned as it is, and without a name the whole catalogue.

    Args:
        name: a machine, such as "8x-a100-nvlink"; or, with the other arguments, a device: its short name, such as
            "h100", or a `mpkit.devices.Device` of your own.
        nodes, per_node: the number of nodes (1), and of devices in each (8).
        nic: the network card of each device, such as "ndr", or GB/s in one direction; needed with several nodes.

    Every figure has its source: `hardware("8x-a100-nvlink").link.sources`. Names of the forms "8x-l40s" and
    "64x8-h100-ndr" (nodes, devices per node, device, network card) make machines of any size; "h100" is a node of 8.

    Raises:
        ValueError: there is no such machine, device or card, or a number is none.

    >>> machine = hardware("8x-a100-nvlink")
    >>> machine.device.name, machine.link.name, machine.devices
    ('A100 SXM 80GB', 'NVLink 3', 8)
    >>> hardware("h100", nodes=64, nic="ndr").name
    '64x8-h100-ndr'
    """
    if name is None:
        return Catalogue()
    if isinstance(name, Device) or (nodes, per_node, nic) != (None, None, None):
        if isinstance(name, Hardware):
            raise ValueError(
                f"hardware({name.name!r}, ...): a machine has its size; give a device, such as 'h100'"
            )
        return build_machine(
            name, nodes=1 if nodes is None else nodes, per_node=8 if per_node is None else per_node, nic=nic
        )
    if isinstance(name, Hardware):
        return name
    if not isinstance(name, str):
        raise ValueError(
            f"hardware({name!r}): give a name, such as hardware('8x-a100-nvlink'), or an "
            "mpkit.devices.Hardware of your own. "
            "hardware() lists the names."
        )
    lower = name.strip().lower().replace("_", "-").replace(" ", "-")
    found = _of_any_size(lower)
    if found is None:
        near = get_close_matches(lower, _ALL, 3, 0.4) or list(_ALL)
        raise ValueError(
            f"hardware({name!r}): there is none of that name. The nearest: {', '.join(map(repr, near))}; "
            "mpkit.hardware() lists all. mpkit.hardware('h100', nodes=16, nic='ndr') makes one of any size."
        )
    return found
