"""The devices of this machine: what nvidia-smi prints, which GPUs a program sees of these, and what torch sees.

No CUDA context is started.

CUDA reads CUDA_VISIBLE_DEVICES from the left: indices or the beginnings of UUIDs, with commas between. The first entry
that is not a GPU ends the list, and CUDA silently drops all entries behind it; "" and "-1" hide every GPU; if an entry
names a GPU twice, none is visible. Indices count in the order of CUDA_DEVICE_ORDER: FASTEST_FIRST (CUDA's default, its
own guess) or PCI_BUS_ID (nvidia-smi's order).

Source: CUDA C++ Programming Guide, appendix "CUDA Environment Variables".
"""

import csv
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class LocalDevice:
    """A device of this machine, as its driver describes it; what is not known keeps its default."""

    number: int | None = None  # nvidia-smi's, in PCI bus order
    name: str = ""  # such as "NVIDIA A100-SXM4-80GB"
    uuid: str = ""  # such as "GPU-5d5b..."
    bus_id: str = ""  # such as "00000000:07:00.0"
    memory: int = 0  # bytes in all
    compute: tuple[int, int] | None = None  # the compute capability, such as (8, 0)

    @property
    def identity(self) -> str:
        """Its UUID, or its bus id; "" where neither is known."""
        return self.uuid or self.bus_id


@dataclass(frozen=True)
class Inventory:
    """The devices of one kind that a program sees."""

    kind: str  # one of KINDS
    devices: tuple[LocalDevice, ...]  # in torch's order: cuda:0 first
    decided_by: str = "no variable is set"  # which variable decides what torch sees, with its value
    notes: tuple[str, ...] = ()  # what may surprise
    wrong: tuple[str, ...] = ()  # the notes about variables that do not have their apparent effect
    fix: str = ""  # a command line whose variable has that effect


# ---- the table of GPUs that nvidia-smi prints

COLUMNS = ("index", "name", "uuid", "pci.bus_id", "memory.total", "compute_cap")

QUERY = ("nvidia-smi", f"--query-gpu={','.join(COLUMNS)}", "--format=csv,noheader,nounits")


def parse_gpus(text: str) -> list[LocalDevice]:
    """Read the output of `QUERY`, one line per GPU, or raise a ValueError.

    >>> [gpu] = parse_gpus("0, Tesla T4, GPU-0f, 00000000:00:1E.0, 15360, 7.5")
    >>> gpu.name, gpu.memory >> 30, gpu.compute
    ('Tesla T4', 15, (7, 5))
    """
    return [_read_row(row) for row in csv.reader(text.splitlines(), skipinitialspace=True) if row]


