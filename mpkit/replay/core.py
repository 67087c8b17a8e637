"""Replay: a Trace on the virtual clock, as if each rank had a device of its own.

The phases, over and over while records come in:

    take     put each rank's new records on the axis of its own work (`mpkit.replay.program`)
    run      each rank asks for its communication as it comes to it, until it waits for something
    serve    when all ranks wait, the links serve what became ready first (`mpkit.replay.network`); its waiters go on
    place    whatever has both its times becomes a span

A rank that runs ahead never takes a link from one that is behind: nothing is served at a time at which a rank whose
records have not come yet may still ask for something. So the spans do not depend on how the records come in.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit.devices import Hardware
from mpkit.replay.costs import machine
from mpkit.replay.held import Held
from mpkit.replay.network import Network, Settled
from mpkit.replay.program import Program
from mpkit.timeline import HELD, SPAN, Timeline
from mpkit.trace import MEMORY, Kind

__all__ = ["Replay"]

_WAIT, _COMM, _HOST, _STEP = int(Kind.WAIT), 32, 64, int(Kind.STEP)

Array = npt.NDArray[Any]


class _Rank:
    """One rank's side of a replay."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.lines = np.zeros(0, np.int32)  # its names, as numbers of the replay's
        self.controls: list[tuple[int, int, float, int, int, int, int]] = []
        self.at = 0  # the control that comes next
        self.pending: set[int] = set()  # communication asked for and not served
        self.finished: dict[int, float] = {}  # communication served: when it ended
        self.waits_for = -1  # the op that the rank is stuck on
        self.settled: list[Settled] = []  # communication that is not a span yet
        self.waited: list[tuple[int, float, float, int]] = []  # waits likewise: op, start, end, what for
        self.unplaced = np.zeros(0, np.int64)  # ops of the other lanes likewise
        self.rows = np.zeros(0, np.int64)  # by op: its row among all spans
        self.memory = np.zeros(0, MEMORY)
        self.held = Held()

    @property
    def reached(self) -> int:
        """The first op that has no beginning yet."""
        return self.controls[self.at][0] if self.at < len(self.controls) else self.program.count


