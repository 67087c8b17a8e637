"""The verdict on an answer: what `mk.check` returns, as text, as HTML and as JSON.

Checked         the rows that were checked, the mistake that shows, and a hint
checked_text    a table, what happened, the hint
checked_html    the same as a page's part, with the answer's timeline above the solution's
verdict_json    plain data: it is sent from the judging process to the one that writes reports, and kept in files
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from textwrap import fill
from typing import TYPE_CHECKING, Any

from mpkit.common.display import image
from mpkit.common.safe_text import escape
from mpkit.course.catalogue import ExerciseEntry
from mpkit.course.framework.exercise import Case, CheckRow, Seen
from mpkit.errors import MpkitError
from mpkit.views.theme import MONO, STATUS, THEMES, WHOLE_WORDS
from mpkit.views.timeline.picture import picture
from mpkit.views.timeline.svg import gutter_of, svg

if TYPE_CHECKING:
    from mpkit.timeline.timeline import Timeline


NOT_JUDGED = "not-judged"
"""In place of a mistake: the machine was too busy to run the ranks."""


class NotSolved(MpkitError):
    """An answer that was required to be right is wrong."""


@dataclass(frozen=True, repr=False)
class Checked:
    """The verdict of `mk.check`: printed as text, and shown as a table and a picture in a notebook.

    Attributes:
        name: the name of the exercise.
        title: the title of the exercise.
        rows: what was checked, up to the first check that failed.
        passed: whether all checks passed.
        mistake: the name of the mistake that shows; "" if none is known, or the answer is right.
        lesson: paragraphs on what happened on the ranks, if they hang or failed.
        hint: a hint; "" if the answer is right.
        tries: how many different answers to this exercise were checked, this one included.
        printed: what the ranks printed in the last case.
        timelines: the timelines "yours" and "target", if there is something to see.
    """

    name: str
    title: str
    rows: tuple[CheckRow, ...]
    passed: bool
    mistake: str = ""
    lesson: tuple[str, ...] = ()
    hint: str = ""
    tries: int = 1
    printed: tuple[str, ...] = ()
    timelines: dict[str, Timeline] | None = None

    @property
    def not_judged(self) -> bool:
        """Whether the machine was too busy to say whether the answer is right."""
        return self.mistake == NOT_JUDGED

    def require(self) -> Checked:
        """Return this verdict if the answer is right.

        Raises:
            NotSolved: The answer is wrong, or was not judged; the message has the table and the hint.
        """
        if not self.passed:
            raise NotSolved(str(self))
        return self

    @property
    def words(self) -> str:
        """The verdict in a few words."""
        if self.not_judged:
            return "not judged: busy"
        if not self.passed:
            return "not yet"
        return "solved" + (f", at the {_ordinal(self.tries)} try" if self.tries > 1 else "")

    def __str__(self) -> str:
        return checked_text(self)

    __repr__ = __str__

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {"text/html": checked_html(self), "text/plain": str(self)}


def _ordinal(n: int) -> str:
    last = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return {1: "first", 2: "second", 3: "third"}.get(n, f"{n}{last}")


# ---- text

WIDTH = 100
MOST_LINES = 12
"""The most lines shown of what the ranks printed."""
HEADS = ("what was checked", "expected", "got")


def checked_text(checked: Checked) -> str:
    """Return the verdict, the table, what happened, and the hint."""
    lines = [f"{checked.title}: {checked.words}", ""]
    cells = [HEADS, *((row.what, row.expected, row.got) for row in checked.rows)]
    marks = [" ", *("✔" if row.ok else "✗" for row in checked.rows)]
    wide = [max(len(each[i]) for each in cells) for i in range(2)]
    for mark, (what, expected, got) in zip(marks, cells, strict=True):
        lines.append(f"{mark} {what:{wide[0]}}  {expected:{wide[1]}}  {got}")
    for paragraph in checked.lesson:
        lines += ["", *(_wrap_text(line) for line in paragraph.splitlines())]
    if checked.hint:
        lines += ["", fill(f"Hint: {checked.hint}", WIDTH)]
    return "\n".join(lines)


def _wrap_text(line: str) -> str:
    indent = line[: len(line) - len(line.lstrip())]
    return fill(line, WIDTH, subsequent_indent=indent + "    ")


# ---- HTML

FAINT = f"color:var(--jp-ui-font-color2,{THEMES['light'].faint})"
MONOSPACE = f"font:12px/1.5 {MONO};{WHOLE_WORDS};margin:6px 0"


def checked_html(checked: Checked) -> str:
    """Return the verdict as HTML, with every string escaped."""
    parts = [_head(checked), _tables(checked)]
    if checked.lesson:
        happened, *rules = checked.lesson
        parts.append(f'<pre style="{MONOSPACE}">{escape(happened)}</pre>')
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
    colour, mark = (STATUS["good"], "✔") if checked.passed else (STATUS["bad"], "✗")
    if checked.not_judged:
        colour, mark = STATUS["done"], "·"
    return (
        f'<div style="font-size:15px;font-weight:600;margin:2px 0 8px"><span style="color:{colour}">{mark}</span> '
        f'{escape(checked.title)} <span style="background:{colour};color:#fff;border-radius:9px;padding:1px 9px;'
        f'font-size:12px;font-weight:500;margin-left:6px">{escape(checked.words)}</span></div>'
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
    line = f"1px solid var(--jp-border-color2,{THEMES['light'].line})"
    style = f"padding:3px 14px 3px 0;text-align:left;vertical-align:top;border-bottom:{line}"
    head = "".join(f'<th style="{style};font-weight:500;{FAINT}">{name}</th>' for name in ("", *HEADS))
    lines = []
    for row in rows:
        colour, mark = (STATUS["good"], "✔") if row.ok else (STATUS["bad"], "✗")
        words = "".join(
            f'<td style="{style}">{escape(each)}</td>' for each in (row.what, row.expected, row.got)
        )
        lines.append(
            f'<tr style="background:transparent"><td style="{style};color:{colour}">{mark}</td>{words}</tr>'
        )
    return (
        f'<table style="border-collapse:collapse;margin:0 0 8px;font-size:13px"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table>"
    )


def _printed_html(checked: Checked) -> str:
    lines = checked.printed[:MOST_LINES]
    more = len(checked.printed) - len(lines)
    text = "\n".join(lines) + (f"\n({more} more {'line' if more == 1 else 'lines'})" if more else "")
    head = f'<div style="{FAINT};font-size:13px">printed by the ranks</div>'
    return f'{head}<pre style="{MONOSPACE}">{escape(text)}</pre>'


def _timelines(checked: Checked) -> str:
    """Return the timelines one above the other, on the same time axis if they are on the same clock."""
    assert checked.timelines is not None
    seen = checked.rows[-1].seen
    hangs = seen is not None and seen.hang
    yours = "Yours: the last communication of each rank that waits never ends" if hangs else "Yours"
    titles = {"yours": yours, "target": "The solution's"}
    shown = {titles[name]: replace(timeline, notes=[]) for name, timeline in checked.timelines.items()}
    pictures = [picture(timeline) for timeline in shown.values()]
    one_clock = len({timeline.clock for timeline in shown.values()}) == 1
    room = max(each.duration for each in pictures) if one_clock else 0.0
    gutter = max(map(gutter_of, pictures))
    return "".join(
        image(svg(timeline, 760, title=title, room=room, gutter=gutter), f"{title}: {timeline!r}")
        for title, timeline in shown.items()
    )


def _code(words: str) -> str:
    """Return a text as HTML in which `names` in backticks are code."""
    parts = escape(words).split("`")
    return "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts))


# ---- JSON

MOST, LONGEST = 200, 2000
"""The most printed lines and the most characters per text that are kept."""


def verdict_json(checked: Checked) -> dict[str, Any]:
    """Return a verdict as JSON's types; the case of a row becomes a number, and timelines are left out."""
    cases: list[Case | None] = []
    rows = []
    for row in checked.rows:
        case = row.seen.case if row.seen is not None else None
        if case not in cases:
            cases.append(case)
        words = [text[:LONGEST] for text in (row.what, row.expected, row.got)]
        rows.append([*words, row.ok, cases.index(case) if case is not None else None])
    return {
        "rows": rows,
        "mistake": checked.mistake,
        "lesson": list(checked.lesson),
        "hint": checked.hint,
        "printed": [line[:LONGEST] for line in checked.printed[:MOST]],
    }


def checked_of(entry: ExerciseEntry, values: dict[str, Any]) -> Checked:
    """Return the verdict that `verdict_json` wrote; it passed if every row did.

    Raises:
        KeyError, TypeError, ValueError: The values were not written by `verdict_json`.
    """
    rows = []
    for what, expected, got, ok, case in values["rows"]:
        seen = Seen(Case(0, seed=int(case))) if case is not None else None
        rows.append(CheckRow(str(what), str(expected), str(got), ok is True, seen))
    if not rows:
        raise ValueError("a verdict on nothing")
    return Checked(
        entry.name, entry.text.title, tuple(rows), all(row.ok for row in rows), str(values["mistake"]),
        tuple(map(str, values["lesson"])), str(values["hint"]), 1, tuple(map(str, values["printed"])),
    )  # fmt: skip
