"""Diagnosis: what `timeline.diagnose()` returns: findings, each a reason why a step takes as long as it does."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from mpkit.common.display import DrawnResult, draw, write_text
from mpkit.plan.mesh import mesh_of
from mpkit.timeline.dependencies.critical_path import CriticalPath
from mpkit.timeline.idleness import CAUSES, SCHEDULED, causes_of

WAITED_FOR = ("imbalance", "dependency", "other")
"""What a straggler adds to: others wait for its result, and if its host is late, itself for no known reason."""

LARGE = 0.05
"""The share of a step above which a cause of idle time must be explained, or is printed as not explained."""


@dataclass(frozen=True)
class Finding:
    """One reason why a step takes as long as it does.

    Attributes:
        kind: what it is, such as "straggler" or "slow link"; `mpkit.timeline.diagnosis.rules.RULES` has all kinds.
        words: the finding, a sentence with its numbers.
        reason: why that costs time.
        remedy: what to try.
        gain: seconds by which the step would be shorter without it.
        by: how that is known: "replay" of the step's own operations, or "simulation" of another schedule; "" where no
            time is at stake.
        step: the number of the step; -1 if the timeline has no steps.
        ranks: the ranks where it is seen, counted from 0; `words` has the numbers that an imported program gives them.
        ops: the rows of its spans in `timeline.step(step).spans`.
        check: a call on `timeline` that returns the numbers of the sentence.
        urgent: whether it is about to end the run; then it goes before all that only cost time.
        idle: the cause of idle time that it adds to (`mpkit.timeline.idleness.CAUSES`); "" where ranks work too long.
    """

    kind: str
    words: str
    reason: str
    remedy: str
    gain: float
    by: str
    step: int
    ranks: tuple[int, ...]
    ops: tuple[int, ...] = field(default=(), repr=False)
    check: str = ""
    urgent: bool = False
    idle: str = ""


@dataclass(frozen=True)
class Diagnosis(DrawnResult):
    """Why a step takes as long as it does. It prints as text, and shows itself as a panel in a notebook.

    Attributes:
        path: the critical path of the step that was diagnosed, with its timeline; `path.waiting` says who waits for
            whom.
        findings: what is about to end the run first, then by what they cost.
        why: why this step.
    """

    path: CriticalPath
    findings: tuple[Finding, ...]
    why: str = ""

    @cached_property
    def idle(self) -> dict[str, float]:
        """Seconds per rank, averaged, of idle time by cause (`mpkit.timeline.idleness.CAUSES`)."""
        mean = causes_of(self.path.graph, self.path.timeline.spans).mean(axis=0).tolist()
        return dict(zip(CAUSES, mean, strict=True))

    @property
    def not_explained(self) -> tuple[str, ...]:
        """The causes of more than 5 % of the step of which findings explain less than half.

        What a pipeline's schedule leaves idle is the schedule's own, which no finding need explain.
        """
        gains = dict.fromkeys(CAUSES, 0.0)
        for finding in self.findings:
            for cause in WAITED_FOR if finding.kind == "straggler" else (finding.idle,):
                gains[cause] = gains.get(cause, 0.0) + finding.gain
        plan = mesh_of(self.path.timeline.meta, self.path.timeline.world_size)
        known = SCHEDULED if plan is not None and plan.pp > 1 else ()
        return tuple(
            cause for cause, seconds in self.idle.items()
            if seconds > LARGE * self.step_time and gains[cause] < seconds / 2 and cause not in known
        )  # fmt: skip

    @property
    def step(self) -> int:
        """The number of the step."""
        return self.path.step

    @property
    def step_time(self) -> float:
        """Seconds of the step."""
        return self.path.step_time

    def __len__(self) -> int:
        return len(self.findings)

    def __getitem__(self, number: int) -> Finding:
        return self.findings[number]

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def of(self, kind: str) -> list[Finding]:
        """Return the findings of one kind, such as "straggler"."""
        return [finding for finding in self.findings if finding.kind == kind]

    def to_html(self, path: str | Path | None = None) -> str:
        """Return a page with the findings, each shown in the timeline; write it to `path` as well if that is given."""
        return write_text(draw(self, "html"), path)

    def __repr__(self) -> str:
        first = f": {self.findings[0].kind} first" if self.findings else ""
        return f"<Diagnosis of step {self.step}, {len(self)} finding{'s' * (len(self) != 1)}{first}>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {"text/html": draw(self, "panel"), "text/plain": str(self)}
