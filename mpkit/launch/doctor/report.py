"""What `mk.doctor()` returns: findings with evidence, what they cost and what fixes them; for a topic its steps."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from mpkit.common.display import data_frame, draw
from mpkit.launch.doctor.topics import Topic

if TYPE_CHECKING:
    import pandas as pd

    from mpkit.launch.doctor.variables import Variable

__all__ = ["CheckupFinding", "CheckupReport", "Level", "plural"]


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
        evidence: where it was seen: who was asked, and what the answer was.
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


@dataclass(frozen=True)
class CheckupReport:
    """What the doctor found. It prints as text, and shows itself as a table in a notebook.

    Attributes:
        findings: in the order of the machine: GPUs, links, host, variables, measurements.
        topic: the common issue that was asked for; None: everything.
        variables: the table of variables, where it was asked for.
        composed: where the evidence is from if not from this machine.
        seconds: how long it took.
    """

    findings: tuple[CheckupFinding, ...]
    topic: Topic | None = None
    variables: tuple[Variable, ...] = ()
    composed: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether nothing was found that costs."""
        return not self.of(Level.COSTS)

    def of(self, level: Level | str) -> list[CheckupFinding]:
        """Return the findings of one level: "costs", "note", "fine" or "not checked".

        Raises:
            ValueError: there is no such level.
        """
        try:
            wanted = Level(level)
        except ValueError:
            raise ValueError(
                f"of({level!r}): the levels are {', '.join(repr(str(each)) for each in Level)}"
            ) from None
        return [finding for finding in self.findings if finding.level is wanted]

    def to_dataframe(self) -> pd.DataFrame:
        """Return one row per finding.

        Raises:
            ImportError: pandas is not installed.
        """
        columns = ["subject", "level", "what", "evidence", "costs", "fix"]
        return data_frame(
            ([str(getattr(each, column)) for column in columns] for each in self.findings), columns
        )

    def to_json(self) -> str:
        """Return the report as JSON: {"ok", "findings": [...]}, and of a topic "topic" and "steps"."""
        held: dict[str, Any] = {"ok": self.ok, "findings": [asdict(finding) for finding in self.findings]}
        if self.topic is not None:
            held |= {
                "topic": self.topic.name,
                "means": self.topic.means,
                "steps": [list(s) for s in self.topic.steps],
            }
        if self.variables:
            held["variables"] = [asdict(variable) for variable in self.variables]
        if self.composed:
            held["composed"] = self.composed
        return json.dumps(held, indent=2)

    def __str__(self) -> str:
        return str(draw(self, "text"))

    __repr__ = __str__

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {"text/html": draw(self, "html"), "text/plain": str(self)}
