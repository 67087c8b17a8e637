"""Timelines with a planted cause: 10 kinds, 5 sizes each, of which a diagnosis must name the first.

Runs are played on tensors without content and replayed, so a case takes a fraction of a second.

    changed records   a slow rank, late buckets, a slow loader: the trace's own ops take longer, start later, or are
    new
    other machines    a slow link, copies, memory near the limit
    other plans       unbalanced stages, too few micro-batches
    changed clocks    host-bound launches, synchronizing calls: the wall clock with gaps between operations
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

import mpkit as mk
from mpkit.devices.hardware import Hardware, Link
from mpkit.trace import Kind, Lane, RankTrace

WIDTH = 4096
A100 = "8x-a100-nvlink"
JITTER = 0.02


class Case(NamedTuple):
    """A planted cause: its kind of finding, a size in words, and the timeline, with the machine to name or None."""

    kind: str
    size: str
    make: Callable[[], tuple[mk.Timeline, Hardware | None]]


def first_finding(case: Case) -> str:
    """Return the kind of the first finding; "" if there is none."""
    timeline, machine = case.make()
    found = timeline.diagnose(hardware=machine)
    return found[0].kind if len(found) else ""


# ---- runs without a fault ---------------------------------------------------------------------------------------


def _chain(layers: int, width: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


CLUSTERS: list[mk.Cluster] = []
"""The cluster on which runs are played, if there is one by then."""


@cache
def played(
    plan: mk.Plan, layers: int = 8, samples: int = 16384, width: int = WIDTH, machine: Any = A100
) -> mk.Trace:
    """Return the trace of two steps of a plan."""
    if not CLUSTERS:
        CLUSTERS.append(mk.Cluster(1, device="cpu"))
    batch = torch.empty(samples, width, device="meta")
    trace = mk.trace_fake(
        lambda: _chain(layers, width), plan, batch=(batch, batch), loss=nn.functional.mse_loss,
        optimizer=torch.optim.SGD, steps=2, hardware=machine, cluster=CLUSTERS[0],
    )  # fmt: skip
    return replace(trace, ranks=[_jittered(rank, number) for number, rank in enumerate(trace.ranks)])


def _jittered(rank: RankTrace, seed: int) -> RankTrace:
    """Return a rank whose operations take a few percent more or less each, as real ones do."""
    ops, rng = rank.ops.copy(), np.random.default_rng(seed)
    ops["cpu"] = (ops["cpu"] * rng.lognormal(0.0, JITTER, len(ops))).astype(ops["cpu"].dtype)
    return replace(rank, ops=ops)


def ddp(layers: int = 4) -> mk.Trace:
    """Return a run of four replicas whose communication is hidden."""
    return played(mk.Plan.ddp(4), layers, 16384)


def pipeline(m: int = 16) -> mk.Trace:
    """Return a run of four equal stages."""
    return played(mk.Plan.pipeline("1f1b", 4, m), 8, 2048 * m)


# ---- changed records --------------------------------------------------------------------------------------------


def with_ops(trace: mk.Trace, rank: int, change: Callable[[Any], Any]) -> mk.Trace:
    """Return a trace in which a rank's ops, a copy of them, are what `change` returns."""
    ranks = list(trace.ranks)
    ranks[rank] = replace(ranks[rank], ops=change(ranks[rank].ops.copy()))
    return replace(trace, ranks=ranks)


def slow_rank(trace: mk.Trace, rank: int, factor: float) -> mk.Timeline:
    """Return a run in which a rank computes so many times as long."""

    def slower(ops: Any) -> Any:
        works = ops["kind"] < Kind.WAIT
        ops["cpu"][works] = (ops["cpu"][works] * factor).astype(ops["cpu"].dtype)
        return ops

    return mk.Timeline.of(with_ops(trace, rank, slower))


def late_bucket(first: int, slower: float) -> mk.Timeline:
    """Return a run whose buckets from this one on are issued after the backward, on a link so many times slower."""
    trace = ddp(8)

    def later(ops: Any) -> Any:
        for step in (0, 1):
            mine = ops["step"] == step
            back = np.flatnonzero(mine & (ops["kind"] == Kind.BACKWARD) & (ops["depth"] == 0))[-1]
            issued = np.flatnonzero(mine & (ops["kind"] == Kind.ALL_REDUCE))[first:]
            ops["start"][issued] = np.maximum(ops["start"][issued], ops["end"][back])
        return ops

    for rank in range(4):
        trace = with_ops(trace, rank, later)
    return mk.Timeline.of(trace, scaled_link(A100, slower))


