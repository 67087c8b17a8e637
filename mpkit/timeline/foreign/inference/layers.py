"""Whether layers are divided: tensor parallelism."""

from __future__ import annotations

from collections import Counter

from mpkit.timeline.foreign.inference.observations import AxisEvidence, ObservedSteps
from mpkit.trace import Kind

__all__ = ["tensor_of"]


def tensor_of(seen: ObservedSteps, *, sharded: bool) -> AxisEvidence:
    """Find all-reduces within forwards, equally many of one size: those that end a layer divided by rows.

    Args:
        seen: the trace.
        sharded: whether parameters are, so that only a mesh's own word tells a reduction of layers.
    """
    for number in range(len(seen.ranks)):
        found = seen.communications_during(number, Kind.FORWARD, (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER))
        named = [row for row in found if seen.group(number, row)[1] == "tp"]
        redistributed = seen.library_facts[number]["redistributed"] if number < len(seen.library_facts) else 0
        sizes = Counter(int(row["bytes"]) for row in found)
        often = [nbytes for nbytes, count in sizes.items() if count >= 2 and (nbytes > 4096 or redistributed)]
        chosen = named or [row for row in found if int(row["bytes"]) in often]
        if not chosen or (sharded and not named):
            continue
        size = seen.group(number, chosen[0])[0]
        if size > 1:
            how = (
                "its mesh calls the axis tp" if named
                else f"where DTensor redistributes {redistributed:,} times" if redistributed
                else "of equal sizes, as layers divided by rows end"
            )  # fmt: skip
            words = f"{len(chosen)} all-reduces among {size} ranks within the forwards of a step, {how}"
            return AxisEvidence(
                {"tp": size}, [f"{words}: tensor parallelism."], announced=bool(named or redistributed)
            )
    return AxisEvidence()
