"""Timelines as one HTML page that needs nothing else: no network, no kernel.

    summary     a line per strategy: bubble, step time, memory, bytes, and the caller's own columns
    a section   per strategy: the interactive timeline (the timeline widget's own code), memory by GPU

The page contains the spans as the widget's binary batches, compressed. Until the script has drawn them, and where no
script may run, the page shows the same pictures as SVG.
"""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from collections.abc import Mapping
from importlib.resources import files
from string import Template
from typing import Any

from mpkit.support.units import bytes_text, percent, seconds
from mpkit.support.visible import escape
from mpkit.timeline import metrics
from mpkit.timeline.timeline import Timeline
from mpkit.views.browser import css, esm
from mpkit.views.drawing.colours import THEMES
from mpkit.views.drawing.lanes import FOLDED, groups_of, groups_trait, rank_label, widest_label
from mpkit.views.memory.held import held_text
from mpkit.views.memory.svg import highest_of, memory_svg
from mpkit.views.timeline.counting import BubbleCounter
from mpkit.views.timeline.picture import CLOCKS
from mpkit.views.timeline.svg import svg
from mpkit.views.timeline.table import rank_table
from mpkit.views.timeline.wire import Batches, look

__all__ = ["html"]


def html(
    timelines: Timeline | Mapping[str, Timeline],
    title: str = "",
    *,
    facts: Mapping[str, Mapping[str, str]] | None = None,
    intro: str = "",
) -> str:
    """Return a page with one timeline, or with several by name.

    Args:
        timelines: what to show.
        title: the page's heading.
        facts: more columns for the summary table, by the timeline's name: {"gpipe": {"in theory": "27.3 %"}}.
        intro: a paragraph below the heading.

    Raises:
        ValueError: there is no timeline, or there are facts about one that is not given.

    >>> import mpkit as mk
    >>> page = html({"GPipe": mk.simulate(mk.Plan.gpipe(4, 8))}, facts={"GPipe": {"in theory": "27.3 %"}})
    >>> page.startswith("<!doctype html>"), "27.3 %" in page
    (True, True)
    """
    named = {"": timelines} if isinstance(timelines, Timeline) else dict(timelines)
    facts = facts or {}
    if not named:
        raise ValueError("html({}) has no timeline to show: give a Timeline, or {name: Timeline}")
    if unknown := set(facts) - set(named):
        raise ValueError(f"facts about {sorted(unknown)}, but the timelines are {sorted(named)}")
    title = title or (
        "Timelines" if len(named) > 1 else f"Timeline of {next(iter(named.values())).world_size} ranks"
    )
    highest = max(highest_of(timeline) for timeline in named.values())
    widest = widest_label(named.values())
    sections = [
        _section(number, name, timeline, highest, widest)
        for number, (name, timeline) in enumerate(named.items())
    ]
    page = Template((files("mpkit.views.browser") / "page.html").read_text(encoding="utf-8"))
    return page.substitute(
        title=escape(title),
        intro=f"<p class='intro'>{escape(intro)}</p>" if intro else "",
        variables=_variables(),
        css=css(),
        summary=_summary(named, facts) if len(named) > 1 or facts else "",
        sections="\n".join(sections),
        look=_embedded(look()),
        script=esm(),
    )


