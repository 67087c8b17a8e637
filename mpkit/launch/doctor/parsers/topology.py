"""How GPUs are connected, as nvidia-smi prints it.

    topo -m          how each pair of GPUs is connected, and which CPUs are near each GPU
    topo -p2p r      which GPUs can read each other's memory directly
    nvlink --status  the NVLinks of each GPU, and how fast each of them is in one direction

The matrix of `topo -m` has a column for each GPU and, on machines with network cards, for each of these; behind them
the CPUs and the NUMA node that are near. Its letters, from near to far, as its own legend explains them:

    NV#   # NVLinks, bonded
    PIX   one PCIe bridge at most
    PXB   several PCIe bridges, without the CPU's host bridge
    PHB   the CPU's PCIe host bridge
    NODE  several host bridges of one NUMA node
    SYS   the link between CPUs (QPI, UPI, Infinity Fabric)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = [
    "ACROSS_CPU",
    "FAR_TO_NEAR",
    "WHY_NOT",
    "NvLinks",
    "Topology",
    "parse_nvlink",
    "parse_p2p",
    "parse_topology",
]


FAR_TO_NEAR = ("SYS", "NODE", "PHB", "PXB", "PIX", "NV")
"""Kinds of connection; a GPU pair of a kind is nearer than one of an earlier kind."""

ACROSS_CPU = ("SYS", "NODE", "PHB", "SOC")
"""Connections on which data passes through a CPU."""

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_CELL = re.compile(r"^(X|NV\d+|PIX|PXB|PHB|NODE|SYS|SOC|N/A)$")


@dataclass(frozen=True)
class Topology:
    """The connections between GPUs.

    Attributes:
        gpus: the number of GPUs.
        links: by pair of GPUs (a < b), the letters, such as "NV4" or "SYS".
        cpus: for each GPU, the CPUs near it, as printed ("0-23,48-71"); "" where it is not said.
        numa: for each GPU, its NUMA node; "" where it is not said.
        network_cards: how many network cards the matrix has.
    """

    gpus: int
    links: Mapping[tuple[int, int], str]
    cpus: tuple[str, ...]
    numa: tuple[str, ...]
    network_cards: int

    def kind(self, a: int, b: int) -> str:
        """Return the letters of a pair without the number of NVLinks."""
        link = self.links[min(a, b), max(a, b)]
        return "NV" if link.startswith("NV") else link

    def nvlinks(self, a: int, b: int) -> int:
        """Return the number of NVLinks between two GPUs; 0 if there are none."""
        link = self.links[min(a, b), max(a, b)]
        return int(link[2:]) if link.startswith("NV") else 0

    @property
    def worst(self) -> str:
        """The farthest kind of connection among all pairs; "" for a single GPU."""
        kinds = {self.kind(a, b) for a, b in self.links}
        return next((kind for kind in FAR_TO_NEAR if kind in kinds), "")


def parse_topology(text: str) -> Topology:
    """Read the matrix.

    >>> found = parse_topology('''
    ...         GPU0    GPU1    CPU Affinity    NUMA Affinity
    ... GPU0     X      NV4     0-23            0
    ... GPU1    NV4      X      0-23            0
    ... ''')
    >>> found.links, found.nvlinks(1, 0), found.cpus
    ({(0, 1): 'NV4'}, 4, ('0-23', '0-23'))

    Raises:
        ValueError: there is no matrix of GPUs in the text.
    """
    lines = [_ANSI.sub("", line) for line in text.splitlines()]
    head = next(
        (line.split() for line in lines if re.match(r"^\s*GPU0\s", line + " ") and "X" not in line.split()),
        None,
    )
    rows = {
        int(match[1]): line.split()[1:]
        for line in lines
        if (match := re.match(r"^\s*GPU(\d+)\s+\S", line)) and "X" in line.split()
    }
    if head is None or not rows or sorted(rows) != list(range(len(rows))):
        raise ValueError("nvidia-smi topo -m printed no matrix of GPUs")
    devices = [name for name in head if re.match(r"^(GPU\d+|NIC\d+|mlx\w+|\w*ib\w*\d+|\w+_\d+)$", name)]
    gpus = sum(name.startswith("GPU") for name in devices)
    if gpus != len(rows):
        raise ValueError(f"nvidia-smi topo -m printed {gpus} columns and {len(rows)} rows of GPUs")
    links, near = {}, []
    for a, cells in sorted(rows.items()):
        width = next((i for i, cell in enumerate(cells) if not _CELL.match(cell)), len(cells))
        for b in range(a + 1, gpus):
            links[a, b] = cells[b]
        behind = cells[min(width, len(devices)) :]
        near.append([cell for cell in behind if cell != "N/A"])
    return Topology(
        gpus,
        links,
        tuple(cells[0] if cells else "" for cells in near),
        tuple(cells[1] if len(cells) > 1 else "" for cells in near),
        len(devices) - gpus,
    )


WHY_NOT = {
    "CNS": "the chipset does not support it",
    "GNS": "the GPU does not support it (GeForce cards since the 4090)",
    "TNS": "the topology does not support it",
    "NS": "it is not supported",
    "DR": "the driver's registry key disables it",
    "U": "unknown",
}
"""What the matrix's own legend says, by its letters."""


