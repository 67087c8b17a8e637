"""Hearing which random numbers a model draws, and giving it others: dropout masks, noise, whatever torch draws."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mpkit.common.torch_private import TorchDispatchMode
from mpkit.errors import MpkitError
from mpkit.strategies.models.randomness import SEEDED, OtherDraws, is_users_seed

UNTAGGED = (
    "_sample_dirichlet", "binomial", "_fused_dropout", "random", "random_", "randn_like", "randint_like",
)  # fmt: skip
"""Operators that draw random numbers and that torch does not tag as such."""

FUSED = (
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward", "_efficient_attention_forward", "_cudnn_attention_forward", "_cudnn_rnn", "miopen_rnn",
)  # fmt: skip
"""GPU operators that draw a dropout mask inside their kernel, where it can be neither heard nor replaced."""

KERNELS = ("_scaled_dot_product", "_flash_attention", "_efficient_attention", "_cudnn", "miopen")
"""Prefixes of operators that draw a mask inside a kernel, and only if they drop out."""


def draws_numbers(func: Any) -> bool:
    """Return whether an operator draws random numbers outside a fused kernel.

    >>> draws_numbers(torch.ops.aten._standard_gamma.default), draws_numbers(torch.ops.aten.mm.default)
    (True, False)
    """
    name = func.overloadpacket.__name__
    tagged = torch.Tag.nondeterministic_seeded in func.tags
    return name in UNTAGGED or (tagged and not name.startswith(KERNELS))


class CannotReplay(Exception):
    """A step cannot be repeated with the random numbers that the ranks drew."""


@dataclass
class ForwardDraws:
    """What the forwards of a step draw at random."""

    draws: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)  # by stage and micro-batch
    others: OtherDraws = field(default_factory=OtherDraws)  # Python's and NumPy's, which nothing hears
    decides: bool = False  # Python looks at a tensor's value, which may decide how often a forward draws


class HeardDraws(TorchDispatchMode):
    """A mode that notes the draws of each operator in `into`: copies of masks, noise, or numbers.

    `heard` learns whether Python looks at a tensor's value. With it, layers may not draw from seeds of their own.

    >>> import torch
    >>> heard = []
    >>> with HeardDraws(heard):
    ...     made = torch.rand(3)
    >>> torch.equal(heard[0], made)
    True
    """

    def __init__(self, into: list[Tensor], heard: ForwardDraws | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._into, self._heard = into, heard

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operator."""
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if self._heard is not None and name == "_local_scalar_dense":
            self._heard.decides = True
        if draws_numbers(func):
            in_layer = self._heard is not None and self._heard.others.is_looking
            if in_layer and is_users_seed(torch.initial_seed()):
                raise MpkitError(SEEDED)  # also where the state is restored afterwards (fork_rng)
            drawn = made[1] if isinstance(made, tuple) else made
            self._into.append(drawn.detach().clone())
        return made


class GivenDraws(TorchDispatchMode):
    """A mode in which operators draw nothing: `give(shape, p)` returns the numbers of each draw.

    p is the probability of a Bernoulli draw, else None.

    >>> import torch
    >>> with GivenDraws(lambda shape, p: torch.ones(shape)):
    ...     torch.nn.functional.dropout(torch.ones(2), 0.5)
    tensor([2., 2.])
    """

    def __init__(self, give: Callable[[tuple[int, ...], float | None], Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._give = give

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operator, or its replacement if it draws."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in FUSED and _dropout_of(func, args, kwargs) > 0.0:
            raise CannotReplay(
                f"{name} draws its dropout mask inside a kernel of the GPU, where mpkit cannot hear it"
            )
        if not draws_numbers(func):
            return func(*args, **kwargs)
        if name in ("native_dropout", "_fused_dropout"):
            values, p = args[0], float(args[1]) if name == "native_dropout" else 1.0 - float(args[1])
            mask = self._give(tuple(values.shape), 1.0 - p).to(values.device)
            return values * mask * (1.0 / (1.0 - p) if p < 1.0 else 0.0), mask.bool()
        if name.startswith("rrelu"):
            raise CannotReplay(f"{name} draws slopes within its operator; F.leaky_relu has one for all")
        if name.endswith("_"):
            chance: Any = args[1] if name == "bernoulli_" and len(args) > 1 else kwargs.get("p")
            given = self._give(tuple(args[0].shape), chance if isinstance(chance, float) else None)
            return args[0].copy_(given)
        like = func(*args, **(kwargs | {"generator": None} if "generator" in kwargs else kwargs))
        return like.copy_(self._give(tuple(like.shape), None))


def _dropout_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Return the probability with which an operator drops elements."""
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    dropped: Any = named.get("dropout_p", named.get("dropout", 0.0)) if named.get("train", True) else 0.0
    return float(dropped)
