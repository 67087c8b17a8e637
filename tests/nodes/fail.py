"""Run by a launcher: something goes wrong on rank 3 or 0: fail.py HOW FOLDER."""

import itertools
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch

import mpkit as mk


def work(ctx: mk.Context, how: str, folder: str) -> None:
    for step in itertools.count():
        with ctx.record.step(step):
            ctx.comm.all_reduce(torch.ones(10))
            if step == 5 and ctx.rank == 3:
                (Path(folder) / "there").write_text(str(os.getpid()))
                if how == "raise":
                    raise RuntimeError("the disk of rank 3 is on fire")
                if how == "interrupt":
                    os.kill(os.getpid(), signal.SIGINT)
                if how == "kill":
                    wait_for(Path(folder) / "arrived")
                    os.kill(os.getpid(), signal.SIGKILL)
                if how == "kill3":
                    os.kill(os.getpid(), signal.SIGKILL)
                if how.startswith("hang"):
                    ctx.comm.recv(torch.empty(3), 0)
            if step == 5 and ctx.rank == 0 and how in ("kill", "kill0"):
                while min(len(rank.ops) for rank in mk.Trace.load(ctx.record.folder).ranks) < 15:
                    time.sleep(0.01)  # until what all ranks recorded of the first steps has arrived here
                (Path(folder) / "arrived").touch()
                if how == "kill0":
                    os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


class Elsewhere(torch.nn.Module):
    """Computes something else in a rank, which the main thread is, from the second forward on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = torch.nn.Linear(4, 2), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        there = threading.current_thread() is threading.main_thread() and self.calls > 1
        return self.layer(x) + float(there)


def train_something_else(cluster: mk.Cluster) -> None:
    torch.manual_seed(0)
    data = [(torch.randn(8, 4), torch.randn(8, 2))]
    loss, optimizer = torch.nn.functional.mse_loss, lambda params: torch.optim.SGD(params, lr=0.1)
    cluster.train(Elsewhere(), data, mk.Plan.ddp(4), loss=loss, optimizer=optimizer, steps=100_000)


if __name__ == "__main__":
    how, folder = sys.argv[1:]
    cluster = mk.Cluster.from_env(device="cpu")
    if how == "not serial":
        train_something_else(cluster)
    cluster.run(work, how, folder, timeout=2.0 if how == "hang for 2 s" else None)
