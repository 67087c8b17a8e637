"""The axes of a mesh: what each divides, what its ranks hold of the parameters, and how it is drawn."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = [
    "AXES",
    "EXPERT_AXES",
    "TABLE",
    "Axis",
    "join_axes",
]


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
    """

    name: str
    divides: str
    parameters: str
    ink: str
    within: str = ""
    of_experts: bool = False

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
