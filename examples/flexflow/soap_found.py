"""The result of `soap`: which rank has which part of each tensor, what was exchanged, and the numeric error."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from examples.flexflow.soap_operator import Box
from examples.flexflow.soap_text import soap_text
from mpkit.common.display import data_frame
from mpkit.trace import Kind, Lane, Trace

if TYPE_CHECKING:
    import pandas as pd


RANKS = 2


@dataclass(frozen=True)
class PhaseTraffic:
    """What ranks exchange in one phase.

    Attributes:
        phase: "forward" or "backward".
        kind: "all_reduce", "all_gather" or "send".
        what: which tensor.
        payload: bytes: of an all-reduce its tensor, of an all-gather the gathered tensor, of messages their sum.
        times: how many there are.
    """

    phase: str
    kind: str
    what: str
    payload: int
    times: int


@dataclass(frozen=True)
class Way:
    """One way to split the layer.

    Attributes:
        name: "O", "S", "A", or "P" followed by how.
        title: the way in words.
        known_as: what it is called elsewhere.
        told: what it does.
        held: by tensor, and then by rank: which part the rank has; None: nothing.
        sent: what ranks exchanged, from the run's trace.
        difference: the largest difference between the ranks' output and the whole layer's.
        gradient_difference: the same for the gradients of the input and of the parameters.
    """

    name: str
    title: str
    known_as: str
    told: str
    held: dict[str, list[Box | None]]
    sent: list[PhaseTraffic]
    difference: float
    gradient_difference: float

    def payload(self, phase: str) -> int:
        """Sum the bytes that are exchanged in a phase."""
        return sum(sent.payload for sent in self.sent if sent.phase == phase)


@dataclass(frozen=True, repr=False)
class Soap:
    """A layer and all ways to split it.

    Attributes:
        layer: the layer as torch prints it.
        kind: "linear" or "layer_norm".
        shapes: the shapes of the tensors, by name; C and Z belong to the next operator.
        ways: the ways, in the order O, S, A, P.
        trace: the trace of the run.
    """

    layer: str
    kind: str
    shapes: dict[str, tuple[int, ...]]
    ways: list[Way]
    trace: Trace

    def __getitem__(self, name: str) -> Way:
        """Return the way with this name."""
        for way in self.ways:
            if way.name == name:
                return way
        raise ValueError(
            f"there is no way {name!r} to split this layer, but {[way.name for way in self.ways]}"
        )

    def to_dataframe(self) -> pd.DataFrame:
        """Return a row per exchange: way, phase, kind, what, payload (bytes), times."""
        rows = [{"way": way.name, **vars(sent)} for way in self.ways for sent in way.sent]
        return data_frame(rows, columns=["way", "phase", "kind", "what", "payload", "times"])

    def __str__(self) -> str:
        return soap_text(self)

    __repr__ = __str__


def count_exchanged(trace: Trace) -> dict[str, list[PhaseTraffic]]:
    """Return what ranks exchanged, by way: collectives as recorded on rank 0, messages as recorded by their senders."""
    payloads_by_call: dict[tuple[str, str, str, str], list[int]] = {}
    for rank in range(RANKS):
        for place, kind, payload in _payloads(trace, rank):
            if kind == Kind.SEND or (kind != Kind.RECV and rank == 0):
                payloads_by_call.setdefault((*place, kind.word), []).append(payload)
    ways: dict[str, list[PhaseTraffic]] = {}
    for (way, phase, what, kind_word), payloads in payloads_by_call.items():
        ways.setdefault(way, []).append(PhaseTraffic(phase, kind_word, what, sum(payloads), len(payloads)))
    return ways


def _payloads(trace: Trace, rank: int) -> Iterator[tuple[tuple[str, str, str], Kind, int]]:
    """Yield a rank's communications: the way, phase and tensor of the enclosing span, the kind, and the bytes."""
    part = trace.ranks[rank]
    place = ("", "", "")
    for op in part.ops:
        if op["kind"] == Kind.COMPUTE:
            way, phase, what = part.names[op["name"]].split("|")
            place = way, phase, what
        elif op["lane"] == Lane.COMM:
            yield place, Kind(op["kind"]), int(op["bytes"])
