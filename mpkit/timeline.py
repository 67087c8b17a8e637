"""A Timeline is a Trace put on a clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["HELD", "SPAN", "Timeline"]

SPAN = np.dtype(
    [
        ("rank", "<i4"),
        ("lane", "u1"),  # trace.Lane
        ("kind", "u1"),  # trace.Kind
        ("depth", "u1"),  # 0: a whole action; 1 and more: a layer within it
        ("pad", "u1"),
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
        (
            "issued",
            "<f8",
        ),  # communication: when this rank asked for it (start: when it really began)
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


@dataclass
class Timeline:
    """Operations with times, of a run or of a simulation.

    Attributes:
        spans: (n,) array of `SPAN`, sorted by rank, then start.
        names: the strings that `spans` refers to; names[0] is "".
        held: (m,) array of `HELD`, sorted by rank and time.
        world_size: how many ranks.
        clock: "measured", "virtual" or "simulated".
        meta: as of the Trace, with "hardware" set to the name of what was replayed on.
        notes: sentences a reader should see (ops left out since a rank was killed, ...).
    """

    spans: npt.NDArray[Any]
    names: list[str]
    held: npt.NDArray[Any]
    world_size: int
    clock: str
    meta: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
