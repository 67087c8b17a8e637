"""What `mpkit.soap` found: who has which part of each tensor, what was exchanged, how near it is to the whole layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpkit.experiments.soap_operator import Box
from mpkit.shown import Drawn, data_frame
from mpkit.trace import Kind, Lane, Trace

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["RANKS", "Sent", "Soap", "Way", "exchanged"]

RANKS = 2


@dataclass(frozen=True)
class Sent:
    """What ranks exchange in one phase.

    Attributes:
        phase: "forward" or "backward".
        kind: "all_reduce", "all_gather" or "send".
        what: which tensor.
        payload: bytes: the tensor of an all-reduce, the gathered one of an all-gather, of messages their sum.
        times: how many of them.
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
        name: "O", "S", "A", or "P" and how.
        title: in words.
        known_as: what it is called elsewhere.
        told: what it does.
        held: by tensor, and then by rank: which part it has, None: none.
        sent: what ranks exchanged, from the run's trace.
        difference: the largest between the ranks' output and the whole layer's.
        gradient_difference: the same of the gradients of the input and of the parameters.
    """

    name: str
    title: str
    known_as: str
    told: str
    held: dict[str, list[Box | None]]
    sent: list[Sent]
    difference: float
    gradient_difference: float

    def payload(self, phase: str) -> int:
        """Bytes that are exchanged in a phase."""
        return sum(sent.payload for sent in self.sent if sent.phase == phase)


@dataclass(frozen=True, repr=False)
class Soap(Drawn):
    """A layer, and all ways to split it; a notebook shows its picture.

    Attributes:
        layer: as torch prints it.
        kind: "linear" or "layer_norm".
        shapes: of the tensors, by name; C and Z belong to the next operator.
        ways: in the order O, S, A, P.
        trace: of the run.
    """

    layer: str
    kind: str
    shapes: dict[str, tuple[int, ...]]
    ways: list[Way]
    trace: Trace

    def __getitem__(self, name: str) -> Way:
        """The way of that name."""
        for way in self.ways:
            if way.name == name:
                return way
        raise ValueError(
            f"there is no way {name!r} to split this layer, but {[way.name for way in self.ways]}"
        )

    def to_dataframe(self) -> pd.DataFrame:
        """A row for each exchange: way, phase, kind, what, payload (bytes), times."""
        rows = [{"way": way.name, **vars(sent)} for way in self.ways for sent in way.sent]
        return data_frame(rows, columns=["way", "phase", "kind", "what", "payload", "times"])

    def _svg(self) -> str:
        from mpkit.views.soap_svg import soap_svg

        return soap_svg(self)

    def __str__(self) -> str:
        from mpkit.views.soap_text import soap_text

        return soap_text(self)

    __repr__ = __str__


def exchanged(trace: Trace) -> dict[str, list[Sent]]:
    """By way what ranks exchanged: collectives as rank 0 has them, messages as their senders do."""
    found: dict[tuple[str, str, str, str], list[int]] = {}
    for rank in range(RANKS):
        for place, kind, payload in _payloads(trace, rank):
            if kind == Kind.SEND or (kind != Kind.RECV and rank == 0):
                found.setdefault((*place, kind.word), []).append(payload)
    ways: dict[str, list[Sent]] = {}
    for (way, phase, what, kind_word), payloads in found.items():
        ways.setdefault(way, []).append(Sent(phase, kind_word, what, sum(payloads), len(payloads)))
    return ways


def _payloads(trace: Trace, rank: int) -> Iterator[tuple[tuple[str, str, str], Kind, int]]:
    """A rank's communications: way, phase and what of the span that each is in, its kind, its bytes."""
    part = trace.ranks[rank]
    place = ("", "", "")
    for op in part.ops:
        if op["kind"] == Kind.COMPUTE:
            way, phase, what = part.names[op["name"]].split("|")
            place = way, phase, what
        elif op["lane"] == Lane.COMM:
            yield place, Kind(op["kind"]), int(op["bytes"])
