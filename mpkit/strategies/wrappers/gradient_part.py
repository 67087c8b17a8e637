"""A gradient of which other ranks hold the rest: norms and other sums of it are not the gradient's, and are refused.

torch.nn.utils.clip_grad_norm_ would scale each rank's part by the norm of that part, without a word, and so would
`p.grad.data.pow(2).sum()`. Optimizers compute with plain tensors: while one steps, its gradients are not marked.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from mpkit.common.torch_private import DisableTorchFunctionSubclass

__all__ = ["GradientPart", "mark_part", "marked_when_ready", "unmark_part"]

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
