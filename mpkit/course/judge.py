"""From an answer to a verdict.

examine   run the exercise's own checks, up to the first that fails
tell      find what happened: the lesson of a hang or an error, and the mistake that shows in what the answer did
hint      choose the mistake's next hint, by how many different answers of the student's were wrong before
show      draw the answer's timeline beside the solution's; where that is the answer, only once it is found

A failure is one of these, the first that fits:

stub       nothing is written yet
slip       an error of typing, in the student's own line
mistake    one that the exercise lists, or one of those that use too much
relation   how the results are related to the right ones, whatever led to them
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpkit.course.catalogue import ExerciseEntry
from mpkit.course.framework.exercise import Case, CheckRow, Exercise, Mistake, Seen
from mpkit.course.framework.kinds import OnRanks, Questions
from mpkit.course.framework.room import PackedAnswer, Room
from mpkit.course.framework.schedules import Schedules
from mpkit.course.framework.source import run_cell
from mpkit.course.relations import Relation, find_relation
from mpkit.course.sandbox.allowance import TooBusy
from mpkit.course.signatures import find_mistake
from mpkit.course.verdict import NOT_JUDGED, Checked
from mpkit.trace import Lane

if TYPE_CHECKING:
    from mpkit.timeline.timeline import Timeline


STUB, SLIP = "not-written", "an-error"
"""What is told of programs that are no answers yet."""

UNCOUNTED = (STUB, SLIP, NOT_JUDGED)
"""What is found in programs that are no answers yet, and where nothing can be found: no hint is spent, and no try."""

RUNS = 2
"""How often an answer is run before the machine counts as too busy to judge it."""


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
    mistake, hints = ("", ()) if passed else tell(entry, last, right)
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


@functools.cache
def general_hints() -> dict[str, Any]:
    """Return what is told whatever the exercise is: "mistakes", and the "rules" that hangs break."""
    return tomllib.loads(Path(__file__).with_name("hints.toml").read_text("utf-8"))


def lesson(seen: Seen) -> list[str]:
    """Return paragraphs on what happened, and on the rule behind it; none if the ranks finished without an error.

    >>> from mpkit.course.framework.exercise import Case
    >>> lesson(Seen(Case(2), error="rank 1: ValueError: too many", where="line 3 of the cell, in f: g()"))
    ['rank 1: ValueError: too many', 'It comes from line 3 of the cell, in f: g()']
    """
    if seen.hang:
        rules = [rule for words, rule in general_hints()["rules"].items() if words in seen.hang]
        return [seen.hang, *rules[:1]]
    if seen.error:
        where = [f"It comes from {seen.where}"] if seen.where else []
        return [seen.error, *where]
    return []


SLIPS = (
    "NameError", "UnboundLocalError", "SyntaxError", "ImportError", "ModuleNotFoundError", "AttributeError",
)  # fmt: skip
"""Errors of typing, which say nothing of what the student has understood."""


def tell(entry: ExerciseEntry, row: CheckRow, right: Sequence[Case] = ()) -> tuple[str, Sequence[str]]:
    """Return the name of the mistake that shows, and its hints; else of a relation to the right results.

    Args:
        entry: the exercise.
        row: the check that failed.
        right: the cases of the checks that passed.
    """
    exercise, seen = entry.exercise, row.seen
    if seen is not None:
        if exercise.is_untouched(seen):
            return STUB, (exercise.start,)
        if _is_typing_error(seen):
            return SLIP, ()
        if mistake := _find_mistake(entry, row):
            return mistake.name, mistake.hints
        if seen.error and seen.where and not seen.mismatch:
            return SLIP, ()
        if isinstance(exercise, OnRanks):
            cases = [case for case in right if case != seen.case]
            relation = find_relation(seen, cases)
            if seen.budget:
                said = f"Counted: {seen.budget}: {row.got}, and {row.expected} is allowed."
                relation = Relation("over-budget", f"The results are right on {seen.case}. {said}")
            if relation is not None:
                return relation.name, [f"{relation.words} {hint}" for hint in exercise.otherwise]
    return "", exercise.otherwise


def _is_typing_error(seen: Seen) -> bool:
    """Return whether the student's own line ended in an error of typing."""
    kind = re.search(r"(?:rank \d+: )?(\w+): ", seen.error)
    return bool(seen.where) and kind is not None and kind[1] in SLIPS and "NoneType" not in seen.error


def _find_mistake(entry: ExerciseEntry, row: CheckRow) -> Mistake | None:
    """Return the mistake that shows: an endless loop, one of the exercise's, or one of those that use too much."""
    exercise, seen = entry.exercise, row.seen
    assert seen is not None
    if seen.hang and "waits in" not in seen.hang and "not waiting; it has" in seen.hang:
        return Mistake(**general_hints()["mistakes"]["loop"])
    if isinstance(exercise, Questions):
        for mistake in exercise.mistakes:
            wrong = run_cell(mistake.wrong, exercise.name_of_answer, mistake.name, entry.given_code)
            if exercise.shares_error(seen, wrong):
                return mistake
        return None
    name = find_mistake(entry.signatures, row)
    found = next((mistake for mistake in exercise.mistakes if mistake.name == name), None)
    general = general_hints()["mistakes"].get(seen.budget)
    return found or (Mistake(**general) if general is not None else None)
