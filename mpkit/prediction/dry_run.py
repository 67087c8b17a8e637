"""trace_fake: run a Plan at full size, on hardware and rank counts that are not here, in seconds and without memory.

One real process builds the model under the mode of no content. For each rank that differs, it joins a fake process
group (torch.testing._internal.distributed.fake_pg), in which every call returns at once and changes nothing, and runs
the strategy's own code, while every operator advances the rank's clock by its time on the device
(`mpkit.trace.record.counted_clock`). Every other rank then gets the records of the one that does the same.

A storage counts from when an operator makes it until nobody refers to it any more, so that what only exists for a
moment (the copies of the logits in a loss's backward, a gathered layer, an optimizer's square root) is in the peak if
that is when the peak is. `benchmarks/memory.py` compares this with torch.profiler's account of the real training.

Not counted: the batch itself, which lies in the host's memory; what a driver, a communication library or a kernel keeps
for itself, except for convolutions and LSTMs on CPUs (`mpkit.trace.record.workspace`); and fragmentation.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpkit.common.process_wide import LOCK, Replacements
from mpkit.common.torch_private import (
    FakeStore,
    FakeTensor,
    TorchDispatchMode,
    _local_scalar_dense,
    tree_map_only,
)
from mpkit.common.tracebacks import public
from mpkit.devices.catalogue import hardware as find
from mpkit.devices.catalogue.machines import check_enough, enough_a100
from mpkit.devices.hardware import Device, Hardware
from mpkit.launch.session.cluster import Cluster, borrow_cluster
from mpkit.plan.mesh import Mesh
from mpkit.plan.plan import Plan
from mpkit.strategies.comm.communicator import Communicator
from mpkit.strategies.comm.wire import Wire
from mpkit.strategies.data.microbatch import Value, share, split
from mpkit.strategies.prepare.prepare import TrainJob, prepare, warn_if_unwise
from mpkit.strategies.rank_context import Context
from mpkit.strategies.runtime.train import train
from mpkit.trace import Kind, RankTrace, Trace
from mpkit.trace.files import read_rank
from mpkit.trace.record.counted_clock import CountedRecorder, CountingMode
from mpkit.trace.record.fake_mode import FakeMode


@public
def trace_fake(
    model_fn: Callable[[], nn.Module], plan: Plan, *, batch: Any, loss: Callable[[Any, Any], torch.Tensor],
    optimizer: Callable[[Any], torch.optim.Optimizer], steps: int = 1, hardware: Hardware | str | None = None,
    max_grad_norm: float | None = None, cluster: Cluster | None = None,
) -> Trace:  # fmt: skip
    """Trace what the ranks of a training would do, played by one process on tensors that have shapes and no content.

    The strategy's own code runs, at full size; `Timeline.of` puts its trace on a clock. Only the losses are missing.

    >>> import torch, mpkit as mk
    >>> trace = mk.trace_fake(
    ...     lambda: torch.nn.Sequential(torch.nn.Linear(4096, 4096, bias=False)), mk.Plan.ddp(16),
    ...     batch=(torch.empty(64, 4096, device="meta"), torch.empty(64, 4096, device="meta")),
    ...     loss=torch.nn.functional.mse_loss, optimizer=torch.optim.AdamW)
    >>> mk.Timeline.of(trace).peak_memory[15]["optimizer"] // 2**20  # MiB: AdamW's two moments, 4 bytes each
    128

    >>> plan = mk.Plan(pp=2, dp=2, tp=2, schedule="1f1b", microbatches=4)
    >>> tokens = torch.empty(16, 64, dtype=torch.long, device="meta")
    >>> trace = mk.trace_fake(lambda: mk.models.GPT(layers=2), plan, batch=(tokens, tokens),
    ...     loss=mk.models.next_token_loss, optimizer=torch.optim.AdamW)
    >>> trace.meta["fake"]["stands_for"]
    [0, 0, 0, 0, 4, 4, 4, 4]

    Times within an action are counted by operator: the longer of FLOPs / rate and bytes / bandwidth (the roofline).
    Ranks that do the same are played once. Nothing overflows; gradients are taken to exceed the norm to clip to.

    Args:
        model_fn: makes the model; called where tensors have no content, so that it takes no memory.
        plan: any plan.
        batch: (inputs, targets) of the whole global batch, as for `Cluster.train`, or a function that makes them.
            Only the shapes matter: `torch.empty(..., device="meta")` takes no memory.
        loss: loss(outputs, targets) -> scalar, the mean over the batch, or (total, count).
        optimizer: optimizer(params) -> torch.optim.Optimizer.
        steps: the number of steps. DDP's first step differs from the rest: buckets are rebuilt after it.
        hardware: the machine, a name in `mk.hardware()` or a `Hardware`; None: as many nodes of 8 A100 as it takes.
        max_grad_norm: clip gradients to this norm; None: do not clip.
        cluster: any cluster, whose helper process to use; None: start one.

    Raises:
        ValueError: the machine has too few devices; or the model, batch or loss cannot work.
        RankFailed: the model reads its tensors' values, which are not there.
    """
    # ---- check
    _check(model_fn, plan)
    machine = find(hardware or enough_a100(plan.ranks))
    check_enough(machine, plan.ranks, "trace_fake")
    # ---- play
    how = {"loss": loss, "optimizer": optimizer, "steps": steps, "max_grad_norm": max_grad_norm}
    with borrow_cluster(cluster) as used:
        played = used.run(play, model_fn, batch, plan, how, machine.device)[0]
    if isinstance(played, str):
        raise ValueError(played)
    records, stands_for, meta = played
    clock = "operator by operator: FLOPs or bytes on that device, whichever takes longer"
    on = {"device": machine.device.name, "clock": clock}
    fake = {"played": sorted(records), "stands_for": stands_for, **on}
    all_ranks = {"world_size": plan.ranks, "device": "cpu", "backend": "fake"}
    ranks = [mirror(records[each], each, rank, plan.mesh) for rank, each in enumerate(stands_for)]
    return Trace(ranks, {**all_ranks, **meta, "hardware": machine.name, "fake": fake})


def _check(model_fn: Any, plan: Any) -> None:
    if isinstance(model_fn, torch.nn.Module) or not callable(model_fn):
        raise ValueError(
            f"trace_fake({type(model_fn).__name__}): a function that makes the model is wanted, so that it can be made "
            "without memory: trace_fake(lambda: mpkit.models.GPT(layers=48, width=1600, heads=25), ...)"
        )
    if not isinstance(plan, Plan):
        raise ValueError(f"plan={plan!r}: give a Plan, such as mk.Plan.zero(3, 64)")
    warn_if_unwise(plan)


# ---- in the process that plays


def play(
    context: Context, model_fn: Callable[[], nn.Module], batch: Any, plan: Plan, how: dict[str, Any], device: Device
) -> tuple[dict[int, RankTrace], list[int], dict[str, Any]] | str | None:  # fmt: skip
    """Play the ranks of a training that differ, one after the other, on a rank of its own; the others return None.

    Returns the records by played rank; by rank, the played rank that does the same; and the Trace's meta; or in words
    the user's mistake.
    """
    if context.rank:
        return None
    ranks, said = {}, Said()
    try:
        mode = FakeMode()
        # Torch's mode keeps a weak reference to each tensor that it makes, which prevents moving or casting a module.
        mode.fake_tensor_converter.set_tensor_memo = lambda *_: None  # type: ignore[method-assign]
        with mode:
            # ---- build
            made = _make_model(model_fn, mode)
            job = prepare(made, [_batch_of(batch, mode)], plan, ranks=plan.ranks, **how)
        stands_for = kinds(plan, job.meta["batch_size"], even=len(job.where.numbers_of) == 1)
        leads = {0} if plan.data_parallel == "dp" else set()  # the others do what rank 0 broadcasts under DP
        for rank in sorted({*stands_for, *leads}):
            # ---- join
            dist.destroy_process_group()
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=plan.ranks)
            with mode:
                # Each rank gets a model of its own: strategies change it, and checks have left references to the first
                # one, which prevent torch from moving it.
                anew = job.with_model(_make_model(model_fn, mode))
                recorded = _play_one(rank, plan.ranks, anew, CountingMode(device), said)
            if rank in stands_for:
                ranks[rank] = recorded
    except ValueError as error:
        return str(error)
    return ranks, stands_for, job.meta


Said = dict[tuple[str, int], Tensor]
"""What root ranks broadcast, if it was numbers and not tensors without content; by group and number of the call."""


class FakeCommunicator(Communicator):
    """Communication with absent ranks; a broadcast delivers its root's values if the root was played before."""

    def __init__(
        self, wire: Wire, counting: CountingMode, said: Said, ranks: tuple[int, ...] | None = None
    ) -> None:
        super().__init__(wire, ranks)
        self._counting, self._said = counting, said

    def subgroup(self, ranks: tuple[int, ...], handle: dist.ProcessGroup | None) -> FakeCommunicator:
        """Return a communicator of some of the ranks, without a torch group."""
        return FakeCommunicator(self.wire, self._counting, self._said, ranks)

    def device_mesh(self, device: torch.device, shape: Mapping[str, int]) -> None:
        """Return None: groups need no real peers."""

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Broadcast like `Communicator.broadcast`, with the values that the root sent if it was played before."""
        call = self.name, self.issued
        whole = super().broadcast(tensor, src)
        numbers = self._counting.numbers(whole)
        is_root = src == self.index
        if is_root and numbers is not None:
            self._said[call] = numbers
        elif not is_root and call in self._said:
            self._counting.tell(whole, self._said[call])
        return whole


def _play_one(rank: int, ranks: int, job: TrainJob, counting: CountingMode, said: Said) -> RankTrace:
    device = torch.device("cpu")
    with tempfile.TemporaryDirectory(prefix="mpkit-fake-") as folder:
        recorder = CountedRecorder(Path(folder), rank, counting)
        comm = FakeCommunicator(Wire(rank, ranks, recorder, device, "fake"), counting, said)
        with counting, LOCK, _taken_for_real():
            train(Context(rank, ranks, device, comm, recorder), job)
        recorder.close("finished")
        return read_rank(Path(folder), rank)


@contextmanager
def _taken_for_real() -> Iterator[None]:
    """Let transformers' models take a tensor without content for a real one.

    Otherwise they think they are being traced and make causal masks, with which another kernel computes attention.
    """
    replaced, module = Replacements(), sys.modules.get("transformers.utils.import_utils")
    if hasattr(module, "is_fake_tensor"):
        replaced.put(module, "is_fake_tensor", lambda _: False)
    try:
        yield
    finally:
        replaced.restore()


class Unread(TorchDispatchMode):
    """Tensors without content read as 0 by constructors, which look for outliers (`torch.nn.init.trunc_normal_`)."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _local_scalar_dense.default:
            return False if args[0].dtype == torch.bool else 0.0 if args[0].is_floating_point() else 0
        return func(*args, **kwargs or {})


