"""The machine that a trace is replayed on, and how long its ops take there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit.common.units import percent, seconds
from mpkit.devices.catalogue import hardware as find
from mpkit.devices.catalogue.machines import check_enough
from mpkit.devices.hardware import Device, Hardware, Link
from mpkit.trace import TIMED_BY_EVENTS, Kind

__all__ = ["MEASURED", "machine"]

Array = npt.NDArray[Any]
Cost = Callable[[Array], Array]
"""Seconds of compute that each op of (n,) of `OP` takes."""

CostOf = Callable[[int], Cost]
"""The cost of ops on a rank's device."""


def machine(
    wanted: Hardware | str | None, meta: Mapping[str, Any], world_size: int
) -> tuple[Hardware, CostOf, list[str]]:
    """Return the hardware to replay on, the cost of an op there by rank, and what a reader should know about it.

    On the machine of the run (no hardware is given, or "cpu" for a run on CPUs) an op takes as long as it took. On
    other hardware its time is modelled.

    Raises:
        ValueError: it has fewer devices than there are ranks.
    """
    if wanted is not None:
        check_enough(find(wanted), world_size, "timeline")
    if "fake" in meta:
        return _machine_of_fake(wanted, meta, world_size)
    on_gpu = meta.get("device") in TIMED_BY_EVENTS
    measured = (_launched_time if "imported" in meta else _on_gpu) if on_gpu else _on_cpu
    own = find(meta["hardware"] if meta.get("hardware") in find() else "cpu")
    chosen = own if wanted is None else find(wanted)
    is_known = not on_gpu or meta.get("hardware") in find()  # an unnamed GPU is like no other
    if wanted is None or (is_known and chosen.device == own.device):
        what = "GPU" if on_gpu else "core"
        # Of the machine of the run nothing was asked: `Timeline.basis` says what is assumed.
        asked = [f"Each rank on a {what} of its own; {_in_words(chosen.link)}."] * (wanted is not None)
        return chosen, lambda rank: measured, asked
    if "imported" in meta:
        return _machine_of_imported(chosen, own.device, meta)
    dtype = str(meta.get("dtype", "float32"))
    notes = [
        f"Compute is modelled for {_in_rates(chosen.device, dtype)}; ops of unknown FLOPs take "
        f"their measured time{', scaled by the rates of the two devices' if is_known else ''}. Starting a kernel takes "
        "no time here."
    ]

    scale = own.device.rate(dtype) / chosen.device.rate(dtype) if is_known else 1.0

    def cost(ops: Array) -> Array:
        took = measured(ops)
        # Reading data takes equally long with another device.
        return _roofline(ops, chosen.device, dtype, np.where(ops["kind"] == Kind.DATA, took, took * scale))

    return chosen, lambda rank: cost, notes


def _machine_of_imported(
    chosen: Hardware, own: Device, meta: Mapping[str, Any]
) -> tuple[Hardware, CostOf, list[str]]:
    """Do the same as `machine` for an imported trace on other hardware: kernels scale by what bounds them.

    A kernel's time is known and its FLOPs are not; so it takes as much longer as the other device is slower at what
    bounds it. Without kernels, or of a device that the catalogue does not have, nothing can be scaled.
    """
    bounds = meta["imported"].get("bounds", [])
    if meta.get("device") not in TIMED_BY_EVENTS or meta.get("hardware") not in find() or not any(bounds):
        where = "a CPU" if meta.get("hardware") == "cpu" else str(meta.get("hardware") or "an unknown device")
        notes = [
            f"Compute is not modelled for {chosen.device.name}: it was recorded on {where}, which is not in the "
            "catalogue, so it takes its measured time. Only communication is that of the other machine; "
            f"{_in_words(chosen.link)}."
        ]
        return chosen, lambda rank: _launched_time, notes

    def model_cost(rank: int) -> Cost:
        device = chosen.device
        scale = _scales(bounds[rank], own, device)

        def cost(ops: Array) -> Array:
            took = _on_cpu(ops) * scale[ops["kind"]] + _by_host(ops)
            copies = (ops["kind"] >= Kind.COPY_TO_DEVICE) & (ops["kind"] < Kind.DATA) & (ops["bytes"] > 0)
            return np.where(copies, ops["bytes"] / device.host, took)

        return cost

    sums = sum((Counter(each) for kinds in bounds for each in kinds.values()), Counter[str]())
    listed = (f"{percent(ns / sums.total())} {_BOUND.get(bound, bound)}" for bound, ns in sums.most_common())
    shares = ", ".join(listed) or "all of them took 0 s"
    notes = [
        f"Each kernel is scaled from {own.name} to {chosen.device.name} by what bounds it: products by the "
        f"rates in their dtype, other kernels by the memories' bandwidth ({shares}). Starting a kernel takes "
        "as long as it took."
    ]
    return chosen, model_cost, notes


