"""Memory over time in few numbers: the data that every memory view draws; and in words, what there was at the peak.

A step function with a change for each tensor is reduced to at most `points` moments. From each stretch of time the
moment is kept at which most was held, so that no peak is lost.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from mpkit.common.arrays import Array
from mpkit.common.units import memory_text, percent, seconds
from mpkit.devices.catalogue import hardware as catalogue
from mpkit.timeline.metrics import levels_of as levels_at
from mpkit.timeline.metrics import work
from mpkit.timeline.timeline import Timeline
from mpkit.trace import CATEGORIES, Kind
from mpkit.views.drawing.lanes import short_label
from mpkit.views.drawing.sheet import levels, memory_levels


def peak_words(timeline: Timeline, like: float = 0) -> str:
    """Say what the fullest rank held when it held most, and what it was doing; "" if nothing is held.

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


def _action_at(spans: Array, moment: float) -> str:
    """Say which action runs at a moment."""
    actions = work(spans)
    now = actions[(actions["start"] <= moment) & (moment < actions["end"])]
    if not len(now):
        return ""
    number = int(now[-1]["microbatch"])
    return f", in {Kind(int(now[-1]['kind'])).word.replace('_', ' ')}" + (
        f" of micro-batch {number}" if number >= 0 else ""
    )


def _micro_batches_alive(spans: Array, moment: float) -> str:
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


@dataclass(frozen=True)
class RankMemory:
    """The memory that one rank held."""

    times: Array  # (n,) seconds from the picture's start, ascending
    levels: Array  # (n, categories) bytes held from each time on
    peak: int  # the index of the moment at which most was held

    @property
    def total(self) -> int:
        """Bytes held at the peak."""
        return int(self.levels[self.peak].sum())


def memory_of(timeline: Timeline, rank: int, points: int = 500) -> RankMemory:
    """Return one rank's memory by category over time, at no more than `points` moments.

    >>> import mpkit as mk
    >>> held = memory_of(mk.simulate(mk.Plan.gpipe(4, 8)), rank=3)
    >>> held.total, float(held.times[held.peak])
    (8, 10.0)
    """
    origin = float(timeline.spans["start"].min()) if len(timeline.spans) else 0.0
    end = float(timeline.spans["end"].max()) if len(timeline.spans) else 0.0
    mine = timeline.held[timeline.held["rank"] == rank]
    times = np.concatenate([[origin], mine["time"], [max(end, *mine["time"][-1:], origin)]])
    levels = levels_at(mine).astype(float)
    levels = np.concatenate([levels, levels[-1:]])
    keep = fewer(times, levels.sum(axis=1), points)
    times, levels = np.maximum(times[keep] - origin, 0.0), levels[keep]
    return RankMemory(times, levels, int(levels.sum(axis=1).argmax()))


def device_memory(timeline: Timeline) -> tuple[int, str]:
    """Return the bytes of memory of the device that rank 0 is on, and its name; (0, "") where the machine is not known.

    >>> import mpkit as mk
    >>> timeline = mk.simulate(mk.Plan.gpipe(2, 1))
    >>> timeline.meta["hardware"] = "2x-titan-rtx"
    >>> timeline.clock = "virtual"
    >>> device_memory(timeline)
    (24000000000, 'TITAN RTX')
    """
    name = str(timeline.meta.get("hardware", ""))
    if timeline.clock == "simulated" or name not in catalogue():
        return 0, ""
    device = catalogue(name).device
    return device.memory, device.name


def share_text(nbytes: float, device: int) -> str:
    """Return the share of a device's memory, to put behind an amount; "" where the device's is not known.

    >>> share_text(12e9, 24_000_000_000), share_text(12e9, 0)
    (', 50.0 %', '')
    """
    return f", {percent(nbytes / device)}" if device else ""


def held_text(timeline: Timeline, amount: float, like: float = 0) -> str:
    """Format bytes in the unit of `like`, the largest amount beside them; of a simulation, live micro-batches."""
    if timeline.clock == "simulated":
        return f"{amount:.0f} micro-batch{'es' * (round(amount) != 1)}"
    return memory_text(amount, like)


def levels_of(timeline: Timeline, highest: float, most: int) -> list[tuple[float, str]]:
    """Return at most `most` + 1 round amounts up to the highest, and their words, for an axis."""
    if timeline.clock == "simulated":
        return [(level, f"{level:g}") for level in levels(highest, most)]
    return memory_levels(highest, most)


def fewer(times: Array, total: Array, points: int) -> Array:
    """Choose the moments to keep.

    Of the moments at the same time, only the last one counts. Of these, the first and the last are kept and, in each
    stretch of time in between, the highest and the last.
    """
    last = np.flatnonzero(np.concatenate([times[1:] > times[:-1], [True]]))
    if len(last) <= points:
        return last
    stretches = (points - 2) // 2
    stretch = (
        ((times[last] - times[0]) / (times[-1] - times[0]) * stretches).astype(int).clip(0, stretches - 1)
    )
    by_height = last[np.lexsort((total[last], stretch))]
    of = stretch[np.lexsort((total[last], stretch))]
    highest = by_height[np.concatenate([of[1:] != of[:-1], [True]])]
    ending = last[np.concatenate([stretch[1:] != stretch[:-1], [True]])]
    return np.unique(np.concatenate([[last[0]], highest, ending, [last[-1]]]))