def _make_model(model_fn: Callable[[], nn.Module], mode: FakeMode) -> nn.Module:
    """Return a new model, called under the fake mode; a model that existed is copied without content for each rank."""
    with Unread():  # type: ignore[no-untyped-call]
        model = model_fn()
    if not isinstance(model, nn.Module):
        return model
    tensors = [*model.parameters(), *model.buffers()]
    made = {id(each): _fake_tensor(each, mode) for each in tensors if not isinstance(each, FakeTensor)}
    return copy.deepcopy(model, made) if made else model


def _batch_of(batch: Any, mode: FakeMode) -> tuple[Value, Value]:
    """Return the batch without its content; called under the fake mode."""
    pair = batch() if callable(batch) else batch
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        kind = type(pair).__name__
        raise ValueError(
            f"batch is {kind}{f' of {len(pair)}' if isinstance(pair, tuple | list) else ''}: a pair (inputs, targets) "
            "of tensors is wanted, of which only the shapes matter, such as (torch.empty(8, 4, device='meta'), "
            "torch.empty(8, 2, device='meta')), or a function that makes one"
        )
    inputs, targets = (tree_map_only(Tensor, lambda each: _fake_tensor(each, mode), value) for value in pair)
    return inputs, targets


def _fake_tensor(tensor: Tensor, mode: FakeMode) -> Tensor:
    if isinstance(tensor, FakeTensor):
        return tensor
    on_meta = tensor.is_meta
    made = torch.empty(tensor.shape, dtype=tensor.dtype) if on_meta else mode.from_tensor(tensor.detach())
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


