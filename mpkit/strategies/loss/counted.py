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

`mean_loss` makes such a loss of a mean of torch's. The function is called unchanged, in a mode that intercepts its call
of a loss of torch.nn.functional. That call returns the sum, and the number that torch would have divided it by is
counted:

    cross_entropy, nll_loss   targets that are not `ignore_index`; with class weights, the sum of their weights; all
                              targets if they are probabilities
    kl_div ("batchmean")      samples
    all others                elements
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from math import frexp, isfinite
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Loss = Callable[[Any, Any], Any]

EXAMPLE = "loss=lambda out, y: (F.cross_entropy(out, y, reduction='sum'), (y != -100).sum())"


def as_pair(value: Any) -> tuple[Tensor, Tensor] | None:
    """Return the (total, count) that a loss returned as scalars; None if it returned something else.

    >>> as_pair((torch.tensor([6.0]), 3))
    (tensor(6.), tensor(3., dtype=torch.float64))
    >>> as_pair(torch.tensor(2.0)) is None
    True
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
    """

    def __init__(self, loss: Loss) -> None:
        self.loss = loss
        self.count: Tensor | None = None  # that the last call returned; None if it returned a mean

    def __call__(self, outputs: Any, targets: Any) -> Any:
        """Return the loss; a value that is neither a scalar nor a pair is returned unchanged."""
        value = self.loss(outputs, targets)
        pair = as_pair(value)
        self.count = None if pair is None else pair[1].detach()
        return value if pair is None else pair[0] / pair[1].to(pair[0].dtype)