def slow_loader(trace: mk.Trace, ranks: range, share: float) -> mk.Timeline:
    """Return a run in which these ranks load data for a share of the step before they begin it."""
    seconds = mk.Timeline.of(trace).step_time * share

    def loads(ops: Any) -> Any:
        for step in (1, 0):
            at = int(np.flatnonzero((ops["kind"] == Kind.STEP) & (ops["step"] == step))[0]) + 1
            ops = inserted(ops, at, Kind.DATA, seconds)
        return ops

    for rank in ranks:
        whole = trace.ranks[rank]
        assert isinstance(whole, RankTrace)
        trace = with_ops(trace, rank, loads)
    return mk.Timeline.of(trace)


# ---- other machines ---------------------------------------------------------------------------------------------


def scaled_link(name: str, slower: float, latency: float | None = None) -> Hardware:
    """Return a machine whose link is so many times slower."""
    machine = mk.hardware(name)
    link = machine.link
    bus = {kind: rate / slower for kind, rate in link.bus.items()}
    late = link.latency if latency is None else latency
    return replace(
        machine, link=replace(link, bandwidth=link.bandwidth / slower, bus=bus, latency=late, ramp=0.0)
    )


def slow_link(bandwidth: float) -> mk.Timeline:
    """Return a pipeline whose middle is on two nodes, with so many bytes per second between them."""
    machine = mk.hardware(A100)
    wire = Link("a slow wire", 2e-6, bandwidth)
    return mk.Timeline.of(pipeline(), replace(machine, per_node=2, nodes=2, between=wire))


def small_messages(layers: int, latency: float) -> mk.Timeline:
    """Return replicas that reduce each small weight alone."""
    machine = scaled_link(A100, 1.0, latency)
    trace = played(mk.Plan(dp=4, bucket_mb=0.01), layers, 512, 256, machine)
    return mk.Timeline.of(trace, machine)


def copies(host: float) -> mk.Timeline:
    """Return replicas with optimizer states on the host, over a bus of so many bytes per second."""
    machine = mk.hardware(A100)
    machine = replace(machine, device=replace(machine.device, host=host))
    return mk.Timeline.of(
        played(mk.Plan(dp=4, zero=1, offload="optimizer"), 4, 8192, WIDTH, machine), machine
    )


def full(share: float) -> tuple[mk.Timeline, Hardware]:
    """Return replicas that hold so much of their devices' memory."""
    timeline, machine = mk.Timeline.of(ddp()), mk.hardware(A100)
    peak = max(held["total"] for held in timeline.peak_memory_of_run)
    return timeline, replace(machine, device=replace(machine.device, memory=round(peak / share)))


# ---- changed clocks ---------------------------------------------------------------------------------------------


def inserted(ops: Any, at: int, kind: Kind, seconds: float) -> Any:
    """Return a rank's ops with another one that takes so long before op `at`."""
    new = ops[at : at + 1].copy()
    new["kind"], new["lane"], new["depth"] = kind, Lane.DATA if kind == Kind.DATA else Lane.COMPUTE, 0
    for column in ("stage", "microbatch", "number", "peer", "ref"):
        new[column] = -1
    for column in ("name", "group", "flops", "bytes", "value"):
        new[column] = 0
    new["cpu"] = round(seconds * 1e9)
    new["end"] = new["start"] + (new["cpu"] if kind == Kind.DATA else 0)
    ops["ref"][ops["ref"] >= at] += 1
    return np.insert(ops, at, new)


def walled(trace: mk.Trace, kinds: tuple[Kind, ...], gap: float, call: bool = False) -> mk.Timeline:
    """Return a timeline on the wall clock, on whose ranks a gap follows each action of some kinds.

    The gaps are operations when the trace is replayed, and are taken out of the timeline afterwards.

    Args:
        trace: any run.
        kinds: of the actions.
        gap: seconds.
        call: whether the gap begins with a copy of a number to the host.
    """

    def gaps(ops: Any) -> Any:
        behind = np.flatnonzero(np.isin(ops["kind"], kinds) & (ops["depth"] == 0))
        for at in behind[::-1].tolist():
            after = np.flatnonzero(ops["start"] >= ops["end"][at])
            ops = inserted(ops, int(after[after > at][0]), Kind.COMPUTE, gap) if (after > at).any() else ops
        return ops

    for rank in range(trace.world_size):
        trace = with_ops(trace, rank, gaps)
    timeline = mk.Timeline.of(trace)
    spans = timeline.spans.copy()
    standing = spans["kind"] == Kind.COMPUTE
    if call:
        spans["kind"][standing], spans["lane"][standing], spans["bytes"][standing] = (
            Kind.COPY_TO_HOST, Lane.HOST, 4,
        )  # fmt: skip
        spans["end"][standing] = spans["start"][standing] + 1e-5
    spans["start"] = spans["issued"]
    kept = np.flatnonzero(~standing | call)
    row = np.full(len(spans) + 1, -1)
    order = kept[np.lexsort((kept, spans["start"][kept], spans["rank"][kept]))]
    row[order] = np.arange(len(order))
    spans["cause"] = row[spans["cause"]]
    return replace(timeline, spans=spans[order], clock="measured", meta={**timeline.meta, "device": "cuda"})


