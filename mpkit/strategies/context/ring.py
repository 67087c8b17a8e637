"""Ring attention: exact attention over a sequence of which each of n ranks has a part.

Each rank keeps its queries. Keys and values are passed around the ring: in step r, rank i computes with those of rank
j = i - r (mod n) while the next ones are being sent, and merges the result by its log-sum-exp.

    forward     for r in 0 .. n-1:  send k, v of j to i+1, receive those of j-1 from i-1;  attend and merge meanwhile
    backward    the same ring, and dk, dv of j follow: each rank adds its share, and they end on rank j

Let a block be the |k| + |v| elements of one rank. Each rank sends n - 1 blocks in the forward; in the backward n - 1
again, and n - 1 blocks of gradients, in fp32 at least. (These start on the first rank that a block visits, and end on
its own, whose share is added there.) Under a causal mask, a block that lies after all of a rank's own queries is passed
on without computation.

`mpkit.strategies.reference.ring_attention` is the algorithm in 40 lines, but autograd keeps every block that passes
through. This module adds a backward that does not, sends behind the computation, zigzag order and grouped queries.

Source: Liu, Zaharia & Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023, section 3
and Algorithm 1; blocks are computed as in `mpkit.strategies.context.block`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mpkit.strategies.comm.process_group import PendingWork, ProcessGroup
from mpkit.strategies.context.block import attend, gradients, merge, wide
from mpkit.strategies.context.sequence import pieces

__all__ = ["ring_attention"]


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: ProcessGroup,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    order: str = "contiguous",
) -> Tensor:
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
        v: [batch, key heads, s'/n, e].
        group: the ranks of the axis along which the sequence is divided.
        is_causal: whether each token attends only to itself and those before it; then s' = s.
        scale: factor of q k^T; None for 1/sqrt(d).
        order: which part of the sequence each rank has, "contiguous" or "zigzag".

    Returns:
        [batch, heads, s/n, e], in q's dtype.

    Raises:
        ValueError: the shapes or dtypes do not fit each other.
    """
    check_shapes(q, k, v, is_causal, len(pieces(0, group.size, order)))
    flat = q.dim() == 3
    if flat:
        q, k, v = (tensor[:, None] for tensor in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with torch.autocast(q.device.type, enabled=False):  # sums here have the dtype that `wide` chooses
        out: Tensor = _Ring.apply(q, k, v, group, is_causal, scale, order)  # type: ignore[no-untyped-call]
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
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        group: ProcessGroup,
        is_causal: bool,
        scale: float,
        order: str,
    ) -> Tensor:
        tiles = _Tiles(group, is_causal, order)
        queries = tiles.cut(wide(_group_heads(q, k)) * scale)
        merged: list[tuple[Tensor, Tensor] | None] = [None] * len(queries)
        block = _pack(k, v)
        for r in range(group.size):
            # ---- send k, v of j, receive those of j - 1
            moving = _RingExchange(group, block, f"K{r}") if r < group.size - 1 else None
            # ---- attend and merge meanwhile
            keys, values = (tiles.cut(wide(tensor)) for tensor in _unpack(block, k, v))
            for a, b, diagonal in tiles.tiles_of(r):
                new = attend(queries[a], keys[b], values[b], diagonal)
                before = merged[a]
                merged[a] = new if before is None else merge(before, new)
            block = moving.wait() if moving else block
        outputs, lses = zip(*(each for each in merged if each is not None), strict=True)
        out, lse = torch.cat(outputs, 3).flatten(1, 2).to(q.dtype), torch.cat(lses, 3)
        ctx.group, ctx.tiles, ctx.scale = group, tiles, scale
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        group, tiles = ctx.group, ctx.tiles
        do, out = wide(_group_heads(do, k)), wide(_group_heads(out, k))
        rows = wide(_group_heads(q, k)) * ctx.scale, lse, do, (do * out).sum(-1)
        queries, lses, dos, deltas = (tiles.cut(tensor, 3) for tensor in rows)
        dq = torch.zeros_like(rows[0])
        dqs = tiles.cut(dq, 3)
        block, own, following = _pack(k, v), None, None
        for r in range(group.size):
            # ---- send k, v of j, receive those of j - 1
            moving = _RingExchange(group, block, f"K{r}") if r < group.size - 1 else None
            # ---- this rank's share of dk, dv of j meanwhile
            share = torch.zeros_like(wide(block))
            dks, dvs = (tiles.cut(tensor) for tensor in _unpack(share, k, v))
            keys, values = (tiles.cut(wide(tensor)) for tensor in _unpack(block, k, v))
            for a, b, diagonal in tiles.tiles_of(r):
                of_rows = lses[a], dos[a], deltas[a]
                grads = gradients(queries[a], keys[b], values[b], diagonal, *of_rows)
                for total, new in zip((dqs[a], dks[b], dvs[b]), grads, strict=True):
                    total += new
            # ---- dk, dv of j follow
            if r == 0:
                own = share
            else:
                share = share if following is None else following.wait().add_(share)
                following = _RingExchange(group, share, f"G{r}")
            block = moving.wait() if moving else block
        assert own is not None
        # ---- and end with j
        own = own if following is None else following.wait().add_(own)
        dk, dv = _unpack(own, k, v)
        dq = dq.mul_(ctx.scale).flatten(1, 2)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None


