"""Equations of matrices, drawn by which rank has what."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from mpkit.views.drawing.matrices import Matrices, matrices

REGION = (
    *(("X", 6, 4), "·", ("A", 4, 8, "columns"), "=", ("Y", 6, 8, "columns")),
    *("→ GeLU ·", ("B", 8, 4, "rows"), "=", ("Z", 6, 4, "sum"), "⇄", ("Z", 6, 4)),
)


def coloured(drawn: Matrices) -> dict[str, int]:
    """Squares by who has them."""
    root = ElementTree.fromstring(drawn.to_svg())
    groups = [g for g in root.iter() if g.tag.endswith("}g")]
    found = {"r0": 0, "r1": 0, "both": 0}
    for group in groups:
        for square in group:
            if square.tag.endswith("}rect"):
                found[square.get("class") or "both"] += 1
    return found


def test_each_number_is_a_square_of_who_has_it() -> None:
    assert coloured(matrices(("A", 4, 8, "columns"), title="")) == {"r0": 16, "r1": 16, "both": 0}
    assert coloured(matrices(("B", 8, 4, "rows"), title="")) == {"r0": 16, "r1": 16, "both": 0}
    assert coloured(matrices(("Z", 6, 4, "sum"), title="")) == {"r0": 24, "r1": 24, "both": 0}
    assert coloured(matrices(("X", 6, 4), title="")) == {"r0": 0, "r1": 0, "both": 24}


def test_the_upper_half_is_rank_0s() -> None:
    svg = matrices(("B", 2, 1, "rows"), title="").to_svg()
    tops = {
        rank: float(y)
        for rank, y in re.findall(r'<rect class="r([01])" x="[\d.]+" y="([\d.]+)" width="1\d\.', svg)[-2:]
    }
    assert tops["0"] < tops["1"]


def test_it_says_the_same_in_words() -> None:
    drawn = matrices(*REGION, title="Columns, then rows")
    assert str(drawn) == (
        "X [6, 4] on both ranks · A [4, 8] by columns = Y [6, 8] by columns → GeLU · B [8, 4] by rows "
        "= Z [6, 4] a sum, of one on each rank ⇄ Z [6, 4] on both ranks"
    )
    bundle = drawn._repr_mimebundle_()
    assert bundle["text/plain"] == str(drawn)
    assert bundle["text/html"].startswith('<img alt="Columns, then rows: X [6, 4] on both')
    assert "⇄" not in re.sub(r"<text.*?</text>|<desc>.*?</desc>", "", drawn.to_svg())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("A", 4, 8, "diagonals"), r"in one of the ways 'both', 'columns', 'rows', 'sum'"),
        (("A", 4, 7, "columns"), r"two ranks have halves, of 8 columns, say"),
        (("A", 3, 8, "rows"), r"two ranks have halves, of 4 rows, say"),
    ],
)
def test_what_cannot_be_drawn(given: tuple[str, int, int, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        matrices(given, title="")
