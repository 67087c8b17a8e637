"""A launcher on one node with 4 ranks: a plan, and what a script does besides. One launch for all."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mpkit as mk
from mpkit.common.units import percent
from mpkit.trace import Kind
from tests.nodes.hosts import HERE, TwoHosts, forked, why_not
from tests.nodes.train_plans import job

pytestmark = [pytest.mark.alone, pytest.mark.slow]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("torchrun")
    job = forked(4, HERE / "one_node.py", str(folder))
    assert not any(job.wait()), job.outputs[0]
    told = [json.loads((folder / f"told{rank}.json").read_text()) for rank in range(4)]
    line = next(each for each in job.outputs[0].splitlines() if "step 3 of 3" in each)  # rank 0's
    assert f"bubble {percent(told[0]['bubble'])}" in line
    return told


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
        assert "the launcher has started 4 ranks, and 2 are asked for" in each["resized"]
        assert each["wrong_size"] == told[0]["wrong_size"] and "the cluster has 4" in each["wrong_size"]
        assert each["weights_differ"] == told[0]["weights_differ"]
        assert "torch.manual_seed(0) before it is made" in each["weights_differ"]
        assert "seed is 0 on rank 0 and 1 there" in each["seeds_differ"]
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


# ---- Two hosts of two ranks each: network namespaces, one training. One host's clock is 300 ms ahead.

AHEAD = 0.3
SLOW = 100e6 / 8  # bytes per second


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    reason = why_not()
    if reason:
        pytest.skip(f"two hosts: {reason}")
    hosts = TwoHosts()
    yield hosts
    hosts.close()


@pytest.fixture(scope="module")
def trained(hosts: TwoHosts, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each rank told, and the folder of the traces; the last training had a link of 100 Mbit/s."""
    folder = tmp_path_factory.mktemp("two-hosts")
    names = ["ddp", "pipeline", "mesh", "mesh-tp", "wait", "wide"]
    running = hosts.start(HERE / "train_plans.py", str(folder), *names, ahead=AHEAD)
    try:
        running.wait_for_files([folder / f"waits{rank}" for rank in range(4)])
        # Not every kernel has netem; without it the link has a rate, and no delay of its own.
        delayed = hosts.shape("netem", "delay", "2ms", "rate", "100mbit")
        assert delayed or hosts.shape("tbf", "rate", "100mbit", "burst", "64kb", "latency", "400ms")
        (folder / "go-on").touch()
        codes = running.wait()
    finally:
        running.kill()
        hosts.unshape()
    assert not any(codes), "\n".join(running.outputs)
    return {
        "folder": folder,
        "ranks": [json.loads((folder / f"told{rank}.json").read_text()) for rank in range(4)],
    }


@pytest.mark.parametrize("name", ["ddp", "pipeline", "mesh", "mesh-tp"])
def test_equals_serial(trained: dict[str, Any], cluster: mk.Cluster, name: str) -> None:
    serial = cluster.resized(1).train(plan=mk.Plan.serial(), **job()).wait()
    sums = {key: value.double().sum().item() for key, value in serial.state_dict().items()}
    for rank, told in enumerate(trained["ranks"]):  # every rank has the losses and the weights
        assert told["ranks"] == [[rank, 4] for rank in range(4)]
        assert told[name]["status"] == "finished"
        assert ("rank 0's process compares" if rank else "equal to serial training in steps 1") in told[name][
            "proof"
        ]
        assert told[name]["losses"] == pytest.approx(list(serial.losses), rel=1e-5)
        assert told[name]["sums"] == pytest.approx(sums, abs=1e-4)


