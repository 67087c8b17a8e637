"""What tutorials say of their figures holds for the outputs that are stored there; a claim that is wrong is found."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.claims import claims_in, refuted

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
NAMES = [path.stem for path in sorted(NOTEBOOKS.glob("*.ipynb"))]


def cells_of(name: str) -> list[Any]:
    return list(nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4).cells)


@pytest.mark.parametrize("name", NAMES)
def test_claims_hold_for_what_is_stored(name: str) -> None:
    assert refuted(cells_of(name)) == []


def test_tutorials_make_claims() -> None:
    counts = {name: len(list(claims_in(cells_of(name)))) for name in NAMES}
    assert sum(counts.values()) >= 25, counts
    assert sum(map(bool, counts.values())) >= 8, counts


PLANTED = {
    "another number in the text": (
        "It takes 3 steps and 0.5 s.",
        '<!-- claim "takes 3 steps": a == above.number(r"(\\d+) steps") -->',
        "4 steps in 0.5 s",
    ),
    "another number in the output": (
        "It takes three steps.",
        '<!-- claim "takes three steps": a == above.number(r"(\\d+) steps") -->',
        "2 steps",
    ),
    "the relation is the other way round": (
        "ZeRO is faster than DDP.",
        '<!-- claim "faster": above.row("ZeRO")[0] < above.row("DDP")[0] -->',
        "DDP   1.5 s\nZeRO  1.7 s",
    ),
    "a row that the output has not": (
        "ZeRO is faster than DDP.",
        '<!-- claim "faster": above.row("ZeRO")[0] < above.row("DDP")[0] -->',
        "DDP   1.5 s",
    ),
    "against the exact clock": (
        "The bubble is a quarter.",
        '<!-- claim "is a quarter": mk.simulate(mk.Plan.gpipe(4, 8)).bubble == near(a) -->',
        "",
    ),
}


def notebook(text: str, claim: str, output: str) -> list[Any]:
    code = nbformat.v4.new_code_cell("print()", outputs=[nbformat.v4.new_output("stream", text=output)])
    return [code, nbformat.v4.new_markdown_cell(f"{text}\n{claim}")]


@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED)
def test_a_wrong_claim_is_found(planted: tuple[str, str, str]) -> None:
    assert len(refuted(notebook(*planted))) == 1


def test_a_true_claim_holds() -> None:
    text, claim, _ = PLANTED["another number in the text"]
    assert refuted(notebook(text, claim, "3 steps in 0.5 s")) == []


@pytest.mark.parametrize(
    ("claim", "why"),
    [
        ('<!-- claim "two steps": True -->', "not in the text"),
        ("<!-- claim 3 steps: True -->", "is not <!-- claim"),
        ('<!-- claim "3 steps": True', "is not <!-- claim"),
    ],
)
def test_a_comment_that_is_no_claim_is_an_error(claim: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        refuted(notebook("It takes 3 steps.", claim, "3 steps"))


def test_figures_of_tutorials_that_are_changed_are_found() -> None:
    """Five claims of real tutorials, each with its phrase's number or its output changed."""
    for name, cell, before, after in CHANGED:
        cells = copy.deepcopy(cells_of(name))
        (place,) = [each for each in cells if each.get("id") == cell]
        if place.cell_type == "markdown":
            assert place.source.count(before) == 2, "in the text and in the tag"
            place.source = place.source.replace(before, after)
        else:
            for output in place.outputs:
                for holder in (output, output.get("data", {})):
                    for key in ("text", "text/plain"):
                        if key in holder:
                            holder[key] = holder[key].replace(before, after)
        assert refuted(cells), (name, cell, after)


CHANGED = [
    ("05-real-models", "gpt2", "eight here", "nine here"),
    ("04-schedules", "zb-read", "3 forwards' time and not 9", "4 forwards' time and not 9"),
    ("04-schedules", "interleaved", "from 9 forwards' time to 4.5", "from 9 forwards' time to 3.5"),
    ("04-schedules", "peaks", "1f1b [4, 3, 2, 1]", "1f1b [8, 3, 2, 1]"),
    ("01-pipeline-bubbles", "held-in-simulation", "   8  16", "   8   8"),
]  # fmt: skip
