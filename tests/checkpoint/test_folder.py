"""A training renames and deletes only what it wrote itself, whatever else lies in its checkpoint_dir."""

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import mpkit as mk
from mpkit.strategies.checkpoint.files import FolderLock, read_head
from mpkit.strategies.checkpoint.parts import SavedParts
from mpkit.strategies.prepare.resume import find_checkpoint
from tests.limits import wait_for
from tests.serial import Clusters


def train(clusters: Clusters, folder: Path, *, width: int = 3, **how: Any) -> Any:
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "loss": F.mse_loss, "optimizer": lambda params: torch.optim.SGD(params, lr=0.1), "steps": 3,
        "checkpoint_every": 1, "checkpoint_dir": folder, **how,
    }  # fmt: skip
    model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2))
    data = [(torch.randn(4, 3), torch.randn(4, 2))]
    return clusters(1).train(model, data, mk.Plan.serial(), **options).wait()


def contents(folder: Path) -> dict[str, bytes]:
    """What lies in a folder, by path."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_what_others_put_there_stays(clusters: Clusters, tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "saved", tmp_path / "elsewhere"
    for name in (
        "dataset.partial/precious", "old.replaced/mine", "step-00000007.mine/notes", "step-1.partial/rank-0.pt",
    ):  # fmt: skip
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(name)
    (folder / "notes.partial").write_text("a file")
    elsewhere.mkdir()
    (elsewhere / "rank-0.pt").write_text("precious")
    (folder / "step-00000005.mine").symlink_to(elsewhere)
    (folder / "step-00000004.partial").mkdir()  # what a save that was cut short leaves
    (folder / "step-00000004.partial" / "rank-1.pt").write_text("half")
    before = contents(folder)
    train(clusters, folder, checkpoint_keep=1)
    after = contents(folder)
    del before["step-00000004.partial/rank-1.pt"]
    assert {name: after.get(name) for name in before} == before
    assert not {name for name in after if "0003" not in name} - set(before)
    assert (elsewhere / "rank-0.pt").read_text() == "precious"


@pytest.mark.parametrize("name", ["step-00000002/mine", "step-00000002.partial/mine", "step-00000002"])
def test_what_has_the_name_of_a_checkpoint_is_refused_beforehand(
    clusters: Clusters, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("precious")
    with pytest.raises(ValueError, match=rf"holds .*{name.split('/')[0]}"):
        train(clusters, tmp_path)
    assert contents(tmp_path) == {name: b"precious"}
    FolderLock(tmp_path).release()  # a refusal has freed the folder


def test_another_trainings_checkpoints_are_refused_unless_it_is_resumed(
    clusters: Clusters, tmp_path: Path
) -> None:
    folder, other = tmp_path / "saved", tmp_path / "other"
    train(clusters, folder, steps=20, checkpoint_every=10)
    before = contents(folder)
    assert {Path(name).parent.name for name in before} == {"step-00000010", "step-00000020"}
    for width in (3, 9):  # the same model from its beginning is another training, too
        with pytest.raises(ValueError, match=r"holds checkpoints of another training: .*resume_from="):
            train(clusters, folder, width=width)
    # ---- one that goes on from a third training's checkpoint is none of this folder's
    train(clusters, other, steps=2)
    with pytest.raises(ValueError, match="holds checkpoints of another training"):
        train(clusters, folder, resume_from=other)
    assert contents(folder) == before
    # ---- only its own count
    shutil.copytree(other / "step-00000002", folder / "step-00000002")
    train(
        clusters, folder, steps=23, checkpoint_keep=1, resume_from=folder / "step-00000020", checkpoint_every=1,
    )  # fmt: skip
    assert {path.name for path in folder.iterdir()} == {"step-00000002", "step-00000023"}


def test_a_full_disk_is_named_and_what_was_written_of_the_checkpoint_is_gone(
    clusters: Clusters, tmp_path: Path
) -> None:
    def limit(ctx: Any, step: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))

    with pytest.raises(mk.RankFailed, match=r"no space left in .*step-00000001\.partial"):
        train(clusters, tmp_path, width=9_999, on_step=limit)
    assert contents(tmp_path) == {}


HOLD = """
import sys
from pathlib import Path
from mpkit.strategies.checkpoint.files import FolderLock
lock = FolderLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_the_lock_ends_with_its_process_however_that_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=r"in use by another training: .*save elsewhere"):
            FolderLock(tmp_path)
        rank = FolderLock(tmp_path, joins=True)  # what that training's rank 0 does
        holder.send_signal(signal.SIGKILL)
    rank.release()
    FolderLock(tmp_path).release()


