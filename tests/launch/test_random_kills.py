"""Twenty runs, in each a rank killed at a moment of chance: nothing is left or hangs, nothing recorded is lost."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import mpkit as mk
from mpkit.models import MLP
from tests.limits import wait_for


def living_children(of: int) -> list[int]:
    """Processes whose parent is `of`, without zombies."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == of and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 20))])
def test_a_rank_is_killed_at_some_moment(
    clusters: Callable[[int], mk.Cluster], seed: int, tmp_path: Path
) -> None:
    chance = random.Random(seed)
    ranks = chance.choice([2, 3, 4])
    cluster = clusters(ranks)
    torch.manual_seed(seed)
    model = MLP(8, 4, width=32, layers=6)
    data = [(torch.randn(24, 8), torch.randn(24, 4)) for _ in range(3)]
    run = cluster.train(
        model,
        data,
        mk.Plan.gpipe(ranks, 6),
        loss=torch.nn.functional.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        steps=100_000,  # far longer than it will live
    )
    fork_server = cluster.fork_server_pid
    ops_wanted = chance.choice([0, 1, 50, 500, 2000])  # what the victim has recorded by then, at least
    victim = chance.randrange(ranks)
    wait_for(lambda: run.done or (run.pids and len(run.trace.ranks[victim].ops) >= ops_wanted))
    pids = run.pids
    recorded = [len(rank.ops) for rank in run.trace.ranks]
    os.kill(pids[victim], signal.SIGKILL)
    with pytest.raises(mk.RankFailed, match=f"rank {victim} of {ranks} was killed by SIGKILL") as caught:
        run.wait()
    assert caught.value.signal == "SIGKILL"
    assert not set(pids) & set(living_children(fork_server))

    assert all(len(rank.ops) >= before for rank, before in zip(run.trace.ranks, recorded, strict=True))
    again = mk.Trace.load(run.trace.save(tmp_path / "killed.mpkit"))
    assert [len(rank.ops) for rank in again.ranks] == [len(rank.ops) for rank in run.trace.ranks]
    assert run.timeline().world_size == ranks  # replays as far as it goes
    assert len(run.losses) == len(run.trace.losses)
