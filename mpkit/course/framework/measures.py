"""The quantities that budgets limit, measured in the trace of an answer; and what an answer uses beside the solution.

Where all results are right, four amounts are compared with the solution's:

    work        how much the busiest rank computes: serial training on every rank computes n times too much
    memory      how much the fullest rank holds of what it makes
    bytes       how much the busiest rank sends
    calls       how many messages and collectives it begins

Numbers alone do not show a strategy: gathering everything first and then working alone gives them, too, as does
leaving the work to one rank. Limits leave room for other styles of the same strategy; an exercise's own budgets are
sharper.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpkit.common.units import bytes_text
from mpkit.course.framework.exercise import CheckRow, Seen
from mpkit.devices.hardware import wire_factor
from mpkit.trace import CATEGORIES, Kind, Lane


def sent_bytes(seen: Seen) -> float:
    """Return the bytes of messages that the busiest rank sends."""
    return _most(seen, lambda ops: ops["bytes"][ops["kind"] == Kind.SEND].sum())


def messages(seen: Seen) -> float:
    """Return the number of messages that the busiest rank sends."""
    return _most(seen, lambda ops: (ops["kind"] == Kind.SEND).sum())


def collectives(seen: Seen) -> float:
    """Return the number of collectives that the busiest rank takes part in."""
    return _most(seen, lambda ops: _collective(ops).sum())


def calls(kind: Kind) -> Callable[[Seen], float]:
    """Return a measure: the number of collectives of one kind that the busiest rank takes part in."""
    return lambda seen: _most(seen, lambda ops: (ops["kind"] == kind).sum())


def payload(seen: Seen) -> float:
    """Return the bytes of all collectives that the busiest rank takes part in; an all-reduce counts its tensor once."""
    return _most(seen, lambda ops: ops["bytes"][_collective(ops)].sum())


def peak(*categories: str) -> Callable[[Seen], float]:
    """Return a measure: the fullest rank's peak bytes of these categories together; of all, if none is named."""
    chosen = categories or CATEGORIES

    def peak_of(seen: Seen) -> float:
        if seen.simulated is None and seen.trace is not None:  # exact bytes, summed over all changes
            return float(max(_most_held(rank.memory, chosen) for rank in seen.ranks))
        return float(max(sum(held[category] for category in chosen) for held in seen.timeline.peak_memory))

    return peak_of


def ring(seen: Seen) -> float:
    """Return the bytes that the busiest rank sends for its collectives on a ring: an all-reduce counts twice."""
    return max(sum(_bytes(rank, op) for op in rank.ops[_collective(rank.ops)]) for rank in seen.ranks)


def wire(seen: Seen) -> float:
    """Return the bytes that the busiest rank sends in all: messages, and collectives as on a ring.

    An all-reduce counts as much as the reduce-scatter and the all-gather that it is made of.
    """
    return sent_bytes(seen) + ring(seen)


