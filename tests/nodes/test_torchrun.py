"""A launcher on one node with 4 ranks: a plan, and what a script does besides. One launch for all."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mpkit as mk
from tests.nodes.hosts import HERE, forked

pytestmark = [pytest.mark.alone, pytest.mark.slow]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("torchrun")
    job = forked(4, HERE / "one_node.py", str(folder))
    assert not any(job.wait()), job.outputs[0]
    assert "step 3 of 3" in job.outputs[0]  # rank 0's line
    return [json.loads((folder / f"told{rank}.json").read_text()) for rank in range(4)]


def test_rank_0_compares_with_plain_pytorch(told: list[dict[str, Any]]) -> None:
    said = "equal to serial training in steps 1"
    for rank, each in enumerate(told):
        assert each["losses"] == told[0]["losses"]
        assert (said in each["proof"]) == (rank == 0), each["proof"]


def test_a_step_that_is_not_serial_ends_all_ranks(tmp_path: Path) -> None:
    job = forked(4, HERE / "fail.py", "not serial", str(tmp_path))
    assert all(job.wait())
    assert "mpkit.errors.NotSerial: step 2 is not that of serial training: the loss is" in job.outputs[0]


def test_results_are_the_same_on_every_rank(told: list[dict[str, Any]]) -> None:
    for each in told:
        assert each["results"] == [[rank, 8.0] for rank in range(4)]
        assert each["streamed"] == told[0]["streamed"] and len(each["streamed"]) == 3
        assert each["resumed"] == [2, 1]


def test_the_users_own_group_is_joined_and_left(told: list[dict[str, Any]]) -> None:
    for each in told:
        assert each["joined"] == [4.0] * 4 and each["still_there"] == 4.0


def test_mistakes_are_the_same_error_on_every_rank(told: list[dict[str, Any]]) -> None:
    for rank, each in enumerate(told):
        assert "mk.Cluster.from_env()" in each["second_launcher"]
        assert "names 5 devices, and the launcher has started 4 ranks on the node" in each["too_many_devices"]
        assert each["wrong_size"] == told[0]["wrong_size"] and "the cluster has 4" in each["wrong_size"]
        assert each["weights_differ"] == told[0]["weights_differ"]
        assert "torch.manual_seed(0) before it is made" in each["weights_differ"]
        assert ("if cluster.rank == 0" in each["elsewhere"]) == (rank > 0)


def test_an_error_of_one_rank_ends_its_node_with_the_same_error(tmp_path: Path) -> None:
    job = forked(4, HERE / "fail.py", "raise", str(tmp_path))
    assert all(job.wait())
    said = re.findall(
        r"rank 3 of 4 on \S+ failed in step 5: RuntimeError: the disk of rank 3", job.outputs[0]
    )
    assert said, job.outputs[0]
    assert re.search(r'fail\.py", line \d+, in work\n.*raise RuntimeError', job.outputs[0])


def test_a_hang_is_reported_with_rank_call_and_line(tmp_path: Path) -> None:
    job = forked(4, HERE / "fail.py", "hang", str(tmp_path))
    assert all(job.wait())
    text = job.outputs[0]
    assert re.search(r"rank 3 waits in recv from rank 0 .* at .*fail\.py:\d+ in work", text), text
    assert re.search(r"rank 1 waits in all_reduce number 6 of ranks 0,1,2,3 at .*fail\.py:\d+ in work", text)
    (folder,) = set(map(Path, re.findall(r"mk\.Trace\.load\('(.+?)'\)", text)))
    try:
        assert [len(rank.ops) > 6 for rank in mk.Trace.load(folder).ranks] == [True] * 4
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("how", ["interrupt", "kill", "kill0"])
def test_a_rank_that_is_interrupted_or_killed_ends_all(how: str, tmp_path: Path) -> None:
    assert all(forked(4, HERE / "fail.py", how, str(tmp_path)).wait())


@pytest.mark.soak
def test_an_unchanged_program_is_watched(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "torch.manual_seed(0)\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(3):\n"
        "    optimizer.zero_grad()\n"
        "    model(torch.randn(4, 8)).sum().backward()\n"
        "    optimizer.step()\n"
        "dist.destroy_process_group()\n"
    )
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    watched = [*agent, "-m", "mpkit", "watch", "--trace", str(tmp_path / "t.mpkit"), str(program)]
    done = subprocess.run(watched, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "rank 1 (CPU)" in done.stdout and "3 steps in all" in done.stdout
    assert mk.Trace.load(tmp_path / "t.mpkit").world_size == 2
