"""Ulysses attention: around attention, an all-to-all divides the heads in place of the sequence, and another one back.

    divide heads    q, k and v: [b, h, s/n, d] of all heads become [b, h/n, s, d] of the whole sequence
    attend          each rank with its heads, as on one rank
    divide tokens   the output: [b, h/n, s, e] becomes [b, h, s/n, e]

In each of the four all-to-alls of a forward a rank sends (n-1)/n of its part of a tensor: together 4 b s h/n (n-1)/n
elements, which shrinks with n, while a ring's n - 1 blocks of keys and values remain 2 b s h (n-1)/n. But n cannot
exceed the number of heads, and no communication overlaps with computation.

With grouped queries n ranks divide the heads of keys too; if n is a multiple of these, each goes to several ranks.
`mpkit.strategies.reference.ulysses` is the algorithm.

Source: Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence
Transformer Models", 2023, section 3.
"""

from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mpkit.strategies.comm.communicator import Communicator
from mpkit.strategies.tensor.operators import conjugate


def ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, group: Communicator, *, is_causal: bool = False, scale: float | None = None,
    attended: Callable[[int], None] | None = None,
) -> Tensor:  # fmt: skip
    """Return `scaled_dot_product_attention` over the whole sequence for this rank's queries.

    >>> import torch, mpkit as mk
    >>> q, k, v = (torch.randn(1, 4, 6, 4, dtype=torch.float64) for _ in range(3))
    >>> def part(ctx):
    ...     mine = (x.chunk(2, dim=2)[ctx.rank] for x in (q, k, v))
    ...     return ulysses_attention(*mine, ctx.comm, is_causal=True)
    >>> with mk.Cluster(ranks=2, device="cpu") as cluster:
    ...     whole = torch.cat(cluster.run(part), 2)
    >>> torch.allclose(whole, scaled_dot_product_attention(q, k, v, is_causal=True))
    True

    Args:
        q: [batch, heads, s/n, d].
        k: [batch, key heads, s/n, d]; the key heads divide the heads.
        v: [batch, key heads, s/n, e]. The result is [batch, heads, s/n, e], in q's dtype.
        attended: is called with the number of pairs of a query and a key on this rank, in all samples and heads.
    """
    n = group.size
    _check_heads(q, k, n)
    if k.shape[1] % n:  # a head of keys for several ranks
        k, v = (x.repeat_interleave(n // x.shape[1], 1) for x in (k, v))
    # ---- divide heads
    q, k, v = (conjugate(group, x, divide_heads, divide_tokens) for x in (q, k, v))
    # ---- attend
    grouped = q.shape[1] != k.shape[1]
    out = scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=grouped)
    if attended is not None:
        s = q.shape[2]
        attended(q.shape[0] * q.shape[1] * (s * (s + 1) // 2 if is_causal else s * k.shape[2]))
    # ---- divide tokens
    return conjugate(group, out, divide_tokens, divide_heads)


def _check_heads(q: Tensor, k: Tensor, n: int) -> None:
    """Check that n ranks can divide the heads."""
    if q.dim() != 4 or k.dim() != 4:
        raise ValueError(
            f"cp_method='ulysses' divides heads, and these queries have none: shape {list(q.shape)}. "
            "cp_method='ring' needs none."
        )
    heads, of_keys = q.shape[1], k.shape[1]
    if heads % n or (of_keys % n and n % of_keys):
        fits = [c for c in range(2, heads + 1) if heads % c == 0 and (of_keys % c == 0 or c % of_keys == 0)]
        grouped = f" and {of_keys} of keys" if of_keys != heads else ""
        would = f"cp={max(c for c in fits if c <= max(n, fits[0]))}, or " if fits else ""
        raise ValueError(
            f"cp_method='ulysses' on cp={n} ranks divides heads, and {n} ranks cannot divide {heads} "
            f"head{'s' * (heads > 1)}{grouped}: {would}cp_method='ring', which divides none."
        )


def divide_heads(group: Communicator, x: Tensor) -> Tensor:
    """Return this rank's heads of the whole sequence: [b, h, s/n, d] -> [b, h/n, s, d]."""
    parts = x.unflatten(1, (group.size, -1)).movedim(1, 0).contiguous()  # [n, b, h/n, s/n, d], by receiver
    whole: Tensor = group.all_to_all(parts).movedim(0, 2).flatten(2, 3)
    return whole


def divide_tokens(group: Communicator, x: Tensor) -> Tensor:
    """Return all heads of this rank's tokens: [b, h/n, s, d] -> [b, h, s/n, d]."""
    parts = x.unflatten(2, (group.size, -1)).movedim(2, 0).contiguous()  # [n, b, h/n, s/n, d], by receiver
    tokens: Tensor = group.all_to_all(parts).movedim(0, 1).flatten(1, 2)
    return tokens