class _Tiles:
    """Which pieces of a rank's queries attend to which pieces of another rank's keys.

    Args:
        group, is_causal, order: as for `ring_attention`.
    """

    def __init__(self, group: ProcessGroup, is_causal: bool, order: str) -> None:
        self._n, self._i, self._causal = group.size, group.index, is_causal
        # Where every token attends to all tokens, the order makes no difference.
        self._order = order if is_causal else "contiguous"

    def tiles_of(self, r: int) -> Iterator[tuple[int, int, bool]]:
        """Yield for step r the numbers of a piece of queries and one of keys, and whether they are the same."""
        theirs = pieces((self._i - r) % self._n, self._n, self._order)
        for a, mine in enumerate(pieces(self._i, self._n, self._order)):
            for b, other in enumerate(theirs):
                if not self._causal or other <= mine:
                    yield a, b, self._causal and other == mine

    def cut(self, tensor: Tensor, dim: int = -2) -> tuple[Tensor, ...]:
        """Cut a tensor into the pieces, as views."""
        return tensor.chunk(len(pieces(0, self._n, self._order)), dim)


class _RingExchange:
    """A tensor being sent to the next rank, and another one being received from the rank before.

    Where a backend matches messages by order and not by name, some ranks have to receive first.
    """

    def __init__(self, group: ProcessGroup, tensor: Tensor, tag: str) -> None:
        def send() -> PendingWork:
            return group.isend(tensor, (group.index + 1) % group.size, tag)

        def receive() -> PendingWork:
            return group.irecv(torch.empty_like(tensor), (group.index - 1) % group.size, tag)

        if group.index % 2:
            self._received, self._sent = receive(), send()
        else:
            self._sent, self._received = send(), receive()

    def wait(self) -> Tensor:
        """Wait for both, and return the tensor that was received."""
        self._sent.wait()
        return self._received.wait()


def _group_heads(q: Tensor, k: Tensor) -> Tensor:
    """Group the heads: [b, h g, s, d] -> [b, h, g, s, d]."""
    grouped: Tensor = q.unflatten(1, (k.shape[1], -1))
    return grouped


def _pack(k: Tensor, v: Tensor) -> Tensor:
    """Pack keys and values as one message."""
    return torch.cat([k.flatten(), v.flatten()])


def _unpack(block: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tensors in a message as views in the shapes of k and v."""
    keys, values = block.split([k.numel(), v.numel()])
    return keys.view(k.shape), values.view(v.shape)
