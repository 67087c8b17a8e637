"""The table of GPUs that nvidia-smi prints."""

from __future__ import annotations

import csv
from dataclasses import dataclass

__all__ = ["COLUMNS", "QUERY", "Gpu", "parse_gpus"]

COLUMNS = (
    "index", "name", "uuid", "pci.bus_id", "memory.total", "memory.used", "utilization.gpu",
    "driver_version", "compute_cap", "pcie.link.gen.max", "pcie.link.width.max",
)  # fmt: skip

QUERY = ("nvidia-smi", f"--query-gpu={','.join(COLUMNS)}", "--format=csv,noheader,nounits")
"""The command whose output `parse_gpus` reads."""


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver describes it; None where the driver says N/A.

    Attributes:
        index: its number in PCI bus order, as nvidia-smi counts.
        name, uuid, bus_id: such as "NVIDIA A100-SXM4-80GB", "GPU-5d5b...", "00000000:07:00.0".
        memory, used: bytes in all, and bytes in use by any process.
        busy: percent of the last moments in which it computed.
        driver: the driver's version.
        compute: its compute capability, such as (8, 0).
        generation, lanes: PCI Express as the card and its slot together could do it.
    """

    index: int
    name: str
    uuid: str
    bus_id: str
    memory: int
    used: int
    busy: int | None = None
    driver: str = ""
    compute: tuple[int, int] | None = None
    generation: int | None = None
    lanes: int | None = None


def parse_gpus(text: str) -> list[Gpu]:
    """Read the output of `QUERY`: one line per GPU.

    >>> line = "0, Tesla T4, GPU-0f, 00000000:00:1E.0, 15360, 0, 3, 535.104.05, 7.5, 3, [N/A]"
    >>> [gpu] = parse_gpus(line)
    >>> gpu.name, gpu.memory >> 30, gpu.compute, gpu.lanes
    ('Tesla T4', 15, (7, 5), None)

    Raises:
        ValueError: the text is no such table.
    """
    return [_gpu(row) for row in csv.reader(text.splitlines(), skipinitialspace=True) if row]


def _gpu(row: list[str]) -> Gpu:
    if len(row) != len(COLUMNS) or not row[0].strip().isdecimal():
        raise ValueError(
            f"nvidia-smi printed {', '.join(row)!r} where a row of {len(COLUMNS)} columns was expected"
        )
    value = dict(zip(COLUMNS, map(str.strip, row), strict=True))
    major, _, minor = value["compute_cap"].partition(".")
    return Gpu(
        int(value["index"]), value["name"], value["uuid"], value["pci.bus_id"],
        (_number(value["memory.total"]) or 0) << 20, (_number(value["memory.used"]) or 0) << 20,
        _number(value["utilization.gpu"]), value["driver_version"],
        (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None,
        _number(value["pcie.link.gen.max"]), _number(value["pcie.link.width.max"]),
    )  # fmt: skip


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None
