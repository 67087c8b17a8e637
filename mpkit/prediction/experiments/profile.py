"""Profile: measure a model's step on this machine once, and predict any plan before it runs.

measure     serial training on this machine, with batches of three sizes in turn: seconds of CPU that the model's
            forward, backward and update take
beside      the same in two replicas at once: ranks on neighbouring cores share caches, memory and clock
issue       the CPU of its own thread that a rank spends on each call of a collective and on its payload: over gloo,
            a reduce-scatter copies it
count       the same serial trainings, played on tensors without content (`mk.trace_fake`)
factor      measured / counted, by kind of action and samples of a micro-batch
predict     the plan is played, its actions take the factor times what is counted, longer in proportion to the time
            in which other ranks compute; and the replay adds communication over the loopback link, each rank on a
            core of its own
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, median
from typing import TYPE_CHECKING, Any

import numpy as np

from mpkit.common.arrays import Array
from mpkit.common.tracebacks import public
from mpkit.common.units import seconds
from mpkit.launch.session.cluster import Cluster, borrow_clusters
from mpkit.plan.plan import Plan
from mpkit.prediction.experiments import factors
from mpkit.prediction.experiments.factors import HALVES, LIKE, SPLIT, START, WHOLE, play_training
from mpkit.strategies.data.microbatch import batch_size
from mpkit.timeline import metrics
from mpkit.timeline.answer import PROFILED
from mpkit.timeline.timeline import Timeline
from mpkit.trace import Kind, Lane, Trace

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from mpkit.strategies.comm.communicator import Communicator


PARTS = 2, 8, 16  # what divides the batch, for the sizes of a micro-batch that are measured
STEPS, ROUNDS = 5, 2
"""Steps of each size one after the other, of which the first warms up; and how often all sizes have their turn, so that
a machine whose speed drifts slows all of them alike."""
SMALL, LARGE, REPEATS = 1 << 12, 1 << 22, 10
"""Payloads in bytes, of which one costs the call and the other mostly the copy; and the calls of each."""
MEASURED_AS = LIKE | dict.fromkeys(HALVES, Kind.BACKWARD)  # the kind that is measured for another one
BySize = Mapping[Kind, Mapping[int, float]]  # seconds of the whole model's action, by samples


@dataclass(frozen=True)
class Profile:
    """What a model's step takes on this machine; `predict` says what a plan would take."""

    measured: BySize
    counted: BySize  # what is counted for the same actions
    samples: int  # of the batch that plans divide
    beside: Mapping[Kind, float]  # how many times as long an action takes while another rank computes
    issue: Mapping[Kind, tuple[float, float]]  # a rank's own CPU seconds per call, and per byte
    _play: Callable[..., Trace] = field(repr=False, compare=False)

    def predict(self, plan: Plan, *, cluster: Cluster | None = None) -> Timeline:
        """Return the predicted step of a plan for CPU ranks, each on a core of its own, as in `Run.timeline`.

        `cluster` is one whose helper process to use; None: start one.

        Raises:
            ValueError: the plan does not fit the model or the batch.
        """
        # ---- count and factor
        counted = factors.with_starts(self._play(plan, cluster=cluster), START)
        samples = max(1, round(self.samples / (plan.dp * plan.microbatches)))
        kinds = factors.kinds_of(counted)
        trace = factors.scale_trace(counted, lambda rank, kind, ops: self.factor(kind, samples), kinds)
        trace = _with_issues(trace, kinds, self._issue_seconds)
        # ---- beside
        shares = _share_beside(Timeline.of(trace), kinds)

        def slow_down(rank: int, kind: Kind, ops: Array) -> float:
            return 1 + (self.beside.get(MEASURED_AS.get(kind, kind), 1.0) - 1) * shares.get((rank, kind), 0.0)

        return replace(Timeline.of(factors.scale_trace(trace, slow_down, kinds)), basis=PROFILED)

    def factor(self, kind: Kind, samples: int) -> float:
        """Return how many times as long as counted an action takes here, interpolated between the measured sizes."""
        measured, counted = (times[MEASURED_AS.get(kind, kind)] for times in (self.measured, self.counted))
        sizes = sorted(measured)
        whole = float(np.interp(samples, sizes, [measured[size] / counted[size] for size in sizes]))
        return SPLIT * whole if kind in HALVES else whole

    def _issue_seconds(self, kinds: Array, nbytes: Array) -> Array:
        """Return the seconds of its own CPU that a rank spends on communications, (n,), from kinds and bytes, (n,)."""
        costs = [self.issue.get(Kind(kind), self.issue[Kind.ALL_REDUCE]) for kind in kinds.tolist()]
        calls, per_byte = np.array(costs).reshape(-1, 2).T
        return np.asarray(calls + per_byte * nbytes)

    def __str__(self) -> str:
        lines = ["measured on one core of this machine, by samples of a micro-batch:"]
        for kind, times in self.measured.items():
            parts = ", ".join(f"{size}: {seconds(each)}" for size, each in sorted(times.items()))
            ratio = f"; beside another rank x {self.beside[kind]:.2f}" if kind in self.beside else ""
            lines.append(f"  {kind.name.lower():<9} {parts}{ratio}")
        call, per_byte = self.issue[Kind.ALL_REDUCE]
        own = f"{seconds(call)} of its rank's own CPU, and {seconds(1e6 * per_byte)} per MB"
        return "\n".join([*lines, f"an all-reduce takes {own}"])


