"""Run by a launcher: something goes wrong on rank 3 or 0: fail.py HOW FOLDER."""

import itertools
import os
import signal
import sys
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
                    os.kill(os.getpid(), signal.SIGKILL)
                if how == "hang":
                    ctx.comm.recv(torch.empty(3), 0)
            if step == 5 and ctx.rank == 0 and how == "kill0":
                while min(len(rank.ops) for rank in mk.Trace.load(ctx.record.folder).ranks) < 15:
                    time.sleep(0.01)  # until what all ranks recorded of the first steps has arrived here
                os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)


if __name__ == "__main__":
    how, folder = sys.argv[1:]
    cluster = mk.Cluster.from_env(device="cpu")
    cluster.run(work, how, folder, timeout=10 if how == "cut" else None)
