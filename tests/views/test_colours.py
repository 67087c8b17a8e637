"""The palette: contrast of text and marks, and colours that deuteranopes tell apart."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest

from mpkit.views.drawing.colours import CATEGORY_INKS, CAUSE_INKS, DEVICE_INKS, INKS, Key, contrast, outline
from mpkit.views.theme import THEMES

DEUTERANOPIA = np.array(
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
)
"""Linear RGB as a deuteranope sees it (Machado, Oliveira and Fernandes 2009, severity 1)."""


def rgb(colour: str) -> np.ndarray:
    return np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)], float)


def seen(colour: str) -> np.ndarray:
    """A colour's red, green and blue, 0 to 255, as a deuteranope sees them."""
    parts = rgb(colour) / 255
    linear = DEUTERANOPIA @ np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    linear = linear.clip(0, 1)
    return 255 * np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)


def apart(one: str, other: str) -> float:
    """The distance of two colours for a deuteranope, of 441 at most."""
    return float(np.linalg.norm(seen(one) - seen(other)))


def operations(theme: str) -> dict[Key, str]:
    return {key: getattr(INKS[key], theme) for key in Key if key != Key.IDLE}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_deuteranopes_tell_operations_apart(theme: str) -> None:
    inks = operations(theme)
    assert apart(inks[Key.OPTIMIZER], inks[Key.COMM]) > 110
    assert contrast(inks[Key.OPTIMIZER], inks[Key.COMM]) > 1.8
    nearest = min(combinations(inks, 2), key=lambda pair: apart(inks[pair[0]], inks[pair[1]]))
    assert apart(inks[nearest[0]], inks[nearest[1]]) > 40, nearest


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_marks_have_3_to_1_and_their_text_4_5(theme: str) -> None:
    ground = THEMES[theme].ground
    inks = [*CATEGORY_INKS.values(), *DEVICE_INKS.values()]
    for fill in [*operations(theme).values(), *(ink[theme == "dark"] for ink in inks)]:
        assert contrast(outline(fill, theme) or fill, ground) >= 3, fill
    for key in operations(theme):
        ink = INKS[key]
        assert contrast(getattr(ink, theme), getattr(ink, f"on_{theme}")) >= 4.5, ink.word
    assert contrast(THEMES[theme].text, ground) >= 4.5 and contrast(THEMES[theme].faint, ground) >= 4.5


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_colour_means_one_thing(theme: str) -> None:
    """Nothing of memory, of GPUs or of idle time wears, or nearly wears, the colour of an operation."""
    categories = {word: ink[theme == "dark"] for word, ink in CATEGORY_INKS.items()}
    devices = {word: ink[theme == "dark"] for word, ink in DEVICE_INKS.items()}
    for (word, one), (other, two) in product(
        [*categories.items(), *CAUSE_INKS.items(), *devices.items()], operations(theme).items()
    ):
        assert np.linalg.norm(rgb(one) - rgb(two)) > 25, (word, other)
    for one, two in combinations(categories.values(), 2):
        assert apart(one, two) > 25
    for (word, one), (other, two) in product(devices.items(), [*categories.items(), *CAUSE_INKS.items()]):
        assert np.linalg.norm(rgb(one) - rgb(two)) > 25, (word, other)
    for way in ("nvlink", "pcie"):
        assert apart(devices[f"{way}_sent"], devices[f"{way}_received"]) > 60
    for one, two in combinations(CAUSE_INKS.values(), 2):
        assert apart(one, two) > 25
