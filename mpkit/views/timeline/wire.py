"""Spans on their way to a browser: a typed array per column, as one trait, which a page that loads again has at once.

    head    JSON: {count, first, origin, names, steps: [[step, start, end], ...], columns: [[name, dtype], ...]}
    bytes   the columns after each other, widest first, so that each is aligned

While a run goes on these are its newest spans. `first` is the number of the first of them, from which causes count;
`origin` is when the run began.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpkit.common.arrays import Array
from mpkit.timeline import metrics
from mpkit.trace import Kind
from mpkit.views.drawing.colours import INKS, Key, key_of, outline
from mpkit.views.theme import THEMES

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


def pack_spans(
    spans: Array, names: Sequence[str], first: int = 0, origin: float | None = None
) -> tuple[dict[str, Any], bytes]:
    """Return the head and the bytes of spans.

    Args:
        spans: (n,) of `SPAN`.
        names: the strings that they refer to.
        first: the number of the first of them among all of the run.
        origin: seconds at which the run began; None: the first start.

    >>> import mpkit as mk
    >>> timeline = mk.simulate(mk.Plan.gpipe(2, 2))
    >>> head, columns = pack_spans(timeline.spans, timeline.names)
    >>> head["steps"], len(columns) == head["count"] * sum(np.dtype(code).itemsize for _, code in COLUMNS)
    ([[0, 0.0, 9.0]], True)
    """
    made = {
        "duration": spans["end"] - spans["start"],
        "early": spans["start"] - spans["issued"],  # how long before it began its rank had issued it
        "cause": np.maximum(spans["cause"] - first, -1),
        "key": key_of(spans["kind"]),
    }
    active = metrics.active(spans)
    steps, of = np.unique(active["step"], return_inverse=True)
    start, end = np.full(len(steps), np.inf), np.full(len(steps), -np.inf)
    np.minimum.at(start, of, active["start"])
    np.maximum.at(end, of, active["end"])
    head = {
        "count": len(spans),
        "first": first,
        "origin": origin,
        "names": list(names) or [""],
        "steps": [list(each) for each in zip(steps.tolist(), start.tolist(), end.tolist(), strict=True)],
        "columns": [list(column) for column in COLUMNS],
    }
    values = ((made[name] if name in made else spans[name]).astype(code) for name, code in COLUMNS)
    return head, b"".join(column.tobytes() for column in values)


def look() -> dict[str, Any]:
    """Return colours and words for the browser, so that they are defined in one place: colours.py."""
    inks = [
        {
            **vars(INKS[key]),
            "edge_light": outline(INKS[key].light, "light"),
            "edge_dark": outline(INKS[key].dark, "dark"),
        }
        for key in Key
    ]
    kinds = {str(int(kind)): kind.word.replace("_", " ") for kind in Kind}  # numbers are JSON keys
    return {"inks": inks, "themes": {name: vars(theme) for name, theme in THEMES.items()}, "kinds": kinds}
