"""Results that are tables and no more: what a rank sends, the best plan of each family."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpkit.common.safe_text import escape
from mpkit.common.table import table_html, table_text
from mpkit.common.units import bytes_text, percent, seconds
from mpkit.views.theme import WHOLE_WORDS

if TYPE_CHECKING:
    from mpkit.prediction.advice.advice import Advice
    from mpkit.timeline.traffic import CommVolume


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
