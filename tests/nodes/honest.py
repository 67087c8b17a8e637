"""Run by a launcher, beside a stranger: honest.py FOLDER waits until the stranger is there, and trains."""

import sys
from pathlib import Path

import torch

import mpkit as mk
from tests.limits import wait_for


def work(ctx: mk.Context) -> int:
    for _ in range(20):
        ctx.comm.all_reduce(torch.ones(10))
    return 2 * ctx.rank


if __name__ == "__main__":
    wait_for((Path(sys.argv[1]) / "go").exists)
    cluster = mk.Cluster.from_env(device="cpu")
    print(f"right: {cluster.run(work, timeout=20)}", flush=True)
