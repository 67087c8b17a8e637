"""Metrics: the values that functions on ranks logged, by name, step and rank; and the reason for an early end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpkit.trace.files import RankTrace

if TYPE_CHECKING:
    import pandas as pd


class Stop(NamedTuple):
    """The end of a training before its last step.

    Attributes:
        step: the number of the step after which it ended.
        rank: the first rank that asked for it.
        reason: what that rank said.
    """

    step: int
    rank: int
    reason: str


class Metrics(Mapping[str, dict[int, float]]):
    """Logged values: `metrics["accuracy"]` is a dict of the value by step.

    If several ranks logged the same name, this is the first one's value; `by_rank` returns all. If a rank logged a name
    twice in one step, the later value counts.

    >>> metrics = Metrics({"lr": {0: {0: 0.1, 1: 0.05}, 1: {0: 0.3}}})
    >>> metrics
    {'lr': {0: 0.1, 1: 0.05}}
    >>> metrics.by_rank("lr")[1]
    {0: 0.3}

    Args:
        values: the values by name, rank and step.
    """

    def __init__(self, values: Mapping[str, Mapping[int, Mapping[int, float]]] | None = None) -> None:
        given = (values or {}).items()
        self._values = {
            name: {rank: dict(each) for rank, each in sorted(ranks.items())} for name, ranks in given
        }

    def __getitem__(self, name: str) -> dict[int, float]:
        by_step: dict[int, float] = {}
        for values in self.by_rank(name).values():
            by_step = values | by_step
        return dict(sorted(by_step.items()))

    def by_rank(self, name: str) -> dict[int, dict[int, float]]:
        """Return the values of one metric: by rank, by step.

        Raises:
            KeyError: nothing of that name was logged.
        """
        if name not in self._values:
            known = ", ".join(map(repr, self._values)) or "nothing"
            raise KeyError(f"no metric {name!r}: {known} was logged; ctx.log(name, value) logs one")
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return repr(dict(self))

    def to_dataframe(self) -> pd.DataFrame:
        """Return all values as a pandas DataFrame: one row per name, rank and step."""
        import pandas as pd

        rows = [
            (name, step, rank, value)
            for name, by_rank in self._values.items()
            for rank, by_step in by_rank.items()
            for step, value in by_step.items()
        ]
        return pd.DataFrame(rows, columns=["name", "step", "rank", "value"])


def metrics_of(ranks: Sequence[RankTrace]) -> Metrics:
    """Return the values that ranks logged, names in the order in which they were first logged."""
    first: dict[str, int] = {}
    values: dict[str, dict[int, dict[int, float]]] = {}
    for number, rank in enumerate(ranks):
        for record in rank.values[rank.values["kind"] == 0]:
            name, step = rank.name(int(record["name"])), int(record["step"])
            first[name] = min(first.get(name, int(record["time"])), int(record["time"]))
            values.setdefault(name, {}).setdefault(number, {})[step] = float(record["value"])
    return Metrics({name: values[name] for name in sorted(values, key=first.__getitem__)})


def stop_of(ranks: Sequence[RankTrace]) -> Stop | None:
    """Return the end that some rank asked for; None if none did."""
    stops = [
        Stop(int(record["step"]), number, rank.name(int(record["name"])))
        for number, rank in enumerate(ranks)
        for record in rank.values[np.flatnonzero(rank.values["kind"] == 1)]
    ]
    return min(stops, default=None)
