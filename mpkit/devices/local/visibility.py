"""Which GPUs a program sees, in which order: CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER, as CUDA reads them.

CUDA reads CUDA_VISIBLE_DEVICES from the left: indices or the beginnings of UUIDs, with commas between. The first entry
that is no GPU ends the list, and all entries behind it are dropped without a word; "" and "-1" hide every GPU; if a GPU
is named twice, none is visible. Indices count in the order of CUDA_DEVICE_ORDER: FASTEST_FIRST (CUDA's default, its
own guess) or PCI_BUS_ID (nvidia-smi's order).

Source: CUDA C++ Programming Guide, appendix "CUDA Environment Variables".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpkit.devices.local.nvidia_smi import Gpu

__all__ = ["VisibleGpus", "visible"]

ORDERS = ("FASTEST_FIRST", "PCI_BUS_ID")


@dataclass(frozen=True)
class VisibleGpus:
    """The GPUs that a program sees.

    Attributes:
        gpus: in CUDA's order: cuda:0 first.
        decided_by: the variable that decided, with its value, or that none is set.
        wrong: what in the variables has another effect than its writer may think.
        notes: what may surprise and is not wrong.
        fix: a value that would have the effect that was meant.
    """

    gpus: tuple[Gpu, ...]
    decided_by: str
    wrong: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    fix: str = ""


def visible(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> VisibleGpus:
    """Return the GPUs that the environment lets a program see.

    >>> cards = [Gpu(i, "T4", f"GPU-{i}a", f"0{i}", 16 << 30, 0) for i in range(4)]
    >>> seen = visible(cards, {"CUDA_VISIBLE_DEVICES": "2,0"})
    >>> [gpu.index for gpu in seen.gpus], seen.decided_by
    ([2, 0], 'CUDA_VISIBLE_DEVICES=2,0')
    >>> visible(cards, {"CUDA_VISIBLE_DEVICES": "1,7,2"}).wrong[0][:48]
    'CUDA_VISIBLE_DEVICES=1,7,2 names 7, which is no '
    """
    ordered, notes, wrong = _order_gpus(gpus, environment)
    if "CUDA_VISIBLE_DEVICES" not in environment:
        return VisibleGpus(ordered, "no variable is set: all GPUs are visible", wrong, notes)
    given = environment["CUDA_VISIBLE_DEVICES"]
    decided = f"CUDA_VISIBLE_DEVICES={given}"
    if given.strip() in ("", "-1"):
        return VisibleGpus(
            (), decided, wrong, (*notes, f"{decided or 'CUDA_VISIBLE_DEVICES='} hides every GPU")
        )
    seen: list[Gpu] = []
    fix = ""
    entries = [entry.strip() for entry in given.split(",")]
    for entry in entries:
        gpu = _gpu(ordered, entry)
        if gpu is None:
            why = _why_not(entry, len(gpus))
            wrong += (f"{decided} names {entry or 'nothing'}, {why}: CUDA drops it and all behind it.",)
            break
        seen.append(gpu)
    if len({gpu.uuid for gpu in seen}) < len(seen):
        wrong += (f"{decided} names a GPU twice: CUDA then shows none at all.",)
        seen = []
    if wrong:
        valid = list(dict.fromkeys(entry for entry in entries if _gpu(ordered, entry) is not None))
        fix = f"CUDA_VISIBLE_DEVICES={','.join(valid) or '0'} python train.py"
    return VisibleGpus(tuple(seen), decided, wrong, notes, fix)


def _why_not(entry: str, gpus: int) -> str:
    if entry.isdecimal():
        return f"which is no GPU here (there are 0 to {gpus - 1})"
    return "which is no GPU's UUID" if entry.startswith("GPU-") else "which is neither an index nor a UUID"


Ordered = tuple[tuple[Gpu, ...], tuple[str, ...], tuple[str, ...]]


def _order_gpus(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> Ordered:
    """Return the GPUs in CUDA's order, and what is to be said about the order."""
    order = environment.get("CUDA_DEVICE_ORDER")
    by_bus = tuple(sorted(gpus, key=lambda gpu: gpu.index))
    if order == "PCI_BUS_ID":
        return by_bus, (), ()
    wrong: tuple[str, ...] = ()
    if order is not None and order not in ORDERS:
        wrong = (f"CUDA_DEVICE_ORDER={order} is neither of {' and '.join(ORDERS)}: CUDA ignores it.",)
    if len({gpu.name for gpu in gpus}) < 2:
        return by_bus, (), wrong
    guess = tuple(sorted(by_bus, key=lambda gpu: (gpu.compute or (0, 0), gpu.memory), reverse=True))
    said = "is not set" if order is None else f"is {order}"
    return guess, (
        f"CUDA_DEVICE_ORDER {said} and the GPUs are unlike, so CUDA counts from the one that it takes for the fastest; "
        "the order shown is a guess by compute capability and memory. nvidia-smi's order: "
        "CUDA_DEVICE_ORDER=PCI_BUS_ID python train.py",
    ), wrong  # fmt: skip


def _gpu(ordered: Sequence[Gpu], entry: str) -> Gpu | None:
    """Return the GPU that an entry names: an index, or the beginning of one GPU's UUID."""
    if entry.isdecimal():
        return ordered[int(entry)] if int(entry) < len(ordered) else None
    named = [gpu for gpu in ordered if entry.startswith("GPU-") and gpu.uuid.startswith(entry)]
    return named[0] if len(named) == 1 else None
