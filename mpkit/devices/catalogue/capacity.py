"""Enough devices: each rank has a device of its own, or the machine is refused, with the name of a larger one."""

from __future__ import annotations

import re

from mpkit.devices.catalogue.machines import device_names
from mpkit.devices.hardware import Hardware

__all__ = ["check_enough", "enough_a100"]

A_NODE = 8


def check_enough(machine: Hardware, ranks: int, call: str) -> None:
    """Check that a machine has a device for each rank.

    Args:
        machine: the machine.
        ranks: the number of ranks.
        call: the call that asks, such as "timeline".

    Raises:
        ValueError: it has fewer.

    >>> from mpkit.devices.catalogue import hardware
    >>> check_enough(hardware("2x-rtx-4090"), 4, "timeline")
    Traceback (most recent call last):
    ...
    ValueError: timeline(hardware='2x-rtx-4090'): 4 ranks, and it has 2 devices. Four of them: hardware='4x-rtx-4090'
    """
    if ranks > machine.devices:
        raise ValueError(
            f"{call}(hardware={machine.name!r}): {ranks} ranks, and it has {machine.devices} device"
            f"{'s' * (machine.devices > 1)}. {_larger(machine, ranks)}"
        )


def enough_a100(ranks: int) -> str:
    """Return the name of a machine of A100 that has a device for each rank.

    >>> enough_a100(4), enough_a100(64)
    ('8x-a100-nvlink', '8x8-a100-hdr')
    """
    return "8x-a100-nvlink" if ranks <= A_NODE else f"{-(-ranks // A_NODE)}x8-a100-hdr"


def _larger(machine: Hardware, ranks: int) -> str:
    """Say which machine of the same devices has enough of them."""
    nodes = -(-ranks // machine.per_node)
    if machine.between is not None:
        return f"More nodes: hardware=dataclasses.replace(mk.hardware({machine.name!r}), nodes={nodes})"
    cards = re.fullmatch(r"(\d+)x-(.+)", machine.name)
    if cards and ranks <= A_NODE:
        number = {3: "Three", 4: "Four", 5: "Five", 6: "Six", 7: "Seven", 8: "Eight"}[ranks]
        return f"{number} of them: hardware='{ranks}x-{cards[2]}'"
    short = [name for name, row in device_names().items() if row["device"] == machine.device.name]
    if short:
        return f"More nodes: hardware=mk.hardware({short[0]!r}, nodes={-(-ranks // A_NODE)}, nic='ndr')"
    return f"A larger machine of your own: dataclasses.replace(hardware, per_node={ranks})"
