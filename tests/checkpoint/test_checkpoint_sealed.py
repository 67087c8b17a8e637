"""A checkpoint whose mpkit.json was changed is refused, and a folder serves one training at a time."""

from __future__ import annotations

import os
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
