"""Charts of steps: where the time goes, bubbles by micro-batches, throughput by ranks, an estimate, an advice."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

from mpkit.common.table import table_text
from mpkit.common.units import memory_text, percent, seconds
from mpkit.timeline.idleness import CAUSES
from mpkit.views.chart.chart import (
    COUNT,
    NUMBER,
    SECONDS,
    WHOLE_SHARE,
    Axis,
    Chart,
    Panel,
    Series,
    bytes_of_memory,
)
from mpkit.views.drawing.colours import CAUSE_INKS, INKS, Ink, Key
from mpkit.views.memory.charts import memory_panel
from mpkit.views.theme import GREY, REST, SERIES

if TYPE_CHECKING:
    from mpkit.prediction.advice.advice import Advice
    from mpkit.prediction.cost_model.estimate import Estimate
    from mpkit.prediction.experiments.by_strategy import Scaling, ScalingRow
    from mpkit.prediction.experiments.compare import BubbleCurve
    from mpkit.timeline.comparison import Comparison


def causes(comparison: Comparison) -> Chart:
    """Return where the time of each timeline goes: work and idle time by cause, averaged over ranks."""
    rows = comparison.rows
    series = [Series("work", [sum(row.work.values()) for row in rows], CAUSE_INKS["work"])]
    series += [
        Series(f"idle: {cause}", [row.idle[cause] for row in rows], CAUSE_INKS[cause]) for cause in CAUSES
    ]
    names = [row.name for row in rows]
    panel = Panel(series, names, "rows", x=Axis(unit=SECONDS))
    return Chart("A step's time, averaged over ranks", [panel], str(comparison))


def bubble_curve(curve: BubbleCurve) -> Chart:
    """Return the measured bubbles as points, and the formula as a line that goes on a little.

    >>> import mpkit as mk
    >>> curve = mk.experiments.bubble_curve(mk.simulate(mk.Plan.gpipe(4, m)) for m in (1, 2, 8))
    >>> bubble_curve(curve).panels[0].series[-1].told
    ['m = 1: bubble 75.0 %', 'm = 2: bubble 60.0 %', 'm = 8: bubble 27.3 %']
    """
    ms = list(curve.runs)
    most = max(ms)
    line = range(1, most + max(2, most // 3) + 1)
    found = [curve.formula(m) for m in line]
    series = [Series("formula", found, _both(Key.FORWARD), "line", at=line)] if any(found) else []
    bubbles = [run.bubble for run in curve.runs.values()]
    told = [f"m = {m}: bubble {percent(bubble)}" for m, bubble in zip(ms, bubbles, strict=True)]
    runs = Series("runs", bubbles, _both(Key.BACKWARD), "points", at=ms, told=told)
    panel = Panel(
        [*series, runs], kind="lines", x=Axis("number of micro-batches m", COUNT, 1, line[-1]),
        y=Axis("bubble: idle share of a step", WHOLE_SHARE, 0, 1, at=(0, 0.25, 0.5, 0.75, 1)),
    )  # fmt: skip
    return Chart(_title(curve), [panel], bubble_curve_text(curve), tall=240)


def _title(curve: BubbleCurve) -> str:
    plan = curve.plan
    name = plan.schedule if isinstance(plan.schedule, str) else plan.schedule.name
    return f"Bubble by micro-batches: {name}, {plan.pp * plan.virtual_stages} stages"


def _both(key: Key) -> tuple[str, str]:
    ink: Ink = INKS[key]
    return ink.light, ink.dark


def bubble_curve_text(curve: BubbleCurve) -> str:
    """Return a line per run; "-" stands where there is no formula."""
    rows = [["micro-batches", "formula", "bubble", "step time"]]
    for m, run in curve.runs.items():
        formula = curve.formula(m)
        told = "-" if formula is None else percent(formula)
        rows.append([str(m), told, percent(run.bubble), seconds(run.step_time)])
    return "\n".join([_title(curve), *table_text(rows, ())])


def scaling_chart(scaling: Scaling) -> Chart:
    """Return throughput by ranks: a line per strategy, beside the ideal one.

    Serial training is the first point of every other strategy's line.
    """
    from mpkit.prediction.experiments.by_strategy import strategy  # imported here since it needs torch

    base = min(scaling.rows, key=lambda row: row.ranks)
    ranks = sorted({row.ranks for row in scaling.rows})
    ideal = [base.throughput * n / base.ranks for n in ranks]
    lines: dict[str, list[ScalingRow]] = {}
    for row in scaling.rows:
        lines.setdefault(strategy(row.plan), []).append(row)
    serial = lines.pop("serial", []) if len(lines) > 1 else []
    series = [Series("ideal", ideal, GREY, "dashes", at=ranks)]
    for (name, held), ink in zip(lines.items(), SERIES * len(lines), strict=False):
        rows = sorted([*serial, *held], key=lambda row: row.ranks)
        series.append(_throughput(name, rows, ink))
        if walls := [row for row in rows if row.wall_throughput is not None]:
            fast, at = [row.wall_throughput for row in walls], [row.ranks for row in walls]
            series.append(Series(f"{name}, by the wall clock", fast, ink, "rings", at=at))
    # The numbers stand where the ideal line crosses those of ranks, so that distances from it can be read off.
    panel = Panel(
        series, kind="lines", x=Axis("ranks", COUNT, log=True, at=ranks),
        y=Axis("samples/s", NUMBER, log=True, at=[float(f"{value:.3g}") for value in ideal]),
    )  # fmt: skip
    title = scaling.kind + (f", on {scaling.hardware}" if scaling.hardware else "")
    return Chart(title, [panel], str(scaling), tall=280)


def _throughput(name: str, rows: list[ScalingRow], ink: str) -> Series:
    told = [
        f"{row.ranks} ranks: {row.throughput:.4g} samples/s, speed-up {row.speed_up:.2f}, efficiency "
        f"{row.efficiency:.0%}" for row in rows
    ]  # fmt: skip
    labels = [f"{row.efficiency:.0%}" for row in rows]
    values, at = [row.throughput for row in rows], [row.ranks for row in rows]
    return Series(name, values, ink, "joined", at, labels, told)


def estimate_chart(estimate: Estimate) -> Chart:
    """Return the step's time by cause, and below it the memory of each stage's ranks beside the device's."""
    low, high = estimate.band
    name = estimate.model.name or "The model"
    title = (
        f"{name} {estimate.verdict} {estimate.hardware.name}: {seconds(estimate.step_time)} per step"
        f"{'' if estimate else ', if it had the memory'}"
    )
    remedy = estimate.remedy_words.replace("\n ", "")
    below = (
        f"{seconds(low)} to {seconds(high)} ({estimate.origin}); {estimate.tokens_per_second:,.0f} tokens/s, "
        f"{estimate.tflops_per_gpu:.0f} TFLOP/s per device, MFU {percent(estimate.mfu)}; {estimate.plan!r}. {remedy}"
    )
    listed = list(estimate.because.items())
    shown = listed[: len(SERIES)]
    if rest := sum(time for _, time in listed[len(SERIES) :]):
        shown.append(("other", rest))
    words = {cause: f"{cause} {seconds(time)}, {percent(time / estimate.step_time)}" for cause, time in shown}
    parts = [
        Series(cause, [time], ink, told=[words[cause]], key=words[cause])
        for (cause, time), ink in zip(shown, (*SERIES, REST), strict=False)
    ]
    time = Panel(parts, [""], "rows", x=Axis(unit=SECONDS, high=estimate.step_time, hidden=True), keys=True)
    memory = memory_panel(estimate)
    note = f"Legend of memory: rank {estimate.fullest}."
    note += f" Red line: {memory.limit[1]}." if memory.limit else ""
    return Chart(title, [time, memory], str(estimate), below, note, across=1, shared=False)


