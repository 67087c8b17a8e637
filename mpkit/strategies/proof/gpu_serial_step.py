"""Beside the ranks: the serial step is repeated on the GPU of the last rank, with the kernels that the ranks use.

take      what is free on the GPU, less what the ranks may still need
compute   on the GPU
return    everything: weights and states wait in this process's memory for the next step that is verified
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mpkit.strategies.reference.serial import Serial

__all__ = ["on_device"]

LEFT = 0.05
"""The share of the GPU's memory that is left to the ranks, which may still grow."""


@contextmanager
def on_device(device: torch.device, serial: Serial) -> Iterator[None]:
    """Have a serial training on a device inside the block; afterwards it is in this process's memory.

    Raises:
        torch.OutOfMemoryError: the ranks leave too little.
    """
    if device.type == "cpu":
        yield
        return
    # ---- take
    free, total = torch.cuda.mem_get_info(device)
    before = torch.cuda.get_per_process_memory_fraction(device)
    ours = torch.cuda.memory_reserved(device) + free
    torch.cuda.set_per_process_memory_fraction(max(0.0, ours / total - LEFT), device)
    try:
        # ---- compute
        _move(serial, device)
        yield
    finally:
        # ---- return
        _move(serial, torch.device("cpu"))
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(before, device)


def _move(serial: Serial, device: torch.device) -> None:
    serial.model.to(device).zero_grad()
    if isinstance(serial.loss, nn.Module):
        serial.loss.to(device)
    for weight in serial.weights.values():
        weight.data, weight.grad = weight.data.to(device), None
    steps = any(group.get("fused") or group.get("capturable") for group in serial.optimizer.param_groups)
    for state in serial.optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and (value.dim() or steps):
                state[key] = value.to(device)
