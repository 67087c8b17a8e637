"""The times of a model's actions: medians over steps, summed over ranks, measured again while they are not stable."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpkit.prediction.experiments.action_times import RUNS, STEPS, action_times
from mpkit.prediction.experiments.factors import scale_trace
from mpkit.timeline.replay.spans import SPAN
from mpkit.trace import Kind, Lane, Trace
from mpkit.trace.files import RankTrace
from mpkit.trace.records import OP


class Training:
    """Two ranks whose forwards take as many seconds as the batch has samples; each size's first step takes longer.

    Args:
        spread: by how much the steps of a size differ.
    """

    def __init__(self, spread: float = 0.0) -> None:
        self.spread = spread
        self.asked: list[list[int]] = []

    def __call__(self, turns: Sequence[int]) -> Any:
        self.asked.append(list(turns))
        spans = np.zeros(2 * len(turns), SPAN)
        for step, size in enumerate(turns):
            first = not step % STEPS
            took = 100.0 if first else size * (1 + self.spread * (step % 2))
            for rank in (0, 1):
                span = spans[2 * step + rank]
                span["rank"], span["step"], span["kind"], span["end"] = rank, step, Kind.FORWARD, took
        return SimpleNamespace(spans=spans, steps=range(len(turns)))


def test_the_model_takes_the_median_of_its_steps_over_all_ranks() -> None:
    train = Training()
    found = action_times(train, [4, 2, 4], [Kind.FORWARD, Kind.BACKWARD])
    assert found == {2: {Kind.FORWARD: 4.0}, 4: {Kind.FORWARD: 8.0}}
    assert train.asked == [[2] * STEPS + [4] * STEPS]


def test_steps_that_differ_are_measured_again() -> None:
    train = Training(spread=0.5)
    found = action_times(train, [2], [Kind.FORWARD])
    assert len(train.asked) == RUNS
    assert found[2][Kind.FORWARD] == pytest.approx(2 * 2.5)


def test_an_action_takes_longer_by_what_it_issues() -> None:
    """A reduce-scatter of 1000 bytes within the backward, and an all-reduce after it."""
    ops = np.zeros(3, OP)
    ops["kind"] = Kind.BACKWARD, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE
    ops["lane"] = Lane.COMPUTE, Lane.COMM, Lane.COMM
    ops["start"], ops["end"], ops["cpu"] = [0, 5, 30], [20, 15, 40], [10, 0, 0]
    ops["bytes"] = 0, 1000, 1000
    trace = Trace([RankTrace(ops, np.empty(0), [])])
    cost = {Kind.REDUCE_SCATTER: 2e-12, Kind.ALL_REDUCE: 1e-3}
    longer = scale_trace(
        trace,
        lambda rank, kind, ops: 1.0,
        [Kind.BACKWARD],
        issued=lambda kinds, nbytes: np.array([cost[Kind(kind)] for kind in kinds.tolist()]) * nbytes,
    )
    assert longer.ranks[0].ops["cpu"].tolist() == [12, 0, 0]
