"""What is unwise about a placement, in the words that advice, warnings and notes on timelines share."""

from collections.abc import Callable, Hashable, Sequence

from mpkit.common.units import memory_share, memory_text

GIB = 2**30
TP_INSIDE = "Tensor parallelism sends four times per layer what nothing hides: keep it inside the node."


def spans_nodes(groups: Sequence[Sequence[int]], node_of: Callable[[int], Hashable], per_node: int) -> str:
    """Return the note about tensor-parallel groups that span nodes, if any does: "" if not.

    >>> spans_nodes([(0, 1), (2, 3)], ["a", "a", "a", "b"].__getitem__, 3).split(". ")[1]
    'Here a group of 2 spans 2 nodes of 3 devices.'
    """
    spans = {len({node_of(rank) for rank in group}): len(group) for group in groups}
    nodes = max(spans, default=1)
    if nodes < 2:
        return ""
    return f"{TP_INSIDE} Here a group of {spans[nodes]} spans {nodes} nodes of {per_node} devices."


def out_of_memory(needed: float, room: float, largest: str) -> str:
    """Return the note about a rank whose peak of `needed` bytes exceeds its device's `room`, by the largest category.

    >>> out_of_memory(30 * GIB, 22.5 * GIB, "activations")
    'it needs 30.0 of 22.5 GiB, out by 7.5 GiB; the largest part is activations'
    """
    lacking = memory_text(needed - room)
    return f"it needs {memory_share(needed, room)}, out by {lacking}; the largest part is {largest}"
