"""The axes of a mesh: what each divides, what its ranks hold of the parameters, and how it is drawn.

`TABLE` has a row per axis, outermost first. A row of one's own says in addition how a model is divided along it, and
what that sends; `Plan(axes={row: 2})` takes it. From such a row follow the groups of ranks, the parts that each rank
updates, clips and saves, the comparison with serial training, the pictures, and the formulas beside counted bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["AXES", "EXPERT_AXES", "TABLE", "Axis", "join_axes", "ulysses_degree"]

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
    Axis("cp_ring", "each sequence", "all the same; under ZeRO each a shard", "#e69f00", within="cp"),
    Axis(
        "cp_ulysses",
        "each sequence; for attention the heads",
        "all the same; under ZeRO each a shard",
        "#cc79a7",
        within="cp",
    ),
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
    for whole in AXES:
        parts = [axis.name for axis in TABLE if axis.within == whole]
        if parts and all(part in names for part in parts):
            names[names.index(parts[0])] = whole
            names = [name for name in names if name not in parts]
    return " x ".join(names)


def ulysses_degree(cp_method: object, cp: int) -> int:
    """Return how many of the cp ranks of a sequence divide the heads for attention, by a Plan's cp_method.

    >>> [ulysses_degree(method, 8) for method in ("ring", "ulysses", (2, 4))]
    [1, 8, 2]
    """
    if isinstance(cp_method, (tuple, list)):
        return int(cp_method[0])
    return cp if cp_method == "ulysses" else 1
