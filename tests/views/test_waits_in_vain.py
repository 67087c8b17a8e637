"""Pictures of ranks that hang show the wait itself, and for whom it is."""

from __future__ import annotations

import numpy as np

import mpkit as mk
from mpkit.timeline.replay import Replay
from mpkit.trace import OP, Kind
from mpkit.views.timeline.picture import picture
from mpkit.views.timeline.svg import svg
from mpkit.views.timeline.widget import TimelineView


def stuck(kind: Kind, group: int, peer: int = -1) -> np.ndarray:
    """A rank's records: a second of compute, a communication, and the wait for it that never ended."""
    ops = np.zeros(3, OP)
    ops["kind"], ops["lane"] = [Kind.COMPUTE, kind, Kind.WAIT], [0, 1, 0]
    ops["start"], ops["end"] = [1, int(1e9), int(1e9)], [int(1e9), 0, 0]
    ops["cpu"] = [int(1e9), 0, 0]
    ops["ref"], ops["group"], ops["peer"] = [-1, -1, 1], [0, group, 0], [-1, peer, -1]
    ops["stage"], ops["microbatch"], ops["step"] = -1, -1, -1
    return ops


def hung() -> mk.Timeline:
    names = ["", "1>0#0", "0,1,2"]
    replay = Replay(3)
    replay.feed(0, stuck(Kind.RECV, 1, peer=1), names)
    replay.feed(1, stuck(Kind.ALL_REDUCE, 2), names)
    replay.feed(2, stuck(Kind.ALL_REDUCE, 2), names)
    replay.finish()
    return mk.Timeline(**vars(replay.collect()))


def test_each_wait_names_who_never_came() -> None:
    timeline = hung()
    assert [(each["rank"], each["words"]) for each in timeline.meta["waiting"]] == [
        (0, "waits for rank 1 (recv)"),
        (1, "waits for rank 0 (all reduce)"),
        (2, "waits for rank 0 (all reduce)"),
    ]


def test_the_wait_is_drawn_to_the_edge() -> None:
    timeline = hung()
    pic = picture(timeline)
    assert {wait.start for wait in pic.waits} == {pic.waits[0].start}
    assert pic.duration > max(wait.start for wait in pic.waits)
    drawn = svg(timeline)
    assert drawn.count("stroke-dasharray") == 3 and ">waits for rank 1" in drawn
    assert "rank 2 waits for rank 0 (all reduce)" in drawn
    view = TimelineView(timeline)
    assert view.waits == timeline.meta["waiting"] and view.room >= pic.duration