_BOUND = {"memory": "bound by memory", "fixed": "the same anywhere", "bfloat16": "products in 16 bits"}


def _scales(kinds: Mapping[str, Mapping[str, int]], own: Device, other: Device) -> Array:
    """Return how many times as long an action of each kind takes on the other device, (256,)."""
    scale = np.ones(256)
    for kind in Kind:
        sums = kinds.get(kind.word, {})
        factors = {
            bound: 1.0 if bound == "fixed"
            else own.bandwidth / other.bandwidth if bound == "memory"
            else own.rate(bound) / other.rate(bound)
            for bound in sums
        }  # fmt: skip
        whole = sum(sums.values())
        if whole:
            scale[kind] = sum(ns * factors[bound] for bound, ns in sums.items()) / whole
    return scale


def _machine_of_fake(
    wanted: Hardware | str | None, meta: Mapping[str, Any], world_size: int
) -> tuple[Hardware, CostOf, list[str]]:
    """Do the same as `machine` for a trace of tensors without content, whose ops have the modelled cost of their
    operators.
    """
    own: str = meta["hardware"]
    if wanted is None and own not in find():
        raise ValueError(
            f"This trace was played for the hardware {own!r}, which the catalogue does not have: give it, as in "
            "Timeline.of(trace, hardware), or the name of one that it has."
        )
    chosen = find(own if wanted is None else wanted)
    dtype = str(meta.get("dtype", "float32"))
    is_own = chosen.device.name == meta["fake"]["device"]
    note = (
        f"Played on tensors without content, {len(meta['fake']['played'])} of {world_size} ranks for all; "
        f"{'operator by operator' if is_own else 'whole actions'} on {_in_rates(chosen.device, dtype)}; "
        f"{_in_words(chosen.link)}."
    )

    def cost(ops: Array) -> Array:
        return _roofline(ops, chosen.device, dtype, _on_cpu(ops))

    return chosen, lambda rank: _on_cpu if is_own else cost, [note]


def _in_rates(device: Device, dtype: str) -> str:
    return (
        f"{device.name}: FLOPs at {device.rate(dtype) / 1e12:,.3g} TFLOP/s or bytes at "
        f"{device.bandwidth / 1e9:,.0f} GB/s, whichever takes longer"
    )


def _in_words(link: Link) -> str:
    sources = " ".join(link.sources.values())
    known = " (assumed)" if "assumed" in sources else ""
    if "loopback.csv" in sources:
        known = " (measured on the kit's test machine)"
    rate = "" if link.bandwidth == inf else f" and {link.bandwidth / 1e9:.3g} GB/s"
    return f"messages over {link.name} take {seconds(link.latency)}{rate}{known}"


def _on_cpu(ops: Array) -> Array:
    """Return the CPU time that the rank's thread used, which is what it would have taken on a core of its own."""
    used = np.where(ops["kind"] < 32, ops["cpu"], ops["end"] - ops["start"])
    return used * 1e-9


def _on_gpu(ops: Array) -> Array:
    """Return the time between the CUDA events around each op."""
    return (ops["end"] - ops["start"]) * 1e-9  # type: ignore[no-any-return]


def _launched_time(ops: Array) -> Array:
    """Return the time that kernels of an imported trace took, and that an action stood still for its host."""
    return _on_cpu(ops) + _by_host(ops)


def _by_host(ops: Array) -> Array:
    """Return the seconds in which an imported action stood still since its host had launched nothing."""
    return np.where(ops["kind"] < Kind.WAIT, ops["value"], 0.0)


MEASURED = (_on_cpu, _on_gpu, _launched_time)
"""The costs that are measured; any other is modelled."""


def _roofline(ops: Array, device: Device, dtype: str, otherwise: Array) -> Array:
    flops, nbytes, kind = ops["flops"], ops["bytes"], ops["kind"]
    known = (flops > 0) | ((kind == Kind.OPTIMIZER) & (nbytes > 0))
    seconds = np.maximum(flops / device.rate(dtype), nbytes / device.bandwidth)
    copies = (kind >= Kind.COPY_TO_DEVICE) & (kind < Kind.DATA) & (nbytes > 0)
    return np.where(copies, nbytes / device.host, np.where(known, seconds, otherwise))
