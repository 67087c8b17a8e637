"""Saves cut short: a rank, or the whole run, is killed at some moment, and the last whole one is there."""

from __future__ import annotations

import os
import random
import signal
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
from mpkit.strategies.checkpoint.files import read_head
from mpkit.strategies.checkpoint.parts import SavedParts
from mpkit.strategies.prepare.resume import find_checkpoint
from tests.limits import wait_for

Clusters = Callable[[int], mk.Cluster]

PLANS = [mk.Plan.ddp(2), mk.Plan.zero(3, 2), mk.Plan.gpipe(2, 2)]
LAST = 4  # the save that is cut short at the latest
IN_GATE = (0, 7, 11, 15, 20)  # each moment once, each plan; by the last everybody dies


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


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.soak] * (seed not in IN_GATE)) for seed in range(25)]
)
def test_killed_while_saving(
    clusters: Clusters, whole: Callable[[mk.Plan], list[float]], tmp_path: Path, seed: int
) -> None:
    plan = PLANS[seed % len(PLANS)]
    kill_while_saving(clusters(plan.ranks), plan, whole(plan), tmp_path, seed, MOMENTS[seed // 5])


def kill_while_saving(
    cluster: mk.Cluster,
    plan: mk.Plan,
    expected: list[float],
    folder: Path,
    seed: int,
    reached: Callable[[Path], bool],
) -> None:
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
