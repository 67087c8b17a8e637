"""From an answer to a verdict.

examine   run the exercise's own checks, up to the first that fails
tell      find the mistake: the first one that shows in the results
hint      choose the mistake's next hint, by how many different answers of the student's were wrong before
show      draw the answer's timeline beside the solution's; where that is the answer, only once it is found
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mpkit.course.answer_status import answered_row
from mpkit.course.catalogue import ExerciseEntry
from mpkit.course.framework.exercise import CheckRow, Exercise
from mpkit.course.framework.observation import Seen
from mpkit.course.framework.room import PackedAnswer, Room
from mpkit.course.framework.schedules import Schedules
from mpkit.course.framework.source import run_cell
from mpkit.course.sandbox.allowance import TooBusy
from mpkit.course.tell import SLIP, STUB, lesson, tell
from mpkit.errors import MpkitError
from mpkit.trace import Lane

if TYPE_CHECKING:
    from mpkit.timeline.timeline import Timeline

__all__ = [
    "CHECKED",
    "NOT_JUDGED",
    "SLIP",
    "UNCOUNTED",
    "Checked",
    "NotSolved",
    "is_stub",
    "judge",
    "look",
    "not_judged",
]

CHECKED = "application/vnd.mpkit.checked+json"
"""The type of the part of a check's output that a notebook keeps for the class report; browsers do not show it."""

NOT_JUDGED = "not-judged"
UNCOUNTED = (STUB, SLIP, NOT_JUDGED)
"""What is found in programs that are no answers yet, and where nothing can be found: no hint is spent, and no try."""

RUNS = 2
"""How often an answer is run before the machine counts as too busy to judge it."""


class NotSolved(MpkitError):
    """An answer that was required to be right is wrong."""


@dataclass(frozen=True, repr=False)
class Checked:
    """The verdict of `mk.check`: printed as text, and shown as a table and a picture in a notebook.

    Attributes:
        name: the name of the exercise.
        title: the title of the exercise.
        rows: what was checked, up to the first check that failed.
        passed: whether all checks passed.
        mistake: the name of the mistake that shows; "" if none is known, or the answer is right.
        lesson: paragraphs on what happened on the ranks, if they hang or failed.
        hint: a hint; "" if the answer is right.
        tries: how many different answers to this exercise were checked, this one included.
        printed: what the ranks printed in the last case.
        timelines: the timelines "yours" and "target", if there is something to see.
        again: whether this very answer was checked before, and was wrong.
        exam: whether only an answer was looked for: the one row says whether there is one that runs.
    """

    name: str
    title: str
    rows: tuple[CheckRow, ...]
    passed: bool
    mistake: str = ""
    lesson: tuple[str, ...] = ()
    hint: str = ""
    tries: int = 1
    printed: tuple[str, ...] = ()
    timelines: dict[str, Timeline] | None = None
    again: bool = False
    exam: bool = False

    @property
    def not_judged(self) -> bool:
        """Whether the machine was too busy to say whether the answer is right."""
        return self.mistake == NOT_JUDGED

    @property
    def score(self) -> float | None:
        """The number by which the leaderboard ranks a right answer, in the last case; None if it is not ranked."""
        scores = [row.score for row in self.rows if row.score is not None]
        return scores[-1] if scores and self.passed else None

    @property
    def has_answer(self) -> bool:
        """Whether there is an answer that runs."""
        return self.rows[-1].ok

    def require(self) -> Checked:
        """Return this verdict if the answer is right.

        Raises:
            NotSolved: The answer is wrong, or was not judged; the message has the table and the hint.
        """
        if not self.passed:
            raise NotSolved(str(self))
        return self

    def __str__(self) -> str:
        from mpkit.course.checked_text import checked_text

        return checked_text(self)

    __repr__ = __str__

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        from mpkit.course.checked_html import checked_html

        kept = {"name": self.name, "passed": self.passed, "tries": self.tries, "mistake": self.mistake}
        return {"text/html": checked_html(self), "text/plain": str(self), CHECKED: kept}


