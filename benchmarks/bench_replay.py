"""Operations per second that a replay puts on the clock, and actions per second that a simulation plays.

The trace is GPipe's, as its ranks would record it. Most of it is sends, receives and waits, which the replay processes
one by one; with layers, most of it is compute, which is placed by whole arrays. It is fed in one piece, and as in a
live view: whatever is new, a tenth of a second's worth at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

import mpkit as mk
from mpkit.timeline.replay import Replay, replay
from mpkit.trace import MEMORY, OP, Kind, Lane, RankTrace, Trace

RANKS, MICROBATCHES, STEPS, LAYERS, ROUNDS = 8, 64, 40, 12, 3
REQUIRED = 200_000
"""The least ops per second that a replay has to reach."""


def pipeline(layers: int) -> Trace:
    """Build a trace of GPipe: on each rank, each micro-batch is received, awaited, computed and sent, in both
    directions.
    """
    ranks = []
    for rank in range(RANKS):
        names = [""]
        rows: list[tuple[int, ...]] = []  # kind, depth, group, number, ref
        for step in range(STEPS):
            rows.append((Kind.STEP, 0, 0, -1, -1))
            for kind, source, target in (
                (Kind.FORWARD, rank - 1, rank + 1),
                (Kind.BACKWARD, rank + 1, rank - 1),
            ):
                incoming, outgoing = (f"{a}>{b}#{kind.name[0]}" for a, b in ((source, rank), (rank, target)))
                for microbatch in range(MICROBATCHES):
                    number = step * MICROBATCHES + microbatch
                    if 0 <= source < RANKS:
                        rows.append((Kind.RECV, 0, _line(names, incoming), number, -1))
                        rows.append((Kind.WAIT, 0, 0, -1, len(rows) - 1))
                    rows.append((kind, 0, 0, -1, -1))
                    rows += [(kind, 1, 0, -1, -1)] * layers
                    if 0 <= target < RANKS:
                        rows.append((Kind.SEND, 0, _line(names, outgoing), number, -1))
        ranks.append(_recorded(np.array(rows), names))
    return Trace(ranks, {"device": "cpu"})


def _line(names: list[str], name: str) -> int:
    if name not in names:
        names.append(name)
    return names.index(name)


def _recorded(rows: Any, names: list[str]) -> RankTrace:
    ops = np.zeros(len(rows), OP)
    ops["kind"], ops["depth"], ops["group"], ops["number"], ops["ref"] = rows.T
    ops["lane"] = np.where(ops["kind"] < 32, Lane.COMPUTE, np.where(ops["kind"] < 64, Lane.COMM, Lane.NONE))
    ops["step"] = np.cumsum(ops["kind"] == Kind.STEP) - 1
    layer = ops["depth"] > 0
    ops["start"] = 1 + 1000 * np.arange(len(ops))
    ops["end"] = ops["start"] + 900
    # An action ends when its last layer ends.
    actions = np.flatnonzero(~layer)
    last = np.append(actions[1:], len(ops)) - 1
    ops["end"][actions] = np.maximum(ops["end"][actions], ops["end"][last] + 50)
    ops["cpu"] = 1_000_000
    ops["bytes"] = 100_000
    return RankTrace(ops, np.zeros(0, MEMORY), names)


def live(trace: Trace, pieces: int) -> None:
    """Feed a trace in pieces, as it would arrive."""
    replaying = Replay(trace.world_size, meta=trace.meta)
    length = max(len(rank.ops) for rank in trace.ranks)
    for end in np.linspace(0, length, pieces + 1, dtype=int)[1:]:
        for number, rank in enumerate(trace.ranks):
            first = replaying.wants(number)
            replaying.feed(number, rank.ops[first:end], rank.names, first=first)
        replaying.advance()
    replaying.finish()


def best(act: Callable[[], object]) -> float:
    """Return the least CPU time in seconds over a few rounds of something that uses one core.

    CPU time is measured because other processes may use the machine meanwhile.
    """
    seconds = []
    for _ in range(ROUNDS):
        start = time.process_time()
        act()
        seconds.append(time.process_time() - start)
    return min(seconds)


def measure() -> list[dict[str, Any]]:
    """Measure ops and actions per second."""
    results = []
    for name, layers in (("pipeline", 0), ("pipeline with layers", LAYERS)):
        trace = pipeline(layers)
        for how, act in (
            ("in one piece", lambda trace=trace: replay(trace)),
            ("live, in 100 pieces", lambda trace=trace: live(trace, 100)),
        ):
            rate = len(trace) / best(act)
            results.append({"name": f"replay, {name}, {how}", "value": rate, "unit": "ops/s",
                            "ratio": rate / REQUIRED, "against": "200,000 ops/s required"})  # fmt: skip
    plan = mk.Plan.gpipe(RANKS, 512)
    rate = 2 * RANKS * 512 / best(lambda: mk.simulate(plan))
    results.append({"name": "simulate, GPipe of 8 stages and 512 micro-batches", "value": rate,
                    "unit": "actions/s", "ratio": None, "against": None})  # fmt: skip
    return results
