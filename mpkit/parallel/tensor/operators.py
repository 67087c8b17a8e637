"""The operators around what is divided: what each communicates in the forward, and what in the backward.

                     forward            backward
    f                nothing            all-reduce          into a region: x is the same everywhere
    g                all-reduce         nothing             out of it: partial sums
    f_bar            all-gather         reduce-scatter      the same two, where x and y are divided by sequence
    g_bar            reduce-scatter     all-gather
    scatter          nothing            all-gather          into what is divided by sequence: a rank takes its part
    gather           all-gather         nothing             out of it
    gather_features  all-gather         nothing             the outputs of a column layer that has no row layer

Each is its line's conjugate: what one does forward, the other does backward. x: [batch, sequence, features]; the
sequence is dimension 1. An all-reduce is a reduce-scatter and an all-gather, so the two pairs send the same bytes.

The whole of it in plain PyTorch: `mpkit.reference.conjugates`, with `parallel_mlp` and `parallel_attention`. This
package adds: models as they are, divided by a plan, widths and heads that the ranks do not divide, grouped queries,
overlap with the backward, tied embeddings, and dropout.

Sources: Shoeybi et al. 2019, figure 3; Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models", MLSys 2023, section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from mpkit.parallel.axis import Line

__all__ = [
    "f",
    "f_bar",
    "g",
    "g_bar",
    "gather",
    "gather_features",
    "join_sequence",
    "part_of_sequence",
    "reduced_sequence",
    "scatter",
]


# ---- what is sent, without autograd --------------------------------------------------------------------------


def by_parts(x: Tensor, t: int) -> Tensor:
    """[b, s, ...] -> [t b, s/t, ...]: the parts of the sequence one after another, as they are scattered."""
    b, s = x.shape[:2]
    return x.reshape(b, t, s // t, *x.shape[2:]).transpose(0, 1).reshape(t * b, s // t, *x.shape[2:])


def from_parts(parts: Tensor, t: int) -> Tensor:
    """[t b, s/t, ...] -> [b, s, ...]: the sequence of its parts, as they were gathered."""
    b, length = parts.shape[0] // t, parts.shape[1]
    return parts.view(t, b, *parts.shape[1:]).transpose(0, 1).reshape(b, t * length, *parts.shape[2:])


def join_sequence(line: Line, x: Tensor) -> Tensor:
    """[b, s/t, ...] of each rank -> [b, s, ...]."""
    return from_parts(line.all_gather(x.contiguous()), line.size)


def reduced_sequence(line: Line, x: Tensor) -> Tensor:
    """[b, s, ...] -> [b, s/t, ...]: this rank's part of the sum."""
    return line.reduce_scatter(by_parts(x, line.size))


def part_of_sequence(line: Line, x: Tensor) -> Tensor:
    """[b, s, ...] -> [b, s/t, ...]: this rank's part, a copy."""
    t, s = line.size, x.shape[1] if x.dim() > 1 else 0
    if x.dim() < 2 or s % t or not s:
        raise ValueError(
            f"Sequence parallelism divides the sequence, dimension 1 of the first layer's input, over {t} ranks, and "
            f"that input has shape {list(x.shape)}: {_instead(s, t)}, or train without sequence parallelism"
        )
    return x.narrow(1, line.index * (s // t), s // t).clone()


def _instead(s: int, t: int) -> str:
    if not s:
        return "it needs a sequence"
    longer, fewer = (s // t + 1) * t, max(n for n in range(1, t) if s % n == 0) if t > 1 else 1
    return f"pad it to {longer}" + (f", or take tp={fewer}" if fewer > 1 else "")


# ---- the operators -------------------------------------------------------------------------------------------


def f(line: Line, x: Tensor) -> Tensor:
    """Into a region; the gradients of x are partial sums, one a rank."""
    return _conjugate(line, x, _nothing, _sum)


def g(line: Line, y: Tensor) -> Tensor:
    """Out of a region; y is a partial sum, and overwritten."""
    return _G.apply(line, y)  # type: ignore[no-any-return, no-untyped-call]


def f_bar(line: Line, x: Tensor) -> Tensor:
    """Into a region: [b, s/t, h] -> [b, s, h]."""
    return _conjugate(line, x, join_sequence, reduced_sequence)


def g_bar(line: Line, y: Tensor) -> Tensor:
    """Out of a region: [b, s, h], a partial sum -> [b, s/t, h]."""
    return _conjugate(line, y, reduced_sequence, join_sequence)


def scatter(line: Line, x: Tensor) -> Tensor:
    """Into what is divided by sequence: [b, s, h] -> [b, s/t, h].

    Raises:
        ValueError: t does not divide s.
    """
    return _conjugate(line, x, part_of_sequence, join_sequence)


def gather(line: Line, x: Tensor) -> Tensor:
    """Out of it: [b, s/t, h] -> [b, s, h]."""
    return _conjugate(line, x, join_sequence, part_of_sequence)


def gather_features(line: Line, y: Tensor, sizes: Sequence[int], dim: int = -1) -> Tensor:
    """[..., n_i, ...] of each rank -> [..., sum of n_i, ...].

    Args:
        y: this rank's.
        sizes: n_i, of each rank.
        dim: that is divided.
    """
    return _GatherFeatures.apply(line, y, tuple(sizes), dim)  # type: ignore[no-any-return, no-untyped-call]


Exchange: TypeAlias = Callable[[Line, Tensor], Tensor]
"""One of those above, or these two."""


def _nothing(line: Line, x: Tensor) -> Tensor:
    return x.view_as(x)  # autograd wants another tensor than it gave


def _sum(line: Line, dx: Tensor) -> Tensor:
    return line.all_reduce(dx.contiguous())


def _conjugate(line: Line, x: Tensor, forward: Exchange, backward: Exchange) -> Tensor:
    """An operator: one exchange on the way there, its conjugate on the way back."""
    return _Conjugate.apply(line, x, forward, backward)  # type: ignore[no-any-return, no-untyped-call]


class _Conjugate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, line: Line, x: Tensor, forward: Exchange, backward: Exchange) -> Tensor:
        ctx.line, ctx.exchange = line, backward
        return forward(line, x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[None, Tensor, None, None]:
        return None, ctx.exchange(ctx.line, dx), None, None


class _G(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, line: Line, y: Tensor) -> Tensor:
        ctx.mark_dirty(y)
        return line.all_reduce(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor]:
        return None, dy


class _GatherFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, line: Line, y: Tensor, sizes: tuple[int, ...], dim: int) -> Tensor:
        ctx.line, ctx.sizes, ctx.dim = line, sizes, dim
        # Parts of one size can be gathered: shorter ones are filled up, and cut again.
        mine = y.movedim(dim, 0)
        short = max(sizes) - mine.shape[0]
        if short:
            mine = torch.cat([mine, mine.new_zeros(short, *mine.shape[1:])])
        parts = line.all_gather(mine.contiguous()).split(max(sizes))
        whole = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
        return whole.movedim(0, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor, None, None]:
        i = ctx.line.index
        mine = dy.narrow(ctx.dim, sum(ctx.sizes[:i]), ctx.sizes[i])
        return None, mine.contiguous(), None, None
