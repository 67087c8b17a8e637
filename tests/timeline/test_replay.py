"""A replay puts each op where a device of its own, and a link of that latency and bandwidth, would."""

import heapq
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpkit.devices.hardware import Device, Hardware, Link
from mpkit.timeline.replay import Replay
from mpkit.timeline.timeline import Timeline
from mpkit.trace import MEMORY, OP, SENT_PART, Kind, RankTrace, Trace, lane_of

# Seconds are FLOPs here, and all figures are binary fractions: sums are exact, whatever their order.
UNIT = Device("one FLOP per second", {"float32": 1.0}, bandwidth=2.0**40, host=1.0)
LATENCY, BANDWIDTH = 0.25, 8.0
TOY = Hardware("toy", UNIT, Link("toy", LATENCY, BANDWIDTH), per_node=64)


@dataclass
class Rank:
    """Writes what a rank would record."""

    ops: list[dict[str, Any]] = field(default_factory=list)
    memory: list[tuple[int, int, int, int]] = field(default_factory=list)  # time, op, category, delta
    names: list[str] = field(default_factory=lambda: [""])
    parts: list[tuple[int, int, int]] = field(default_factory=list)  # op, member, bytes
    wall: int = 1

    def op(self, kind: Kind, *, wall: int = 10, group: str = "", **columns: Any) -> int:
        if group not in self.names:
            self.names.append(group)
        start, self.wall = self.wall, self.wall + wall
        where = {"kind": kind, "lane": lane_of(kind), "group": self.names.index(group), "start": start}
        blank = {"stage": -1, "microbatch": -1, "step": -1, "number": -1, "peer": -1, "ref": -1}
        self.ops.append({**blank, **where, "end": self.wall, **columns})
        return len(self.ops) - 1

    def compute(self, seconds: float, kind: Kind = Kind.FORWARD, **columns: Any) -> int:
        return self.op(kind, flops=seconds, **columns)

    def all_to_all(self, group: str, sends: list[int], uneven: bool = True) -> None:
        """Send so many bytes to each member, and wait for what comes."""
        op = self.op(Kind.ALL_TO_ALL, group=group, number=len(self.ops), bytes=sum(sends))
        self.parts += [(op, member, nbytes) for member, nbytes in enumerate(sends) if nbytes and uneven]
        self.wait(op)

    def wait(self, ref: int, **columns: Any) -> int:
        return self.op(Kind.WAIT, ref=ref, **columns)

    def trace(self) -> RankTrace:
        ops = np.zeros(len(self.ops), OP)
        for row, columns in enumerate(self.ops):
            for column, value in columns.items():
                ops[column][row] = value
        memory = np.zeros(len(self.memory), MEMORY)
        for row, (time, op, category, delta) in enumerate(self.memory):
            memory[row] = (time, op, category, b"", delta)
        return RankTrace(ops, memory, self.names, sent_parts=np.array(self.parts, SENT_PART))


def play(*ranks: Rank, hardware: Hardware = TOY, **meta: Any) -> Timeline:
    return Timeline.of(Trace([rank.trace() for rank in ranks], meta), hardware)


def times(timeline: Timeline, rank: int, *kinds: Kind) -> list[tuple[float, float]]:
    spans = timeline.spans[timeline.spans["rank"] == rank]
    if kinds:
        spans = spans[np.isin(spans["kind"], kinds)]
    return list(zip(spans["start"].tolist(), spans["end"].tolist(), strict=True))


NODES = Hardware(
    "two nodes", UNIT, Link("toy", LATENCY, BANDWIDTH), Link("network", 0.5, 2.0), per_node=2, nodes=2
)


@pytest.mark.parametrize(("hardware", "sends", "seconds"), [
    # Two hops; rank 1 receives 16 + 32 bytes, more than anyone sends. What rank 2 keeps takes no time.
    (TOY, [[8, 16, 8], [8, 8, 0], [0, 32, 80]], 2 * LATENCY + 48 / BANDWIDTH),
    (TOY, [[0, 40, 8], [8, 8, 0], [0, 8, 8]], 2 * LATENCY + 48 / BANDWIDTH),  # rank 0 sends most
    (TOY, [[0, 0, 0], [8, 8, 8], [0, 0, 0]], 2 * LATENCY + 16 / BANDWIDTH),  # two ranks have nothing
    (TOY, [[5, 0, 0], [0, 5, 0], [0, 0, 5]], 2 * LATENCY),  # nothing travels
    # Three hops, two of them between nodes, of which rank 3 receives 6 bytes; inside of one, rank 0 sends 16.
    (NODES, [[0, 16, 0, 4], [0, 0, 0, 2], [1, 0, 0, 0], [0, 0, 8, 0]], LATENCY + 2 * 0.5 + 6 / 2.0),
    (NODES, [[0, 64, 0, 4], [0, 0, 0, 2], [1, 0, 0, 0], [0, 0, 8, 0]], LATENCY + 2 * 0.5 + 64 / BANDWIDTH),
    (NODES, [[4, 4, 4, 4]] * 4, LATENCY + 2 * 0.5 + 8 / 2.0),
])  # fmt: skip
def test_an_uneven_all_to_all_takes_as_long_as_its_busiest_rank(
    hardware: Hardware, sends: list[list[int]], seconds: float
) -> None:
    ranks, group = [Rank() for _ in sends], ",".join(map(str, range(len(sends))))
    for rank, parts in zip(ranks, sends, strict=True):
        rank.all_to_all(group, parts)
    assert times(play(*ranks, hardware=hardware), 0, Kind.ALL_TO_ALL) == [(0.0, seconds)]


