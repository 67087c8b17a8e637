"""The quantities that budgets limit, measured in the trace of an answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpkit.course.framework.observation import Seen
from mpkit.devices.hardware import wire_factor
from mpkit.trace import CATEGORIES, Kind, Lane

__all__ = [
    "bytes_between_nodes",
    "bytes_inside_nodes",
    "calls",
    "collectives",
    "copied_bytes",
    "count_exposed_layers",
    "gathers_and_layers",
    "makespan",
    "messages",
    "payload",
    "peak",
    "ring",
    "sent_bytes",
    "wire",
]


def sent_bytes(seen: Seen) -> float:
    """Return the bytes of messages that the busiest rank sends."""
    return _most(seen, lambda ops: ops["bytes"][ops["kind"] == Kind.SEND].sum())


def messages(seen: Seen) -> float:
    """Return the number of messages that the busiest rank sends."""
    return _most(seen, lambda ops: (ops["kind"] == Kind.SEND).sum())


def collectives(seen: Seen) -> float:
    """Return the number of collectives that the busiest rank takes part in."""
    return _most(seen, lambda ops: _collective(ops).sum())


def calls(kind: Kind) -> Callable[[Seen], float]:
    """Return a measure: the number of collectives of one kind that the busiest rank takes part in."""
    return lambda seen: _most(seen, lambda ops: (ops["kind"] == kind).sum())


def payload(seen: Seen) -> float:
    """Return the bytes of all collectives that the busiest rank takes part in; an all-reduce counts its tensor once."""
    return _most(seen, lambda ops: ops["bytes"][_collective(ops)].sum())


def peak(*categories: str) -> Callable[[Seen], float]:
    """Return a measure: the fullest rank's peak bytes of these categories together; of all, if none is named."""
    chosen = categories or CATEGORIES

    def peak_of(seen: Seen) -> float:
        if seen.simulated is None and seen.trace is not None:  # exact bytes, summed over all changes
            return float(max(_most_held(rank.memory, chosen) for rank in seen.trace.ranks))
        return float(max(sum(held[category] for category in chosen) for held in seen.timeline.peak_memory))

    return peak_of


def ring(seen: Seen) -> float:
    """Return the bytes that the busiest rank sends for its collectives on a ring: an all-reduce counts twice."""
    assert seen.trace is not None, "nothing was recorded"
    return max(
        sum(
            float(op["bytes"]) * wire_factor(int(op["kind"]), rank.name(int(op["group"])).count(",") + 1)
            for op in rank.ops[_collective(rank.ops)]
        )
        for rank in seen.trace.ranks
    )


def wire(seen: Seen) -> float:
    """Return the bytes that the busiest rank sends in all: messages, and collectives as on a ring.

    An all-reduce counts as much as the reduce-scatter and the all-gather that it is made of.
    """
    return sent_bytes(seen) + ring(seen)


def bytes_between_nodes(seen: Seen) -> float:
    """Return the bytes that the busiest rank sends in collectives and messages that leave its node.

    A node has `case["a_node"]` ranks.
    """
    return _most_of(seen, leaving=True)


def bytes_inside_nodes(seen: Seen) -> float:
    """Return the bytes that the busiest rank sends in those that stay in its node."""
    return _most_of(seen, leaving=False)


def _most_of(seen: Seen, *, leaving: bool) -> float:
    assert seen.trace is not None
    k = seen.case["a_node"]
    return max(
        sum(_bytes(rank, op) for op in _communication(rank) if _leaves(rank, number, op, k) == leaving)
        for number, rank in enumerate(seen.trace.ranks)
    )


def _communication(rank: Any) -> Any:
    return rank.ops[(rank.ops["lane"] == Lane.COMM) & (rank.ops["kind"] != Kind.BARRIER)]


def _members(rank: Any, op: Any) -> list[int]:
    return [int(each) for each in rank.name(int(op["group"])).split(",") if each]


def _leaves(rank: Any, number: int, op: Any, k: int) -> bool:
    """Return whether a collective or message has ranks of two nodes."""
    rooted = op["kind"] in (Kind.SEND, Kind.RECV)
    members = [number, int(op["peer"])] if rooted else _members(rank, op)
    return len({member // k for member in members}) > 1


def _bytes(rank: Any, op: Any) -> float:
    if op["kind"] == Kind.SEND:
        return float(op["bytes"])
    if op["kind"] == Kind.RECV:
        return 0.0
    return float(op["bytes"]) * wire_factor(int(op["kind"]), len(_members(rank, op)))


def copied_bytes(kind: Kind) -> Callable[[Seen], float]:
    """Return a measure: the bytes that the busiest rank copies between device and host, in one direction."""
    return lambda seen: _most(seen, lambda ops: ops["bytes"][ops["kind"] == kind].sum())


def count_exposed_layers(seen: Seen) -> float:
    """Return how many layers of the worst rank no gather spans (issued before the layer, waited for after it)."""
    return _most(seen, _alone)


def gathers_and_layers(ops: Any) -> tuple[list[tuple[int, int]], list[int]]:
    """Return where each gather is issued and waited for, and where each layer computes: places in program order."""
    waits = {int(op["ref"]): place for place, op in enumerate(ops) if op["kind"] == Kind.WAIT}
    gathers = [place for place, op in enumerate(ops) if op["kind"] == Kind.ALL_GATHER]
    layers = [place for place, op in enumerate(ops) if op["kind"] == Kind.COMPUTE]
    return [(place, waits.get(place, len(ops))) for place in gathers], layers


def _alone(ops: Any) -> int:
    gathers, layers = gathers_and_layers(ops)
    return sum(not any(issued < layer < waited for issued, waited in gathers) for layer in layers)


def makespan(seen: Seen) -> float:
    """Return the seconds from the first op to the last, on the virtual clock."""
    return float(seen.timeline.step_time)


def _collective(ops: Any) -> Any:
    return (ops["lane"] == Lane.COMM) & ~np.isin(ops["kind"], (Kind.SEND, Kind.RECV, Kind.BARRIER))


def _most_held(memory: Any, categories: tuple[str, ...]) -> int:
    numbers = [CATEGORIES.index(category) for category in categories]
    held = np.cumsum(memory["delta"][np.isin(memory["category"], numbers)])
    return int(held.max(initial=0))


def _most(seen: Seen, of: Callable[[Any], Any]) -> float:
    assert seen.trace is not None, "nothing was recorded"
    return float(max(of(rank.ops) for rank in seen.trace.ranks))
