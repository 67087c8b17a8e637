"""A second forward must not update running means a second time, so it works on copies of the buffers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["spare_buffers"]


@contextmanager
def spare_buffers(module: nn.Module) -> Iterator[None]:
    """Let a module work on copies of its buffers inside the block, so that the buffers themselves do not change."""
    kept = [
        (each, name, buffer)
        for each in module.modules()
        for name, buffer in each._buffers.items()
        if buffer is not None
    ]
    for each, name, buffer in kept:
        each._buffers[name] = buffer.clone()
    try:
        yield
    finally:
        for each, name, buffer in kept:
            each._buffers[name] = buffer
