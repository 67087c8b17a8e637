"""What was in memory when most was held, in words; and which steps were not measured."""

from __future__ import annotations

from collections import Counter
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit.common.units import seconds
from mpkit.timeline.metrics import active, extent, work
from mpkit.timeline.timeline import Timeline
from mpkit.trace import CATEGORIES, Kind
from mpkit.views.drawing.lanes import short_label
from mpkit.views.memory.series import held_text, memory_of

__all__ = ["UNMEASURED", "peak_words", "repeated_from"]

UNMEASURED = "Paler: steps that were not measured, drawn as an earlier one was."


def peak_words(timeline: Timeline, like: float = 0) -> str:
    """Say what the fullest rank held when it held most, and what it was doing; "" if nothing is held.

    Args:
        timeline: of the ranks.
        like: the largest amount beside these words, whose unit they have too; 0: that of the fullest rank.

    >>> import mpkit as mk
    >>> peak_words(mk.simulate(mk.Plan.pipeline("1f1b", 2, 4)))
    'GPU 0 holds most: 2 micro-batches at 1.00 s, in forward of micro-batch 1; alive: micro-batches 0 and 1.'
    """
    memories = [memory_of(timeline, rank) for rank in range(timeline.world_size)]
    rank = max(range(len(memories)), key=lambda each: memories[each].total)
    memory = memories[rank]
    if not memory.total:
        return ""
    like = max(like, memory.total)
    time = float(memory.times[memory.peak])
    spans = timeline.spans[timeline.spans["rank"] == rank]
    moment = time + (float(timeline.spans["start"].min()) if len(timeline.spans) else 0.0)
    by_size = sorted(zip(memory.levels[memory.peak].tolist(), CATEGORIES, strict=True), reverse=True)
    parts = ", ".join(f"{name} {held_text(timeline, held, like)}" for held, name in by_size if held)
    words = f"{short_label(timeline, rank)} holds most: {held_text(timeline, memory.total, like)} at {seconds(time)}"
    words += _action_at(spans, moment) + _micro_batches_alive(spans, moment)
    return words + (f"; {parts}." if timeline.clock != "simulated" else ".")


def _action_at(spans: npt.NDArray[Any], moment: float) -> str:
    """Say which action runs at a moment."""
    actions = work(spans)
    now = actions[(actions["start"] <= moment) & (moment < actions["end"])]
    if not len(now):
        return ""
    number = int(now[-1]["microbatch"])
    return f", in {Kind(int(now[-1]['kind'])).word.replace('_', ' ')}" + (
        f" of micro-batch {number}" if number >= 0 else ""
    )


def _micro_batches_alive(spans: npt.NDArray[Any], moment: float) -> str:
    """Say of which micro-batches activations are alive at a moment: forward begun, backward not over."""
    actions = work(spans)
    begun = actions[(actions["kind"] == Kind.FORWARD) & (actions["start"] <= moment)]
    if not len(begun):
        return ""
    step = int(begun[-1]["step"])
    over = actions[
        np.isin(actions["kind"], (Kind.BACKWARD, Kind.WEIGHT_GRAD))
        & (actions["end"] <= moment)
        & (actions["step"] == step)
    ]
    left = Counter(begun["microbatch"][begun["step"] == step].tolist())
    left.subtract(over["microbatch"].tolist())
    alive = sorted(number for number, count in left.items() if count > 0 and number >= 0)
    if not alive:
        return ""
    listed = f"micro-batch {alive[0]}" if len(alive) == 1 else f"micro-batches {alive[0]} and {alive[1]}"
    if len(alive) > 2:
        whole = alive == [*range(alive[0], alive[-1] + 1)]
        listed = f"micro-batches {alive[0]} to {alive[-1]}" if whole else f"{len(alive)} micro-batches"
    return f"; alive: {listed}"


def repeated_from(timeline: Timeline) -> float:
    """Return from when on the memory of a watched program is that of earlier steps again, in seconds; inf: never.

    Its first steps are measured until one repeats another (`launch/watch/costs.py`); those after it are not.
    """
    if not timeline.meta.get("watched") or not len(timeline.held):
        return inf
    held, seen = timeline.held[timeline.held["rank"] == 0], set[bytes]()
    repeats = False
    for step in timeline.steps:
        spans = timeline.spans[(timeline.spans["step"] == step) & (timeline.spans["rank"] == 0)]
        start, end = extent(active(spans))
        if repeats:
            return start
        mine = held[(held["time"] >= start) & (held["time"] < end)]
        changes = np.stack([mine["category"], mine["total"]]).tobytes()
        repeats = changes in seen
        seen.add(changes)
    return inf
