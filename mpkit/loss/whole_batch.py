"""whole_batch_loss: a loss of all samples at once, such as CLIP's, whose parts say nothing of it.

    gather      forward: each rank's outputs and targets, to all, in the order of the batch
                backward: a rank's own rows of the gradient
    loss        of the whole batch, on every rank the same

A rank's loss counts k/K in the sum over replicas, for k of K samples, and so does its gradient. The gradient of its own
rows is nobody else's, and so is multiplied by K/k; that of what is no sample's (a temperature) is on all ranks, and
adds up to itself.

Source: Radford et al., "Learning Transferable Visual Models From Natural Language Supervision", 2021, section 2.5; the
gather with its gradient as in open_clip.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from mpkit.loss.quotient import Quotient
from mpkit.parallel.anymodel.structure import flatten, rebuild
from mpkit.parallel.axis import Line

__all__ = ["WholeBatchLoss", "whole_batch_loss"]


def whole_batch_loss(fn: Any) -> WholeBatchLoss:
    """Let a loss see the outputs and targets of the whole batch on every rank: `loss` of `Cluster.train`.

    It takes one micro-batch: of several, the earlier ones' activations would be gone when the last one is there.

    >>> def contrastive(out, y):
    ...     logits = out[0] @ out[1].T  # [batch, batch]: each sample against all others
    ...     return torch.nn.functional.cross_entropy(logits, torch.arange(len(logits)))
    >>> loss = whole_batch_loss(contrastive)

    Args:
        fn: fn(outputs, targets) -> scalar. Tensors in them have the batch as their first dimension, or none.

    Raises:
        ValueError: it is no function.
    """
    if not callable(fn) or isinstance(fn, (type, WholeBatchLoss)):
        raise ValueError(
            f"whole_batch_loss({fn!r}) takes a function of outputs and targets: mk.whole_batch_loss(clip_loss)"
        )
    return WholeBatchLoss(fn)


class WholeBatchLoss:
    """What `whole_batch_loss` makes.

    Args:
        fn: as there.
    """

    def __init__(self, fn: Callable[[Any, Any], Any]) -> None:
        self.fn = fn
        self._line: Line | None = None

    def over(self, line: Line) -> WholeBatchLoss:
        """The same on a rank that shares its batches with the others of this line."""
        made = WholeBatchLoss(self.fn)
        made._line = line
        return made

    def __call__(self, outputs: Any, targets: Any, *, counts: bool = True) -> Any:
        """The loss of the whole batch.

        Args:
            outputs, targets: this rank's.
            counts: whether its samples are in the batch, or a stand-in for none.
        """
        if self._line is None or self._line.size == 1:
            return Quotient(self.fn)(outputs, targets)
        # ---- gather
        leaves, shape = flatten((outputs, targets))
        k = next(len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()) if counts else 0
        device = next(leaf.device for leaf in leaves if isinstance(leaf, Tensor))
        counted = self._line.all_gather(torch.tensor([k], device=device))
        rows = [k] * self._line.size if isinstance(counted, FakeTensor) else counted.tolist()
        gathered = [
            _Gather.apply(self._line, rows, leaf) if isinstance(leaf, Tensor) and leaf.dim() else leaf  # type: ignore[no-untyped-call]
            for leaf in leaves
        ]
        # ---- loss
        return Quotient(self.fn)(*rebuild(shape, gathered))


class _Gather(torch.autograd.Function):
    """[k, ...] -> [K, ...]; rank r of n has the samples r, r + n, ..."""

    @staticmethod
    def forward(ctx: Any, line: Line, rows: list[int], mine: Tensor) -> Tensor:
        ctx.line, ctx.rows, ctx.shape = line, rows, mine.shape
        most, narrow = max(rows), mine.to(torch.uint8) if mine.dtype == torch.bool else mine
        padded = narrow.new_zeros(most, *mine.shape[1:])
        padded[: rows[line.index]] = narrow[: rows[line.index]]
        ranks = line.all_gather(padded).split(most)
        whole = narrow.new_empty(sum(rows), *mine.shape[1:])
        for rank, k in enumerate(rows):
            whole[rank :: len(rows)] = ranks[rank][:k]
        return whole.to(mine.dtype)

    @staticmethod
    def backward(ctx: Any, dwhole: Tensor) -> tuple[None, None, Tensor]:
        index, rows = ctx.line.index, ctx.rows
        mine = dwhole.new_zeros(ctx.shape)
        if rows[index]:
            mine[: rows[index]] = dwhole[index :: len(rows)] * (sum(rows) / rows[index])
        return None, None, mine
