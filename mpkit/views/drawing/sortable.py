"""SortableTable: a table in a notebook that its reader sorts by any column; plain HTML where no widget runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpkit.common.missing_packages import needs_notebook
from mpkit.common.safe_text import escape
from mpkit.views.browser import sortable

try:
    import anywidget
    import traitlets
except ImportError as error:
    raise needs_notebook("a sortable table", error) from error

__all__ = ["Cell", "Column", "SortableTable"]

Cell = tuple[str, float | str | None]
"""What is shown, and the value by which it is sorted; None comes last."""


@dataclass(frozen=True)
class Column:
    """A column.

    Attributes:
        name: its head.
        title: what it shows, with its unit.
        number: whether its cells are numbers, which are aligned to the right.
    """

    name: str
    title: str
    number: bool = True


class SortableTable(anywidget.AnyWidget):
    """A table whose heads are buttons that sort it.

    Args:
        caption: a line above it.
        columns: the columns.
        rows: the cells of each row, in the order in which they are shown first.

    >>> table = SortableTable("Steps", [Column("step", "number of the step")], [[("2", 2)], [("10", 10)]])
    >>> table
    Steps
    step
    2
    10
    """

    _esm, _css = sortable()
    caption = traitlets.Unicode().tag(sync=True)
    columns = traitlets.List(traitlets.Dict()).tag(sync=True)
    rows: Any = traitlets.List().tag(sync=True)

    def __init__(self, caption: str, columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> None:
        heads = [{"name": each.name, "title": each.title, "number": each.number} for each in columns]
        super().__init__(caption=caption, columns=heads, rows=[[list(cell) for cell in row] for row in rows])

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        bundle = super()._repr_mimebundle_(**kwargs)
        data = bundle[0] if isinstance(bundle, tuple) else bundle
        if data is not None:
            data["text/html"] = self.to_html()
        return bundle

    def __repr__(self) -> str:
        """Return the table as text, in its first order."""
        lines = [[each["name"] for each in self.columns], *([text for text, _ in row] for row in self.rows)]
        return "\n".join([self.caption, *map("  ".join, lines)])

    def to_html(self) -> str:
        """Return the table as plain HTML, in its first order."""
        heads = "".join(
            f'<th scope="col" title="{escape(each["title"], quote=True)}">{escape(each["name"])}</th>'
            for each in self.columns
        )
        rows = "".join(
            "<tr>" + "".join(f"<td>{escape(text)}</td>" for text, _ in row) + "</tr>" for row in self.rows
        )
        return (
            f"<table><caption>{escape(self.caption)}</caption><thead><tr>{heads}</tr></thead>"
            f"<tbody>{rows}</tbody></table>"
        )
