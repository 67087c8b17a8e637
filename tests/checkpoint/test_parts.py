"""What ranks wrote under any division of a parameter, ranks of any other division read."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mpkit.strategies.checkpoint.head import DamagedCheckpoint
from mpkit.strategies.checkpoint.parts import SavedParts, name_of, write_rank
from mpkit.strategies.stage.shard import HeldPart, Shard, evenly

SHAPES = [(6, 8), (5,), (7, 3), (2, 5, 6), (1, 9), ()]


def divided(whole: Tensor, chance: random.Random) -> list[HeldPart]:
    """Divide a parameter among ranks: by tensor parallelism, twice or not at all, and each part by ZeRO."""
    shape, found = tuple(whole.shape), list[HeldPart]()
    shards: list[Shard | None] = [None]
    dims = list(range(len(shape)))
    chance.shuffle(dims)
    for dim in dims[: chance.choice((0, 1, 2))]:
        cuts, fused = evenly(shape[dim], chance.choice((1, 2, 3))), chance.random() < 0.5 and shape[dim] > 3
        ways = [(r,) for r in cuts if len(r)]
        if fused:  # two layers in one, each divided
            half = shape[dim] // 2
            ways = [
                (a, range(half + b.start, half + b.stop))
                for a, b in zip(evenly(half, 2), evenly(shape[dim] - half, 2), strict=True)
            ]
        shards = [Shard(shape, dim, way, shard) for shard in shards for way in ways]
    for shard in shards:
        local = (shard.take(whole) if shard else whole).reshape(-1)
        start = 0
        for part in evenly(local.numel(), chance.choice((1, 2, 3))):
            if len(part):
                found.append(HeldPart(local[part.start : part.stop], shape, start, shard))
                start += len(part)
    return found


def write(folder: Path, ranks: list[dict[str, HeldPart]]) -> SavedParts:
    folder.mkdir()
    for rank, parts in enumerate(ranks):
        write_rank(folder / name_of(rank), parts)
    return SavedParts(folder, [name_of(rank) for rank in range(len(ranks))])


@pytest.mark.parametrize("seed", range(12))
def test_any_division_reads_what_any_other_wrote(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    for i, shape in enumerate(SHAPES):
        whole = torch.randn(shape, dtype=chance.choice((torch.float32, torch.float64, torch.bfloat16)))
        saved = write(tmp_path / str(i), [{"w": part} for part in divided(whole, chance)])
        for wanted in divided(whole, chance):
            room = wanted._replace(tensor=torch.zeros_like(wanted.tensor))
            saved.read("w", room)
            assert torch.equal(room.tensor, wanted.tensor)


def test_a_part_that_is_missing_or_there_twice_is_refused(tmp_path: Path) -> None:
    parts = [HeldPart(torch.ones(8), (4, 6), start) for start in (0, 8, 16)]
    room = HeldPart(torch.zeros(24), (4, 6))
    for i, bad in enumerate((parts[:2], [*parts, parts[0]], [parts[0], parts[0], parts[1]])):
        with pytest.raises(DamagedCheckpoint, match="of w"):
            write(tmp_path / str(i), [{"w": part} for part in bad]).read("w", room)
    saved = write(tmp_path / "good", [{"w": part} for part in parts])
    with pytest.raises(DamagedCheckpoint, match="fit"):
        saved.read("w", HeldPart(torch.zeros(24), (6, 4)))


def test_a_file_has_the_elements_of_its_parts_alone(tmp_path: Path) -> None:
    flat = torch.zeros(1_000_000)
    write_rank(tmp_path / "rank-0.pt", {"w": HeldPart(flat[:10], (10,))})
    assert (tmp_path / "rank-0.pt").stat().st_size < 5_000
