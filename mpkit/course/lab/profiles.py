"""Eight ranks under DDP, as torch.profiler writes them: a file for each, with a slow rank in it.

    forward     kernels, after a batch was loaded
    backward    kernels; when a bucket's last gradient is there, its all-reduce begins on a stream of its own
    all-reduce  NCCL's kernel begins when this rank comes to it, and ends on all ranks together
    optimizer   after the last all-reduce

One rank's kernels take longer than all others' (its GPU is throttled). Another rank loads one batch late, which looks
worse in that one step. Ranks 4 to 7 are on another host, whose clock is ahead.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpkit.timeline.foreign.open_trace import OpenedTrace


RANKS, STEPS, LAYERS, BUCKET = 8, 4, 6, 2
LATE_STEP = 1
SLOW, LATE, LONGER = 5, 2, 1.3
"""The slow rank, the one that is late once, and by which factor the slow one's kernels take longer."""

KERNEL, WIRE, STEP_GAP = 400.0, 700.0, 300.0  # us
AHEAD = 3_000_000.0  # us, of the second host's clock

Event = dict[str, Any]


@dataclass(frozen=True)
class Arrival:
    """When the ranks come to an all-reduce, in us: by step, number in the step, and rank."""

    step: int
    number: int
    at: tuple[float, ...]


@dataclass(frozen=True)
class _Kernel:
    """A kernel of a rank: its name, phase, begin and length in us."""

    phase: str
    begin: float
    took: float


def _play_kernels() -> tuple[list[list[list[_Kernel]]], list[Arrival], list[float]]:
    """Return the kernels by step and rank, the arrivals at all-reduces, and when each step begins."""
    draw = random.Random(8)
    kernels: list[list[list[_Kernel]]] = []
    came: list[Arrival] = []
    begins, now = [], 0.0
    for step in range(STEPS):
        begins.append(now)
        of_step, ready = [], []
        for rank in range(RANKS):
            at = now + (2600.0 if (rank, step) == (LATE, LATE_STEP) else 100.0) + 40.0 * draw.random()
            mine, gradients = [], []
            for phase in ["forward"] * LAYERS + ["backward"] * LAYERS:
                took = KERNEL * (1 + (phase == "backward")) * (1 + 0.03 * draw.random())
                took *= LONGER if rank == SLOW else 1.0
                mine.append(_Kernel(phase, at, took))
                at += took + 5.0
                gradients += [at] * (phase == "backward")
            of_step.append(mine)
            ready.append(gradients[BUCKET - 1 :: BUCKET])
        link = 0.0
        for number in range(LAYERS // BUCKET):
            at_all = tuple(max(link, ready[rank][number]) for rank in range(RANKS))
            came.append(Arrival(step, number, at_all))
            link = max(at_all) + WIRE
        for mine in of_step:
            mine.append(_Kernel("optimizer", link + 20.0, KERNEL))
        kernels.append(of_step)
        now = link + 20.0 + KERNEL + STEP_GAP
    return kernels, came, [*begins, now]


def arrivals() -> list[Arrival]:
    """Return when each rank comes to each all-reduce.

    >>> len(arrivals()), {len(arrival.at) for arrival in arrivals()}
    (12, {8})
    """
    return _play_kernels()[1]


def write(folder: Path) -> None:
    """Write a file for each rank, as `profiler.export_chrome_trace` does."""
    for rank in range(RANKS):
        header = {
            "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": RANKS},
            "host_name": f"node{rank // 4}",
            "deviceProperties": [{"id": rank % 4, "name": "NVIDIA H100 80GB HBM3"}],
        }
        offset = 1e6 + AHEAD * (rank // 4)
        events = [{**event, "ts": event["ts"] + offset} for event in _events(rank)]
        (folder / f"rank{rank}.json").write_text(json.dumps({**header, "traceEvents": events}))


def _events(rank: int) -> Iterator[Event]:
    kernels, came, begins = _play_kernels()
    number = 0
    for step, of_step in enumerate(kernels):
        begin, end = begins[step], begins[step + 1]
        yield _host("user_annotation", f"ProfilerStep#{step}", begin, end - begin - 10.0)
        mine = of_step[rank]
        for phase, name in (
            ("forward", "forward"), ("backward", "backward"), ("optimizer", "Optimizer.step#AdamW.step")
        ):  # fmt: skip
            of_phase = [kernel for kernel in mine if kernel.phase == phase]
            first, last = of_phase[0].begin, of_phase[-1].begin + of_phase[-1].took
            yield _host("user_annotation", name, first - 60.0, last - first + 55.0)
            for kernel in of_phase:
                number += 1
                ids = {"correlation": number, "External id": number}
                launch = _host("cuda_runtime", "cudaLaunchKernel", kernel.begin - 50.0, 5.0)
                yield {**launch, "args": ids}
                yield _device("gemm", 7, kernel.begin, kernel.took, {**ids, "device": rank % 4, "stream": 7})
        for arrival in came:
            if arrival.step == step:
                began = arrival.at[rank]
                yield _all_reduce(rank, began, max(arrival.at) + WIRE - began)


def _host(cat: str, name: str, begin: float, took: float) -> Event:
    return {"ph": "X", "cat": cat, "name": name, "pid": 9, "tid": 9, "ts": begin, "dur": took, "args": {}}


def _device(name: str, stream: int, begin: float, took: float, args: dict[str, Any]) -> Event:
    where = {"pid": 0, "tid": stream, "ts": begin, "dur": took, "args": args}
    return {"ph": "X", "cat": "kernel", "name": name, **where}


def _all_reduce(rank: int, begin: float, took: float) -> Event:
    args = {
        "device": rank % 4, "stream": 20, "Collective name": "allreduce", "dtype": "Float",
        "In msg nelems": 1 << 22, "Out msg nelems": 1 << 22, "Group size": RANKS, "Process Group Name": "0",
        "Process Group Description": "default_pg", "Process Group Ranks": str(list(range(RANKS))),
    }  # fmt: skip
    return _device("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 20, begin, took, args)


def open_profiles() -> OpenedTrace:
    """Write the files into a folder that is thrown away, and open them as `mk.open` does.

    >>> open_profiles().world_size
    8
    """
    import mpkit

    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        return mpkit.open(folder)