def _section(number: int, name: str, timeline: Timeline, highest: int, widest: str) -> str:
    """Return one timeline: the SVG that is shown until the canvas is drawn, the data, and the memory."""
    batches, counter = Batches(), BubbleCounter(timeline.world_size)
    batches.add(timeline.spans, timeline.names)
    counter.add(timeline.spans)
    ((head, buffer),) = batches.since(0, counter.extents, most=max(len(timeline.spans), 1))
    data = b64encode(gzip.compress(buffer, 6, mtime=0)).decode()
    steps = timeline.steps
    works = len(metrics.work(timeline.spans)) > 0
    state = {
        "title": "",
        "labels": [rank_label(timeline, rank) for rank in range(timeline.world_size)],
        "groups": groups_trait(groups_of(timeline), timeline.world_size),
        "bubble": timeline.bubble if works else None,
        "step_time": timeline.step_time if works else None,
        "of": f"step {steps[-1]}" if works and len(steps) > 1 else "",
        "clock": CLOCKS.get(timeline.clock, timeline.clock),
        "note": " ".join(timeline.notes),
        "live": False,
        "widest": widest,
        "table": rank_table(timeline),
    }
    still = svg(timeline, fold=timeline.world_size > FOLDED)
    heading = f"<h2>{escape(name)}</h2>" if name else ""
    memory = ""
    if len(timeline.held):
        many = "" if timeline.world_size > 8 else " open"
        drawn = memory_svg(timeline, highest=highest)
        box = "<div class='scroll' tabindex='0' role='region' aria-label='memory by GPU'>"
        memory = f"<details{many}><summary>Memory by GPU</summary>{box}{drawn}</div></details>"
    return (
        f'<section class="card" id="timeline-{number}">{heading}'
        f'<div class="host" data-number="{number}"><div class="static scroll">{still}</div></div>'
        f'<script type="application/json" data-of="{number}">{_embedded({"head": head, "state": state})}</script>'
        f'<script type="text/plain" data-spans="{number}">{data}</script>'
        f"{memory}</section>"
    )


def _summary(named: Mapping[str, Timeline], facts: Mapping[str, Mapping[str, str]]) -> str:
    """Return the table by strategy. A column that only some strategies have is left empty for the others."""
    extra = list(dict.fromkeys(column for known in facts.values() for column in known))
    head = ["bubble", "step time", "speed-up", "peak memory per GPU", "bytes sent per step", *extra]
    slowest = max(timeline.step_time for timeline in named.values())
    table = [
        [*_figures(timeline, slowest), *(facts.get(name, {}).get(column, "") for column in extra)]
        for name, timeline in named.items()
    ]
    kept = [at for at in range(len(head)) if any(row[at] for row in table)]
    rows = []
    for number, (name, row) in enumerate(zip(named, table, strict=True)):
        cells = "".join(f"<td>{row[at]}</td>" if at == 0 else f"<td>{escape(row[at])}</td>" for at in kept)
        link = f'<a href="#timeline-{number}">{escape(name or "timeline")}</a>'
        rows.append(f'<tr><th scope="row">{link}</th>{cells}</tr>')
    share = '<label class="share"><input type="checkbox" id="share">draw all on one time scale</label>'
    share = share if len(named) > 1 else ""
    columns = "".join(f'<th scope="col">{escape(column)}</th>' for column in ["", *(head[at] for at in kept)])
    return (
        '<section class="card scroll" tabindex="0" aria-label="figures of each timeline">'
        f'<table class="summary"><thead><tr>{columns}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>{share}</section>"
    )


def _figures(timeline: Timeline, slowest: float) -> list[str]:
    """Return bubble (as HTML, with a bar), step time, speed-up over the slowest, memory, bytes; "" if missing."""
    bubble, step_time = timeline.bubble, timeline.step_time
    peak = max((held["total"] for held in timeline.peak_memory), default=0)
    sent = sum(count for kinds in timeline.comm_bytes for kind, count in kinds.items() if kind != "recv")
    return [
        f'<span class="bar" style="--share:{bubble:.4f}"></span>{percent(bubble)}',
        seconds(step_time),
        f"{slowest / step_time:.2f} ×" if step_time else "",
        held_text(timeline, peak) if peak else "",
        bytes_text(sent) if sent else "",
    ]


def _variables() -> str:
    """Return the page's own colours, from the same themes as the pictures."""

    def block(name: str) -> str:
        return "".join(f"--{word}:{value};" for word, value in vars(THEMES[name]).items())

    return f":root{{{block('light')}}}@media (prefers-color-scheme: dark){{:root{{{block('dark')}}}}}"


def _embedded(value: Any) -> str:
    """Encode a value as JSON that cannot end the script element around it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
