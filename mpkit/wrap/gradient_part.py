"""A gradient of which other ranks hold the rest: norms of it are not the gradient's, and are refused.

torch.nn.utils.clip_grad_norm_ would scale each rank's part by the norm of that part, without a word.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["GradientPart", "marked", "marked_when_ready"]


class GradientPart(Tensor):
    """A rank's part of a gradient. Everything but its norm is computed as of any tensor, and gives plain tensors.

    >>> part = marked(torch.ones(4))
    >>> type(part + 1).__name__
    'Tensor'
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _NORMS:
            raise ValueError(
                "The norm of this rank's part of a gradient is not that of the gradient, and each rank would clip by "
                "its own. model.clip_grad_norm_(1.0), a method of the wrapped module that every rank calls, clips by "
                "the norm over all ranks."
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


_NORMS = {
    torch.linalg.vector_norm, torch.linalg.norm, torch.norm, Tensor.norm, torch._foreach_norm,
}  # fmt: skip


def marked(gradient: Tensor) -> Tensor:
    """Return the same gradient as a part, in the same memory."""
    return gradient.as_subclass(GradientPart)


def marked_when_ready(parameter: nn.Parameter) -> None:
    """Mark a parameter's gradient whenever autograd has added to it."""

    def mark(ready: Tensor) -> None:
        if ready.grad is not None and not isinstance(ready.grad, GradientPart):
            ready.grad = marked(ready.grad)

    parameter.register_post_accumulate_grad_hook(mark)
