"""Workspace: what a kernel allocates for itself, and frees before it returns.

Operators are all that a dispatch mode sees, so a kernel's own temporaries are known by rule. There is one for CPUs:
oneDNN computes convolutions on copies of their tensors whose channels lie in blocks of 16 (nChw16c),

    forward     copies of input x, weight w and output y; then y is copied to its plain layout
    backward    of the input: copies of dy, w and dx; of the weight: copies of dy, x and dw, beside the plain dx

An input of less than 16 channels, such as an image, is read as it is, and so is what already has its channels last.
A GPU's convolutions choose among algorithms with workspaces of very different sizes; none is counted for them.

Source: oneDNN developer guide, "Memory Format Propagation" and "Understanding Memory Formats"; sizes as torch.profiler
shows them for torch's CPU build (`benchmarks/memory.py` holds them to it).
"""

from __future__ import annotations

from math import ceil
from typing import Any

import torch
from torch import Tensor

__all__ = ["workspace_of"]

BLOCK = 16


def workspace_of(func: Any, args: tuple[Any, ...], out: Any) -> int:
    """Return the bytes that are held at a kernel's own peak beyond its arguments, its results included.

    >>> x, w = torch.empty(4, 16, 8, 8), torch.empty(32, 16, 1, 1)
    >>> convolution = torch.ops.aten.convolution.default
    >>> given = x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    >>> y = convolution(*given)
    >>> workspace_of(convolution, given, y) == 2 * y.nbytes  # blocked and plain, more than blocked x, w and y
    True

    Args:
        func: the operator.
        args: its arguments.
        out: its results.
    """
    if func is torch.ops.aten.convolution.default:
        x, w, y = args[0], args[1], out
        return max(_blocked(x) + _blocked_weight(w) + _blocked(y), _blocked(y) + int(y.nbytes))
    if func is torch.ops.aten.convolution_backward.default:
        dy, x, w = args[:3]
        wants = args[-1]
        copies = _blocked(dy) + _blocked(x) + _blocked_weight(w)
        dx = int(x.nbytes) if wants[0] else 0
        return copies + dx
    return 0


def _blocked(x: Tensor) -> int:
    """Return the bytes of a copy with blocked channels, (batch, channels, ...); 0 where none is made."""
    if x.shape[1] < BLOCK or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)):
        return 0
    return int(x.nbytes // x.shape[1]) * BLOCK * ceil(x.shape[1] / BLOCK)


def _blocked_weight(w: Tensor) -> int:
    return int(w.nbytes)
