"""EvaluationData: the batches that a training is evaluated on, and what is measured there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mpkit.strategies.data.batches import Batches
from mpkit.strategies.job.feed import WholeBatches

__all__ = ["EvaluationData", "due"]


@dataclass(frozen=True)
class EvaluationData:
    """What is evaluated, and when.

    Attributes:
        batches: each of them is evaluated, once.
        metric: metric(outputs, targets) -> a mean over samples, (total, count), or a dict of these; or None.
        names: the names of what is measured, the loss first.
        every: steps from one evaluation to the next; the last step is followed by one too.
    """

    batches: WholeBatches | Batches
    metric: Callable[[Any, Any], Any] | None
    names: tuple[str, ...]
    every: int


def due(evaluation: EvaluationData | None, step: int, steps: int) -> bool:
    """Return whether a step is followed by an evaluation."""
    return evaluation is not None and ((step + 1) % evaluation.every == 0 or step + 1 == steps)
