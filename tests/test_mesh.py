"""The mesh: which rank is where, whom it talks to along which axis, and which part of a parameter it holds."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpkit.plan.axes import AXES
from mpkit.plan.mesh import Mesh
from mpkit.strategies.comm.mesh_axes import MeshAxes
from mpkit.strategies.stage.shard import HeldPart, Shard, evenly, put_together

degrees = st.integers(1, 4)


@given(degrees, degrees, degrees, degrees, st.sets(st.sampled_from(AXES)))
def test_groups_part_the_ranks(pp: int, dp: int, cp: int, tp: int, axes: set[str]) -> None:
    mesh = Mesh(pp, dp, cp, tp)
    places = [mesh.place(rank) for rank in range(mesh.size)]
    assert [mesh.rank(*place) for place in places] == list(range(mesh.size))
    groups = mesh.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
    for group in groups:
        assert list(group) == sorted(group)
        for axis in set(AXES) - axes:
            assert len({getattr(places[rank], axis) for rank in group}) == 1


def test_every_axis_talks_to_its_own(clusters: Any) -> None:
    mesh = Mesh(pp=2, dp=2, tp=2)
    wanted = [("tp",), ("dp",), ("pp",), ("dp", "cp"), ("pp", "tp"), ("cp",), AXES]

    def talk(ctx: Any) -> list[tuple[float, list[float]]]:
        axes = MeshAxes(ctx.comm, ctx.device, mesh)
        found = []
        for names in wanted:
            axis, mine = axes.communicator_of(*names), torch.tensor([float(ctx.rank)])
            gathered = axis.all_gather(mine)
            part = axis.reduce_scatter(torch.ones(axis.size) * ctx.rank).item()
            assert part == sum(axis.ranks)
            found.append((axis.all_reduce(mine.clone()).item(), gathered.tolist()))
        return found

    for rank, found in enumerate(clusters(8).run(talk)):
        for names, (total, gathered) in zip(wanted, found, strict=True):
            group = mesh.group(rank, *names)
            assert total == sum(group) and gathered == [float(r) for r in group]


@given(st.integers(0, 20), st.integers(1, 6))
def test_even_ranges_differ_by_one_at_most(count: int, t: int) -> None:
    parts = evenly(count, t)
    assert [i for part in parts for i in part] == list(range(count)) and len(parts) == t
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@settings(max_examples=30)
@given(st.data())
def test_the_shards_of_a_parameter_make_it_whole(data: st.DataObject) -> None:
    t, dim = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 1))
    fused = data.draw(st.integers(1, 3))
    one = data.draw(st.integers(t, 7))
    shape = [3, 3]
    shape[dim] = fused * one
    whole = torch.randn(*shape)
    shards = [
        Shard(tuple(shape), dim, tuple(range(k * one + p.start, k * one + p.stop) for k in range(fused)))
        for p in evenly(one, t)
    ]
    parts = [shard.take(whole) for shard in shards]
    assert all(tuple(part.shape) == shard.shape for part, shard in zip(parts, shards, strict=True))
    assert torch.equal(put_together(list(map(HeldPart.of_shard, shards, parts))), whole)
