"""Tiles: the products of a ring's step, a run of this rank's queries by a run of the keys that passes.

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

__all__ = ["Tiles", "count_pairs", "join_runs"]


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
