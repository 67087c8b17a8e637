"""The colours of operations, which colour-blind readers can distinguish, too.

They are the palette of Okabe and Ito (*Color Universal Design*, 2008), with brighter blues on a dark background.
Related work has related colours: recomputation is a paler forward, and where a backward is split in two, its
halves are the reds and yellows next to the orange of the whole one. Idle time is not a colour but a hatch on the
background, so that a bubble is visible and yet looks like nothing being done.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit.trace import Kind

__all__ = ["CATEGORY_INKS", "FONT", "INKS", "THEMES", "Ink", "Key", "Theme", "key_of"]


class Key(IntEnum):
    """The entries of the legend. Compute keys have the numbers of their `Kind`."""

    IDLE = 0
    FORWARD = 1
    BACKWARD = 2
    INPUT_GRAD = 3
    WEIGHT_GRAD = 4
    OPTIMIZER = 5
    RECOMPUTE = 6
    COMPUTE = 7
    COMM = 8
    COPY = 9
    DATA = 10


@dataclass(frozen=True)
class Ink:
    """How one key is drawn: its word, its fill by theme, and the colour of text on that fill."""

    word: str
    light: str
    dark: str
    on_light: str
    on_dark: str


BLACK, WHITE = "#000000", "#ffffff"

INKS: dict[Key, Ink] = {
    Key.IDLE: Ink("idle", "#d3d7de", "#3d434d", BLACK, WHITE),
    Key.FORWARD: Ink("forward", "#0072b2", "#2f8fd8", WHITE, BLACK),
    Key.BACKWARD: Ink("backward", "#e69f00", "#e69f00", BLACK, BLACK),
    Key.INPUT_GRAD: Ink("input grad", "#d55e00", "#e06a10", BLACK, BLACK),
    Key.WEIGHT_GRAD: Ink("weight grad", "#f0e442", "#f0e442", BLACK, BLACK),
    Key.OPTIMIZER: Ink("optimizer", "#009e73", "#00a67a", BLACK, BLACK),
    Key.RECOMPUTE: Ink("recompute", "#56b4e9", "#9bd5f7", BLACK, BLACK),
    Key.COMPUTE: Ink("compute", "#4a4f57", "#c3c8d0", WHITE, BLACK),
    Key.COMM: Ink("communication", "#cc79a7", "#d98ab6", BLACK, BLACK),
    Key.COPY: Ink("host copy", "#8c929c", "#8c929c", BLACK, BLACK),
    Key.DATA: Ink("data loading", "#704214", "#9c5a2a", WHITE, WHITE),
}


@dataclass(frozen=True)
class Theme:
    """The background of the operations, and the text next to them."""

    ground: str
    text: str
    faint: str
    line: str
    idle: str
    hatch: str


THEMES: dict[str, Theme] = {
    "light": Theme("#ffffff", "#1f2328", "#656d76", "#d8dee4", "#f1f3f6", "#c3c9d2"),
    "dark": Theme("#14171c", "#e6e9ee", "#98a1ad", "#30363d", "#20242b", "#454c57"),
}


def _table() -> npt.NDArray[Any]:
    table = np.zeros(256, np.uint8)
    for kind in Kind:
        if kind < Kind.WAIT:
            table[kind] = kind
        elif 32 <= kind < 128:
            table[kind] = Key.COMM if kind < 64 else Key.DATA if kind == Kind.DATA else Key.COPY
    return table


_KEYS = _table()

CATEGORY_INKS = {
    "params": ("#0072b2", "#2f8fd8"),
    "grads": ("#e69f00", "#e69f00"),
    "optimizer": ("#009e73", "#00a67a"),
    "activations": ("#56b4e9", "#9bd5f7"),
    "buffers": ("#8c929c", "#8c929c"),
}
"""The colours of the categories of memory, by theme (light, dark); Okabe and Ito's, as above."""

FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"


def key_of(kinds: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the keys of an array of kinds.

    >>> [Key(key).name for key in key_of(np.array([Kind.FORWARD, Kind.WAIT, Kind.ALL_REDUCE]))]
    ['FORWARD', 'IDLE', 'COMM']
    """
    keys: npt.NDArray[Any] = _KEYS[kinds]
    return keys