class Replay:
    """A replay that goes on while its run does: feed it records, and take the spans that follow from them.

    Attributes:
        names: the strings that spans refer to.
        notes: what a reader should know of the times.

    >>> Replay(1).finish().size
    0
    """

    def __init__(
        self,
        world_size: int,
        hardware: Hardware | str | None = None,
        *,
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        self.meta = dict(meta or {})
        self.names = [""]
        self.notes: list[str] = []
        self._numbers = {"": 0}
        chosen, cost, note = machine(hardware, self.meta)
        self.notes += note
        self.meta["hardware"] = chosen.name
        self._network = Network(world_size, chosen)
        on_gpu = self.meta.get("device") == "cuda"
        self._ranks = [_Rank(Program(cost, holds_steps=on_gpu)) for _ in range(world_size)]
        self._count = 0
        self._spans: list[Array] = []
        self._ops: list[Array] = []  # of each span its op
        self._held: list[Array] = []
        self._known: set[int] = set()

    # ---- in -----------------------------------------------------------------------------------------------

    def wants(self, rank: int) -> int:
        """The first op of a rank that is needed (again) from `feed`."""
        return self._ranks[rank].program.count

    def feed(
        self,
        rank: int,
        ops: Array,
        names: list[str],
        memory: Array | None = None,
        *,
        first: int = 0,
    ) -> None:
        """Give a rank's records, as far as there are any.

        Ops that were open are looked at again, so give either all records each time, or those from `wants(rank)` on.

        Args:
            rank: whose.
            ops: `OP` records in program order, the rank's op number `first` being the first of them.
            names: all the strings that this rank's ops refer to.
            memory: new `MEMORY` records: each is given once.
            first: the number of `ops[0]`.
        """
        this = self._ranks[rank]
        this.program.feed(ops, first)
        if len(names) > len(this.lines):
            new = [self._number(name) for name in names[len(this.lines) :]]
            this.lines = np.concatenate([this.lines, np.array(new, np.int32)])
        if memory is not None and len(memory):
            this.memory = np.concatenate([this.memory, memory])

    def _number(self, name: str) -> int:
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self.names)
            self.names.append(name)
        return number

    def _named(self, rank: _Rank, lines: Array) -> Array:
        """The replay's numbers of a rank's names; "?" for what it was killed before it wrote."""
        if len(lines) and int(lines.max()) >= len(rank.lines):
            known = np.append(rank.lines, np.int32(self._number("?")))
            return known[np.minimum(lines, len(rank.lines))]
        return rank.lines[lines]

    # ---- out ----------------------------------------------------------------------------------------------

    def advance(self) -> Array:
        """Replay as far as the records go; returns the spans that are new, (n,) of `SPAN`.

        Their `cause` counts the rows of all that was returned so far. Ranks are mixed.
        """
        return self._step(final=False)

    def finish(self) -> Array:
        """Replay what is left, no more records being to come; returns the spans that are new."""
        spans = self._step(final=True)
        self._note_what_is_left()
        return spans

    def timeline(self) -> Timeline:
        """Everything so far."""
        spans = np.concatenate([np.zeros(0, SPAN), *self._spans])
        ops = np.concatenate([np.zeros(0, np.int64), *self._ops])
        order = np.lexsort((ops, spans["start"], spans["rank"]))
        row = np.empty_like(order)
        row[order] = np.arange(len(order))
        spans = spans[order]
        caused = spans["cause"] >= 0
        spans["cause"][caused] = row[spans["cause"][caused]]
        held = np.concatenate([np.zeros(0, HELD), *self._held])
        held = held[np.argsort(held["rank"], kind="stable")]
        return Timeline(
            spans, list(self.names), held, len(self._ranks), "virtual", dict(self.meta), list(self.notes)
        )

    # ---- the phases ---------------------------------------------------------------------------------------

    def _step(self, final: bool) -> Array:
        for this in self._ranks:
            self._take(this, final)
        run = list(range(len(self._ranks)))
        while True:
            for rank in run:
                self._run(rank)
            settled = self._network.serve(inf if final else self._horizon())
            if settled is None:
                break
            run = self._settle(settled)
        new = [self._place(rank, this, final) for rank, this in enumerate(self._ranks)]
        for rank, this in enumerate(self._ranks):
            placed = this.memory["op"] < this.reached
            self._held.append(this.held.place(rank, this.program, this.memory[placed]))
            this.memory = this.memory[~placed]
        return np.concatenate([np.zeros(0, SPAN), *new])

    def _take(self, this: _Rank, final: bool) -> None:
        """Put new records on the work axis, and list what has to be done one by one."""
        taken = this.program.take(final)
        del this.controls[: this.at]
        this.at = 0
        ops = this.program.ops[taken]
        kind = ops["kind"]
        one_by_one = (kind >= _WAIT) & (kind < _HOST)
        index = np.flatnonzero(one_by_one)
        chosen = ops[index]
        groups = self._named(this, chosen["group"])
        for group in set(groups.tolist()) - self._known:
            self._network.know(group, self.names[group])
            self._known.add(group)
        this.controls += zip(
            (index + taken.start).tolist(),
            chosen["kind"].tolist(),
            this.program.work[taken][index].tolist(),
            groups.tolist(),
            chosen["number"].tolist(),
            chosen["ref"].tolist(),
            chosen["bytes"].tolist(),
            strict=True,
        )
        others = np.flatnonzero(~one_by_one) + taken.start
        this.unplaced = np.concatenate([this.unplaced, others])

    def _run(self, rank: int) -> None:
        """Go through a rank's communication and waits, until one has to wait for something unserved."""
        this = self._ranks[rank]
        controls, at, pauses = this.controls, this.at, this.program.pauses
        pending, finished, settled, waited = this.pending, this.finished, this.settled, this.waited
        ask = self._network.ask
        _, time, before = pauses[-1]
        while at < len(controls):
            op, kind, work, group, number, ref, nbytes = controls[at]
            now = time + (work - before)
            if kind != _WAIT:
                known = ask(rank, op, kind, group, number, nbytes, now)
                if known is None:
                    pending.add(op)
                else:
                    finished[op] = known[3]
                    settled.append(known)
            elif ref in pending:
                this.waits_for = ref
                break
            else:
                end = finished.get(ref, now)
                if end > now:
                    pauses.append((op, end, work))
                    time, before = end, work
                else:
                    end = now
                waited.append((op, now, end, ref))
            at += 1
        this.at = at

    def _settle(self, settled: list[Settled]) -> list[int]:
        """Communication was served: whoever waits for it can go on."""
        run = []
        for one in settled:
            rank, op, _, end, _ = one
            this = self._ranks[rank]
            this.pending.discard(op)
            this.finished[op] = end
            this.settled.append(one)
            if this.waits_for == op:
                this.waits_for = -1
                run.append(rank)
        return run

    def _horizon(self) -> float:
        """The earliest time at which a rank whose records are used up may ask for something."""
        return min((r.program.time for r in self._ranks if r.at == len(r.controls)), default=inf)

    def _place(self, rank: int, this: _Rank, final: bool) -> Array:
        """Make spans of what has both its times."""
        program = this.program
        reached = this.reached
        close = program.close[this.unplaced]
        whole = close <= reached
        if final:
            whole &= program.ops["end"][this.unplaced] != 0  # a step that was cut short is none
        index = this.unplaced[whole]
        this.unplaced = this.unplaced[~whole]
        start = program.clock(program.work[index], index)
        is_step = program.ops["kind"][index] == _STEP
        until = np.minimum(close[whole], program.count - 1)
        after = np.where(close[whole] < program.count, program.work[until], program.total)
        done = np.where(is_step, after, program.done[index])
        end = program.clock(done, close[whole])
        waited = np.array(this.waited).reshape(-1, 4)
        settled = np.array(this.settled).reshape(-1, 5)
        this.waited.clear()
        this.settled.clear()
        ops = np.concatenate([index, waited[:, 0], settled[:, 1]]).astype(np.int64)
        spans = self._spans_of(rank, this, ops)
        spans["start"] = np.concatenate([start, waited[:, 1], settled[:, 2]])
        spans["end"] = np.concatenate([end, waited[:, 2], settled[:, 3]])
        spans["issued"] = np.concatenate([start, waited[:, 1], settled[:, 4]])
        rows = np.full(max(program.count, len(this.rows)), -1)
        rows[: len(this.rows)] = this.rows
        rows[ops] = self._count + np.arange(len(ops))
        this.rows = rows
        is_wait = slice(len(index), len(index) + len(waited))
        reference = waited[:, 3].astype(np.int64)
        spans["cause"] = -1
        spans["cause"][is_wait] = np.where(reference >= 0, rows[reference], -1)
        self._count += len(spans)
        self._spans.append(spans)
        self._ops.append(ops)
        return spans

    def _spans_of(self, rank: int, this: _Rank, ops: Array) -> Array:
        """Spans of these ops, but for their times."""
        records = this.program.ops[ops]
        spans = np.zeros(len(ops), SPAN)
        for column in ("lane", "kind", "depth", "stage", "microbatch", "step", "bytes", "flops", "peer"):
            spans[column] = records[column]
        spans["rank"] = rank
        spans["name"] = self._named(this, records["name"])
        spans["group"] = self._named(this, records["group"])
        return spans

    def _note_what_is_left(self) -> None:
        """Say in words what has no times, and why."""
        for rank, this in enumerate(self._ranks):
            program = this.program
            behind = program.count - this.reached + program.left_out
            if behind:
                self.notes.append(
                    f"Rank {rank}: {behind:,} ops have no time here, since it was stopped before they ended."
                )
