"""Checkpoints: a training that goes on from one ends as if it had never stopped, under its own plan or another."""

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import mpkit as mk
from mpkit.launch.session.run import Run
from mpkit.strategies.checkpoint.files import digest
from mpkit.strategies.checkpoint.head import DamagedCheckpoint, seal
from mpkit.strategies.checkpoint.parts import SavedParts, name_of, write_rank
from mpkit.strategies.prepare.resume import find_checkpoint
from mpkit.strategies.stage.shard import HeldPart, Shard, evenly
from tests.recipes import adamw, sgd
from tests.serial import Clusters


def batches(dtype: torch.dtype = torch.float32) -> mk.Batches:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(22, 5, dtype=dtype, generator=generator)
    return mk.Batches(TensorDataset(inputs, torch.randn(22, 3, dtype=dtype, generator=generator)), 6, seed=2)


def net(
    dtype: torch.dtype = torch.float32, *, dropout: float = 0.0, width: int = 7, frozen: bool = True
) -> nn.Module:
    """A chain with a frozen layer, a buffer that changes, and sizes that divide by nothing."""
    torch.manual_seed(1)
    first, last = nn.Linear(5, width), nn.Linear(width, 3)
    middle = nn.Linear(width, width)
    middle.weight.requires_grad_(not frozen)
    layers = [first, nn.Tanh(), nn.Dropout(dropout), middle, Count(), nn.Tanh(), last]
    return nn.Sequential(*layers).to(dtype)


