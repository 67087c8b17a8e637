"""What ranks that compute at the same time take from each other: how their times overlap."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpkit.prediction.experiments.busy_ranks import overlapped_share
from mpkit.timeline.replay.spans import SPAN
from mpkit.trace import Kind, Lane

SECONDS = st.tuples(st.integers(0, 20), st.integers(1, 10)).map(lambda pair: (pair[0], pair[0] + pair[1]))


def timeline(rows: list[tuple[int, Kind, Lane, int, int]]) -> Any:
    """A timeline of these spans: rank, kind, lane, start, end."""
    spans = np.zeros(len(rows), SPAN)
    for span, (rank, kind, lane, start, end) in zip(spans, rows, strict=True):
        span["rank"], span["kind"], span["lane"], span["start"], span["end"] = rank, kind, lane, start, end
    return SimpleNamespace(spans=spans)


@given(st.lists(SECONDS, min_size=1, max_size=3), st.lists(SECONDS, max_size=6))
def test_the_overlap_is_that_of_each_second_counted(
    mine: list[tuple[int, int]], others: list[tuple[int, int]]
) -> None:
    rows = [(0, Kind.FORWARD, Lane.COMPUTE, *span) for span in mine]
    rows += [(1, Kind.BACKWARD, Lane.COMPUTE, *span) for span in others]
    busy = {second for start, end in others for second in range(start, end)}
    counted = [second in busy for start, end in mine for second in range(start, end)]
    found = overlapped_share(timeline(rows), (Kind.FORWARD, Kind.BACKWARD), comm=False)
    assert found[0, Kind.FORWARD] == pytest.approx(sum(counted) / len(counted))


def test_the_communication_that_counts_is_the_ranks_own() -> None:
    rows = [
        (0, Kind.FORWARD, Lane.COMPUTE, 0, 4),
        (0, Kind.ALL_REDUCE, Lane.COMM, 3, 9),
        (1, Kind.FORWARD, Lane.COMPUTE, 0, 4),
        (1, Kind.ALL_REDUCE, Lane.COMM, 4, 9),
    ]
    found = overlapped_share(timeline(rows), [Kind.FORWARD], comm=True)
    assert found == {(0, Kind.FORWARD): 0.25, (1, Kind.FORWARD): 0.0}