def _read_row(row: list[str]) -> LocalDevice:
    if len(row) != len(COLUMNS) or not row[0].strip().isdecimal():
        printed = ", ".join(row)
        raise ValueError(f"nvidia-smi printed {printed!r} where a row of {len(COLUMNS)} columns was expected")
    value = dict(zip(COLUMNS, map(str.strip, row), strict=True))
    major, _, minor = value["compute_cap"].partition(".")
    return LocalDevice(
        int(value["index"]), value["name"], value["uuid"], value["pci.bus_id"],
        int(value["memory.total"]) << 20 if value["memory.total"].isdecimal() else 0,
        (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None,
    )  # fmt: skip


# ---- which of them a program sees

ORDERS = ("FASTEST_FIRST", "PCI_BUS_ID")


def visible(gpus: Sequence[LocalDevice], environment: Mapping[str, str]) -> Inventory:
    """Return the GPUs that the environment lets a program see.

    >>> cards = [LocalDevice(i, "T4", f"GPU-{i}a", f"0{i}", 16 << 30) for i in range(4)]
    >>> seen = visible(cards, {"CUDA_VISIBLE_DEVICES": "2,0"})
    >>> [gpu.number for gpu in seen.devices], seen.decided_by
    ([2, 0], 'CUDA_VISIBLE_DEVICES=2,0')
    >>> visible(cards, {"CUDA_VISIBLE_DEVICES": "1,7,2"}).wrong[0][:48]
    'CUDA_VISIBLE_DEVICES=1,7,2 names 7, which is no '
    """
    ordered, notes, wrong = _order_gpus(gpus, environment)
    if "CUDA_VISIBLE_DEVICES" not in environment:
        return Inventory("cuda", ordered, "no variable is set: all GPUs are visible", (*wrong, *notes), wrong)
    given = environment["CUDA_VISIBLE_DEVICES"]
    decided = f"CUDA_VISIBLE_DEVICES={given}"
    if given.strip() in ("", "-1"):
        return Inventory("cuda", (), decided, (*wrong, *notes, f"{decided} hides every GPU"), wrong)
    seen: list[LocalDevice] = []
    fix = ""
    entries = [entry.strip() for entry in given.split(",")]
    for entry in entries:
        gpu = _named_gpu(ordered, entry)
        if gpu is None:
            why = _why_not(entry, len(gpus))
            wrong += (f"{decided} names {entry or 'nothing'}, {why}: CUDA drops it and all behind it.",)
            break
        seen.append(gpu)
    if len({gpu.uuid for gpu in seen}) < len(seen):
        wrong += (f"{decided} names a GPU twice: CUDA then shows none at all.",)
        seen = []
    if wrong:
        valid = list(dict.fromkeys(entry for entry in entries if _named_gpu(ordered, entry) is not None))
        fix = f"CUDA_VISIBLE_DEVICES={','.join(valid) or '0'} python train.py"
    return Inventory("cuda", tuple(seen), decided, (*wrong, *notes), wrong, fix)


def _why_not(entry: str, gpus: int) -> str:
    if entry.isdecimal():
        return f"which is no GPU here (there are 0 to {gpus - 1})"
    return "which is no GPU's UUID" if entry.startswith("GPU-") else "which is neither an index nor a UUID"


Ordered = tuple[tuple[LocalDevice, ...], tuple[str, ...], tuple[str, ...]]


def _order_gpus(gpus: Sequence[LocalDevice], environment: Mapping[str, str]) -> Ordered:
    """Return the GPUs in CUDA's order, and the notes about the order: all, and those about wrong variables."""
    order = environment.get("CUDA_DEVICE_ORDER")
    by_bus = tuple(sorted(gpus, key=lambda gpu: gpu.number or 0))
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


def _named_gpu(ordered: Sequence[LocalDevice], entry: str) -> LocalDevice | None:
    """Return the GPU that an entry names: an index, or the beginning of one GPU's UUID."""
    if entry.isdecimal():
        return ordered[int(entry)] if int(entry) < len(ordered) else None
    named = [gpu for gpu in ordered if entry.startswith("GPU-") and gpu.uuid.startswith(entry)]
    return named[0] if len(named) == 1 else None


# ---- the devices of one kind that torch sees, in its order

KINDS = ("cuda", "xpu", "hpu", "mps")
"""Kinds of accelerators, in the order in which numbers alone are looked up."""

HIDERS: Mapping[str, tuple[str, ...]] = {
    "cuda": ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    "xpu": ("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR"),
    "hpu": ("HABANA_VISIBLE_DEVICES", "HABANA_VISIBLE_MODULES"),
    "mps": (),
}
"""By kind, the variables that choose which devices a program sees."""


def inventory_of_gpus(
    gpus: list[LocalDevice], environment: Mapping[str, str], seen_by_torch: int
) -> Inventory:
    """Return the inventory of NVIDIA GPUs, without names if torch does not see those that the driver lists."""
    seen = visible(gpus, environment)
    if len(seen.devices) == seen_by_torch:
        return seen
    note = (
        f"torch sees {seen_by_torch} GPUs, and by nvidia-smi it should see {len(seen.devices)} "
        f"({seen.decided_by}); mpkit doctor 'gpus not found' looks for the cause"
    )
    return unnamed_devices("cuda", seen_by_torch, environment, (*seen.wrong, note))


def unnamed_devices(
    kind: str, count: int, environment: Mapping[str, str], notes: tuple[str, ...] = ()
) -> Inventory:
    """Return the inventory of devices of which only the number is known."""
    hiders = [f"{name}={environment[name]}" for name in HIDERS[kind] if name in environment]
    return Inventory(kind, (LocalDevice(),) * count, ", ".join(hiders) or "no variable is set", notes)


def inventory_of(kind: str) -> Inventory | None:
    """Return what torch sees of a kind of accelerator; None if there is none."""
    count = _count(kind)
    if not count:
        return None
    if kind == "cuda":
        return _gpus_of(count)
    if kind == "mps":
        return Inventory("mps", (LocalDevice(name="Apple GPU"),))
    return unnamed_devices(kind, count, os.environ)


def _count(kind: str) -> int:
    import torch

    if kind == "mps":
        return int(torch.backends.mps.is_available())
    module = getattr(torch, kind, None)  # torch.hpu is there once habana_frameworks has been imported
    return int(module.device_count()) if module is not None and hasattr(module, "device_count") else 0


def _gpus_of(count: int) -> Inventory:
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
    """Return what nvidia-smi prints; "" if it is missing, fails, or does not answer."""
    try:
        done = subprocess.run(QUERY, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=5.0)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
