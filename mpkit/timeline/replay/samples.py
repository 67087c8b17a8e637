"""Samples of the ranks' GPUs, on the clock of their operations."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit.timeline.replay.spans import DEVICE_SAMPLE
from mpkit.trace import Lane

__all__ = ["measured_samples", "placed_samples"]

Array = npt.NDArray[Any]


def measured_samples(rank: int, samples: Array, origin: int) -> Array:
    """Return (n,) of `DEVICE_SAMPLE` on the wall clock: (n,) of `SAMPLE`, without those before the first op.

    Args:
        rank: the rank whose GPU was sampled.
        samples: its samples.
        origin: ns of the machine's monotonic clock at time 0.
    """
    return _sample_at(rank, samples, (samples["time"] - origin) * 1e-9)


def placed_samples(rank: int, samples: Array, ops: Array, spans: Array) -> Array:
    """Return (n,) of `DEVICE_SAMPLE` on the clock of a replay: between the same moments of work as on the wall clock.

    A sample before the rank's first operation, or after its last one so far, has no place and is left out.

    Args:
        rank: the rank whose GPU was sampled.
        samples: (m,) of `SAMPLE`.
        ops, spans: (k,) of `OP` and of `SPAN`: each operation on the wall clock, and where the replay has put it.
    """
    works = (ops["lane"] == Lane.COMPUTE) & (ops["end"] > 0)
    ops, spans = ops[works], spans[works]
    wall = np.concatenate([ops["start"], ops["end"]])
    order = np.argsort(wall, kind="stable")
    wall = wall[order]
    clock = np.maximum.accumulate(np.concatenate([spans["start"], spans["end"]])[order])
    if not len(wall):
        return np.zeros(0, DEVICE_SAMPLE)
    there = samples[(samples["time"] >= wall[0]) & (samples["time"] <= wall[-1])]
    return _sample_at(rank, there, np.interp(there["time"] - wall[0], wall - wall[0], clock))


def _sample_at(rank: int, samples: Array, time: Array) -> Array:
    placed = np.zeros(len(samples), DEVICE_SAMPLE)
    for name in DEVICE_SAMPLE.names or ():
        if name not in ("time", "rank"):
            placed[name] = samples[name]
    placed["time"], placed["rank"] = time, rank
    return placed[time >= 0]
