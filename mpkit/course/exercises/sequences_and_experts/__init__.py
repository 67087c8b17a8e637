"""Sequences and experts.

There are two more ways to divide a model. A long sequence does not fit on one device: each rank has a part of the
tokens, and only attention looks across parts; the choice of tokens decides how much a rank computes. And a layer with
many experts is too large: each rank has some of the experts, and tokens travel to the expert that they are for.

Sources: Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023; Jacobs et al.,
"DeepSpeed Ulysses", 2023; Lepikhin et al., "GShard", ICLR 2021; Fedus et al., "Switch Transformers", JMLR 2022.
"""

from typing import Any

import torch
from torch import Tensor

import mpkit as mk

TITLE = "Sequences and experts"
PLACE = 11


# %% given
class Exchange(torch.autograd.Function):
    """An all-to-all in the forward, and its own inverse, an all-to-all again, in the backward."""

    @staticmethod
    def forward(saved: Any, x: Tensor, ctx: mk.Context) -> Tensor:
        """Return part r of every rank's x, one after the other, on rank r."""
        saved.ctx = ctx
        return ctx.comm.all_to_all(x.detach().contiguous())

    @staticmethod
    def backward(saved: Any, dy: Tensor) -> tuple[Tensor, None]:
        """Send each part's gradient back to where the part came from."""
        return saved.ctx.comm.all_to_all(dy.contiguous()), None


def exchange(ctx: mk.Context, x: Tensor) -> Tensor:
    """Cut x into n parts along its first dimension; send part j to rank j, and return the n parts that come."""
    return Exchange.apply(x, ctx)
