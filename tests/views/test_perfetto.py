"""Chrome's trace format."""

from __future__ import annotations

import json
from collections import defaultdict

import mpkit as mk
from mpkit.views.timeline.perfetto import perfetto


def events(timeline: mk.Timeline) -> list[dict]:
    return json.loads(perfetto(timeline))["traceEvents"]


def test_slices_of_a_thread_nest_and_never_cross(gpipe: mk.Timeline, data_parallel: mk.Timeline) -> None:
    for timeline in (gpipe, data_parallel):
        threads = defaultdict(list)
        for event in events(timeline):
            if event["ph"] == "X":
                threads[event["pid"], event["tid"]].append((event["ts"], -event["dur"]))
        for slices in threads.values():
            open_ends: list[float] = []
            for start, minus in sorted(slices):
                while open_ends and open_ends[-1] <= start + 1e-6:
                    open_ends.pop()
                assert not open_ends or start - minus <= open_ends[-1] + 1e-6
                open_ends.append(start - minus)


def test_messages_beyond_forty_at_once_stay_in_the_lane_of_communication() -> None:
    """Threads of 41 messages and more were those of copies to the host, whose slices then overlapped."""
    many = events(mk.simulate(mk.Plan.gpipe(2, 60), 0.0, hop=10.0))
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in many if e["name"] == "thread_name"}
    received = [e for e in many if e["ph"] == "X" and e["name"].startswith("recv")]
    assert len({e["tid"] for e in received}) == 60
    assert {named[e["pid"], e["tid"]].split()[0] for e in received} == {"comm"}


def test_an_arrow_a_message_from_the_sender_to_the_receiver(gpipe: mk.Timeline) -> None:
    flows = defaultdict(dict)
    for event in events(gpipe):
        if event["ph"] in "sf":
            flows[event["id"]][event["ph"]] = event
    assert len(flows) == 2 * 3 * 8  # forward and backward, over three borders, for each micro-batch
    for ends in flows.values():
        assert abs(ends["s"]["pid"] - ends["f"]["pid"]) == 1
        assert ends["s"]["ts"] <= ends["f"]["ts"]
