"""What a program was doing at a time of its host: step, stage, micro-batch; forward, backward or optimizer.

steps          `ProfilerStep#4` of torch.profiler's schedule; without any, a step ends with the last optimizer's
pipelines      `PP:2F0` of torch.distributed.pipelining: stage, action, micro-batch; `Forward 0` of its GPipe
optimizer      `Optimizer.step#AdamW.step`, which every optimizer of torch announces; or an annotation of the user's
backward       what autograd's engine evaluates, and annotations that say backward
recomputation  operators within a backward that autograd records again
forward        annotations that say forward, and what else comes before a backward of the same step
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit.timeline.foreign.kineto import PATTERNS, Events, EventTable
from mpkit.timeline.metrics import covered
from mpkit.trace import Kind

Array = npt.NDArray[Any]

PLACE = np.dtype([("step", "<i8"), ("kind", "u1"), ("stage", "<i4"), ("microbatch", "<i4"), ("name", "<i8")])
"""Where a program was. `name` is a number of `Events.names`, -1: none."""

_ACTIONS = {
    "F": Kind.FORWARD, "B": Kind.BACKWARD, "I": Kind.INPUT_GRAD, "W": Kind.WEIGHT_GRAD,
    "BACKWARD_INPUT": Kind.INPUT_GRAD, "BACKWARD_WEIGHT": Kind.WEIGHT_GRAD,
    "Forward": Kind.FORWARD, "Backward": Kind.BACKWARD,
}  # fmt: skip
_BACKWARDS = (Kind.BACKWARD, Kind.INPUT_GRAD, Kind.RECOMPUTE)


def place_of(events: Events, asked: Array) -> Array:
    """Return (n,) of `PLACE` for (n,) times in ns at which a rank's program asked for something."""
    place = np.zeros(len(asked), PLACE)
    for name in ("step", "stage", "microbatch", "name"):
        place[name] = -1
    said, ops = events["annotation"], events["op"]
    words = [events.names[number] for number in said.name.tolist()]
    lower = [word.lower() for word in words]

    def mark(rows: Any, kind: Kind | None = None, table: EventTable = said) -> tuple[Array, Array]:
        """Return which times lie in one of these annotations, and in which; set their kind."""
        here, which = _find_inside(asked, table.start[rows], table.end[rows])
        if kind is not None:
            place["kind"][here] = kind
        return here, np.array(rows, np.int64)[which] if len(rows) else which

    def saying(*, yes: str, no: str = "\n") -> list[int]:
        return [i for i, word in enumerate(lower) if yes in word and no not in word]

    # ---- phases, what says more overrules what says less
    mark(saying(yes="forward", no="backward"), Kind.FORWARD)
    mark(saying(yes="zero_grad"), Kind.COMPUTE)
    mark(_engine_rows(events), Kind.BACKWARD, ops)
    mark([i for i in saying(yes="backward") if not lower[i].startswith("pp:")], Kind.BACKWARD)
    here, _ = mark(_recomputed_rows(events), table=ops)
    place["kind"][here & (place["kind"] == Kind.BACKWARD)] = Kind.RECOMPUTE
    optimizers = [i for i, word in enumerate(lower) if _updates(word)]
    here, which = mark(optimizers, Kind.OPTIMIZER)
    place["name"][here] = said.name[which[here]]
    # ---- stages and micro-batches
    actions = {
        i: found
        for i, word in enumerate(words)
        if (found := PATTERNS["pipeline"].match(word) or PATTERNS["chunk"].match(word))
    }
    here, which = mark(list(actions))
    for at in np.flatnonzero(here).tolist():
        found = actions[int(which[at])]
        kind = _ACTIONS[found[found.re.groups - 1]]
        place["microbatch"][at] = int(found[found.re.groups])
        place["stage"][at] = int(found[1]) if found.re is PATTERNS["pipeline"] else -1
        place["kind"][at] = (
            Kind.RECOMPUTE if place["kind"][at] == Kind.RECOMPUTE and kind != Kind.FORWARD else kind
        )
    # ---- steps
    numbers = profiled_steps(events)
    here, which = mark(list(numbers))
    place["step"][here] = [numbers[int(row)] for row in which[here]]
    if numbers:
        place["step"][here & np.isin(which, cut_steps(events))] = -1
    else:
        place["step"] = _counted_steps(events, said.end[optimizers], asked)
    _mark_rest(events, asked, place)
    return place


def _find_inside(times: Array, start: Array, end: Array) -> tuple[Array, Array]:
    """Return which times lie within one of the intervals, and in which one: of several, the one that began last."""
    if not len(start):
        return np.zeros(len(times), bool), np.zeros(len(times), np.int64)
    order = np.argsort(start, kind="stable")
    at = np.maximum(np.searchsorted(start[order], times, side="right") - 1, 0)
    spans = covered(start, end)
    around = np.maximum(np.searchsorted(spans[:, 0], times, side="right") - 1, 0)
    return (times >= spans[around, 0]) & (times < spans[around, 1]), order[at]


def _engine_rows(events: Events) -> Array:
    """Return the operators that are autograd's engine evaluating a node; torch 1.8 has the nodes alone."""
    return events.named("op", PATTERNS["node"].match)


