"""Losses that return (total, count), which can be summed over the parts of a batch.

A batch is computed in parts: micro-batches, and each replica's share of them. If a loss is a mean over something other
than samples, such as the targets that are not masked, the means of the parts do not determine the mean of the whole.
Each part therefore returns the sum of its losses and their number, and the loss of the batch is

    loss = (total_1 + ... + total_n) / (count_1 + ... + count_n)

Its gradient is the gradient of the summed totals divided by the summed counts, which are known only after the last
forward. By then a 1F1B pipeline has done most of its backwards. So each backward starts from total / nominal, where
`nominal` approximates the count of a batch, and the update multiplies the complete gradients by nominal / count.
`nominal` is a power of two, so scaling by it is exact, and gradients are about as large as those of a mean, and not
larger, so that fp16 can represent them.

    mean over samples   (loss * k / K, )         of k samples out of K
    (total, count)      (total / nominal, count)
"""

from __future__ import annotations

from collections.abc import Callable
from math import frexp, isfinite
from typing import Any

import torch
from torch import Tensor

__all__ = ["Quotient", "as_pair", "nominal_count", "shares"]

Loss = Callable[[Any, Any], Any]

EXAMPLE = "loss=lambda out, y: (F.cross_entropy(out, y, reduction='sum'), (y != -100).sum())"


def as_pair(value: Any) -> tuple[Tensor, Tensor] | None:
    """Return the (total, count) that a loss returned as scalars; None if it returned something else.

    >>> as_pair((torch.tensor([6.0]), 3))
    (tensor(6.), tensor(3., dtype=torch.float64))
    >>> as_pair(torch.tensor(2.0)) is None
    True

    Raises:
        ValueError: the value is a pair of something else, or the count requires a gradient.
    """
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        return None
    total, count = value
    if not isinstance(total, Tensor) or total.numel() != 1:
        what = f"a tensor of shape {list(total.shape)}" if isinstance(total, Tensor) else type(total).__name__
        raise ValueError(
            f"the total of the (total, count) that it returned is {what}, not a scalar: {EXAMPLE}"
        )
    if isinstance(count, Tensor) and count.requires_grad:
        raise ValueError(
            "the count of the (total, count) that it returned depends on the model's outputs and has a gradient of its "
            "own, which cannot be known until the whole batch was counted: count.detach() if that is meant, or "
            "mk.whole_batch_loss(lambda out, y: total / count)"
        )
    if isinstance(count, bool) or not isinstance(count, (int, float, Tensor)):
        raise ValueError(
            f"the count of the (total, count) that it returned is {type(count).__name__}: {EXAMPLE}"
        )
    number = torch.as_tensor(count, dtype=torch.float64, device=total.device)
    if number.numel() != 1:
        raise ValueError(
            f"the count of the (total, count) that it returned has shape {list(number.shape)}, not a scalar: {EXAMPLE}"
        )
    return total.reshape(()), number.reshape(())


class Quotient:
    """A loss that always returns one number: a scalar unchanged, and (total, count) as total / count.

    >>> Quotient(lambda out, y: (out.sum(), 4))(torch.ones(8), None)
    tensor(2.)

    Args:
        loss: the loss to call.

    Attributes:
        count: the count that the last call returned; None if it returned a mean.
    """

    def __init__(self, loss: Loss) -> None:
        self.loss = loss
        self.count: Tensor | None = None

    def __call__(self, outputs: Any, targets: Any) -> Any:
        """Return the loss; a value that is neither a scalar nor a pair is returned unchanged."""
        value = self.loss(outputs, targets)
        pair = as_pair(value)
        self.count = None if pair is None else pair[1].detach()
        return value if pair is None else pair[0] / pair[1].to(pair[0].dtype)


def shares(value: Any, weight: float, nominal: float | None) -> tuple[Tensor, ...]:
    """Return what a part contributes to the loss of the batch; the part's backward starts from the first item.

    >>> shares(torch.tensor(3.0), 0.25, None)
    (tensor(0.7500),)
    >>> shares((torch.tensor(12.0), torch.tensor(3)), 0.25, 4.0)
    (tensor(3.), tensor(3., dtype=torch.float64))

    Args:
        value: the value that the loss returned.
        weight: the part's share of the samples; 0 for a stand-in, which does not count.
        nominal: the approximate count of a batch, for a loss that returns (total, count); None for a mean.
    """
    if nominal is None:
        assert isinstance(value, Tensor), "the dry run has seen what the loss returns"
        return (value * weight,)
    pair = as_pair(value)
    assert pair is not None, "likewise"
    total, count = pair
    return (total / nominal, count) if weight else (total * 0.0, torch.zeros_like(count))


def nominal_count(count: float) -> float:
    """Return the smallest power of two that is not below the count; 1 if there is none.

    >>> nominal_count(48.0), nominal_count(64.0), nominal_count(0.75), nominal_count(0.0), nominal_count(float("nan"))
    (64.0, 64.0, 1.0, 1.0, 1.0)
    """
    if not isfinite(count) or count <= 0:
        return 1.0
    mantissa, exponent = frexp(count)
    return 2.0 ** (exponent - (mantissa == 0.5))
