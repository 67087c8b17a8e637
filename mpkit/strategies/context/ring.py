"""Ring attention: exact attention over a sequence of which each of n ranks has a part.

Each rank keeps its queries, and ranks pass keys and values around the ring: in step r, rank i computes with those of
rank j = i - r (mod n) while the next ones are being sent, and merges the result by its log-sum-exp.

    forward     for r in 0 .. n-1:  send k, v of j to i+1, receive those of j-1 from i-1;  attend and merge meanwhile
    backward    the same ring, and dk, dv of j follow: each rank adds its share, and they end on rank j

Let a block be the |k| + |v| elements of one rank. Each rank sends n - 1 blocks in the forward; in the backward n - 1
again, and n - 1 blocks of gradients, in fp32 at least. (These start on the first rank that a block visits, and end on
its own, whose share is added there.) Under a causal mask, a rank passes on a block that lies after all of its own
queries without computation.

`mpkit.strategies.reference.ring_attention` is the algorithm, but autograd keeps every block that passes
through. This module adds a backward that does not, sends behind the computation, zigzag order and grouped queries.

Source: Liu, Zaharia & Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023, section 3
and Algorithm 1.

Each query's softmax runs over all keys. A block of keys yields an output, normalized within the block, and the
logarithm of the sum of the exponentials (log-sum-exp); these two are enough to merge blocks in any order.

    attend      S = scale q k^T,  lse = log sum exp S,  o = exp(S - lse) v
    merge       lse = log(exp lse_a + exp lse_b),  o = o_a + w (o_b - o_a) with w = exp(lse_b - lse)
    gradients   recompute P = exp(S - lse) with the lse of the whole sequence; then as for one softmax

On a CPU PyTorch has kernels that compute all of `attend` and all of `gradients`, in tiles that stay in the cache.

Sources: Milakov & Gimelshein, "Online normalizer calculation for softmax", 2018, section 3; Dao et al.,
"FlashAttention", NeurIPS 2022, Algorithms 1 and 4 (appendix B.4), whose symbols these are.

Shapes: queries q [b, h, q, d], keys k [b, h, k, d] and values v [b, h, k, e]; outputs o [b, h, q, e] and lse [b, h, q].
Everything is in fp32 at least.

A step of a ring computes tiles: a run of this rank's queries by a run of the passing keys.

    whole       the keys lie before the queries: each query attends to each key
    diagonal    both are the same tokens: each query attends to the keys up to its own
    none        the keys lie later: no computation
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mpkit.common.torch_private import (
    _scaled_dot_product_flash_attention_for_cpu,
    _scaled_dot_product_flash_attention_for_cpu_backward,
)
from mpkit.strategies.comm.communicator import Communicator
from mpkit.strategies.comm.wire import PendingWork
from mpkit.strategies.context.sequence import pieces


def wide(tensor: Tensor) -> Tensor:
    """Return a 16-bit tensor in float32, in which to sum; PyTorch's own unfused attention does the same."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _has_kernel(*tensors: Tensor) -> bool:
    """Return whether the kernels for CPUs take these tensors: of one width, with adjacent elements."""
    width = tensors[0].shape[-1]
    return all(each.is_cpu and each.stride(-1) == 1 and each.shape[-1] == width for each in tensors)


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
    """Return a block's share of dq, and its dk and dv from these queries; out and lse are of the whole sequence."""
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
        """Merge with an adjoining tile if both are whole and differ in keys or queries only; else return both."""
        if self.diagonal or after.diagonal:
            return [self, after]
        if self.queries == after.queries and self.keys.stop == after.keys.start:
            return [self._replace(keys=slice(self.keys.start, after.keys.stop))]
        if self.keys == after.keys and self.queries.stop == after.queries.start:
            return [self._replace(queries=slice(self.queries.start, after.queries.stop))]
        return [self, after]

    @property
    def pairs(self) -> int:
        """The number of pairs of a query and a key in one head of one sample."""
        q, k = (run.stop - run.start for run in (self.queries, self.keys))
        pairs: int = q * (q + 1) // 2 if self.diagonal else q * k
        return pairs