def test_the_trace_has_every_rank_on_one_clock(trained: dict[str, Any]) -> None:
    trace = mk.Trace.load(trained["folder"] / "pipeline.mpkit").check()
    assert trace.meta["hosts"] == ["node-a", "node-a", "node-b", "node-b"]
    assert trace.meta["nodes"] == ["0", "0", "1", "1"]
    assert [rank.state for rank in trace.ranks] == ["finished"] * 4
    (clock,) = trace.meta["clocks"]
    assert clock["host"] == "node-b"
    assert abs(clock["offset"] + AHEAD) <= clock["residual"] + 1e-3
    assert clock["residual"] > 0
    # A message is received after it was sent: not so if the clocks were 300 ms apart.
    sent = {
        (r.name(int(op["group"])), int(op["number"])): int(op["start"]) for r, op in ops(trace, Kind.SEND)
    }
    got = {(r.name(int(op["group"])), int(op["number"])): int(op["end"]) for r, op in ops(trace, Kind.RECV)}
    across = [key for key in sent if key[0].startswith(("1>2", "2>1"))]
    assert across and sent.keys() == got.keys()
    late = [got[key] - sent[key] for key in across]
    assert min(late) > -2e9 * clock["residual"]
    timeline = mk.Timeline.of(trace, clock="measured")
    assert any(
        re.search(r"The clock of node-b \(0\.3 s ahead\) was put on rank 0's, to within", n)
        for n in timeline.notes
    )


def ops(trace: mk.Trace, kind: int) -> Iterator[tuple[Any, Any]]:
    for rank in trace.ranks:
        for op in rank.ops[rank.ops["kind"] == kind]:
            yield rank, op


def test_a_slow_link_shows_as_exposed_communication(trained: dict[str, Any]) -> None:
    trace = mk.Trace.load(trained["folder"] / "wide.mpkit")
    slow = mk.Timeline.of(trace, clock="measured").step(3)
    payload = sum(slow.comm_bytes[0].values())
    assert payload > 1e6
    # An all-reduce sends at least as much as its payload from host to host and back.
    assert min(slow.exposed_comm) > payload / SLOW


def test_under_srun_rank_0_serves_the_store(hosts: TwoHosts, tmp_path: Path) -> None:
    running = hosts.start(HERE / "train_plans.py", str(tmp_path), "ddp", "mesh", srun=True)
    assert running.wait() == [0] * 4, "\n".join(running.outputs)
    told = [json.loads((tmp_path / f"told{rank}.json").read_text()) for rank in range(4)]
    assert all(each["mesh"]["losses"] == told[0]["mesh"]["losses"] for each in told)
    assert told[0]["ddp"]["losses"] == pytest.approx(told[0]["mesh"]["losses"], rel=1e-5)


def test_an_error_ends_all_and_its_node_says_why(hosts: TwoHosts, tmp_path: Path) -> None:
    running = hosts.start(HERE / "fail.py", "raise", str(tmp_path))
    assert all(running.wait()), "\n".join(running.outputs)
    said = r"rank 3 of 4 on node-b failed in step 5: RuntimeError: the disk of rank 3 is on fire"
    assert re.search(said, running.outputs[1])
    assert re.search(r'fail\.py", line \d+, in work\n.*raise RuntimeError', running.outputs[1])


def test_each_node_says_where_its_ranks_hang(hosts: TwoHosts, tmp_path: Path) -> None:
    running = hosts.start(HERE / "fail.py", "hang for 2 s", str(tmp_path))
    assert all(running.wait()), "\n".join(running.outputs)
    text = "\n".join(running.outputs)
    assert re.search(
        r"rank 1 waits in all_reduce number 6 of ranks 0,1,2,3 at .*fail\.py:\d+ in work", text
    ) or re.search(r"rank 3 waits in recv from rank 0 .* at .*fail\.py:\d+ in work", text), text
    assert "ranks of this node wait for each other" in text and "whose node says where it is" in text


@pytest.mark.parametrize("how", ["kill3", "die"])
def test_a_rank_or_host_that_dies_ends_the_others(hosts: TwoHosts, tmp_path: Path, how: str) -> None:
    running = hosts.start(HERE / "fail.py", how, str(tmp_path))
    if how == "die":
        running.wait_for_files([tmp_path / "there"])
        running.kill(1)
    assert all(running.wait()), "\n".join(running.outputs)