def node_bytes(*, leaving: bool) -> Callable[[Seen], float]:
    """Return a measure: the bytes that the busiest rank sends in messages and collectives that leave its node, or stay.

    A node has `case["a_node"]` ranks.
    """

    def bytes_of(seen: Seen) -> float:
        k, sent = seen.case["a_node"], [0.0] * len(seen.ranks)
        for number, rank in enumerate(seen.ranks):
            for op in rank.ops[(rank.ops["lane"] == Lane.COMM) & (rank.ops["kind"] != Kind.BARRIER)]:
                rooted = op["kind"] in (Kind.SEND, Kind.RECV)
                members = [number, int(op["peer"])] if rooted else _members(rank, op)
                if (len({member // k for member in members}) > 1) == leaving:
                    sent[number] += _bytes(rank, op)
        return max(sent)

    return bytes_of


def _members(rank: Any, op: Any) -> list[int]:
    return [int(each) for each in rank.name(int(op["group"])).split(",") if each]


def _bytes(rank: Any, op: Any) -> float:
    """Return the bytes that a rank sends for a message, or for a collective as on a ring."""
    if op["kind"] in (Kind.SEND, Kind.RECV):
        return float(op["bytes"]) if op["kind"] == Kind.SEND else 0.0
    return float(op["bytes"]) * wire_factor(int(op["kind"]), len(_members(rank, op)))


def copied_bytes(kind: Kind) -> Callable[[Seen], float]:
    """Return a measure: the bytes that the busiest rank copies between device and host, in one direction."""
    return lambda seen: _most(seen, lambda ops: ops["bytes"][ops["kind"] == kind].sum())


def count_exposed_layers(seen: Seen) -> float:
    """Return how many layers of the worst rank no gather spans (issued before the layer, waited for after it)."""

    def exposed(ops: Any) -> int:
        gathers, layers = gathers_and_layers(ops)
        return sum(not any(issued < layer < waited for issued, waited in gathers) for layer in layers)

    return _most(seen, exposed)


def gathers_and_layers(ops: Any) -> tuple[list[tuple[int, int]], list[int]]:
    """Return where each gather is issued and waited for, and where each layer computes: places in program order."""
    waits = {int(op["ref"]): place for place, op in enumerate(ops) if op["kind"] == Kind.WAIT}
    gathers = [place for place, op in enumerate(ops) if op["kind"] == Kind.ALL_GATHER]
    layers = [place for place, op in enumerate(ops) if op["kind"] == Kind.COMPUTE]
    return [(place, waits.get(place, len(ops))) for place in gathers], layers


def makespan(seen: Seen) -> float:
    """Return the seconds from the first op to the last, on the virtual clock."""
    return float(seen.timeline.step_time)


def _collective(ops: Any) -> Any:
    return (ops["lane"] == Lane.COMM) & ~np.isin(ops["kind"], (Kind.SEND, Kind.RECV, Kind.BARRIER))


def _most_held(memory: Any, categories: tuple[str, ...]) -> int:
    numbers = [CATEGORIES.index(category) for category in categories]
    held = np.cumsum(memory["delta"][np.isin(memory["category"], numbers)])
    return int(held.max(initial=0))


def _most(seen: Seen, of: Callable[[Any], Any]) -> float:
    return float(max(of(rank.ops) for rank in seen.ranks))


# ---- beside the solution


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


def _most_used(which: int) -> Callable[[Seen], float]:
    """Return a measure: the most FLOPs (0), or bytes of its own (1), of a rank."""
    return lambda seen: max((used[which] for used in seen.used), default=0.0)


WORK = Limit(
    "work of the busiest rank", _most_used(0), 1.75, 0.0, "{:.4g} multiplications and additions".format
)
"""A forward twice is 4/3 of the work, and not all of two shares."""

HELD = Limit("what the fullest rank holds of its own", _most_used(1), 3.0, 4096.0, bytes_text)
BYTES = Limit("all that the busiest rank sends", wire, 2.5, 1024.0, bytes_text)
CALLS = Limit(
    "messages and collectives of the busiest rank", lambda seen: messages(seen) + collectives(seen), 6.0, 12.0,
    "{:g}".format,
)  # fmt: skip
"""Six: for each parameter of a small model one, in place of one for all."""


def row_beside(seen: Seen, target: Seen) -> CheckRow:
    """Return the row of the first limit that is exceeded, or one that says that none is.

    Args:
        seen: what the answer did.
        target: what the reference did in the same case.
    """
    limits = ([WORK] if WORK.measure(target) else []) + [HELD, BYTES, CALLS]
    rows = [limit.row(seen, target) for limit in limits]
    within = CheckRow(
        f"what each rank computes, holds and sends, on {seen.case}",
        "not much more than a right answer's",
        "no rank does too much",
        True,
        replace(seen, target=target),
    )
    return next((row for row in rows if not row.ok), within)
