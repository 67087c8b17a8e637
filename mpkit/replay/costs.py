"""Which machine a trace is replayed on, and what its ops take there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit.catalogue import hardware as find
from mpkit.devices import Device, Hardware
from mpkit.trace import Kind

__all__ = ["machine"]

Array = npt.NDArray[Any]
Cost = Callable[[Array], Array]
"""Seconds of compute that each op of (n,) of `OP` takes."""


def machine(wanted: Hardware | str | None, meta: Mapping[str, Any]) -> tuple[Hardware, Cost, list[str]]:
    """The hardware to replay on, the cost of an op there, and what a reader should know about it.

    With no hardware, or "cpu" for a run on CPUs, an op takes what it took in the run.
    """
    on_gpu = meta.get("device") == "cuda"
    own = find("cpu")
    measured = _on_gpu if on_gpu else _on_cpu
    if wanted is None:
        return own, measured, [f"Messages take what {own.link.name} is assumed to take."]
    chosen = find(wanted)
    if chosen.device == own.device and not on_gpu:
        return chosen, measured, []
    dtype = str(meta.get("dtype", "float32"))
    notes = [
        f"Compute is modelled for {chosen.device.name}: FLOPs at {chosen.device.rate(dtype) / 1e12:,.3g} TFLOP/s "
        f"or bytes at {chosen.device.bandwidth / 1e9:,.0f} GB/s, whichever takes longer; ops of unknown FLOPs take "
        "their measured time, scaled by the rates of the two devices. Starting a kernel takes no time here."
    ]
    recorded = find(meta["hardware"]).device if on_gpu and "hardware" in meta else own.device
    scale = recorded.rate(dtype) / chosen.device.rate(dtype)

    def modelled(ops: Array) -> Array:
        return _roofline(ops, chosen.device, dtype, measured(ops) * scale)

    return chosen, modelled, notes


def _on_cpu(ops: Array) -> Array:
    """The CPU time that the rank's thread used: on a core of its own it would have taken that long."""
    used = np.where(ops["kind"] < 32, ops["cpu"], ops["end"] - ops["start"])
    return used * 1e-9


def _on_gpu(ops: Array) -> Array:
    """The time between the CUDA events around it."""
    return (ops["end"] - ops["start"]) * 1e-9  # type: ignore[no-any-return]


def _roofline(ops: Array, device: Device, dtype: str, otherwise: Array) -> Array:
    flops, nbytes, kind = ops["flops"], ops["bytes"], ops["kind"]
    known = (flops > 0) | ((kind == Kind.OPTIMIZER) & (nbytes > 0))
    seconds = np.maximum(flops / device.rate(dtype), nbytes / device.bandwidth)
    copies = (kind >= 64) & (nbytes > 0)
    return np.where(copies, nbytes / device.host, np.where(known, seconds, otherwise))
