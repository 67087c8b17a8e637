"""Short measurements on ranks of this machine: messages and all-reduces.

Two ranks on CPUs, or one per GPU. A call lasts from when its last rank arrives until its last rank is done, and the
fastest tenth counts, since other load can only add time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import quantiles
from time import monotonic
from typing import TYPE_CHECKING

from mpkit.devices.hardware import wire_factor
from mpkit.trace import Kind

if TYPE_CHECKING:
    from mpkit.launch.session.cluster import Cluster
    from mpkit.strategies.rank_context import Context

__all__ = ["RankMeasurements", "measure"]

SMALL = 4
LARGE = {"cpu": 8 << 20, "cuda": 256 << 20}
"""Bytes of a large message, by device."""
SECONDS = 0.4
"""How long each call is repeated."""


@dataclass(frozen=True)
class RankMeasurements:
    """What ranks measured.

    Attributes:
        ranks, backend: the ranks, and over which backend they talked.
        latency: seconds of a message of 4 bytes.
        nbytes: bytes of the large message and all-reduce.
        bandwidth: bytes per second of the large message.
        all_reduce: bytes per second on the wire of the large all-reduce (nccl-tests' bus bandwidth).
    """

    ranks: int
    backend: str
    latency: float
    nbytes: int
    bandwidth: float
    all_reduce: float


def measure(cluster: Cluster) -> RankMeasurements:
    """Measure on the ranks of a cluster, of which there are two or more; it takes about two seconds."""
    spans = cluster.run(_on_rank, timeout=60)
    nbytes = LARGE.get(cluster.device, LARGE["cpu"])
    small, large, reduce = (
        _seconds([spans[rank][call] for rank in range(cluster.ranks)]) for call in range(3)
    )
    factor = wire_factor(Kind.ALL_REDUCE, cluster.ranks)
    return RankMeasurements(
        cluster.ranks, cluster.backend, small, nbytes, nbytes / large, factor * nbytes / reduce
    )


Spans = list[tuple[float, float]]


def _on_rank(ctx: Context) -> list[Spans]:
    """Return when the three calls began and ended."""
    import torch

    def wait() -> None:
        if ctx.device.type == "cuda":
            torch.cuda.synchronize()

    nbytes = LARGE.get(ctx.device.type, LARGE["cpu"])
    tensors = {size: torch.zeros(size // 4, device=ctx.device) for size in (SMALL, nbytes)}

    def message(size: int) -> Callable[[], object]:
        if ctx.rank > 1:
            return lambda: None
        return lambda: ctx.comm.send(tensors[size], 1) if ctx.rank == 0 else ctx.comm.recv(tensors[size], 0)

    def time_calls(call: Callable[[], object]) -> Spans:
        spans: Spans = []
        for _ in range(3):
            call()
        wait()
        ctx.comm.barrier()
        begin = monotonic()
        go = torch.ones(1)
        while go.item():
            ctx.comm.barrier()
            start = monotonic()
            call()
            wait()
            spans.append((start, monotonic()))
            go = ctx.comm.broadcast(
                torch.tensor([float(monotonic() - begin < SECONDS)], device=ctx.device), 0
            ).cpu()
        return spans

    return [
        time_calls(call)
        for call in (message(SMALL), message(nbytes), lambda: ctx.comm.all_reduce(tensors[nbytes]))
    ]


def _seconds(by_rank: list[Spans]) -> float:
    times = [
        max(end for _, end in call) - max(start for start, _ in call) for call in zip(*by_rank, strict=True)
    ]
    return float(quantiles(times, n=10)[0]) if len(times) > 1 else times[0]
