"""Replay: a Trace on the virtual clock, as if each rank had a device of its own.

The phases, over and over while records come in:

    take     put each rank's new records on the axis of its own work (`program`)
    run      each rank asks for its communication as it comes to it, until it waits for something (`rank`)
    serve    when all ranks wait, the links serve what became ready first (`network`), and its waiters go on
    place    whatever has both its times becomes a span

A rank that runs ahead never takes a link from one that is behind: nothing is served at a time at which a rank whose
records have not come yet may still ask for something. So the spans do not depend on how the records come in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit.devices import Hardware
from mpkit.replay.costs import MEASURED, machine
from mpkit.replay.network import Network
from mpkit.replay.program import Program
from mpkit.replay.rank import RankReplay
from mpkit.replay.spans import Names
from mpkit.timeline import HELD, SPAN, Timeline

__all__ = ["Replay"]

Array = npt.NDArray[Any]
NEVER = (inf, 0, 0)


class Replay:
    """A replay that goes on while its run does: feed it records, and take the spans that follow from them.

    Args:
        world_size: how many ranks.
        hardware: what to replay on, as for `replay`.
        meta: the Trace's.

    Attributes:
        notes: what a reader should know of the times.

    >>> from mpkit.trace import OP, Kind
    >>> one = np.zeros(1, OP)
    >>> one["kind"], one["start"], one["end"], one["cpu"] = Kind.FORWARD, 1, 9, 3_000_000_000
    >>> live = Replay(world_size=1)
    >>> live.feed(0, one, [""])
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
        chosen, cost, self.notes = machine(hardware, meta or {}, world_size)
        self._meta = {**(meta or {}), "hardware": chosen.name}
        self._names = Names()
        self._network = Network(world_size, chosen)
        on_gpu = self._meta.get("device") == "cuda"
        self._ranks = [
            RankReplay(rank, Program(cost, holds_steps=on_gpu, measured=cost in MEASURED), self._names)
            for rank in range(world_size)
        ]
        self._rows = 0
        self._spans: list[Array] = [np.zeros(0, SPAN)]
        self._ops: list[Array] = [np.zeros(0, np.int64)]  # of each span its op
        self._held: list[Array] = [np.zeros(0, HELD)]

    @property
    def names(self) -> list[str]:
        """The strings that spans refer to; grows."""
        return self._names.all

    # ---- in -----------------------------------------------------------------------------------------------

    def wants(self, rank: int) -> int:
        """The first op of a rank that has to be in the next `feed`."""
        return self._ranks[rank].program.count

    def feed(
        self,
        rank: int,
        ops: Array,
        names: Sequence[str],
        memory: Array | None = None,
        *,
        first: int = 0,
    ) -> None:
        """Give a rank's records, as far as there are any.

        Ops that are open are looked at again: give all records each time, or those from `wants(rank)` on. An open
        communication goes on beside what follows it; any other op stops its rank there until it has ended.

        Args:
            rank: whose.
            ops: (n,) of `OP` in program order.
            names: all the strings that this rank's ops refer to.
            memory: (m,) of `MEMORY`, what is new: each change is given once.
            first: the number of `ops[0]` in the rank's program.

        Raises:
            ValueError: ops before `first` are missing.
        """
        this = self._ranks[rank]
        this.program.feed(ops, first)
        this.lines.extend(names)
        if memory is not None and len(memory):
            this.memory = np.concatenate([this.memory, memory])

    # ---- out ----------------------------------------------------------------------------------------------

    def advance(self) -> Array:
        """Replay as far as the records go; returns the spans that are new, (n,) of `SPAN`.

        Their `cause` counts the rows of all spans returned so far. They are in no order.
        """
        return self._go(final=False)

    def finish(self) -> Array:
        """Replay what is left, no more records being to come; returns the spans that are new."""
        spans = self._go(final=True)
        unfinished = [words for words in (this.unfinished() for this in self._ranks) if words]
        if unfinished:
            left = sum(
                this.program.count - this.reached + len(this.program.left) + this.unserved
                for this in self._ranks
            )
            self.notes.append(f"Not finished: {'; '.join(unfinished)}. {left:,} ops have no time here.")
        return spans

    def timeline(self) -> Timeline:
        """Everything so far."""
        spans, ops = np.concatenate(self._spans), np.concatenate(self._ops)
        order = np.lexsort((ops, spans["start"], spans["rank"]))
        row = np.full(len(order) + 1, -1)  # the last one is row -1: no cause
        row[order] = np.arange(len(order))
        spans = spans[order]
        spans["cause"] = row[spans["cause"]]
        held = np.concatenate(self._held)
        held = held[np.argsort(held["rank"], kind="stable")]
        ranks = len(self._ranks)
        return Timeline(spans, list(self.names), held, ranks, "virtual", dict(self._meta), list(self.notes))

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
        """The earliest that a rank whose records are used up may ask for something."""
        return min((this.soonest for this in self._ranks if this.starved), default=NEVER)

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