# ---- Saves cut short: a rank, or the whole run, is killed at some moment, and the last whole one is there.

PLANS = [mk.Plan.ddp(2), mk.Plan.zero(3, 2), mk.Plan.gpipe(2, 2)]
LAST = 4  # the save that is cut short at the latest
IN_GATE = (7, 11, 20)  # early, in the middle and late, each plan; by the last everybody dies


def how(plan: mk.Plan) -> dict[str, Any]:
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(22, 5, generator=generator)
    return {
        "model": nn.Sequential(nn.Linear(5, 64), nn.Dropout(0.2), nn.Linear(64, 64), nn.Linear(64, 3)),
        "data": mk.Batches(TensorDataset(inputs, torch.randn(22, 3, generator=generator)), 6),
        "plan": plan,
        "loss": F.mse_loss,
        "optimizer": lambda params: torch.optim.AdamW(params, lr=1e-2),
    }


@pytest.fixture(scope="module")
def whole(clusters: Clusters) -> Callable[[mk.Plan], list[float]]:
    """The losses of a training by a plan that nobody interrupts."""
    known: dict[str, list[float]] = {}

    def losses(plan: mk.Plan) -> list[float]:
        if repr(plan) not in known:
            run = clusters(plan.ranks).train(steps=LAST + 6, **how(plan)).wait()
            known[repr(plan)] = run.losses
        return known[repr(plan)]

    return losses


# What a save has come to, in order: its folder is there; then so many files; what it is; its name.
MOMENTS: list[Callable[[Path], bool]] = [
    lambda partial: partial.exists(),
    lambda partial: any(partial.glob("rank-0*")),
    lambda partial: any(partial.glob("rank-1*")),
    lambda partial: (partial / "mpkit.json").exists(),
    lambda partial: partial.with_suffix("").exists(),
]


def newest(folder: Path) -> int:
    """The highest step of which there is a whole checkpoint."""
    names = [path.name for path in folder.iterdir()]
    return max((int(name[5:]) for name in names if "." not in name), default=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.soak] * (seed not in IN_GATE)) for seed in range(25)]
)
def test_killed_while_saving(
    clusters: Clusters, whole: Callable[[mk.Plan], list[float]], tmp_path: Path, seed: int
) -> None:
    plan = PLANS[seed % len(PLANS)]
    kill_while_saving(clusters(plan.ranks), plan, whole(plan), tmp_path, seed, MOMENTS[seed // 5])


def kill_while_saving(
    cluster: mk.Cluster, plan: mk.Plan, expected: list[float], folder: Path, seed: int,
    reached: Callable[[Path], bool],
) -> None:  # fmt: skip
    """Kill one rank, or the whole run, when a save has come that far; see what is there, and go on from it."""
    chance = random.Random(seed)
    run = cluster.train(steps=100_000, checkpoint_every=1, checkpoint_dir=folder, **how(plan))
    # ---- wait for the moment
    number = chance.randint(2, LAST)
    partial = folder / f"step-{number:08d}.partial"
    wait_for(lambda: run.done or reached(partial) or newest(folder) >= number, pause=0.0)
    until = time.monotonic() + chance.random() * 0.004
    while time.monotonic() < until:
        pass
    # ---- kill
    fork_server = cluster.fork_server_pid
    everybody = seed % 8 == 4
    assert fork_server is not None
    os.kill(fork_server if everybody else run.pids[chance.randrange(plan.ranks)], signal.SIGKILL)
    with pytest.raises(mk.errors.MpkitError):
        run.wait()
    # ---- every checkpoint that has its name is whole, and the newest is not long past
    named = [path for path in folder.iterdir() if path.suffix != ".partial"]
    assert named
    for path in named:
        SavedParts(path, read_head(path).files)
    found = find_checkpoint(folder, say=pytest.fail)
    step = found.head.step
    assert step >= number - 1
    # ---- and goes on as if nothing had happened
    steps = step + 2
    again = cluster.train(
        steps=steps, resume_from=folder, checkpoint_every=steps, checkpoint_dir=folder, **how(plan)
    )
    again.wait()
    assert again.first_step == step
    known = expected[step:steps]  # fewer, if the run was that fast
    assert again.losses[: len(known)] == known
    assert not list(folder.glob("*.partial"))
