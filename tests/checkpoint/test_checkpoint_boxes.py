"""Pieces of parameters as boxes: what any division of the ranks writes, any other reads, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.state_dict_saver import save

import mpkit as mk
from mpkit.plan.mesh import Mesh
from mpkit.strategies.checkpoint.boxes import boxes_of, disjoint, rows_and_columns, tile
from mpkit.strategies.checkpoint.index import read_index
from mpkit.strategies.checkpoint.planner import SavePlanner, Slice, Writer
from mpkit.strategies.stage.shard import Shard
from mpkit.strategies.zero.flat import FlatLayout

Clusters = Callable[[int], mk.Cluster]
Shape = tuple[int, ...]

SHAPES = st.one_of(
    st.just(()),
    st.tuples(st.integers(1, 9)),
    st.tuples(st.integers(1, 7), st.integers(1, 7)),
    st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 4)),
    st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.integers(1, 3)),
)


def cuts(draw: st.DrawFn, size: int, parts: int) -> list[range]:
    """A size in so many ranges, any of which may be empty."""
    between = sorted(draw(st.lists(st.integers(0, size), min_size=parts - 1, max_size=parts - 1)))
    return [range(a, b) for a, b in pairwise([0, *between, size])]


@st.composite
def divided(draw: st.DrawFn, whole: Shape, t: int) -> list[Shard | None]:
    """What each of t ranks has of a parameter: all of it, or ranges of one dimension."""
    if not whole or t == 1 or draw(st.integers(0, 3)) == 0:
        return [None] * t
    dim = draw(st.integers(0, len(whole) - 1))
    fused = cuts(draw, whole[dim], draw(st.integers(1, 3)))
    ranges: list[list[range]] = [[] for _ in range(t)]
    for group in fused:
        for mine, part in zip(ranges, cuts(draw, len(group), t), strict=True):
            mine.append(range(group.start + part.start, group.start + part.stop))
    return [Shard(whole, dim, tuple(mine)) for mine in ranges]


class Division(NamedTuple):
    """How the ranks of a mesh divide some parameters among them."""

    mesh: Mesh
    shards: dict[str, list[Shard | None]]  # by place on tp
    zero: bool

    def pieces(self, rank: int) -> list[tuple[str, Shard | None, int, int]]:
        """What a rank has: of which parameter's shard which elements."""
        place = self.mesh.place(rank)
        names = [name for i, name in enumerate(self.shards) if i % self.mesh.pp == place.pp]
        local = [(name, self.shards[name][place.tp]) for name in names]
        sizes = [torch.Size(shard.shape if shard else shape_of(name)).numel() for name, shard in local]
        n, index = (self.mesh.dp, place.dp) if self.zero else (1, 0)
        layout = FlatLayout([nn.Parameter(torch.empty(size)) for size in sizes], index, n)
        found = [(name, shard, *layout.own(i)) for i, (name, shard) in enumerate(local)]
        return [(name, shard, start, end) for name, shard, start, end in found if start < end]


def shape_of(name: str) -> Shape:
    """Parameters here are called after their shapes: "0/4x3"."""
    return tuple(map(int, filter(None, name.split("/")[1].split("x"))))


def whole_of(name: str) -> Tensor:
    shape = torch.Size(shape_of(name))
    return torch.arange(shape.numel(), dtype=torch.float64).view(shape) + 1000 * int(name.split("/")[0])


def part_of(name: str, shard: Shard | None, start: int, end: int) -> Tensor:
    whole = whole_of(name)
    return (shard.take(whole) if shard else whole).reshape(-1)[start:end]


def write(ctx: Any, division: Division, folder: str) -> None:
    state = {
        name: Slice(part_of(name, shard, start, end), shape_of(name), start, shard)
        for name, shard, start, end in division.pieces(ctx.rank)
        if shard is not None or division.mesh.place(ctx.rank).tp == 0
    }
    save(state, storage_writer=Writer(folder), planner=SavePlanner())


def test_replicas_share_the_writing(clusters: Clusters, tmp_path: Path) -> None:
    names = [f"{i}/8x8" for i in range(8)]
    division = Division(Mesh(dp=2), {name: [None] for name in names}, zero=False)
    clusters(2).run(write, division, str(tmp_path))
    places: Any = read_index(tmp_path).storage_data
    assert len(places) == 8
    files = [place.relative_path for place in places.values()]
    assert sorted(map(files.count, set(files))) == [4, 4]


# ---------------------------------------------------------------- the boxes themselves


@st.composite
def pieces(draw: st.DrawFn) -> tuple[Shape, Shard | None, int, int]:
    whole = draw(SHAPES)
    shard = draw(divided(whole, draw(st.integers(1, 3))))[0]
    if shard is not None and len(whole) > 1 and draw(st.booleans()):
        other = draw(st.sampled_from([dim for dim in range(len(whole)) if dim != shard.dim]))
        some = cuts(draw, whole[other], 4)[::2]
        shard = replace(shard, across=Shard(whole, other, tuple(some)))
    numel = torch.Size(shard.shape if shard else whole).numel()
    start, end = sorted((draw(st.integers(0, numel)), draw(st.integers(0, numel))))
    return whole, shard, start, end


@given(piece=pieces())
@settings(max_examples=300)
def test_a_piece_is_its_boxes(piece: tuple[Shape, Shard | None, int, int]) -> None:
    whole, shard, start, end = piece
    if start == end:
        return
    name = f"0/{'x'.join(map(str, whole))}"
    held, matrix = part_of(name, shard, start, end), whole_of(name).view(rows_and_columns(whole))
    found = boxes_of(whole, shard, start, end)
    assert sum(box.numel for box, _ in found) == end - start
    assert disjoint([box for box, _ in found])
    assert len(found) <= 3 or shard is not None
    for (chunk, view), (box, _) in zip(views(Slice(held, whole, start, shard)), found, strict=True):
        assert (tuple(chunk.offsets), tuple(chunk.sizes)) == (box[:2], box.sizes)
        assert torch.equal(view, matrix[box.top : box.bottom, box.left : box.right])
        assert view.untyped_storage().data_ptr() == held.untyped_storage().data_ptr(), "a copy"


def views(piece: Slice) -> list[tuple[dcp.ChunkStorageMetadata, Tensor]]:
    """What DCP is told, and what it gets when it asks."""
    chunks = piece.__create_chunk_list__()
    return [(chunk, piece.__get_tensor_shard__(dcp.MetadataIndex("", chunk.offsets))) for chunk in chunks]


@given(whole=st.tuples(st.integers(1, 9), st.integers(1, 9)), data=st.data())
@settings(max_examples=100)
def test_boxes_that_tile_are_known_and_any_that_is_missing_too(
    whole: tuple[int, int], data: st.DataObject
) -> None:
    lengths = data.draw(st.lists(st.integers(1, 20), max_size=6))
    ends = [end for end in accumulate(lengths) if end < whole[0] * whole[1]]
    flat = pairwise([0, *ends, whole[0] * whole[1]])
    boxes = [box for start, end in flat for box, _ in boxes_of(whole, None, start, end)]
    assert tile(boxes, *whole)
    gone = data.draw(st.integers(0, len(boxes) - 1))
    assert not tile(boxes[:gone] + boxes[gone + 1 :], *whole)
    assert not tile([*boxes, boxes[gone]], *whole)


# ---------------------------------------------------------------- an index that is no index
