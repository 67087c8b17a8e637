"""The attention that each rank of a sequence computed, by step: pairs of a query and a key, in all heads and layers.

Ranks that share sequences wait for the one with the most. Only this count shows an imbalance, since the result is the
same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mpkit.common.display import DrawnResult, data_frame
from mpkit.trace.files import RankTrace
from mpkit.trace.validation import check_steps

if TYPE_CHECKING:
    import pandas as pd


ATTENDED = 3
"""The kind of logged values that are the number of pairs of a query and a key in a step."""


class AttentionWork(DrawnResult):
    """The attention that ranks computed; it prints as a table of the last step, and is drawn as a picture.

    >>> work = AttentionWork(np.array([[20.0, 68.0]]), first=0, groups=[(0, 1)])
    >>> work.by_rank, round(work.imbalance, 3)
    ([20.0, 68.0], 1.545)
    >>> "68, 1.55 x mean" in work.to_svg()
    True

    Args:
        pairs: [steps, ranks], the pairs of a query and a key that each rank computed.
        first: the number of the first step.
        groups: the ranks that share sequences, and so wait for each other.
    """

    def __init__(self, pairs: npt.NDArray[np.float64], first: int, groups: Sequence[tuple[int, ...]]) -> None:
        self.pairs, self.first, self.groups = pairs, first, list(groups)

    @property
    def by_rank(self) -> list[float]:
        """The pairs of each rank in the last step."""
        last: list[float] = self.pairs[-1].tolist()
        return last

    @property
    def imbalance(self) -> float:
        """The busiest rank's pairs in the last step, divided by the mean of the ranks that share its sequences."""
        last = self.pairs[-1]
        return max(float(last[list(g)].max() / max(last[list(g)].mean(), 1e-300)) for g in self.groups)

    def to_dataframe(self) -> pd.DataFrame:
        """Return one row per step and rank.

        Raises:
            ImportError: pandas is not installed.
        """
        cells = np.ndenumerate(self.pairs)
        listed = ((self.first + step, rank, pairs) for (step, rank), pairs in cells)
        return data_frame(listed, ["step", "rank", "pairs"])

    __repr__ = DrawnResult.__str__


def attention_work_of(ranks: Sequence[RankTrace], groups: Sequence[tuple[int, ...]]) -> AttentionWork:
    """Return the work of the steps that every rank has counted."""
    counts: list[dict[int, float]] = []
    for rank in ranks:
        mine = rank.values[rank.values["kind"] == ATTENDED]
        counts.append({int(record["step"]): float(record["value"]) for record in mine})
    steps = sorted(set(counts[0]).intersection(*counts[1:])) if counts else []
    if not steps:
        raise ValueError(
            "No attention was counted: ranks share no sequences (cp=1), or no step is done. A plan shares them with "
            "cp=, such as mk.Plan(cp=2)"
        )
    check_steps(steps[-1], steps[0], len(steps))
    return AttentionWork(np.array([[of[step] for of in counts] for step in steps]), steps[0], groups)
