"""A rank's part of a model, in a loop of one's own: parts of gradients, and optimizers that are given parts.

A norm of a part of a gradient is not the gradient's: torch.nn.utils.clip_grad_norm_ would silently scale each rank's
part by the norm of that part, and so would `p.grad.data.pow(2).sum()`. So such sums are rejected, and the wrappers clip
by the norm of the whole.

An optimizer's update of parts is part of its update of the whole only if it treats each element by itself, as PyTorch's
elementwise optimizers do: Muon and Adafactor see a matrix, and LBFGS all parameters at once. An optimizer that is not
known to is rejected, since nothing else would show it. While one steps, it sees plain gradients.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mpkit.common.torch_private import DisableTorchFunctionSubclass
from mpkit.strategies.comm.communicator import Communicator
from mpkit.strategies.prepare.optimizer import ELEMENTWISE
from mpkit.strategies.wrappers.wrapper import ModuleWrapper

SUMS = {
    "norm", "vector_norm", "linalg_norm", "linalg_vector_norm", "_foreach_norm", "sum", "nansum", "mean", "nanmean",
    "prod", "max", "min", "amax", "amin", "aminmax", "argmax", "argmin", "median", "quantile", "var", "std", "any",
    "all", "count_nonzero", "dot", "vdot", "inner", "logsumexp", "_amp_foreach_non_finite_check_and_unscale_",
}  # fmt: skip
"""Names of functions whose result depends on all elements."""


class GradientPart(Tensor):
    """A rank's part of a gradient; whatever is computed from it element by element is a part, too.

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


def mark_divided(parameter: nn.Parameter, by: Literal["elements", "parameters"], wrapper: str) -> None:
    """Mark a parameter as one of which other ranks have the rest, or beside which they have others.

    Args:
        by: whether this rank's optimizer is given some elements of each parameter, whose gradient is marked whenever
            autograd has added to it, or some parameters.
        wrapper: the wrapper's call, for errors: "mk.tensor_parallel".
    """

    def mark(ready: Tensor) -> None:
        if ready.grad is not None and not isinstance(ready.grad, GradientPart):
            ready.grad = mark_part(ready.grad)

    parameter.divided = by, wrapper  # type: ignore[attr-defined]
    if by == "elements":
        parameter.register_post_accumulate_grad_hook(mark)
    _watch_steps()


@cache
def _watch_steps() -> None:
    """Check each optimizer in this process before it steps, and let it see plain gradients."""

    def parts(optimizer: torch.optim.Optimizer) -> list[Any]:
        every = (p for group in optimizer.param_groups for p in group["params"])
        return [p for p in every if hasattr(p, "divided") and p.grad is not None]

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        _check_optimizer(optimizer)
        for parameter in parts(optimizer):
            parameter.grad = Tensor.as_subclass(parameter.grad, Tensor)

    def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameter in parts(optimizer):
            parameter.grad = mark_part(parameter.grad)

    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Reject an optimizer of divided parameters that is not known to do the same on parts of them."""
    marks = [getattr(p, "divided", None) for group in optimizer.param_groups for p in group["params"]]
    by, wrapper = next(filter(None, marks), (None, ""))
    known = type(optimizer) in ELEMENTWISE or getattr(optimizer, "elementwise", False)
    if by is None or known or (by == "parameters" and not isinstance(optimizer, torch.optim.LBFGS)):
        return
    kind = type(optimizer).__name__
    raise ValueError(
        f"{wrapper} gives an optimizer only some {by}, and {kind} is not known to treat each element by its own "
        "gradient and state alone. What works: torch.optim.AdamW(model.parameters(), lr=1e-3); "
        f"{kind}.elementwise = True, if it does; or {kind} with mk.ddp, where each rank updates all"
    )


class DividedModule(ModuleWrapper):
    """A module of which other ranks hold the rest: norms of gradients are over all of them."""

    _comm: Communicator  # the ranks that hold the others

    def _gradients(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the gradients that this rank alone holds, and those that each rank holds alike."""
        raise NotImplementedError

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients down to a 2-norm of `max_norm` over all ranks, and return the norm before.

        Every rank calls it.
        """
        device, (mine, alike) = self._comm.wire.device, self._gradients()

        def square_of(gradients: Sequence[Tensor]) -> Tensor:
            zero = torch.zeros(1, dtype=torch.float64, device=device)
            squares = (g.as_subclass(Tensor).abs().double().square().sum().to(device) for g in gradients)
            return sum(squares, zero)

        norm = (self._comm.all_reduce(square_of(mine)) + square_of(alike)).sqrt()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)[0]  # of no dimension, as a gradient may be
        for gradient in (*mine, *alike):
            gradient.mul_(factor.to(gradient.device, gradient.dtype))
        return norm[0].to(torch.float32)