MOST = 1000
"""Plans of an advice that are drawn: the fastest, beside the frontier."""


def advice_chart(advice: Advice) -> Chart:
    """Return step time against memory: every plan that fits, and those than which none is both faster and smaller."""
    shown = advice.found[:MOST]
    frontier = sorted(
        (guess.needed, guess.step_time, repr(plan))
         for plan in advice.frontier for guess in [advice.estimate(plan)]
    )  # fmt: skip
    room = advice.asked.available
    every = Series(
        f"the {len(shown):,} fastest of {len(advice.found):,} plans that fit", [each.seconds for each in shown], GREY,
        "dots", at=[each.memory for each in shown],
    )  # fmt: skip
    told = [f"{plan}: {seconds(time)} per step, {memory_text(held)}" for held, time, plan in frontier]
    edge = Series(
        "the frontier: none found is faster and smaller", [time for _, time, _ in frontier], SERIES[0], "steps",
        at=[held for held, _, _ in frontier], told=told,
    )  # fmt: skip
    panel = Panel(
        [every, edge], kind="lines", limit=(room, f"a device has {memory_text(room)}") if isfinite(room) else None,
        x=Axis("memory of the fullest rank", bytes_of_memory(), 0), y=Axis("time per step", SECONDS),
    )  # fmt: skip
    return Chart(str(advice).split(":")[0], [panel], tall=280)
