"""How a mistake is recognized: by what its wrong answer did, which `mpkit exercises --record` writes down once.

    record    run each wrong answer of the text; keep the signature of its first check that failed
    match     a check runs the student's answer only; the mistake whose signature it has gives the hint

A signature says how the answer failed, and has a few numbers. Results have to be those of the wrong answer, in the same
case: so an answer in another style, with the same mistake, has the same signature. Where a budget is exceeded, or ranks
hang or end in an error, the same budget, hang or error suffices; of several mistakes that fail so it is the one whose
ranks did most alike.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpkit.course.framework.equal import is_tensor
from mpkit.course.framework.exercise import CheckRow, Seen
from mpkit.course.framework.room import PackedAnswer, Room
from mpkit.course.framework.source import run_cell
from mpkit.trace import Lane

if TYPE_CHECKING:
    from mpkit.course.catalogue import ExerciseEntry


FILE = "signatures.json"
"""The file of a family's folder that has the signatures of its exercises' wrong answers."""

CLOSE = 1e-4
"""How close sums of results are, as a share of the sum of their amounts, to count as the same."""

HANGS = ("never came to", "never sent it", "never received it", "is not waiting")
"""What a report says of ranks that hang (`hints.toml` has the rule that is broken in each)."""


@dataclass(frozen=True)
class Signature:
    """How an answer failed.

    Attributes:
        kind: "result", "race", "budget", "hang", "mismatch" or "error".
        detail: of a result the case, of a budget its name, of a hang what ranks wait for, of an error its message.
        numbers: of a result two sums per rank; else how many communications each rank began and the kind of the last,
            after how much of a budget was used.
    """

    kind: str
    detail: str
    numbers: tuple[float, ...] = ()

    def distance(self, other: Signature) -> float:
        """Return how far apart the numbers are; infinity if the answers did not fail alike.

        >>> Signature("budget", "messages", (3, 4)).distance(Signature("budget", "messages", (3, 6)))
        2.0
        >>> Signature("result", "2 ranks", (1.0, 2.0)).distance(Signature("result", "2 ranks", (1.1, 2.0)))
        inf
        """
        if (self.kind, self.detail) != (other.kind, other.detail):
            return math.inf
        pairs = list(zip(self.numbers, other.numbers, strict=False))
        if self.kind != "result":
            return float(sum(abs(a - b) for a, b in pairs) + abs(len(self.numbers) - len(other.numbers)))
        amounts = [max(abs(a), abs(b)) for a, b in pairs][1::2]  # of each rank, after its weighted sum
        limits = [CLOSE * amount + 1e-9 for amount in amounts for _ in range(2)]
        same = len(self.numbers) == len(other.numbers) and all(
            abs(a - b) <= limit for (a, b), limit in zip(pairs, limits, strict=True)
        )
        return 0.0 if same else math.inf


RACE = Signature("race", "")
"""The signature of results that something was read too early for, and that are others in each run."""


def signature_of(row: CheckRow) -> Signature:
    """Return the signature of a check that failed."""
    seen = row.seen
    assert seen is not None
    if seen.mismatch:
        return Signature("mismatch", "", _begun(seen))
    if seen.hang:
        detail = next((words for words in HANGS if words in seen.hang), "")
        return Signature("hang", detail, _begun(seen))
    if seen.error:
        return Signature("error", _plain_error(seen.error), _begun(seen))
    if seen.budget:
        used = re.search(r"\d[\d.]*", row.got)
        return Signature("budget", seen.budget, (float(used[0]) if used else 0.0, *_begun(seen)))
    assert seen.got is not None
    return Signature("result", str(seen.case), tuple(number for got in seen.got for number in _sums(got)))


def _plain_error(error: str) -> str:
    """Return an error without ranks, numbers, parameters' names and names of the student's.

    >>> _plain_error("rank 1: RuntimeError: shape '[3, 4]' is invalid for input of size 7")
    "RuntimeError: shape '...' is invalid for input of size #"
    >>> _plain_error("IndexError: 1.bias has 3 elements")  # of which parameter depends on the rank that ends first
    'IndexError: # has # elements'
    """
    first = re.sub(r"^rank \d+: ", "", error.partition("\n")[0])
    first = re.sub(r"\b\d+(\.\w+)+", "#", first)
    return re.sub(r"\d+", "#", re.sub(r"'[^']*'", "'...'", first))[:100]


def _begun(seen: Seen) -> tuple[float, ...]:
    """Return how many communications each rank began, and the kind of the last; of a schedule a number for each row."""
    if seen.schedule is not None:
        return tuple(float(zlib.crc32(" ".join(map(str, row)).encode()) % 9973) for row in seen.schedule.rows)
    if seen.trace is None:
        return ()
    kinds = [rank.ops["kind"][rank.ops["lane"] == Lane.COMM] for rank in seen.trace.ranks]
    return tuple(float(number) for each in kinds for number in (len(each), each[-1] if len(each) else 0))


def _sums(value: Any) -> tuple[float, float]:
    """Return a weighted sum of all numbers in a result, which depends on their order, and the sum of their amounts."""
    numbers = list(_numbers(value))
    weighted = sum(number * math.cos(1 + 0.7 * place) for place, number in enumerate(numbers))
    return float(f"{weighted:.6g}"), float(f"{sum(map(abs, numbers)):.6g}")


def _numbers(value: Any) -> Iterator[float]:
    """Yield all numbers of a result; what is no number counts as one that its text says."""
    if is_tensor(value):
        yield float(value.dim())
        for number in value.flatten().tolist():
            yield from _numbers(number)
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from _numbers(value[key])
    elif isinstance(value, list | tuple):
        yield float(len(value))
        for each in value:
            yield from _numbers(each)
    elif isinstance(value, bool | int | float):
        yield float(value) if math.isfinite(value) else 9876.5
    else:
        yield float(zlib.crc32(str(value).encode()) % 9973)


def find_mistake(known: dict[str, Signature], row: CheckRow) -> str:
    """Return the name of the mistake that a failed check shows; "" if none."""
    for own in (signature_of(row), *([RACE] if row.seen is not None and row.seen.raced else [])):
        distances = {name: each.distance(own) for name, each in known.items()}
        nearest = min(distances, key=distances.__getitem__, default="")
        if distances.get(nearest, math.inf) < math.inf:
            return nearest
    return ""


@cache
def read_signatures(path: Path) -> dict[str, dict[str, Signature]]:
    """Return the signatures in a family's file: by exercise, by mistake."""
    return {
        exercise: {
            name: Signature(one["kind"], one["detail"], tuple(one["numbers"])) for name, one in many.items()
        }
        for exercise, many in (json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}).items()
    }


