"""Which machine of the catalogue a trace was recorded on, by the name of its GPU."""

from __future__ import annotations

from mpkit.devices.catalogue import hardware

__all__ = ["machine_of"]

_GPUS = (
    ("H200", "8x-h200-nvlink"), ("H100 PCIe", "8x-h100-pcie"), ("H100", "8x-h100-nvlink"), ("GB300", "8x-gb300-nvlink"),
    ("B300", "8x-b300-nvlink"), ("GB200", "8x-gb200-nvlink"), ("B200", "8x-b200-nvlink"), ("MI300X", "8x-mi300x"),
    ("L40S", "8x-l40s"), ("V100-PCIE", "2x-v100-pcie"), ("V100", "2x-v100-nvlink"),
    ("A100-SXM4-40GB", "8x-a100-40-nvlink"), ("A100-SXM4-80GB", "8x-a100-nvlink"), ("A100-PG509", "8x-a100-40-nvlink"),
    ("A100-PCIE", "8x-a100-pcie"), ("A100 80GB PCIe", "8x-a100-pcie"), ("A10G", "4x-a10g"), ("Tesla T4", "4x-t4"),
    ("RTX 5090", "2x-rtx-5090"), ("RTX 4090", "2x-rtx-4090"), ("RTX 3090", "2x-rtx-3090"),
    ("TITAN RTX", "2x-titan-rtx"),
)  # fmt: skip
"""Words in the names that drivers give to GPUs, and the machine with that GPU; the first that fits counts."""


def machine_of(device: str) -> str:
    """Return the name of a machine with this GPU; the GPU's own name if the catalogue has none, "cpu" without one.

    >>> machine_of("NVIDIA H100 80GB HBM3"), machine_of("NVIDIA A100-PG509-200"), machine_of("")
    ('8x-h100-nvlink', '8x-a100-40-nvlink', 'cpu')
    """
    known = next((machine for words, machine in _GPUS if words in device), device or "cpu")
    return known if known in hardware() else device