class Count(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


def train(clusters: Clusters, model: nn.Module, data: Any, plan: mk.Plan, **how: Any) -> Run:
    how = {"loss": F.mse_loss, "optimizer": adamw, **how}
    return clusters(plan.ranks).train(model, data, plan, **how).wait()


@pytest.fixture(scope="module")
def original(clusters: Clusters, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of the steps 2 and 4 of a training by DDP on 2 ranks."""
    folder = tmp_path_factory.mktemp("original")
    train(clusters, net(), batches(), mk.Plan.ddp(2), steps=5, checkpoint_every=2, checkpoint_dir=folder)
    return folder


@pytest.fixture
def saved(original: Path, tmp_path: Path) -> Path:
    """A copy of them."""
    return Path(shutil.copytree(original, tmp_path / "checkpoints"))


def assert_same(one: Run, other: Run, *, exact: bool = True) -> None:
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(one.state_dict(), other.state_dict(), **tolerance)
    n = min(len(one.losses), len(other.losses))
    assert n > 0
    torch.testing.assert_close(
        torch.tensor(one.losses[-n:], dtype=torch.float64),
        torch.tensor(other.losses[-n:], dtype=torch.float64),
        **tolerance,
    )


# ---------------------------------------------------------------- the same plan: to the bit


@pytest.mark.slow
@pytest.mark.parametrize("plan", [
    mk.Plan.ddp(2, microbatches=2, precision="fp16"),
    mk.Plan.zero(3, 2, offload="params", precision="bf16"),
    *(pytest.param(plan, marks=pytest.mark.soak) for plan in (
        mk.Plan.serial(microbatches=2), mk.Plan.ddp(3, bucket_mb=0.0001), mk.Plan.dp(2),
        mk.Plan.ddp(2, offload="optimizer", precision="bf16"), mk.Plan.gpipe(3, 2, recompute="full"),
        mk.Plan.zero(1, 3), mk.Plan.zero(2, 3, precision="fp16"), mk.Plan.zero(3, 3, microbatches=2),
    )),
], ids=repr)  # fmt: skip
def test_resumed_under_the_same_plan_to_the_bit(clusters: Clusters, tmp_path: Path, plan: mk.Plan) -> None:
    how: dict[str, Any] = {
        "model": net(dropout=0.3), "data": batches(), "plan": plan, "seed": 3, "max_grad_norm": 0.5,
        "lr_schedule": lambda step: 1 / (1 + step),
    }  # fmt: skip
    whole = train(clusters, steps=7, checkpoint_every=3, checkpoint_dir=tmp_path, **how)
    rest = train(clusters, steps=7, resume_from=tmp_path / "step-00000003", **how)
    assert rest.first_step == 3
    assert len(rest.losses) == 4
    assert rest.data_digest == whole.data_digest[3:]
    assert_same(whole, rest)


def overflow(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss whose gradient in fp16 is too large for some samples."""
    each = F.mse_loss(outputs, targets, reduction="none").mean(1)
    return (each * torch.where(targets.amax(1) > 2.0, 1e6, 1.0)).mean()


@pytest.mark.slow
def test_the_loss_scale_goes_on(clusters: Clusters, tmp_path: Path) -> None:
    plan = mk.Plan.ddp(2, precision="fp16")
    how: dict[str, Any] = {"model": net(), "data": batches(), "plan": plan, "loss": overflow}
    whole = train(clusters, steps=6, checkpoint_every=3, checkpoint_dir=tmp_path, **how)
    scale = json.loads((tmp_path / "step-00000003" / "mpkit.json").read_text())["scaler"]["scale"]
    assert scale < 2.0**16, "no step overflowed: the test proves nothing"
    rest = train(clusters, steps=6, resume_from=tmp_path / "step-00000003", **how)
    assert_same(whole, rest)


def test_an_older_branch_gives_way_to_what_goes_on_from_it(clusters: Clusters, tmp_path: Path) -> None:
    how: dict[str, Any] = {
        "model": net(), "data": batches(), "plan": mk.Plan.serial(), "checkpoint_dir": tmp_path,
    }  # fmt: skip
    train(clusters, steps=6, checkpoint_every=2, **how)  # 4 and 6 stay
    train(clusters, steps=5, checkpoint_every=1, resume_from=tmp_path / "step-00000004", **how)
    names = {path.name.partition(".older-")[0] for path in tmp_path.iterdir()}
    assert names == {"step-00000004", "step-00000005", "step-00000006"}, "the later one is set aside"
    again = train(clusters, steps=6, checkpoint_every=1, resume_from=tmp_path, **how)
    assert again.first_step == 5
    assert len(list(tmp_path.glob("step-00000006.older-*"))) == 1
    assert {path.name for path in tmp_path.glob("step-????????")} == {"step-00000005", "step-00000006"}


def cut_short(folder: Path) -> None:
    path = next(folder.glob("rank-0*"))
    path.write_bytes(path.read_bytes()[:-7])


def flip(folder: Path) -> None:
    path = next(folder.glob("rank-1*"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


DAMAGES: dict[str, Callable[[Path], Any]] = {
    r"has \d+ bytes, and had": cut_short,
    "SHA-256 differs": flip,
    "is missing": lambda folder: next(folder.glob("rank-1*")).unlink(),
    "it has no mpkit.json": lambda folder: (folder / "mpkit.json").unlink(),
    "cannot be read": lambda folder: (folder / "mpkit.json").write_text('{"format": 1'),
    r"an earlier mpkit wrote it \(format 5": lambda folder: (folder / "mpkit.json").write_text(
        '{"format": 5}'
    ),
    "a later mpkit wrote it": lambda folder: (folder / "mpkit.json").write_text('{"format": 99}'),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over(saved: Path, what: str) -> None:
    said: list[str] = []
    DAMAGES[what](saved / "step-00000004")
    assert find_checkpoint(saved, said.append).head.step == 2
    assert "passed over a damaged checkpoint, step-00000004" in said[0]
    with pytest.raises(ValueError, match=rf"damaged checkpoint: .*{what}"):
        find_checkpoint(saved / "step-00000004")
    DAMAGES[what](saved / "step-00000002")
    with pytest.raises(ValueError, match="no checkpoint there is whole"):
        find_checkpoint(saved)


class Malice:
    """Runs code when it is unpickled."""

    def __init__(self, trap: Path) -> None:
        self.trap = trap

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trap),)


def reseal(folder: Path) -> None:
    """As whoever put something into it would."""
    head = json.loads((folder / "mpkit.json").read_text())
    del head["sha256"]
    head["files"] = {name: digest(folder / name) for name in head["files"]}
    (folder / "mpkit.json").write_text(seal(head))


def test_loading_runs_no_code(saved: Path, tmp_path: Path) -> None:
    folder, trap = saved / "step-00000004", tmp_path / "trap"
    good = torch.load(folder / "rank-0.pt", weights_only=True)
    name = next(iter(good))
    bad: list[Any] = [
        Malice(trap), {**good, "more": Malice(trap)}, {name: good[name]["tensor"]}, [1],
        {name: {**good[name], "place": ((2, 2), ((0, ((0, 5),)),), 0)}},
        {name: {**good[name], "place": ((2, 2), (), -1)}},
    ]  # fmt: skip
    for content in bad:
        torch.save(content, folder / "rank-0.pt")
        reseal(folder)
        with pytest.raises(ValueError, match=r"damaged checkpoint: rank-0\.pt"):
            find_checkpoint(folder)
    for data in (pickle.dumps(Malice(trap)), b"cos\nsystem\n(S'true'\ntR.", b""):
        (folder / "rank-0.pt").write_bytes(data)
        reseal(folder)
        with pytest.raises(ValueError, match=r"damaged checkpoint: rank-0\.pt could not be read"):
            find_checkpoint(folder)
    assert not trap.exists()


def test_what_does_not_fit_says_so(clusters: Clusters, saved: Path) -> None:
    tmp_path = saved
    (tmp_path / "empty").mkdir()
    how: dict[str, Any] = {"model": net(), "data": batches(), "plan": mk.Plan.ddp(2), "steps": 5}

    def refused(said: str, **other: Any) -> None:
        with pytest.raises(ValueError, match=said):
            train(clusters, **{"resume_from": tmp_path, **how, **other})

    refused("there is no such folder", resume_from=tmp_path / "nowhere")
    refused("no checkpoint is there", resume_from=tmp_path / "empty")
    refused("a path is wanted", resume_from=7)
    refused(r"0.weight is \[7, 5\] float32 there and \[8, 5\] float32 here", model=net(width=8))
    refused("float32 there and .* float64 here", model=net(torch.float64), data=batches(torch.float64))
    refused("3.weight is only here", model=net(frozen=False))
    refused("written with AdamW, and this training has SGD", optimizer=sgd)
    refused(
        "lacks the optimizer state max_exp_avg_sq",
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2, amsgrad=True),
    )
    refused("that of step 4, and steps=3", steps=3)
    refused("checkpoint_every alone", resume_from=None, checkpoint_every=2)
    refused("checkpoint_dir alone", resume_from=None, checkpoint_dir=tmp_path)
    refused("checkpoint_every=0", checkpoint_every=0, checkpoint_dir=tmp_path)
    refused("checkpoint_keep=True", checkpoint_every=1, checkpoint_dir=tmp_path, checkpoint_keep=True)
    (tmp_path / "file").write_text("")
    refused("cannot be written to", checkpoint_every=1, checkpoint_dir=tmp_path / "file")
    (tmp_path / "step-00000008.partial").mkdir()
    refused("cut short", resume_from=tmp_path / "step-00000008.partial")


# ---- What ranks wrote under any division of a parameter, ranks of any other division read.

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
