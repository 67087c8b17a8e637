"""Claims: what a tutorial's text says of the figures around it, with an expression that must hold.

The metadata of a Markdown cell have its claims, so that no reader sees them:

    The idle time shrinks by the number of stages per rank, from 9 forwards' time to 4.5.

    "mpkit": {"claims": [{
        "phrase": "from 9 forwards' time to 4.5",
        "holds": "below.row('1f1b')[1] * below.row('1f1b')[3] == near(a)"
    }]}

    the phrase    stands in the cell as it is here; a, b, c, ... are its numbers, in figures or in words
    above, below  the nearest code cell with an output: `.text`, `.source`, `.numbers(pattern)`, `.row(label)`
    cell(id)      any code cell
    near(x, of)   equal to x within a share, 1 % if none is said
    mk            mpkit: what its exact clock says
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from string import ascii_lowercase
from typing import Any

__all__ = ["Claim", "Near", "Outputs", "claims_in", "refuted"]

NUMBER = r"(?<![\w.])-?\d+(?:,\d{3})*(?:\.\d+)?(?!\w)"
WORDS = {
    "half": 0.5, "a third": 1 / 3, "a quarter": 0.25, "one": 1, "two": 2, "twice": 2, "three": 3, "four": 4, "five": 5,
    "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10, "twelve": 12, "sixteen": 16, "thirty-two": 32,
}  # fmt: skip
IN_WORDS = re.compile(rf"{NUMBER}|\b(?:{'|'.join(sorted(WORDS, key=len, reverse=True))})\b", re.I)


@dataclass(frozen=True)
class Claim:
    """A claim.

    Attributes:
        cell: the place of its cell in the notebook.
        phrase: the words that it is about.
        expression: what must hold.
    """

    cell: int
    phrase: str
    expression: str

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers of the phrase, as a, b, c and so on."""
        found = IN_WORDS.findall(self.phrase)
        return dict(zip(ascii_lowercase, map(_value, found), strict=False))


def _value(word: str) -> float:
    return WORDS[word.lower()] if word.lower() in WORDS else float(word.replace(",", ""))


@dataclass(frozen=True)
class Outputs:
    """A code cell, with what it has printed.

    Attributes:
        source: its code.
        text: its outputs as plain text.
    """

    source: str
    text: str

    def numbers(self, pattern: str = f"({NUMBER})") -> list[float]:
        """Return the numbers that the pattern's group finds in the outputs."""
        return [float(each.replace(",", "")) for each in re.findall(pattern, self.text)]

    def number(self, pattern: str) -> float:
        """Return the first of them."""
        return self.numbers(pattern)[0]

    def row(self, *labels: str) -> list[float]:
        """Return the numbers after the last label in the first line that has these labels, in this order."""
        for line in self.text.splitlines():
            rest: str | None = line
            for label in labels:
                found = re.search(rf"(?<![\w.]){re.escape(label)}(?![\w.])", rest or "")
                rest = rest[found.end() :] if found and rest is not None else None
            if rest is not None:
                return [float(each.replace(",", "")) for each in re.findall(NUMBER, rest)]
        raise LookupError(f"no line has {', '.join(labels)}")

    def rows(self, pattern: str) -> list[list[float]]:
        """Return the numbers of each line that the pattern is found in."""
        lines = [line for line in self.text.splitlines() if re.search(pattern, line)]
        return [[float(each.replace(",", "")) for each in re.findall(NUMBER, line)] for line in lines]


class Near:
    """A number that others are equal to within a share.

    >>> 9.003 == Near(9), 9.2 == Near(9), 9.2 == Near(9, of=0.05)
    (True, False, True)
    """

    def __init__(self, number: float, of: float = 0.01) -> None:
        self.number, self.of = number, of

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int | float) and math.isclose(other, self.number, rel_tol=self.of)

    __hash__ = None  # type: ignore[assignment]


def claims_in(cells: list[Any]) -> Iterator[Claim]:
    """Yield the claims of a notebook.

    Raises:
        ValueError: A claim lacks its phrase or its expression, or its phrase is not in its cell.
    """
    for place, cell in enumerate(cells):
        text = " ".join(cell.source.split())
        for claim in cell.metadata.get("mpkit", {}).get("claims", ()):
            if sorted(claim) != ["holds", "phrase"]:
                raise ValueError(f"cell {place}: {dict(claim)} is not a phrase and what holds")
            if cell.cell_type != "markdown" or claim["phrase"] not in text:
                raise ValueError(f"cell {place}: the claim's phrase {claim['phrase']!r} is not in the text")
            yield Claim(place, claim["phrase"], claim["holds"])


def refuted(cells: list[Any]) -> list[str]:
    """Return the claims of a notebook that do not hold, each with the reason."""
    import mpkit as mk

    wrong = []
    for claim in claims_in(cells):
        names = {
            **claim.numbers,
            "above": _nearest(cells, range(claim.cell - 1, -1, -1)),
            "below": _nearest(cells, range(claim.cell + 1, len(cells))),
            "cell": lambda name: next(_outputs(cell) for cell in cells if cell.get("id") == name),
            "near": Near,
            "mk": mk,
        }
        try:
            holds, why = bool(eval(claim.expression, {**names})), "it does not hold"
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            NameError,
            SyntaxError,
            TypeError,
            ValueError,
        ) as error:
            holds, why = False, f"{type(error).__name__}: {error}"
        if not holds:
            wrong.append(f"cell {claim.cell}, {claim.phrase!r}: {claim.expression}: {why}")
    return wrong


def _nearest(cells: list[Any], places: range) -> Outputs | None:
    """Return the first of these cells that is code with an output in words."""
    found = (_outputs(cells[place]) for place in places if cells[place].cell_type == "code")
    return next((each for each in found if each.text), None)


def _outputs(cell: Any) -> Outputs:
    texts = [out.get("text") or out.get("data", {}).get("text/plain", "") for out in cell.outputs]
    return Outputs(cell.source, "\n".join(texts))
