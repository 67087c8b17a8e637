"""Replaces random draws by constants, so that a model on a batch can be compared with the same model on its parts.

Draws are replaced as follows:

    dropout, bernoulli   keep everything
    rand, uniform        the midpoint
    randn, normal        the mean
    randint              the lowest value
    randperm             a rotation: every element moves to the next place, the last one to the first
    sort of equals       the same rotation, for permutations drawn as `rand(n).argsort()`
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mpkit.common.torch_private import TorchDispatchMode

__all__ = ["SameDraws"]

ONES = ("bernoulli", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_")
ZEROS = ("randn", "randn_like")


class SameDraws(TorchDispatchMode):
    """A mode without randomness, in which the draw for one sample does not depend on the number of samples."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operator, or its replacement if it draws random numbers."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if kwargs.get("generator") is not None:
            kwargs = kwargs | {"generator": None}  # the user's own generator is not advanced
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if name in ("rrelu_with_noise", "rrelu_with_noise_functional"):
            given = dict(zip(("self", "noise", "lower", "upper", "training"), args, strict=False)) | kwargs
            slope = (given.get("lower", 1 / 8) + given.get("upper", 1 / 3)) / 2
            result = torch.where(given["self"] > 0, given["self"], given["self"] * slope)
            return result if name == "rrelu_with_noise" else (result, given["noise"])
        if name == "multinomial":
            return args[0].topk(args[1] if len(args) > 1 else kwargs["num_samples"], -1).indices
        made = func(*args, **kwargs)
        if name in ONES:
            return made.fill_(1)
        if name in ZEROS:
            return made.zero_()
        if name in ("rand", "rand_like"):
            return made.fill_(0.5)
        if name == "uniform_":
            low = kwargs.get("from", args[1] if len(args) > 1 else 0.0)
            high = kwargs.get("to", args[2] if len(args) > 2 else 1.0)
            return made.fill_((low + high) / 2)
        if name in ("normal", "normal_"):
            return _mean(made, name, args, kwargs)
        if name in ("randint", "randint_like", "random_"):
            return made.fill_(_lowest(name, args))
        if name == "randperm":
            return made.copy_(torch.arange(len(made), dtype=made.dtype).roll(1))
        if name == "poisson":
            return made.copy_(args[0])
        if name == "sort" and _equals(made[0], _dim(args, kwargs)):
            return made[0], made[1].roll(1, _dim(args, kwargs))
        return made


def _mean(made: Tensor, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    mean = kwargs.get("mean", args[1] if name == "normal_" and len(args) > 1 else 0.0)
    if name == "normal":
        mean = kwargs.get("mean", args[0] if args else 0.0)
    return made.copy_(mean) if isinstance(mean, Tensor) else made.fill_(mean)


def _lowest(name: str, args: tuple[Any, ...]) -> int:
    """Return the lower bound of randint(low, high, size), randint(high, size) or random_(self, low, high)."""
    skipped = 0 if name == "randint" else 1
    numbers = [arg for arg in args[skipped:] if isinstance(arg, int)]
    return int(numbers[0]) if len(numbers) > 1 else 0


def _dim(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    named: int = kwargs.get("dim", next((arg for arg in args[1:] if type(arg) is int), -1))
    return named


def _equals(values: Tensor, dim: int) -> bool:
    if values.dim() == 0 or values.shape[dim] < 2 or not values.numel():
        return False
    return bool((values == values.narrow(dim, 0, 1)).all())
