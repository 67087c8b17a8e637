"""Finding: what was found, the evidence, what it costs, and the command that fixes it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["CheckupFinding", "Level", "plural"]


class Level(StrEnum):
    """How a finding matters: only those that cost make `mpkit doctor` exit with 1."""

    COSTS = "costs"
    NOTE = "note"
    FINE = "fine"
    UNCHECKED = "not checked"


@dataclass(frozen=True)
class CheckupFinding:
    """One finding.

    Attributes:
        subject: what it is about, such as "GPUs" or "links".
        level: whether it costs something.
        what: the finding, a sentence.
        evidence: where it was seen: the command, and what it said.
        costs: what it costs; "" where nothing.
        fix: the command that fixes it, or what else would; "" where there is nothing to fix.
        topics: the guide's common issues that it belongs to, by their names in `topics`.
    """

    subject: str
    level: Level
    what: str
    evidence: str
    costs: str = ""
    fix: str = ""
    topics: tuple[str, ...] = ()


def plural(number: int, word: str) -> str:
    """Return a number with its word.

    >>> plural(1, "GPU"), plural(2, "GPU")
    ('1 GPU', '2 GPUs')
    """
    return f"{number} {word}{'s' * (number != 1)}"
