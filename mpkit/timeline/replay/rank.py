"""RankReplay: how far one rank has got in a replay; and which ranks wait in vain at its end, for whom."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit.timeline.replay.memory import HeldMemory
from mpkit.timeline.replay.network import ReplayNetwork, Settled
from mpkit.timeline.replay.program import RankProgram
from mpkit.timeline.replay.spans import SPAN, NameLines, Names, spans_of
from mpkit.trace import MEMORY, OP, Kind, RankTrace


def waiting_ranks(ranks: Sequence[RankReplay]) -> list[dict[str, Any]]:
    """Return {"rank", "start" in seconds, "words"} of each rank that waits in vain.

    >>> waiting_ranks([])
    []
    """
    stuck = [(this, where) for this in ranks if (where := this.current_wait()) is not None]
    there: dict[tuple[str, int], set[int]] = {}
    for this, (_, op) in stuck:
        there.setdefault((this.group_of(op), int(op["kind"])), set()).add(this.rank)
    return [
        {
            "rank": this.rank,
            "start": start,
            "words": _words(op, this.group_of(op), there[this.group_of(op), int(op["kind"])]),
        }
        for this, (start, op) in stuck
    ]


def _words(op: Any, group: str, there: set[int]) -> str:
    """Say for whom a rank waits: the peer of a message, or the members of a group that have not come."""
    kind = Kind(int(op["kind"]))
    word = kind.word.replace("_", " ")
    if kind in (Kind.SEND, Kind.RECV):
        return f"waits for rank {op['peer']} ({word})"
    members = [int(rank) for rank in group.split(",")] if group.replace(",", "").isdigit() else []
    missing = [str(rank) for rank in members if rank not in there]
    if not missing:
        return f"waits in {word}"
    return f"waits for rank{'s' * (len(missing) > 1)} {', '.join(missing)} ({word})"


_WAIT, _HOST, _STEP = int(Kind.WAIT), int(Kind.COPY_TO_DEVICE), int(Kind.STEP)

Array = npt.NDArray[Any]
Control = tuple[int, int, float, int, int, int, int]
"""An op that is processed one by one: op, kind, work done before it, group, number, ref, payload."""


class RankReplay:
    """One rank's side of a replay: its program, what it has issued, and what is not a span yet."""

    def __init__(self, rank: int, program: RankProgram, names: Names) -> None:
        self.rank = rank
        self.program = program
        self.lines = NameLines(names)
        self.known = RankTrace(np.zeros(0, OP), np.zeros(0, MEMORY), [""])  # all records so far
        self.memory = self.known.memory  # changes that have no time yet
        self.waits_for = -1  # the op that the rank is stuck on
        self._names = names
        self._controls: list[Control] = []
        self._at = 0  # the next control
        self._ends: dict[int, float] = {}  # when each communication ended; inf: issued but not served
        self._settled: list[Settled] = []  # communication that is not a span yet
        self._waited: list[tuple[int, float, float, int]] = []  # waits, likewise: op, start, end, cause
        self._others = np.zeros(0, np.int64)  # all other ops that are not spans yet
        self._rows = np.zeros(0, np.int64)  # by op: its row among all spans
        self._held = HeldMemory()

    @property
    def is_starved(self) -> bool:
        """Whether it has done everything that is recorded for it."""
        return self._at == len(self._controls)

    @property
    def first_untimed(self) -> int:
        """The first op whose start is not known yet."""
        return self.program.count if self.is_starved else self._controls[self._at][0]

    @property
    def soonest(self) -> tuple[float, int, int]:
        """The earliest moment at which it may issue something new: time, rank, op."""
        return self.program.time, self.rank, self.program.count

    def take(self, network: ReplayNetwork, final: bool) -> None:
        """Put new records on the work axis, and list what has to be processed one by one."""
        taken = self.program.take(final)
        ops, kind = self.program.ops[taken], self.program.ops["kind"][taken]
        one_by_one = (kind >= _WAIT) & (kind < _HOST)
        index = np.flatnonzero(one_by_one)
        chosen = ops[index]
        groups = self.lines[chosen["group"]].tolist()
        for group in set(groups):
            network.know(group, self._names.all[group])
        del self._controls[: self._at]
        self._at = 0
        self._controls += zip(
            (index + taken.start).tolist(),
            chosen["kind"].tolist(),
            self.program.work[taken][index].tolist(),
            groups,
            chosen["number"].tolist(),
            chosen["ref"].tolist(),
            chosen["bytes"].tolist(),
            strict=True,
        )
        self._others = np.concatenate([self._others, np.flatnonzero(~one_by_one) + taken.start])

    def run(self, network: ReplayNetwork) -> None:
        """Run through communication and waits, until a wait is for something unserved."""
        rank, controls, at, pauses = self.rank, self._controls, self._at, self.program.pauses
        ends, settled, waited = self._ends, self._settled, self._waited
        ask = network.ask
        _, time, before = pauses[-1]
        while at < len(controls):
            op, kind, work, group, number, ref, nbytes = controls[at]
            now = time + (work - before)
            if kind != _WAIT:
                known = ask(rank, op, kind, group, number, nbytes, now)
                if known is None:
                    ends[op] = inf
                else:
                    ends[op] = known[3]
                    settled.append(known)
            else:
                end = ends.get(ref, now)
                if end > now:
                    if end == inf:
                        self.waits_for = ref
                        break
                    pauses.append((op, end, work))
                    time, before = end, work
                else:
                    end = now
                waited.append((op, now, end, ref))
            at += 1
        self._at = at

    def settle(self, settled: Settled) -> bool:
        """Note that a communication of this rank was served; return whether the rank was waiting for it."""
        op = settled[1]
        self._ends[op] = settled[3]
        self._settled.append(settled)
        if self.waits_for != op:
            return False
        self.waits_for = -1
        return True

    def place(self, row: int, final: bool) -> tuple[Array, Array]:
        """Make spans of the ops with known times, numbered from `row` on; return the spans and their ops."""
        program = self.program
        others, start, end = self._place_others(final)
        waited, settled = _table(self._waited, 4), _table(self._settled, 5)
        self._waited.clear()
        self._settled.clear()
        ops = np.concatenate([others, waited[:, 0].astype(np.int64), settled[:, 1].astype(np.int64)])
        spans = spans_of(self.rank, program.ops[ops], self.lines) if len(ops) else np.zeros(0, SPAN)
        spans["start"] = np.concatenate([start, waited[:, 1], settled[:, 2]])
        spans["end"] = np.concatenate([end, waited[:, 2], settled[:, 3]])
        spans["issued"] = np.concatenate([start, waited[:, 1], settled[:, 4]])
        self._rows = np.concatenate([self._rows, np.full(program.count - len(self._rows), -1)])
        self._rows[ops] = row + np.arange(len(ops))
        waits = slice(len(others), len(others) + len(waited))
        ref = waited[:, 3].astype(np.int64)
        known = (ref >= 0) & (ref < program.count)
        spans["cause"][waits] = np.where(known, self._rows[np.where(known, ref, 0)], -1) if len(ref) else ref
        return spans, ops

    def place_memory(self, final: bool) -> Array:
        """Return the changes of the held memory whose time is known by now, (n,) of `HELD`."""
        # A change after the last op so far may be followed by another op, which determines its place.
        timed = self.memory["op"] < self.first_untimed + final
        held = self._held.place(self.rank, self.program, self.memory[timed])
        self.memory = self.memory[~timed]
        # A change of memory that happened in the previous op may still arrive.
        self.program.forget(min(self.first_untimed, int(self._others.min(initial=self.first_untimed))) - 1)
        return held

    def _place_others(self, final: bool) -> tuple[Array, Array, Array]:
        """Return op, start and end of the finished ops that neither communicate nor wait."""
        program = self.program
        close = program.close[self._others]
        over = close <= self.first_untimed
        if final:
            over &= program.ops["end"][self._others] != 0  # a step that was cut short does not count
        op, close = self._others[over], close[over]
        self._others = self._others[~over]
        start = program.clock(program.work[op], op)
        return op, start, program.clock(self._done_at(op, close), close)

    def _done_at(self, op: Array, close: Array) -> Array:
        """Return the work at the ends of ops; a step ends where its lane is when the first op after it begins."""
        program = self.program
        done: Array = program.done[op]
        steps = np.flatnonzero(program.ops["kind"][op] == _STEP)
        done[steps] = [program.work[at] if at < program.count else program.total for at in close[steps]]
        return done

    @property
    def unserved_count(self) -> int:
        """How many communications were issued but not served."""
        return sum(end == inf for end in self._ends.values())

    # ---- what is left at the end --------------------------------------------------------------------------

    @property
    def stopped_within(self) -> str:
        """In which op the rank was stopped, such as "is in forward of stage 0"; "" if it finished."""
        if not len(self.program.left):
            return ""
        op = self.program.left[0]
        told = {"stage": " of stage {}", "microbatch": " micro-batch {}", "step": " (step {})"}
        where = (text.format(op[name]) for name, text in told.items() if op[name] >= 0)
        return f"is in {Kind(int(op['kind'])).word.replace('_', ' ')}{''.join(where)}"

    def current_wait(self) -> tuple[float, Any] | None:
        """Return since when it waits, in seconds, and the communication that it waits for; None if it does not."""
        if not self.is_starved:
            _, time, before = self.program.pauses[-1]
            return time + (self._controls[self._at][2] - before), self.program.ops[self.waits_for]
        left = self.program.left
        if len(left) and left[0]["kind"] == _WAIT and 0 <= left[0]["ref"] < self.program.count:
            return self.program.time, self.program.ops[left[0]["ref"]]
        return None

    def group_of(self, op: Any) -> str:
        """Return the name of a communication's group."""
        return self._names.all[int(self.lines[np.array([op["group"]])][0])]


def _table(rows: list[Any], columns: int) -> Array:
    """Return tuples of numbers as an array."""
    flat = np.fromiter(chain.from_iterable(rows), np.float64, columns * len(rows))
    return flat.reshape(-1, columns)
