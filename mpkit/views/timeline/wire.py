"""Spans on their way to a browser: one binary message per batch, a typed array per column.

    message   JSON: {type: "spans", epoch, first, count, names_first, names, steps, columns}
              and one buffer: the columns after each other, widest first, so that each is aligned

`first` is the number of the batch's first span since `epoch` began, which serves as its sequence number: a receiver
that has more takes only what is new; one that has less has missed something and says hello again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit.timeline.replay.spans import SPAN
from mpkit.trace import Kind
from mpkit.views.drawing.colours import INKS, Key, key_of, outline
from mpkit.views.theme import THEMES

__all__ = ["BATCH", "COLUMNS", "SpanBatches", "look", "pack"]

BATCH = 50_000
"""The most spans per message: some 2.5 MB."""

COLUMNS: list[tuple[str, str]] = [
    ("start", "<f8"),
    ("bytes", "<f8"),
    ("duration", "<f4"),
    ("early", "<f4"),
    ("flops", "<f4"),
    ("microbatch", "<i4"),
    ("step", "<i4"),
    ("name", "<i4"),
    ("cause", "<i4"),
    ("peer", "<i4"),
    ("group", "<i4"),
    ("rank", "<i2"),
    ("stage", "<i2"),
    ("kind", "u1"),
    ("lane", "u1"),
    ("depth", "u1"),
    ("key", "u1"),
]


def pack(spans: npt.NDArray[Any]) -> bytes:
    """Pack a batch of `SPAN` records into a buffer.

    >>> from mpkit.timeline.replay.spans import SPAN
    >>> len(pack(np.zeros(10, SPAN))) == 10 * sum(np.dtype(code).itemsize for _, code in COLUMNS)
    True
    """
    made = {
        "duration": spans["end"] - spans["start"],
        "early": spans["start"] - spans["issued"],  # how long before it began its rank had issued it
        "key": key_of(spans["kind"]),
    }
    parts = []
    for name, code in COLUMNS:
        column = made[name] if name in made else spans[name]
        parts.append(np.ascontiguousarray(column, dtype=code).tobytes())
    return b"".join(parts)


class SpanBatches:
    """All spans of an epoch, and the messages that bring a browser up to date from what it has."""

    def __init__(self) -> None:
        self.epoch = 0
        self.count = 0
        self.names: list[str] = [""]
        self._parts: list[npt.NDArray[Any]] = []

    def reset(self) -> None:
        """Begin a new epoch, which invalidates everything sent before."""
        self.epoch += 1
        self.count = 0
        self.names = [""]
        self._parts = []

    def add(self, spans: npt.NDArray[Any], names: Sequence[str]) -> None:
        """Append spans; `names` are all names so far."""
        self._parts.append(spans)
        self.count += len(spans)
        self.names = list(names) or [""]

    @property
    def spans(self) -> npt.NDArray[Any]:
        """All spans, in the order in which they arrived."""
        if len(self._parts) != 1:
            self._parts = [np.concatenate([np.empty(0, SPAN), *self._parts])]
        return self._parts[0]

    def messages_since(
        self, first: int, steps: dict[int, tuple[float, float]], names_first: int = 0, most: int = BATCH
    ) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Yield messages and their buffers with the spans from `first` on, the extents of `steps` and later names."""
        new = self._tail(first)
        extents = [[step, start, end] for step, (start, end) in steps.items()]
        for at in range(0, max(len(new), 1), most):
            part = new[at : at + most]
            head = {
                "type": "spans",
                "epoch": self.epoch,
                "first": first + at,
                "count": len(part),
                "names_first": len(self.names) if at else names_first,
                "names": [] if at else self.names[names_first:],
                "steps": [] if at else extents,
                "columns": [list(column) for column in COLUMNS],
            }
            yield head, pack(part)

    def _tail(self, first: int) -> npt.NDArray[Any]:
        """Return the spans from `first` on, without joining those before."""
        parts, missing = [], self.count - first
        for part in reversed(self._parts):
            if missing <= 0:
                break
            parts.append(part[-missing:] if missing < len(part) else part)
            missing -= len(part)
        return np.concatenate([np.empty(0, SPAN), *reversed(parts)])


def look() -> dict[str, Any]:
    """Return colours and words for the browser, so that they are defined in one place: colours.py."""
    return {
        "inks": [
            {
                "word": INKS[key].word,
                "light": INKS[key].light,
                "dark": INKS[key].dark,
                "on_light": INKS[key].on_light,
                "on_dark": INKS[key].on_dark,
                "edge_light": outline(INKS[key].light, "light"),
                "edge_dark": outline(INKS[key].dark, "dark"),
            }
            for key in Key
        ],
        "themes": {name: vars(theme) for name, theme in THEMES.items()},
        "kinds": kind_words(),
    }


def kind_words() -> dict[str, str]:
    """Return the words of each kind, by its number as a JSON key."""
    return {str(int(kind)): kind.word.replace("_", " ") for kind in Kind}
