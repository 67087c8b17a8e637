"""The axes of a mesh, outermost first: what the ranks along one divide, and what each holds of the parameters.

pp             the layers, into stages        those of its stages
dp             the samples of a batch         all; under ZeRO a shard
  dp_replicate   groups of replicas           all
  dp_shard       the replicas of a group      a shard
edp            the samples of a batch         the same experts; under ZeRO a shard
ep             the experts of each layer      some of the experts
cp             each sequence                  all; under ZeRO a shard
tp             each layer                     a part of every divided layer
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["AXES", "AXIS_INKS", "EXPERT_AXES", "HYBRID_AXES", "join_axes"]

AXES = ("pp", "dp", "cp", "tp")
"""The whole axes; the last varies fastest."""
HYBRID_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The axes where ZeRO shards within groups of replicas: dp is the two in its place."""
EXPERT_AXES = ("pp", "dp_replicate", "edp", "ep", "tp")
"""The axes of the mesh that experts see."""

AXIS_INKS = {
    "pp": "#0072b2", "dp": "#009e73", "dp_replicate": "#56b4e9", "dp_shard": "#009e73", "edp": "#009e73",
    "ep": "#cc79a7", "cp": "#e69f00", "tp": "#d55e00",
}  # fmt: skip
"""The colour of each axis in pictures: Okabe and Ito's, legible on light and dark backgrounds."""


def join_axes(axes: Iterable[str]) -> str:
    """Return the name of several axes together; parts that make up a whole axis have its name.

    >>> join_axes(["pp", "dp_replicate", "dp_shard"])
    'pp x dp'
    """
    return " x ".join(axes).replace("dp_replicate x dp_shard", "dp")
