"""Action times: seconds of the whole model's actions on this machine, by samples of a micro-batch and by kind.

mix       a run trains on batches of all sizes in turn, so that a machine whose speed drifts slows all of them alike
sum       an action takes the median over the steps on a rank; the whole model's takes the sum over the ranks
repeat    runs are short, and others follow until the medians are stable
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import sqrt
from statistics import median

import numpy as np

from mpkit.timeline.timeline import Timeline
from mpkit.trace import Kind

__all__ = ["action_times", "whole_model"]

STEPS, RUNS = 5, 3
"""Steps of each size in a run, of which the first warms up; and runs at most."""

STABLE = 0.03
"""The standard errors of all medians as a share of these medians, at which they count as stable."""

Train = Callable[[Sequence[int]], Timeline]
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
