"""The strategy of each layer as a table, as text and as HTML; identical neighbours share a row."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from mpkit.common.safe_text import escape
from mpkit.common.units import bytes_text, seconds

if TYPE_CHECKING:
    from examples.flexflow.result import LayerChoice, LayerStrategies


HEAD = ["layer", "split", "compute", "inside", "gradients", "resharding", "memory"]
LEGEND = "S samples, O operators, A attribute, P parameters; inside: what a layer sends within itself"


def layers_text(found: LayerStrategies) -> str:
    """Return the table for a terminal.

    Args:
        found: what to show.
    """
    rows = [HEAD, *_cells(found)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    lines = [
        "  ".join(
            word.ljust(width) if i < 2 else word.rjust(width)
            for i, (word, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([_title(found), "", *lines, "", _one_dimension(found), LEGEND])


def layers_html(found: LayerStrategies) -> str:
    """Return the table as HTML.

    Args:
        found: what to show.
    """
    head = "".join(f"<th>{escape(word)}</th>" for word in HEAD)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(word)}</td>" for word in row) + "</tr>" for row in _cells(found)
    )
    words = "<br>".join(map(escape, (_one_dimension(found), LEGEND)))
    return f"<b>{escape(_title(found))}</b><table><tr>{head}</tr>{body}</table><small>{words}</small>"


def _title(found: LayerStrategies) -> str:
    priced = found.priced
    return (
        f"{len(priced.layers)} layers on {priced.hardware.devices} devices of {priced.hardware.name}, batch "
        f"{priced.batch}: {seconds(found.time)} per step, {bytes_text(found.memory)} per device"
    )


def _one_dimension(found: LayerStrategies) -> str:
    """Return what one dimension for all layers would take."""
    told = []
    for name, choice in found.uniform.items():
        fits = "" if choice.memory <= found.limit else ", does not fit"
        told.append(f"{name} {seconds(choice.time)} ({bytes_text(choice.memory)}{fits})")
    return f"one dimension for all layers: {'; '.join(told)}"


def _cells(found: LayerStrategies) -> list[list[str]]:
    """Return a row of words for each run of identical layers with the same split and seconds."""

    def key_of(each: LayerChoice) -> tuple[object, ...]:
        return each.layer.sizes, each.split, each.seconds["resharding"]

    rows = []
    for _, group in groupby(found.choices, key=key_of):
        run = list(group)
        first, last = run[0], run[-1]
        name = first.layer.name if len(run) == 1 else f"{first.layer.name} ... {last.layer.name} ({len(run)})"
        spent = [seconds(sum(each.seconds[part] for each in run)) for part in HEAD[2:6]]
        rows.append([name, str(first.split), *spent, bytes_text(sum(each.memory for each in run))])
    return rows
