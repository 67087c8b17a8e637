"""Timelines to look at: simulated ones, dressed as runs, long ones, and hostile ones."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace

import numpy as np
import pytest

import mpkit as mk
from mpkit.plan.mesh import Mesh
from mpkit.timeline.replay.spans import HELD, SPAN
from mpkit.trace import CATEGORIES, Kind, Lane

HOSTILE = "<script>alert('1')</script>&\"]]>"


def repeated(timeline: mk.Timeline, steps: int) -> mk.Timeline:
    """The same step again and again, one after the other."""
    length = float(timeline.spans["end"].max())
    parts = []
    for step in range(steps):
        part = timeline.spans.copy()
        for column in ("start", "end", "issued"):
            part[column] += step * length
        part["step"], part["cause"] = step, -1
        parts.append(part)
    spans = np.concatenate(parts)
    return replace(timeline, spans=spans[np.lexsort((spans["start"], spans["rank"]))])


@pytest.fixture
def gpipe() -> mk.Timeline:
    """GPipe's staircase of 4 stages and 8 micro-batches; messages take a quarter of a forward."""
    return mk.simulate(mk.Plan.gpipe(4, 8), hop=0.25)


@pytest.fixture
def long_run() -> Callable[[int], mk.Timeline]:
    """A timeline of at least so many spans."""

    def make(spans: int) -> mk.Timeline:
        one = mk.simulate(mk.Plan.gpipe(4, 8), hop=0.25)
        return repeated(one, -(-spans // len(one.spans)))

    return make


@pytest.fixture
def hostile(gpipe: mk.Timeline) -> mk.Timeline:
    """One whose every string would be a script, if anybody let it."""
    spans = gpipe.spans.copy()
    spans["name"] = len(gpipe.names)
    return replace(
        gpipe, spans=spans, names=[*gpipe.names, HOSTILE], meta={"hardware": HOSTILE}, clock=HOSTILE,
        notes=[HOSTILE],
    )  # fmt: skip


@pytest.fixture
def data_parallel() -> mk.Timeline:
    """Two ranks by hand: layers within actions, a bucket's all-reduce behind the backward, a host copy, memory."""
    rows = []
    for rank in range(2):
        late = 0.5 * rank

        def add(kind: Kind, start: float, end: float, lane: Lane = Lane.COMPUTE, depth: int = 0, name: int = 0,
                amount: int = 0, cause: int = -1, rank: int = rank, late: float = late) -> None:  # fmt: skip
            times = start + late, end + late, amount, 0.0, -1, 0, cause, start
            rows.append((rank, lane, kind, depth, 0, 0, 0, name, *times))

        add(Kind.COPY_TO_DEVICE, 0.0, 0.3, Lane.HOST, amount=4096)
        add(Kind.FORWARD, 0.0, 2.0)
        add(Kind.FORWARD, 0.0, 1.0, depth=1, name=1)
        add(Kind.FORWARD, 1.0, 2.0, depth=1, name=2)
        add(Kind.BACKWARD, 2.0, 6.0)
        add(Kind.ALL_REDUCE, 4.0, 7.0, Lane.COMM, amount=498_000_000)
        add(Kind.WAIT, 6.0, 7.0, cause=8 * rank + 5)
        add(Kind.OPTIMIZER, 7.0, 7.5)
    spans = np.array(rows, SPAN)
    spans = spans[np.lexsort((spans["start"], spans["rank"]))]
    for at in np.flatnonzero(spans["kind"] == Kind.WAIT):
        same = (spans["rank"] == spans["rank"][at]) & (spans["kind"] == Kind.ALL_REDUCE)
        spans["cause"][at] = np.flatnonzero(same)[0]
    held = [
        (time, rank, CATEGORIES.index(category), total)
        for rank in range(2)
        for time, category, total in (
            (0.0, "params", 400), (0.0, "optimizer", 800), (1.0, "activations", 300), (2.0, "activations", 600),
            (3.0, "grads", 200), (4.0, "activations", 300), (5.0, "grads", 400), (6.0, "activations", 0),
        )
    ]  # fmt: skip
    names = ["", "embed", "head"]
    return mk.Timeline(spans, names, np.array(held, HELD), 2, "virtual", {"device": "cpu"})


@pytest.fixture(scope="session")
def meshed() -> Callable[..., mk.Timeline]:
    """A step of GPipe on a mesh, by hand: `meshed(mesh, microbatches)`.

    Each micro-batch's forward and backward have an all-reduce along tp of 1000 bytes, behind them; messages between
    stages have 500 bytes; at the end the gradients are summed along dp, 4000 bytes, and the norm over all, 8 bytes.
    """

    def make(mesh: Mesh, microbatches: int = 4) -> mk.Timeline:
        one = mk.simulate(mk.Plan.gpipe(mesh.pp, microbatches), hop=0.25)
        end = float(one.spans["end"].max())
        names, parts = [""], []

        def number(name: str) -> int:
            names.extend([name] * (name not in names))
            return names.index(name)

        for rank in range(mesh.size):
            place = mesh.place(rank)
            mine = one.spans[one.spans["rank"] == place.pp].copy()
            mine["rank"], mine["cause"], mine["group"] = rank, -1, 0
            for span in mine[mine["peer"] >= 0]:
                peer = mesh.rank(**{**place._asdict(), "pp": int(span["peer"])})
                ends = (rank, peer) if span["kind"] == Kind.SEND else (peer, rank)
                at = (mine["start"] == span["start"]) & (mine["kind"] == span["kind"])
                mine["peer"][at], mine["bytes"][at] = peer, 500
                mine["group"][at] = number(f"{ends[0]}>{ends[1]}#x")
            works = mine[(mine["kind"] == Kind.FORWARD) | (mine["kind"] == Kind.BACKWARD)]
            calls = [(w["start"], 1000, mesh.group(rank, "tp"), w["microbatch"]) for w in works]
            calls += [(end, 4000, mesh.group(rank, "dp"), -1), (end + 1, 8, tuple(range(mesh.size)), -1)]
            extra = np.zeros(len(calls), SPAN)
            for row, (start, amount, group, microbatch) in zip(extra, calls, strict=True):
                row["rank"], row["lane"], row["kind"] = rank, Lane.COMM, Kind.ALL_REDUCE
                row["bytes"], row["group"], row["peer"], row["cause"] = (
                    amount, number(",".join(map(str, group))), -1, -1,
                )  # fmt: skip
                row["start"], row["end"], row["microbatch"], row["stage"] = start, start + 0.5, microbatch, -1
            parts += [mine, extra[[len(call[2]) > 1 for call in calls]]]
        spans = np.concatenate(parts)
        meta = {"plan": json.dumps(asdict(mesh)), "device": "cpu"}
        order = np.lexsort((spans["start"], spans["rank"]))
        return mk.Timeline(spans[order], names, np.zeros(0, HELD), mesh.size, "virtual", meta)

    return make
