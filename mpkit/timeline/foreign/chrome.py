"""Chrome's format from other tools: each process becomes a rank, and its events plain spans, nested as they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpkit.errors import TraceError
from mpkit.timeline.foreign.kineto import Events, show_value
from mpkit.trace import MEMORY, OP, Kind, Lane, RankTrace, Trace
from mpkit.trace.validation import MOST_RANKS

__all__ = ["plain_trace"]

_PHASES = {
    "C": "counters", "b": "beginnings of asynchronous spans", "e": "ends of asynchronous spans",
    "s": "beginnings of arrows", "f": "ends of arrows", "i": "instants", "I": "instants",
}  # fmt: skip


def plain_trace(files: Sequence[tuple[str, Events]]) -> Trace:
    """Return the Trace of files whose events are of no category that is known.

    Of each process the thread that is busiest is drawn: spans of one lane must not overlap.

    Args:
        files: each file's name and events.

    Raises:
        TraceError: there are no events.
    """
    ranks, labels, left_out = [], [], 0
    origin = min((events.origin for _, events in files), default=0)
    for source, events in files:
        table = events["other"]
        processes: dict[str, list[int]] = {}
        for number, (process, _) in enumerate(events.threads):
            processes.setdefault(process, []).append(number)
        if len(processes) > MOST_RANKS:
            raise TraceError(
                f"{source}: it has events of {len(processes):,} processes, and {MOST_RANKS:,} are the most"
            )
        took = np.zeros(len(events.threads), np.int64)
        np.add.at(took, table.thread, table.end - table.start)
        by_thread = np.argsort(table.thread, kind="stable")
        bounds = np.searchsorted(table.thread[by_thread], np.arange(len(events.threads) + 1))
        for process, threads in processes.items():
            busiest = max(threads, key=lambda thread: took[thread])
            rows = by_thread[bounds[busiest] : bounds[busiest + 1]]
            left_out += sum(int(bounds[thread + 1] - bounds[thread]) for thread in threads) - len(rows)
            ranks.append(_rank(events, rows, events.origin - origin + 1))
            named = f" ({name})" if (name := events.processes.get(process)) else ""
            labels.append(f"{source}: process {process}{named}")
    if not ranks:
        names = ", ".join(source for source, _ in files)
        raise TraceError(
            f"{names}: there are no events in it that take time{_undrawn(files)}. mk.open "
            "takes what torch.profiler's export_chrome_trace writes, "
            'which has a list "traceEvents" with events of "ph": "X"'
        )
    notes = ["These events are of no category of torch.profiler's, so they are shown as plain spans."]
    notes += [note for source, events in files for note in events.notes(source)]
    if left_out:
        notes.append(
            f"Of each process the busiest thread is shown; {left_out:,} events of other threads are left out."
        )
    imported: dict[str, Any] = {"files": [source for source, _ in files], "processes": labels, "notes": notes}
    return Trace(ranks, {"world_size": len(ranks), "device": "cpu", "imported": imported}).check()


def _undrawn(files: Sequence[tuple[str, Events]]) -> str:
    """Say which events there are of phases that are not drawn."""
    counted = sum((Counter(events.phases) for _, events in files), Counter[str]())
    named = (
        f"{count:,} {_PHASES.get(phase, f'of ph {show_value(phase)}')}" for phase, count in counted.items()
    )
    return f", but {', '.join(named)}" if counted else ""


def _rank(events: Events, rows: Any, shift: int) -> RankTrace:
    table = events["other"]
    rows = rows[np.lexsort((-table.end[rows], table.start[rows]))]
    ops = np.zeros(len(rows), OP)
    names: dict[str, int] = {"": 0}
    around: list[int] = []
    for at, row in enumerate(rows.tolist()):
        start, end = int(table.start[row]), int(table.end[row])
        while around and around[-1] <= start:
            around.pop()
        end = min(end, around[-1]) if around else end
        name = names.setdefault(events.names[table.name[row]], len(names))
        ops[at]["name"], ops[at]["depth"] = name, min(len(around), 255)
        ops[at]["start"], ops[at]["end"], ops[at]["cpu"] = start + shift, end + shift, end - start
        around.append(end)
    ops["kind"], ops["lane"] = Kind.COMPUTE, Lane.COMPUTE
    for column in ("stage", "microbatch", "step", "number", "peer", "ref"):
        ops[column] = -1
    return RankTrace(ops, np.zeros(0, MEMORY), list(names))
