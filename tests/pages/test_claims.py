"""What tutorials say of their figures holds for the outputs that are stored there; a claim that is wrong is found."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.pages.claims import claims_in, refuted

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
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


PLANTED = {  # text, phrase, what holds, output
    "another number in the text": (
        "It takes 3 steps and 0.5 s.",
        "takes 3 steps",
        'a == above.number(r"(\\d+) steps")',
        "4 steps in 0.5 s",
    ),
    "another number in the output": (
        "It takes three steps.",
        "takes three steps",
        'a == above.number(r"(\\d+) steps")',
        "2 steps",
    ),
    "the relation is the other way round": (
        "ZeRO is faster than DDP.",
        "faster",
        'above.row("ZeRO")[0] < above.row("DDP")[0]',
        "DDP   1.5 s\nZeRO  1.7 s",
    ),
    "a row that the output has not": (
        "ZeRO is faster than DDP.",
        "faster",
        'above.row("ZeRO")[0] < above.row("DDP")[0]',
        "DDP   1.5 s",
    ),
    "against the exact clock": (
        "The bubble is a quarter.",
        "is a quarter",
        "mk.simulate(mk.Plan.gpipe(4, 8)).bubble == near(a)",
        "",
    ),
}


def notebook(text: str, claim: dict[str, str], output: str) -> list[Any]:
    code = nbformat.v4.new_code_cell("print()", outputs=[nbformat.v4.new_output("stream", text=output)])
    return [code, nbformat.v4.new_markdown_cell(text, metadata={"mpkit": {"claims": [claim]}})]


@pytest.mark.parametrize(("text", "phrase", "holds", "output"), PLANTED.values(), ids=PLANTED)
def test_a_wrong_claim_is_found(text: str, phrase: str, holds: str, output: str) -> None:
    assert len(refuted(notebook(text, {"phrase": phrase, "holds": holds}, output))) == 1


def test_a_true_claim_holds() -> None:
    text, phrase, holds, _ = PLANTED["another number in the text"]
    assert refuted(notebook(text, {"phrase": phrase, "holds": holds}, "3 steps in 0.5 s")) == []


@pytest.mark.parametrize(
    ("claim", "why"),
    [
        ({"phrase": "two steps", "holds": "True"}, "not in the text"),
        ({"phrase": "3 steps"}, "is not a phrase and what holds"),
    ],
)
def test_what_is_meant_as_a_claim_and_is_none_is_an_error(claim: dict[str, str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        refuted(notebook("It takes 3 steps.", claim, "3 steps"))


def test_figures_of_tutorials_that_are_changed_are_found() -> None:
    """Five claims of real tutorials, each with its phrase's number or its output changed."""
    for name, cell, before, after in CHANGED:
        cells = copy.deepcopy(cells_of(name))
        (place,) = [each for each in cells if each.get("id") == cell]
        if place.cell_type == "markdown":
            place.source = place.source.replace(before, after)
            for claim in place.metadata.mpkit.claims:
                claim.phrase = claim.phrase.replace(before, after)
        else:
            for output in place.outputs:
                for holder in (output, output.get("data", {})):
                    for key in ("text", "text/plain"):
                        if key in holder:
                            holder[key] = holder[key].replace(before, after)
        assert refuted(cells), (name, cell, after)


CHANGED = [
    ("06-real-models", "gpt2", "eight here", "nine here"),
    ("05-schedules", "zb-read", "3 forwards' time and not 9", "4 forwards' time and not 9"),
    ("05-schedules", "interleaved", "from 9 forwards' time to 4.5", "from 9 forwards' time to 3.5"),
    ("05-schedules", "peaks", "1f1b [4, 3, 2, 1]", "1f1b [8, 3, 2, 1]"),
    ("08-three-dimensions", "across-runs", "4.83", "1.00"),
]  # fmt: skip
