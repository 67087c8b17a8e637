"""A table of words, as lines of text for a terminal and as HTML for a notebook: words to the left, numbers right."""

from collections.abc import Collection, Sequence

from mpkit.common.safe_text import escape

Rows = Sequence[Sequence[str]]

LONG = 60
"""Letters from which on words in a cell wrap."""


def table_text(rows: Rows, left: Collection[int] = (0,)) -> list[str]:
    """Return a line per row, its columns aligned; `left` are the numbers of the columns of words.

    >>> print(*table_text([["plan", "step"], ["DDP", "1.20 s"]]), end=" |")
    plan    step DDP   1.20 s |
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if at in left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def table_html(rows: Rows, left: Collection[int] = (0,), caption: str = "") -> str:
    """Return the same as an HTML table, the first row its heads; a narrow column scrolls it.

    >>> table_html([["plan"], ["<b>"]]).count("&lt;b&gt;")
    1
    """

    def line(tag: str, row: Sequence[str]) -> str:
        cells = (
            f'<{tag} style="text-align:{"left" if at in left else "right"};vertical-align:top;white-space:'
            f'{"normal;min-width:16em" if at in left and len(cell) > LONG else "nowrap"}">{escape(cell)}</{tag}>'
            for at, cell in enumerate(row)
        )
        return f"<tr>{''.join(cells)}</tr>"

    said = f"<caption style='text-align:left;caption-side:top'>{escape(caption)}</caption>" if caption else ""
    return (
        f'<div style="overflow-x:auto;font-variant-numeric:tabular-nums"><table>{said}'
        f"<thead>{line('th', rows[0])}</thead>"
        f"<tbody>{''.join(line('td', row) for row in rows[1:])}</tbody></table></div>"
    )
