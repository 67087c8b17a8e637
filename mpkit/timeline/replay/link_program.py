"""Link program: a replay without its link, for whoever replays it on another: a page's script does (`relink.js`).

A link changes when communication is served, and so how long ranks wait. It changes nothing that they do. What is left:

    controls   each rank's communication and waits, in order, with the work that it has done before each
    rows       for each span of the timeline: its op, the work before it and at its end, and before which op it ends
    groups     who takes part in a message or a collective
    kinds      the rounds of each kind of communication, and the share of its payload that a rank sends
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mpkit.devices.hardware import Hardware, hops, wire_factor
from mpkit.devices.link import Link
from mpkit.timeline.replay.core import Replay
from mpkit.timeline.replay.spans import ReplayResult
from mpkit.trace import Kind, Trace

__all__ = ["LinkProgram", "link_program", "link_values"]


class LinkProgram(NamedTuple):
    """A replay, and what follows from it on any link.

    Attributes:
        replayed: the trace on its own machine.
        link: the link there.
        values: controls, rows, groups and kinds, as JSON can hold them.
    """

    replayed: ReplayResult
    link: Link
    values: dict[str, Any]


def link_program(trace: Trace, hardware: Hardware) -> LinkProgram:
    """Return the program of a trace whose ranks are on one node.

    Args:
        trace: of a run that finished.
        hardware: the machine; the times of compute are those of its devices.

    Raises:
        ValueError: ranks are on several nodes, whose links differ, or the run did not finish.
    """
    if len({hardware.node_of(rank) for rank in range(trace.world_size)}) > 1:
        raise ValueError(
            f"{hardware.name} has its ranks on several nodes: a program is of one link, inside a node"
        )
    replay = Replay(trace.world_size, hardware, meta=trace.meta)
    for rank, recorded in enumerate(trace.ranks):
        replay.feed(rank, recorded.ops, recorded.names)
    replay.finish()
    replayed = replay.collect()
    if "waiting" in replayed.meta:
        raise ValueError("the run did not finish: what its ranks wait for never comes, on any link")
    controls = [this.controls for this in replay.ranks]
    groups: dict[int, tuple[list[int], bool]] = {}
    for group in {each[3] for mine in controls for each in mine if each[1] != Kind.WAIT}:
        ends, message, _ = replayed.names[group].partition("#")
        groups[group] = [int(part) for part in ends.split(">" if message else ",")], bool(message)
    sizes = {len(members) for members, _ in groups.values()}
    kinds = {
        f"{kind} {n}": [hops(kind, n), wire_factor(kind, n)]
        for kind in {each[1] for mine in controls for each in mine}
        for n in sizes
        if kind != Kind.WAIT
    }
    rows = [
        row for this, ops in zip(replay.ranks, replay.collect_ops(), strict=True) for row in this.rows_of(ops)
    ]
    values = {"controls": controls, "rows": rows, "groups": groups, "kinds": kinds}
    return LinkProgram(replayed, hardware.link, values)


def link_values(link: Link) -> dict[str, Any]:
    """Return what decides the times on a link, as JSON can hold it.

    >>> link_values(Link("wire", 5e-6, 1e9, {Kind.ALL_REDUCE: 8e8}))
    {'latency': 5e-06, 'bandwidth': 1000000000.0, 'bus': {'34': 800000000.0}, 'ramp': 0.0}
    """
    bus = {str(int(kind)): rate for kind, rate in link.bus.items()}
    return {"latency": link.latency, "bandwidth": link.bandwidth, "bus": bus, "ramp": link.ramp}
