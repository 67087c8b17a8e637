"""The machine that a trace is replayed on, and how long its ops take there.

on the machine of the run       as long as they took: CPU time, or the time between CUDA events
a dry run on its own device     the modelled cost of their operators, which the trace has as CPU time
on another one                  by the roofline; of unknown FLOPs, the measured time by the rates of both devices
an imported trace on another    its kernels scaled by what bounds them, since it has no FLOPs
"""

from collections import Counter
from collections.abc import Callable, Mapping
from math import inf
from typing import Any, NamedTuple

import numpy as np

from mpkit.common.arrays import Array
from mpkit.common.units import percent, seconds
from mpkit.devices.catalogue import hardware as find
from mpkit.devices.catalogue.machines import check_enough
from mpkit.devices.hardware import Device, Hardware, Link
from mpkit.trace import TIMED_BY_EVENTS, Kind

Cost = Callable[[Array], Array]
"""Seconds of compute that each op of (n,) of `OP` takes."""


class ReplayMachine(NamedTuple):
    """A machine to replay on."""

    hardware: Hardware
    cost: Callable[[int], Cost]  # by rank
    includes_copies: (
        bool  # whether an action's cost includes that of the copies within it, as measured times do
    )
    notes: list[str]  # what a reader should know of the times


def machine_of(wanted: Hardware | str | None, meta: Mapping[str, Any], world_size: int) -> ReplayMachine:
    """Return the machine that is wanted, or that of the run."""
    fake, imported, name = meta.get("fake"), meta.get("imported"), str(meta.get("hardware") or "")
    on_gpu = meta.get("device") in TIMED_BY_EVENTS
    if wanted is not None:
        check_enough(find(wanted), world_size, "timeline")
    elif fake and name not in find():
        raise ValueError(
            f"This trace was played for the hardware {name!r}, which the catalogue does not have: give it, as in "
            "Timeline.of(trace, hardware), or the name of one that it has."
        )
    own = find(name if name in find() else "cpu")
    chosen = own if wanted is None else find(wanted)
    device, dtype = chosen.device, str(meta.get("dtype", "float32"))
    measured = _on_cpu if fake or not on_gpu else _launched_time if imported else _on_gpu
    is_known = not on_gpu or name in find()  # an unnamed GPU is like no other
    rates = _in_rates(device, dtype)
    scale = own.device.rate(dtype) / device.rate(dtype) if is_known and not fake else 1.0

    def modelled(ops: Array) -> Array:
        took = measured(ops)
        # Reading data takes equally long with another device.
        return _roofline(ops, device, dtype, np.where(ops["kind"] == Kind.DATA, took, took * scale))

    if fake:
        is_own = device.name == fake["device"]
        note = (
            f"Played on tensors without content, {len(fake['played'])} of {world_size} ranks for all; "
            f"{'operator by operator' if is_own else 'whole actions'} on {rates}; {_in_words(chosen.link)}."
        )
        cost = measured if is_own else modelled
        return ReplayMachine(chosen, lambda _: cost, is_own, [note])
    if wanted is None or (is_known and device == own.device):
        what = "GPU" if on_gpu else "core"
        # Of the machine of the run nothing was asked: `Timeline.basis` says what is assumed.
        asked = [f"Each rank on a {what} of its own; {_in_words(chosen.link)}."] * (wanted is not None)
        return ReplayMachine(chosen, lambda _: measured, True, asked)
    if imported is None:
        scaled = ", scaled by the rates of the two devices" * is_known
        note = (
            f"Compute is modelled for {rates}; ops of unknown FLOPs take their measured time{scaled}. Starting a "
            "kernel takes no time here."
        )
        return ReplayMachine(chosen, lambda _: modelled, False, [note])
    bounds = imported.get("bounds", [])
    if not on_gpu or name not in find() or not any(bounds):
        where = "a CPU" if name == "cpu" else name or "an unknown device"
        note = (
            f"Compute is not modelled for {device.name}: it was recorded on {where}, which is not in the catalogue, so "
            f"it takes its measured time. Only communication is that of the other machine; {_in_words(chosen.link)}."
        )
        return ReplayMachine(chosen, lambda _: _launched_time, True, [note])
    return ReplayMachine(
        chosen, lambda rank: _scaled(bounds[rank], own.device, device), True, [_scaling(bounds, own, chosen)]
    )


def _scaling(bounds: list[Mapping[str, Mapping[str, int]]], own: Hardware, chosen: Hardware) -> str:
    """Say how imported kernels are scaled to another device, and which shares of their time."""
    sums = sum((Counter(each) for kinds in bounds for each in kinds.values()), Counter[str]())
    listed = (f"{percent(ns / sums.total())} {_BOUND.get(bound, bound)}" for bound, ns in sums.most_common())
    return (
        f"Each kernel is scaled from {own.device.name} to {chosen.device.name} by what bounds it: products by the "
        f"rates in their dtype, other kernels by the memories' bandwidth "
        f"({', '.join(listed) or 'all of them took 0 s'}). Starting a kernel takes as long as it took."
    )


_BOUND = {"memory": "bound by memory", "fixed": "the same anywhere", "bfloat16": "products in 16 bits"}


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


# ---- costs


def _on_cpu(ops: Array) -> Array:
    """Return the CPU time of the rank's thread, which an op would take on a core of its own."""
    return np.where(ops["kind"] < 32, ops["cpu"], ops["end"] - ops["start"]) * 1e-9


def _on_gpu(ops: Array) -> Array:
    """Return the time between the CUDA events around each op."""
    return (ops["end"] - ops["start"]) * 1e-9  # type: ignore[no-any-return]


def _launched_time(ops: Array, scale: Array | None = None) -> Array:
    """Return the time of an imported trace's kernels, scaled by kind, plus the time in which they stood still."""
    still = np.where(ops["kind"] < Kind.WAIT, ops["value"], 0.0)
    return _on_cpu(ops) * (1.0 if scale is None else scale[ops["kind"]]) + still


def _scaled(kinds: Mapping[str, Mapping[str, int]], own: Device, other: Device) -> Cost:
    """Return the cost of imported ops on another device, by what bounds the kernels of each kind of action."""
    scale = np.ones(256)
    for kind in Kind:
        sums = kinds.get(kind.word, {})
        factors = {
            bound: 1.0 if bound == "fixed"
            else own.bandwidth / other.bandwidth if bound == "memory"
            else own.rate(bound) / other.rate(bound)
            for bound in sums
        }  # fmt: skip
        if whole := sum(sums.values()):
            scale[kind] = sum(ns * factors[bound] for bound, ns in sums.items()) / whole
    return lambda ops: _copied(ops, other, _launched_time(ops, scale))


def _roofline(ops: Array, device: Device, dtype: str, otherwise: Array) -> Array:
    flops, nbytes = ops["flops"], ops["bytes"]
    known = (flops > 0) | ((ops["kind"] == Kind.OPTIMIZER) & (nbytes > 0))
    took = np.maximum(flops / device.rate(dtype), nbytes / device.bandwidth)
    return _copied(ops, device, np.where(known, took, otherwise))


def _copied(ops: Array, device: Device, otherwise: Array) -> Array:
    """Return the time of copies over a device's bus to its host; of other ops, `otherwise`."""
    copies = (ops["kind"] >= Kind.COPY_TO_DEVICE) & (ops["kind"] < Kind.DATA) & (ops["bytes"] > 0)
    return np.where(copies, ops["bytes"] / device.host, otherwise)
