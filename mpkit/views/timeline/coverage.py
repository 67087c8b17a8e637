"""Many boxes on few pixels: how much of each pixel each colour takes.

A strip of W pixels can show W things. If more boxes fall on it, each pixel shows the work that takes most of it, as
strongly as the pixel is busy. The size of a picture is therefore bounded by its pixels, not by its boxes.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit.views.drawing.colours import Key

__all__ = ["coverage", "runs", "strongest"]


def coverage(boxes: npt.NDArray[Any], pixels: int, duration: float) -> npt.NDArray[Any]:
    """Compute the share of each pixel that each key covers, (len(Key), pixels), from an array of `BOX`."""
    scale = pixels / duration if duration else 0.0
    start = np.clip(boxes["start"] * scale, 0, pixels)
    end = np.clip(boxes["end"] * scale, 0, pixels)
    first = np.minimum(start.astype(np.intp), pixels - 1)
    last = np.minimum(end.astype(np.intp), pixels - 1)
    row = boxes["key"].astype(np.intp) * (pixels + 1)

    # Whole pixels by a running sum: +1 where a box's whole pixels begin, -1 where they end ...
    size = len(Key) * (pixels + 1)
    steps = np.bincount(row + first, minlength=size) - np.bincount(row + last, minlength=size)
    whole = np.cumsum(steps.reshape(len(Key), -1).astype(float), axis=1)
    # ... and the parts of its first and last pixel: the first minus what is before it, the last's own part.
    part = np.bincount(row + first, first - start, minlength=size)
    part += np.bincount(row + last, end - last, minlength=size)
    return np.asarray((whole + part.reshape(len(Key), -1))[:, :pixels])


def strongest(cover: npt.NDArray[Any], *, least: float = 0.0) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return for each pixel the key of the work that covers most of it, and the share that is busy (0 to 1).

    A pixel that is busy for no more than `least` of its time has key IDLE if it contains idle time, else -1: blank.
    """
    work = cover[1:]
    busy = np.minimum(work.sum(axis=0), 1.0)
    key = np.where(
        busy > least + 1e-9, 1 + work.argmax(axis=0), np.where(cover[Key.IDLE] > 1e-9, Key.IDLE, -1)
    )
    return key, busy


def runs(values: npt.NDArray[Any]) -> list[tuple[int, int]]:
    """Return [first, after) of each run of equal values.

    >>> runs(np.array([7, 7, 1]))
    [(0, 2), (2, 3)]
    """
    if not len(values):
        return []
    edges = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    return list(pairwise(edges))
