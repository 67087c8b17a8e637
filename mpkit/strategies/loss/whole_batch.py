"""whole_batch_loss: a loss of all samples at once, such as CLIP's, which cannot be computed in parts.

    gather      forward: all-gather the outputs and targets, in the order of the batch
                backward: take this rank's own rows of the gradient
    loss        compute the loss of the whole batch, the same on every rank

A rank's loss has weight k/K in the sum over replicas, for k of K samples, and so has its gradient. The gradient of a
rank's own rows exists on that rank only, so it is multiplied by K/k; the gradient of a value that belongs to no sample
(a temperature) is the same on all ranks, and its weighted sum is correct.

Source: Radford et al., "Learning Transferable Visual Models From Natural Language Supervision", 2021, section 2.5; the
gather and its gradient are those of open_clip.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mpkit.common.torch_private import FakeTensor
from mpkit.strategies.comm.communicator import Communicator
from mpkit.strategies.loss.counted import Quotient
from mpkit.strategies.models.nested_values import flatten, rebuild


def whole_batch_loss(fn: Any) -> WholeBatchLoss:
    """Let a loss see the outputs and targets of the whole batch on every rank: `loss` of `Cluster.train`.

    It requires one micro-batch: with several, the activations of earlier ones would be gone before the last arrives.

    >>> def contrastive(out, y):
    ...     logits = out[0] @ out[1].T  # [batch, batch]: each sample against all others
    ...     return torch.nn.functional.cross_entropy(logits, torch.arange(len(logits)))
    >>> loss = whole_batch_loss(contrastive)

    Args:
        fn: fn(outputs, targets) -> scalar. Tensors in outputs and targets are batch first, or scalars.

    Raises:
        ValueError: `fn` is not a function.
    """
    if not callable(fn) or isinstance(fn, (type, WholeBatchLoss)):
        raise ValueError(
            f"whole_batch_loss({fn!r}) takes a function of outputs and targets: mk.whole_batch_loss(clip_loss)"
        )
    return WholeBatchLoss(fn)


class WholeBatchLoss:
    """The loss that `whole_batch_loss` returns."""

    def __init__(self, fn: Callable[[Any, Any], Any]) -> None:
        self.fn = fn
        self._group: Communicator | None = None

    def bind_group(self, group: Communicator) -> WholeBatchLoss:
        """Return this loss for a rank that shares its batches with the other ranks of a group."""
        made = WholeBatchLoss(self.fn)
        made._group = group
        return made

    def __call__(self, outputs: Any, targets: Any, *, counts: bool = True) -> Any:
        """Return the loss of the whole batch; `counts` is False for a stand-in, whose samples do not belong to it."""
        if self._group is None or self._group.size == 1:
            return Quotient(self.fn)(outputs, targets)
        # ---- gather
        leaves, shape = flatten((outputs, targets))
        k = next(len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()) if counts else 0
        device = next(leaf.device for leaf in leaves if isinstance(leaf, Tensor))
        counted = self._group.all_gather(torch.tensor([k], device=device))
        rows = [k] * self._group.size if isinstance(counted, FakeTensor) else counted.tolist()
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.dim():
                leaves[i] = _Gather.apply(self._group, rows, leaf)  # type: ignore[no-untyped-call]
        # ---- loss
        return Quotient(self.fn)(*rebuild(shape, leaves))


class _Gather(torch.autograd.Function):
    """All-gather [k, ...] -> [K, ...], where rank r of n has the samples r, r + n, ..."""

    @staticmethod
    def forward(ctx: Any, group: Communicator, rows: list[int], mine: Tensor) -> Tensor:
        ctx.group, ctx.rows, ctx.shape = group, rows, mine.shape
        most, narrow = max(rows), mine.to(torch.uint8) if mine.dtype == torch.bool else mine
        padded = narrow.new_zeros(most, *mine.shape[1:])
        padded[: rows[group.index]] = narrow[: rows[group.index]]
        ranks = group.all_gather(padded).split(most)
        whole = narrow.new_empty(sum(rows), *mine.shape[1:])
        for rank, k in enumerate(rows):
            whole[rank :: len(rows)] = ranks[rank][:k]
        return whole.to(mine.dtype)

    @staticmethod
    def backward(ctx: Any, dwhole: Tensor) -> tuple[None, None, Tensor]:
        index, rows = ctx.group.index, ctx.rows
        mine = dwhole.new_zeros(ctx.shape)
        if rows[index]:
            mine[: rows[index]] = dwhole[index :: len(rows)] * (sum(rows) / rows[index])
        return None, None, mine
