"""The table of what a rank sends, as text and as HTML."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpkit.common.safe_text import escape
from mpkit.common.table import table_text
from mpkit.common.units import bytes_text
from mpkit.views.drawing.colours import ink_of
from mpkit.views.theme import STATUS

if TYPE_CHECKING:
    from mpkit.timeline.volume import CommVolume

__all__ = ["volume_html", "volume_text"]

FAINT = f"color:var(--jp-ui-font-color2,{STATUS['done']})"
HEAD = ["axis", "kind", "calls", "payload", "sent", "by the formula", "", "ratio"]
LEFT = (0, 1, 6)
"""The number of columns that hold words."""


def _cells(volume: CommVolume) -> list[list[str]]:
    return [
        [
            row.axis,
            row.kind.replace("_", "-"),
            f"{row.calls:g}" if row.calls == round(row.calls) else f"{row.calls:.1f}",
            bytes_text(row.payload),
            bytes_text(row.wire),
            bytes_text(row.expected) if row.expected is not None else "",
            row.symbols,
            f"{row.ratio:.3f}" if row.ratio is not None else "",
        ]
        for row in volume.rows
    ]


def volume_text(volume: CommVolume) -> str:
    """Return the table for a terminal."""
    rows = [HEAD, *_cells(volume)]
    if not volume.rows:
        return f"{volume.of}: nothing{' that is known' if volume.unknown else ''}."
    lines = table_text(rows, LEFT)
    return "\n".join([volume.of, "", *lines, *(["", volume.note] if volume.note else [])])


def _align(column: int) -> str:
    """Return the alignment of a column: words may wrap, numbers may not."""
    breaks = "normal" if column == 6 else "nowrap"
    return f"text-align:{'left' if column in LEFT else 'right'};white-space:{breaks}"


def volume_html(volume: CommVolume) -> str:
    """Return the table as HTML, a row per axis and kind; below each formula, what it describes in words."""
    rows = _cells(volume)
    cell = "padding:4px 14px 4px 0;border:none;vertical-align:top;background:none"

    def line(tag: str, values: list[str], look: str = "") -> str:
        look = f"{cell};font-weight:400;{look}"
        cells = [f'<{tag} style="{look};{_align(i)}">{value}</{tag}>' for i, value in enumerate(values)]
        return f"<tr>{''.join(cells)}</tr>"

    body = []
    for row, values in zip(volume.rows, rows, strict=True):
        shown = [escape(value) for value in values]
        shown[0] = (
            f'<span style="display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:7px;'
            f'background:{ink_of(row.axis)}"></span><b>{shown[0]}</b>'
        )
        if shown[6]:
            shown[6] += f'<br><span style="{FAINT}">{escape(row.words)}</span>'
        shown[7] = f"<b>{shown[7]}</b>"
        body.append(line("td", shown))
    said = volume.note if rows else "Nothing is sent."
    below = f'<p style="{FAINT}">{escape(said)}</p>' if said else ""
    return (
        f'<div style="font-variant-numeric:tabular-nums;overflow-x:auto"><b>{escape(volume.of)}</b>'
        f'<table style="border-collapse:collapse;margin:6px 0 2px">'
        f"<thead>{line('th', HEAD, FAINT) if rows else ''}</thead>"
        f"<tbody>{''.join(body)}</tbody></table>{below}</div>"
    )
