"""Whether the groups of a trace lie along the axes of a plan's mesh, so that views may name them by it."""

from __future__ import annotations

from mpkit.plan.mesh import Mesh
from mpkit.plan.mesh_of_trace import axis_of
from mpkit.plan.plan import Plan
from mpkit.trace import Kind, Trace

__all__ = ["plan_of_mesh"]


def plan_of_mesh(trace: Trace, plan: Plan | None) -> Plan | None:
    """Return the plan if all of its ranks are in the trace, in the order of its mesh; else None.

    Ranks of a mesh are numbered with pp outermost and tp innermost. A program may number them otherwise: then some
    group spans axes of which it should know only one.

    Args:
        trace: an imported trace.
        plan: the plan that was inferred for it.
    """
    if plan is None or plan.ranks != trace.world_size or plan.ranks == 1:
        return None
    for number, rank in enumerate(trace.ranks):
        comm = rank.ops[(rank.ops["kind"] >= Kind.SEND) & (rank.ops["kind"] <= Kind.BARRIER)]
        exchanged = {int(row["group"]) for row in comm if row["kind"] == Kind.ALL_TO_ALL}
        for line in {int(group) for group in comm["group"]}:
            words = rank.name(line).partition("#")[0]
            members = sorted(int(part) for part in words.replace(">", ",").split(",") if part.isdigit())
            if len(members) < 2 or len(members) == plan.ranks:
                continue
            if not _along_one_axis(
                plan.mesh, tuple(members), number, message=">" in words, exchange=line in exchanged
            ):
                return None
    return plan


def _along_one_axis(
    mesh: Mesh, members: tuple[int, ...], rank: int, *, message: bool, exchange: bool
) -> bool:
    """Say whether ranks are a group along one axis (or two, as the replicas of a norm are); messages run along pp."""
    axis = axis_of(mesh, members, exchange=exchange)
    if message:
        return axis == "pp"
    return tuple(sorted(mesh.group(rank, *axis.split(" x ")))) == members
