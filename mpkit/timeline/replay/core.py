"""Replay: a Trace on the virtual clock, as if each rank had a device of its own.

The phases, repeated while records arrive:

    take     put each rank's new records on the axis of its own work (`program`)
    run      each rank issues its communication in order, until it waits for something (`RankReplay`)
    serve    when all ranks wait, the links serve what became ready first (`network`), and the waiting ranks go on
    place    every op with both a start and an end becomes a span

A rank that runs ahead never takes a link from one that is behind: nothing is served at a time at which a rank whose
records have not arrived yet may still issue something. So the spans do not depend on how the records arrive.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from math import inf
from types import MappingProxyType
from typing import Any

import numpy as np

from mpkit.common.arrays import Array
from mpkit.devices.hardware import Hardware
from mpkit.timeline.replay.costs import machine_of
from mpkit.timeline.replay.network import ReplayNetwork, Settled
from mpkit.timeline.replay.program import RankProgram
from mpkit.timeline.replay.spans import (
    DEVICE_SAMPLE,
    HELD,
    PART_SENT,
    SPAN,
    HeldMemory,
    NameLines,
    Names,
    ReplayResult,
    placed_samples,
    read_sent_parts,
    spans_of,
)
from mpkit.trace import MEMORY, OP, TIMED_BY_EVENTS, Kind, RankTrace

_WAIT, _HOST, _STEP = int(Kind.WAIT), int(Kind.COPY_TO_DEVICE), int(Kind.STEP)
NEVER = (inf, 0, 0)
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
        """Whether it has done everything recorded so far."""
        return self._at == len(self._controls)

    @property
    def first_untimed(self) -> int:
        """The first op whose start is not known yet."""
        return self.program.count if self.is_starved else self._controls[self._at][0]

    @property
    def soonest(self) -> tuple[float, int, int]:
        """The earliest moment at which it may issue anything new: time, rank, op."""
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
        columns = [chosen[name].tolist() for name in ("number", "ref", "bytes")]
        op, work = (index + taken.start).tolist(), self.program.work[taken][index].tolist()
        self._controls += zip(op, chosen["kind"].tolist(), work, groups, *columns, strict=True)
        self._others = np.concatenate([self._others, np.flatnonzero(~one_by_one) + taken.start])

    def run(self, network: ReplayNetwork) -> None:
        """Run through communication and waits, until a wait is for something unserved."""
        rank, controls, at, pauses = self.rank, self._controls, self._at, self.program.pauses
        ends, settled, waited = self._ends, self._settled, self._waited
        _, time, before = pauses[-1]
        while at < len(controls):
            op, kind, work, group, number, ref, nbytes = controls[at]
            now = time + (work - before)
            if kind != _WAIT:
                known = network.ask(rank, op, kind, group, number, nbytes, now)
                ends[op] = inf if known is None else known[3]
                settled += [known] if known else []
            else:
                end = max(ends.get(ref, now), now)
                if end == inf:
                    self.waits_for = ref
                    break
                if end > now:
                    pauses.append((op, end, work))
                    time, before = end, work
                waited.append((op, now, end, ref))
            at += 1
        self._at = at

    def settle(self, settled: Settled) -> bool:
        """Record the times of a served communication; return whether the rank was waiting for it."""
        op = settled[1]
        self._ends[op] = settled[3]
        self._settled.append(settled)
        if self.waits_for != op:
            return False
        self.waits_for = -1
        return True

    def place(self, row: int, final: bool) -> tuple[Array, Array]:
        """Return spans of the ops with known times, numbered from `row` on, and their ops."""
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

    # ---- what is left at the end

    @property
    def untimed_count(self) -> int:
        """How many ops have no time: not reached, not taken, or communication that was issued but not served."""
        unserved = sum(end == inf for end in self._ends.values())
        return self.program.count - self.first_untimed + len(self.program.left) + unserved

    @property
    def stopped_within(self) -> str:
        """The op in which the rank was stopped, such as "is in forward of stage 0"; "" if it finished."""
        if not len(self.program.left):
            return ""
        op = self.program.left[0]
        told = {"stage": " of stage {}", "microbatch": " micro-batch {}", "step": " (step {})"}
        where = (text.format(op[name]) for name, text in told.items() if op[name] >= 0)
        return f"is in {Kind(int(op['kind'])).word.replace('_', ' ')}{''.join(where)}"

    def current_wait(self) -> tuple[float, Any] | None:
        """Return the seconds since when it waits, and the communication that it waits for; None if it does not."""
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


def waiting_ranks(ranks: Sequence[RankReplay]) -> list[dict[str, Any]]:
    """Return {"rank", "start" in seconds, "words"} of each rank that waits in vain."""
    stuck = [(this, *where) for this in ranks if (where := this.current_wait()) is not None]
    there: dict[tuple[str, int], set[int]] = {}
    for this, _, op in stuck:
        there.setdefault((this.group_of(op), int(op["kind"])), set()).add(this.rank)
    waiting = []
    for this, start, op in stuck:
        group = this.group_of(op)
        words = _words(op, group, there[group, int(op["kind"])])
        waiting.append({"rank": this.rank, "start": start, "words": words})
    return waiting


def _words(op: Any, group: str, there: set[int]) -> str:
    """Say for whom a rank waits: the peer of a message, or the members of a group that have not come."""
    kind = Kind(int(op["kind"]))
    word = kind.word.replace("_", " ")
    if kind in (Kind.SEND, Kind.RECV):
        return f"waits for rank {op['peer']} ({word})"
    members = [int(rank) for rank in group.split(",")] if group.replace(",", "").isdigit() else []
    missing = [str(rank) for rank in members if rank not in there]
    ranks = f"rank{'s' * (len(missing) > 1)} {', '.join(missing)}"
    return f"waits for {ranks} ({word})" if missing else f"waits in {word}"


class Replay:
    """A replay that keeps up with its run: feed it records, and take the spans that follow from them.

    `meta` is the Trace's; `notes` has what a reader should know about the times.

    >>> from mpkit.trace import MEMORY, OP, Kind, RankTrace
    >>> one = np.zeros(1, OP)
    >>> one["kind"], one["start"], one["end"], one["cpu"] = Kind.FORWARD, 1, 9, 3_000_000_000
    >>> live = Replay(world_size=1)
    >>> live.feed(0, RankTrace(one, np.zeros(0, MEMORY), [""]))
    >>> len(live.advance())         # nothing has begun after it: what is within it may still be to come
    0
    >>> live.finish()["end"]
    array([3.])
    """

    def __init__(
        self, world_size: int, hardware: Hardware | str | None = None, *, meta: Mapping[str, Any] = MappingProxyType({})
    ) -> None:  # fmt: skip
        machine = machine_of(hardware, meta, world_size)
        self.notes = machine.notes
        self._meta = {**meta, "hardware": machine.hardware.name}
        self._names = Names()
        self._network = ReplayNetwork(world_size, machine.hardware)
        on_gpu = self._meta.get("device") in TIMED_BY_EVENTS
        self._ranks = [
            RankReplay(rank, RankProgram(machine.cost(rank), on_gpu, machine.includes_copies), self._names)
            for rank in range(world_size)
        ]
        self._rows = 0
        self._spans: list[Array] = [np.zeros(0, SPAN)]
        self._ops: list[Array] = [np.zeros(0, np.int64)]  # the op of each span
        self._held: list[Array] = [np.zeros(0, HELD)]

    @property
    def names(self) -> list[str]:
        """The strings that spans refer to; the list grows."""
        return self._names.all

    def feed(self, rank: int, so_far: RankTrace) -> None:
        """Give the replay all records of a rank so far, including those of earlier calls.

        An open communication overlaps with what follows it; any other open op stops its rank there until it has ended.
        """
        this = self._ranks[rank]
        self._network.know_parts(rank, so_far.sent_parts[len(this.known.sent_parts) :])
        this.memory = np.concatenate([this.memory, so_far.memory[len(this.known.memory) :]])
        this.program.feed(so_far.ops)
        this.lines.extend(so_far.names)
        this.known = so_far

    def advance(self) -> Array:
        """Replay as far as the records go, and return the new spans, (n,) of `SPAN`.

        Their `cause` counts the rows of all spans returned so far. They are in no particular order.
        """
        return self._go(final=False)

    def finish(self) -> Array:
        """Replay the rest, since no more records will arrive, and return the new spans."""
        spans = self._go(final=True)
        waiting = waiting_ranks(self._ranks)
        said = {each["rank"]: each["words"] for each in waiting}
        words = [(this.rank, said.get(this.rank) or this.stopped_within) for this in self._ranks]
        if unfinished := [f"rank {rank} {what}" for rank, what in words if what]:
            left = sum(this.untimed_count for this in self._ranks)
            self.notes.append(f"Not finished: {'; '.join(unfinished)}. {left:,} ops have no time here.")
            self._meta["waiting"] = waiting
        return spans

    def collect(self) -> ReplayResult:
        """Return everything so far."""
        spans, ops = np.concatenate(self._spans), np.concatenate(self._ops)
        order = np.lexsort((ops, spans["start"], spans["rank"]))
        row = np.full(len(order) + 1, -1)  # the last one is row -1: no cause
        row[order] = np.arange(len(order))
        spans, ops = spans[order], ops[order]
        spans["cause"] = row[spans["cause"]]
        held = np.concatenate(self._held)
        held = held[np.argsort(held["rank"], kind="stable")]
        parts, samples = [np.zeros(0, PART_SENT)], [np.zeros(0, DEVICE_SAMPLE)]
        for this in self._ranks:
            known, mine = this.program.ops, spans["rank"] == this.rank
            parts.append(read_sent_parts(this.rank, this.known.sent_parts, known, this.lines))
            samples.append(placed_samples(this.rank, this.known.samples, known[ops[mine]], spans[mine]))
        return ReplayResult(
            spans, list(self.names), held, len(self._ranks), "virtual", dict(self._meta), list(self.notes),
            device_samples=np.concatenate(samples), sent_parts=np.concatenate(parts),
        )  # fmt: skip

    # ---- the phases

    def _go(self, final: bool) -> Array:
        for this in self._ranks:
            this.take(self._network, final)
        run = self._ranks
        while True:
            for this in run:
                this.run(self._network)
            # The earliest point at which a rank whose records are used up may issue something.
            starved = (this.soonest for this in self._ranks if this.is_starved and not final)
            settled = self._network.serve(min(starved, default=NEVER))
            if settled is None:
                break
            run = [this for one in settled if (this := self._ranks[one[0]]).settle(one)]
        new = []
        for this in self._ranks:
            spans, ops = this.place(self._rows, final)
            self._rows += len(spans)
            self._ops.append(ops)
            new.append(spans)
            self._held.append(this.place_memory(final))
        self._spans += new
        return np.concatenate([np.zeros(0, SPAN), *new])
