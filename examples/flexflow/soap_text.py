"""SOAP for a terminal: the layer's matrices, a character per number, by which rank has it."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

from mpkit.common.units import bytes_text

if TYPE_CHECKING:
    from examples.flexflow.soap_found import Soap, Way
    from examples.flexflow.soap_operator import Box


MOST_ROWS, MOST_COLUMNS = 8, 16
"""The most rows and columns of characters with which a matrix is drawn."""


def soap_text(soap: Soap) -> str:
    """Draw the picture in characters: 0 and 1 are the ranks that have a number, # is both.

    Args:
        found: what to draw.
    """
    lines = [f"{soap.layer} on two ranks; 0: on rank 0, 1: on rank 1, #: on both"]
    for way in soap.ways:
        lines += ["", f"{way.name[0]}  {way.title} ({way.known_as})", f"   {way.told}", *_matrices(soap, way)]
        for phase in ("forward", "backward"):
            sent = [
                f"{each.kind} {each.what}, {bytes_text(each.payload)}"
                for each in way.sent
                if each.phase == phase
            ]
            lines.append(f"   {phase:8}  {'; '.join(sent) or 'nothing is sent'}")
        lines.append(
            f"   largest difference from the whole layer: output {way.difference:.0e}, "
            f"gradients {way.gradient_difference:.0e}"
        )
    return "\n".join(lines)


def _matrices(soap: Soap, way: Way) -> list[str]:
    blocks = []
    for name in soap.shapes:
        if name in way.held:
            rows = _rows(soap.shapes[name], way.held[name])
            width = max(len(rows[0]), len(name))
            blocks.append([row.ljust(width) for row in (name, *rows)])
    widths = [len(block[0]) for block in blocks]
    return [
        ("   " + "  ".join(part or " " * width for part, width in zip(line, widths, strict=True))).rstrip()
        for line in zip_longest(*blocks)
    ]


def _rows(shape: tuple[int, ...], held: list[Box | None]) -> list[str]:
    """Draw the samples' positions, one after the other, as rows."""
    samples, length, columns = (1,) * (3 - len(shape)) + shape
    rows = samples * length
    places = [
        [(row // length, row % length, column) for column in _some(columns, MOST_COLUMNS)]
        for row in _some(rows, MOST_ROWS)
    ]
    return ["".join(_holder(held, place) for place in line) for line in places]


def _some(size: int, most: int) -> list[int]:
    """Return all places or, if there are many, some of them, evenly spaced."""
    shown = min(size, most)
    return [(2 * i + 1) * size // (2 * shown) for i in range(shown)]


def _holder(held: list[Box | None], place: tuple[int, ...]) -> str:
    has = [
        rank
        for rank, box in enumerate(held)
        if box is not None
        and all(start <= at < end for (start, end), at in zip(box, place[-len(box) :], strict=True))
    ]
    return "#" if len(has) > 1 else str(has[0]) if has else "."
