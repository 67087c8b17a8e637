"""The colours of operations, of memory and of idle time: each means one thing in all views.

Operations have the palette of Okabe and Ito (*Color Universal Design*, 2008), of which some are darker or paler here,
so that readers who do not see red and green apart tell the optimizer from communication. Related work has related
colours: recomputation is a paler forward, and where a backward is split in two, its halves are the reds and yellows
next to the orange of the whole one. Idle time is not a colour but a hatch on the background, so that a bubble is
visible and yet looks like nothing being done. Memory has violets, and the causes of idle time teals.
The axes of a mesh have colours of their own, with paler tints, shared by every picture of the mesh.

A colour with less than 3:1 against the background is drawn with an outline (`outline`), as WCAG 1.4.11 asks of marks.
`tests/views/test_pictures.py` computes contrasts, and distances as deuteranopes see them.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from mpkit.common.arrays import Array
from mpkit.plan.mesh import AXIS_INKS
from mpkit.trace import Kind
from mpkit.views.theme import THEMES

__all__ = [
    "AXIS_INKS",
    "CATEGORY_INKS",
    "CAUSE_INKS",
    "DEVICE_INKS",
    "INKS",
    "SPARE_INK",
    "Ink",
    "Key",
    "contrast",
    "ink_of",
    "key_of",
    "legible_on",
    "luminance",
    "outline",
    "tint",
]

SEVERAL = "#8c6bb1"


def ink_of(axis: str) -> str:
    """Return the colour of an axis; all combinations of several axes share one colour."""
    return AXIS_INKS.get(axis, SEVERAL)


def tint(ink: str, share: float) -> str:
    """Return a colour between a pale version of `ink` (share 0) and `ink` itself (share 1).

    >>> tint("#0072b2", 1.0), tint("#0072b2", 0.0)
    ('#0072b2', '#bfdcec')
    """
    strength = 0.25 + 0.75 * min(max(share, 0.0), 1.0)
    return "#" + "".join(f"{round(255 - strength * (255 - part)):02x}" for part in _parts(ink))


def legible_on(ink: str) -> str:
    """Return black or white, whichever is more legible on a colour.

    >>> legible_on("#0072b2"), legible_on("#ebf4f9")
    ('#ffffff', '#000000')
    """
    return WHITE if luminance(ink) < 0.1791 else BLACK  # equally far from both


def _parts(ink: str) -> list[int]:
    return [int(ink[at : at + 2], 16) for at in (1, 3, 5)]


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
    Key.INPUT_GRAD: Ink("input grad", "#c84f00", "#d55e00", WHITE, BLACK),
    Key.WEIGHT_GRAD: Ink("weight grad", "#f0e442", "#f0e442", BLACK, BLACK),
    Key.OPTIMIZER: Ink("optimizer", "#00785a", "#008f68", WHITE, BLACK),
    Key.RECOMPUTE: Ink("recompute", "#56b4e9", "#b9e3fb", BLACK, BLACK),
    Key.COMPUTE: Ink("compute", "#2f343b", "#f2f4f7", WHITE, BLACK),
    Key.COMM: Ink("communication", "#e8a9cd", "#e39ac4", BLACK, BLACK),
    Key.COPY: Ink("host copy", "#8c929c", "#8c929c", BLACK, BLACK),
    Key.DATA: Ink("data loading", "#704214", "#9c5a2a", WHITE, WHITE),
}


def _table() -> Array:
    table = np.zeros(256, np.uint8)
    for kind in Kind:
        if kind < Kind.WAIT:
            table[kind] = kind
        elif 32 <= kind < 128:
            table[kind] = Key.COMM if kind < 64 else Key.DATA if kind == Kind.DATA else Key.COPY
    return table


_KEYS = _table()

CATEGORY_INKS = {
    "params": ("#35155d", "#7653bb"),
    "grads": ("#9168cf", "#c2a6f3"),
    "optimizer": ("#5f2fa3", "#9572dc"),
    "activations": ("#c4a9ec", "#e0d2f9"),
    "buffers": ("#e9defa", "#5b3d97"),
    "logits": ("#e26bb5", "#c383a6"),
    "gathered": ("#5d5aed", "#6f6df0"),
    "context": ("#755775", "#8a7391"),
}
"""The colours of the categories of memory, by theme (light, dark): violets, in the order in which they are stacked of
unlike lightness; the last three are of predictions alone."""

SPARE_INK = ("#c9ccd1", "#565c66")
"""What an allocator reserves beside what is held: of no category."""

DEVICE_INKS = {
    "utilisation": ("#5b6b00", "#b9c94a"),
    "memory": ("#464f86", "#9aa3d8"),
}
"""The colours of what NVML says of a GPU, by theme (light, dark). Memory in use is bluer than what ranks hold."""

CAUSE_INKS = {
    "work": "#4f7390",
    "warm-up": "#bfe3dd",
    "dependency": "#d8c9a3",
    "imbalance": "#2f7f79",
    "communication": "#a86f8e",
    "cool-down": "#74b8b0",
    "data": "#a5713f",
    "other": "#7f816c",
}
"""The colours of work and of the causes of idle time in comparisons, on light and dark backgrounds alike."""


def key_of(kinds: Array) -> Array:
    """Return the keys of an array of kinds.

    >>> [Key(key).name for key in key_of(np.array([Kind.FORWARD, Kind.WAIT, Kind.ALL_REDUCE]))]
    ['FORWARD', 'IDLE', 'COMM']
    """
    keys: Array = _KEYS[kinds]
    return keys


def luminance(colour: str) -> float:
    """Return the relative luminance of "#rrggbb", 0 to 1 (WCAG 2.2).

    >>> luminance("#000000"), round(luminance("#ffffff"), 6)
    (0.0, 1.0)
    """
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours, 1 to 21 (WCAG 2.2).

    >>> round(contrast("#ffffff", "#000000"), 3), contrast("#0072b2", "#0072b2")
    (21.0, 1.0)
    """
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def outline(fill: str, theme: str) -> str:
    """Return the colour of the line around marks of a colour; "" where they need none: they have 3:1 without.

    >>> outline("#0072b2", "light"), outline("#f0e442", "light"), outline("#f0e442", "dark")
    ('', '#656d76', '')
    """
    ground = THEMES[theme]
    return "" if contrast(fill, ground.ground) >= 3 else ground.faint
