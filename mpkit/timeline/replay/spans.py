"""What a replay returns: operations with their times (spans), memory, samples of GPUs and parts of all-to-alls."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpkit.common.arrays import Array
from mpkit.common.safe_text import visible
from mpkit.timeline.replay.program import RankProgram
from mpkit.trace import CATEGORIES, SAMPLE, Kind, Lane, RankTrace, Trace

SPAN = np.dtype(
    [
        ("rank", "<i4"),
        ("lane", "u1"),  # trace.Lane
        ("kind", "u1"),  # trace.Kind
        ("depth", "u1"),  # 0: an action; 1 and more: a layer inside it
        ("stage", "<i4"),
        ("microbatch", "<i4"),
        ("step", "<i4"),
        ("name", "<i4"),  # index into Timeline.names
        ("start", "<f8"),  # seconds
        ("end", "<f8"),
        ("bytes", "<i8"),
        ("flops", "<f8"),
        ("peer", "<i4"),
        ("group", "<i4"),  # index into Timeline.names
        ("cause", "<i4"),  # WAIT: the row of the span whose end it waited for, -1 if unknown
        ("issued", "<f8"),  # communication: when this rank issued it (start: when it really began)
    ]
)

HELD = np.dtype(
    [
        ("time", "<f8"),  # seconds
        ("rank", "<i4"),
        ("category", "<i4"),  # index into trace.CATEGORIES
        ("total", "<i8"),  # bytes held in this category from this time on
    ]
)

DEVICE_SAMPLE = np.dtype(
    [("time", "<f8"), ("rank", "<i4"), *((name, "<f8") for name in (SAMPLE.names or ())[1:])]  # time: seconds
)


PART_SENT = np.dtype(
    [
        ("rank", "<i4"),  # who sent it
        ("step", "<i4"),
        ("group", "<i4"),  # index into Timeline.names
        ("member", "<i4"),  # to whom: a place in the group
        ("bytes", "<i8"),
    ]
)


@dataclass(repr=False)
class ReplayResult:
    """The result of a replay; `mpkit.timeline.timeline.Timeline` explains its fields."""

    spans: Array
    names: list[str]
    held: Array
    world_size: int
    clock: str
    meta: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    so_far: str = ""
    device_samples: Array = field(default_factory=lambda: np.zeros(0, DEVICE_SAMPLE))
    sent_parts: Array = field(default_factory=lambda: np.zeros(0, PART_SENT))

    def rank_number(self, rank: int) -> str:
        """Return the rank's number in its program ("?" if unknown), as an imported trace may be of rank 3 alone."""
        numbers = self.meta.get("imported", {}).get("ranks", [])
        return str(rank) if rank >= len(numbers) else "?" if numbers[rank] is None else str(numbers[rank])


class Names:
    """The strings of a timeline, all of them `visible`, with their numbers; the empty string is 0."""

    def __init__(self) -> None:
        self.all = [""]
        self._numbers = {"": 0}

    def number(self, name: str) -> int:
        """Return the number of a string, after adding it if it is new."""
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self.all)
            self.all.append(visible(name))
        return number


