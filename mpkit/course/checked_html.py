"""A checked answer as HTML: a table, what happened, the hint, and the answer's timeline above the solution's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mpkit.common.display import image
from mpkit.common.safe_text import escape
from mpkit.course.checked_text import MOST_LINES, score_words, verdict
from mpkit.views.theme import MONO as MONOSPACE
from mpkit.views.theme import STATUS, THEMES, WHOLE_WORDS
from mpkit.views.timeline.picture import picture
from mpkit.views.timeline.svg import gutter_of, svg

if TYPE_CHECKING:
    from mpkit.course.framework.exercise import CheckRow
    from mpkit.course.judge import Checked

__all__ = ["checked_html"]

GOOD, BAD, NEUTRAL = STATUS["good"], STATUS["bad"], STATUS["done"]
FAINT = f"color:var(--jp-ui-font-color2,{THEMES['light'].faint})"
TITLES = {"yours": "Yours", "target": "The solution's"}
LINE = f"1px solid var(--jp-border-color2,{THEMES['light'].line})"
CELL = "padding:3px 14px 3px 0;text-align:left;vertical-align:top;border-bottom:" + LINE
MONO = f"font:12px/1.5 {MONOSPACE};{WHOLE_WORDS};margin:6px 0"


def checked_html(checked: Checked) -> str:
    """Return the verdict as HTML, with every string escaped."""
    parts = [_head(checked), _tables(checked)]
    if checked.score is not None:
        parts.append(f'<p style="margin:6px 0">{escape(score_words(checked.score))}</p>')
    if checked.lesson:
        happened, *rules = checked.lesson
        parts.append(f'<pre style="{MONO}">{escape(happened)}</pre>')
        parts += [f'<p style="margin:6px 0">{escape(rule)}</p>' for rule in rules]
    if checked.hint:
        parts.append(
            f'<div style="border-left:4px solid {STATUS["doubt"]};padding:6px 12px;margin:10px 0;max-width:52em">'
            f"<b>Hint</b> &nbsp;{_code(checked.hint)}</div>"
        )
    if checked.printed:
        parts.append(_printed_html(checked))
    if checked.timelines:
        parts.append(_timelines(checked))
    return f'<div style="max-width:980px;line-height:1.5">{"".join(parts)}</div>'


def _head(checked: Checked) -> str:
    colour, mark = (GOOD, "✔") if checked.passed else (BAD, "✗")
    if checked.exam or checked.not_judged:  # in an exam an answer is no right answer
        colour, mark = NEUTRAL, "·"
    return (
        f'<div style="font-size:15px;font-weight:600;margin:2px 0 8px"><span style="color:{colour}">{mark}</span> '
        f'{escape(checked.title)} <span style="background:{colour};color:#fff;border-radius:9px;padding:1px 9px;'
        f'font-size:12px;font-weight:500;margin-left:6px">{escape(verdict(checked))}</span></div>'
    )


def _tables(checked: Checked) -> str:
    """Return a table of the last case's rows; the rows of earlier cases are folded away."""
    last = checked.rows[-1].seen
    before = [row for row in checked.rows if row.seen and last and row.seen.case != last.case]
    rest = [row for row in checked.rows if row not in before]
    if not before:
        return _table(rest)
    many = len(before)
    words = "1 check in another case passed" if many == 1 else f"{many} checks in other cases passed"
    return (
        f'<details style="margin:0 0 6px;font-size:13px"><summary style="{FAINT};cursor:pointer">{words}</summary>'
        f"{_table(before)}</details>{_table(rest)}"
    )


def _table(rows: Sequence[CheckRow]) -> str:
    names = ("", "what was checked", "expected", "got")
    head = "".join(f'<th style="{CELL};font-weight:500;{FAINT}">{name}</th>' for name in names)
    lines = []
    for row in rows:
        colour, mark = (GOOD, "✔") if row.ok else (BAD, "✗")
        words = "".join(
            f'<td style="{CELL}">{escape(each)}</td>' for each in (row.what, row.expected, row.got)
        )
        lines.append(
            f'<tr style="background:transparent"><td style="{CELL};color:{colour}">{mark}</td>{words}</tr>'
        )
    return (
        f'<table style="border-collapse:collapse;margin:0 0 8px;font-size:13px"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table>"
    )


def _printed_html(checked: Checked) -> str:
    lines = checked.printed[:MOST_LINES]
    more = len(checked.printed) - len(lines)
    text = "\n".join(lines) + (f"\n({more} more {'line' if more == 1 else 'lines'})" if more else "")
    return f'<div style="{FAINT};font-size:13px">printed by the ranks</div><pre style="{MONO}">{escape(text)}</pre>'


def _timelines(checked: Checked) -> str:
    """Return the timelines one above the other, on the same time axis if they are on the same clock."""
    assert checked.timelines is not None
    shown = {
        _title(name, checked): replace(timeline, notes=[]) for name, timeline in checked.timelines.items()
    }
    pictures = [picture(timeline) for timeline in shown.values()]
    one_clock = len({timeline.clock for timeline in shown.values()}) == 1
    room = max(each.duration for each in pictures) if one_clock else 0.0
    gutter = max(map(gutter_of, pictures))
    return "".join(
        image(svg(timeline, 760, title=title, room=room, gutter=gutter), f"{title}: {timeline!r}")
        for title, timeline in shown.items()
    )


def _title(name: str, checked: Checked) -> str:
    waits = name == "yours" and checked.rows[-1].seen is not None and checked.rows[-1].seen.hang
    return "Yours: the last communication of each rank that waits never ends" if waits else TITLES[name]


def _code(words: str) -> str:
    """Return a text as HTML in which `names` in backticks are code."""
    parts = escape(words).split("`")
    return "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts))
