"""The catalogue: machines by name.

tables      the published tables, and the links fitted to them
machines    each machine, and where its figures come from
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import overload

from mpkit.devices.catalogue.machines import MACHINES
from mpkit.devices.hardware import Hardware
from mpkit.support.visible import escape

__all__ = ["Catalogue", "hardware"]


class Catalogue(Mapping[str, Hardware]):
    """All machines by name; it prints as a table.

    >>> list(Catalogue())[:3]
    ['cpu', '2x-titan-rtx-nvlink', '2x-titan-rtx']
    """

    def __getitem__(self, name: str) -> Hardware:
        return MACHINES[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(MACHINES)

    def __len__(self) -> int:
        return len(MACHINES)

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
def hardware(name: str | Hardware) -> Hardware: ...
def hardware(name: str | Hardware | None = None) -> Hardware | Catalogue:
    """Return the machine with this name; a `Hardware` is returned as it is, and without a name the whole catalogue.

    Every figure has its source: `hardware("8x-a100-nvlink").link.sources`.

    Raises:
        ValueError: there is no machine with that name.

    >>> machine = hardware("8x-a100-nvlink")
    >>> machine.device.name, machine.link.name, machine.devices
    ('A100 SXM 80GB', 'NVLink 3', 8)
    """
    if name is None:
        return Catalogue()
    if isinstance(name, Hardware):
        return name
    if not isinstance(name, str):
        raise ValueError(
            f"hardware({name!r}): give a name, such as hardware('8x-a100-nvlink'), or an "
            "mpkit.devices.Hardware of your own. "
            "hardware() lists the names."
        )
    found = MACHINES.get(name)
    if found is None:
        near = get_close_matches(name.lower(), MACHINES, 3, 0.4) or list(MACHINES)
        raise ValueError(
            f"hardware({name!r}): there is none of that name. The nearest: {', '.join(map(repr, near))}; "
            "mpkit.hardware() lists all."
        )
    return found()
