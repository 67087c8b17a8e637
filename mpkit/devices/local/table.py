"""The table of ranks and their devices that a Cluster prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mpkit.common.safe_text import escape, visible
from mpkit.common.units import memory_text
from mpkit.devices.local import gpus
from mpkit.devices.local.choose import DeviceChoice
from mpkit.devices.local.gpus import Inventory, LocalDevice

__all__ = ["DeviceRow", "devices_html", "devices_text", "html_table", "row_of", "text_table"]

HEAD = ("rank", "device", "name", "UUID or bus id", "memory")


class DeviceRow(NamedTuple):
    """A rank's device, in words."""

    device: str
    name: str
    identity: str
    memory: str


def devices_text(chosen: DeviceChoice, ranks: int, told: Sequence[Sequence[str]] | None = None) -> str:
    """Return the table of ranks as text; `told` has their rows where a launcher has started them."""
    inventory = gpus.inventory_of(chosen.kind)
    return _text(told or [row_of(chosen, rank, inventory) for rank in range(ranks)], inventory)


def devices_html(chosen: DeviceChoice, ranks: int, told: Sequence[Sequence[str]] | None = None) -> str:
    """Return the table of ranks as HTML; `told` has their rows where a launcher has started them."""
    inventory = gpus.inventory_of(chosen.kind)
    return _html(told or [row_of(chosen, rank, inventory) for rank in range(ranks)], inventory)


def text_table(chosen: DeviceChoice, ranks: int, inventory: Inventory | None) -> str:
    """Return the table as text; below it, which variable decided and what may surprise.

    >>> pair = Inventory("cuda", (LocalDevice("T4", "GPU-0a", 15 << 30, 0), LocalDevice("T4", "GPU-1a", 15 << 30, 1)))
    >>> print(text_table(DeviceChoice("cuda", (1, 0)), 2, pair))
    rank  device  name  UUID or bus id  memory
    0     cuda:1  T4    GPU-1a          15.0 GiB
    1     cuda:0  T4    GPU-0a          15.0 GiB
    decided by: no variable is set
    """
    return _text([row_of(chosen, rank, inventory) for rank in range(ranks)], inventory)


def html_table(chosen: DeviceChoice, ranks: int, inventory: Inventory | None) -> str:
    """Return the table as HTML."""
    return _html([row_of(chosen, rank, inventory) for rank in range(ranks)], inventory)


def row_of(chosen: DeviceChoice, rank: int, inventory: Inventory | None) -> DeviceRow:
    """Return the row of a rank, which is its number on its node where a launcher has started it."""
    there = inventory.devices if inventory is not None else ()
    number = chosen.number_of(rank)
    device = there[number] if number < len(there) else LocalDevice()
    memory = memory_text(device.memory) if device.memory else "?"
    name = "mps" if chosen.kind == "mps" else f"{chosen.kind}:{number}"
    return DeviceRow(name, device.name or "?", device.identity or "?", memory)


def _text(each: Iterable[Sequence[str]], inventory: Inventory | None) -> str:
    rows = [HEAD, *((str(rank), *row) for rank, row in enumerate(each))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return visible("\n".join([*lines, *_lines_below(inventory)]))


def _html(each: Iterable[Sequence[str]], inventory: Inventory | None) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in HEAD)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>"
        for row in ((str(rank), *row) for rank, row in enumerate(each))
    )
    below = "<br>".join(map(escape, _lines_below(inventory)))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p>{below}</p>"


def _lines_below(inventory: Inventory | None) -> list[str]:
    if inventory is None:
        return []
    fake = [f"no real machine: {inventory.fake}"] if inventory.fake else []
    return [*fake, f"decided by: {inventory.decided_by}", *inventory.notes]
