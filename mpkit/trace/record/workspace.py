"""Workspace: memory that a kernel allocates for itself, and frees before it returns.

A dispatch mode sees only operators, so a kernel's own temporaries are known by rule. There are two rules for CPUs.
oneDNN computes convolutions on copies of their tensors whose channels lie in blocks of 16 (nChw16c),

    forward     copies of input x, weight w and output y; then y is copied to its plain layout
    backward    of the input: copies of dy, w and dx; of the weight: copies of dy, x and dw, beside the plain dx

It reads an input with less than 16 channels, such as an image, or with its channels last, as it is. And its LSTM keeps
gates and states of all steps for the backward, in a workspace that is one of its results; without content it is empty
(`with_workspace`).

A GPU's convolutions choose among algorithms with workspaces of very different sizes; these do not count, nor does
cuDNN's for an LSTM.

Source: oneDNN developer guide, "Memory Format Propagation" and "Understanding Memory Formats"; sizes as torch.profiler
shows them for torch's CPU build (`benchmarks/memory.py` holds them to it).
"""

from math import ceil
from typing import Any

import torch
from torch import Tensor

BLOCK, PAGE = 16, 4096


def workspace_of(func: Any, args: tuple[Any, ...], out: Any) -> int:
    """Return the bytes held at a kernel's own peak beyond its arguments, its results included.

    >>> x, w = torch.empty(4, 16, 8, 8), torch.empty(32, 16, 1, 1)
    >>> convolution = torch.ops.aten.convolution.default
    >>> given = x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    >>> y = convolution(*given)
    >>> workspace_of(convolution, given, y) == 2 * y.nbytes  # blocked and plain, more than blocked x, w and y
    True
    """
    if func is torch.ops.aten.convolution.default:
        x, w, y = args[0], args[1], out
        copied = _blocked_bytes(x) + int(w.nbytes)
        return _blocked_bytes(y) + max(copied, int(y.nbytes))
    if func is torch.ops.aten.convolution_backward.default:
        dy, x, w = args[:3]
        dx = int(x.nbytes) if args[-1][0] else 0
        return _blocked_bytes(dy) + _blocked_bytes(x) + int(w.nbytes) + dx
    return 0


def _blocked_bytes(x: Tensor) -> int:
    """Return the bytes of a copy with blocked channels, (batch, channels, ...); 0 if none is made."""
    if x.shape[1] < BLOCK or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)):
        return 0
    return int(x.nbytes // x.shape[1]) * BLOCK * ceil(x.shape[1] / BLOCK)


def with_workspace(func: Any, args: tuple[Any, ...], out: Any) -> Any:
    """Return the results of an LSTM's layer on a CPU with a workspace as large as oneDNN's, and others as they are.

    It holds gates, states of the layer and of the step and their gradients, the hidden state before its projection, and
    cell states with their gradients, in 32 bits; rows are padded to 64 bytes and buffers to pages.

    >>> x, hidden = torch.empty(16, 8, 100), torch.empty(8, 100)
    >>> w = torch.empty(400, 100), torch.empty(400, 100), torch.empty(400), torch.empty(400)
    >>> layer = torch.ops.aten.mkldnn_rnn_layer.default
    >>> given = (x, *w, hidden, hidden, False, [], 2, 100, 1, True, False, False, True)
    >>> with_workspace(layer, given, (x, hidden, hidden, torch.empty(0)))[3].numel()
    851968
    """
    if func is not torch.ops.aten.mkldnn_rnn_layer.default or out[3].numel() or not args[-1]:
        return out
    (steps, batch, width), hidden = args[0].shape, args[1].shape[0] // 4
    wide = _row(max(width, hidden))
    rows = [steps * _row(4 * hidden), steps * _row(hidden)]
    rows += [(steps + 1) * 2 * each for each in (wide, wide, wide, hidden, hidden)]
    nbytes = sum(ceil(4 * batch * row / PAGE) * PAGE for row in rows)
    return *out[:3], torch.empty(nbytes, dtype=torch.uint8, device=out[3].device)


def _row(width: int) -> int:
    """Return the elements of a row in memory: padded to 64 bytes, and not a multiple of 256 elements."""
    padded = BLOCK * ceil(width / BLOCK)
    return padded + BLOCK if padded % 256 == 0 else padded
