"""A timeline as a trace in Chrome's JSON format, which ui.perfetto.dev and chrome://tracing open.

    a process per rank, a thread per lane    thread 0: the steps; layers lie within their actions
    a counter per rank                       memory by category, stacked
    an arrow per message                     from the send to the receive that it feeds

Source: "Trace Event Format" (Google, 2016): X complete events, C counters, s and f flows, M metadata.
"""

import json
from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np

from mpkit.common.arrays import Array
from mpkit.timeline.replay.spans import SPAN
from mpkit.timeline.timeline import Timeline
from mpkit.trace import CATEGORIES, Kind, Lane
from mpkit.views.drawing.lanes import clock_words, rank_label
from mpkit.views.memory.series import memory_of
from mpkit.views.timeline.stages import layer_words, layers_of_span

THREADS = {
    Lane.NONE: (0, "steps"),
    Lane.COMPUTE: (1, "compute"),
    Lane.COMM: (10, "comm"),
    Lane.HOST: (1_000_000, "host"),
    Lane.DATA: (2_000_000, "data"),
}
"""By lane, its first thread and its name; each message that is under way at the same time takes one thread more."""

Event = dict[str, Any]


def perfetto(timeline: Timeline) -> bytes:
    """Return the trace as JSON.

    >>> import mpkit as mk
    >>> trace = json.loads(perfetto(mk.simulate(mk.Plan.gpipe(2, 2))))
    >>> [event["name"] for event in trace["traceEvents"] if event["ph"] == "X" and event["tid"] == 1][:3]
    ['forward 0', 'forward 1', 'wait 1']
    """
    threads = _threads(timeline.spans)
    origin = float(timeline.spans["start"].min()) if len(timeline.spans) else 0.0
    events = [*_names(timeline, threads), *_slices(timeline, threads, origin)]
    events += [*_flows(timeline, threads, origin), *_counters(timeline)]
    other = {"clock": clock_words(timeline), "notes": timeline.notes}
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}
    return json.dumps(trace, separators=(",", ":")).encode()


def _threads(spans: Array) -> Array:
    """Return the thread of each span; messages that are under way at the same time get the first threads that are free.

    Slices of a thread must not overlap.
    """
    first = np.array([THREADS[Lane(lane)][0] for lane in sorted(Lane)])
    threads = np.asarray(first[np.where(spans["lane"] < len(Lane), spans["lane"], Lane.NONE)])
    for rank in np.unique(spans["rank"]):
        for lane in (Lane.COMM, Lane.HOST):
            mine = np.flatnonzero((spans["rank"] == rank) & (spans["lane"] == lane))
            free: list[float] = []
            for at in mine[np.argsort(spans["start"][mine], kind="stable")].tolist():
                start = float(spans["start"][at])
                track = next((i for i, end in enumerate(free) if end <= start), len(free))
                free[track : track + 1] = [float(spans["end"][at])]
                threads[at] += track
    return threads


def _names(timeline: Timeline, threads: Array) -> Iterator[Event]:
    def named(rank: int, what: str, **more: Any) -> Event:
        return {"ph": "M", "pid": rank, "name": what, **more}

    for rank in range(timeline.world_size):
        yield named(rank, "process_name", args={"name": rank_label(timeline, rank)})
        yield named(rank, "process_sort_index", args={"sort_index": rank})
    words = dict(sorted(THREADS.values()))
    for rank, thread in sorted({*zip(timeline.spans["rank"].tolist(), threads.tolist(), strict=True)}):
        first = max(known for known in words if known <= thread)
        name = words[first] + (f" {thread - first + 1}" if thread > first else "")
        yield named(rank, "thread_name", tid=thread, args={"name": name})
        yield named(rank, "thread_sort_index", tid=thread, args={"sort_index": thread})


def _slices(timeline: Timeline, threads: Array, origin: float) -> Iterator[Event]:
    spans, names, layers = timeline.spans, timeline.names, layer_words(timeline)
    words = {int(kind): kind.word.replace("_", " ") for kind in Kind}
    columns = list(SPAN.names or ())
    for *values, thread in zip(*(spans[name].tolist() for name in columns), threads.tolist(), strict=True):
        span = dict(zip(columns, values, strict=True))
        kind = words.get(span["kind"], f"kind {span['kind']}")
        name = names[span["name"]] if 0 <= span["name"] < len(names) else ""
        step = span["step"] if span["kind"] == Kind.STEP else ""
        number = span["microbatch"] if span["microbatch"] >= 0 else step
        arguments = {word: span[word] for word in ("stage", "microbatch", "step", "peer") if span[word] >= 0}
        arguments |= {word: span[word] for word in ("bytes", "flops") if span[word] > 0}
        if computed := layers_of_span(layers, span):
            arguments["layers"] = computed
        shown = name if name and span["lane"] != Lane.COMM else f"{kind} {name or number}".rstrip()
        times = {"ts": (span["start"] - origin) * 1e6, "dur": (span["end"] - span["start"]) * 1e6}
        place = {"ph": "X", "pid": span["rank"], "tid": thread, **times}
        yield {**place, "name": shown, "cat": kind, "args": arguments}


def _flows(timeline: Timeline, threads: Array, origin: float) -> Iterator[Event]:
    """Yield an arrow from each send to its receive: the n-th of its group on either rank."""
    spans, ids = timeline.spans, count(1)
    by_group: dict[int, tuple[list[int], list[int]]] = {}
    issued = np.argsort(spans["issued"], kind="stable")
    for at in issued[np.isin(spans["kind"][issued], (Kind.SEND, Kind.RECV))].tolist():
        if group := int(spans["group"][at]):
            by_group.setdefault(group, ([], []))[int(spans["kind"][at] == Kind.RECV)].append(at)
    for sends, receives in by_group.values():
        for send, receive in zip(sends, receives, strict=False):
            number = next(ids)
            # Within a slice, to be attached to it.
            for phase, at, part in (
                ("s", send, 0.0),
                ("f", receive, 0.5),
            ):
                start, end = float(spans["start"][at]), float(spans["end"][at])
                time = (start + part * (end - start) - origin) * 1e6
                place = {"pid": int(spans["rank"][at]), "tid": int(threads[at]), "ts": time}
                bound = {"bp": "e"} if phase == "f" else {}
                yield {"ph": phase, "id": number, **place, "name": "message", "cat": "message", **bound}


def _counters(timeline: Timeline) -> Iterator[Event]:
    for rank in range(timeline.world_size) if len(timeline.held) else []:
        memory = memory_of(timeline, rank, points=5000)
        for time, levels in zip(memory.times.tolist(), memory.levels.tolist(), strict=True):
            held = dict(zip(CATEGORIES, levels, strict=True))
            yield {"ph": "C", "pid": rank, "ts": time * 1e6, "name": "memory (bytes)", "args": held}
