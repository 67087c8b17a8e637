"""Columns: layouts by the hundred thousand, as arrays.

bases      layouts that differ in more than the samples of a micro-batch
rows       a base, with the samples of a micro-batch and the number of them
distinct   what many rows share is computed once, for one layout of each kind
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpkit.prediction.cost_model.layout import Layout

__all__ = ["Floats", "Indices", "LayoutColumns"]

Indices = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class LayoutColumns:
    """Layouts as arrays, a row each.

    Attributes:
        bases: layouts, whose micro-batches, recomputation and offload are of no importance.
        base: by row, the number of its base.
        microbatch, microbatches: by row, samples per micro-batch, and micro-batches.
    """

    bases: Sequence[Layout]
    base: Indices
    microbatch: Indices
    microbatches: Indices

    @classmethod
    def of_layouts(cls, layouts: Sequence[Layout]) -> LayoutColumns:
        """Return the columns of some layouts.

        >>> columns = LayoutColumns.of_layouts([Layout(dp=2, microbatch=4), Layout(tp=2)])
        >>> columns.layout(0, recompute="full") == Layout(dp=2, microbatch=4, recompute="full")
        True
        """
        sizes = [
            np.array([getattr(each, name) for each in layouts]) for name in ("microbatch", "microbatches")
        ]
        bases = [each.vary(recompute="none", offload="none") for each in layouts]
        return cls(bases, np.arange(len(layouts)), *sizes)

    def layout(self, row: int, **relief: Any) -> Layout:
        """Return the layout of a row, with this recomputation and offload."""
        m, b = int(self.microbatches[row]), int(self.microbatch[row])
        base: Layout = self.bases[self.base[row]]
        return base.vary(microbatch=b, microbatches=m, **relief)

    def distinct(
        self, *fields: str, microbatch: bool = False, microbatches: bool = False
    ) -> tuple[Indices, list[Layout]]:
        """Return by row the number of its kind, and a layout of each kind.

        Args:
            fields: in which rows of a kind agree.
            microbatch, microbatches: whether they also agree in these.

        >>> columns = LayoutColumns.of_layouts([Layout(dp=2), Layout(dp=2, tp=4), Layout(dp=4)])
        >>> columns.distinct("dp")[0].tolist(), len(columns.distinct("tp", "dp")[1])
        ([0, 0, 1], 3)
        """
        code = _number(map(attrgetter(*fields), self.bases))[self.base]
        for wanted, column in ((microbatch, self.microbatch), (microbatches, self.microbatches)):
            if wanted:
                code = code * (int(column.max()) + 1) + column
        _, first, kind = np.unique(code, return_index=True, return_inverse=True)
        return kind, [self.layout(row) for row in first]


def _number(keys: Iterable[Hashable]) -> Indices:
    """Return the number of each key, counted as they first appear."""
    known: dict[Hashable, int] = {}
    return np.array([known.setdefault(key, len(known)) for key in keys])