# ---- ranks that do the same


def kinds(plan: Plan, size: int, *, even: bool = True) -> list[int]:
    """Return for each rank the rank to play in its place: the first that does the same.

    Under DP, rank 0 does work that the others do not. Otherwise it depends on the axis:

        pp    each rank has stages of its own, and another order of actions: all are played
        cp    later parts of a causal sequence attend to more, and rings start at different ranks: all are played
        tp    shards are equal, unless the divided size is not a multiple of tp (then not `even`)
        dp    ranks with equal samples in each micro-batch do the same; all are played if groups of them divide experts

    >>> kinds(Plan.ddp(4), 8), kinds(Plan.ddp(4), 6), kinds(Plan.dp(3), 6), kinds(Plan(pp=2, dp=2, tp=2), 8)
    ([0, 0, 0, 0], [0, 0, 2, 2], [0, 1, 1], [0, 0, 0, 0, 4, 4, 4, 4])
    """
    mesh = plan.mesh
    places = [mesh.place(each) for each in range(plan.ranks)]
    first: dict[Hashable, int] = {}
    stands_for = []
    for each, place in enumerate(places):
        parts = split(size, plan.microbatches)
        gets = tuple(len(range(end)[share(start, end, place.dp, plan.dp)]) for start, end in parts)
        leads = plan.data_parallel == "dp" and each == 0
        shard = 0 if even and not mesh.folds else place.tp
        experts = place.dp if plan.ep > 1 else 0
        kind = place.pp, place.cp, shard, gets, leads, experts
        stands_for.append(first.setdefault(kind, each))
    return stands_for


