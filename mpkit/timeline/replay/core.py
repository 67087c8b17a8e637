"""Replay: a Trace on the virtual clock, as if each rank had a device of its own.

The phases, repeated while records arrive:

    take     put each rank's new records on the axis of its own work (`program`)
    run      each rank issues its communication in order, until it waits for something (`rank`)
    serve    when all ranks wait, the links serve what became ready first (`network`), and the waiting ranks go on
    place    every op with both a start and an end becomes a span

A rank that runs ahead never takes a link from one that is behind: nothing is served at a time at which a rank whose
records have not arrived yet may still issue something. So the spans do not depend on how the records arrive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit.devices.hardware import Hardware
from mpkit.timeline.replay.costs import machine_of
from mpkit.timeline.replay.memory import placed_samples, read_sent_parts
from mpkit.timeline.replay.network import ReplayNetwork
from mpkit.timeline.replay.program import RankProgram
from mpkit.timeline.replay.rank import RankReplay, waiting_ranks
from mpkit.timeline.replay.spans import DEVICE_SAMPLE, HELD, PART_SENT, SPAN, Names, ReplayResult
from mpkit.trace import TIMED_BY_EVENTS, RankTrace

Array = npt.NDArray[Any]
NEVER = (inf, 0, 0)


class Replay:
    """A replay that keeps up with its run: feed it records, and take the spans that follow from them.

    Args:
        world_size: the number of ranks.
        hardware: the hardware to replay on, as for `replay`.
        meta: the meta of the Trace.

    Attributes:
        notes: what a reader should know about the times.

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
        self,
        world_size: int,
        hardware: Hardware | str | None = None,
        *,
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        machine = machine_of(hardware, meta or {}, world_size)
        self.notes = machine.notes
        self._meta = {**(meta or {}), "hardware": machine.hardware.name}
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
    def ranks(self) -> Sequence[RankReplay]:
        """The ranks' sides of it."""
        return self._ranks

    @property
    def names(self) -> list[str]:
        """The strings that spans refer to; the list grows."""
        return self._names.all

    # ---- in -----------------------------------------------------------------------------------------------

    def feed(self, rank: int, so_far: RankTrace) -> None:
        """Give the replay all records of a rank so far, those of earlier calls among them.

        An open communication overlaps with what follows it; any other open op stops its rank there until it has ended.
        """
        this = self._ranks[rank]
        self._network.know_parts(rank, so_far.sent_parts[len(this.known.sent_parts) :])
        this.memory = np.concatenate([this.memory, so_far.memory[len(this.known.memory) :]])
        this.program.feed(so_far.ops)
        this.lines.extend(so_far.names)
        this.known = so_far

    # ---- out ----------------------------------------------------------------------------------------------

    def advance(self) -> Array:
        """Replay as far as the records go, and return the new spans, (n,) of `SPAN`.

        Their `cause` counts the rows of all spans returned so far. They are in no particular order.
        """
        return self._go(final=False)

    def finish(self) -> Array:
        """Replay what is left, since no more records will arrive, and return the new spans."""
        spans = self._go(final=True)
        waiting = waiting_ranks(self._ranks)
        said = {each["rank"]: each["words"] for each in waiting}
        words = [(this.rank, said.get(this.rank) or this.stopped_within) for this in self._ranks]
        if unfinished := [f"rank {rank} {what}" for rank, what in words if what]:
            left = sum(
                this.program.count - this.first_untimed + len(this.program.left) + this.unserved_count
                for this in self._ranks
            )
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

    # ---- the phases ---------------------------------------------------------------------------------------

    def _go(self, final: bool) -> Array:
        for this in self._ranks:
            this.take(self._network, final)
        run = self._ranks
        while True:
            for this in run:
                this.run(self._network)
            settled = self._network.serve(NEVER if final else self._horizon())
            if settled is None:
                break
            run = [this for one in settled if (this := self._ranks[one[0]]).settle(one)]
        return self._place(final)

    def _horizon(self) -> tuple[float, int, int]:
        """Return the earliest point at which a rank whose records are used up may issue something."""
        return min((this.soonest for this in self._ranks if this.is_starved), default=NEVER)

    def _place(self, final: bool) -> Array:
        new = []
        for this in self._ranks:
            spans, ops = this.place(self._rows, final)
            self._rows += len(spans)
            self._ops.append(ops)
            new.append(spans)
            self._held.append(this.place_memory(final))
        self._spans += new
        return np.concatenate([np.zeros(0, SPAN), *new])
