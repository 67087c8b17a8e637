"""Report: what `mk.doctor()` returns: findings, and for a topic of the guide the steps that lead to its cause."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mpkit.common.display import data_frame, draw
from mpkit.launch.doctor.findings.finding import CheckupFinding, Level
from mpkit.launch.doctor.findings.variables import Variable
from mpkit.launch.doctor.topics import Topic

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["CheckupReport"]


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
