"""Whether a check catches a mutant: each is tried as an answer, on real ranks, up to the first row that fails."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path

from mpkit.course.catalogue import ExerciseEntry, find
from mpkit.course.framework.exercise import Case, CheckRow
from mpkit.course.framework.frugal import LOOP, WASTEFUL
from mpkit.course.framework.room import PackedAnswer, Room
from mpkit.course.framework.source import run_cell
from mpkit.course.sandbox.allowance import Limits
from mpkit.course.tell import SLIP, STUB, tell
from tests.classroom.mutants.mutate import Mutant, chosen

__all__ = ["Caught", "checked", "equivalent", "tried"]

LIMITS = Limits(seconds=5.0, grace=1.0)
"""A mutant that hangs, or goes on for ever, is caught after so long."""


@dataclass(frozen=True)
class Caught:
    """What a check says of one mutant.

    Attributes:
        exercise: the exercise's name.
        mutant: the mutant.
        by: the row that failed, in words; "" if the mutant passes.
        why: why the mutant is a right answer too; "" if nothing says so.
        told: what the student is told that is true of this answer: a "listed" mistake, a "relation" to the right
            results, the "line" of an error, what the ranks "wait" in; "" if it is only the exercise's general hint.
    """

    exercise: str
    mutant: Mutant
    by: str
    why: str = ""
    told: str = ""


@cache
def _room() -> Room:
    """Return this process's ranks, which stay warm."""
    return Room(limits=LIMITS)


def checked(name: str, mutant: Mutant) -> Caught:
    """Check one mutant."""
    entry = find(name)
    try:
        value = run_cell(mutant.code, entry.exercise.name_of_answer, f"{name} mutant", entry.given_code)
        answer = PackedAnswer.pack(value)
    except Exception as error:  # a mutant may raise anything where it is defined
        return Caught(name, mutant, f"its cell fails: {type(error).__name__}")
    right: list[Case] = []
    for row in entry.exercise.examine(answer, _room()):
        if not row.ok:
            return Caught(name, mutant, f"{row.what}: {row.got}"[:200], told=_told(entry, row, right))
        right += [row.seen.case] if row.seen is not None else []
    if isinstance(value, dict) and value == entry.exercise.solution:
        return Caught(name, mutant, "", "It is the same dict.")
    return Caught(name, mutant, "", equivalent().get(name, {}).get(mutant.change, ""))


def _told(entry: ExerciseEntry, row: CheckRow, right: list[Case]) -> str:
    seen = row.seen
    mistake, _ = tell(entry, row, _room(), right)
    if mistake in {each.name for each in (*entry.exercise.mistakes, *WASTEFUL, LOOP)}:
        return "listed"
    if seen is not None and seen.where:
        return "line"
    if mistake not in ("", STUB, SLIP):
        return "relation"
    if seen is not None and (seen.hang or seen.error):
        return "wait" if seen.hang else "line"
    return ""


def tried(entries: Iterable[ExerciseEntry], most: int, seed: str, jobs: int) -> Iterator[Caught]:
    """Check some mutants of each exercise, in parallel; yield the verdicts in order."""
    work = [(entry.name, mutant) for entry in entries for mutant in chosen(entry.source, most, seed)]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(checked, *zip(*work, strict=True)) if work else ()


@cache
def equivalent() -> dict[str, dict[str, str]]:
    """Return, by exercise, the mutants that are right answers too, each with the reason."""
    recorded = tomllib.loads(Path(__file__).with_name("equivalent.toml").read_text(encoding="utf-8"))
    return {
        name: {change: group["why"] for group in groups for change in group["changes"]}
        for name, groups in recorded.items()
    }
