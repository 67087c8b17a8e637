"""Timelines as one HTML page that needs nothing else: no network, no kernel.

    summary     a line per strategy: bubble, step time, memory, bytes, and the caller's own columns
    a section   per strategy: the interactive timeline (the timeline widget's own code) with tracks of what the GPUs
                did, memory by GPU
    try it      if asked for: schedules that the reader sets with sliders (`mpkit.views.page.trial`)

The page contains the spans as the widget's binary batches, compressed. Until the script has drawn them, and where no
script may run, the page shows the same pictures as SVG.
"""

import gzip
import json
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from string import Template
from typing import Any

from mpkit.common.safe_text import escape
from mpkit.common.units import bytes_text, percent, seconds
from mpkit.timeline import metrics
from mpkit.timeline.notes import proof_notes
from mpkit.timeline.timeline import Timeline
from mpkit.trace.proof import Proof
from mpkit.views.browser import TRIAL, css, esm
from mpkit.views.chart.svg import chart_svg
from mpkit.views.dashboard.html import badge
from mpkit.views.drawing.lanes import (
    FOLDED,
    clock_words,
    files_words,
    groups_of,
    groups_trait,
    rank_label,
    widest_label,
)
from mpkit.views.memory.charts import memory_over_time
from mpkit.views.memory.series import held_text
from mpkit.views.page.trial import LINK, trial
from mpkit.views.theme import THEMES, style_block, substitute_theme
from mpkit.views.timeline.critical_path import MOST, has_path, path_of
from mpkit.views.timeline.stages import layers_trait
from mpkit.views.timeline.svg import svg
from mpkit.views.timeline.text import rank_table
from mpkit.views.timeline.tracks import pack_tracks
from mpkit.views.timeline.wire import look, pack_spans


def html(
    timelines: Timeline | Mapping[str, Timeline],
    title: str = "",
    *,
    facts: Mapping[str, Mapping[str, str]] | None = None,
    intro: str = "",
    below: str = "",
    captions: Mapping[str, str] | None = None,
    steps: Mapping[str, int] | None = None,
    base: str = "",
    try_it: tuple[int, int] | None = None,
) -> str:
    """Return a page with one timeline, or with several by name.

    Args:
        timelines: what to show.
        title: the page's heading.
        facts: more columns for the summary table, by the timeline's name: {"gpipe": {"in theory": "27.3 %"}}.
        intro: paragraphs below the heading, parted by empty lines.
        below: what is to be said of the figures, below their table.
        captions: what each timeline shows, by its name.
        steps: the step whose figures are shown, by the timeline's name; left out, the last complete one.
        base: the timeline that speed-ups are relative to; "": the slowest.
        try_it: p ranks and m micro-batches, with which a section of schedules to try begins; None: no such section.

    Raises:
        ValueError: there is no timeline, or there are facts about one that is not given.

    >>> import mpkit as mk
    >>> page = html({"GPipe": mk.simulate(mk.Plan.gpipe(4, 8))}, facts={"GPipe": {"in theory": "27.3 %"}})
    >>> page.startswith("<!doctype html>"), "27.3 %" in page
    (True, True)
    """
    named = {"": timelines} if isinstance(timelines, Timeline) else dict(timelines)
    facts, captions, steps = facts or {}, captions or {}, steps or {}
    if not named:
        raise ValueError("html({}) has no timeline to show: give a Timeline, or {name: Timeline}")
    if unknown := set(facts) - set(named):
        raise ValueError(f"facts about {sorted(unknown)}, but the timelines are {sorted(named)}")
    title = title or ("Timelines" if len(named) > 1 else _title(next(iter(named.values()))))
    compared = [timeline for name, timeline in named.items() if name != base] or [*named.values()]
    highest = max((held["total"] for each in compared for held in each.peak_memory_of_run), default=0)
    common = _common_notes(named)
    widest = widest_label(named.values())
    shown = {name: _shown_step(timeline, steps.get(name)) for name, timeline in named.items()}
    like = max((held["total"] for each in shown.values() for held in each.peak_memory), default=0)
    sections = [
        _section(
            number, name, timeline, steps.get(name), captions.get(name, ""), highest, like, widest, common
        )
        for number, (name, timeline) in enumerate(named.items())
    ]
    more = [trial(*try_it)] if try_it else []
    page = Template(
        substitute_theme((files("mpkit.views.browser") / "page.html").read_text(encoding="utf-8"))
    )
    return page.substitute(
        title=escape(title),
        intro="".join(f"<p class='intro'>{escape(part)}</p>" for part in intro.split("\n\n") if part)
        + (LINK if try_it else ""),
        variables=_variables(),
        css=css(),
        summary=_summary(shown, facts, base, like, [below, *common]) if len(named) > 1 or facts else "",
        sections="\n".join([*sections, *more]),
        look=_embed_json(look()),
        script=esm(TRIAL if try_it else ()),
    )


