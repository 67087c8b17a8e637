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

import re
from dataclasses import dataclass
from string import ascii_lowercase
from typing import Any

import pytest

import mpkit as mk

NUMBER = r"(?<![\w.])-?\d+(?:,\d{3})*(?:\.\d+)?(?!\w)"
WORDS = {
    "half": 0.5, "a third": 1 / 3, "a quarter": 0.25, "one": 1, "two": 2, "twice": 2, "three": 3, "four": 4, "five": 5,
    "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10, "twelve": 12, "sixteen": 16, "thirty-two": 32,
}  # fmt: skip
IN_WORDS = re.compile(rf"{NUMBER}|\b(?:{'|'.join(sorted(WORDS, key=len, reverse=True))})\b", re.I)


def numbers_in(text: str, pattern: str = f"({NUMBER})") -> list[float]:
    """Return the numbers that the pattern's group finds in a text."""
    return [float(each.replace(",", "")) for each in re.findall(pattern, text)]


def numbers_of(phrase: str) -> dict[str, float]:
    """Return the numbers of a phrase, in figures or in words, as a, b, c and so on."""
    found = (WORDS.get(word.lower()) or float(word.replace(",", "")) for word in IN_WORDS.findall(phrase))
    return dict(zip(ascii_lowercase, found, strict=False))


@dataclass(frozen=True)
class Outputs:
    """A code cell, with what it has printed.

    Attributes:
        source: its code.
        text: its outputs as plain text.
    """

    source: str
    text: str

    @classmethod
    def of(cls, cell: Any) -> "Outputs":
        """Return a cell with its outputs in words."""
        texts = [out.get("text") or out.get("data", {}).get("text/plain", "") for out in cell.outputs]
        return cls(cell.source, "\n".join(texts))

    def numbers(self, pattern: str = f"({NUMBER})") -> list[float]:
        """Return the numbers that the pattern's group finds in the outputs."""
        return numbers_in(self.text, pattern)

    def number(self, pattern: str) -> float:
        """Return the first of them."""
        return self.numbers(pattern)[0]

    def row(self, *labels: str) -> list[float]:
        """Return the numbers after the last label in the first line that has these labels, in this order."""
        words = (rf"(?<![\w.]){re.escape(label)}(?![\w.])" for label in labels)
        found = re.search(rf"^.*?{'.*?'.join(words)}(.*)$", self.text, re.M)
        if found is None:
            raise LookupError(f"no line has {', '.join(labels)}")
        return numbers_in(found[1])

    def rows(self, pattern: str) -> list[list[float]]:
        """Return the numbers of each line that the pattern is found in."""
        return [numbers_in(line) for line in self.text.splitlines() if re.search(pattern, line)]


def refuted(cells: list[Any]) -> list[str]:
    """Return the claims of a notebook that do not hold, each with the reason."""
    wrong = []
    for place, cell in enumerate(cells):
        for claim in cell.metadata.get("mpkit", {}).get("claims", ()):
            phrase, expression = claim["phrase"], claim["holds"]
            names = {
                **numbers_of(phrase),
                "above": _nearest(cells[:place][::-1]),
                "below": _nearest(cells[place + 1 :]),
                "cell": lambda name: next(Outputs.of(cell) for cell in cells if cell.get("id") == name),
                "near": lambda number, of=0.01: pytest.approx(number, rel=of),
                "mk": mk,
            }
            try:
                holds = phrase in " ".join(cell.source.split()) and eval(expression, names)
                why = "it does not hold, or the phrase is not in the text"
            except (ArithmeticError, LookupError, NameError, SyntaxError, TypeError, ValueError) as error:
                holds, why = False, f"{type(error).__name__}: {error}"
            if not holds:
                wrong.append(f"cell {place}, {phrase!r}: {expression}: {why}")
    return wrong


def _nearest(cells: list[Any]) -> Outputs:
    """Return the first of these cells that is code with an output in words."""
    found = (Outputs.of(cell) for cell in cells if cell.cell_type == "code")
    return next((each for each in found if each.text), Outputs("", ""))
