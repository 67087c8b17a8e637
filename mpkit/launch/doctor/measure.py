"""Short measurements on ranks of this machine: messages, all-reduces, loading data.

Two ranks on CPUs, or one per GPU. A call lasts from when its last rank arrives until its last rank is done, and the
fastest tenth counts, since other load can only add time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import quantiles
from time import monotonic
from typing import TYPE_CHECKING, Any

from mpkit.common.this_process import cores
from mpkit.devices.hardware import wire_factor
from mpkit.trace import Kind

if TYPE_CHECKING:
    from mpkit.launch.session.cluster import Cluster
    from mpkit.strategies.rank_context import Context

__all__ = ["LoaderSpeed", "RankMeasurements", "measure"]

SMALL = 4
LARGE = {"cpu": 8 << 20, "cuda": 256 << 20}
"""Bytes of a large message, by device."""
SECONDS = 0.4
"""How long each call is repeated, and how long each number of workers may load."""


@dataclass(frozen=True)
class LoaderSpeed:
    """How fast a DataLoader loads.

    Attributes:
        what: the dataset.
        nbytes: bytes per sample.
        rates: samples per second by number of workers.
        own: whether it is the user's own dataset.
    """

    what: str
    nbytes: int
    rates: Mapping[int, float]
    own: bool = False


@dataclass(frozen=True)
class RankMeasurements:
    """What ranks measured.

    Attributes:
        ranks, backend: the ranks, and over which backend they talked.
        latency: seconds of a message of 4 bytes.
        nbytes: bytes of the large message and all-reduce.
        bandwidth: bytes per second of the large message.
        all_reduce: bytes per second on the wire of the large all-reduce (nccl-tests' bus bandwidth).
        loading: how fast data is loaded.
    """

    ranks: int
    backend: str
    latency: float
    nbytes: int
    bandwidth: float
    all_reduce: float
    loading: LoaderSpeed | None = None


def measure(cluster: Cluster, data: Any = None) -> RankMeasurements:
    """Measure on the ranks of a cluster, which takes about two seconds.

    Args:
        cluster: two ranks or more; nothing else runs on it.
        data: a dataset to load; None: images of 3 x 224 x 224 made in memory.

    Raises:
        RankFailed: the dataset raises.
    """
    spans = cluster.run(_on_rank, data, timeout=60)
    nbytes = LARGE.get(cluster.device, LARGE["cpu"])
    small, large, reduce = (
        _seconds([spans[rank][0][call] for rank in range(cluster.ranks)]) for call in range(3)
    )
    factor = wire_factor(Kind.ALL_REDUCE, cluster.ranks)
    return RankMeasurements(
        cluster.ranks, cluster.backend, small, nbytes, nbytes / large, factor * nbytes / reduce, spans[0][1]
    )


Spans = list[tuple[float, float]]


def _on_rank(ctx: Context, data: Any) -> tuple[list[Spans], LoaderSpeed | None]:
    """Return when the three calls began and ended, and on rank 0 how fast data is loaded."""
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

    calls = [
        time_calls(call)
        for call in (message(SMALL), message(nbytes), lambda: ctx.comm.all_reduce(tensors[nbytes]))
    ]
    loading = _load(data) if ctx.rank == 0 else None
    ctx.comm.barrier()
    return calls, loading


def _seconds(by_rank: list[Spans]) -> float:
    times = [
        max(end for _, end in call) - max(start for start, _ in call) for call in zip(*by_rank, strict=True)
    ]
    return float(quantiles(times, n=10)[0]) if len(times) > 1 else times[0]


class _Images:
    """Images of 3 x 224 x 224 bytes, turned to floats as a transform would."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Any:
        import torch

        return torch.full((3, 224, 224), index % 256, dtype=torch.uint8).float().div_(255)


def _load(data: Any) -> LoaderSpeed:
    """Load batches of 16 for a moment, with no workers and with two and four of them, as far as there are cores."""
    from torch.utils.data import DataLoader

    dataset: Any = _Images() if data is None else data
    nbytes = 0
    rates = {}
    for workers in (0, 2, 4):
        if workers and workers > cores():
            continue
        batches = iter(DataLoader(dataset, batch_size=16, num_workers=workers))
        first = next(batches)
        nbytes = _nbytes(first) // max(1, _length(first))
        begin, loaded = monotonic(), 0
        for batch in batches:
            loaded += _length(batch)
            if monotonic() - begin > SECONDS:
                break
        rates[workers] = loaded / max(monotonic() - begin, 1e-9)
        del batches
    own = data is not None
    return LoaderSpeed(
        type(data).__name__ if own else "images of 3 x 224 x 224 made in memory", nbytes, rates, own
    )


def _tensors(batch: Any) -> list[Any]:
    import torch

    from mpkit.common.torch_private import tree_leaves

    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]


def _nbytes(batch: Any) -> int:
    return sum(int(leaf.nbytes) for leaf in _tensors(batch))


def _length(batch: Any) -> int:
    leaves = _tensors(batch)
    return len(leaves[0]) if leaves and leaves[0].dim() else 1
