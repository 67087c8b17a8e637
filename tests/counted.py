"""A clock that counts, for runs of real ranks: what the schedule and the strategy do shows exactly, on any machine.

An action takes the time of its FLOPs on a device of 1 GFLOP/s, and whatever has none takes no time, except reading
data. The link is free if no other one is given. (Within an action, calls lie where they were measured.)
"""

from dataclasses import replace

import mpkit as mk

FREE = mk.devices.Hardware(
    "counted",
    mk.devices.Device("counted", {"float32": 1e9}, bandwidth=1e15),
    mk.devices.Link("free", 0.0, 1e15),
)


def counted(trace: mk.Trace, link: mk.devices.Link = FREE.link) -> mk.Timeline:
    """Return the timeline of a trace on that clock."""
    ranks = []
    for rank in trace.ranks:
        ops = rank.ops.copy()
        ops["cpu"] = 0
        ranks.append(replace(rank, ops=ops))
    return mk.Timeline.of(replace(trace, ranks=ranks), replace(FREE, link=link))
