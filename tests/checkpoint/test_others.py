"""A training renames and deletes only what it wrote itself, whatever else lies in its checkpoint_dir."""

from __future__ import annotations

import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.strategies.checkpoint.files import FolderLock

Clusters = Callable[[int], mk.Cluster]


def train(clusters: Clusters, folder: Path, *, width: int = 3, **how: Any) -> Any:
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "loss": F.mse_loss,
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "steps": 3,
        "checkpoint_every": 1,
        "checkpoint_dir": folder,
        **how,
    }
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
        "dataset.partial/precious",
        "old.replaced/mine",
        "step-00000007.mine/notes",
        "step-1.partial/rank-0.pt",
    ):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(name)
    (folder / "notes.partial").write_text("a file")
    elsewhere.mkdir()
    (elsewhere / "rank-0.pt").write_text("precious")
    (folder / "in-use.partial").symlink_to(elsewhere / "rank-0.pt")
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
        clusters,
        folder,
        steps=23,
        checkpoint_keep=1,
        resume_from=folder / "step-00000020",
        checkpoint_every=1,
    )
    assert {path.name for path in folder.iterdir()} == {"step-00000002", "step-00000023"}


def test_a_link_in_the_place_of_the_lock_is_not_written_through(tmp_path: Path) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "saved"
    folder.mkdir()
    for make in (lambda path: path.symlink_to(victim), lambda path: path.hardlink_to(victim)):
        victim.write_text("precious")
        make(folder / "in-use.partial")
        FolderLock(folder).release()
        assert victim.read_text() == "precious"
        (folder / "in-use.partial").unlink()


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


def test_the_lock_ends_with_its_process_however_that_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=f"process {holder.pid} on {socket.gethostname()}"):
            FolderLock(tmp_path)
        rank = FolderLock(tmp_path, joins=True)  # what that training's rank 0 does
        holder.send_signal(signal.SIGKILL)
    assert (tmp_path / "in-use.partial").exists(), "it had no time to clean up"
    rank._folder = tmp_path / "nowhere"  # it ends without cleaning up either
    rank.release()
    FolderLock(tmp_path).release()
    assert not (tmp_path / "in-use.partial").exists()