def mirror(recorded: RankTrace, rank: int, other: int, mesh: Mesh) -> RankTrace:
    """Return what rank `other` would have recorded, which does the same as `rank`, which was played.

    Records name other ranks: the members of a group ("0,2"), the ends of a message ("0>4#F3"), the root of a collective
    or the other end of a message (`peer`). Along the axes in which these ranks differ, their coordinates stay; along
    all others they have the played rank's, which become the other rank's: so all move by the same number.

        played rank 0 of pp=2, dp=2, tp=2     mirrored to rank 3, at dp 1 and tp 1
        "0,1" (along tp)                      "2,3"
        "0,2" (along dp)                      "1,3"
        "0>4#F3" (along pp)                   "3>7#F3"
    """
    if other == rank:
        return recorded
    ops, names = recorded.ops, list(recorded.names)
    talks = (ops["kind"] >= Kind.SEND) & (ops["kind"] < Kind.COPY_TO_DEVICE)
    shifts = np.zeros(len(names), np.int64)  # by name: how far its members lie from those of the played rank
    for line in np.unique(ops["group"][talks]).tolist():
        text, hash_, tag = names[line].partition("#")
        between = ">" if hash_ else ","
        members = list(map(int, text.split(between)))
        along = zip(
            zip(*map(mesh.coordinates, members), strict=True),
            *map(mesh.coordinates, (other, rank)),
            strict=True,
        )
        shifts[line] = mesh.rank_at(new if len(set(each)) == 1 else old for each, new, old in along) - rank
        moved = [member + int(shifts[line]) for member in members]
        assert other in moved, f"rank {rank} cannot stand for rank {other} in {text}"
        names[line] = between.join(map(str, moved)) + hash_ + tag
    named = talks & (ops["peer"] >= 0)
    if shifts[ops["group"][named]].any():
        ops = ops.copy()
        ops["peer"][named] += shifts[ops["group"][named]].astype(ops["peer"].dtype)
    return replace(recorded, ops=ops, names=names)
