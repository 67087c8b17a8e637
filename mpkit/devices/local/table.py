"""The table of ranks and their devices that a Cluster prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mpkit.common.safe_text import escape, visible
from mpkit.common.table import table_html, table_text
from mpkit.common.units import memory_text
from mpkit.devices.local import gpus
from mpkit.devices.local.choose import DeviceChoice
from mpkit.devices.local.gpus import Inventory, LocalDevice

__all__ = ["DeviceRow", "devices_html", "devices_text", "row_of"]

HEAD = ("rank", "device", "name", "UUID or bus id", "memory")
COLUMNS = range(len(HEAD))
"""All of words."""


class DeviceRow(NamedTuple):
    """A rank's device, in words."""

    device: str
    name: str
    identity: str
    memory: str


def row_of(chosen: DeviceChoice, rank: int, inventory: Inventory | None) -> DeviceRow:
    """Return the row of a rank, which is its number on its node where a launcher has started it.

    >>> pair = Inventory("cuda", tuple(LocalDevice(i, "T4", f"GPU-{i}a", memory=15 << 30) for i in range(2)))
    >>> row_of(DeviceChoice("cuda", (1, 0)), 0, pair)
    DeviceRow(device='cuda:1', name='T4', identity='GPU-1a', memory='15.0 GiB')
    """
    there = inventory.devices if inventory is not None else ()
    number = chosen.number_of(rank)
    device = there[number] if number < len(there) else LocalDevice()
    memory = memory_text(device.memory) if device.memory else "?"
    name = "mps" if chosen.kind == "mps" else f"{chosen.kind}:{number}"
    return DeviceRow(name, device.name or "?", device.identity or "?", memory)


Told = Sequence[Sequence[str]] | None
"""The rows of all ranks where a launcher has started them."""


def devices_text(chosen: DeviceChoice, ranks: int, told: Told = None) -> str:
    """Return the table as text; below it, which variable decided and what may surprise."""
    rows, below = _table(chosen, ranks, told)
    return visible("\n".join([*table_text(rows, COLUMNS), *below]))


def devices_html(chosen: DeviceChoice, ranks: int, told: Told = None) -> str:
    """Return the same as HTML."""
    rows, below = _table(chosen, ranks, told)
    return f"{table_html(rows, COLUMNS)}<p>{'<br>'.join(map(escape, below))}</p>"


def _table(chosen: DeviceChoice, ranks: int, told: Told) -> tuple[list[Sequence[str]], list[str]]:
    """Return the rows, the first of which has the heads, and the lines below them."""
    inventory = gpus.inventory_of(chosen.kind)
    each = told or [row_of(chosen, rank, inventory) for rank in range(ranks)]
    rows: list[Sequence[str]] = [HEAD, *((str(rank), *row) for rank, row in enumerate(each))]
    if inventory is None:
        return rows, []
    return rows, [f"decided by: {inventory.decided_by}", *inventory.notes]