@pytest.mark.parametrize(("kind", "seconds"), [
    # 3 ranks, 24 bytes at 8 bytes per second: 3 s on a wire of factor 1, and 0.25 s per hop
    (Kind.ALL_REDUCE, 4 / 3 * 3 + 4 * 0.25),
    (Kind.ALL_GATHER, 2 / 3 * 3 + 2 * 0.25),
    (Kind.REDUCE_SCATTER, 2 / 3 * 3 + 2 * 0.25),
    (Kind.ALL_TO_ALL, 2 / 3 * 3 + 2 * 0.25),
    (Kind.BROADCAST, 3 + 2 * 0.25),
    (Kind.REDUCE, 3 + 2 * 0.25),
    (Kind.BARRIER, 4 * 0.25),
])  # fmt: skip
def test_a_collective_begins_when_its_last_member_has_come(kind: Kind, seconds: float) -> None:
    ranks = [Rank(), Rank(), Rank()]
    for number, rank in enumerate(ranks):
        rank.compute(1.0 + number)
        rank.wait(rank.op(kind, group="0,1,2", number=0, bytes=0 if kind == Kind.BARRIER else 24))
        rank.compute(1.0)
    timeline = play(*ranks)
    end = 3.0 + seconds
    for number in range(3):
        assert times(timeline, number, kind) == [(3.0, pytest.approx(end))]
        assert times(timeline, number, Kind.WAIT) == [(1.0 + number, pytest.approx(end))]
        assert times(timeline, number, Kind.FORWARD)[1] == (pytest.approx(end), pytest.approx(end + 1))


def test_layers_share_their_actions_time_and_waits_within_it_come_on_top() -> None:
    ranks = [Rank(), Rank()]
    for number, rank in enumerate(ranks):
        rank.compute(4.0 if number == 0 else 8.0)  # rank 1 comes to the all-reduce 4 s later
        whole = rank.compute(8.0, wall=100)
        rank.wall -= 100
        begin = rank.wall
        rank.op(Kind.FORWARD, wall=40, depth=1)
        # The thread was blocked for 20 of the 100: no work of the action's.
        reduce = rank.op(Kind.ALL_REDUCE, wall=0, group="0,1", number=0, bytes=8)
        rank.wait(reduce, wall=20, depth=1)
        rank.op(Kind.FORWARD, wall=40, depth=1)
        assert rank.wall == begin + 100 == rank.ops[whole]["end"]
        rank.compute(1.0)
    timeline = play(*ranks)
    # 4 s of the action on either side of the all-reduce, which takes 2 hops and 1 s and begins at 12.
    assert times(timeline, 1, Kind.ALL_REDUCE) == [(12.0, 13.5)]
    for number, (first, whole) in enumerate([((4.0, 8.0), (4.0, 17.5)), ((8.0, 12.0), (8.0, 17.5))]):
        spans = timeline.spans[(timeline.spans["rank"] == number) & (timeline.spans["kind"] == Kind.FORWARD)]
        actions, layers = spans[spans["depth"] == 0], spans[spans["depth"] == 1]
        assert (float(actions["start"][1]), float(actions["end"][1])) == whole
        assert (float(layers["start"][0]), float(layers["end"][0])) == first
        assert (float(layers["start"][1]), float(layers["end"][1])) == (13.5, 17.5)
        assert (float(actions["start"][2]), float(actions["end"][2])) == (17.5, 18.5)


def test_on_other_hardware_it_is_the_roofline() -> None:
    device = Device("toy", {"float32": 4.0, "bfloat16": 16.0}, bandwidth=2.0)
    toy = Hardware("toy", device, TOY.link)
    rank = Rank()
    rank.compute(8.0)
    rank.compute(8.0, bytes=10)
    rank.op(Kind.OPTIMIZER, bytes=6)
    assert times(play(rank, hardware=toy), 0) == [(0.0, 2.0), (2.0, 7.0), (7.0, 10.0)]
    assert times(play(rank, hardware=toy, dtype="bfloat16"), 0)[0] == (0.0, 0.5)


