"""Inventory: the devices of one kind that torch sees on this machine, in torch's order, and which variable decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mpkit.devices.local.nvidia_smi import Gpu
from mpkit.devices.local.visibility import visible

__all__ = ["HIDERS", "KINDS", "Inventory", "LocalDevice", "inventory_of_gpus", "unnamed_devices"]

KINDS = ("cuda", "xpu", "hpu", "mps")
"""Kinds of accelerators, in the order in which numbers alone are looked up."""

HIDERS: Mapping[str, tuple[str, ...]] = {
    "cuda": ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    "xpu": ("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR"),
    "hpu": ("HABANA_VISIBLE_DEVICES", "HABANA_VISIBLE_MODULES"),
    "mps": (),
}
"""By kind, the variables that choose which devices a program sees."""


@dataclass(frozen=True)
class LocalDevice:
    """A device of this machine.

    Attributes:
        name: such as "NVIDIA A100-SXM4-80GB"; "" where it is not known.
        identity: its UUID, or its bus id; "" where it is not known.
        memory: bytes; 0 where it is not known.
        number: what nvidia-smi counts it as; None where it is not known.
    """

    name: str = ""
    identity: str = ""
    memory: int = 0
    number: int | None = None


@dataclass(frozen=True)
class Inventory:
    """The devices of one kind that torch sees.

    Attributes:
        kind: "cuda", "xpu", "hpu" or "mps".
        devices: in torch's order: cuda:0 first.
        decided_by: the variable that decided which are seen, with its value, or that none is set.
        notes: what may surprise about it.
        fake: what this stands for if it is no real machine; tables say so.
    """

    kind: str
    devices: tuple[LocalDevice, ...]
    decided_by: str = "no variable is set"
    notes: tuple[str, ...] = ()
    fake: str = ""


def inventory_of_gpus(gpus: list[Gpu], environment: Mapping[str, str], seen_by_torch: int) -> Inventory:
    """Return the inventory of NVIDIA GPUs; without names where what torch sees does not fit what the driver lists.

    >>> cards = [Gpu(i, "T4", f"GPU-{i}a", f"0{i}", 16 << 30, 0) for i in range(4)]
    >>> found = inventory_of_gpus(cards, {"CUDA_VISIBLE_DEVICES": "2,0"}, 2)
    >>> [(device.number, device.identity) for device in found.devices], found.decided_by
    ([(2, 'GPU-2a'), (0, 'GPU-0a')], 'CUDA_VISIBLE_DEVICES=2,0')
    """
    seen = visible(gpus, environment)
    if len(seen.gpus) != seen_by_torch:
        note = (
            f"torch sees {seen_by_torch} GPUs, and by nvidia-smi it should see {len(seen.gpus)} "
            f"({seen.decided_by}); mpkit doctor 'gpus not found' looks for the cause"
        )
        return unnamed_devices("cuda", seen_by_torch, environment, (*seen.wrong, note))
    devices = tuple(LocalDevice(gpu.name, gpu.uuid or gpu.bus_id, gpu.memory, gpu.index) for gpu in seen.gpus)
    return Inventory("cuda", devices, seen.decided_by, (*seen.wrong, *seen.notes))


def unnamed_devices(
    kind: str, count: int, environment: Mapping[str, str], notes: tuple[str, ...] = ()
) -> Inventory:
    """Return the inventory of devices of which only the number is known.

    >>> unnamed_devices("xpu", 2, {"ZE_AFFINITY_MASK": "0,1"}).decided_by
    'ZE_AFFINITY_MASK=0,1'
    """
    hiders = [f"{name}={environment[name]}" for name in HIDERS[kind] if name in environment]
    return Inventory(kind, (LocalDevice(),) * count, ", ".join(hiders) or "no variable is set", notes)
