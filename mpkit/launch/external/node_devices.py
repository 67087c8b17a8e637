"""Which device each launched rank is on: `devices=` names those of one node, and a rank takes its own by LOCAL_RANK.

tell     what a process says of its device, in the session's greeting
check    a node has no fewer ranks than devices are named, since nobody would use the rest
alone    whether each rank has a device of its own, as nccl needs it
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpkit.devices.local import queries
from mpkit.devices.local.choose import DeviceChoice
from mpkit.devices.local.table import row_of

__all__ = ["all_alone", "check_named", "tell"]


def tell(chosen: DeviceChoice, local_rank: int) -> dict[str, Any]:
    """Return what other processes have to know of this one's device, of JSON types.

    A launcher may let each process see one GPU only (srun --gpus-per-task=1): then all are on cuda:0, and only the
    UUID tells that these are different devices.
    """
    if not chosen.numbers:
        return {"device": chosen.kind, "named": chosen.named, "is": "", "row": []}
    row = row_of(chosen, local_rank, queries.inventory_of(chosen.kind))
    which = row.device if row.identity == "?" else row.identity
    return {"device": chosen.kind, "named": chosen.named, "is": which, "row": list(row)}


def check_named(told: Sequence[dict[str, Any]], nodes: Sequence[str], names: Sequence[str]) -> None:
    """Check that every node has a rank for each device that was named.

    Args:
        told: what `tell` returned, by rank.
        nodes: the node of each rank.
        names: the ranks in words.

    Raises:
        ValueError: more devices are named than a node has ranks.
    """
    for rank, each in enumerate(told):
        here, named = nodes.count(nodes[rank]), each["named"]
        if named > here:
            raise ValueError(
                f"devices= names {named} devices, and the launcher has started {here} rank{'s'[: here > 1]} on the "
                f"node of {names[rank]}: the list is for the ranks of one node, the first for LOCAL_RANK 0. Name "
                f"{here}, or start {named} per node (torchrun --nproc-per-node {named})"
            )


def all_alone(told: Sequence[dict[str, Any]], nodes: Sequence[str]) -> bool:
    """Return whether each rank has a GPU of its own.

    >>> all_alone([{"device": "cuda", "is": "GPU-0a"}, {"device": "cuda", "is": "GPU-1a"}], ["a", "a"])
    True
    >>> all_alone([{"device": "cuda", "is": "cuda:1"}] * 2, ["a", "a"])
    False
    """
    places = {(node, each["is"]) for node, each in zip(nodes, told, strict=True)}
    return all(each["device"] == "cuda" for each in told) and len(places) == len(told)
