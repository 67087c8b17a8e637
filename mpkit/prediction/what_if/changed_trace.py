"""A trace as it would be on another machine, whose ranks compute the same.

    faster            links on which messages and collectives take less time
    without_overlap   each rank waits for a collective, and for a message that it sends, as soon as it has issued it

A receive is waited for where it was: a rank that waited for a message before it sends its own could wait forever.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit.devices.hardware import Hardware
from mpkit.devices.link import Link
from mpkit.trace import Kind, RankTrace, Trace

__all__ = ["faster", "without_overlap"]


def faster(machine: Hardware, factor: float) -> Hardware:
    """Return a machine on whose links every message and collective takes 1/factor of the time.

    >>> from mpkit.devices.catalogue import hardware
    >>> before, after = hardware("cpu"), faster(hardware("cpu"), 2)
    >>> before.time(Kind.ALL_REDUCE, 1e6, [0, 1]) / after.time(Kind.ALL_REDUCE, 1e6, [0, 1])
    2.0
    """
    if factor == 1:
        return machine

    def speed_up(link: Link) -> Link:
        return replace(
            link, latency=link.latency / factor, bandwidth=link.bandwidth * factor, ramp=link.ramp / factor,
            bus={kind: rate * factor for kind, rate in link.bus.items()},
        )  # fmt: skip

    between = None if machine.between is None else speed_up(machine.between)
    return replace(
        machine, name=f"{machine.name}, link x{factor:g}", link=speed_up(machine.link), between=between
    )


def without_overlap(trace: Trace) -> Trace:
    """Return the trace with a wait after each collective and each send."""
    return replace(trace, ranks=[_add_waits(rank) for rank in trace.ranks])


def _add_waits(rank: RankTrace) -> RankTrace:
    ops, kinds = rank.ops, rank.ops["kind"]
    issued = np.flatnonzero((kinds >= Kind.SEND) & (kinds < Kind.COPY_TO_DEVICE) & (kinds != Kind.RECV))
    waits = ops[issued].copy()
    for name in ("flops", "bytes", "cpu", "group", "name", "lane"):
        waits[name] = 0
    waits["kind"], waits["number"], waits["peer"] = Kind.WAIT, -1, -1
    waits["end"] = waits["start"]
    waits["depth"] = _lies_in_action(ops)[issued]
    # Where each op and each wait is afterwards: behind all waits that were added before it.
    moved = np.arange(len(ops)) + np.searchsorted(issued, np.arange(len(ops)))
    waits["ref"] = moved[issued]
    longer = np.insert(ops, issued + 1, waits)
    refers = ops["ref"] >= 0
    longer["ref"][moved[refers]] = moved[ops["ref"][refers]]
    memory = rank.memory.copy()
    memory["op"] += np.searchsorted(issued, memory["op"]).astype(memory["op"].dtype)
    parts = rank.sent_parts.copy()
    parts["op"] = moved[parts["op"]]
    return replace(rank, ops=longer, memory=memory, sent_parts=parts)


def _lies_in_action(ops: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return 1 for each communication that was issued within an action, else 0."""
    outer = (ops["kind"] < Kind.SEND) & (ops["depth"] == 0)
    last = np.maximum.accumulate(np.where(outer, np.arange(len(ops)), -1))
    within = (last >= 0) & (ops["kind"][last] < Kind.WAIT) & (ops["start"] < ops["end"][last])
    return within.astype(ops["depth"].dtype)
