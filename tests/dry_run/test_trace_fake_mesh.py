"""Any mesh played on tensors without content does what the real one does, and ranks that are alike are played once."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, groupby
from operator import itemgetter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import mpkit as mk
from mpkit.models import GPT, next_token_loss
from mpkit.plan.axes import AXES
from mpkit.plan.mesh import Mesh
from mpkit.prediction.dry_run.mirror import RankMirror
from mpkit.trace import MEMORY, OP, Kind, RankTrace, Trace
from tests.fakes import adamw, communication

Clusters = Callable[[int], mk.Cluster]


# ---------------------------------------------------------------- equal to the real run


# ---------------------------------------------------------------- ranks that stand for others


def tokens(batch: int, length: int) -> tuple[Tensor, Tensor]:
    return torch.empty(batch, length, dtype=torch.long, device="meta"), torch.empty(
        batch, length, dtype=torch.long, device="meta"
    )


def small(heads: int = 2) -> nn.Module:
    return GPT(layers=2, width=8 * heads, heads=heads, length=8)


def play(clusters: Clusters, plan: mk.Plan, model_fn: Callable[[], nn.Module] = small, **how: Any) -> Trace:
    given: dict[str, Any] = {"batch": tokens(8, 8), "loss": next_token_loss, "optimizer": adamw}
    return mk.trace_fake(model_fn, plan, cluster=clusters(1), **(given | how))


def check_complete(trace: Trace) -> mk.Timeline:
    timeline = mk.Timeline.of(trace)
    assert not [note for note in timeline.notes if "Not finished" in note]
    assert timeline.steps
    return timeline


def changes(rank: RankTrace) -> list[tuple[int, str, bool, list[int]]]:
    """Return what is allocated and freed, one after the other; what is freed at once is in no order."""
    made = (
        (int(row["time"]), str(row["category"]), bool(row["delta"] < 0), int(row["delta"]))
        for row in rank.memory
    )
    alike = (list(rows) for _, rows in groupby(made, key=itemgetter(1, 2)))
    return [(*rows[0][:3], sorted(delta for *_, delta in rows)) for rows in alike]


@pytest.mark.soak
def test_mirrored_ranks_are_as_if_each_had_been_played(clusters: Clusters) -> None:
    plan = mk.Plan(pp=2, dp=2, tp=2, sequence_parallel=True, schedule="1f1b", microbatches=2)
    mirrored = play(clusters, plan)
    assert mirrored.meta["fake"]["played"] == [0, 4]
    # Each of these plays its own place along dp and tp, at every stage.
    columns = {0: mirrored} | {rank: play(clusters, plan, rank=rank) for rank in (1, 2, 3)}
    each = [columns[rank % 4].ranks[rank] for rank in range(8)]
    assert [columns[rank % 4].meta["fake"]["stands_for"][rank] for rank in range(8)] == list(range(8))
    for mirror, own in zip(mirrored.ranks, each, strict=True):
        assert communication(mirror) == communication(own)
        columns_of = [name for name in OP.names or () if name not in ("group", "name", "where", "value")]
        assert (
            mirror.ops[columns_of] == own.ops[columns_of]
        ).all()  # all but strings, and losses, which are nan
        assert changes(mirror) == changes(own)
    one, other = check_complete(mirrored), check_complete(Trace(each, mirrored.meta))
    for column in ("rank", "kind", "start", "end", "bytes", "peer", "cause"):
        assert (one.spans[column] == other.spans[column]).all()


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


# ---------------------------------------------------------------- other models, and full size
