"""Random numbers where tokens are divided: for each token its own, and for what all tokens share the same on all ranks.

A rank with a part of each sequence draws for its own tokens. Whatever has no dimension of tokens is drawn for all of
them at once, such as the path that DropPath drops for a sample, or noise on a weight. So in a span that divides tokens
(`mpkit.strategies.models.own_draws`) the shape of what is drawn decides, and nothing is drawn for the tokens of a
parameter. Noise on a weight in the shape of a batch of tokens (`torch.randn(batch, tokens)`) would be taken for theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mpkit.common.torch_private import _disable_current_modes
from mpkit.strategies.models.own_draws import OwnDraws

__all__ = ["TokenDraws", "drawn_by"]

FACTORIES = ("rand", "randn", "randint", "randperm")
DRAWS = (
    "bernoulli", "bernoulli_", "multinomial", "normal", "normal_", "poisson", "random_", "uniform_", "exponential_",
    "cauchy_", "geometric_", "log_normal_", "rand_like", "randn_like", "randint_like", "dropout", "dropout_",
    "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "alpha_dropout_", "feature_dropout", "feature_dropout_",
    "feature_alpha_dropout", "feature_alpha_dropout_", "gumbel_softmax", "rrelu", "rrelu_",
)  # fmt: skip
"""Functions that draw numbers for each element of their first argument."""


class TokenDraws(TorchFunctionMode):
    """Inside the block, numbers that are drawn for no token are the same on all ranks that share the tokens."""

    def __init__(self, draws: OwnDraws) -> None:
        super().__init__()
        self._draws = draws

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function."""
        return drawn_by(self._draws, func, args, kwargs or {})


def drawn_by(draws: OwnDraws, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function; if it draws numbers for no token, with those that ranks share."""
    name = getattr(func, "__name__", "")
    tokens = draws.token_shape if name in DRAWS or name in FACTORIES else None
    if tokens is None:
        return func(*args, **kwargs)
    first = args[0] if args else kwargs.get("input")
    if name in FACTORIES or not isinstance(first, Tensor):
        with _disable_current_modes():  # only the shape: nothing is drawn, and nobody hears it
            shape = func(*args, **(kwargs | {"device": "meta", "generator": None})).shape
    else:
        shape = first.shape
    if not isinstance(first, nn.Parameter) and _has_tokens(shape, *tokens):
        return func(*args, **kwargs)
    with draws.share_draws():
        return func(*args, **kwargs)


def _has_tokens(shape: Sequence[int], batch: int, count: int) -> bool:
    """Return whether a tensor has something of each token of each sample.

    That is [batch, ..., tokens, ...], [tokens, batch, ...], both in the first dimension, or, in attentions that fold
    heads into the batch, [batch heads, tokens, ...]. A weight that is as wide as the tokens are many is none of these.

    >>> [_has_tokens(shape, 2, 8) for shape in ((2, 8, 5), (16, 4), (8, 2, 5), (6, 8, 8))]
    [True, True, True, True]
    >>> [_has_tokens(shape, 2, 8) for shape in ((2, 1, 1), (), (8, 8), (8,))]
    [False, False, False, False]
    """
    if not shape:
        return False
    folded = len(shape) == 3 and shape[0] % batch == 0 and shape[1] == count
    in_front = shape[0] == batch * count or tuple(shape[:2]) == (count, batch)
    return in_front or folded or (shape[0] == batch and count in shape[1:])
