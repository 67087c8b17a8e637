"""Ring attention: exact attention over a sequence of which each of n ranks has a part.

Each rank keeps its queries. Keys and values go round: in step r rank i computes with those of rank j = i - r (mod n),
while the next ones are under way, and merges what it gets by its log-sum-exp.

    forward     for r in 0 .. n-1:  send k, v of j to i+1, receive those of j-1 from i-1;  attend and merge meanwhile
    backward    the same way round, and dk, dv of j follow: each rank adds its share, and they end with j

Each rank sends, a block being the |k| + |v| elements of one rank: n - 1 blocks in the forward; in the backward n - 1
again, and n - 1 of gradients, in fp32 at least. (These start with the first rank that a block visits, and end with
its own, whose share waits for them there.) A block that comes after all of a rank's own queries is passed on, and
under a causal mask costs no FLOPs.

The whole of it in 40 lines: `mpkit.reference.ring_attention`, where autograd keeps every block that passes through.
This module adds: a backward that does not, sends behind the computation, zigzag order and grouped queries.

Source: Liu, Zaharia & Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023, section 3
and Algorithm 1; the blocks as in `mpkit.parallel.context.block`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mpkit.parallel.axis import Line, Waiting
from mpkit.parallel.context.block import attend, gradients, merge, wide
from mpkit.parallel.context.sequence import pieces

__all__ = ["ring_attention"]


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    line: Line,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    order: str = "contiguous",
) -> Tensor:
    """`scaled_dot_product_attention` of the whole sequence, as far as this rank's queries go.

    >>> import mpkit as mk
    >>> from mpkit.parallel.axis import Axis
    >>> from torch.nn.functional import scaled_dot_product_attention
    >>> q, k, v = (torch.randn(1, 2, 6, 4, dtype=torch.float64) for _ in range(3))
    >>> def part(ctx):
    ...     mine = (x.chunk(3, dim=2)[ctx.rank] for x in (q, k, v))
    ...     return ring_attention(*mine, Axis(ctx.comm), is_causal=True)
    >>> with mk.Cluster(ranks=3, device="cpu") as cluster:
    ...     whole = torch.cat(cluster.run(part), 2)
    >>> torch.allclose(whole, scaled_dot_product_attention(q, k, v, is_causal=True))
    True

    Args:
        q: [batch, heads, s/n, d], or without heads.
        k: [batch, key heads, s'/n, d]; the key heads divide the heads, of which as many in a row share each.
        v: [batch, key heads, s'/n, e].
        line: the axis along which the sequence is cut.
        is_causal: each token looks at itself and those before it; s' = s.
        scale: of q k^T; None: 1/sqrt(d).
        order: which part of the sequence each rank has, "contiguous" or "zigzag".

    Returns:
        [batch, heads, s/n, e], in q's dtype.

    Raises:
        ValueError: the shapes or dtypes do not fit each other.
    """
    check_shapes(q, k, v, is_causal, len(pieces(0, line.size, order)))
    flat = q.dim() == 3
    if flat:
        q, k, v = (tensor[:, None] for tensor in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with torch.autocast(q.device.type, enabled=False):  # what is summed here is summed in what `wide` says
        out: Tensor = _Ring.apply(q, k, v, line, is_causal, scale, order)  # type: ignore[no-untyped-call]
    return out[:, 0] if flat else out


def check_shapes(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, pieces: int) -> None:
    """Say what does not fit."""
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
        raise ValueError(f'Ring attention: order="zigzag" needs an even number of tokens a rank: {given}.')


class _Ring(torch.autograd.Function):
    """(q [b, h g, s/n, d], k [b, h, s/n, d], v [b, h, s/n, e]) -> [b, h g, s/n, e]."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, line: Line, is_causal: bool, scale: float, order: str
    ) -> Tensor:
        tiles = _Tiles(line, is_causal, order)
        queries = tiles.cut(wide(_grouped(q, k)) * scale)
        found: list[tuple[Tensor, Tensor] | None] = [None] * len(queries)
        block = _pack(k, v)
        for r in range(line.size):
            # ---- send k, v of j, receive those of j - 1
            moving = _Moving(line, block, f"K{r}") if r < line.size - 1 else None
            # ---- attend and merge meanwhile
            keys, values = (tiles.cut(wide(tensor)) for tensor in _unpack(block, k, v))
            for a, b, diagonal in tiles.of(r):
                new = attend(queries[a], keys[b], values[b], diagonal)
                before = found[a]
                found[a] = new if before is None else merge(before, new)
            block = moving.arrived() if moving else block
        outputs, lses = zip(*(each for each in found if each is not None), strict=True)
        out, lse = torch.cat(outputs, 3).flatten(1, 2).to(q.dtype), torch.cat(lses, 3)
        ctx.line, ctx.tiles, ctx.scale = line, tiles, scale
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        line, tiles = ctx.line, ctx.tiles
        do, out = wide(_grouped(do, k)), wide(_grouped(out, k))
        rows = wide(_grouped(q, k)) * ctx.scale, lse, do, (do * out).sum(-1)
        queries, lses, dos, deltas = (tiles.cut(tensor, 3) for tensor in rows)
        dq = torch.zeros_like(rows[0])
        dqs = tiles.cut(dq, 3)
        block, own, following = _pack(k, v), None, None
        for r in range(line.size):
            # ---- send k, v of j, receive those of j - 1
            moving = _Moving(line, block, f"K{r}") if r < line.size - 1 else None
            # ---- this rank's share of dk, dv of j meanwhile
            share = torch.zeros_like(wide(block))
            dks, dvs = (tiles.cut(tensor) for tensor in _unpack(share, k, v))
            keys, values = (tiles.cut(wide(tensor)) for tensor in _unpack(block, k, v))
            for a, b, diagonal in tiles.of(r):
                of_rows = lses[a], dos[a], deltas[a]
                found = gradients(queries[a], keys[b], values[b], diagonal, *of_rows)
                for total, new in zip((dqs[a], dks[b], dvs[b]), found, strict=True):
                    total += new
            # ---- dk, dv of j follow
            if r == 0:
                own = share
            else:
                share = share if following is None else following.arrived().add_(share)
                following = _Moving(line, share, f"G{r}")
            block = moving.arrived() if moving else block
        assert own is not None
        # ---- and end with j
        own = own if following is None else following.arrived().add_(own)
        dk, dv = _unpack(own, k, v)
        dq = dq.mul_(ctx.scale).flatten(1, 2)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None


class _Tiles:
    """Which pieces of a rank's queries look at which of another's keys.

    Args:
        line, is_causal, order: as `ring_attention` takes them.
    """

    def __init__(self, line: Line, is_causal: bool, order: str) -> None:
        self._n, self._i, self._causal = line.size, line.index, is_causal
        # Where everybody looks at everything, it matters nowhere which part is whose.
        self._order = order if is_causal else "contiguous"

    def of(self, r: int) -> Iterator[tuple[int, int, bool]]:
        """In step r: (number of the piece of queries, of the piece of keys, whether they are the same piece)."""
        theirs = pieces((self._i - r) % self._n, self._n, self._order)
        for a, mine in enumerate(pieces(self._i, self._n, self._order)):
            for b, other in enumerate(theirs):
                if not self._causal or other <= mine:
                    yield a, b, self._causal and other == mine

    def cut(self, tensor: Tensor, dim: int = -2) -> tuple[Tensor, ...]:
        """Into the pieces, views."""
        return tensor.chunk(len(pieces(0, self._n, self._order)), dim)


class _Moving:
    """A tensor on its way to the next rank, and another one from the rank before.

    Where a backend matches messages by their order and not by name, somebody has to receive first.
    """

    def __init__(self, line: Line, tensor: Tensor, tag: str) -> None:
        def send() -> Waiting:
            return line.isend(tensor, (line.index + 1) % line.size, tag)

        def receive() -> Waiting:
            return line.irecv(torch.empty_like(tensor), (line.index - 1) % line.size, tag)

        if line.index % 2:
            self._received, self._sent = receive(), send()
        else:
            self._sent, self._received = send(), receive()

    def arrived(self) -> Tensor:
        """What came; waits until it has, and until what was sent has left."""
        self._sent.wait()
        return self._received.wait()


def _grouped(q: Tensor, k: Tensor) -> Tensor:
    """[b, h g, s, d] -> [b, h, g, s, d]."""
    grouped: Tensor = q.unflatten(1, (k.shape[1], -1))
    return grouped


def _pack(k: Tensor, v: Tensor) -> Tensor:
    """Both as one message."""
    return torch.cat([k.flatten(), v.flatten()])


def _unpack(block: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """What a message holds, as views: tensors of the shapes of k and v."""
    keys, values = block.split([k.numel(), v.numel()])
    return keys.view(k.shape), values.view(v.shape)
