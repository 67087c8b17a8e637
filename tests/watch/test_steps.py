"""Steps, losses, batches and axes of watched programs, and `mpkit watch` on the command line."""

import subprocess
import sys
from _thread import start_new_thread
from collections.abc import Callable
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import mpkit as mk
from mpkit.strategies.program_calls.program import SourceLines
from mpkit.trace import Kind, Trace
from tests.limits import EVENT, PROGRAM
from tests.serial import Clusters


def accumulating(ctx: Any) -> list[float]:
    """Two micro-batches per step, from a DataLoader, and an evaluation after each step."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(24, 8), torch.randint(0, 4, (24,)))
    losses, step = [], 0.0
    for number, (x, y) in enumerate(DataLoader(data, batch_size=4)):
        loss = F.cross_entropy(model(x), y) / 2
        loss.backward()
        step += loss.item()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
            losses.append(step)
            step = 0.0
    return losses


def test_a_step_ends_with_its_optimizer_step_and_has_the_sum_of_its_losses(clusters: Clusters) -> None:
    expected = clusters(2).run(accumulating, watch=True)[0]
    trace = clusters(2).trace
    assert trace.losses == pytest.approx(expected, rel=1e-12)
    ops = trace.ranks[0].ops
    for kind in (Kind.DATA, Kind.FORWARD, Kind.BACKWARD):
        of_kind = ops[(ops["kind"] == kind) & (ops["depth"] == 0)]
        assert [int((of_kind["step"] == step).sum()) for step in range(3)] == [2, 2, 2]


def two_networks(ctx: Any) -> None:
    one, other = nn.Linear(8, 8), nn.Linear(8, 1)
    optimizers = [torch.optim.Adam(net.parameters()) for net in (one, other)]
    for _ in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
            other(one(torch.randn(4, 8))).mean().backward()
            optimizer.step()
        mk.watch.step()


def test_a_program_says_where_its_steps_end(clusters: Clusters) -> None:
    clusters(1).run(two_networks, watch=True)
    assert (
        clusters(1).timeline().steps[-1] >= 4
    )  # the first optimizer step ended one before mk.watch.step() was known
    ops = clusters(1).trace.ranks[0].ops
    last = ops[(ops["step"] == ops["step"].max()) & (ops["depth"] == 0)]
    assert (last["kind"] == Kind.OPTIMIZER).sum() == 2


def two_dimensions(ctx: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        F.cross_entropy(model(torch.randn(4, 16)), torch.randint(0, 8, (4,))).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_groups_have_the_names_of_the_programs_mesh(clusters: Clusters) -> None:
    clusters(4).run(two_dimensions, watch=True)
    axes = {row.axis for row in clusters(4).timeline().comm_volume().rows}
    assert axes == {"dp", "tp"}


def test_a_later_failure_names_the_programs_line(clusters: Clusters) -> None:
    def fails(ctx: Any) -> None:
        model = DistributedDataParallel(nn.Linear(8, 4))
        model(torch.ones(2, 9))

    with pytest.raises(mk.RankFailed, match="mat1 and mat2 shapes cannot be multiplied") as error:
        clusters(2).run(fails, watch=True)
    assert "model(torch.ones(2, 9))" in str(error.value)


def test_what_watch_can_be(clusters: Clusters) -> None:
    with pytest.raises(ValueError, match=r"watch='layers': True records"):
        clusters(2).run(accumulating, watch="layers")  # type: ignore[arg-type]


SCRIPT = """
import os, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[2]))
for step in range(2):
    model(torch.ones(4, 8)).mean().backward()
    optimizer.step()
