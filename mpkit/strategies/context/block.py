"""Attention of some queries to some of the keys, and how two such results are merged.

Each query's softmax runs over all keys. For a block of them there are an output, normalized within the block, and the
logarithm of the sum of the exponentials (log-sum-exp); these two are enough to merge blocks in any order.

    attend      S = scale q k^T,  lse = log sum exp S,  o = exp(S - lse) v
    merge       lse = log(exp lse_a + exp lse_b),  o = o_a + w (o_b - o_a) with w = exp(lse_b - lse)
    gradients   recompute P = exp(S - lse) with the lse of the whole sequence; then as for one softmax

On a CPU PyTorch has kernels that compute all of `attend` and all of `gradients`, in tiles that stay in the cache.

Sources: Milakov & Gimelshein, "Online normalizer calculation for softmax", 2018, section 3; Dao et al.,
"FlashAttention", NeurIPS 2022, Algorithms 1 and 4 (appendix B.4), whose symbols these are.

Shapes: queries q [b, h, q, d], keys k [b, h, k, d] and values v [b, h, k, e]; outputs o [b, h, q, e] and lse [b, h, q].
Everything is in fp32 at least.

A step of a ring computes tiles: a run of this rank's queries by a run of the keys that passes.

    whole       the run of keys lies before that of queries: each query attends to each key
    diagonal    both are the same tokens: each query attends to the keys up to its own
    none        the keys lie later: they are passed on without computation
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from mpkit.common.torch_private import (
    _scaled_dot_product_flash_attention_for_cpu,
    _scaled_dot_product_flash_attention_for_cpu_backward,
)
from mpkit.strategies.comm.process_group import ProcessGroup
from mpkit.strategies.context.sequence import pieces

__all__ = ["Tiles", "attend", "gradients", "merge", "wide"]


def wide(tensor: Tensor) -> Tensor:
    """Return a 16-bit tensor in float32, in which to sum; PyTorch's own unfused attention does the same."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _has_kernel(*tensors: Tensor) -> bool:
    """Return whether the kernels for CPUs take these tensors: of one width, whose elements are adjacent."""
    return all(
        each.is_cpu and each.stride(-1) == 1 and each.shape[-1] == tensors[0].shape[-1] for each in tensors
    )


def _scores(q: Tensor, k: Tensor, diagonal: bool, scale: float) -> Tensor:
    """Return S [b, h, q, k]; with `diagonal`, token i, as a query, attends to keys 0 to i."""
    scores = (q * scale) @ k.mT
    if diagonal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        scores.masked_fill_(later, -torch.inf)
    return scores


def attend(q: Tensor, k: Tensor, v: Tensor, diagonal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of one block."""
    if _has_kernel(q, k, v):
        out, lse = _scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, diagonal, scale=scale)
        return out, lse
    scores = _scores(q, k, diagonal, scale)
    lse = scores.logsumexp(-1)
    return scores.sub_(lse[..., None]).exp_() @ v, lse


def merge(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Merge another block of keys into the output and log-sum-exp so far: zeros and -inf before the first one.

    >>> q, k, v = torch.randn(1, 1, 2, 3), torch.randn(1, 1, 5, 3), torch.randn(1, 1, 5, 4)
    >>> out, lse = torch.zeros(1, 1, 2, 4), torch.full((1, 1, 2), -torch.inf)
    >>> for part in (slice(0, 2), slice(2, 5)):
    ...     merge(out, lse, *attend(q, k[:, :, part], v[:, :, part], False, 0.5))
    >>> torch.allclose(out, attend(q, k, v, False, 0.5)[0], atol=1e-6)
    True
    """
    out.lerp_(new_out, (new_lse - lse).sigmoid_()[..., None])
    torch.logaddexp(lse, new_lse, out=lse)


def gradients(
    q: Tensor, k: Tensor, v: Tensor, diagonal: bool, scale: float, out: Tensor, lse: Tensor, do: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a block of keys' share of dq, and the block's dk and dv from these queries.

    Args:
        q, k, v, diagonal, scale: as for `attend`.
        out, lse: output and log-sum-exp of the queries over the whole sequence.
        do: gradient of the output.
    """
    if _has_kernel(q, k, v, out, do):
        dq, dk, dv = _scaled_dot_product_flash_attention_for_cpu_backward(
            do, q, k, v, out, lse, 0.0, diagonal, scale=scale
        )
        return dq, dk, dv
    p = _scores(q, k, diagonal, scale).sub_(lse[..., None]).exp_()
    ds = (do @ v.mT).sub_((do * out).sum(-1, keepdim=True)).mul_(p).mul_(scale)
    return ds @ k, ds.mT @ q, p.mT @ do


class Tile(NamedTuple):
    """Some of this rank's queries by some of the keys that pass; with `diagonal` both are the same tokens."""

    queries: slice
    keys: slice
    diagonal: bool

    def join(self, after: Tile) -> list[Tile]:
        """Return both tiles, or one if both are whole and only their keys, which adjoin, differ, or their queries."""
        if self.diagonal or after.diagonal:
            return [self, after]
        if self.queries == after.queries and self.keys.stop == after.keys.start:
            return [self._replace(keys=slice(self.keys.start, after.keys.stop))]
        if self.keys == after.keys and self.queries.stop == after.queries.start:
            return [self._replace(queries=slice(self.queries.start, after.queries.stop))]
        return [self, after]

    @property
    def pairs(self) -> int:
        """The number of pairs of a query and a key that it attends to, in one head of one sample."""
        q, k = (run.stop - run.start for run in (self.queries, self.keys))
        pairs: int = q * (q + 1) // 2 if self.diagonal else q * k
        return pairs


class Tiles:
    """Which runs of a rank's queries attend to which runs of another rank's keys.

    Args:
        group, is_causal, order: as for `ring_attention`.
        length: the number of queries per sequence on this rank.
    """

    def __init__(self, group: ProcessGroup, is_causal: bool, order: str, length: int) -> None:
        self._n, self._i, self._causal = group.size, group.index, is_causal
        self._order, self._length = order, length

    def tiles_of(self, r: int, keys: int) -> list[Tile]:
        """Return the tiles of step r, in which so many keys per sequence are here.

        >>> from mpkit.strategies.comm.process_group import FakeGroup
        >>> tiles = Tiles(FakeGroup(2, index=1), True, "zigzag", 8)
        >>> for tile in [*tiles.tiles_of(0, 8), *tiles.tiles_of(1, 8)]:
        ...     print(tile.queries, tile.keys, "diagonal" if tile.diagonal else "whole")
        slice(0, 4, None) slice(0, 4, None) diagonal
        slice(4, 8, None) slice(0, 4, None) whole
        slice(4, 8, None) slice(4, 8, None) diagonal
        slice(0, 8, None) slice(0, 4, None) whole
        """
        if not self._causal:  # every token attends to all tokens, in whatever order they are
            return [Tile(slice(0, self._length), slice(0, keys), False)]
        mine, theirs = (self._runs((self._i - by) % self._n) for by in (0, r))
        tiles: list[Tile] = []
        for (piece, queries), (other, passing) in product(mine, theirs):
            if other <= piece:
                tile = Tile(queries, passing, other == piece)
                tiles[-1:] = tiles[-1].join(tile) if tiles else [tile]
        return tiles

    def _runs(self, rank: int) -> list[tuple[int, slice]]:
        """Return the pieces of a rank, each with its place among the rank's tokens."""
        numbers = pieces(rank, self._n, self._order)
        c = self._length // len(numbers)
        return [(piece, slice(i * c, (i + 1) * c)) for i, piece in enumerate(numbers)]
