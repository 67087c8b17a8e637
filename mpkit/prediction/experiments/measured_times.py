"""Action times: seconds of the whole model's actions on this machine, by samples of a micro-batch and by kind.

mix       a run trains on batches of all sizes in turn, so that a machine whose speed drifts slows all of them alike
sum       an action takes the median over the steps on a rank; the whole model's takes the sum over the ranks
repeat    runs are short, and others follow until the medians are stable

What ranks that compute at the same time take from each other: measured between two of them.

    compute     ranks on neighbouring cores share caches, memory and clock: an action takes longer beside another one
    wait        a collective between ranks that have just computed waits for the slower one, and for the threads that
                copy its payload to get a core
    copy        a collective that hides behind compute still takes the time of a core
    issue       the rank's own thread spends time on each call and on its payload: over gloo, a reduce-scatter copies it

A test of collectives alone, such as nccl-tests, has none of the three.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mpkit.devices.hardware import Link, hops, wire_factor
from mpkit.trace import Kind, Lane

if TYPE_CHECKING:
    from torch import Tensor

    from mpkit.launch.session.cluster import Cluster
    from mpkit.strategies.comm.communicator import Communicator
    from mpkit.timeline.timeline import Timeline

__all__ = ["BusyRanks", "action_times", "measure_busy", "overlapped_share", "whole_model"]

# ---- actions of the whole model

STEPS, RUNS = 5, 3
"""Steps of each size in a run, of which the first warms up; and runs at most."""

STABLE = 0.03
"""The standard errors of all medians as a share of these medians, at which they count as stable."""

Train = Callable[[Sequence[int]], "Timeline"]
"""Trains a step on a batch of each of these numbers of samples; returns the virtual timeline."""

Samples = dict[tuple[int, Kind, int], list[float]]
"""Seconds of single actions, by size, kind and rank."""


def action_times(
    train: Train, sizes: Collection[int], kinds: Collection[Kind]
) -> dict[int, dict[Kind, float]]:
    """Return the seconds of the whole model's actions for batches of each size, by kind.

    Args:
        train: runs a plan.
        sizes: samples of the batches.
        kinds: the actions to measure.

    Raises:
        ValueError: as for `Cluster.train`.
    """
    turns = [size for size in sorted(set(sizes)) for _ in range(STEPS)]
    samples: Samples = {}
    for _ in range(RUNS):
        # ---- turns
        timeline = train(turns)
        for number, step in enumerate(timeline.steps):
            if number % STEPS:
                _add(samples, turns[number], timeline, step, kinds)
        # ---- repeat
        if sum(map(_error, samples.values())) < STABLE * sum(map(median, samples.values())):
            break
    # ---- sum
    found: dict[int, dict[Kind, float]] = {size: {} for size in set(turns)}
    for (size, kind, _), times in samples.items():
        found[size][kind] = found[size].get(kind, 0.0) + median(times)
    return found


def whole_model(timeline: Timeline, kinds: Collection[Kind]) -> dict[Kind, float]:
    """Return the seconds of the whole model's actions in a played step, by kind."""
    samples: Samples = {}
    for step in timeline.steps:
        _add(samples, 0, timeline, step, kinds)
    found: dict[Kind, float] = {}
    for (_, kind, _), times in samples.items():
        found[kind] = found.get(kind, 0.0) + median(times)
    return found


def _add(samples: Samples, size: int, timeline: Timeline, step: int, kinds: Collection[Kind]) -> None:
    """Add the actions of a step."""
    spans = timeline.spans
    actions = spans[
        (spans["step"] == step) & (spans["depth"] == 0) & np.isin(spans["kind"], list(map(int, kinds)))
    ]
    for rank, kind, start, end in zip(
        actions["rank"].tolist(), actions["kind"].tolist(), actions["start"].tolist(), actions["end"].tolist(),
        strict=True,
    ):  # fmt: skip
        samples.setdefault((size, Kind(kind), rank), []).append(end - start)


def _error(times: Sequence[float]) -> float:
    """Return the standard error of a median, estimated from the quartiles, which outliers do not move.

    Of n normal values it is 1.25 sigma / sqrt(n), and the quartiles are 1.35 sigma apart.

    >>> _error([1.0, 1.0, 1.0, 5.0, 1.0])
    0.0
    """
    first, third = np.quantile(np.array(times), [0.25, 0.75])
    return float(1.25 / 1.35 * (third - first) / sqrt(len(times)))


# ---- what ranks that compute at the same time take from each other

Array = npt.NDArray[Any]

COMPUTE = 0.008
"""Seconds of compute before each collective."""

SMALL, LARGE = 1 << 12, 1 << 22
"""Payloads in bytes: the time of one is latency, that of the other mostly the rate."""

REPEATS = 10
KINDS = Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.SEND


# ---- measured ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BusyRanks:
    """What ranks take from each other that both compute.

    Attributes:
        link: messages and collectives between them.
        taken: cores that a rank's collective keeps busy.
        issue: seconds of its own CPU that a rank spends on a call and per byte of its payload, by kind.
    """

    link: Link
    taken: float
    issue: Mapping[Kind, tuple[float, float]]

    def issue_seconds(self, kinds: Array, nbytes: Array) -> Array:
        """Return the seconds of its own CPU that a rank spends on communications, (n,), from kinds and bytes, (n,).

        One whose kind was not measured takes what an all-reduce does.
        """
        other = self.issue.get(Kind.ALL_REDUCE, (0.0, 0.0))
        costs = np.array([self.issue.get(Kind(kind), other) for kind in kinds.tolist()]).reshape(-1, 2)
        return np.asarray(costs[:, 0] + costs[:, 1] * nbytes)