def _recomputed_rows(events: Events) -> Array:
    """Return the operators that autograd records while its engine evaluates a node: those of a forward run again.

    Functions written in Python are recorded in backwards, too, as those by which DTensor changes a layout.
    """
    ops = events["op"]
    rows = events.named("op", lambda name: name.startswith("aten::"))
    rows, around = rows[ops.records[rows] == 1], _engine_rows(events)
    within = np.zeros(len(rows), bool)
    for thread in np.unique(ops.thread[around]).tolist():
        mine = around[ops.thread[around] == thread]
        within |= (ops.thread[rows] == thread) & _find_inside(
            ops.start[rows], ops.start[mine], ops.end[mine]
        )[0]
    return np.asarray(rows[within])


def profiled_steps(events: Events) -> dict[int, int]:
    """Return the number of each step that torch.profiler announces, by the row of its annotation."""
    table, step = events["annotation"], PATTERNS["step"]
    rows = events.named("annotation", step.match).tolist()
    return {row: int(found[1]) for row in rows if (found := step.match(events.names[table.name[row]]))}


def cut_steps(events: Events) -> list[int]:
    """Return the row of the last step's annotation if recording ended within that step; else nothing.

    It is cut off if it takes less than half the time of a usual step, and has less than half its calls, or no update
    where each other step has one.
    """
    said, ops = events["annotation"], events["op"]
    rows = sorted(profiled_steps(events), key=lambda row: int(said.start[row]))
    if len(rows) < 2:
        return []

    def count(starts: Array, row: int) -> int:
        return int(np.count_nonzero((starts >= said.start[row]) & (starts < said.end[row])))

    *before, last = rows
    took = np.median([said.end[row] - said.start[row] for row in before])
    if 2 * (said.end[last] - said.start[last]) >= took:
        return []
    updates = said.start[events.named("annotation", lambda name: _updates(name.lower()))]
    fewer = 2 * count(ops.start, last) < np.median([count(ops.start, row) for row in before[-5:]])
    no_update = not count(updates, last) and all(count(updates, row) for row in before)
    return [last] if fewer or no_update else []


def _updates(annotation: str) -> bool:
    """Say whether an annotation, in lower case, is around an optimizer's step."""
    return annotation.startswith("optimizer.step#") or annotation.strip("# ") == "optimizer"


def _counted_steps(events: Events, updated: Array, asked: Array) -> Array:
    """Return the step of each time, where none is announced: a step ends with its last optimizer.

    What comes after the last of the updates, which ended at these times, is no step: recording ended within it.
    """
    backward = np.sort(events["op"].start[_engine_rows(events)])
    none: Array = np.full(len(asked), -1)
    if not len(updated) or not len(backward):
        return none
    ends = np.sort(updated)
    made = np.searchsorted(backward, ends)  # with no backward between two updates they are of one step
    ends = ends[np.append(made[1:] > made[:-1], True)]
    step = np.searchsorted(ends, asked)
    return np.where(step < len(ends), step, none)


def _mark_rest(events: Events, asked: Array, place: Array) -> None:
    """Give what has no phase yet one, by what comes before and after it in its step.

    Before a backward it belongs to the forward; but between two backwards to the backward, unless autograd records it;
    and before a forward that an annotation begins it is other work, as is everything else.
    """
    order = np.argsort(asked, kind="stable")
    kind, step = place["kind"][order], place["step"][order]
    unknown, known = kind == 0, np.flatnonzero(kind)
    backward = np.isin(kind, _BACKWARDS)
    if not backward.any():
        kind[unknown] = Kind.COMPUTE if len(known) else Kind.FORWARD
    else:
        ops = events["op"]
        recorded, _ = _find_inside(asked[order], ops.start[ops.records == 1], ops.end[ops.records == 1])
        another = np.diff(step, prepend=step[:1]) != 0
        begins = np.flatnonzero(unknown & (another | ~np.concatenate([[False], unknown[:-1]])))
        over = np.concatenate([~unknown[1:] | another[1:], [True]])
        phases = np.flatnonzero((kind != 0) & (kind != Kind.COMPUTE))
        for first, last in zip(begins.tolist(), (np.flatnonzero(unknown & over) + 1).tolist(), strict=True):
            at = int(np.searchsorted(phases, first))
            before, after = (
                Kind(int(kind[phases[i]]))
                if 0 <= i < len(phases) and step[phases[i]] == step[first]
                else None
                for i in (at - 1, at)
            )
            kind[first:last] = _phase_between(before, after, bool(recorded[first:last].any()))
    place["kind"][order] = kind


def _phase_between(before: Kind | None, after: Kind | None, recorded: bool) -> Kind:
    """Return the phase of work between two of the same step; `recorded`: whether autograd records it."""
    if after == Kind.FORWARD:
        return Kind.FORWARD if before == Kind.FORWARD or (before is not None and recorded) else Kind.COMPUTE
    if after not in _BACKWARDS:
        return Kind.COMPUTE
    return Kind.BACKWARD if before in _BACKWARDS and not recorded else Kind.FORWARD
