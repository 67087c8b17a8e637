"""What tutorials say of their figures holds for the outputs that are stored there; a claim that is wrong is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.pages.claims import refuted

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
NAMES = [path.stem for path in sorted(NOTEBOOKS.glob("*.ipynb"))]


def cells_of(name: str) -> list[Any]:
    return list(nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4).cells)


@pytest.mark.parametrize("name", NAMES)
def test_claims_hold_for_what_is_stored(name: str) -> None:
    assert refuted(cells_of(name)) == []


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
