"""The output where no kernel runs: on GitHub, in a saved notebook, in a terminal."""

from __future__ import annotations

from functools import partial

from mpkit.common.display import image
from mpkit.timeline.timeline import Timeline
from mpkit.views.chart.svg import chart_svg
from mpkit.views.drawing.lanes import FOLDED
from mpkit.views.memory.charts import memory_over_time
from mpkit.views.timeline.picture import picture
from mpkit.views.timeline.svg import summary, svg
from mpkit.views.timeline.text import text

__all__ = ["static_bundle"]


def static_bundle(timeline: Timeline, title: str = "", *, memory: bool = False) -> dict[str, str]:
    """Return a MIME bundle of text/plain and text/html; with `memory`, what each rank held is drawn below.

    >>> import mpkit as mk
    >>> sorted(static_bundle(mk.simulate(mk.Plan.gpipe(2, 2))))
    ['text/html', 'text/plain']
    """
    fold = timeline.world_size > FOLDED
    drawn = partial(svg, timeline, title=title, fold=fold)
    shown = image(drawn, summary(picture(timeline, fold=fold)))
    if memory and len(timeline.held):
        chart = memory_over_time(timeline)
        shown += image(partial(chart_svg, chart), f"Memory by GPU over time. {chart.note}")
    return {"text/plain": text(timeline, 100, fold=fold), "text/html": shown}
