"""Parts of a launch on several machines, without a launcher: places, stores, clocks, packets."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed import TCPStore

import mpkit as mk
from mpkit.common.launch_folder import read_error, reserve, write_error
from mpkit.errors import CommMismatch, Deadlock, MpkitError, RankFailed
from mpkit.launch.external.clock_offset import answer_pings, measure_offset
from mpkit.launch.external.collector import RemoteProcesses
from mpkit.launch.external.environment import place_here
from mpkit.launch.external.mirror import FileMirror
from mpkit.launch.external.packets import WINDOW, Sender
from mpkit.launch.external.rendezvous import clone, interface_to, wait_for
from mpkit.launch.external.verdict import Verdict
from mpkit.trace import Kind
from mpkit.trace.files import read_rank
from mpkit.trace.record.recorder import Recorder
from mpkit.trace.record.values import Values
from mpkit.views.commands.launch_commands import LaunchPlan, commands
from mpkit.views.commands.watch import CommandProgram

AHEAD = 300_000_000


@pytest.fixture
def store() -> Iterator[TCPStore]:
    yield TCPStore("127.0.0.1", 0, 1, True, timeout=timedelta(seconds=10), wait_for_workers=False)


# ---- the environment -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "rank", "size", "local", "address"),
    [
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, 3, 4, 1, "a"),
        ({"SLURM_PROCID": "9", "SLURM_STEP_NUM_TASKS": "16", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
          "SLURM_STEP_NODELIST": "gpu[07,09-11]"}, 9, 16, 1, "gpu07"),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
          "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 1, 2, 1, "127.0.0.1"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "n1"}, 1, 2, 1, "n1"),
    ],
)  # fmt: skip
def test_a_place(environment: dict[str, str], rank: int, size: int, local: int, address: str) -> None:
    place = place_here(environment)
    assert (place.rank, place.world_size, place.local_rank, place.address) == (rank, size, local, address)


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({}, r"none is set.*torchrun --standalone.*mk.Cluster\(ranks=4\)"),
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one': a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "there is no rank 2"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not.*export MASTER_ADDR="),
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
            "mpirun passes them on with -x MASTER_ADDR",
        ),
    ],
)
def test_an_environment_that_says_too_little(environment: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        place_here(environment)


def test_from_env_without_a_launcher_teaches(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="Start the script with"):
        mk.Cluster.from_env()
    with pytest.raises(ValueError, match="lacks ranks"):
        mk.Cluster()


def test_from_env_on_a_rank_of_a_cluster_teaches(clusters: object) -> None:
    with pytest.raises(RankFailed, match="running on all ranks already"):
        clusters(1).run(lambda ctx: mk.Cluster.from_env())  # type: ignore[operator]


def test_the_interface_of_the_loopback_address() -> None:
    assert interface_to("127.0.0.1") == "lo"
    assert interface_to("no such host.") == ""


def test_who_did_not_come_is_named(store: TCPStore) -> None:
    store.set("hello0", "x")
    with pytest.raises(MpkitError, match=r"rank 1 did not.*no `if rank == 0:`"):
        wait_for(store, ["hello0", "hello1"], ["rank 0", "rank 1"], seconds=0.2)
    with pytest.raises(MpkitError, match="rank 1 ended without"):
        wait_for(store, ["hello0", "hello1"], ["rank 0", "rank 1"], lambda: [1])


# ---- clocks --------------------------------------------------------------------------------------------------


def test_an_offset_is_known_to_half_a_round_trip(store: TCPStore) -> None:
    import time

    def ahead() -> int:  # a fake clock
        return time.monotonic_ns() + AHEAD

    answered: dict = {}
    theirs = clone(store)
    thread = threading.Thread(target=lambda: answered.update(answer_pings(theirs, [1], "start")))
    thread.start()
    offset = measure_offset(store, 1, "start", now=ahead)
    thread.join()
    assert answered == {1: offset}
    assert abs(offset.ns + AHEAD) <= offset.residual


def test_ranks_elsewhere_run_if_their_heartbeats_say_so() -> None:
    processes, waiting = RemoteProcesses(), RemoteProcesses()
    for whole, main, running, waits in (
        (1.0, 1.0, set(), set()),
        (1.01, 1.0, set(), set()),  # what a store takes
        (1.1, 1.0, {0}, set()),  # some thread runs, and the main thread waits
        (1.2, 1.1, {0}, {0}),
    ):
        processes.cpu[0] = waiting.cpu[0] = whole, main
        assert (processes.running_ranks(), waiting.running_ranks({0})) == (running, waits)


# ---- packets -------------------------------------------------------------------------------------------------


def copied(sender: Sender, mirror: FileMirror) -> int:
    packets = 0
    while (packet := sender.packet()) is not None:
        mirror.take(packet)
        packets += 1
    return packets


def test_a_copy_grows_with_what_is_recorded(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir(), there.mkdir()
    reserve(here, 3), reserve(there, 3)
    record = Recorder(here, 2, torch.device("cpu"))
    sender, mirror = Sender(here, 2), FileMirror(there, 2, -AHEAD)
    assert copied(sender, mirror) == 1  # a rank that has begun, and has no name but ""
    with record.step(0):
        record.ledger.change(("params", 100))
        outer = record.begin(Kind.FORWARD, "layer", stage=1, microbatch=3)
        copied(sender, mirror)
        seen = read_rank(there, 2)
        assert seen.ops["end"].tolist() == [0, 0] and seen.state == "running"
        assert seen.name(int(seen.ops[1]["name"])) == "layer"
        record.end(outer)
        Values(here, 2, record._names).log("accuracy", 0.75, 0)
        (here / "rank2.axes").write_text('{"0,1": "dp"}')
        record.loss(0.5)
    copied(sender, mirror)
    assert sender.packet() is None  # nothing is new
    record.close("finished")
    copied(sender, mirror)
    mine, theirs = read_rank(here, 2), read_rank(there, 2)
    assert theirs.state == "finished" and theirs.names == mine.names
    assert (theirs.ops["start"] == mine.ops["start"] - AHEAD).all()
    assert (theirs.ops["end"] == mine.ops["end"] - AHEAD).all()
    assert (theirs.memory["time"] == mine.memory["time"] - AHEAD).all()
    assert theirs.values["value"].tolist() == [0.75] and (there / "rank2.axes").exists()
    for column in ("kind", "stage", "microbatch", "step", "value", "cpu"):
        assert np.array_equal(theirs.ops[column], mine.ops[column], equal_nan=True)


def test_an_op_that_ends_late_is_sent_again(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir(), there.mkdir()
    reserve(here, 1), reserve(there, 1)
    record = Recorder(here, 0, torch.device("cpu"))
    sender, mirror = Sender(here, 0), FileMirror(there, 0, 0)
    early = record.begin(Kind.ALL_REDUCE, group="0,1", number=0)
    for _ in range(2 * WINDOW + 10):
        record.end(record.begin(Kind.COMPUTE))
    assert copied(sender, mirror) >= 2
    record.end(early)
    copied(sender, mirror)
    mine, theirs = read_rank(here, 0), read_rank(there, 0)
    assert np.array_equal(mine.ops, theirs.ops) and theirs.ops[early]["end"] > 0
    mirror.correct(1000, int(mine.ops[0]["start"]), int(mine.ops[-1]["end"]))
    corrected = read_rank(there, 0).ops["end"] - mine.ops["end"]
    assert corrected[1] < 100 and corrected[-1] == 1000
    record.close()


def test_nothing_is_lost_if_a_rank_ends_while_its_files_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir(), there.mkdir()
    reserve(here, 1), reserve(there, 1)
    record = Recorder(here, 0, torch.device("cpu"))
    sender, mirror = Sender(here, 0), FileMirror(there, 0, 0)
    record.end(record.begin(Kind.COMPUTE))
    copied(sender, mirror)
    look = os.fstat

    def ends_meanwhile(fd: int) -> os.stat_result:
        """Close the rank's files, which shortens them, between the look at a file's length and its mapping."""
        before = look(fd)
        record.close()
        return before

    monkeypatch.setattr("mpkit.trace.files.os.fstat", ends_meanwhile)
    copied(sender, mirror)
    monkeypatch.undo()
    assert np.array_equal(read_rank(there, 0).ops, read_rank(here, 0).ops)
    assert read_rank(there, 0).state == "finished"


def test_nothing_is_new_once_the_nodes_folder_is_gone(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir(), there.mkdir()
    reserve(here, 2), reserve(there, 2)
    record = Recorder(here, 1, torch.device("cpu"))
    sender, mirror = Sender(here, 1), FileMirror(there, 1, 0)
    record.end(record.begin(Kind.COMPUTE))
    record.close()
    copied(sender, mirror)
    shutil.rmtree(here)  # as rank 0 of the node does once it has heard the verdict
    assert sender.packet() is None
    assert len(read_rank(there, 1).ops) == 1


def test_an_error_travels_with_its_time(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir(), there.mkdir()
    reserve(here, 1), reserve(there, 1)
    sender, mirror = Sender(here, 0), FileMirror(there, 0, 5)
    write_error(here, 0, {"time": 10, "message": "of no use"})
    copied(sender, mirror)
    assert read_error(there, 0) == {"time": 15, "message": "of no use"}


@pytest.mark.parametrize(
    "error",
    [
        RankFailed("it failed", rank=2, step=3, stage=None, traceback="line 3", signal="SIGKILL"),
        Deadlock("they wait"),
        CommMismatch("they differ", rank=1, other=3, step=2),
        MpkitError("stopped"),
    ],
)
def test_a_verdict_is_the_same_for_everyone(error: Exception) -> None:
    heard = Verdict.from_json(Verdict(error, [1.0]).to_json(), [1.0])
    assert type(heard.error) is type(error) and str(heard.error) == str(error)
    assert vars(heard.error) == vars(error)
    assert Verdict.from_json(Verdict(None, [float("nan")]).to_json(), [2.0]) == Verdict(None, [2.0])


# ---- mpkit launch --------------------------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path: Path) -> CommandProgram:
    (tmp_path / "train.py").write_text("")
    return CommandProgram(str(tmp_path / "train.py"), ("--name", "two words"))


def test_the_commands(script: CommandProgram) -> None:
    text = commands(LaunchPlan(script, nodes=3, gpus=8, address="n1"))
    ranks = [line for line in text.splitlines() if line.startswith("torchrun")]
    assert len(ranks) == 3 and all(line.endswith("train.py --name 'two words'") for line in ranks)
    for part in (
        "#SBATCH --nodes=3",
        "--ntasks-per-node=8",
        "--num_processes 24",
        "n1 slots=8",
        "mk.Plan.ddp(24)",
    ):
        assert part in text
    alone = commands(LaunchPlan(script, nodes=1, gpus=2))
    assert "torchrun --standalone --nproc-per-node 2" in alone and "--machine_rank" not in alone


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"gpus": 32 * 4, "nodes": 16}, "Did you mean --gpus 8"),
        ({"gpus": 256, "nodes": 2}, r"2 x 256 would be 512 ranks\.$"),
        ({"nodes": 0}, "--nodes 0: at least 1"),
        ({"nodes": 2, "address": "localhost"}, "would never meet"),
        ({"address": "no de"}, "the name or address of the first node"),
        ({"port": 80}, "--port 80: from 1024"),
        ({"hours": 0}, "--hours 0: more than 0"),
    ],
)
def test_launch_mistakes(script: CommandProgram, how: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        LaunchPlan(script, **how).check()
    with pytest.raises(ValueError, match="no such file here"):
        LaunchPlan(CommandProgram("trian.py")).check()
