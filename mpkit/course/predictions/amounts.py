"""Numbers with units, as people type them: "25 %", "0.25", "6 MB", "1.5 GiB".

share     from 0 to 1; "25 %" is 0.25
bytes     kB, MB, GB, TB are powers of ten, KiB, MiB, GiB, TiB powers of two
""        a plain number
"""

import re
from collections.abc import Mapping

from mpkit.common.units import bytes_text, percent

UNITS: Mapping[str, Mapping[str, float]] = {
    "share": {"": 1.0, "%": 0.01},
    "bytes": {"": 1.0, "B": 1.0}
    | {f"{prefix}B": 1000.0 ** (i + 1) for i, prefix in enumerate("kMGT")}
    | {f"{prefix}iB": 1024.0 ** (i + 1) for i, prefix in enumerate("KMGT")},
    "": {"": 1.0},
}
EXAMPLES: Mapping[str, str] = {"share": "'25 %' or 0.25", "bytes": "'6 MB', '1.5 GiB' or 6e6", "": "12"}


def amount(value: object, unit: str) -> float:
    """Return a number in a unit's base: a share of one, or bytes.

    >>> amount("25 %", "share"), amount(0.25, "share"), amount("6 mb", "bytes"), amount("1.5 GiB", "bytes")
    (0.25, 0.25, 6000000.0, 1610612736.0)
    >>> amount(25, "share")
    Traceback (most recent call last):
    ValueError: 25 is no share: a share lies between 0 and 1. 25 percent are '25 %' or 0.25
    >>> amount("1,5 GB", "bytes")
    Traceback (most recent call last):
    ValueError: '1,5 GB' is no number, or not in B, kB, MB, GB, TB, KiB, MiB, GiB, TiB; such as '6 MB', '1.5 GiB' or 6e6

    Raises:
        ValueError: The value is no such number; the message has one that is.
    """
    units = {name.casefold(): factor for name, factor in UNITS[unit].items()}
    match = re.fullmatch(r"\s*((?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*(\D*?)\s*", str(value), re.I)
    if match is None or match[2].casefold() not in units:
        known = ", ".join(name for name in UNITS[unit] if name)
        in_unit = f", or not in {known}" if known else " without a unit"
        raise ValueError(f"{value!r} is no number{in_unit}; such as {EXAMPLES[unit]}")
    result = float(match[1]) * units[match[2].casefold()]
    if unit == "share" and result > 1:
        near = f". {result:g} percent are '{result:g} %' or {result / 100:g}" if result <= 100 else ""
        raise ValueError(f"{value} is no share: a share lies between 0 and 1{near}")
    return result


def spell_amount(value: float, unit: str) -> str:
    """Return a number with its unit.

    >>> spell_amount(3 / 11, "share"), spell_amount(6e6, "bytes"), spell_amount(16, "")
    ('27.3 %', '6.00 MB', '16')
    """
    return {"share": percent, "bytes": bytes_text, "": "{:g}".format}[unit](value)
