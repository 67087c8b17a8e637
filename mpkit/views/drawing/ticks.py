"""Round numbers for axes: of time, and of amounts such as bytes."""

from __future__ import annotations

import math

from mpkit.common.units import seconds

__all__ = ["levels", "ticks"]


def ticks(duration: float, most: int) -> list[tuple[float, str]]:
    """Return at most `most` + 1 times from 0 to `duration`, a round step (1, 2 or 5 x a power of ten) apart.

    >>> [text for _, text in ticks(33.0, 8)]
    ['0', '5 s', '10 s', '15 s', '20 s', '25 s', '30 s']
    >>> [text for _, text in ticks(0.0031, 4)]
    ['0', '1 ms', '2 ms', '3 ms']
    """
    return [(time, _words(time)) for time in levels(duration, most)]


def levels(highest: float, most: int) -> list[float]:
    """Return at most `most` + 1 amounts from 0 to `highest`, a round step (1, 2 or 5 x a power of ten) apart.

    >>> levels(251e6, 3)
    [0.0, 100000000.0, 200000000.0]
    """
    if highest <= 0 or not math.isfinite(highest):
        return []
    power = 10.0 ** math.floor(math.log10(highest / most))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * most >= highest * (1 - 1e-9))
    count = math.floor(highest / step * (1 + 1e-9))
    return [i * step for i in range(count + 1)]


def _words(time: float) -> str:
    """Format a time like `seconds`, without the trailing zeros that a round number has after the point."""
    number, unit = seconds(time).split(" ")
    if time == 0:
        return "0"
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {unit}"
