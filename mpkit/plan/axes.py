"""The axes of a mesh: what each divides, what its ranks hold of the parameters, and how it is drawn.

`TABLE` has a row per axis, outermost first. A row of one's own says in addition how a model is divided along it, and
what that sends; `Plan(axes={row: 2})` takes it. From such a row follow the groups of ranks, the parts that each rank
updates, clips and saves, the comparison with serial training, the pictures, and the formulas beside counted bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpkit.plan.checks import call_of, whole

if TYPE_CHECKING:
    from mpkit.plan.plan import Plan

__all__ = [
    "AXES",
    "EXPERT_AXES",
    "TABLE",
    "Axis",
    "axes_as_json",
    "axes_from_json",
    "checked_axes",
    "join_axes",
]

Divide = Callable[[Any, Any], Mapping[str, Any]]
Volume = Callable[[Any, Any, int], Mapping[str, tuple[str, float]]]


@dataclass(frozen=True, repr=False)
class Axis:
    """An axis of the mesh.

    Attributes:
        name: its name in a Plan, in groups and in pictures.
        divides: what its ranks divide among themselves.
        parameters: what its ranks hold of the parameters.
        ink: its colour in pictures: Okabe and Ito's, legible on light and dark backgrounds.
        within: the axis that it is a part of; "" if it is whole.
        of_experts: whether it is an axis of the mesh that the experts see.
        divide: the strategy of an axis of one's own, called on every rank as divide(model, group): it leaves the rank
            its part of the model, in place, and returns a `Shard` by every name of each divided parameter. All ranks
            of the group compute the same samples, and each must end with the whole model's gradients of what is not
            divided.
        volume: its formula, called as volume(model, inputs, n) with one micro-batch's inputs: by kind of communication
            ("all_reduce"), the formula in symbols and the elements that a rank sends on the wire for that micro-batch.
    """

    name: str
    divides: str
    parameters: str
    ink: str
    within: str = ""
    of_experts: bool = False
    divide: Divide | None = None
    volume: Volume | None = None

    def __repr__(self) -> str:
        return self.name


TABLE = (
    Axis("pp", "the layers, into stages", "each those of its stages", "#0072b2"),
    Axis("dp", "the samples of a batch", "all the same; under ZeRO each a shard", "#009e73"),
    Axis("dp_replicate", "the samples of a batch", "all the same", "#56b4e9", within="dp"),
    Axis("dp_shard", "the samples of a batch", "each a shard", "#009e73", within="dp"),
    Axis("edp", "the samples of a batch", "the same experts; under ZeRO a shard", "#009e73", of_experts=True),
    Axis("ep", "the experts of each layer", "each some of the experts", "#cc79a7", of_experts=True),
    Axis("cp", "each sequence", "all the same; under ZeRO each a shard", "#e69f00"),
    Axis("tp", "each layer", "each a part of every divided layer", "#d55e00"),
)
"""The axes, outermost first; the last varies fastest."""

AXES = tuple(axis.name for axis in TABLE if not axis.within and not axis.of_experts)
"""The names of the whole axes."""

EXPERT_AXES = ("pp", "dp_replicate", "edp", "ep", "tp")
"""The axes of the mesh that experts see, outermost first."""


def join_axes(axes: Iterable[str]) -> str:
    """Return the name of several axes together; parts that make up a whole axis have its name.

    >>> join_axes(["pp", "dp_replicate", "dp_shard"])
    'pp x dp'
    """
    names = list(axes)
    for axis in AXES:
        parts = [row.name for row in TABLE if row.within == axis]
        if parts and all(part in names for part in parts):
            names[names.index(parts[0])] = axis
            names = [name for name in names if name not in parts]
    return " x ".join(names)


# ---- axes of one's own in a Plan --------------------------------------------------------------------------------

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
