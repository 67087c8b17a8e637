"""Exchange: an all-to-all with uneven parts, between experts' ranks, that autograd can
go back through.

    exchange      sends[i] rows go to rank i, and receives[i] rows come from rank i, in
                  the order of the ranks
    exchange back the gradients of these rows go to the ranks that sent them


Source: Lepikhin et al., "GShard: Scaling Giant Models with Conditional Computation",
ICLR 2021, section 3.2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import mpkit as mk


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        saved: Any, rows: Tensor, ctx: mk.Context, sends: list[int], receives: list[int]
    ) -> Tensor:
        saved.ctx, saved.sends, saved.receives = ctx, sends, receives
        # ---- exchange
        return ctx.comm.all_to_all(rows, sends=sends, receives=receives)

    @staticmethod
    def backward(saved: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        # ---- exchange back
        back = saved.ctx.comm.all_to_all(
            gradient.contiguous(), sends=saved.receives, receives=saved.sends
        )
        return back, None, None, None


def exchange(
    ctx: mk.Context, rows: Tensor, sends: list[int], receives: list[int]
) -> Tensor:
    """Return the rows that come to this rank, (sum of receives, ...).
    rows: (sum of sends, ...).
    """
    received: Tensor = _Exchange.apply(rows, ctx, sends, receives)
    return received
