"""A learner's own function on the timeline: spans, and the waits in their middle."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import mpkit as mk
from mpkit.views.drawing.colours import Key
from mpkit.views.timeline.picture import picture


def uneven(ctx):  # type: ignore[no-untyped-def]
    import time

    with ctx.record.step(0), ctx.record.span("work and reduce"):
        end = time.thread_time() + 0.02 * (1 + 3 * ctx.rank)
        while time.thread_time() < end:
            pass
        ctx.comm.all_reduce(torch.ones(1000))


def test_a_wait_within_a_span_is_idle_time(cluster: mk.Cluster) -> None:
    cluster.run(uneven)
    timeline = cluster.timeline()
    assert timeline.to_dataframe()["name"].tolist().count("work and reduce") == 4
    # Rank 0 has 0.02 s of work and waits for rank 3, which has 0.08 s.
    assert timeline.busy[0] < 0.5 * timeline.busy[3]
    assert timeline.idle[0] > timeline.idle[1] > timeline.idle[2] > timeline.idle[3]
    np.testing.assert_allclose(timeline.makespan, np.add(timeline.busy, timeline.idle))
    assert [kinds for kinds in timeline.comm_bytes] == [{"all_reduce": 4000}] * 4

    pic = picture(timeline)
    drawn = pic.boxes[pic.boxes["row"] == 0]
    idle = drawn[drawn["key"] == Key.IDLE]
    work = drawn[drawn["key"] == Key.COMPUTE]
    assert float((idle["end"] - idle["start"]).sum()) == pytest.approx(timeline.idle[0])
    assert float((work["end"] - work["start"]).sum()) == pytest.approx(timeline.busy[0])


def test_a_cluster_that_has_run_nothing_says_so() -> None:
    with mk.Cluster(1, device="cpu") as cluster, pytest.raises(mk.MpkitError, match="no trace yet"):
        cluster.timeline()