class Tiles:
    """Which runs of a rank's queries, `length` per sequence, attend to which runs of another rank's keys."""

    def __init__(self, group: Communicator, is_causal: bool, order: str, length: int) -> None:
        self._n, self._i, self._causal = group.size, group.index, is_causal
        self._order, self._length = order, length

    def tiles_of(self, r: int, keys: int) -> list[Tile]:
        """Return the tiles of step r, with so many keys per sequence.

        >>> from mpkit.strategies.comm.fake_group import FakeGroup
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


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, group: Communicator, *, is_causal: bool = False, scale: float | None = None,
    order: str = "contiguous", attended: Callable[[int], None] | None = None,
) -> Tensor:  # fmt: skip
    """Return `scaled_dot_product_attention` over the whole sequence for this rank's queries.

    >>> import mpkit as mk
    >>> from torch.nn.functional import scaled_dot_product_attention
    >>> q, k, v = (torch.randn(1, 2, 6, 4, dtype=torch.float64) for _ in range(3))
    >>> def part(ctx):
    ...     mine = (x.chunk(3, dim=2)[ctx.rank] for x in (q, k, v))
    ...     return ring_attention(*mine, ctx.comm, is_causal=True)
    >>> with mk.Cluster(ranks=3, device="cpu") as cluster:
    ...     whole = torch.cat(cluster.run(part), 2)
    >>> torch.allclose(whole, scaled_dot_product_attention(q, k, v, is_causal=True))
    True

    Args:
        q: [batch, heads, s/n, d], or without heads.
        k: [batch, key heads, s'/n, d]; the key heads divide the heads: as many consecutive heads share each.
        v: [batch, key heads, s'/n, e]. The result is [batch, heads, s/n, e], in q's dtype.
        is_causal: whether each token attends only to itself and those before it; then s' = s.
        scale: factor of q k^T; None for 1/sqrt(d).
        order: which part of the sequence each rank has, "contiguous" or "zigzag".
        attended: is called with the number of pairs of a query and a key on this rank, in all samples and heads.
    """
    check_shapes(q, k, v, is_causal, len(pieces(0, group.size, order)))
    flat = q.dim() == 3
    if flat:
        q, k, v = (tensor[:, None] for tensor in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with torch.autocast(q.device.type, enabled=False):  # sums here have the dtype that `wide` chooses
        tiles = Tiles(group, is_causal, order, q.shape[-2])
        out: Tensor = _Ring.apply(q, k, v, group, tiles, scale, attended)  # type: ignore[no-untyped-call]
    return out[:, 0] if flat else out


def check_shapes(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, pieces: int) -> None:
    """Check that shapes and dtypes fit each other."""
    given = f"q {list(q.shape)} {q.dtype}, k {list(k.shape)} {k.dtype}, v {list(v.shape)} {v.dtype}"
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"Ring attention takes q, k and v of one dtype, not {given}.")
    if not (q.dim() == k.dim() == v.dim() and q.dim() in (3, 4)):
        raise ValueError(f"Ring attention takes q, k and v [batch, heads, time, width], not {given}.")
    if q.shape[0] != k.shape[0] or k.shape[:-1] != v.shape[:-1] or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"Ring attention: q and k need the same batch and width, k and v all but the width: {given}."
        )
    if q.dim() == 4 and q.shape[1] % k.shape[1]:
        raise ValueError(f"Ring attention: the heads of k and v have to divide those of q: {given}.")
    if is_causal and q.shape[-2] != k.shape[-2]:
        raise ValueError(f"Ring attention: is_causal needs as many keys as queries: {given}.")
    if q.shape[-2] % pieces or k.shape[-2] % pieces:
        raise ValueError(f'Ring attention: order="zigzag" needs an even number of tokens per rank: {given}.')


class _Ring(torch.autograd.Function):
    """(q [b, h g, s/n, d], k [b, h, s/n, d], v [b, h, s/n, e]) -> [b, h g, s/n, e]."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Communicator, tiles: Tiles, scale: float,
        attended: Callable[[int], None] | None,
    ) -> Tensor:  # fmt: skip
        queries = wide(q)
        out = queries.new_zeros(*q.shape[:-1], v.shape[-1])
        lse = queries.new_full(q.shape[:-1], -torch.inf)
        pairs = 0
        block = _pack(k, v)
        for r in range(group.size):
            # ---- send k, v of j, receive those of j - 1
            moving = _RingExchange(group, block, f"K{r}") if r < group.size - 1 else None
            # ---- attend and merge meanwhile
            keys, values = (_share_heads(wide(tensor), q) for tensor in _unpack(block, k, v))
            for tile in tiles.tiles_of(r, k.shape[-2]):
                mine, theirs, diagonal = tile
                new = attend(queries[:, :, mine], keys[:, :, theirs], values[:, :, theirs], diagonal, scale)
                merge(out[:, :, mine], lse[:, :, mine], *new)
                pairs += tile.pairs
            block = moving.wait() if moving else block
        if attended is not None:
            attended(pairs * q.shape[0] * q.shape[1])
        out = out.to(q.dtype)
        ctx.group, ctx.tiles, ctx.scale = group, tiles, scale
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        group, tiles = ctx.group, ctx.tiles
        queries, *of_rows = wide(q), wide(out), lse, wide(do)
        dq = torch.zeros_like(queries)
        block, own, following = _pack(k, v), None, None
        for r in range(group.size):
            # ---- send k, v of j, receive those of j - 1
            moving = _RingExchange(group, block, f"K{r}") if r < group.size - 1 else None
            # ---- this rank's share of dk, dv of j meanwhile
            keys, values = (_share_heads(wide(tensor), q) for tensor in _unpack(block, k, v))
            shares = []
            for mine, theirs, diagonal in tiles.tiles_of(r, k.shape[-2]):
                of_queries, of_keys, of_values = gradients(
                    queries[:, :, mine], keys[:, :, theirs], values[:, :, theirs], diagonal, ctx.scale,
                    *(tensor[:, :, mine] for tensor in of_rows),
                )  # fmt: skip
                dq[:, :, mine].add_(of_queries)
                shares.append((theirs, _sum_heads(of_keys, k), _sum_heads(of_values, v)))
            # ---- add it to those of the ranks before, and send the sum after j
            total = torch.zeros_like(wide(block)) if following is None else following.wait()
            dk, dv = _unpack(total, k, v)
            for theirs, of_keys, of_values in shares:
                dk[:, :, theirs].add_(of_keys)
                dv[:, :, theirs].add_(of_values)
            if r == 0:
                own = total
            else:
                following = _RingExchange(group, total, f"G{r}")
            block = moving.wait() if moving else block
        assert own is not None
        # ---- receive the sum of this rank's own dk, dv
        own = own if following is None else following.wait().add_(own)
        dk, dv = _unpack(own, k, v)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None


class _RingExchange:
    """A tensor being sent to the next rank, and another one being received from the rank before.

    For a backend that matches messages by order and not by name, some ranks have to receive first.
    """

    def __init__(self, group: Communicator, tensor: Tensor, tag: str) -> None:
        def send() -> PendingWork:
            return group.isend(tensor, (group.index + 1) % group.size, tag)

        def receive() -> PendingWork:
            return group.irecv(torch.empty_like(tensor), (group.index - 1) % group.size, tag)

        if group.index % 2:
            self._received, self._sent = receive(), send()
        else:
            self._sent, self._received = send(), receive()

    def wait(self) -> Tensor:
        """Wait for both, and return the received tensor."""
        self._sent.wait()
        return self._received.wait()


def _share_heads(keys: Tensor, q: Tensor) -> Tensor:
    """Repeat each head of keys or values for the queries that share it: [b, h, s, d] -> [b, h g, s, d]."""
    g = q.shape[1] // keys.shape[1]
    return keys if g == 1 else keys.repeat_interleave(g, 1)


def _sum_heads(gradient: Tensor, keys: Tensor) -> Tensor:
    """Sum the gradients of repeated heads: [b, h g, s, d] -> [b, h, s, d]."""
    h = keys.shape[1]
    return gradient if h == gradient.shape[1] else gradient.unflatten(1, (h, -1)).sum(2)


def _pack(k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([k.flatten(), v.flatten()])


def _unpack(block: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two tensors in a message, as views in the shapes of k and v."""
    keys, values = block.split([k.numel(), v.numel()])
    return keys.view(k.shape), values.view(v.shape)