def measure_busy(cluster: Cluster) -> BusyRanks:
    """Measure collectives between two busy ranks.

    Args:
        cluster: two CPU ranks.
    """
    rounds = cluster.run(_collectives)
    took: dict[Kind, dict[int, float]] = {}
    used = []
    issued: dict[Kind, dict[int, float]] = {}
    for (kind, nbytes), samples in rounds[0].items():
        both = [*samples, *rounds[1][kind, nbytes]]
        calls = 2 if kind == Kind.SEND else 1  # there and back
        took.setdefault(kind, {})[nbytes] = median(wall for wall, _, _ in both) / calls
        used += [core / wall for wall, core, _ in both if nbytes == LARGE]
        issued.setdefault(kind, {})[nbytes] = median(mine for _, _, mine in both) / calls
    latency = median(times[SMALL] / hops(kind, 2) for kind, times in took.items())
    rates = {
        kind: wire_factor(kind, 2) * LARGE / max(times[LARGE] - hops(kind, 2) * latency, times[LARGE] / 10)
        for kind, times in took.items()
    }
    sources = dict.fromkeys(
        ("latency", "bandwidth", "bus"), "measured between two busy ranks on this machine"
    )
    link = Link("loopback between busy ranks", latency, rates[Kind.SEND], rates, sources)
    return BusyRanks(link, median(used), {kind: _per_byte(times) for kind, times in issued.items()})


def _per_byte(times: Mapping[int, float]) -> tuple[float, float]:
    """Return the seconds of a call, and per byte, from those of a small and of a large payload."""
    slope = max(0.0, (times[LARGE] - times[SMALL]) / (LARGE - SMALL))
    return times[SMALL] - slope * SMALL, slope


def _collectives(ctx: Any) -> dict[tuple[Kind, int], list[tuple[float, float, float]]]:
    """Return seconds of the wall, of other threads' CPU and of this one's per collective, by kind and payload."""
    import torch

    square = torch.randn(128, 128, generator=torch.Generator().manual_seed(0))
    once = _cpu_of(lambda: [square @ square for _ in range(50)]) / 50
    products = max(1, round(COMPUTE / once))
    found: dict[tuple[Kind, int], list[tuple[float, float, float]]] = {}
    for nbytes in (SMALL, LARGE):
        for kind, call in _calls(ctx.comm, torch.zeros(nbytes // 4)).items():
            samples = [_time_call(call, square, products) for _ in range(REPEATS)]
            found[kind, nbytes] = samples[2:]  # the first ones connect the ranks
    return found


def _calls(comm: Communicator, whole: Tensor) -> dict[Kind, Callable[[], Any]]:
    """Return what runs each kind of communication with this payload."""
    part = whole[: len(whole) // 2].clone()

    def there_and_back() -> None:
        for sender in (0, 1):
            if comm.rank == sender:
                comm.send(whole, 1 - sender)
            else:
                comm.recv(whole, sender)

    return {
        Kind.ALL_REDUCE: lambda: comm.all_reduce(whole),
        Kind.ALL_GATHER: lambda: comm.all_gather(part),
        Kind.REDUCE_SCATTER: lambda: comm.reduce_scatter(whole),
        Kind.SEND: there_and_back,
    }


def _time_call(call: Callable[[], Any], square: Any, products: int) -> tuple[float, float, float]:
    """Compute for a while, call, and return what went by beyond the compute, with the CPU of the threads."""
    begin, cpu = time.perf_counter(), time.process_time()
    compute = _cpu_of(lambda: [square @ square for _ in range(products)])
    mine = _cpu_of(call)
    return time.perf_counter() - begin - compute, time.process_time() - cpu - compute - mine, mine


def _cpu_of(call: Callable[[], Any]) -> float:
    """Return the seconds of CPU that a call takes of this thread."""
    begin = time.thread_time()
    call()
    return time.thread_time() - begin


# ---- applied -------------------------------------------------------------------------------------------------


def overlapped_share(
    timeline: Timeline, kinds: Collection[Kind], *, comm: bool
) -> dict[tuple[int, int], float]:
    """Return the fraction of a rank's compute during which others compute, or its own communication runs.

    Args:
        timeline: a replayed step.
        kinds: kinds of compute.
        comm: whether to look at the rank's own communication instead of the other ranks' compute.

    Returns:
        The fraction by rank and kind.
    """
    spans = timeline.spans[timeline.spans["depth"] == 0]
    compute = spans[np.isin(spans["kind"], [int(kind) for kind in kinds])]
    shares: dict[tuple[int, int], float] = {}
    for rank in sorted(set(compute["rank"].tolist())):
        if comm:
            others = spans[(spans["rank"] == rank) & (spans["lane"] == Lane.COMM)]
        else:
            others = compute[compute["rank"] != rank]
        union = _union(others["start"], others["end"])
        for kind in kinds:
            mine = compute[(compute["rank"] == rank) & (compute["kind"] == int(kind))]
            if whole := float((mine["end"] - mine["start"]).sum()):
                shares[rank, int(kind)] = sum(_common(one, union) for one in mine) / whole
    return shares


def _union(starts: Any, ends: Any) -> list[tuple[float, float]]:
    """Return disjoint intervals, in order, that cover what these cover."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(zip(starts.tolist(), ends.tolist(), strict=True)):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def _common(span: Any, union: list[tuple[float, float]]) -> float:
    start, end = float(span["start"]), float(span["end"])
    return sum(max(0.0, min(end, to) - max(start, begin)) for begin, to in union)
