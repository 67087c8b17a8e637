"""Format numbers for people."""

from __future__ import annotations

__all__ = ["bytes_text", "flops_text", "percent", "seconds"]


def seconds(value: float) -> str:
    """Format a time with three digits and a suitable unit.

    >>> seconds(33), seconds(0.01234), seconds(2e-6), seconds(0)
    ('33.0 s', '12.3 ms', '2.00 µs', '0 s')
    """
    if value == 0:
        return "0 s"
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(value) >= factor * 0.9995:
            return f"{_digits(value / factor)} {unit}"
    return f"{_digits(value * 1e9)} ns"


def bytes_text(value: float) -> str:
    """Format bytes in powers of ten, as the papers count them.

    >>> bytes_text(498e6), bytes_text(12)
    ('498 MB', '12 B')
    """
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= factor * 0.9995:
            return f"{_digits(value / factor)} {unit}"
    return f"{value:.0f} B"


def flops_text(value: float) -> str:
    """Format a number of floating-point operations (not a rate).

    >>> flops_text(2.5e12)
    '2.50 TFLOP'
    """
    for factor, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor * 0.9995:
            return f"{_digits(value / factor)} {unit}FLOP"
    return f"{value:.0f} FLOP"


def percent(share: float) -> str:
    """Format a fraction of one as a percentage.

    >>> percent(3 / 11)
    '27.3 %'
    """
    return f"{100 * share:.1f} %"


def _digits(value: float) -> str:
    """Format a number between 1 and 1000 or more with three significant digits."""
    size = abs(value)
    return f"{value:.2f}" if size < 9.995 else f"{value:.1f}" if size < 99.95 else f"{value:,.0f}"