def parse_p2p(text: str) -> Mapping[tuple[int, int], str]:
    """Read the matrix: by pair of GPUs (a < b), "OK" or one of `WHY_NOT`.

    >>> parse_p2p('''        GPU0    GPU1
    ...  GPU0   X       GNS
    ...  GPU1   GNS     X ''')
    {(0, 1): 'GNS'}

    Raises:
        ValueError: there is no matrix in the text.
    """
    rows: dict[int, list[str]] = {}
    for line in text.splitlines():
        cells = line.split()
        if len(cells) > 1 and (match := re.fullmatch(r"GPU(\d+)", cells[0])) and "X" in cells[1:]:
            rows[int(match[1])] = cells[1:]
    if not rows:
        raise ValueError("nvidia-smi topo -p2p printed no matrix of GPUs")
    return {(a, b): cells[b] for a, cells in sorted(rows.items()) for b in range(a + 1, len(rows))}


@dataclass(frozen=True)
class NvLinks:
    """The NVLinks of one GPU.

    Attributes:
        gpu: the GPU's index.
        name: its name.
        rates: bytes per second in one direction of each link that is up.
        down: the links that are inactive.
    """

    gpu: int
    name: str
    rates: tuple[float, ...]
    down: tuple[int, ...]


def parse_nvlink(text: str) -> list[NvLinks]:
    """Read the links of each GPU; GPUs that have none are listed without links, or not at all.

    >>> [one] = parse_nvlink('''GPU 0: NVIDIA GeForce RTX 3090 (UUID: GPU-1c)
    ...          Link 0: 14.062 GB/s
    ...          Link 1: <inactive>''')
    >>> one.rates, one.down
    ((14062000000.0,), (1,))
    """
    found: list[NvLinks] = []
    gpu: tuple[int, str] | None = None
    rates: list[float] = []
    down: list[int] = []

    def close() -> None:
        if gpu is not None:
            found.append(NvLinks(*gpu, tuple(rates), tuple(down)))
        rates.clear()
        down.clear()

    for line in text.splitlines():
        if match := re.match(r"^\s*GPU (\d+): (.*?)(?: \(UUID.*)?$", line):
            close()
            gpu = int(match[1]), match[2]
        elif match := re.match(r"^\s*Link (\d+): ([\d.]+) GB/s", line):
            rates.append(round(float(match[2]) * 1e9, 3))
        elif match := re.match(r"^\s*Link (\d+): <?inactive>?", line):
            down.append(int(match[1]))
    close()
    return found
