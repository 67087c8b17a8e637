"""Actions: the work of one rank in pieces of one kind, one step, one stage and one micro-batch.

Pieces of work that follow each other with the same place in the program are one action. In a pipeline whose
program does not say its micro-batches, each send or receive ends an action, and actions of a kind are counted within
their step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpkit.timeline.foreign.communication import Comm
from mpkit.timeline.foreign.lanes import DeviceWork
from mpkit.timeline.foreign.phases import place_of
from mpkit.timeline.foreign.reading.events import Events
from mpkit.trace import Kind

__all__ = ["ProfiledAction", "actions_of"]

_TRIVIAL = frozenset({
    "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::detach", "detach", "aten::view", "aten::view_as",
    "aten::as_strided", "aten::reshape", "aten::_reshape_alias", "aten::zeros", "aten::zeros_like", "aten::randn",
    "aten::rand", "aten::split", "aten::split_with_sizes", "aten::chunk", "aten::tensor_split", "aten::slice",
    "aten::narrow", "aten::to", "aten::alias", "aten::_to_copy",
})  # fmt: skip
"""Operators that no forward consists of alone."""


@dataclass
class ProfiledAction:
    """One action.

    Attributes:
        kind, step, stage, microbatch: its place; -1 for none.
        name: the optimizer's class; else "".
        first, last: the rows of `DeviceWork` that it consists of, `last` excluded.
    """

    kind: Kind
    step: int
    stage: int
    microbatch: int
    name: str
    first: int
    last: int


def actions_of(events: Events, work: DeviceWork, comms: Sequence[Comm]) -> list[ProfiledAction]:
    """Return a rank's actions in order of time.

    Args:
        events: the rank's events.
        work: what it computes.
        comms: what it communicates.
    """
    if not len(work.start):
        return []
    place = place_of(events, work.asked)
    announced = bool((place["microbatch"] >= 0).any())
    messages = np.sort([comm.asked for comm in comms if comm.kind in (Kind.SEND, Kind.RECV)]).astype(np.int64)
    between = np.searchsorted(messages, work.asked)
    split = np.where(np.isin(place["kind"], (Kind.FORWARD, Kind.BACKWARD)), between, -1) * (not announced)
    keys = np.stack([place["step"], place["kind"], place["stage"], place["microbatch"], split, place["name"]])
    begins = np.flatnonzero(np.concatenate([[True], (keys[:, 1:] != keys[:, :-1]).any(axis=0)]))
    ends = np.append(begins[1:], len(work.start))
    actions = []
    for first, last in zip(begins.tolist(), ends.tolist(), strict=True):
        step, kind, stage, microbatch, _, name = (int(each) for each in keys[:, first])
        words = events.names[name] if name >= 0 else ""
        words = words.removeprefix("Optimizer.step#").removesuffix(".step").strip("# ")
        actions.append(ProfiledAction(Kind(kind), step, stage, microbatch, words, first, last))
    if len(messages) and not announced:
        _count_microbatches(events, work, actions)
    return actions


def _count_microbatches(events: Events, work: DeviceWork, actions: list[ProfiledAction]) -> None:
    """Count the forwards and backwards of each step."""
    trivial = np.array([name.removesuffix("_") in _TRIVIAL for name in events.names] + [False])
    counted: Counter[tuple[int, Kind]] = Counter()
    for action in actions:
        if action.kind not in (Kind.FORWARD, Kind.BACKWARD):
            continue
        real = np.flatnonzero(~trivial[work.name[action.first : action.last]])
        if not len(real):
            action.kind = Kind.COMPUTE
            continue
        action.first += int(real[0])
        action.microbatch = counted[action.step, action.kind]
        counted[action.step, action.kind] += 1
