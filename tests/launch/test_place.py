"""Which rank a process is under a launcher, what a launched rank gathers, and the commands of `mpkit launch`."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mpkit.cli.launch import LaunchPlan, commands
from mpkit.cli.watch import CommandProgram
from mpkit.launch.launched_rank import LaunchedRank
from mpkit.launch.place import place_here
from mpkit.trace import Kind
from mpkit.trace.files import read_rank
from mpkit.trace.record.recorder import Recorder


@pytest.mark.parametrize(("environment", "rank", "size", "local", "address"), [
    ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, 3, 4, 1, "a"),
    ({"SLURM_PROCID": "9", "SLURM_STEP_NUM_TASKS": "16", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
      "SLURM_STEP_NODELIST": "gpu[07,09-11]"}, 9, 16, 1, "gpu07"),
    ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
      "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 1, 2, 1, "127.0.0.1"),
    ({"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "n1"}, 1, 2, 1, "n1"),
])  # fmt: skip
def test_a_place(environment: dict[str, str], rank: int, size: int, local: int, address: str) -> None:
    place = place_here(environment)
    assert (place.rank, place.world_size, place.local_rank, place.address) == (rank, size, local, address)


@pytest.mark.parametrize(("environment", "says"), [
    ({}, r"none is set.*torchrun --standalone.*mk.Cluster\(ranks=4\)"),
    ({"RANK": "0"}, "WORLD_SIZE is not set"),
    ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one': a whole number"),
    ({"RANK": "2", "WORLD_SIZE": "2"}, "there is no rank 2"),
    ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not.*export MASTER_ADDR="),
    (
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
        "mpirun passes them on with -x MASTER_ADDR",
    ),
])  # fmt: skip
def test_an_environment_that_says_too_little(environment: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        place_here(environment)


def test_a_ranks_files_are_put_on_rank_0s_clock_drift_included(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir(), there.mkdir()
    record = Recorder(here, 2, torch.device("cpu"))
    with record.step(0):
        record.ledger.change(("params", 100))
        record.end(record.begin(Kind.FORWARD, "layer", stage=1, microbatch=3))
        record.begin(Kind.ALL_REDUCE, group="0,1", number=0)  # never ends
    record.close("finished")
    mine = read_rank(here, 2)
    begin = int(mine.ops[0]["start"])
    rank: Any = SimpleNamespace(
        folder=here, _launcher=SimpleNamespace(rank=2), _clocks=[(begin, 500, 0), (begin + 10**15, 500, 0)]
    )
    for name, content in LaunchedRank._files_on_rank_0s_clock(rank).items():
        (there / f"rank2.{name}").write_bytes(content)
    theirs = read_rank(there, 2)
    assert theirs.state == "finished" and theirs.names == mine.names
    assert (theirs.ops["start"] == mine.ops["start"] + 500).all()
    assert (theirs.memory["time"] == mine.memory["time"] + 500).all()
    ended = mine.ops["end"] > 0
    assert (theirs.ops["end"] == np.where(ended, mine.ops["end"] + 500, 0)).all() and not ended.all()
    rank._clocks = [(begin, 0, 0), (int(mine.ops[1]["end"]), 1000, 0)]  # the clock drifts
    shifted = LaunchedRank._files_on_rank_0s_clock(rank)["ops"]
    (there / "rank2.ops").write_bytes(shifted)
    assert read_rank(there, 2).ops[1]["end"] - mine.ops[1]["end"] in (999, 1000)


@pytest.fixture
def script(tmp_path: Path) -> CommandProgram:
    (tmp_path / "train.py").write_text("")
    return CommandProgram(str(tmp_path / "train.py"), ("--name", "two words"))


def test_the_commands(script: CommandProgram) -> None:
    text = commands(LaunchPlan(script, nodes=3, gpus=8, address="n1"))
    ranks = [line for line in text.splitlines() if line.startswith("torchrun")]
    assert len(ranks) == 3 and all(line.endswith("train.py --name 'two words'") for line in ranks)
    for part in (
        "#SBATCH --nodes=3", "--ntasks-per-node=8", "--num_processes 24", "n1 slots=8", "mk.Plan.ddp(24)",
    ):  # fmt: skip
        assert part in text
    alone = commands(LaunchPlan(script, nodes=1, gpus=2))
    assert "torchrun --standalone --nproc-per-node 2" in alone and "--machine_rank" not in alone


@pytest.mark.parametrize(("how", "says"), [
    ({"gpus": 32 * 4, "nodes": 16}, "Did you mean --gpus 8"),
    ({"gpus": 256, "nodes": 2}, r"2 x 256 would be 512 ranks\.$"),
    ({"nodes": 0}, "--nodes 0: at least 1"),
    ({"nodes": 2, "address": "localhost"}, "would never meet"),
    ({"address": "no de"}, "the name or address of the first node"),
    ({"port": 80}, "--port 80: from 1024"),
    ({"hours": 0}, "--hours 0: more than 0"),
])  # fmt: skip
def test_launch_mistakes(script: CommandProgram, how: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        LaunchPlan(script, **how).check()
    with pytest.raises(ValueError, match="no such file here"):
        LaunchPlan(CommandProgram("trian.py")).check()