def test_a_rank_killed_in_an_op_leaves_the_others_their_times_and_a_note() -> None:
    ranks = [Rank(), Rank()]
    for number, rank in enumerate(ranks):
        rank.op(Kind.STEP, wall=0, step=0, end=0)
        rank.compute(2.0, step=0, stage=number, microbatch=0)
    ranks[0].op(Kind.SEND, group="0>1#F0", number=0, peer=1, bytes=8, step=0, end=0)
    ranks[0].wait(ranks[0].op(Kind.RECV, group="1>0#B0", number=0, peer=1, step=0, end=0), step=0, end=0)
    ranks[1].compute(1.0, kind=Kind.BACKWARD, step=0, stage=1, microbatch=3, end=0)
    timeline = play(*ranks)
    assert times(timeline, 0, Kind.FORWARD) == times(timeline, 1, Kind.FORWARD) == [(0.0, 2.0)]
    assert times(timeline, 0, Kind.SEND) == [(2.0, 3.0)]
    assert timeline.steps == []  # nobody completed it
    assert "rank 1 is in backward of stage 1 micro-batch 3 (step 0)" in timeline.notes[-1]
    assert "rank 0 waits for rank 1 (recv)" in timeline.notes[-1]
    assert timeline.step_time == 3.0


def test_measured_is_the_wall_clock() -> None:
    rank, other = Rank(wall=1_000_000_001), Rank(wall=2_000_000_001)
    rank.compute(9.0, wall=500_000_000)
    rank.wait(rank.op(Kind.RECV, wall=0, end=2_000_000_001), wall=500_000_000)
    rank.compute(1.0, end=0)
    other.compute(1.0, wall=250_000_000)
    rank.memory.append((1_250_000_001, 1, 3, 64))
    trace = Trace([rank.trace(), other.trace()])
    timeline = Timeline.of(trace, clock="measured")
    assert timeline.clock == "measured"
    assert times(timeline, 0, Kind.FORWARD) == [(0.0, 0.5)]
    assert times(timeline, 1) == [(1.0, 1.25)]
    assert timeline.spans["cause"].tolist() == [-1, -1, 1, -1]
    assert timeline.held["time"].tolist() == [0.25]
    assert timeline.notes == ["Rank 0 left 1 op open, which is not shown."]


# What one rank, or several, do next, in an order that any run could have: whoever waits, waits for what all members
# have asked for before. So no program waits for ever.
SECONDS = st.integers(0, 12).map(lambda n: n / 4)
BYTES = st.sampled_from([0, 1, 4, 8, 64])


@st.composite
def programs(draw: st.DrawFn, *, collectives: bool = True) -> list[Rank]:
    size = draw(st.integers(1, 5))
    ranks = [Rank() for _ in range(size)]
    pending: list[list[int]] = [[] for _ in range(size)]
    numbers: dict[str, int] = {}
    for _ in range(draw(st.integers(0, 40))):
        what = draw(st.sampled_from(["compute", "compute", "message", "collective", "wait", "wait"]))
        rank = draw(st.integers(0, size - 1))
        if what == "compute":
            ranks[rank].compute(draw(SECONDS))
        elif what == "wait" and pending[rank]:
            index = draw(st.integers(0, len(pending[rank]) - 1))
            ranks[rank].wait(pending[rank].pop(index))
        elif what == "message" and size > 1:
            to = draw(st.integers(0, size - 2))
            to += to >= rank
            group = f"{rank}>{to}#{draw(st.sampled_from('FB'))}"
            number = numbers[group] = numbers.get(group, -1) + 1
            nbytes = draw(BYTES)
            ends = [(Kind.SEND, rank), (Kind.RECV, to)]
            for kind, end in draw(st.permutations(ends)):
                pending[end].append(ranks[end].op(kind, group=group, number=number, bytes=nbytes))
        elif what == "collective" and collectives:
            members = sorted(draw(st.sets(st.integers(0, size - 1), min_size=1)))
            group = ",".join(map(str, members))
            number = numbers[group] = numbers.get(group, -1) + 1
            kind = draw(st.sampled_from([Kind.ALL_GATHER, Kind.ALL_REDUCE, Kind.BROADCAST]))
            nbytes = draw(BYTES) * 60  # 60: whatever the number of members, a part is whole
            for end in members:
                pending[end].append(ranks[end].op(kind, group=group, number=number, bytes=nbytes))
    return ranks


