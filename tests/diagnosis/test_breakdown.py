"""Idle time, computation and their overlap, counted again microsecond by microsecond."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpkit as mk
from mpkit.timeline.breakdown import breakdown
from mpkit.timeline.replay.spans import SPAN
from mpkit.trace import Kind, Lane
from tests.diagnosis.planted import ddp

KERNELS = st.lists(
    st.tuples(
        st.sampled_from([(Lane.COMPUTE, Kind.FORWARD), (Lane.COMM, Kind.ALL_REDUCE), (Lane.HOST, Kind.COPY_TO_HOST)]),
        st.integers(0, 60), st.integers(1, 12),
    ),
    min_size=1, max_size=12,
)  # fmt: skip


def spans_of(
    kernels: list[tuple[tuple[Lane, Kind], int, int]], wait: tuple[int, int] | None = None
) -> np.ndarray:
    spans = np.zeros(len(kernels) + (wait is not None), SPAN)
    for row, ((lane, kind), start, length) in enumerate(kernels):
        spans[row]["lane"], spans[row]["kind"] = lane, kind
        spans[row]["start"], spans[row]["end"] = start, start + length
    if wait is not None:
        spans[-1]["lane"], spans[-1]["kind"], spans[-1]["depth"] = Lane.COMPUTE, Kind.WAIT, 1
        spans[-1]["start"], spans[-1]["end"] = wait[0], wait[0] + wait[1]
    return spans


@settings(max_examples=60, deadline=None)
@given(KERNELS, st.none() | st.tuples(st.integers(0, 60), st.integers(1, 8)))
def test_every_unit_of_time_counts_once(
    kernels: list[tuple[tuple[Lane, Kind], int, int]], wait: tuple[int, int] | None
) -> None:
    busy = {lane: np.zeros(80, bool) for lane in Lane}
    for (lane, _), start, length in kernels:
        busy[lane][start : start + length] = True
    if wait is not None:
        busy[Lane.COMPUTE][wait[0] : wait[0] + wait[1]] = False
    compute, comm = busy[Lane.COMPUTE], busy[Lane.COMM]
    runs = compute | comm | busy[Lane.HOST]
    found = breakdown(spans_of(kernels, wait), 1)
    whole = np.flatnonzero(runs)
    total = whole[-1] - whole[0] + 1 if len(whole) else 0
    expected = [
        total,
        total - runs.sum(),
        compute.sum(),
        (runs & ~compute).sum(),
        comm.sum(),
        (comm & compute).sum(),
    ]
    got = [found.total, found.idle, found.compute, found.other, found.communication, found.overlapped]
    assert [float(each[0]) for each in got] == pytest.approx(expected)


def test_ticks_shrink_what_runs() -> None:
    spans = spans_of([((Lane.COMPUTE, Kind.FORWARD), 1, 4), ((Lane.COMM, Kind.ALL_REDUCE), 8, 2)])
    spans["start"] += 0.25
    found = breakdown(spans, 1, tick=1.0)
    assert (found.compute[0], found.communication[0], found.total[0], found.idle[0]) == (3.0, 1.0, 8.0, 4.0)


def test_it_agrees_with_the_timeline() -> None:
    timeline = mk.Timeline.of(ddp())
    found = timeline.breakdown(timeline.steps[-1])
    assert found.compute == pytest.approx(timeline.busy)
    assert found.communication == pytest.approx(timeline.comm_time)
    assert found.communication - found.overlapped == pytest.approx(timeline.exposed_comm)
    assert found.compute + found.other + found.idle == pytest.approx(found.total)
    assert "<table>" in found._repr_mimebundle_()["text/html"] and len(found.to_dataframe()) == 4
    with pytest.raises(ValueError, match="no step 9"):
        timeline.breakdown(9)
