"""A breakdown as a table: seconds and shares of idle time, computation and the rest, by rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpkit.common.units import percent, seconds

if TYPE_CHECKING:
    from mpkit.timeline.breakdown import Breakdown

__all__ = ["breakdown_html", "breakdown_text"]

HEADS = ("rank", "total", "compute", "other", "idle", "overlap")


def _rows(found: Breakdown) -> list[tuple[str, ...]]:
    rows = []
    for rank, total in enumerate(found.total.tolist()):
        parts = (float(part[rank]) for part in (found.compute, found.other, found.idle))
        shares = (f"{seconds(part)} ({percent(part / total if total else 0.0)})" for part in parts)
        rows.append(
            (
                found.numbers[rank] if found.numbers else str(rank),
                seconds(total),
                *shares,
                percent(float(found.overlap[rank])),
            )
        )
    return rows


def breakdown_text(found: Breakdown) -> str:
    """Return a line per rank."""
    rows = [HEADS, *_rows(found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADS))]
    return "\n".join(
        "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows
    )


def breakdown_html(found: Breakdown) -> str:
    """Return the same as an HTML table."""
    head = "".join(f"<th scope='col'>{name}</th>" for name in HEADS)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in _rows(found))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
