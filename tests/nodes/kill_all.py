"""Run by a launcher: trains until it is killed, and says in FOLDER that it does."""

import os
import sys
from pathlib import Path

import torch

import mpkit as mk


def work(ctx: mk.Context, folder: str) -> None:
    ctx.comm.all_reduce(torch.ones(10))
    (Path(folder) / f"rank{ctx.rank}").write_text(str(os.getpid()))
    while True:
        ctx.comm.all_reduce(torch.ones(10))


if __name__ == "__main__":
    mk.Cluster.from_env(device="cpu").run(work, sys.argv[1])
