"""What torch and the driver say of this machine's devices. No CUDA context is started."""

from __future__ import annotations

import os
import subprocess
from functools import cache

from mpkit.devices.local.inventory import Inventory, LocalDevice, inventory_of_gpus, unnamed_devices
from mpkit.devices.local.nvidia_smi import QUERY, parse_gpus

__all__ = ["inventory_of"]


def inventory_of(kind: str) -> Inventory | None:
    """Return what torch sees of a kind of accelerator; None if there is none."""
    count = _count(kind)
    if not count:
        return None
    if kind == "cuda":
        return _gpus(count)
    if kind == "mps":
        return Inventory("mps", (LocalDevice("Apple GPU"),))
    return unnamed_devices(kind, count, os.environ)


def _count(kind: str) -> int:
    import torch

    if kind == "mps":
        return int(torch.backends.mps.is_available())
    module = getattr(torch, kind, None)  # torch.hpu is there once habana_frameworks has been imported
    return int(module.device_count()) if module is not None and hasattr(module, "device_count") else 0


def _gpus(count: int) -> Inventory:
    import torch

    if torch.version.hip:
        return unnamed_devices("cuda", count, os.environ)
    try:
        gpus = parse_gpus(_nvidia_smi())
    except ValueError:  # an old driver, whose nvidia-smi lacks a column
        gpus = []
    if not gpus:
        note = "nvidia-smi does not tell names and memory; `mpkit doctor` has the reason"
        return unnamed_devices("cuda", count, os.environ, (note,))
    return inventory_of_gpus(gpus, os.environ, count)


@cache
def _nvidia_smi() -> str:
    """Return what nvidia-smi prints; "" where it is missing, fails, or does not answer: then nothing is known."""
    try:
        done = subprocess.run(QUERY, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=5.0)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
