"""Round numbers for axes: of time, and of amounts such as bytes."""

from __future__ import annotations

import math

from mpkit.common.units import memory_unit, seconds, trim_zeros

__all__ = ["levels", "memory_levels", "ticks"]


def ticks(duration: float, most: int) -> list[tuple[float, str]]:
    """Return at most `most` + 1 times from 0 to `duration`, a round step (1, 2 or 5 x a power of ten) apart.

    >>> [text for _, text in ticks(33.0, 8)]
    ['0', '5 s', '10 s', '15 s', '20 s', '25 s', '30 s']
    >>> [text for _, text in ticks(0.0031, 4)]
    ['0', '1 ms', '2 ms', '3 ms']
    """
    return [(time, trim_zeros(seconds(time))) for time in levels(duration, most)]


def memory_levels(highest: float, most: int, like: float = 0) -> list[tuple[float, str]]:
    """Return at most `most` + 1 amounts of memory from 0 to `highest`, round in its unit.

    Args:
        highest: bytes.
        most: how many amounts above 0.
        like: the largest amount beside the axis, whose unit is taken if it is more than `highest`.

    >>> [words for _, words in memory_levels(45 * 2**30, 3)]
    ['0', '20 GiB', '40 GiB']
    """
    factor, unit = memory_unit(max(highest, like))
    return [
        (level * factor, f"{level:g} {unit}" if level else "0") for level in levels(highest / factor, most)
    ]


def levels(highest: float, most: int) -> list[float]:
    """Return at most `most` + 1 amounts from 0 to `highest`, a round step (1, 2 or 5 x a power of ten) apart.

    An axis has a number besides its 0: where there is room for one, it is the largest round one.

    >>> levels(251e6, 3), levels(45, 1)
    ([0.0, 100000000.0, 200000000.0], [0.0, 20.0])
    """
    if highest <= 0 or not math.isfinite(highest):
        return []
    power = 10.0 ** math.floor(math.log10(highest / most))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * most >= highest * (1 - 1e-9))
    count = math.floor(highest / step * (1 + 1e-9))
    if not count:
        step, count = (
            max(power * factor for factor in (0.1, 0.2, 0.5, 1, 2, 5) if power * factor <= highest),
            1,
        )
    return [i * step for i in range(count + 1)]
