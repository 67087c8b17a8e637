"""Charts of memory: over time, at each rank's peak by plan or by strategy, and beside a device's, before a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING

from mpkit.common.units import memory_share, memory_text, percent
from mpkit.trace import CATEGORIES
from mpkit.views.chart.chart import SECONDS, Axis, Chart, Panel, Series, Unit, bytes_of_memory
from mpkit.views.drawing.colours import CATEGORY_INKS, SPARE_INK
from mpkit.views.drawing.lanes import short_label
from mpkit.views.memory.series import device_memory, held_text, levels_of, memory_of, peak_words, share_text
from mpkit.views.theme import ALARM

if TYPE_CHECKING:
    from mpkit.prediction.cost_model.estimate import Estimate
    from mpkit.prediction.experiments.by_strategy import MemoryByStrategy
    from mpkit.prediction.experiments.compare import MemoryByPlan
    from mpkit.timeline.timeline import Timeline


MOST = 64
"""The most ranks that have a panel; a note says how many there are more."""
BARS = 16
"""The most ranks of a plan that have a bar."""


def memory_over_time(timeline: Timeline, title: str = "", highest: float = 0, like: float = 0) -> Chart:
    """Return the memory of each GPU over time, stacked by category, its peak marked and in words.

    Charts that are compared share `highest`, bytes that the scale reaches at least, and the unit of `like`, the largest
    amount beside them.
    """
    ranks = range(min(timeline.world_size, MOST))
    memories = [memory_of(timeline, rank, points=300) for rank in ranks]
    most = max((each.total for each in memories), default=0)
    like, device = max(like, most), device_memory(timeline)
    unit = _unit(timeline, like)
    labels = [short_label(timeline, rank) for rank in ranks]
    peaks = [
        f"peak {held_text(timeline, each.total, like)}{share_text(each.total, device[0])}"
        for each in memories
    ]
    panels = [
        Panel(
            [Series(name, each.levels[:, i].tolist(), CATEGORY_INKS[name]) for i, name in enumerate(CATEGORIES)],
            each.times.tolist(), "areas", label, peak, Axis(unit=SECONDS), Axis(unit=unit, high=max(highest, most, 1)),
            peak=True,
        )
        for each, label, peak in zip(memories, labels, peaks, strict=True)
    ]  # fmt: skip
    told = [peak_words(timeline, like)]
    told += (
        [f"Percentages are of the {held_text(timeline, device[0])} of one {device[1]}."] if device[0] else []
    )
    missing = timeline.world_size - len(ranks)
    return Chart(
        title, panels, "Memory by GPU. " + "; ".join(map(": ".join, zip(labels, peaks, strict=True))),
        note=" ".join(told), across=4, least=220, tall=92, left_out=f"and {missing} GPUs more" if missing else "",
    )  # fmt: skip


def _unit(timeline: Timeline, like: float) -> Unit:
    """Return the unit of what is held: bytes, or micro-batches of a simulation."""
    if timeline.clock != "simulated":
        return bytes_of_memory(like)
    return Unit(lambda held: held_text(timeline, held), lambda high, most: levels_of(timeline, high, most))


def by_plan(memory: MemoryByPlan) -> Chart:
    """Return a group of bars per plan: what each rank held at the moment when it held most."""
    held = {name: peaks_of(timeline) for name, timeline in memory.timelines.items()}
    shown = {name: ranks[:BARS] for name, ranks in held.items()}
    missing = sum(len(ranks) - len(shown[name]) for name, ranks in held.items())
    title = "Most memory per rank, by plan" + (f"; {missing} more ranks not shown" if missing else "")
    timeline = next(iter(memory.timelines.values()))
    title_of_axis = "micro-batches" if timeline.clock == "simulated" else ""
    like = max((sum(rank.values()) for ranks in shown.values() for rank in ranks), default=0)
    return Chart(title, [_stacked(shown, _unit(timeline, like), title=title_of_axis)], tall=220)


def _stacked(
    groups: Mapping[str, Sequence[Mapping[str, float]]],
    unit: Unit,
    more: Sequence[Series] = (),
    title: str = "",
) -> Panel:
    """Return a bar per rank, stacked by category, the ranks of a plan side by side."""
    ranks = [rank for group in groups.values() for rank in group]
    series = [Series(name, [rank[name] for rank in ranks], CATEGORY_INKS[name]) for name in CATEGORIES]
    places = [place for group in groups.values() for place in range(len(group))]
    sizes = [(name, len(group)) for name, group in groups.items()]
    return Panel([*series, *more], places, y=Axis(title, unit), x=Axis("rank"), groups=sizes)


def peaks_of(timeline: Timeline) -> list[dict[str, float]]:
    """Return by rank what it held at its peak, by category."""
    memories = [memory_of(timeline, rank) for rank in range(timeline.world_size)]
    return [dict(zip(CATEGORIES, each.levels[each.peak].tolist(), strict=True)) for each in memories]


def by_strategy(memory: MemoryByStrategy) -> Chart:
    """Return a bar per rank by strategy, and the formula of its states as a line across it."""
    rows = [row for row in memory.rows if row.rank < 8]  # the others do the same as the first
    missing = len(memory.rows) - len(rows)
    groups = {name: [row.held for row in rows if row.strategy == name] for name in memory.answers}
    formulas = [sum(row.formula.values()) for name in groups for row in rows if row.strategy == name]
    like = max(max(sum(row.held.values()) for row in rows), *formulas)
    mark = Series("params + grads + optimizer by the formula", formulas, ALARM, "mark")
    title = f"Memory by strategy, {memory.how}" + (f"; {missing} more ranks not shown" if missing else "")
    return Chart(title, [_stacked(groups, bytes_of_memory(like), [mark])], str(memory), tall=220)


GIB = 2**30
STAGES = 16
"""The most stages that have a bar."""


def memory_panel(estimate: Estimate) -> Panel:
    """Return the panel of an estimate's memory: a bar for a rank of each stage, with the margin of an allocator."""
    from mpkit.prediction.cost_model.memory import CATEGORIES, MARGIN_WORD, MEANING

    stages, per_stage = estimate.stage_memory, estimate.layout.ranks // estimate.layout.pp
    fullest, room = estimate.memory[estimate.fullest], estimate.available

    def series(name: str, meaning: str, held: list[float], here: float, ink: str | tuple[str, str]) -> Series:
        told = [f"{name}, {meaning}: {memory_text(size)}" for size in held]
        labels = [f"{size / GIB:.1f}" for size in held]
        key = f"{name} {memory_text(here, estimate.needed)}" if here >= 1 << 20 else name
        return Series(name, held, ink, labels=labels, told=told, key=key)

    parts = [
        series(
            name,
            MEANING[name],
            [stage[name] for stage in stages[:STAGES]],
            fullest[name],
            CATEGORY_INKS[name],
        )
        for name in CATEGORIES
    ]
    margins = [estimate.margin(stage) for stage in stages[:STAGES]]
    spare = "what an allocator reserves beside it"
    parts.append(series(MARGIN_WORD, spare, margins, estimate.margin(fullest), SPARE_INK))
    needed = [sum(stage.values()) + estimate.margin(stage) for stage in stages[:STAGES]]
    ranks = [(stage * per_stage, (stage + 1) * per_stage - 1) for stage in range(len(needed))]
    known = room != inf
    share = [f", {percent(each / room)}" if known else "" for each in needed]
    words = [memory_share(each, room) if known else memory_text(each) for each in needed]
    device = f"one {estimate.hardware.device.name} has {memory_text(room)}" if known else ""
    return Panel(
        parts, [f"rank {first}" if first == last else f"ranks {first}-{last}" for first, last in ranks], "rows",
        x=Axis(unit=bytes_of_memory(), high=max([*needed, room] if known else needed) * 1.02), keys=True,
        ends=[f"{held}{part}" for held, part in zip(words, share, strict=True)],
        limit=(room, device) if known else None,
        note=f"and {len(stages) - STAGES} more stages" if len(stages) > STAGES else "",
    )  # fmt: skip