def _title(timeline: Timeline) -> str:
    """Return the heading of a page with one timeline: of an imported trace its file."""
    ranks = f"{timeline.world_size} rank{'s' * (timeline.world_size != 1)}"
    return f"Timeline of {files_words(timeline) or ranks}"


def _shown_step(timeline: Timeline, step: int | None) -> Timeline:
    """Return the step whose figures are shown; the whole timeline, whose figures are its last step's, without one."""
    return timeline if step is None else timeline.step(step)


def _common_notes(named: Mapping[str, Timeline]) -> list[str]:
    """Return the notes that all of several timelines have: the page says them once."""
    first, *others = named.values()
    return [note for note in first.notes if others and all(note in other.notes for other in others)]


def _section(
    number: int, name: str, timeline: Timeline, step: int | None, caption: str, highest: int, like: int, widest: str,
    common: list[str],
) -> str:  # fmt: skip
    """Return one timeline: the SVG that is shown until the canvas is drawn, the data, and the memory."""
    shown = _shown_step(timeline, step)
    head, buffer = pack_spans(timeline.spans, timeline.names)
    works = len(metrics.work(timeline.spans)) > 0
    state = {
        "title": "",
        "labels": [rank_label(timeline, rank) for rank in range(timeline.world_size)],
        "groups": groups_trait(groups_of(timeline), timeline.world_size),
        "layers": layers_trait(timeline),
        "bubble": shown.bubble if works else None,
        "step_time": shown.step_time if works else None,
        "of": f"step {shown.steps[-1]}" if works and len(timeline.steps) > 1 else "",
        "clock": clock_words(timeline),
        "note": " ".join(note for note in timeline.notes if note not in common),
        "live": False,
        "widest": widest,
        "table": rank_table(shown, like),
    }
    tracks = ""
    if len(timeline.device_samples):  # memory has pictures of its own below
        state["tracks_head"], values = pack_tracks(replace(timeline, held=timeline.held[:0]))
        tracks = f'<script type="text/plain" data-tracks="{number}">{_pack_bytes(values)}</script>'
    if has_path(timeline) and len(metrics.active(shown.spans)) <= MOST:
        state["path_head"], slack = path_of(timeline, step)
        tracks += f'<script type="text/plain" data-path="{number}">{_pack_bytes(slack)}</script>'
    still = svg(timeline, step=step, fold=timeline.world_size > FOLDED)
    heading = f"<h2>{escape(name)}</h2>" if name else ""
    # Not of a prediction.
    if proof_notes(timeline.meta) and set(proof_notes(timeline.meta)) <= set(timeline.notes):
        heading += f"<p class='intro'>{badge(Proof.from_trace(timeline.meta['proof']))}</p>"
    heading += f"<p class='intro'>{escape(caption)}</p>" if caption else ""
    memory = (
        _memory(shown, highest, like, "" if step is None else f", step {step}") if len(timeline.held) else ""
    )
    return (
        f'<section class="card" id="timeline-{number}">{heading}'
        f'<div class="host" data-number="{number}"><div class="static scroll">{still}</div></div>'
        f'<script type="application/json" data-of="{number}">{_embed_json({"head": head, "state": state})}</script>'
        f'<script type="text/plain" data-spans="{number}">{_pack_bytes(buffer)}</script>'
        f"{tracks}{memory}</section>"
    )