def accumulated() -> mk.Trace:
    """Return replicas that run eight micro-batches a step."""
    return played(mk.Plan(dp=4, microbatches=8), 8, 16384)


def host_bound(share: float) -> mk.Timeline:
    """Return a run whose devices stand still for about such a share of the step."""
    base = accumulated()
    gap = mk.Timeline.of(base).step_time * share / 16
    return walled(base, (Kind.FORWARD, Kind.BACKWARD), gap)


def synchronizing(share: float) -> mk.Timeline:
    """Return a run that looks at its loss after each forward."""
    base = accumulated()
    return walled(base, (Kind.FORWARD,), mk.Timeline.of(base).step_time * share / 8, call=True)


# ---- the cases --------------------------------------------------------------------------------------------------


def _even(stage: float) -> mk.Timeline:
    times = [1.0, 1.0, stage, 1.0]
    return mk.simulate(mk.Plan.pipeline("1f1b", 4, 16), times, times, times, hop=0.01)


def _cases() -> Iterator[Case]:
    def of(kind: str, size: str, make: Callable[..., mk.Timeline], *given: Any) -> Case:
        return Case(kind, size, lambda: (make(*given), None))

    for rank, factor in ((2, 1.15), (0, 1.3), (3, 1.6), (1, 2.0)):
        yield of("straggler", f"rank {rank}, x{factor}", lambda r, f: slow_rank(ddp(), r, f), rank, factor)
    yield of("straggler", "rank 2 of a pipeline, x1.5", lambda: slow_rank(pipeline(), 2, 1.5))
    for bandwidth in (12e9, 8e9, 4e9, 2e9, 1e9):
        yield of("slow link", f"{bandwidth / 1e9:g} GB/s", slow_link, bandwidth)
    for first, slower in ((0, 2.0), (1, 3.0), (2, 3.0), (3, 4.0), (1, 4.0)):
        yield of(
            "exposed communication", f"from bucket {first} on, link /{slower:g}", late_bucket, first, slower
        )
    for stage in (1.2, 1.4, 1.7, 2.2, 3.0):
        yield of("unbalanced stages", f"stage 2 x{stage}", _even, stage)
    for ranks, share in (
        (range(4), 0.1),
        (range(4), 0.3),
        (range(4), 1.0),
        (range(2, 3), 0.2),
        (range(1, 2), 0.6),
    ):
        of_all = "all ranks" if len(ranks) > 1 else f"rank {ranks[0]}"
        yield of(
            "data loading", f"{of_all}, {share:.0%}", lambda r, s: slow_loader(ddp(), r, s), ranks, share
        )
    for share in (0.05, 0.1, 0.2, 0.5, 1.0):
        yield of("synchronizing call", f"{share:.0%}", synchronizing, share)
        yield of("host-bound", f"{share:.0%}", host_bound, share)
    for share in (0.91, 0.93, 0.95, 0.97, 0.995):
        yield Case("memory near the limit", f"{share:.1%}", lambda share=share: full(share))
    for host in (32e9, 24e9, 12e9, 6e9, 3e9):
        yield of("copies", f"{host / 1e9:g} GB/s", copies, host)
    for plan in (
        mk.Plan.gpipe(4, 2), mk.Plan.gpipe(4, 4), mk.Plan.pipeline("1f1b", 4, 6), mk.Plan.pipeline("1f1b", 4, 8),
        mk.Plan.pipeline("zb_h1", 4, 4),
    ):  # fmt: skip
        yield of(
            "schedule's bubble",
            f"{plan}",
            lambda p: mk.Timeline.of(played(p, 8, 8192 * p.microbatches)),
            plan,
        )


CASES = list(_cases())
