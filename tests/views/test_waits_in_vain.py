"""Pictures of ranks that hang show the wait itself, and for whom it is."""

from __future__ import annotations

from dataclasses import replace

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


def test_without_a_hang_nothing_is_added() -> None:
    timeline = mk.simulate(mk.Plan.gpipe(2, 2))
    assert picture(timeline).waits == () and "waiting" not in timeline.meta
    # Ranks that hang before they have done anything have a picture, too.
    waiting = [{"rank": 0, "start": 0.0, "words": "waits for rank 1 (recv)"}]
    empty = replace(timeline, spans=timeline.spans[:0], meta={"waiting": waiting})
    assert "waits for rank 1" in svg(empty)


def test_a_step_before_the_hang_has_no_wait() -> None:
    timeline = mk.simulate(mk.Plan.gpipe(2, 2))
    late = [
        {"rank": 0, "start": 1.5 * float(timeline.spans["end"].max()), "words": "waits for rank 1 (recv)"}
    ]
    before = replace(timeline, meta={**timeline.meta, "waiting": late})
    assert picture(before).waits == () and TimelineView(before).waits == []