def _first_failure(entry: ExerciseEntry, wrong: Any, room: Room) -> CheckRow | None:
    """Return the first check that a wrong answer fails in; None if it passes."""
    rows = entry.exercise.examine(PackedAnswer.pack(wrong), room)
    return next((row for row in rows if not row.ok), None)


def record_signatures(entry: ExerciseEntry, room: Room) -> list[str]:
    """Run an exercise's wrong answers, and write their signatures into its family's file.

    Returns:
        What is wrong, in words: wrong answers that pass, and pairs that cannot be told apart.
    """
    found: dict[str, Signature] = {}
    faults = []
    for mistake in entry.exercise.mistakes:
        wrong = run_cell(mistake.wrong, entry.exercise.name_of_answer, mistake.name, entry.given_code)
        failed = _first_failure(entry, wrong, room)
        if failed is None:
            faults.append(f"{entry.name}: {mistake.name} is not caught: add a case, or a budget")
            continue
        own = signature_of(failed)
        if failed.seen is not None and failed.seen.raced:
            again = _first_failure(entry, wrong, room)
            own = own if again is not None and signature_of(again).distance(own) == 0.0 else RACE
        alike = [name for name, each in found.items() if each.distance(own) == 0.0]
        faults += [
            f"{entry.name}: {mistake.name} does what {name} does: keep one, or add a case" for name in alike
        ]
        found[mistake.name] = own
    path = entry.text_path.with_name(FILE)
    whole = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    whole[entry.name] = {name: asdict(one) for name, one in found.items()}
    lines = [
        f" {json.dumps(name)}: {{\n"
        + ",\n".join(f"  {json.dumps(mistake)}: {json.dumps(one)}" for mistake, one in many.items())
        + "\n }"
        for name, many in sorted(whole.items())
    ]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    read_signatures.cache_clear()
    return faults
