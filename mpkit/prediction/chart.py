"""A chart of a table: measured columns as lines, bars or points, one series per value of another column.

A lesson that sweeps something ends with a table of its own; its chart is one call, in the look of all other views.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import isfinite
from numbers import Real
from typing import Any, Literal, get_args

from mpkit.common.display import HasChart, draw
from mpkit.common.tracebacks import public

__all__ = ["Chart", "Kind", "chart"]

Kind = Literal["lines", "bars", "points"]
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Chart(HasChart):
    """A chart: prints as a table, and shows itself in a notebook.

    Attributes:
        rows: the values, by column.
        x, y: the columns on the axes; their names, with their units, are the titles of the axes.
        by: the column that tells series apart; None: there is one series.
        label: the column that is written beside each mark; None: nothing is.
        kind: "lines", "bars" or "points".
        title: the first line.
        log: the axes that are logarithmic: "", "x", "y" or "xy".
        marks: vertical lines, by their words: values of x.
    """

    rows: tuple[Row, ...]
    x: str
    y: str
    by: str | None = None
    label: str | None = None
    kind: Kind = "lines"
    title: str = ""
    log: str = ""
    marks: Mapping[str, float] = field(default_factory=dict)

    def series(self) -> dict[str, list[Row]]:
        """Return the rows of each series, in the order of their first rows."""
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            found.setdefault("" if self.by is None else str(row[self.by]), []).append(row)
        return found

    def __str__(self) -> str:
        return str(draw(self, "text"))


@public
def chart(
    table: Any, *, x: str, y: str, by: str | None = None, label: str | None = None, kind: Kind = "lines",
    title: str = "", log: str = "", marks: Mapping[str, float] | None = None,
) -> Chart:  # fmt: skip
    """Draw a table's columns against each other.

    Args:
        table: a DataFrame, a list of rows (dicts by column), or columns by name.
        x, y: columns; y has numbers.
        by: a column: one line, or one colour of bars or points, for each of its values.
        label: a column, whose values are written beside the marks.
        kind: "lines" joins points, in the order of the rows; "bars" and "points".
        title: what the chart shows.
        log: axes that are logarithmic: "", "x", "y" or "xy".
        marks: vertical lines with their words, such as {"PCIe": 32}.

    Raises:
        ValueError: there is no such column or kind, the table is empty, or a value cannot be drawn.

    >>> rows = [{"m": 1, "bubble": 0.75}, {"m": 8, "bubble": 0.27}]
    >>> print(chart(rows, x="m", y="bubble", title="GPipe on 4 stages"))
    GPipe on 4 stages
    m  bubble
    1    0.75
    8    0.27
    """
    rows = _rows(table)
    if not rows:
        raise ValueError(
            "chart: the table has no rows; give one at least, such as [{'m': 1, 'bubble': 0.75}]"
        )
    for name, column in (("x", x), ("y", y), ("by", by), ("label", label)):
        if column is not None:
            _check_column(name, column, rows)
    if kind not in get_args(Kind):
        raise ValueError(f"kind={kind!r}: a chart has kind='lines', 'bars' or 'points'")
    if log not in ("", "x", "y", "xy"):
        raise ValueError(f"log={log!r}: the logarithmic axes are log='', 'x', 'y' or 'xy'")
    for axis, column in (("x", x), ("y", y)):
        _check_values(rows, column, numbers=axis == "y" or axis in log, positive=axis in log)
    given = {str(words): float(at) for words, at in (marks or {}).items()}
    if given and (kind == "bars" or not _is_number(rows[0][x])):
        raise ValueError(
            f"marks={marks!r}: they are values of x, so x={x!r} needs numbers, and kind is not 'bars'"
        )
    return Chart(tuple(rows), x, y, by, label, kind, title, log, given)


def _rows(table: Any) -> list[Row]:
    """Return a table's rows; an index with a name is a column too."""
    if hasattr(table, "to_dict") and hasattr(table, "reset_index"):
        named = any(name is not None for name in table.index.names)
        rows: list[Row] = (table.reset_index() if named else table).to_dict("records")
        return rows
    if isinstance(table, Mapping):
        lengths = {name: len(list(values)) for name, values in table.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(
                f"chart: the columns have different lengths, {lengths}; give each a value per row"
            )
        return [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]
    if isinstance(table, Iterable) and not isinstance(table, str):
        rows = list(table)
        if all(isinstance(row, Mapping) for row in rows):
            return rows
    raise ValueError(
        f"chart({type(table).__name__}): give a DataFrame, rows such as [{{'m': 1, 'bubble': 0.75}}], or columns such "
        "as {'m': [1, 8], 'bubble': [0.75, 0.27]}"
    )


def _check_column(name: str, column: str, rows: list[Row]) -> None:
    short = [row for row in rows if column not in row]
    if short:
        there = list(map(str, short[0]))
        near = get_close_matches(str(column), there, 1)
        meant = f"; did you mean {name}={near[0]!r}?" if near else ""
        raise ValueError(f"{name}={column!r}: the table has the columns {', '.join(there)}{meant}")


def _check_values(rows: list[Row], column: str, *, numbers: bool, positive: bool) -> None:
    for row in rows:
        value = row[column]
        if numbers and not (_is_number(value) and isfinite(value)):
            raise ValueError(
                f"chart: {column!r} is {value!r} in a row; that axis needs a finite number in each"
            )
        if positive and value <= 0:
            raise ValueError(
                f"chart: {column!r} is {value!r} in a row, which has no place on a logarithmic axis: drop that row, or "
                "leave the axis out of log"
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