def reference(ranks: list[Rank], hardware: Hardware) -> dict[tuple[int, int], tuple[float, float]]:
    """The same rules, done one event after the other in order of time."""
    asked: dict[tuple[str, int], list[tuple[int, int]]] = {}
    placed: dict[tuple[int, int], tuple[float, float]] = {}
    out, into = [0.0] * len(ranks), [0.0] * len(ranks)
    parked: dict[tuple[int, int], tuple[float, int, int]] = {}
    messages: dict[tuple[str, int], tuple[float, float]] = {}
    events = [(0.0, rank, 0) for rank in range(len(ranks))]

    def finish(rank: int, op: int, start: float, end: float) -> None:
        placed[rank, op] = (start, end)
        if (rank, op) in parked:
            since, who, index = parked.pop((rank, op))
            placed[who, index] = (since, max(since, end))
            heapq.heappush(events, (max(since, end), who, index + 1))

    while events:
        now, rank, index = heapq.heappop(events)
        if index == len(ranks[rank].ops):
            continue
        op = ranks[rank].ops[index]
        kind = op["kind"]
        if kind == Kind.FORWARD:
            placed[rank, index] = (now, now + op["flops"])
            heapq.heappush(events, (now + op["flops"], rank, index + 1))
            continue
        if kind == Kind.WAIT:
            done = placed.get((rank, op["ref"]))
            if done is None:
                parked[rank, op["ref"]] = (now, rank, index)
            else:
                placed[rank, index] = (now, max(now, done[1]))
                heapq.heappush(events, (max(now, done[1]), rank, index + 1))
            continue
        heapq.heappush(events, (now, rank, index + 1))
        group = ranks[rank].names[op["group"]]
        key = (group, op["number"])
        if "#" in group:
            source, target = map(int, group.split("#")[0].split(">"))
            if kind == Kind.SEND:
                wire = op["bytes"] / hardware.link.bandwidth
                start = max(now, out[source], into[target] - hardware.link.latency)
                out[source], into[target] = start + wire, start + hardware.link.latency + wire
                messages[key] = (start, into[target])
                finish(rank, index, start, out[source])
                for end in asked.pop(key, []):
                    finish(*end, *messages[key])
            elif key in messages:
                finish(rank, index, *messages[key])
            else:
                asked.setdefault(key, []).append((rank, index))
            continue
        members = list(map(int, group.split(",")))
        asked.setdefault(key, []).append((rank, index))
        if len(asked[key]) == len(members):
            start = max([now, *(out[m] for m in members), *(into[m] for m in members)])
            end = start + hardware.link.time(kind, op["bytes"], len(members))
            for member in members:
                out[member] = into[member] = end
            for each in asked.pop(key):
                finish(*each, start, end)
    return placed


def placed(replaying: Replay) -> dict[tuple[int, int], tuple[float, float]]:
    """By rank and op its times. (A timeline does not number ops: ask the replay.)"""
    return {
        (int(span["rank"]), int(op)): (float(span["start"]), float(span["end"]))
        for spans, ops in zip(replaying._spans[1:], replaying._ops[1:], strict=True)
        for span, op in zip(spans, ops, strict=True)
    }


def whole(ranks: list[Rank], hardware: Hardware = TOY) -> Replay:
    replaying = Replay(len(ranks), hardware)
    for number, rank in enumerate(ranks):
        replaying.feed(number, rank.trace())
    replaying.finish()
    return replaying


@given(programs())
def test_any_program_is_placed_as_by_one_event_after_the_other(ranks: list[Rank]) -> None:
    replaying = whole(ranks)
    ours, theirs = placed(replaying), reference(ranks, TOY)
    assert ours.keys() == theirs.keys()
    for op, (start, end) in theirs.items():
        assert ours[op] == (pytest.approx(start), pytest.approx(end))
    assert sum(len(rank.ops) for rank in ranks) == len(replaying.collect().spans)


@given(programs(), st.data())
def test_it_does_not_matter_how_the_records_come_in(ranks: list[Rank], data: st.DataObject) -> None:
    """In pieces, the last op of a piece still open: the spans are the same, to the last bit."""
    for rank in ranks:
        for op in rank.ops:
            op["flops"] = op.get("flops", 0.0) / 3
    replaying = Replay(len(ranks), TOY)
    records = [
        replace(rank.trace(), memory=np.zeros(0, MEMORY), sent_parts=np.zeros(0, SENT_PART)) for rank in ranks
    ]
    reach = [0] * len(ranks)
    for _ in range(data.draw(st.integers(0, 6))):
        for number, recorded in enumerate(records):
            reach[number] = data.draw(st.integers(reach[number], len(recorded.ops)))
            ops = recorded.ops[: reach[number]].copy()
            if len(ops) > replaying._ranks[number].program.count and data.draw(st.booleans()):
                ops["end"][-1] = 0
            replaying.feed(number, replace(recorded, ops=ops))
        replaying.advance()
    for number, recorded in enumerate(records):
        replaying.feed(number, recorded)
    replaying.finish()
    assert placed(replaying) == placed(whole(ranks))
