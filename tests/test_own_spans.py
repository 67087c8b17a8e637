"""A learner's own function on the timeline: spans, and the waits in their middle."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import mpkit as mk
from mpkit.views.drawing.colours import Key
from mpkit.views.timeline.picture import picture
from tests.counted import counted


def uneven(ctx):  # type: ignore[no-untyped-def]
    with ctx.record.step(0), ctx.record.span("work and reduce", flops=1e9 * (1 + ctx.rank)):
        ctx.comm.all_reduce(torch.ones(1000))


def test_a_wait_within_a_span_is_idle_time(cluster: mk.Cluster) -> None:
    """Rank 0 has 1 s of work and waits for rank 3, which has 4 s."""
    cluster.run(uneven)
    timeline = counted(cluster.trace)
    assert timeline.to_dataframe()["name"].tolist().count("work and reduce") == 4
    assert timeline.busy == pytest.approx([1, 2, 3, 4])
    np.testing.assert_allclose(timeline.step_time, np.add(timeline.busy, timeline.idle))
    assert [kinds for kinds in timeline.comm_bytes] == [{"all_reduce": 4000}] * 4

    pic = picture(timeline)
    drawn = pic.boxes[pic.boxes["row"] == 0]
    idle = drawn[drawn["key"] == Key.IDLE]
    work = drawn[drawn["key"] == Key.COMPUTE]
    assert float((idle["end"] - idle["start"]).sum()) == pytest.approx(timeline.idle[0])
    assert float((work["end"] - work["start"]).sum()) == pytest.approx(timeline.busy[0])


def test_a_cluster_that_has_run_nothing_says_so(cluster: mk.Cluster) -> None:
    with pytest.raises(mk.errors.MpkitError, match="no trace yet"):
        cluster.resized(4).timeline()
