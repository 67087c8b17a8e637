"""Numbers with units, as people type them: "25 %", "0.25", "6 MB", "1.5 GiB", "12 ms".

share     from 0 to 1; "25 %" is 0.25
bytes     kB, MB, GB, TB are powers of ten, KiB, MiB, GiB, TiB powers of two
seconds   s, ms, µs or us, ns
""        a plain number
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from mpkit.common.units import bytes_text, percent, seconds

__all__ = ["EXAMPLES", "amount", "spell_amount"]

UNITS: Mapping[str, Mapping[str, float]] = {
    "share": {"": 1.0, "%": 0.01},
    "bytes": {"": 1.0, "B": 1.0}
    | {f"{prefix}B": 1000.0 ** (i + 1) for i, prefix in enumerate("kMGT")}
    | {f"{prefix}iB": 1024.0 ** (i + 1) for i, prefix in enumerate("KMGT")},
    "seconds": {"": 1.0, "s": 1.0, "ms": 1e-3, "µs": 1e-6, "us": 1e-6, "ns": 1e-9},
    "": {"": 1.0},
}
EXAMPLES: Mapping[str, str] = {
    "share": "'25 %' or 0.25", "bytes": "'6 MB', '1.5 GiB' or 6e6", "seconds": "'12 ms' or 0.012", "": "12",
}  # fmt: skip


def amount(value: object, unit: str) -> float:
    """Return a number in a unit's base: a share of one, bytes, seconds.

    >>> amount("25 %", "share"), amount(0.25, "share"), amount("6 mb", "bytes"), amount("1,5 GiB", "bytes")
    (0.25, 0.25, 6000000.0, 1610612736.0)
    >>> amount(25, "share")
    Traceback (most recent call last):
    ValueError: 25 is no share: a share lies between 0 and 1. 25 percent are '25 %' or 0.25

    Raises:
        ValueError: The value is no such number; the message has one that is.
    """
    wanted = f"such as {EXAMPLES[unit]}"
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([-+]?[\d.,_]+(?:[eE][-+]?\d+)?)\s*([^\d\s]*)\s*", value)
        if match is None:
            raise ValueError(f"{value!r} is no number; {wanted}")
        number, said = _number(match[1], wanted), match[2]
        units = {name.casefold(): factor for name, factor in UNITS[unit].items()}
        if said.casefold() not in units:
            known = ", ".join(name for name in UNITS[unit] if name)
            raise ValueError(
                f"{value!r}: {said!r} is no unit here ({known or 'a plain number is asked for'}); {wanted}"
            )
        result = number * units[said.casefold()]
    elif isinstance(value, bool) or not hasattr(value, "__float__"):
        raise ValueError(f"{value!r} is no number; {wanted}")
    else:
        result = float(value)
    if not math.isfinite(result) or result < 0:
        raise ValueError(f"{value!r}: a number that is not negative is asked for; {wanted}")
    if unit == "share" and result > 1:
        near = f". {result:g} percent are '{result:g} %' or {result / 100:g}" if result <= 100 else ""
        raise ValueError(f"{value} is no share: a share lies between 0 and 1{near}")
    return result


def spell_amount(value: float, unit: str) -> str:
    """Return a number with its unit.

    >>> spell_amount(3 / 11, "share"), spell_amount(6e6, "bytes"), spell_amount(16, "")
    ('27.3 %', '6.00 MB', '16')
    """
    if unit == "":
        return f"{value:g}"
    return {"share": percent, "bytes": bytes_text, "seconds": seconds}[unit](value)


def _number(text: str, wanted: str) -> float:
    """Return a number; a single comma that is followed by other than three digits is a decimal one."""
    plain = text.replace("_", "")
    if re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?", plain):
        plain = plain.replace(",", "")
    elif plain.count(",") == 1 and "." not in plain:
        plain = plain.replace(",", ".")
    try:
        return float(plain)
    except ValueError:
        raise ValueError(f"{text!r} is no number; {wanted}") from None
