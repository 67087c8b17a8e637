"""`nvidia-smi topo -p2p r`: which GPUs can read each other's memory directly."""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["WHY_NOT", "parse_p2p"]

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
