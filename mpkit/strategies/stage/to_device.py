"""Copies to the device: what comes from the host is copied, recorded, and counted as activations."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from mpkit.strategies.data.microbatch import Value, leaves, map_tensors
from mpkit.trace import Kind
from mpkit.trace.record.recorder import Recorder

__all__ = ["onto_device", "track"]


def onto_device(value: Value, device: torch.device, record: Recorder) -> Value:
    """Return a copy on the device, which a layer may write into."""
    copies = device.type != "cpu"
    nbytes = sum(tensor.nbytes for tensor in leaves(value))
    op = record.begin(Kind.COPY_TO_DEVICE, nbytes=nbytes) if copies else -1
    copied = map_tensors(lambda t: t.to(device, copy=True, non_blocking=copies and t.is_pinned()), value)
    if copies:
        record.end(op)
    track(leaves(copied), record)
    return copied


def track(tensors: Iterable[Tensor], record: Recorder) -> None:
    """Count the tensors as activations, for as long as they live."""
    for tensor in tensors:
        record.ledger.track(tensor, "activations")
