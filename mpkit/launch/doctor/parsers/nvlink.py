"""`nvidia-smi nvlink --status`: the NVLinks of each GPU, and how fast each of them is in one direction."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["NvLinks", "parse_nvlink"]


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