def shares(value: Any, weight: float, nominal: float | None) -> tuple[Tensor, ...]:
    """Return what a part contributes to the loss of the batch; the part's backward starts from the first item.

    Args:
        weight: the part's share of the samples; 0 for a stand-in, which does not count.
        nominal: the approximate count of a batch, for a loss that returns (total, count); None for a mean.

    >>> shares(torch.tensor(3.0), 0.25, None)
    (tensor(0.7500),)
    >>> shares((torch.tensor(12.0), torch.tensor(3)), 0.25, 4.0)
    (tensor(3.), tensor(3., dtype=torch.float64))
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


# ---- torch's means as (total, count) ---------------------------------------------------------------------------


INDEXED = (F.cross_entropy, F.nll_loss)  # means over targets that may be ignored, or weighted by class

ELEMENTWISE = (
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits,
    F.kl_div, F.poisson_nll_loss, F.gaussian_nll_loss, F.soft_margin_loss, F.multilabel_margin_loss,
    F.multilabel_soft_margin_loss, F.multi_margin_loss, F.hinge_embedding_loss, F.cosine_embedding_loss,
    F.margin_ranking_loss, F.triplet_margin_loss,
)  # fmt: skip
"""Means over all elements, or over all samples."""

WORKS = "loss=mk.mean_loss(torch.nn.functional.cross_entropy)"


def mean_loss(fn: Callable[[Any, Any], Tensor]) -> MeanLoss:
    """Turn a mean of torch's into a loss that is correct in parts: the `loss` of `Cluster.train`.

    The loss returns (total, count), so that masked targets and class weights count as in the whole batch, however it is
    split into micro-batches and distributed over ranks.

    >>> loss = mean_loss(F.cross_entropy)
    >>> loss(torch.zeros(3, 4), torch.tensor([1, 2, -100]))  # log(4) twice, and 2 targets
    (tensor(2.7726), tensor(2))

    Args:
        fn: fn(outputs, targets), which returns the result of one of torch's losses: `F.cross_entropy`, `nn.NLLLoss()`,
            `F.mse_loss`, or a function that wraps one:
            `lambda out, y: F.cross_entropy(out.logits.flatten(0, 1), y.flatten())`.

    Raises:
        ValueError: `fn` is not such a function.
    """
    if isinstance(fn, type) and issubclass(fn, nn.Module):
        raise ValueError(f"mean_loss({fn.__name__}) is given a class: mk.mean_loss(torch.nn.{fn.__name__}())")
    if not callable(fn):
        raise ValueError(f"mean_loss({type(fn).__name__}) is given no function: {WORKS}")
    reduction = getattr(fn, "reduction", "mean")
    if reduction not in ("mean", "batchmean"):
        kind = type(fn).__name__
        raise ValueError(
            f"mean_loss({kind}(reduction={reduction!r})): it takes a mean, and finds out itself what the sum is: "
            f"mk.mean_loss(torch.nn.{kind}())"
        )
    return MeanLoss(fn)


class MeanLoss:
    """The loss that `mean_loss` returns; `fn` by itself computes the mean of a batch that is in one part."""

    def __init__(self, fn: Callable[[Any, Any], Any]) -> None:
        self.fn = fn

    def __call__(self, outputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
        """Return (total, count); a ValueError if `fn` changes the result of a loss, or calls none that is known."""
        with SummedMeans() as reduced:
            value = self.fn(outputs, targets)
        pair: tuple[Tensor, Tensor] | None = reduced.pair_of(value)
        if pair is None:
            raise ValueError(
                f"mean_loss({_name(self.fn)}): its result is not that of one call of a mean of torch.nn.functional "
                f"({', '.join(f.__name__ for f in INDEXED)}, {ELEMENTWISE[0].__name__}, ...), so what it divides by is "
                "not known. Return it: loss=lambda out, y: (total, count), the sum and how many there are."
            )
        return pair


def move_loss(loss: Any, device: torch.device) -> None:
    """Move the tensors of a loss that is a module, such as class weights, to the device of the outputs.

    >>> loss = nn.CrossEntropyLoss(weight=torch.ones(3))
    >>> move_loss(mean_loss(loss), torch.device("meta")), loss.weight.device
    (None, device(type='meta'))
    """
    while not isinstance(loss, nn.Module) and hasattr(loss, "fn"):  # MeanLoss, WholeBatchLoss
        loss = loss.fn
    if isinstance(loss, nn.Module):
        loss.to(device)


class SummedMeans(TorchFunctionMode):
    """A mode in which torch's means return sums and the divisors are recorded."""

    def __init__(self) -> None:
        super().__init__()
        # For each call its total, its count, the function, and its arguments.
        self.calls: list[tuple[Tensor, Tensor, Callable[..., Any], dict[str, Any]]] = []

    def pair_of(self, value: Any) -> tuple[Tensor, Tensor] | None:
        """Return the (total, count) behind a function's result; None if the result is something else."""
        return next(((total, count) for total, count, *_ in self.calls if total is value), None)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in INDEXED and func not in ELEMENTWISE:
            return func(*args, **(kwargs or {}))
        bound = _signature(func).bind(*args, **(kwargs or {}))
        bound.apply_defaults()
        given = bound.arguments
        deprecated = given.get("size_average") is not None or given.get("reduce") is not None
        if deprecated or given["reduction"] not in ("mean", "batchmean"):
            return func(*args, **(kwargs or {}))
        total, count = _sum_indexed(func, given) if func in INDEXED else _sum_elementwise(func, given)
        self.calls.append((total, count.detach(), func, given))
        return total


def _sum_indexed(func: Callable[..., Tensor], given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    outputs, targets = given["input"], given["target"]
    total: Tensor = func(**given | {"reduction": "sum"})
    if targets.is_floating_point():  # the probability of each class
        classes = outputs.shape[1 if outputs.dim() > 1 else 0]
        return total, torch.tensor(outputs.numel() / classes, dtype=torch.float64, device=total.device)
    valid: Tensor = targets != given["ignore_index"]
    weight = given["weight"]
    if weight is None:
        return total, valid.sum()
    return total, (weight[targets.where(valid, 0)] * valid).sum()


def _sum_elementwise(func: Callable[..., Tensor], given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    pair = {name: given[name] for name in ("input", "target") if isinstance(given.get(name), Tensor)}
    if len({value.shape for value in pair.values()}) > 1:
        # torch does so too, and warns on each rank, of shapes that are those of its share.
        pair = dict(zip(pair, torch.broadcast_tensors(*pair.values()), strict=True))
    each = func(**given | pair | {"reduction": "none"})
    number = each.shape[0] if given["reduction"] == "batchmean" else each.numel()
    return each.sum(), torch.tensor(number, device=each.device)


_signature = cache(inspect.signature)  # each micro-batch asks for it


def _name(fn: Any) -> str:
    return getattr(fn, "__name__", type(fn).__name__)
