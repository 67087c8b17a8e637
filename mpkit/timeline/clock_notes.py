"""What a reader should know of the clocks of a run on several nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpkit.common.units import seconds

__all__ = ["clock_notes"]


def clock_notes(meta: Mapping[str, Any]) -> list[str]:
    """Return a sentence on how the nodes' clocks were put on rank 0's; none for a run on one machine.

    >>> clock_notes({"clocks": [{"node": "1", "host": "b", "offset": -0.3, "residual": 5e-5, "drift": 0.0}]})
    ["The clock of b (0.3 s ahead) was put on rank 0's, to within 50.0 µs (half of a round trip through the store)."]
    """
    clocks = meta.get("clocks")
    if not isinstance(clocks, list) or not clocks:
        return []
    each, worst = [], 0.0
    for clock in clocks:
        offset, drift = float(clock["offset"]), float(clock["drift"])
        worst = max(worst, float(clock["residual"]))
        way = f"{_spelt(abs(offset))} {'ahead' if offset < 0 else 'behind'}"
        each.append(f"{clock['host']} ({way}{f', {seconds(drift)} of drift' if drift else ''})")
    whose = "The clock of" if len(each) == 1 else "The clocks of"
    was = "was" if len(each) == 1 else "were"
    names = ", ".join(each[:3]) + (f" and {len(each) - 3} more hosts" if len(each) > 3 else "")
    return [
        f"{whose} {names} {was} put on rank 0's, to within {seconds(worst)} (half of a round trip through the store)."
    ]


def _spelt(offset: float) -> str:
    return f"{offset:.4g} s" if offset >= 0.1 else seconds(offset)
