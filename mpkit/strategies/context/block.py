"""Attention of some queries to some of the keys, and how two such results are merged.

Each query's softmax runs over all keys. For a block of them there are an output, normalized within the block, and the
logarithm of the sum of the exponentials (log-sum-exp); these two are enough to merge blocks in any order.

    attend      S = q k^T (of scaled q),  lse = log sum exp S,  o = exp(S - lse) v
    merge       lse = log(exp lse_a + exp lse_b),  o = exp(lse_a - lse) o_a + exp(lse_b - lse) o_b
    gradients   recompute P = exp(S - lse) with the lse of the whole sequence; then as for one softmax

Sources: Milakov & Gimelshein, "Online normalizer calculation for softmax", 2018, section 3; Dao et al.,
"FlashAttention", NeurIPS 2022, Algorithms 1 and 4 (appendix B.4), whose symbols these are.

Shapes: queries q [b, h, g, q, d], of which g share each of the h heads of keys k [b, h, k, d] and values
v [b, h, k, e]; outputs o [b, h, g, q, e] and lse [b, h, g, q]. Everything is in fp32 at least.

A step of a ring computes tiles: a run of this rank's queries by a run of the keys that passes.

    whole       the run of keys lies before that of queries, in the same document: each query attends to each key
    diagonal    both are the same tokens: each query attends to the keys up to its own
    none        the keys lie later, or in another document: they are passed on without computation
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mpkit.strategies.comm.process_group import ProcessGroup
from mpkit.strategies.context.layout import SequenceLayout, TokenRun

__all__ = ["Tiles", "attend", "count_pairs", "gradients", "join_runs", "merge", "wide"]


def wide(tensor: Tensor) -> Tensor:
    """Return a 16-bit tensor in float32, in which to sum; PyTorch's own unfused attention does the same."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _scores(q: Tensor, k: Tensor, diagonal: bool) -> Tensor:
    """Return S [b, h, g, q, k]; with `diagonal`, token i, as a query, attends to keys 0 to i."""
    scores = torch.einsum("bhgqd,bhkd->bhgqk", q, k)
    if diagonal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        scores.masked_fill_(later, -torch.inf)
    return scores


def attend(q: Tensor, k: Tensor, v: Tensor, diagonal: bool) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of one block; the queries are already scaled."""
    scores = _scores(q, k, diagonal)
    lse = scores.logsumexp(-1)
    p = scores.sub_(lse[..., None]).exp_()
    return torch.einsum("bhgqk,bhke->bhgqe", p, v), lse


def merge(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exp of two blocks of keys together.

    >>> q, k, v = torch.randn(1, 1, 1, 2, 3), torch.randn(1, 1, 5, 3), torch.randn(1, 1, 5, 4)
    >>> blocks = [attend(q, k[:, :, part], v[:, :, part], False) for part in (slice(0, 2), slice(2, 5))]
    >>> torch.allclose(merge(*blocks)[0], attend(q, k, v, False)[0], atol=1e-6)
    True
    """
    lse = torch.logaddexp(a[1], b[1])
    weigh_a, weigh_b = ((part[1] - lse).exp_()[..., None] for part in (a, b))
    return weigh_a * a[0] + weigh_b * b[0], lse


def gradients(
    q: Tensor, k: Tensor, v: Tensor, diagonal: bool, lse: Tensor, do: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a block of keys' share of dq (of the scaled queries), and the block's dk and dv from these queries.

    Args:
        lse: log-sum-exp of the queries over the whole sequence.
        do: gradient of the output.
        delta: D = rowsum(do * o), [b, h, g, q].
    """
    p = _scores(q, k, diagonal).sub_(lse[..., None]).exp_()
    dv = torch.einsum("bhgqk,bhgqe->bhke", p, do)
    dp = torch.einsum("bhgqe,bhke->bhgqk", do, v)
    ds = dp.sub_(delta[..., None]).mul_(p)
    dq = torch.einsum("bhgqk,bhkd->bhgqd", ds, k)
    dk = torch.einsum("bhgqk,bhgqd->bhkd", ds, q)
    return dq, dk, dv


class Tiles:
    """Which runs of a rank's queries attend to which runs of another rank's keys.

    Args:
        group, is_causal: as for `ring_attention`.
        layout: which tokens each rank has.
        length: the number of queries per sequence on this rank.
    """

    def __init__(self, group: ProcessGroup, is_causal: bool, layout: SequenceLayout, length: int) -> None:
        self._n, self._i, self._causal = group.size, group.index, is_causal
        self._layout, self._length = layout, length
        everything = TokenRun(slice(None), slice(0, length), 0, 0)
        # Where every token attends to all tokens, the order makes no difference.
        self.runs = layout.runs(self._i, length) if is_causal else [everything]

    def tiles_of(self, r: int, keys: int) -> Iterator[tuple[int, TokenRun, TokenRun, bool]]:
        """Yield for step r, with so many keys: the number of a run of queries, the run, one of keys, and whether both
        are the same tokens.
        """
        if not self._causal:
            yield 0, self.runs[0], TokenRun(slice(None), slice(0, keys), 0, 0), False
            return
        for a, mine in enumerate(self.runs):
            for other in self._layout.runs((self._i - r) % self._n, self._length):
                alike = (mine.samples, mine.document) == (other.samples, other.document)
                if alike and other.start <= mine.start:
                    yield a, mine, other, other.start == mine.start


def join_runs(
    runs: Sequence[TokenRun], merged: Sequence[tuple[Tensor, Tensor]], batch: int
) -> tuple[Tensor, Tensor]:
    """Put the outputs and log-sum-exps of all runs together: those of a sample along time, and then the samples."""
    samples: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for run, part in zip(runs, merged, strict=True):
        samples.setdefault(run.samples.indices(batch)[0], []).append(part)
    outputs, lses = zip(
        *([torch.cat(each, 3) for each in zip(*of, strict=True)] for of in samples.values()), strict=True
    )
    return (outputs[0], lses[0]) if len(outputs) == 1 else (torch.cat(outputs), torch.cat(lses))


def count_pairs(samples: int, mine: TokenRun, theirs: TokenRun, diagonal: bool) -> int:
    """Return the number of keys that all queries of a tile attend to."""
    q: int = mine.tokens.stop - mine.tokens.start
    k: int = theirs.tokens.stop - theirs.tokens.start
    return samples * (q * (q + 1) // 2 if diagonal else q * k)
