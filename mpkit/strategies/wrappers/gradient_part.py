"""A gradient of which other ranks hold the rest: norms and other sums of it are not the gradient's, and are refused.

torch.nn.utils.clip_grad_norm_ would scale each rank's part by the norm of that part, without a word, and so would
`p.grad.data.pow(2).sum()`. Optimizers compute with plain tensors: while one steps, its gradients are not marked.
The wrappers clip by the norm of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from mpkit.common.torch_private import DisableTorchFunctionSubclass
from mpkit.strategies.comm.communicator import Communicator

__all__ = ["GradientPart", "clip", "mark_part", "marked_when_ready", "unmark_part"]


SUMS = {
    "norm", "vector_norm", "linalg_norm", "linalg_vector_norm", "_foreach_norm", "sum", "nansum", "mean", "nanmean",
    "prod", "max", "min", "amax", "amin", "aminmax", "argmax", "argmin", "median", "quantile", "var", "std", "any",
    "all", "count_nonzero", "dot", "vdot", "inner", "logsumexp", "_amp_foreach_non_finite_check_and_unscale_",
}  # fmt: skip
"""Names of functions whose result depends on all elements."""


class GradientPart(Tensor):
    """A rank's part of a gradient. What is computed from it element by element is a part, too.

    >>> import torch
    >>> part = mark_part(torch.ones(4))
    >>> type(part.detach() * 2).__name__, part.numel()
    ('GradientPart', 4)
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in SUMS:
            raise ValueError(
                f"{func.__name__} of this rank's part of a gradient is not that of the gradient, and each rank would "
                "clip or decide by its own. model.clip_grad_norm_(1.0), a method of the wrapped module that every rank "
                "calls, clips by the norm over all ranks, and returns it. Of the part: part.as_subclass(torch.Tensor)"
            )
        with DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if type(result) is not Tensor or func is Tensor.as_subclass:
                return result
            sizes = {part.numel() for part in args if isinstance(part, cls)}
            return result.as_subclass(cls) if result.numel() in sizes else result


def mark_part(gradient: Tensor) -> Tensor:
    """Return the same gradient as a part, in the same memory."""
    return gradient.as_subclass(GradientPart)


def unmark_part(gradient: Tensor) -> Tensor:
    """Return a part as a plain tensor, in the same memory."""
    return Tensor.as_subclass(gradient, Tensor)


def marked_when_ready(parameter: nn.Parameter) -> None:
    """Mark a parameter's gradient whenever autograd has added to it."""

    def mark(ready: Tensor) -> None:
        if ready.grad is not None and not isinstance(ready.grad, GradientPart):
            ready.grad = mark_part(ready.grad)

    parameter.register_post_accumulate_grad_hook(mark)


@torch.no_grad()
def clip(
    mine: Sequence[Tensor],
    everywhere: Sequence[Tensor],
    max_norm: float,
    norm_type: float,
    comm: Communicator,
    device: torch.device,
) -> Tensor:
    """Scale gradients down to a norm, as torch.nn.utils.clip_grad_norm_ does, and return the norm before.

    Args:
        mine: gradients that this rank alone holds.
        everywhere: gradients that each rank holds alike.
        max_norm: the largest norm.
        norm_type: p of the p-norm; inf for the largest element.
        comm: the ranks that hold the others.
        device: where the norm is computed.
    """
    p = float(norm_type)
    here, alike = (_power_sum(gradients, p, device) for gradients in (mine, everywhere))
    if p == inf:
        norm = torch.maximum(comm.all_reduce(here, op="max"), alike)
    else:
        norm = (comm.all_reduce(here) + alike) ** (1.0 / p)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)[0]  # of no dimension, as a gradient may be
    for gradient in (*mine, *everywhere):
        gradient.mul_(factor.to(gradient.device, gradient.dtype))
    return norm[0].to(torch.float32)


def _power_sum(gradients: Sequence[Tensor], p: float, device: torch.device) -> Tensor:
    """Return the sum of |g|^p over all elements, or the largest |g| for inf, (1,) in float64."""
    total = torch.zeros(1, dtype=torch.float64, device=device)
    for gradient in gradients:
        gradient = gradient.as_subclass(Tensor)  # of a part, whose norm users must not take
        if not gradient.numel():
            continue
        gradient = gradient.abs() if gradient.is_complex() else gradient
        if p == inf:
            total = torch.maximum(total, gradient.abs().max().to(total))
        else:
            total += torch.linalg.vector_norm(gradient.to(torch.float64), p).to(device) ** p
    return total
