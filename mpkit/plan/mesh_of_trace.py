"""Where in the mesh a run's ranks are, and along which axis a group of them lies, as read from a trace's meta."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from mpkit.plan.axes import AXES, join_axes
from mpkit.plan.mesh import Mesh

__all__ = ["WORLD", "axis_of", "holders_of", "long_axes", "mesh_of", "place_text"]

WORLD = "world"
"""The only axis of ranks that are in no mesh."""


def mesh_of(meta: Mapping[str, Any], ranks: int) -> Mesh | None:
    """Return the mesh of the plan in a trace's meta; None without a plan, or if its number of ranks differs.

    >>> mesh_of({"plan": '{"pp": 2, "tp": 2}'}, ranks=4)
    Mesh(pp=2, dp=1, cp=1, tp=2)
    """
    try:
        plan = json.loads(meta["plan"])
        degrees = {axis: int(plan.get(axis) or 1) for axis in (*AXES, "ep")}
        groups = degrees["dp"] // int(plan.get("dp_shard") or degrees["dp"])
        mesh = Mesh(**degrees, dp_replicate=groups, etp=plan.get("etp") or 0)
    except (KeyError, ValueError, TypeError, AttributeError, ZeroDivisionError):
        return None
    return mesh if mesh.size == ranks else None


def holders_of(meta: Mapping[str, Any]) -> list[int]:
    """Return each stage's place along pp, according to the plan in a trace's meta.

    >>> holders_of({"plan": '{"pp": 2, "schedule": "interleaved_1f1b", "microbatches": 4, "virtual_stages": 2}'})
    [0, 1, 0, 1]
    """
    from mpkit.plan.plan import Plan

    plan = json.loads(meta["plan"])
    names = ("pp", "schedule", "microbatches", "virtual_stages")
    pipeline = {name: plan[name] for name in names if name in plan}
    return [0] if pipeline.get("pp", 1) == 1 else list(Plan.from_json(pipeline).build().stage_to_rank)


def long_axes(mesh: Mesh) -> list[str]:
    """List the axes with more than one place, outermost first; parts of an axis by themselves."""
    return [axis for axis in mesh.axes if mesh.degree(axis) > 1]


def axis_of(
    mesh: Mesh | None, ranks: Iterable[int], meta: Mapping[str, Any] | None = None, *, exchange: bool = False
) -> str:
    """Return the axis along which these ranks lie: the axes in which their coordinates differ.

    Ranks that divide experts lie along "ep" for an `exchange`, an all-to-all, and those that hold the same experts
    along "edp"; both lie along axes of the replicas too.

    Without a plan's mesh it is the name that the program's own DeviceMesh gave to the group, which is in the meta.

    >>> mesh = Mesh(pp=2, dp=2, tp=2)
    >>> axis_of(mesh, (0, 1)), axis_of(mesh, (0, 4)), axis_of(mesh, range(8))
    ('tp', 'pp', 'pp x dp x tp')
    >>> hybrid = Mesh(dp=4, dp_replicate=2)
    >>> axis_of(hybrid, (0, 1)), axis_of(hybrid, (0, 2)), axis_of(hybrid, range(4))
    ('dp_shard', 'dp_replicate', 'dp')
    >>> folded = Mesh(dp=4, ep=2)
    >>> axis_of(folded, (0, 1), exchange=True), axis_of(folded, (0, 2)), axis_of(folded, range(4))
    ('ep', 'edp', 'dp')
    >>> axis_of(None, (0, 1), {"axes": {"0,1": "tp"}})
    'tp'
    """
    if mesh is None:
        named = (meta or {}).get("axes", {})
        return str(named.get(",".join(map(str, ranks)), WORLD))
    ranks = tuple(ranks)
    for axis in ("ep",) if exchange else ("edp",):
        if mesh.ep > 1 and len(ranks) > 1 and ranks == mesh.group(ranks[0], axis):
            return axis
    places = [mesh.coordinates(rank) for rank in ranks]
    differ = [axis for i, axis in enumerate(mesh.axes) if len({place[i] for place in places}) > 1]
    return join_axes(differ) or WORLD


def place_text(mesh: Mesh, rank: int) -> str:
    """Return a rank's coordinates along the whole axes that have more than one place, as text.

    >>> place_text(Mesh(pp=2, dp=2, tp=2), 5)
    'pp1 dp0 tp1'
    """
    places = zip(AXES, mesh.shape, mesh.place(rank), strict=True)
    return " ".join(f"{axis}{place}" for axis, degree, place in places if degree > 1)
