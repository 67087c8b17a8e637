"""A communication matrix in the terminal: a table per axis, a row per sender, a column per receiver."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpkit.common.units import bytes_text

if TYPE_CHECKING:
    import numpy.typing as npt

    from mpkit.timeline.traffic import CommMatrix

__all__ = ["suitable_unit", "traffic_text"]

MOST = 16
"""The most ranks for which each pair is printed."""


def traffic_text(matrix: CommMatrix) -> str:
    """Return the matrices, one below the other; with many ranks, only the total of each axis."""
    lines = [f"{matrix.title}, row to column"]
    for axis, amounts in matrix.by_axis.items():
        talk = int((amounts > 0).sum())
        lines += ["", f"{axis}: {bytes_text(amounts.sum())}, {talk} pairs"]
        if len(amounts) <= MOST:
            lines += _table(amounts)
    return "\n".join(lines if matrix.by_axis else [f"{matrix.title}."])


def suitable_unit(amounts: npt.NDArray[np.float64]) -> tuple[float, str]:
    """Return the unit that suits all amounts of a matrix: the divisor and the unit's name.

    >>> suitable_unit(np.array([[0.0, 131072.0]]))
    (1000.0, 'kB')
    """
    most = float(amounts.max(initial=0.0))
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if most >= factor * 0.9995:
            return factor, unit
    return 1.0, "B"


def _table(amounts: npt.NDArray[np.float64]) -> list[str]:
    factor, unit = suitable_unit(amounts)
    words = [[f"{value / factor:.3g}" if value else "·" for value in row] for row in amounts.tolist()]
    width = 2 + max(len(word) for row in words for word in row)
    head = f"{unit:>4} |" + "".join(f"{column:>{width}}" for column in range(len(words)))
    return [
        head,
        *(f"{rank:>4} |" + "".join(f"{word:>{width}}" for word in row) for rank, row in enumerate(words)),
    ]
