"""Round numbers for a time axis."""

from __future__ import annotations

import math

from mpkit.support.units import seconds

__all__ = ["ticks"]


def ticks(duration: float, most: int) -> list[tuple[float, str]]:
    """Return at most `most` + 1 times from 0 to `duration`, a round step (1, 2 or 5 x a power of ten) apart.

    >>> [text for _, text in ticks(33.0, 8)]
    ['0', '5 s', '10 s', '15 s', '20 s', '25 s', '30 s']
    >>> [text for _, text in ticks(0.0031, 4)]
    ['0', '1 ms', '2 ms', '3 ms']
    """
    if duration <= 0 or not math.isfinite(duration):
        return []
    power = 10.0 ** math.floor(math.log10(duration / most))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * most >= duration * (1 - 1e-9))
    count = math.floor(duration / step * (1 + 1e-9))
    return [(i * step, _words(i * step)) for i in range(count + 1)]


def _words(time: float) -> str:
    """Format a time like `seconds`, without the trailing zeros that a round number has after the point."""
    number, unit = seconds(time).split(" ")
    if time == 0:
        return "0"
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {unit}"
