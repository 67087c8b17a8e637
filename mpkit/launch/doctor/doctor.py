"""`mk.doctor()`: probe, measure, judge, report.

Ranks measure messages and all-reduces: two on CPUs, or one per GPU. A call lasts from when its last rank arrives until
its last rank is done, and the fastest tenth counts, since other load can only add time.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import quantiles
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np

from mpkit.common.calls import answers
from mpkit.common.tracebacks import public
from mpkit.devices.hardware import wire_factor
from mpkit.errors import MpkitError
from mpkit.launch.doctor.probe import Facts, probe
from mpkit.launch.doctor.report import CheckupReport, Topic, find_topic
from mpkit.launch.doctor.rules import findings
from mpkit.trace import Kind

if TYPE_CHECKING:
    from mpkit.strategies.rank_context import Context


SMALL = 4  # bytes of a message
LARGE = {"cpu": 8 << 20, "cuda": 256 << 20}  # bytes of a large one, by device
REPEATS = 40  # of each call; the first ones, which connect the ranks, do not count
Spans = list[tuple[float, float]]


@public
@answers('mk.doctor("slow scaling")', {"fast": "To leave out what is measured: quick=True."})
def doctor(topic: str | None = None, *, quick: bool = False) -> CheckupReport:
    """Examine this machine: devices, links, host, variables, and what two ranks measure.

    Nothing is changed, and nothing is sent anywhere. It takes some seconds; what cannot be asked is listed as not
    checked.

    Args:
        topic: a common issue: "gpus not found", "gpu 0 busier", "out of memory", "slow scaling", "nccl time-outs"; the
            report then has its steps and the findings that belong to it. "variables" explains those of nccl one by one.
        quick: leave out what is measured on ranks.

    Raises:
        ValueError: there is no such topic.
    """
    begin = monotonic()
    asked = None if topic is None else find_topic(topic)
    facts = probe()
    if not quick and (asked is None or asked.name != "variables"):
        facts["measured"] = measure(facts["torch"]["gpus"])
    return judge(facts, asked, seconds=monotonic() - begin)


def judge(facts: Facts, topic: Topic | None = None, *, seconds: float = 0.0) -> CheckupReport:
    """Return the report that follows from facts; of a topic with the findings that belong to it."""
    chosen = (each for each in findings(facts) if topic is None or topic.name in (*each.topics, each.subject))
    return CheckupReport(tuple(chosen), topic, seconds)


def measure(gpus: int) -> Facts:
    """Return what ranks measure, or why they do not: that is a finding, and not the end of the report."""
    from mpkit.launch.session.cluster import Cluster

    try:
        with Cluster(ranks=gpus) if gpus > 1 else Cluster(ranks=2, device="cpu") as cluster:
            by_rank = cluster.run(_time_calls, timeout=60)
    except (ValueError, MpkitError) as error:
        return {"why": f"measuring on ranks failed: {str(error).strip().partition(chr(10))[0]}"}
    nbytes = LARGE.get(cluster.device, LARGE["cpu"])
    latency, message, reduction = (_seconds([spans[call] for spans in by_rank]) for call in range(3))
    return {
        "ranks": cluster.ranks, "backend": cluster.backend, "nbytes": nbytes, "latency": latency,
        "bandwidth": nbytes / message,
        "all_reduce": wire_factor(Kind.ALL_REDUCE, cluster.ranks) * nbytes / reduction,
    }  # fmt: skip


def _time_calls(ctx: Context) -> list[Spans]:
    """Return when a rank's calls began and ended: of a small message, a large one, and an all-reduce."""
    import torch

    sizes = SMALL, LARGE.get(ctx.device.type, LARGE["cpu"])
    small, large = (torch.zeros(size // 4, device=ctx.device) for size in sizes)

    def send(tensor: torch.Tensor) -> None:
        if ctx.rank == 0:
            ctx.comm.send(tensor, 1)
        elif ctx.rank == 1:
            ctx.comm.recv(tensor, 0)

    def measure_spans(call: Callable[..., Any], tensor: torch.Tensor) -> Spans:
        spans = []
        for _ in range(REPEATS):
            ctx.comm.barrier()
            start = monotonic()
            call(tensor)
            if ctx.device.type == "cuda":
                torch.cuda.synchronize()
            spans.append((start, monotonic()))
        return spans[3:]

    calls: Any = ((send, small), (send, large), (ctx.comm.all_reduce, large))
    return [measure_spans(call, tensor) for call, tensor in calls]


def _seconds(by_rank: list[Spans]) -> float:
    begun, done = np.array(by_rank).max(0).T
    return float(quantiles((done - begun).tolist(), n=10)[0])
