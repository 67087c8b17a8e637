"""The catalogue: machines by name, from the tables and rules of `machines`."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import overload

from mpkit.common.table import table_html, table_text
from mpkit.common.tracebacks import public
from mpkit.devices.catalogue.machines import build_machine, by_name, machine_names
from mpkit.devices.hardware import Device, Hardware
from mpkit.trace import Kind

__all__ = ["Catalogue", "build_machine", "hardware"]

HEAD = "name", "device", "float32 TFLOP/s", "memory GB/s", "link", "GB/s", "all-reduce GB/s", "us a hop"
WORDS = 0, 1, 4
"""The columns of words."""


class Catalogue(Mapping[str, Hardware]):
    """All machines by name; it prints as a table.

    >>> list(Catalogue())[:3]
    ['cpu', '2x-titan-rtx-nvlink', '2x-titan-rtx']
    """

    def __getitem__(self, name: str) -> Hardware:
        try:
            machine = by_name(str(name))
        except ValueError:  # its form is right, and there is no such device
            machine = None
        if machine is None:
            raise KeyError(name)
        return machine

    def __iter__(self) -> Iterator[str]:
        return iter(machine_names())

    def __len__(self) -> int:
        return len(machine_names())

    def rows(self) -> list[tuple[str, ...]]:
        """Return the head of the table and one row per machine."""
        return [HEAD, *(_row(machine) for machine in self.values())]

    def __repr__(self) -> str:
        return "\n".join(table_text(self.rows(), WORDS))

    def _repr_html_(self) -> str:
        return table_html(self.rows(), WORDS)


def _row(machine: Hardware) -> tuple[str, ...]:
    link, device = machine.link_of(range(min(machine.devices, 1024))), machine.device
    flops, memory, bandwidth = device.rate() / 1e12, device.bandwidth / 1e9, machine.link.bandwidth / 1e9
    reduce, latency = link.rate(Kind.ALL_REDUCE) / 1e9, link.latency * 1e6
    rates = f"{bandwidth:.3g}", f"{reduce:.3g}", f"{latency:.3g}"
    return machine.name, device.name, f"{flops:.3g}", f"{memory:,.0f}", link.name, *rates


@overload
def hardware() -> Catalogue: ...
@overload
def hardware(
    name: str | Hardware | Device, *,
    nodes: int | None = ..., per_node: int | None = ..., nic: str | float | None = ...,
) -> Hardware: ...  # fmt: skip
@public
def hardware(
    name: str | Hardware | Device | None = None, *,
    nodes: int | None = None, per_node: int | None = None, nic: str | float | None = None,
) -> Hardware | Catalogue:  # fmt: skip
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
            f"hardware({name!r}): give a name, such as hardware('8x-a100-nvlink'), or an mpkit.devices.Hardware of "
            "your own. hardware() lists the names."
        )
    lower = name.strip().lower().replace("_", "-").replace(" ", "-")
    if (machine := by_name(lower)) is None:
        near = get_close_matches(lower, machine_names(), 3, 0.4) or machine_names()
        raise ValueError(
            f"hardware({name!r}): there is none of that name. The nearest: {', '.join(map(repr, near))}; "
            "mpkit.hardware() lists all. mpkit.hardware('h100', nodes=16, nic='ndr') makes one of any size."
        )
    return machine
