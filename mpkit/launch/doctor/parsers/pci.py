"""`lspci -vv`: lanes and generation of PCI Express, what each card and its slot could do and what they do.

A card's LnkCap says what the card could do, its LnkSta what the link does now; the LnkCap of the bridge above it says
what the slot could do. The speed may be low while the card is idle, since it saves power; the width does not change.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["LANE_RATES", "PciGpu", "PciLink", "parse_pci"]

LANE_RATES = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Bytes per second per lane and direction, by generation: the transfer rate less its encoding (8b/10b up to
generation 2, 128b/130b from 3 on, flits in 6). PCI Express Base Specification."""

_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}  # by GT/s
_DISPLAYS = ("VGA compatible controller", "3D controller", "Display controller", "Processing accelerators")


@dataclass(frozen=True)
class PciLink:
    """A generation of PCI Express and a number of lanes."""

    generation: int
    lanes: int

    @property
    def rate(self) -> float:
        """Bytes per second in one direction."""
        return LANE_RATES[self.generation] * self.lanes

    def __str__(self) -> str:
        return f"PCIe {self.generation} x{self.lanes}"


@dataclass(frozen=True)
class PciGpu:
    """A GPU on the PCI bus.

    Attributes:
        address: such as "01:00.0".
        name: what lspci calls it.
        card: what the card could do; None where lspci does not say (it takes root in some containers).
        now: what the link does now.
        slot: what the bridge above it could do; None where there is no such bridge, as in virtual machines.
    """

    address: str
    name: str
    card: PciLink | None
    now: PciLink | None
    slot: PciLink | None = None


def parse_pci(
    text: str, vendors: tuple[str, ...] = ("NVIDIA", "AMD", "Advanced Micro Devices", "Intel")
) -> list[PciGpu]:
    """Read the GPUs that lspci lists, with the slots above them.

    Args:
        text: the output of `lspci -vv`, of all devices, since the bridges are needed too.
        vendors: whose devices count.

    >>> [card] = parse_pci('''01:00.0 VGA compatible controller: NVIDIA Corporation TU102 [TITAN RTX] (rev a1)
    ...         LnkCap: Port #0, Speed 8GT/s, Width x16, ASPM L0s L1
    ...         LnkSta: Speed 2.5GT/s (downgraded), Width x8 (downgraded)''')
    >>> card.name, str(card.card), str(card.now), card.slot
    ('TU102 [TITAN RTX]', 'PCIe 3 x16', 'PCIe 1 x8', None)
    """
    blocks = [block for block in re.split(r"\n(?=[0-9a-f]{2,4}[:.])", text.strip("\n")) if block.strip()]
    bridges = _bridges(blocks)
    found = []
    for block in blocks:
        head = re.match(
            r"^((?:[0-9a-f]{4,}:)?([0-9a-f]{2}):[0-9a-f]{2}\.\d) ([^:\[]+?)(?: \[\w+\])?: (.*)", block
        )
        if head is None or head[3] not in _DISPLAYS:
            continue
        vendor = next((name for name in vendors if head[4].startswith(name)), None)
        if vendor is None or (vendor == "Intel" and head[3] == "VGA compatible controller"):
            continue  # an Intel CPU's own graphics computes nothing here
        name = re.sub(r" \(rev .*| \(prog-if.*", "", head[4])
        name = re.sub(r"^\S+(?: Micro Devices, Inc\. \[AMD/ATI\]| Corporation)? ", "", name)
        domain = head[1].rpartition(":" + head[2])[0] if head[1].count(":") == 2 else ""
        found.append(
            PciGpu(
                head[1], name, _link(block, "LnkCap"), _link(block, "LnkSta"), bridges.get((domain, head[2]))
            )
        )
    return found


def _bridges(blocks: list[str]) -> Mapping[tuple[str, str], PciLink]:
    """Return what each bridge could do, by the domain and number of the bus below it."""
    found = {}
    for block in blocks:
        below = re.search(r"secondary=([0-9a-f]{2})", block)
        link = _link(block, "LnkCap")
        if below is not None and link is not None:
            domain = re.match(r"^([0-9a-f]{4,}):[0-9a-f]{2}:", block)
            found[domain[1] if domain else "", below[1]] = link
    return found


def _link(block: str, line: str) -> PciLink | None:
    match = re.search(rf"{line}:.*?Speed ([\d.]+)GT/s(?: \([^)]*\))?, Width x(\d+)", block)
    if match is None or not int(match[2]) or float(match[1]) not in _GENERATIONS:
        return None
    return PciLink(_GENERATIONS[float(match[1])], int(match[2]))