def judge(
    entry: ExerciseEntry, answer: PackedAnswer, room: Room, failures: int = 0, *, draw: bool = True
) -> Checked:
    """Examine an answer; run it again if the machine is too busy, and say so if it still is.

    Args:
        entry: the exercise.
        answer: the packed answer.
        room: the ranks to run it on.
        failures: how many other answers of the student's were wrong before; hints get more specific.
        draw: whether to run the solution as well, and make the timelines of both.
    """
    why = ""
    for _ in range(RUNS):
        try:
            return _judge_once(entry, answer, room, failures, draw=draw)
        except TooBusy as error:
            why = str(error)
    return not_judged(entry, why, failures)


def not_judged(entry: ExerciseEntry, why: str, failures: int = 0) -> Checked:
    """Return the verdict that there is none."""
    row = CheckRow("your answer", "ranks that run", why, False)
    said = "This says nothing of your answer, and is no try. Check it again when the machine has less to do."
    return Checked(
        entry.name, entry.text.title, (row,), False, NOT_JUDGED, lesson=(said,), tries=failures + 1
    )


def _judge_once(
    entry: ExerciseEntry, answer: PackedAnswer, room: Room, failures: int, *, draw: bool
) -> Checked:
    exercise = entry.exercise
    # ---- examine
    rows = tuple(exercise.examine(answer, room))
    assert rows, f"{entry.name} checks nothing"
    last = next((row for row in rows if not row.ok), rows[-1])
    passed = last.ok
    # ---- tell
    right = [row.seen.case for row in rows if row.ok and row.seen is not None and last.seen is not None]
    mistake, hints = ("", ()) if passed else tell(entry, last, room, right)
    # ---- hint
    hint = hints[min(failures, len(hints) - 1)] if hints else ""
    # ---- show
    timelines = _timelines(exercise, last, room) if draw else None
    seen = last.seen
    return Checked(
        entry.name, entry.text.title, rows, passed, mistake,
        tuple(lesson(seen)) if seen and not passed else (), hint, failures + 1,
        tuple(seen.printed) if seen else (), timelines,
    )  # fmt: skip


def look(entry: ExerciseEntry, answer: PackedAnswer, room: Room) -> Checked:
    """Say whether there is an answer that runs, and nothing of whether it is right: a check in an exam."""
    exercise = entry.exercise
    try:
        seen = exercise.try_answer(answer, room)
    except TooBusy as error:
        return replace(not_judged(entry, str(error)), exam=True)
    stub = run_cell(entry.source.stub, exercise.name_of_answer, "stub", entry.given_code)
    untouched = exercise.is_untouched(seen) or PackedAnswer.pack(stub).print == answer.print
    row = answered_row(seen, untouched, exercise.questions_of(stub))
    lines = () if untouched or row.ok else tuple(lesson(seen))
    return Checked(
        entry.name, entry.text.title, (row,), False, lesson=lines, printed=tuple(seen.printed), exam=True
    )


def is_stub(entry: ExerciseEntry, answer: PackedAnswer) -> bool:
    """Return whether an answer is the program that the student was given to fix."""
    if not entry.source.has_instead:
        return False  # the stub raises NotImplementedError, which `is_untouched` sees
    stub = run_cell(entry.source.stub, entry.exercise.name_of_answer, "stub", entry.given_code)
    return PackedAnswer.pack(stub).print == answer.print


def _timelines(exercise: Exercise, row: CheckRow, room: Room) -> dict[str, Timeline] | None:
    """Return the timelines of the answer and the solution in the last case; None if neither communicates.

    The solution's schedule is the answer to an exercise that asks for one: it is drawn beside a right answer only.
    """
    seen = row.seen
    if seen is None or seen.trace is None:
        return None
    traces: dict[str, Seen | None] = {"yours": seen}
    if row.ok or not isinstance(exercise, Schedules):
        traces["target"] = seen.target or exercise.try_again(PackedAnswer.pack(exercise.solution), seen, room)
    shown = {
        name: one.waits if one.hang else one.timeline
        for name, one in traces.items()
        if one is not None and _drawable(one)
    }
    return shown or None


def _drawable(seen: Seen) -> bool:
    """Return whether the ranks did anything that a timeline can show."""
    if seen.schedule is not None:
        return True
    return seen.trace is not None and any((rank.ops["lane"] == Lane.COMM).any() for rank in seen.trace.ranks)