class NameLines:
    """One rank's lines of names, as numbers of the timeline's names."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._numbers = np.zeros(0, np.int32)

    def extend(self, lines: Sequence[str]) -> None:
        """Add what is new in `lines`, which holds all of them."""
        if len(lines) > len(self._numbers):
            new = [self._names.number(name) for name in lines[len(self._numbers) :]]
            self._numbers = np.concatenate([self._numbers, np.array(new, np.int32)])

    def __getitem__(self, lines: Array) -> Array:
        """Return the numbers of these lines; the number of "?" for lines that the rank was killed before writing."""
        if len(lines) and int(lines.max()) >= len(self._numbers):
            known = np.append(self._numbers, np.int32(self._names.number("?")))
            return known[np.minimum(lines, len(self._numbers))]
        return self._numbers[lines]


def spans_of(rank: int, records: Array, lines: NameLines) -> Array:
    """Return (n,) of `SPAN` for (n,) of `OP`, without start, end, issued and cause."""
    spans = np.zeros(len(records), SPAN)
    for column in ("lane", "kind", "depth", "stage", "microbatch", "step", "bytes", "flops", "peer"):
        spans[column] = records[column]
    spans["rank"] = rank
    spans["name"] = lines[records["name"]]
    spans["group"] = lines[records["group"]]
    spans["cause"] = -1
    return spans


def read_sent_parts(rank: int, parts: Array, ops: Array, lines: NameLines) -> Array:
    """Return `PART_SENT` for `SENT_PART`, without those of ops that are not complete."""
    parts = parts[parts["op"] < len(ops)]
    parts = parts[ops["end"][parts["op"]] != 0]
    of = ops[parts["op"]]
    found = np.zeros(len(parts), PART_SENT)
    found["rank"], found["step"], found["group"] = rank, of["step"], lines[of["group"]]
    found["member"], found["bytes"] = parts["member"], parts["bytes"]
    return found


def placed_samples(rank: int, samples: Array, ops: Array, spans: Array) -> Array:
    """Return (n,) of `DEVICE_SAMPLE` on the clock of a replay: between the same moments of work as on the wall clock.

    A sample before the rank's first operation, or after its last one so far, has no place and is left out. `ops` has
    the operations on the wall clock, `spans` the same ones in the replay.
    """
    works = (ops["lane"] == Lane.COMPUTE) & (ops["end"] > 0)
    ops, spans = ops[works], spans[works]
    wall = np.concatenate([ops["start"], ops["end"]])
    order = np.argsort(wall, kind="stable")
    wall = wall[order]
    clock = np.maximum.accumulate(np.concatenate([spans["start"], spans["end"]])[order])
    if not len(wall) or not len(samples):
        return np.zeros(0, DEVICE_SAMPLE)
    there = samples[(samples["time"] >= wall[0]) & (samples["time"] <= wall[-1])]
    return _sample_at(rank, there, np.interp(there["time"] - wall[0], wall - wall[0], clock))


def _sample_at(rank: int, samples: Array, time: Array) -> Array:
    placed = np.zeros(len(samples), DEVICE_SAMPLE)
    for name in (DEVICE_SAMPLE.names or ())[2:]:
        placed[name] = samples[name]
    placed["time"], placed["rank"] = time, rank
    return placed[time >= 0]


class HeldMemory:
    """What a rank holds in each category over time.

    A change belongs to the op that began last before it, and happens within that op or between it and the next one, as
    on the wall clock.
    """

    def __init__(self) -> None:
        self._totals = np.zeros(len(CATEGORIES), np.int64)
        self._time = 0.0

    def place(self, rank: int, program: RankProgram, memory: Array) -> Array:
        """Return (n,) of `HELD` for (n,) of `MEMORY`, the next changes."""
        held = np.zeros(len(memory), HELD)
        if not len(memory):
            return held
        time = np.maximum.accumulate(np.maximum(self._times_of(program, memory), self._time))
        held["time"], held["rank"], held["category"] = time, rank, memory["category"]
        for category in range(len(CATEGORIES)):
            mine = memory["category"] == category
            totals = self._totals[category] + np.cumsum(memory["delta"][mine])
            held["total"][mine] = totals
            if len(totals):
                self._totals[category] = totals[-1]
        self._time = float(time[-1])
        return held

    @staticmethod
    def _times_of(program: RankProgram, memory: Array) -> Array:
        if not program.count:
            return np.zeros(len(memory))
        ops, work, done = program.ops, program.work, program.done
        op = memory["op"].astype(np.int64) - 1  # -1: before the first op, and so before any work
        last = np.clip(op, 0, program.count - 1)
        wall = memory["time"]
        begin, end = ops["start"][last], ops["end"][last]
        following = np.minimum(last + 1, program.count - 1)
        has_next = last + 1 < program.count
        next_begin = np.where(has_next, ops["start"][following], end)
        next_work = np.where(has_next, work[following], done[last])
        # Communication and steps overlap with what follows; nothing is "after" them.
        kind = ops["kind"][last]
        has_end = (kind < Kind.SEND) | ((kind >= Kind.COPY_TO_DEVICE) & (kind < Kind.STEP))
        within = has_end & (wall < end)
        # Either between the op's start and its end, or between its end and the next op's start.
        after = has_end & ~within
        since, until = np.where(after, end, begin), np.where(within, end, next_begin)
        share = np.clip((wall - since) / np.maximum(until - since, 1), 0.0, 1.0)
        low = np.where(after, done[last], work[last])
        high = np.where(within, done[last], next_work)
        at = np.where(op < 0, 0.0, low + share * (high - low))
        # A wait delays what comes after it; what happened while waiting is put where the wait begins.
        waits = np.where(within & (kind == Kind.WAIT), last, last + 1)
        return program.clock(at, np.where(op < 0, 0, waits))


# ---- on the wall clock


def as_measured(trace: Trace) -> ReplayResult:
    """Return a trace as it was measured, with time 0 where the first op began. Ranks of one machine share a clock.

    Communication lasts from when it was issued until it was seen to be complete: longer than its bytes were under
    way, by up to as long as the other end was late.
    """
    names, notes = Names(), []
    spans, held, sent = [np.zeros(0, SPAN)], [np.zeros(0, HELD)], [np.zeros(0, PART_SENT)]
    samples = [np.zeros(0, DEVICE_SAMPLE)]
    origin = min((int(rank.ops["start"].min()) for rank in trace.ranks if len(rank.ops)), default=0)
    for number, rank in enumerate(trace.ranks):
        if still_open := int((rank.ops["end"] == 0).sum()):
            are = "op open, which is" if still_open == 1 else "ops open, which are"
            notes.append(f"Rank {number} left {still_open:,} {are} not shown.")
        lines = NameLines(names)
        lines.extend(rank.names)
        spans.append(_spans(number, rank, lines, origin, row=sum(map(len, spans))))
        held.append(_held_changes(number, rank, origin))
        sent.append(read_sent_parts(number, rank.sent_parts, rank.ops, lines))
        # Samples before the first op are left out.
        samples.append(_sample_at(number, rank.samples, (rank.samples["time"] - origin) * 1e-9))
    return ReplayResult(
        np.concatenate(spans), names.all, np.concatenate(held), trace.world_size, "measured", dict(trace.meta), notes,
        device_samples=np.concatenate(samples), sent_parts=np.concatenate(sent),
    )  # fmt: skip


def _spans(number: int, rank: RankTrace, lines: NameLines, origin: int, row: int) -> Array:
    """Return a rank's spans by start; `row` is the timeline's row of the first one."""
    whole = np.flatnonzero(rank.ops["end"] != 0)
    order = whole[np.argsort(rank.ops["start"][whole], kind="stable")]
    ops = rank.ops[order]
    spans = spans_of(number, ops, lines)
    spans["start"] = spans["issued"] = (ops["start"] - origin) * 1e-9
    spans["end"] = (np.maximum(ops["end"], ops["start"]) - origin) * 1e-9
    rows = np.full(len(rank.ops) + 1, -1)
    rows[order] = row + np.arange(len(ops))
    refers = (ops["kind"] == Kind.WAIT) & (ops["ref"] >= 0) & (ops["ref"] < len(rank.ops))
    spans["cause"] = rows[np.where(refers, ops["ref"], -1)]
    return spans


def _held_changes(number: int, rank: RankTrace, origin: int) -> Array:
    changes = np.zeros(len(rank.memory), HELD)
    changes["time"] = (rank.memory["time"] - origin) * 1e-9
    changes["rank"], changes["category"] = number, rank.memory["category"]
    for category in range(len(CATEGORIES)):
        mine = rank.memory["category"] == category
        changes["total"][mine] = np.cumsum(rank.memory["delta"][mine])
    return changes
