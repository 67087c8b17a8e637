"""The operators at the borders of divided layers, and what each communicates in the forward and in the backward.

                     forward            backward
    f                nothing            all-reduce          into a region: x is the same everywhere
    g                all-reduce         nothing             out of it: partial sums
    f_bar            all-gather         reduce-scatter      the same two, with x and y divided by sequence
    g_bar            reduce-scatter     all-gather
    scatter          nothing            all-gather          into a divided sequence: a rank takes its part
    gather           all-gather         nothing             out of it
    gather_features  all-gather         nothing             the outputs of a column layer that has no row layer

The two of each pair are conjugate: what one does in the forward, the other does in the backward. x is [batch,
sequence, features]; the sequence is dimension 1. An all-reduce is a reduce-scatter followed by an all-gather, so both
pairs send the same number of bytes.

`mpkit.strategies.reference.tensor.conjugates`, with `parallel_mlp` and `parallel_attention`, is all of this in plain
PyTorch. This package adds a plan for unmodified models, widths and heads that the number of ranks does not divide,
grouped queries, overlap with the backward, tied embeddings, and dropout.

Sources: Shoeybi et al. 2019, figure 3; Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models", MLSys 2023, section 4.2.2.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mpkit.strategies.comm.communicator import Communicator

# ---- communication without autograd --------------------------------------------------------------------------


def by_parts(x: Tensor, t: int) -> Tensor:
    """Reorder [b, s, ...] to [t b, s/t, ...]: the parts of the sequence one after another, to scatter them."""
    b, s = x.shape[:2]
    return x.reshape(b, t, s // t, *x.shape[2:]).transpose(0, 1).reshape(t * b, s // t, *x.shape[2:])


def from_parts(parts: Tensor, t: int) -> Tensor:
    """Reorder [t b, s/t, ...] to [b, s, ...]: the sequence from its gathered parts."""
    b, length = parts.shape[0] // t, parts.shape[1]
    return parts.view(t, b, *parts.shape[1:]).transpose(0, 1).reshape(b, t * length, *parts.shape[2:])


def join_sequence(group: Communicator, x: Tensor) -> Tensor:
    """Gather [b, s/t, ...] from each rank into [b, s, ...]."""
    return from_parts(group.all_gather(x.contiguous()), group.size)


def reduced_sequence(group: Communicator, x: Tensor) -> Tensor:
    """Sum [b, s, ...] over the ranks, and return this rank's part [b, s/t, ...]."""
    return group.reduce_scatter(by_parts(x, group.size))


def part_of_sequence(group: Communicator, x: Tensor) -> Tensor:
    """Copy this rank's part [b, s/t, ...] of [b, s, ...]."""
    t, s = group.size, x.shape[1] if x.dim() > 1 else 0
    if x.dim() < 2 or s % t or not s:
        raise ValueError(
            f"Sequence parallelism divides the sequence, dimension 1 of the first layer's input, over {t} ranks, and "
            f"that input has shape {list(x.shape)}: {_suggest_length(s, t)}, or train without sequence parallelism"
        )
    return x.narrow(1, group.index * (s // t), s // t).clone()


def _suggest_length(s: int, t: int) -> str:
    if not s:
        return "it needs a sequence"
    longer, fewer = (s // t + 1) * t, max(n for n in range(1, t) if s % n == 0) if t > 1 else 1
    return f"pad it to {longer}" + (f", or take tp={fewer}" if fewer > 1 else "")


# ---- the operators -------------------------------------------------------------------------------------------


def f(group: Communicator, x: Tensor) -> Tensor:
    """Enter a region; the gradients of x are partial sums, one per rank."""
    return conjugate(group, x, _identity, _sum)


def g(group: Communicator, y: Tensor) -> Tensor:
    """Leave a region; y is a partial sum, and is overwritten."""
    return _G.apply(group, y)  # type: ignore[no-any-return, no-untyped-call]


def f_bar(group: Communicator, x: Tensor) -> Tensor:
    """Enter a region: [b, s/t, h] -> [b, s, h]."""
    return conjugate(group, x, join_sequence, reduced_sequence)


def g_bar(group: Communicator, y: Tensor) -> Tensor:
    """Leave a region: [b, s, h], a partial sum -> [b, s/t, h]."""
    return conjugate(group, y, reduced_sequence, join_sequence)


def scatter(group: Communicator, x: Tensor) -> Tensor:
    """Divide the sequence: [b, s, h] -> [b, s/t, h]."""
    return conjugate(group, x, part_of_sequence, join_sequence)


def gather(group: Communicator, x: Tensor) -> Tensor:
    """Join the sequence: [b, s/t, h] -> [b, s, h]."""
    return conjugate(group, x, join_sequence, part_of_sequence)


def gather_features(group: Communicator, y: Tensor, sizes: Sequence[int]) -> Tensor:
    """Gather [..., n_i] from each rank, whose sizes are n_i, into [..., sum of n_i]."""
    return _GatherFeatures.apply(group, y, tuple(sizes))  # type: ignore[no-any-return, no-untyped-call]


Exchange: TypeAlias = Callable[[Communicator, Tensor], Tensor]


def _identity(group: Communicator, x: Tensor) -> Tensor:
    return x.view_as(x)  # autograd needs a new tensor object


def _sum(group: Communicator, dx: Tensor) -> Tensor:
    return group.all_reduce(dx.contiguous())


def conjugate(group: Communicator, x: Tensor, forward: Exchange, backward: Exchange) -> Tensor:
    """Apply one exchange in the forward, and its conjugate in the backward."""
    return _Conjugate.apply(group, x, forward, backward)  # type: ignore[no-any-return, no-untyped-call]


class _Conjugate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Communicator, x: Tensor, forward: Exchange, backward: Exchange) -> Tensor:
        ctx.group, ctx.exchange = group, backward
        return forward(group, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[None, Tensor, None, None]:
        return None, ctx.exchange(ctx.group, dx), None, None


class _G(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Communicator, y: Tensor) -> Tensor:
        ctx.mark_dirty(y)
        return group.all_reduce(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor]:
        return None, dy


class _GatherFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Communicator, y: Tensor, sizes: tuple[int, ...]) -> Tensor:
        ctx.group, ctx.sizes = group, sizes
        # An all-gather takes parts of one size: pad shorter ones, and cut them again.
        mine = y.movedim(-1, 0)
        short = max(sizes) - mine.shape[0]
        if short:
            mine = torch.cat([mine, mine.new_zeros(short, *mine.shape[1:])])
        parts = group.all_gather(mine.contiguous()).split(max(sizes))
        whole = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
        return whole.movedim(0, -1).contiguous()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor, None]:
        i = ctx.group.index
        return None, dy.narrow(-1, sum(ctx.sizes[:i]), ctx.sizes[i]).contiguous(), None
