"""What a micro-batch adds to the scores of an evaluation: the loss and the user's metrics, each as [sum, weight].

A score is the quotient of these sums over all micro-batches of all batches: a mean over samples, or the total divided
by the count where the loss or the metric returns (total, count).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mpkit.errors import MpkitError
from mpkit.strategies.data.microbatch import Value
from mpkit.strategies.job.job import TrainJob
from mpkit.strategies.loss.mean import MeanLoss, SummedMeans
from mpkit.strategies.loss.quotient import Quotient, as_pair
from mpkit.strategies.loss.whole_batch import WholeBatchLoss
from mpkit.strategies.stage.stage import cast

__all__ = ["measure_scores", "scores"]


def measure_scores(metric: Any, output: Any, targets: Value) -> dict[str, Any]:
    """Return what a metric function measures, by name: "" where it returns a single value."""
    value = metric(output, targets)
    return {str(name): each for name, each in value.items()} if isinstance(value, Mapping) else {"": value}


def scores(job: TrainJob, output: Any, targets: Value, weight: float, size: int) -> tuple[Tensor, ...]:
    """Return the sums and weights of the loss and of each metric, one after the other, as float64 scalars.

    Args:
        job: read for the loss and the metrics.
        output, targets: of the micro-batch.
        weight: the micro-batch's share of its batch; 0 for a stand-in, which does not count.
        size: the samples of the batch.
    """
    evaluation = job.how.evaluation
    assert evaluation is not None
    if job.plan.precision != "full":
        output = cast(output, torch.float32)  # a loss is a long sum, for which 16 bits are too few
    # ---- loss
    value = _counted_loss(job.what.loss, output, targets, weight)
    pairs: list[tuple[Any, Any]] = [
        value if isinstance(value, tuple) else (value * weight * size, weight * size)
    ]
    # ---- metrics
    if evaluation.metric is not None:
        values = measure_scores(evaluation.metric, output, targets)
        _check(tuple(values), evaluation.names[1:])
        for value in values.values():
            counted = as_pair(value)
            pairs.append(counted if counted is not None else (value * weight * size, weight * size))
    there = 1.0 if weight else 0.0
    device = pairs[0][0].device
    flat = (torch.as_tensor(number, dtype=torch.float64, device=device) for pair in pairs for number in pair)
    return tuple(number.detach().reshape(()) if there else torch.zeros_like(number) for number in flat)


def _counted_loss(loss: Any, output: Any, targets: Value, weight: float) -> Any:
    """Return the (total, count) of a loss, also of a mean of torch's; its value if what it divides by is not known.

    A batch that is computed in one part trains with the mean itself. Of an evaluation's several batches, each counts by
    its targets that count, as in `mk.mean_loss`, and not by its samples.
    """
    if isinstance(loss, WholeBatchLoss):
        return loss(output, targets, counts=weight > 0)
    if isinstance(loss, Quotient):
        loss = loss.loss
    if isinstance(owner := getattr(loss, "__self__", None), MeanLoss):  # `MeanLoss.mean`
        loss = owner
    with SummedMeans() as means:
        value = loss(output, targets)
    pair = means.pair_of(value) or as_pair(value)
    return loss(output, targets) if pair is None and means.calls else pair or value


def _check(names: tuple[str, ...], expected: tuple[str, ...]) -> None:
    if len(names) != len(expected) or any(
        a and f"eval {a}" != b for a, b in zip(names, expected, strict=True)
    ):
        raise MpkitError(
            f"the metric function measured {', '.join(map(repr, names))} of this micro-batch, and "
            f"{', '.join(map(repr, expected))} of the first samples: it has to return the same names each time"
        )
