"""What all-to-alls within forwards are for: tokens go to experts and back (ep), or heads are exchanged (Ulysses).

axis        the program's mesh calls it ep, cp or the like
attention   under Ulysses each attention lies between all-to-alls, the first one too; experts come after an attention
counts      before rows go to experts, ranks tell each other how many: a small all-to-all before two large ones

If none of these decides, the all-to-alls are mentioned and not in the plan.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit.timeline.foreign.inference.observations import AxisEvidence, ObservedSteps
from mpkit.trace import Kind

__all__ = ["exchanges_of"]

Array = npt.NDArray[Any]
EXPERTS, HEADS = ("ep", "expert", "experts"), ("cp", "sp", "ulysses", "context", "sequence")
_ATTENTION = re.compile(r"attention|attn|flash|fmha", re.IGNORECASE)
SMALL = 8
"""How many times smaller an exchange of counts is than one of rows, at least."""


def exchanges_of(seen: ObservedSteps, replicas: AxisEvidence) -> AxisEvidence:
    """Return what the all-to-alls within the forwards of a step say.

    Args:
        seen: the trace.
        replicas: what it says of replicas, of which experts' ranks are some, and Ulysses' ranks are counted as.
    """
    for number in range(len(seen.ranks)):
        found = np.sort(seen.communications_during(number, Kind.FORWARD, (Kind.ALL_TO_ALL,)), order="start")
        groups = [seen.group(number, row) for row in found]
        size, axis = max(groups, default=(1, ""))
        if size < 2:
            continue
        said = f"{len(found)} all-to-alls among {size} ranks within the forwards of a step"
        for_experts, why = _purpose(axis, found, _attentions(seen, number))
        if for_experts is None:
            unknown = (
                "tokens go to experts and back, heads are exchanged for sequences (Ulysses, "
                "Plan(cp_method='ulysses')), or rows of sharded embeddings are fetched. The trace does not say which."
            )
            return AxisEvidence({}, [f"{said}: {unknown}"])
        options = _with_experts(size, replicas) if for_experts else _with_heads(size, replicas)
        what = (
            f"experts are divided, ep={size}"
            if for_experts
            else f"heads are exchanged for sequences, cp={size}"
        )
        beside = "" if options else ", which does not go with the replicas, and so is not in the plan"
        return AxisEvidence(options, [f"{said}, {why}: {what}{beside}."], announced=bool(axis))
    return AxisEvidence()


def _purpose(axis: str, found: Array, attentions: Sequence[int]) -> tuple[bool | None, str]:
    """Return whether all-to-alls are for experts, or for heads; None if nobody knows; and why."""
    if axis in EXPERTS + HEADS:
        return axis in EXPERTS, f"whose axis the program's mesh calls {axis}"
    before = int((found["start"] < attentions[0]).sum()) if attentions else 0
    after = int((found["start"] > attentions[-1]).sum()) if attentions else 0
    if before and after and len(found) % len(attentions) == 0:
        return (
            False,
            f"{len(found) // len(attentions)} for each of {len(attentions)} attentions, before and after it",
        )
    sizes = found["bytes"].tolist()
    threes = [sizes[i : i + 3] for i in range(0, len(sizes), 3)]
    if all(len(three) == 3 and SMALL * three[0] <= min(three[1:]) for three in threes):
        return True, "each two of rows after one of their counts"
    if attentions and not before and len(found) % 2 == 0:
        return True, "two at a time, after the first attention"
    return None, ""


def _attentions(seen: ObservedSteps, number: int) -> list[int]:
    """Return when a rank's attentions begin within its forwards; kernels of one attention count once."""
    rank = seen.ranks[number]
    forwards = rank.ops[(rank.ops["kind"] == Kind.FORWARD) & (rank.ops["depth"] == 0)]
    end = int(forwards["end"].max()) if len(forwards) else 0
    exchanges = rank.ops["start"][rank.ops["kind"] == Kind.ALL_TO_ALL]
    begun = [
        int(op["start"])
        for op in rank.ops[(rank.ops["kind"] == Kind.FORWARD) & (rank.ops["depth"] > 0)]
        if op["start"] <= end and _ATTENTION.search(rank.name(int(op["name"])))
    ]
    alone = [t for i, t in enumerate(begun) if not i or ((exchanges > begun[i - 1]) & (exchanges < t)).any()]
    return alone


def _with_experts(size: int, replicas: AxisEvidence) -> dict[str, Any]:
    """Return the options of a plan whose experts are divided: their ranks are some of the replicas."""
    among = replicas.options.get("dp_shard", replicas.options.get("dp"))
    if among is None:
        return {"dp": size, "ep": size}
    return {} if among % size else {"ep": size}


def _with_heads(size: int, replicas: AxisEvidence) -> dict[str, Any]:
    """Return the options of a plan with Ulysses, whose ranks hold the same weights and so look like replicas."""
    options: dict[str, Any] = {"cp": size, "cp_method": "ulysses"}
    for name in ("dp_shard", "dp"):
        among = replicas.options.get(name)
        if among is not None and among % size == 0:
            options[name] = among // size
    if "dp_shard" in replicas.options and "dp_shard" not in options:
        return {}
    return options
