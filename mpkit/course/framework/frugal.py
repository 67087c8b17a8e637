"""What an answer uses beside what the reference uses, where all results are right.

    work        how much the busiest rank computes: serial training on every rank computes n times too much
    memory      how much the fullest rank holds of what it makes
    bytes       how much the busiest rank sends
    calls       how many messages and collectives it begins

Numbers alone do not show a strategy: gathering everything first and then working alone gives them, too, as does
leaving the work to one rank. Limits leave room for other styles of the same strategy; an exercise's own budgets are
sharper.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from mpkit.common.units import bytes_text
from mpkit.course.framework.exercise import CheckRow, Mistake
from mpkit.course.framework.measures import collectives, messages, wire
from mpkit.course.framework.observation import Seen

__all__ = ["LOOP", "WASTEFUL", "row_beside"]


@dataclass(frozen=True)
class Limit:
    """A limit that follows from what the reference uses.

    Attributes:
        what: what is limited, in words.
        measure: how much of it an answer used, on the rank that used most.
        times: how many times the reference's amount an answer may use.
        free: what it may use in any case.
        spell: spells an amount.
    """

    what: str
    measure: Callable[[Seen], float]
    times: float
    free: float
    spell: Callable[[float], str]

    def row(self, seen: Seen, target: Seen) -> CheckRow:
        """Compare an answer with the reference."""
        most = max(self.times * self.measure(target), self.free)
        used = self.measure(seen)
        return CheckRow(
            f"{self.what}, on {seen.case}",
            f"at most {self.spell(most)}",
            self.spell(used),
            used <= most,
            replace(seen, budget=self.what, target=target),
        )


def _most_flops(seen: Seen) -> float:
    return max((flops for flops, _ in seen.used), default=0.0)


def _held_bytes(seen: Seen) -> float:
    return max((held for _, held in seen.used), default=0.0)


def _call_count(seen: Seen) -> float:
    return messages(seen) + collectives(seen)


WORK = Limit(
    "work of the busiest rank", _most_flops, 1.75, 0.0, "{:.4g} multiplications and additions".format
)
"""A forward twice is 4/3 of the work, and not all of two shares."""

HELD = Limit("what the fullest rank holds of its own", _held_bytes, 3.0, 4096.0, bytes_text)
BYTES = Limit("all that the busiest rank sends", wire, 2.5, 1024.0, bytes_text)
CALLS = Limit("messages and collectives of the busiest rank", _call_count, 6.0, 12.0, "{:g}".format)
"""Six: for each parameter of a small model one, in place of one for all."""


def row_beside(seen: Seen, target: Seen) -> CheckRow:
    """Return the row of the first limit that is exceeded, or one that says that none is.

    Args:
        seen: what the answer did.
        target: what the reference did in the same case.
    """
    limits = ([WORK] if _most_flops(target) else []) + [HELD, BYTES, CALLS]
    rows = [limit.row(seen, target) for limit in limits]
    within = CheckRow(
        f"what each rank computes, holds and sends, on {seen.case}",
        "not much more than a right answer's",
        "no rank does too much",
        True,
        replace(seen, target=target),
    )
    return next((row for row in rows if not row.ok), within)


WASTEFUL = (
    Mistake(
        name="work-not-divided",
        hints=(
            "The results are right. How many samples, layers or columns does each rank compute, and how many are "
            "there?",
            "A rank computes about as much as all ranks together should. Then nothing is gained by having several: "
            "each has to compute its own part only, and to send what the others need of it.",
        ),
        when=lambda seen: seen.budget == WORK.what,
    ),
    Mistake(
        name="nothing-is-freed",
        hints=(
            "The results are right. What does a rank still hold when it is done, and for what?",
            "A tensor lives as long as some name, list or graph holds it. Keep what a later line reads, detach what is "
            "only a number, and let go of the rest: of one step before the next, of one micro-batch after its "
            "backward.",
        ),
        when=lambda seen: seen.budget == HELD.what,
    ),
    Mistake(
        name="sends-too-much",
        hints=(
            "The results are right. What does a rank send that nobody needs, or that others have already?",
            "Write down who needs what, and how large it is. A rank sends its own part, or the sum, and not everything "
            "that it was given.",
        ),
        when=lambda seen: seen.budget == BYTES.what,
    ),
    Mistake(
        name="too-many-calls",
        hints=(
            "The results are right, and so are the bytes. In how many pieces do you send them?",
            "Each message and each collective costs its latency, however small it is. Send a tensor whole, or several "
            "tensors as one.",
        ),
        when=lambda seen: seen.budget == CALLS.what,
    ),
)
"""The mistakes of answers whose results are right, and that use too much."""

LOOP = Mistake(
    name="an-endless-loop",
    hints=(
        "No rank waits for another one: each was still computing when its time was up. In which loop is the line "
        "that the report names, and what would end it?",
        "Print what the loop's condition reads, once each time round: it does not change, or it changes away from the "
        "end.",
    ),
    when=lambda seen: seen.hang and "waits in" not in seen.hang and "not waiting; it has" in seen.hang,
)
