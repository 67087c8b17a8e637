"""What ranks send for routing that depends on the whole batch (`mpkit.strategies.runtime.batch_routing`).

    all-reduces   E numbers per layer and step for a bias, and for the auxiliary loss: 2 E (n-1)/n each
    all-gathers   E numbers per layer and stretch of tokens for a capacity: E (n-1)/n per stretch of a micro-batch

n ranks have different tokens of the batch: dp x cp, and tp where it divides the sequence.
"""

from __future__ import annotations

from mpkit.plan.axes import join_axes
from mpkit.plan.mesh_of_trace import long_axes
from mpkit.timeline.formulas import Formula, FormulaInputs
from mpkit.trace import Kind

__all__ = ["add_routing"]


def add_routing(
    formula: Formula | None, known: FormulaInputs | None, axis: str, kind: Kind
) -> Formula | None:
    """Return a formula with what balanced routing adds to it along this axis; the formula itself if it adds nothing."""
    if known is None:
        return formula
    mesh, long = known.mesh, long_axes(known.mesh)
    divided = ("tp",) if known.plan.get("sequence_parallel") else ()
    if axis != join_axes(name for name in mesh.parts("dp", "cp", *divided) if name in long):
        return formula
    n = mesh.dp * mesh.cp * (mesh.tp if divided else 1)
    sent, times = {Kind.ALL_REDUCE: (known.routing[0], 2), Kind.ALL_GATHER: (known.routing[1], 1)}.get(
        kind, ((), 0)
    )
    if not any(sent):
        return formula
    symbols, words = f"{'2 ' * (times == 2)}E (n-1)/n a layer", "the rows of each expert in the whole batch"
    if formula is None:
        return Formula(symbols, words, lambda rank: times * known.total(sent, rank) * (n - 1) / n)
    return Formula(
        f"{formula.symbols}; {symbols}",
        f"{formula.words}; {words}",
        lambda rank: formula.of(rank) + times * known.total(sent, rank) * (n - 1) / n,
    )
