"""Any mesh played on tensors without content does what the real one does, and ranks that are alike are played once."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import mpkit as mk
from mpkit.plan.axes import AXES
from mpkit.plan.mesh import Mesh
from mpkit.prediction.dry_run.mirror import RankMirror
from mpkit.trace import MEMORY, OP, Kind, RankTrace

Clusters = Callable[[int], mk.Cluster]


# ---------------------------------------------------------------- ranks that stand for others


@given(
    degrees=st.lists(st.integers(1, 3), min_size=4, max_size=4),
    ends=st.tuples(st.integers(0), st.integers(0)),
    axes=st.sampled_from([axes for n in range(1, 5) for axes in combinations(AXES, n)]),
)
def test_a_mirror_names_the_ranks_that_it_would_talk_to_itself(
    degrees: list[int], ends: tuple[int, int], axes: tuple[str, ...]
) -> None:
    mesh = Mesh(*degrees)
    played, other = (end % mesh.size for end in ends)
    theirs, expected = mesh.group(played, *axes), mesh.group(other, *axes)
    ops = np.zeros(2, OP)
    ops["kind"], ops["group"], ops["peer"] = (Kind.FORWARD, Kind.BROADCAST), (0, 1), (-1, theirs[0])
    recorded = RankTrace(ops, np.zeros(0, MEMORY), ["", ",".join(map(str, theirs))])
    mirrored = RankMirror(recorded, played, mesh).trace_of(other)
    assert mirrored.names[1] == ",".join(map(str, expected))
    assert mirrored.ops["peer"].tolist() == [-1, expected[0]]
    assert recorded.ops["peer"].tolist() == [-1, theirs[0]]