@public
def profile(
    model: torch.nn.Module, data: Any, *, loss: Callable[[Any, Any], torch.Tensor],
    optimizer: Callable[[Any], torch.optim.Optimizer], cluster: Cluster | None = None,
) -> Profile:  # fmt: skip
    """Measure a model's training step on this machine, to predict plans from it.

    Args:
        model, loss, optimizer: as for `Cluster.train`.
        data: a batch (inputs, targets), or a sequence of which the first is taken, as for `Cluster.train`.
        cluster: any cluster, whose helper process to use; None: start one.

    Raises:
        ValueError: as for `Cluster.train`; or the data are neither.

    >>> import torch, mpkit as mk
    >>> from mpkit.strategies.data.datasets import spirals
    >>> found = mk.profile(
    ...     mk.models.MLP(2, 3), spirals(32, 1), loss=torch.nn.functional.cross_entropy,
    ...     optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    >>> 0.05 < found.predict(mk.Plan.gpipe(2, 4)).bubble < 0.5
    True
    """
    from mpkit.strategies.prepare.batches import take_batches

    a_batch = isinstance(data, tuple) and len(data) == 2 and not isinstance(data[0], tuple | list)
    batch = take_batches([data] if a_batch else data, 1)[0]
    samples = batch_size(batch[0])
    how: dict[str, Any] = {"loss": loss, "optimizer": optimizer}

    def play(plan: Plan, **more: Any) -> Trace:
        return play_training(model, batch, plan, **how, **more)

    with borrow_clusters(cluster.resized if cluster is not None else None, "cpu") as clusters:

        def measure(plan: Plan, sizes: Collection[int]) -> BySize:
            turns = [size for _ in range(ROUNDS) for size in sizes for _ in range(STEPS)]
            batches = [factors.first_samples(size, batch) for size in turns]
            run = clusters(plan.ranks).train(model, batches, plan, steps=len(turns), show=False, **how).wait()
            return _medians(run.timeline(clock="virtual"), turns)

        sizes = sorted({max(1, samples // part) for part in PARTS})
        measured = measure(Plan.serial(), sizes)
        counted: dict[Kind, dict[int, float]] = {kind: {} for kind in WHOLE}
        for size in sizes:
            trace = play(Plan.serial(), samples=size, cluster=clusters(1))
            for kind, took in _seconds_by_kind(Timeline.of(factors.with_starts(trace, START))).items():
                counted[kind][size] = took
        beside, half = {}, samples // 2
        if half:
            both = measure(Plan.ddp(2), [2 * half])
            beside = {kind: max(1.0, both[kind][2 * half] / 2 / measured[kind][half]) for kind in WHOLE}
        issued = clusters(2).run(_cpu_of_calls)
    costs = {key: mean(of_rank[key] for of_rank in issued) for key in issued[0]}
    issue = {kind: _per_byte(costs[kind, SMALL], costs[kind, LARGE]) for kind, _ in costs}
    return Profile(measured, counted, samples, beside, issue, play)


# ---- the whole model's actions


def _medians(timeline: Timeline, turns: Sequence[int]) -> dict[Kind, dict[int, float]]:
    """Return the median over steps by kind and size of batch; `turns` are the steps' sizes."""
    steps: dict[int, list[dict[Kind, float]]] = {}
    for number, step in enumerate(timeline.steps):
        if number % STEPS:
            steps.setdefault(turns[number], []).append(_seconds_by_kind(timeline, step))
    return {kind: {n: median(each[kind] for each in some) for n, some in steps.items()} for kind in WHOLE}


def _seconds_by_kind(timeline: Timeline, step: int = 0) -> dict[Kind, float]:
    """Return the seconds of a step's actions, summed over ranks."""
    actions = timeline.spans[(timeline.spans["step"] == step) & (timeline.spans["depth"] == 0)]
    took = actions["end"] - actions["start"]
    return {kind: float(took[actions["kind"] == int(kind)].sum()) for kind in WHOLE}


# ---- what communication takes of its rank's own core


def _cpu_of_calls(ctx: Any) -> dict[tuple[Kind, int], float]:
    """Return the CPU seconds of this rank's thread per communication, by kind and payload in bytes."""
    import torch

    found = {}
    for nbytes in (SMALL, LARGE):
        for kind, call in _calls(ctx.comm, torch.zeros(nbytes // 4)).items():
            moments = [time.thread_time()]
            for _ in range(REPEATS):
                call()
                moments.append(time.thread_time())
            found[kind, nbytes] = median(np.diff(moments)[2:].tolist())  # the first ones connect the ranks
    return found


def _calls(comm: Communicator, whole: Tensor) -> dict[Kind, Callable[[], Any]]:
    """Return a function per kind of communication that runs it with this payload; rank 0 sends the message."""
    part = whole[: len(whole) // 2].clone()
    return {
        Kind.ALL_REDUCE: lambda: comm.all_reduce(whole),
        Kind.ALL_GATHER: lambda: comm.all_gather(part),
        Kind.REDUCE_SCATTER: lambda: comm.reduce_scatter(whole),
        Kind.SEND: lambda: comm.recv(whole, 0) if comm.rank else comm.send(whole, 1),
    }


def _per_byte(small: float, large: float) -> tuple[float, float]:
    """Return the seconds of a call, and per byte, from those of a small and of a large payload."""
    slope = max(0.0, (large - small) / (LARGE - SMALL))
    return small - slope * SMALL, slope


def _with_issues(trace: Trace, kinds: Collection[Kind], issued: Callable[[Array, Array], Array]) -> Trace:
    """Return the trace in which actions also take `issued(kinds, bytes)` of the communications issued within them."""

    def add(_: int, ops: Array) -> None:
        calls = np.sort(ops[(ops["kind"] >= Kind.SEND) & (ops["lane"] == Lane.COMM)], order="start")
        until = np.concatenate([[0.0], np.cumsum(issued(calls["kind"], calls["bytes"]))])
        actions = np.isin(ops["kind"], list(map(int, kinds)))
        begin, end = (np.searchsorted(calls["start"], ops[at][actions]) for at in ("start", "end"))
        ops["cpu"][actions] += ((until[end] - until[begin]) * 1e9).astype(ops["cpu"].dtype)

    return factors.change_ops(trace, add)


# ---- what ranks that compute at the same time take from each other


def _share_beside(timeline: Timeline, kinds: Collection[Kind]) -> dict[tuple[int, int], float]:
    """Return by rank and kind the fraction of its compute during which another rank computes."""
    spans = timeline.spans[timeline.spans["depth"] == 0]
    compute = spans[np.isin(spans["kind"], list(map(int, kinds)))]
    shares: dict[tuple[int, int], float] = {}
    for rank in range(timeline.world_size):
        own = compute[compute["rank"] == rank]
        others = metrics.covered_times(compute[compute["rank"] != rank])
        for kind in set(own["kind"].tolist()):
            mine = metrics.covered_times(own[own["kind"] == kind])
            shares[rank, kind] = metrics.common(mine, others) / max(metrics.length(mine), 1e-12)
    return shares
