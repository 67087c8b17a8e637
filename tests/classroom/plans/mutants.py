"""Mutants of the plan: around each exercise's reference, answers that reach its numbers in another way.

serial       every rank gathers what all are given, and does the work of all           (a, b)
one rank     rank 0 does the work of all                                               (c)
memory       nothing is freed                                                          (d)
messages     eight pieces in place of one; and everything four times                   (e)
plain torch  torch.distributed in place of `ctx.comm`: has to pass                     (f)
schedule     every other schedule that mpkit has a name for                            (g)
copies       copies are changed in place of what is given                              (h)
constant     a size is the number that it has in the first case                        (i)
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from inspect import isclass, signature
from pathlib import Path
from typing import Any

import cloudpickle

from mpkit.course.catalogue import ExerciseEntry, find
from mpkit.course.framework.exercise import CheckRow
from mpkit.course.framework.frugal import BYTES, CALLS, HELD
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.course.framework.room import PackedAnswer, Room
from mpkit.course.framework.schedules import Schedules
from mpkit.course.framework.source import run_cell
from mpkit.course.sandbox.allowance import Limits
from tests.classroom.plans import alone, changed, constants, schedules, together

__all__ = ["PLAIN", "PlanMutant", "Verdict", "judged", "plan_mutants", "recorded", "verdicts_of"]

for module in (alone, changed, constants, schedules, together):
    cloudpickle.register_pickle_by_value(module)

PLAIN = "plain torch"

UNMADE = ("cannot pickle", "'Simulated' object")
"""Errors of the tool: what is given cannot be sent to another rank, or what is returned belongs to a simulated one."""

AMOUNTS = ("memory", "messages")
"""Kinds that are another plan only if they use much more than the reference: of a tensor of one number no pieces are
made."""

LIMITS = Limits(seconds=8.0, grace=1.5)


@dataclass(frozen=True)
class PlanMutant:
    """An answer with another plan.

    Attributes:
        kind: how it was made, such as "serial".
        change: what is different, where there are several of a kind.
        answer: the answer.
    """

    kind: str
    change: str
    answer: Any


@dataclass(frozen=True)
class Verdict:
    """What the check of an exercise says of a mutant.

    Attributes:
        exercise, kind, change: which mutant it is.
        state: "passes", "refused" with right numbers, "wrong" numbers or an error, "not made", "the same" as the
            reference (nothing to copy; not so much more memory, bytes or messages that it counts) or "equivalent".
        why: the row that refuses it, or why it is a right answer.
    """

    exercise: str
    kind: str
    change: str
    state: str
    why: str = ""


@cache
def room() -> Room:
    """Return this process's ranks."""
    return Room(limits=LIMITS)


def plan_mutants(entry: ExerciseEntry, kinds: frozenset[str] = frozenset()) -> Iterator[PlanMutant]:
    """Yield the mutants of an exercise that can be made: of these kinds; of all, if none is named."""
    return (each for each in _all(entry) if not kinds or each.kind in kinds)


def _all(entry: ExerciseEntry) -> Iterator[PlanMutant]:
    exercise = entry.exercise
    if isinstance(exercise, Schedules):
        for name, answer in schedules.other_schedules(exercise):
            yield PlanMutant("schedule", name, answer)
    if isinstance(exercise, Schedules | OnRanks) and callable(exercise.solution):
        for what, code in constants.with_constants(entry, room()):
            value = run_cell(code, exercise.name_of_answer, "constant", entry.given_code)
            yield PlanMutant("constant", what, value)
    if not isinstance(exercise, OnRanks):
        return
    answer = run_cell(entry.source.plain, exercise.name_of_answer, "reference", entry.given_code)
    yield PlanMutant("memory", "nothing is freed", changed.keeping(answer))
    first = next(iter(signature(answer).parameters), "")
    if not isclass(answer):
        yield PlanMutant("copies", "changes copies", changed.on_copies(answer))
    if first != "ctx":
        return
    yield PlanMutant("messages", "in eight pieces", changed.in_pieces(answer))
    yield PlanMutant("messages", "four times", changed.repeated(answer))
    yield PlanMutant(PLAIN, "", changed.plain(answer))
    if not isclass(answer):
        yield PlanMutant("serial", "on every rank", alone.gathered(answer))
        yield PlanMutant("one rank", "on rank 0", alone.on_first(answer))


def verdicts_of(name: str, kinds: frozenset[str]) -> list[Verdict]:
    """Check all mutants of an exercise."""
    entry = find(name)
    return [judged(entry, mutant) for mutant in plan_mutants(entry, kinds)]


def judged(entry: ExerciseEntry, mutant: PlanMutant) -> Verdict:
    """Check one mutant."""
    said = Verdict(entry.name, mutant.kind, mutant.change, "passes")
    rows = list(entry.exercise.examine(PackedAnswer.pack(mutant.answer), room()))
    last = next((row for row in rows if not row.ok), rows[-1])
    if not last.ok and last.seen is not None and any(word in last.seen.error for word in UNMADE):
        return replace(said, state="not made", why=last.seen.error)
    if not last.ok:
        right = last.seen is not None and last.seen.budget
        return replace(said, state="refused" if right else "wrong", why=f"{last.what}: {last.got}"[:160])
    if mutant.kind in AMOUNTS and (amounts := _amounts(last)):
        return replace(said, state="the same", why=amounts)
    if _is_same(rows):
        return replace(said, state="the same")
    why = recorded().get(entry.name, {}).get(f"{mutant.kind}: {mutant.change}", "")
    return replace(said, state="equivalent" if why else "passes", why=why)


def _amounts(row: CheckRow) -> str:
    """Return how much an answer uses beside the reference, if it is within what any answer may; else ""."""
    seen = row.seen
    if seen is None or seen.target is None:
        return ""
    used = [(limit, limit.measure(seen), limit.measure(seen.target)) for limit in (HELD, BYTES, CALLS)]
    if any(amount > max(limit.times * reference, limit.free) for limit, amount, reference in used):
        return ""
    return ", ".join(f"{limit.what}: {amount:g} beside {reference:g}" for limit, amount, reference in used)


def _is_same(rows: list[CheckRow]) -> bool:
    """Return whether an answer on copies says that nothing was there to be changed."""
    seen = [row.seen for row in rows if row.seen is not None]
    return bool(seen) and all(any(changed.UNCHANGED in line for line in each.printed) for each in seen)


@cache
def recorded() -> dict[str, dict[str, str]]:
    """Return, by exercise, the mutants that are right answers too, each with the reason."""
    file = Path(__file__).with_name("equivalent.toml")
    recorded = tomllib.loads(file.read_text(encoding="utf-8"))
    return {
        name: {change: group["why"] for group in groups for change in group["changes"]}
        for name, groups in recorded.items()
    }
