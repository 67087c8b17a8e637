"""What is unwise about a placement, in the words that advice, warnings and notes on timelines share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from mpkit.common.units import memory_share, memory_text

GIB = 2**30
TP_INSIDE = "Tensor parallelism sends four times per layer what nothing hides: keep it inside the node."


def spans_nodes(groups: Sequence[Sequence[int]], node_of: Callable[[int], Hashable], per_node: int) -> str:
    """Return what to say of groups of tensor parallelism that span nodes; "" if none does.

    >>> spans_nodes([(0, 1), (2, 3)], ["a", "a", "a", "b"].__getitem__, 3).split(". ")[1]
    'Here a group of 2 spans 2 nodes of 3 devices.'

    Args:
        groups: ranks that share their layers.
        node_of: returns the node of a rank.
        per_node: devices per node.
    """
    spans = {len({node_of(rank) for rank in group}): len(group) for group in groups}
    nodes = max(spans, default=1)
    if nodes < 2:
        return ""
    return f"{TP_INSIDE} Here a group of {spans[nodes]} spans {nodes} nodes of {per_node} devices."


def out_of_memory(needed: float, room: float, largest: str) -> str:
    """Return what to say of a rank whose device has too little memory.

    >>> out_of_memory(30 * GIB, 22.5 * GIB, "activations")
    'it needs 30.0 of 22.5 GiB, out by 7.5 GiB; the largest part is activations'

    Args:
        needed: bytes at the rank's peak.
        room: bytes that its device has.
        largest: the category with most.
    """
    return (
        f"it needs {memory_share(needed, room)}, out by {memory_text(needed - room)}; "
        f"the largest part is {largest}"
    )
