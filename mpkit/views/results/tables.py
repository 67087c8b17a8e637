"""Results that are tables and no more: what a rank sends, the runs of a notebook, the best plan of each family."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpkit.common.safe_text import escape
from mpkit.common.table import table_html, table_text
from mpkit.common.units import bytes_text, memory_text, percent, seconds
from mpkit.views.theme import WHOLE_WORDS

if TYPE_CHECKING:
    from mpkit.launch.session.run_list import KeptRun, RunList
    from mpkit.prediction.advice.advice import Advice
    from mpkit.timeline.volume import CommVolume

__all__ = ["advice_parts", "advice_table", "run_list_text", "run_list_view", "volume_html", "volume_text"]

# ---- what a rank sends

VOLUME = ["axis", "kind", "calls", "payload", "sent", "by the formula", "", "ratio"]
VOLUME_WORDS = (0, 1, 6)
"""The columns that hold words."""


def _volume_rows(volume: CommVolume, *, words: bool = False) -> list[list[str]]:
    """Return the heads and a row per axis and kind; with `words`, each formula says what it describes."""
    return [
        VOLUME,
        *(
            [
                row.axis,
                row.kind.replace("_", "-"),
                f"{row.calls:g}" if row.calls == round(row.calls) else f"{row.calls:.1f}",
                bytes_text(row.payload),
                bytes_text(row.wire),
                bytes_text(row.expected) if row.expected is not None else "",
                f"{row.symbols}: {row.words}" if words and row.words else row.symbols,
                f"{row.ratio:.3f}" if row.ratio is not None else "",
            ]
            for row in volume.rows
        ),
    ]


def volume_text(volume: CommVolume) -> str:
    """Return the table for a terminal."""
    if not volume.rows:
        return f"{volume.of}: nothing{' that is known' if volume.unknown else ''}."
    lines = table_text(_volume_rows(volume), VOLUME_WORDS)
    return "\n".join([volume.of, "", *lines, *(["", volume.note] if volume.note else [])])


def volume_html(volume: CommVolume) -> str:
    """Return the table as HTML, with what each formula describes."""
    if not volume.rows:
        return f"<p>{escape(volume_text(volume))}</p>"
    note = f"<p>{escape(volume.note)}</p>" if volume.note else ""
    return table_html(_volume_rows(volume, words=True), VOLUME_WORDS, volume.of) + note


# ---- runs

RUNS = ["run", "name", "plan", "status", "steps", "step time", "bubble", "peak memory", "loss"]
RUN_WORDS = (0, 1, 2, 3)


def _run_rows(found: RunList) -> list[list[str]]:
    """Return the heads and a row per run, the oldest first; the column of names is there if any run has one."""
    most = max((row.memory or 0.0 for row in found), default=0.0)
    rows = [RUNS, *(_run_cells(row, most) for row in found)]
    return rows if any(row.name for row in found) else [row[:1] + row[2:] for row in rows]


def _run_cells(row: KeptRun, like: float) -> list[str]:
    figures = [
        "" if row.step_time is None else seconds(row.step_time),
        "" if row.bubble is None else percent(row.bubble),
        memory_text(row.memory, like) if row.memory else "",
        "" if row.loss is None else f"{row.loss:.4g}",
    ]
    return [str(row.number), row.name, repr(row.plan), row.status, str(row.steps), *figures]


def run_list_text(found: RunList) -> str:
    """Return a line per run, the oldest first."""
    if not len(found):
        return "No run has ended yet in this notebook."
    return "\n".join(table_text(_run_rows(found), RUN_WORDS))


def run_list_view(found: RunList) -> Any:
    """Return the same as an HTML table, which says how two runs are compared."""
    from IPython.display import HTML

    where = "a folder; mk.runs(folder)" if any(row.name for row in found) else "this notebook; mk.runs()"
    caption = f"Runs of {where}.compare(1, 2) draws two side by side, .to_dataframe() sorts them"
    return HTML(table_html(_run_rows(found), RUN_WORDS, caption))


# ---- advice

GIB = 2**30


def advice_table(advice: Advice) -> Any:
    """Lay out the best plan of each family, the simplest first: what every further part gains."""
    from IPython.display import HTML

    rows = [["parts", "step", "longer", "GiB", "plan"]]
    for family in advice.families:
        simplest = ", the simplest within 5 %" if family.plan == advice.simplest else ""
        longer = percent(family.longer) if family.longer > 0 else "the best"
        figures = seconds(family.seconds), longer, f"{family.memory / GIB:.1f}"
        rows.append([f"{family.words}{simplest}", *figures, repr(family.plan)])
    caption = f"What each further part gains, of {len(advice.found):,} plans that fit"
    return HTML(table_html(rows, (0, 4), caption))


def advice_parts(advice: Advice) -> list[Any]:
    """Return what a notebook shows of an advice, from top to bottom: nothing but the words if no plan fits."""
    from IPython.display import HTML

    words = HTML(f'<pre style="{WHOLE_WORDS}">{escape(str(advice))}</pre>')
    return [words] if advice.best is None else [words, advice_table(advice), advice.figure()]
