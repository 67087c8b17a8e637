"""What inference looks at: the communications of a rank's step by where they begin, their groups and their payloads."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit.trace import Kind, RankTrace, Trace

__all__ = ["AxisEvidence", "ObservedSteps", "some"]

Array = npt.NDArray[Any]
_ELEMENTS = re.compile(r"\[([0-9]{1,15})\]$")
COLLECTIVES = (Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL)


@dataclass(frozen=True)
class AxisEvidence:
    """What one kind of evidence says.

    Attributes:
        options: of the plan.
        evidence: sentences.
        announced: whether a library or a mesh says so itself; else it follows from sizes and order only.
    """

    options: dict[str, Any] = field(default_factory=dict)
    evidence: list[str] = field(default_factory=list)
    announced: bool = False


@dataclass
class ObservedSteps:
    """The last step of each rank of an imported trace."""

    trace: Trace

    @cached_property
    def ranks(self) -> list[RankTrace]:
        """Each rank's records of its last step; all if there are no steps."""
        return [_last_step(rank) for rank in self.trace.ranks]

    @property
    def library_facts(self) -> list[dict[str, Any]]:
        """What the libraries of each rank's program say (`mpkit.timeline.foreign.library_evidence`)."""
        return list(self.trace.meta.get("imported", {}).get("said", []))

    @property
    def steps(self) -> int:
        """How many steps were profiled; 1 if the program does not say."""
        return max((each["steps"] for each in self.library_facts), default=0) or 1

    @property
    def world(self) -> int:
        """The ranks of the run; those that there are files of, if their number is not known."""
        return int(self.trace.meta.get("imported", {}).get("world_size") or self.trace.world_size)

    def communications_during(self, number: int, phase: Kind, kinds: Sequence[Kind] = COLLECTIVES) -> Array:
        """Return a rank's communications of these kinds that begin within its forwards, or its backwards."""
        ops = self.ranks[number].ops
        actions = ops[(ops["kind"] == phase) & (ops["depth"] == 0)]
        comm = ops[np.isin(ops["kind"], kinds)]
        if not len(actions) or not len(comm):
            return comm[:0]
        at = np.searchsorted(actions["start"], comm["start"], side="right") - 1
        inside = (at >= 0) & (comm["start"] <= actions["end"][np.maximum(at, 0)])
        found: Array = comm[inside]
        return found

    def reductions(self, number: int, kind: Kind = Kind.ALL_REDUCE) -> Array:
        """Return a rank's reductions from the beginning of the first backward to the optimizer's step, in order."""
        ops = self.ranks[number].ops
        backward = ops[(ops["kind"] == Kind.BACKWARD) & (ops["depth"] == 0)]
        updates = ops[(ops["kind"] == Kind.OPTIMIZER) & (ops["depth"] == 0)]
        if not len(backward):
            return ops[:0]
        end = int(updates["end"].max()) if len(updates) else 2**62
        chosen = (ops["kind"] == kind) & (ops["start"] >= backward["start"].min()) & (ops["start"] <= end)
        found: Array = ops[chosen]
        return found

    def between_steps(self, number: int, kind: Kind) -> Array:
        """Return a rank's communications after its last backward, or before its first forward."""
        ops = self.ranks[number].ops
        outer = ops[(ops["depth"] == 0) & np.isin(ops["kind"], (Kind.FORWARD, Kind.BACKWARD))]
        comm = ops[ops["kind"] == kind]
        if not len(outer):
            none: Array = comm[:0]
            return none
        first, last = outer["start"].min(), outer["end"][outer["kind"] == Kind.BACKWARD].max(initial=0)
        found: Array = comm[(comm["start"] < first) | (comm["start"] >= last)]
        return found

    def payloads(self, number: int, ops: Array) -> list[tuple[int, int]]:
        """Return bytes and elements of each communication; the elements are in its name, "float[12]"."""
        rank = self.ranks[number]
        inside = [_ELEMENTS.search(rank.name(int(row["name"]))) for row in ops]
        return [
            (int(row["bytes"]), int(found[1]) if found else 0) for row, found in zip(ops, inside, strict=True)
        ]

    def group(self, number: int, row: Any) -> tuple[int, str]:
        """Return the size of a communication's group, absent ranks too, and its axis of the program's mesh."""
        group = self.ranks[number].name(int(row["group"]))
        known = self.trace.meta.get("imported", {}).get("groups", [])
        groups = known[number] if number < len(known) else {}
        size, axis = groups.get(f"{Kind(int(row['kind'])).word} {group}", (len(group.split(",")), ""))
        return int(size), str(axis)

    def usual_size(self, chosen: Iterable[Array]) -> int:
        """Return the size of the groups that carry most bytes of these communications by rank; 1 without any."""
        sizes: Counter[int] = Counter()
        for number, ops in enumerate(chosen):
            for row in ops:
                sizes[self.group(number, row)[0]] += int(row["bytes"]) + 1
        return sizes.most_common(1)[0][0] if sizes else 1


def _last_step(rank: RankTrace) -> RankTrace:
    steps = rank.ops["step"][rank.ops["kind"] == Kind.STEP]
    ops = rank.ops[rank.ops["step"] == steps.max()] if len(steps) else rank.ops
    return RankTrace(ops, rank.memory[:0], rank.names)


def some(names: Iterable[str]) -> str:
    """List the first names.

    >>> some(["a", "b"]), some("abcd")
    ('a, b', 'a, b, c, ...')
    """
    listed = list(names)
    return ", ".join(listed[:3]) + (", ..." if len(listed) > 3 else "")
