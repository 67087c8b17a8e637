"""A Plan's `axes`: axes of one's own, checked, and as JSON. Every message ends with a plan that works."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mpkit.plan.axes import TABLE, Axis
from mpkit.plan.checks import call_of, whole

if TYPE_CHECKING:
    from mpkit.plan.plan import Plan

__all__ = ["axes_as_json", "axes_from_json", "checked_axes"]

SHOWN = "name", "divides", "parameters", "ink"
"""What JSON keeps of an axis: functions stay in the program that has them."""


def checked_axes(plan: Plan) -> tuple[tuple[Axis, int], ...]:
    """Return the axes of one's own with their degrees, without those of degree 1.

    Raises:
        ValueError: an entry is not an Axis with a degree, a name is taken, or nn.DataParallel is to run it.
    """
    given: Any = plan.axes
    if given == ():
        return ()
    none = call_of(plan, {"axes": ()})
    try:
        rows = [(axis, whole(n)) for axis, n in (given.items() if isinstance(given, Mapping) else given)]
    except (TypeError, ValueError):
        rows = [(given, None)]
    names = {row.name for row in TABLE}
    for axis, degree in rows:
        if not isinstance(axis, Axis) or degree is None or degree < 1:
            raise ValueError(
                f"Plan(axes={given!r}): axes are rows of mpkit.plan.axes.Axis, each with its degree, {{row: 2}}; "
                f"without any: {none}"
            )
        if axis.name in names or not axis.name.isidentifier():
            raise ValueError(
                f"Plan(axes={given!r}): the name {axis.name!r} is {'taken' if axis.name in names else 'not a word'}. "
                f"A row has a name of its own, such as Axis('mine', ...); without any: {none}"
            )
        names.add(axis.name)
    if rows and plan.data_parallel == "dp":
        raise ValueError(
            f"{call_of(plan)}: nn.DataParallel replicates whole models, and axes divide them; DDP does both: "
            f"{call_of(plan, {'data_parallel': 'ddp'})}"
        )
    return tuple((axis, degree) for axis, degree in rows if degree is not None and degree > 1)


def axes_as_json(own: Iterable[tuple[Axis, int]]) -> list[dict[str, Any]]:
    """Return axes in JSON types, without their functions."""
    return [{**{key: getattr(axis, key) for key in SHOWN}, "degree": degree} for axis, degree in own]


def axes_from_json(rows: Sequence[Mapping[str, Any]]) -> tuple[tuple[Axis, int], ...]:
    """Return the axes that `axes_as_json` wrote; they have no strategy, and so cannot train.

    >>> axes_from_json(axes_as_json([(Axis("mine", "the head", "each a part", "#000000"), 2)]))
    ((mine, 2),)
    """
    return tuple(
        (Axis(row["name"], row["divides"], row["parameters"], row["ink"]), int(row["degree"])) for row in rows
    )
