"""Of whose gradients is a gradient made? Each part of the batch counts so many times, by least squares.

A gradient that is not the mean over the ranks is nearly always some other sum of their own: this rank's alone, the sum,
the mean over a few ranks, one micro-batch counted twice. With parts g_1 ... g_n and what was got, the numbers c that
minimize |got - c_1 g_1 - ... - c_n g_n|^2 say which. They need the products of the parts with each other only, n^2
numbers, which add up over parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Shares", "explain_shares"]

NEAR = 1e-3
"""The relative residual up to which shares explain a gradient, and the error of a share that is called exact."""


class Shares:
    """How many times each part counts in some gradients.

    Args:
        parts: the number of parts.

    >>> shares, parts = Shares(2), torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 1.0]])
    >>> shares.add(parts[0] * 2 + parts[1], parts)
    >>> [round(share, 6) for share in shares.solve()]
    [2.0, 1.0]
    """

    def __init__(self, parts: int) -> None:
        self._gram = torch.zeros(parts, parts, dtype=torch.float64)
        self._right = torch.zeros(parts, dtype=torch.float64)
        self._square = 0.0

    def add(self, got: Tensor, parts: Tensor) -> None:
        """Add some elements.

        Args:
            got: the gradient, [elements].
            parts: those of the parts, [parts, elements].
        """
        got, parts = (
            torch.view_as_real(t).flatten(-2) if t.is_complex() else t for t in (got.cpu(), parts.cpu())
        )
        got, parts = got.double(), parts.double()
        self._gram += parts @ parts.T
        self._right += parts @ got
        self._square += float(got @ got)

    def solve(self, near: float = NEAR) -> list[float]:
        """Return the shares; nothing if no sum of the parts is what was got, up to this relative residual."""
        if not bool(torch.isfinite(self._gram).all()) or not self._square < float("inf"):
            return []
        scale = self._gram.diagonal().sqrt().clamp(min=1e-300)
        normed = self._gram / scale / scale[:, None]
        found = (torch.linalg.pinv(normed, rtol=1e-9, hermitian=True) @ (self._right / scale)) / scale
        residual = self._square - 2 * float(found @ self._right) + float(found @ self._gram @ found)
        return found.tolist() if residual <= near**2 * self._square else []


def explain_shares(shares: Sequence[float], ranks: Sequence[int], rank: int) -> str:
    """Return in words what is wrong with shares that should all be one over the number of ranks; "" if nothing is.

    Args:
        shares: for each rank, and within it for each backward of the step.
        ranks: the ranks.
        rank: whose gradients they are.

    >>> explain_shares([0.0, 1.0], (0, 1), 1)
    "this rank's own: the mean over the ranks is missing"
    >>> explain_shares([1.0, 1.0], (0, 1), 1)
    '2 times as large: a sum in place of a mean, or the reverse'
    >>> explain_shares([0.5, 0.5, 0.0, 0.0], (0, 1, 2, 3), 1)
    'the mean over ranks [0, 1] alone, without [2, 3]'
    >>> explain_shares([1.0, 0.5, 1.0, 0.5], (0, 1), 1)
    'of backwards that count 2, 1 times in place of once: the accumulation over micro-batches is another one'
    """
    size, backwards = len(ranks), len(shares) // len(ranks)
    table = torch.tensor(list(shares)).view(size, backwards)
    of_rank = table.mean(1)
    alone = torch.zeros(size)
    alone[list(ranks).index(rank)] = 1.0
    if size > 1 and _near(table, alone[:, None].expand_as(table)):
        return "this rank's own: the mean over the ranks is missing"
    if _near(table, table.mean().expand_as(table)):
        factor = float(table.mean()) * size
        exact = abs(factor - 1) <= NEAR
        return "" if exact else f"{factor:.6g} times as large: a sum in place of a mean, or the reverse"
    if _near(table, table.mean(0).expand_as(table)):
        times = ", ".join(f"{float(each) * size:.4g}" for each in table.mean(0))
        return (
            f"of backwards that count {times} times in place of once: the accumulation over micro-batches is another "
            "one"
        )
    there = [r for r, share in zip(ranks, of_rank.tolist(), strict=True) if abs(share) > NEAR]
    if len(there) < size:
        rest = [r for r in ranks if r not in there]
        return f"the mean over ranks {there} alone, without {rest}"
    weights = ", ".join(f"{float(each):.4g}" for each in of_rank)
    return f"a sum over the ranks in which they count {weights} times, and not 1/{size} each"


def _near(table: Tensor, other: Tensor) -> bool:
    return float((table - other).abs().max()) <= NEAR * max(1.0, float(other.abs().max()))
