"""A checkpoint whose mpkit.json was changed is refused, and a folder serves one training at a time."""

from __future__ import annotations

import json
import os
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
from mpkit.strategies.checkpoint.head import seal
from mpkit.strategies.checkpoint.lock import FolderLock
from mpkit.strategies.prepare.resume import find_checkpoint

Clusters = Callable[[int], mk.Cluster]


def how(**other: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "model": nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)),
        "data": [(torch.randn(4, 3), torch.randn(4, 2))],
        "plan": mk.Plan.ddp(2, batchnorm="local"),
        "loss": F.mse_loss,
        "optimizer": lambda params: torch.optim.Adam(params, lr=0.1),
        "steps": 2,
        **other,
    }


@pytest.fixture(scope="module")
def original(clusters: Clusters, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint."""
    folder = tmp_path_factory.mktemp("original")
    clusters(2).train(**how(checkpoint_every=2, checkpoint_dir=folder)).wait()
    return folder / "step-00000002"


@pytest.fixture
def saved(original: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(original, tmp_path / original.name))


def edits() -> dict[str, Callable[[dict[str, Any]], Any]]:
    """Changes to what a checkpoint says, by what is said of them."""

    def put(name: str, value: Any) -> Callable[[dict[str, Any]], Any]:
        return lambda head: head.__setitem__(name, value)

    def within(name: str, key: str, value: Any) -> Callable[[dict[str, Any]], Any]:
        return lambda head: head[name].__setitem__(key, value)

    odd: list[Any] = ["2", 2.5, -1, None, True, [], {}, 1e400, 2**70]
    cases: dict[str, Callable[[dict[str, Any]], Any]] = {
        f"{name}={value!r}": put(name, value)
        for name in ("step", "number", "world_size", "skipped")
        for value in odd
    }
    cases |= {
        f"{name}={value!r}": put(name, value)
        for name in ("facts", "scaler", "files", "plan")
        for value in ("x", 3, None, [[]], {"a": 1})
    }
    cases |= {f"scale={value!r}": within("scaler", "scale", value) for value in ("x", 0.0, -1.0, 1, None)}
    cases["scale=inf"] = within("scaler", "scale", float("inf"))
    cases["scale=nan"] = within("scaler", "scale", float("nan"))
    cases["good"] = within("scaler", "good", 1.5)
    cases["trained=None"] = within("facts", "trained", None)
    cases["a shape that is none"] = lambda head: head["facts"]["trained"].__setitem__("0.weight", [4, 3])
    cases["another shape"] = lambda head: head["facts"]["trained"].__setitem__("0.weight", "[4, 4] float32")
    cases["a parameter more"] = lambda head: head["facts"]["trained"].__setitem__("9.weight", "[4] float32")
    cases["a buffer more"] = lambda head: head["facts"]["others"].__setitem__("9.mean", "[] float32")
    cases["states"] = within("facts", "states", [1])
    cases["world_size=4"] = put("world_size", 4)
    cases["another number of ranks"] = lambda head: (
        head.__setitem__("world_size", 4),
        head["plan"].__setitem__("dp", 4),
    )
    cases["no such plan"] = within("plan", "schedule", "nonsense")
    cases["more skipped than done"] = put("skipped", 3)
    cases["a file elsewhere"] = lambda head: head["files"].__setitem__("../secret", [1, "0" * 64])
    cases["a file without its size"] = lambda head: head["files"].__setitem__("x", ["1", "0" * 64])
    cases["a field more"] = put("more", 1)
    cases["a field less"] = lambda head: head.pop("skipped")
    return cases


@pytest.mark.parametrize("resealed", [False, True])
def test_what_no_training_writes_is_refused_with_a_sentence(saved: Path, resealed: bool) -> None:
    path = saved / "mpkit.json"
    good = path.read_text()
    accepted = []
    for name, edit in edits().items():
        head = json.loads(good)
        edit(head)
        if resealed:  # as whoever means harm would
            del head["sha256"]
        path.write_text(seal(head) if resealed else json.dumps(head))
        try:
            find_checkpoint(saved)
            accepted.append(name)
        except ValueError as error:
            assert "is a damaged checkpoint: " in str(error), name
            assert resealed or "was changed or damaged after it was written" in str(error), name
    assert accepted == []


# ---------------------------------------------------------------- one training a folder


@pytest.mark.soak
def test_a_second_training_in_the_folder_is_refused(clusters: Clusters, tmp_path: Path) -> None:
    run = clusters(2).train(**how(checkpoint_every=1, checkpoint_dir=tmp_path, steps=100_000))
    with mk.Cluster(ranks=1, device="cpu") as other:
        second = how(plan=mk.Plan.serial(), checkpoint_every=1)
        with pytest.raises(ValueError, match=rf"in use by another training \(process {os.getpid()} on "):
            other.train(**second, checkpoint_dir=tmp_path)
        other.train(**second, checkpoint_dir=tmp_path / "elsewhere").wait()  # the cluster is as it was
    assert run.status == "running"
    run.stop()
    resumed = clusters(2).train(
        **how(checkpoint_every=10**6, checkpoint_dir=tmp_path, resume_from=tmp_path, steps=10**6)
    )
    resumed.stop()
    assert not list(tmp_path.glob("in-use*"))


HOLD = """
import sys
from pathlib import Path
from mpkit.strategies.checkpoint.lock import FolderLock
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