def _pack_bytes(values: bytes) -> str:
    """Compress bytes for a script element, from which `unpacked` (page.html) reads them."""
    return b64encode(gzip.compress(values, 6, mtime=0)).decode()


def _memory(timeline: Timeline, highest: int, like: int, when: str) -> str:
    """Return the memory of each GPU while the figures are of it, drawn twice: for wide windows and for phones."""
    chart = memory_over_time(timeline, highest=highest, like=like)
    wide, narrow = chart_svg(chart, 1100), chart_svg(chart, 360)
    drawn = f"<div class='wide'>{wide}</div><div class='narrow'>{narrow}</div>"
    many = "" if timeline.world_size > 8 else " open"
    return f"<details{many}><summary>Memory by GPU{when}</summary>{drawn}</details>"


def _summary(
    named: Mapping[str, Timeline],
    facts: Mapping[str, Mapping[str, str]],
    base: str,
    like: int,
    notes: list[str],
) -> str:
    """Return the table by strategy. A column that only some strategies have is left empty for the others."""
    extra = list(dict.fromkeys(column for known in facts.values() for column in known))
    head = [
        "bubble",
        "step time",
        f"speed-up over {base or 'the slowest'}",
        "peak memory per GPU",
        "bytes sent per step",
        *extra,
    ]
    slowest = max(timeline.step_time for timeline in named.values())
    against = named[base].step_time if base else slowest
    table = [
        [*_figures(timeline, against, like), *(facts.get(name, {}).get(column, "") for column in extra)]
        for name, timeline in named.items()
    ]
    kept = [at for at in range(len(head)) if any(row[at] not in ("", "0 B") for row in table)]
    rows = []
    for number, (name, row) in enumerate(zip(named, table, strict=True)):
        cells = "".join(
            f'<td data-head="{escape(head[at])}">{row[at] if at == 0 else escape(row[at])}</td>'
            for at in kept
        )
        link = f'<a href="#timeline-{number}">{escape(name or "timeline")}</a>'
        rows.append(f'<tr><th scope="row">{link}</th>{cells}</tr>')
    share = '<label class="share"><input type="checkbox" id="share">draw all on one time scale</label>'
    share = share if len(named) > 1 else ""
    told = "".join(f"<p class='intro note'>{escape(note)}</p>" for note in notes if note)
    columns = "".join(f'<th scope="col">{escape(column)}</th>' for column in ["", *(head[at] for at in kept)])
    return (
        '<section class="card scroll" tabindex="0" aria-label="figures of each timeline">'
        f'<table class="summary"><thead><tr>{columns}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>{share}{told}</section>"
    )


def _figures(timeline: Timeline, against: float, like: int) -> list[str]:
    """Return bubble (as HTML, with a bar), step time, speed-up, memory, bytes; "" if missing."""
    bubble, step_time = timeline.bubble, timeline.step_time
    peak = max((held["total"] for held in timeline.peak_memory), default=0)
    sent = sum(count for kinds in timeline.comm_bytes for kind, count in kinds.items() if kind != "recv")
    return [
        f'<span class="bar" style="--share:{bubble:.4f}"></span><span class="number">{percent(bubble)}</span>',
        seconds(step_time),
        f"{against / step_time:.2f} ×" if step_time else "",
        held_text(timeline, peak, like) if peak else "",
        bytes_text(sent),
    ]


def _variables() -> str:
    """Return the page's own colours, from the same themes as the pictures."""

    def block(name: str) -> str:
        return "".join(f"--{word}:{value};" for word, value in vars(THEMES[name]).items())

    return style_block(lambda name: f":root{{{block(name)}}}")


def _embed_json(value: Any) -> str:
    """Encode a value as JSON that cannot end the script element around it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