sizes = [os.environ[f"{of}_WORLD_SIZE"] for of in ("LOCAL", "ROLE", "GROUP")]
print("learning rate", sys.argv[1:], "local rank", os.environ["LOCAL_RANK"], "of", *sizes)
dist.destroy_process_group()
dist.init_process_group()
assert dist.get_world_size() == 2
"""


@pytest.mark.slow
def test_an_unchanged_script_is_watched(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ["--ranks", "2", "--html", "run.html", "--trace", "run.trace"]
    done = subprocess.run(
        [sys.executable, "-m", "mpkit", "watch", *options, "train.py", "--lr", "0.1"],
        cwd=tmp_path, capture_output=True, text=True, timeout=PROGRAM,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "[rank 1] learning rate ['--lr', '0.1'] local rank 1 of 2 2 1" in done.stdout
    assert "step 1 (2 steps in all)" in done.stdout
    assert (tmp_path / "run.html").exists()
    trace = Trace.load(tmp_path / "run.trace")
    assert [int((rank.ops["kind"] == Kind.STEP).sum()) for rank in trace.ranks] == [2, 2]


def test_a_backward_on_a_gpu_has_no_line() -> None:
    """C++ computes it in a thread of its own, whose stack holds the kernel alone."""
    lines, said = SourceLines(), Queue[str | None]()
    start_new_thread(lambda: said.put(lines.running_line()), ())
    assert said.get(timeout=EVENT) == "" and not lines.is_direct


@pytest.mark.parametrize(
    ("asked", "message"),
    {
        ("nccl", -1, -1): 'backend="nccl".*gloo joins them',
        ("gloo", 5, -1): r"rank=5, world_size=-1.*this is rank 0 of 1",
        ("gloo", 0, 8): r"world_size=8.*leave both out, or write .*\[\"WORLD_SIZE\"\]",
    }.items(),
)
def test_a_group_that_cannot_be_joined_is_refused(
    asked: tuple[str, int, int], message: str, clusters: Clusters
) -> None:
    backend, rank, size = asked
    with pytest.raises(mk.RankFailed, match=message):
        clusters(1).run(lambda ctx: dist.init_process_group(backend, rank=rank, world_size=size))


def a_pipeline(ctx: Any) -> list[float]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    part = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    schedule = Schedule1F1B(PipelineStage(part, ctx.rank, 2, torch.device("cpu")), 4, loss_fn=F.mse_loss)
    optimizer = torch.optim.AdamW(part.parameters())
    means = []
    for _ in range(4):
        losses: list[torch.Tensor] = []
        schedule.step(
            *([torch.ones(8, 8)] if ctx.rank == 0 else []),
            **({"target": torch.ones(8, 8), "losses": losses} if ctx.rank else {}),
        )
        means.append(sum(loss.item() for loss in losses) / 4)
        optimizer.step()
        optimizer.zero_grad()
    return means


def prefetched_shards(ctx: Any) -> None:
    """FSDP2 that gathers a layer ahead, and a scheduler that communicates after each step."""
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    for layer, following in zip([*model][:-1], [*model][1:], strict=True):
        layer.set_modules_to_forward_prefetch([following])  # type: ignore[operator]
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(torch.ones(5))


@pytest.mark.parametrize("program", [a_pipeline, prefetched_shards], ids=lambda program: program.__name__)
def test_a_step_is_what_lies_between_two_optimizer_steps(clusters: Clusters, program: Any) -> None:
    losses = clusters(2).run(program, watch=True)[1]
    trace = clusters(2).trace.check()
    assert losses is None or trace.losses == pytest.approx(losses)
    messages = []
    for rank in trace.ranks:
        ops = rank.ops[rank.ops["kind"] != Kind.STEP]
        ends = ops["end"][(ops["kind"] == Kind.OPTIMIZER) & (ops["depth"] == 0)]
        assert len(ends) == 4
        began = (ops["kind"] != Kind.WAIT) & (
            ops["step"] >= 0
        )  # each op belongs to the step of the optimizer step that follows it
        assert (ops["step"][began] == np.searchsorted(ends, ops["start"][began])).all()
        messages.append(
            {kind: ops[(ops["kind"] == kind) & (ops["step"] > 0)] for kind in (Kind.SEND, Kind.RECV)}
        )
    for sender, receiver in ((0, 1), (1, 0)):  # the first step exchanges shapes as well
        sent, received = messages[sender][Kind.SEND], messages[receiver][Kind.RECV]
        assert sent["step"].tolist() == received["step"].tolist()
        assert (sent["number"] - received["number"] == 0).all()
        assert len(sent) == (12 if program is a_pipeline else 0)
    # On the clock of the trace, which other load on the machine does not change.
    timeline = clusters(2).timeline()
    spans = timeline.spans[(timeline.spans["kind"] == Kind.OPTIMIZER) & (timeline.spans["depth"] == 0)]
    ended = np.array([spans["end"][spans["rank"] == rank] for rank in (0, 1)])
    times = np.array([timeline.step(step).step_time for step in timeline.steps[1:4]])
    last, first = ended.max(axis=0), ended.min(axis=0)
    # A rank whose optimizer is done begins the next step, while the other one may still update its weights.
    assert (times > 0.99 * np.diff(last)).all()
    assert (times < last[1:] - first[:-1] + 1e-9).all()


# ---- Calls of torch.distributed that do not fit their peers' end with both ranks and lines, as those of `ctx.comm` do.


def kinds(ctx: Any) -> None:
    x = torch.ones(4)
    if ctx.rank:
        dist.all_reduce(x)
    else:
        dist.broadcast(x, 0)


def dtypes(ctx: Any) -> None:
    dist.all_reduce(torch.ones(4, dtype=torch.int64 if ctx.rank else torch.float32))


def shapes(ctx: Any) -> None:
    dist.all_gather_into_tensor(torch.empty(8 + 4 * ctx.rank), torch.ones(4 + 2 * ctx.rank))


def roots(ctx: Any) -> None:
    dist.broadcast(torch.ones(4), ctx.rank)


def reductions(ctx: Any) -> None:
    dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX if ctx.rank else dist.ReduceOp.SUM)


def messages(ctx: Any) -> None:
    if ctx.rank:
        dist.recv(torch.empty(4), 0)
    else:
        dist.send(torch.ones(2, dtype=torch.int64), 1)


def groups(ctx: Any) -> None:
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    dist.all_reduce(torch.ones(4), group=second if ctx.rank else first)


def functional(ctx: Any) -> None:
    all_reduce = torch.distributed._functional_collectives.all_reduce
    all_reduce(torch.ones(4 + ctx.rank), "sum", dist.group.WORLD)


@pytest.mark.parametrize(
    ("program", "said"),
    {
        kinds: r"calls (broadcast|all_reduce).*where rank \d calls (broadcast|all_reduce)",
        dtypes: r"(int64|float32)\[4\].*where rank \d calls all_reduce\((int64|float32)\[4\]",
        shapes: r"all_gather\(float32\[(8|12)\].*float32\[(8|12)\]",
        roots: r"All ranks name the same root",
        reductions: r'op="(max|sum)".*op="(max|sum)"',
        messages: r"rank 1 receives float32\[4\] at .* what rank 0 sent as int64\[2\]",
        groups: r'group="\d+".*group="\d+".*two groups of the same ranks',
        functional: r"float32\[(4|5)\].*float32\[(4|5)\]",
    }.items(),
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_both_ranks_and_lines_are_named(
    program: Callable[[Any], None], said: str, clusters: Clusters
) -> None:
    for watch in (False, True) if program in (kinds, messages, functional) else (False,):
        with pytest.raises(mk.errors.CommMismatch, match=rf"(?s){said}") as error:
            clusters(2).run(program, watch=watch, timeout=EVENT)
        assert str(error.value).count("test_steps.py:") >= 2


@pytest.mark.parametrize("watch", [False, True])
def test_what_fits_goes_on(watch: bool, clusters: Clusters) -> None:
    """Objects, uneven all-to-alls, tags of any size, calls of ctx.comm in between, and one call from several lines."""

    def fits(ctx: Any) -> float:
        objects: list[Any] = [None, None]
        dist.all_gather_object(objects, "x" * (1 + 100 * ctx.rank))
        sent, received = torch.ones(3), torch.empty(2 + 2 * ctx.rank)
        dist.all_to_all_single(
            received, sent, [1 + ctx.rank] * 2, [1, 2]
        )  # parts of other sizes on each rank
        ctx.comm.all_reduce(torch.ones(2))
        handle = dist.isend(sent[:1], 1 - ctx.rank, tag=5_000_000)
        dist.recv(received[:1], 1 - ctx.rank, tag=5_000_000)
        handle.wait()
        total = torch.ones(1)
        if ctx.rank:
            dist.all_reduce(total)
        else:
            dist.all_reduce(total)
        pair = dist.new_group([0, 1])
        dist.barrier(pair)
        return float(total) + len(objects[1])

    assert clusters(2).run(fits, watch=watch) == [103.0, 103.0]
