"""The time from asking for four ranks to their first finished all_reduce: mpkit's warm ranks, spawn, and torchrun.

They are measured in turn within one loop, so that other load on the machine affects all three. The clock starts in this
process and stops in rank 0 when its all_reduce is done; all of them read the machine's monotonic clock.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import mpkit as mk
from benchmarks.pairing import Row, row

RANKS, ROUNDS, SLOW_ROUNDS = 4, 20, 3


def _first_reduce(ctx: Any) -> float:
    ctx.comm.all_reduce(torch.ones(1))
    return time.monotonic()


def _plain_rank(rank: int, where: str, file: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", where, rank=rank, world_size=RANKS)
    dist.all_reduce(torch.ones(1))
    if rank == 0:
        Path(file).write_text(str(time.monotonic()))
    dist.barrier()
    dist.destroy_process_group()


def _by_mpkit(cluster: mk.Cluster) -> float:
    begin = time.monotonic()
    return float(cluster.run(_first_reduce)[0]) - begin


def _by_spawn(folder: Path) -> float:
    file = folder / "spawn"
    store = tempfile.mkstemp(dir=folder)[1]
    begin = time.monotonic()
    mp.spawn(_plain_rank, (f"file://{store}", str(file)), RANKS)  # type: ignore[no-untyped-call]
    return float(file.read_text()) - begin


def _by_torchrun(folder: Path) -> float:
    file = folder / "torchrun"
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "--standalone"]
    begin = time.monotonic()
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*command, "-m", "benchmarks.bench_launch", str(file)],
        check=True,
        capture_output=True,
        env=environment,
    )
    return float(file.read_text()) - begin


def measure() -> list[Row]:
    """Measure medians in seconds, and how many times as long as mpkit the others take."""
    times: dict[str, list[float]] = {"mpkit": [], "spawn": [], "torchrun": []}
    with mk.Cluster(RANKS, device="cpu") as cluster, tempfile.TemporaryDirectory() as name:
        _by_mpkit(cluster)  # waits for torch to be imported in the fork server
        for turn in range(ROUNDS):
            times["mpkit"].append(_by_mpkit(cluster))
            if turn % (ROUNDS // SLOW_ROUNDS) == 0 and len(times["spawn"]) < SLOW_ROUNDS:
                times["spawn"].append(_by_spawn(Path(name)))
                times["torchrun"].append(_by_torchrun(Path(name)))
    median = {side: statistics.median(values) for side, values in times.items()}
    rows = [
        row(
            f"launch: {RANKS} warm ranks to a finished all_reduce", median["mpkit"], "s",
            against=f"worst of {ROUNDS}: {max(times['mpkit']):.3f} s",
        )
    ]  # fmt: skip
    for side in ("spawn", "torchrun"):
        ratio = median[side] / median["mpkit"]
        rows.append(row(f"launch: the same by {side}", median[side], "s", ratio, "times mpkit's warm launch"))
    return rows


if __name__ == "__main__":  # a rank of torchrun
    _plain_rank(int(os.environ["RANK"]), "env://", sys.argv[1])
