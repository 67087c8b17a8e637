"""The questions whose answers are predicted, and what is true.

What is true is computed by the kit's own simulation, or by the formula that is named, never read from a notebook.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpkit.course.predictions.amounts import spell_amount

if TYPE_CHECKING:
    from mpkit.timeline.timeline import Timeline

__all__ = ["QUESTIONS", "PredictionQuestion", "question"]


@dataclass(frozen=True)
class PredictionQuestion:
    """A number to predict.

    Attributes:
        name: its name in `mk.predict`.
        text: the question.
        unit: "share", "bytes" or "".
        truth: returns what is true.
        why: how the number comes about, told afterwards.
        within: how far a prediction may be off, as a share of what is true, to count as close.
    """

    name: str
    text: str
    unit: str
    truth: Callable[[], float]
    why: str
    within: float = 0.1

    def close(self, value: float) -> bool:
        """Return whether a prediction is close to what is true."""
        return abs(value - self.truth()) <= self.within * abs(self.truth()) * (1 + 1e-9)

    def gap(self, value: float, shown: float) -> str:
        """Return in words how far a prediction is from a number.

        >>> question("bubble").gap(0.2, 0.3), question("ddp-bytes").gap(4e6, 6e6)
        ('10.0 percentage points too low', '2.00 MB too low')
        """
        apart = abs(value - shown)
        if apart <= 1e-3 * abs(shown):
            return "just right"
        size = (
            f"{100 * apart:.1f} percentage points" if self.unit == "share" else spell_amount(apart, self.unit)
        )
        return f"{size} too {'high' if value > shown else 'low'}"


def question(name: str) -> PredictionQuestion:
    """Return the question of a name.

    >>> question("buble")
    Traceback (most recent call last):
    ValueError: nothing to predict is called 'buble'; did you mean 'bubble'? There are 1f1b-live, bubble, ...

    Raises:
        ValueError: There is none of that name.
    """
    known = {each.name: each for each in QUESTIONS}
    asked: Any = name
    if isinstance(asked, str) and asked in known:
        return known[asked]
    near = difflib.get_close_matches(str(name).strip().lower().replace("_", "-"), known, 1, 0.5)
    meant = f"; did you mean {near[0]!r}?" if near else "."
    raise ValueError(f"nothing to predict is called {name!r}{meant} There are {', '.join(sorted(known))}")


def _simulate(schedule: str, microbatches: int) -> Timeline:
    """Return the simulated step of a schedule of four stages."""
    from mpkit.plan.plan import Plan
    from mpkit.timeline.simulation import simulate

    return simulate(Plan.pipeline(schedule, 4, microbatches))


QUESTIONS = (
    PredictionQuestion(
        "ring-bytes",
        "Eight ranks all-reduce a tensor of 4 MB around a ring. How many bytes does each rank send?",
        "bytes",
        lambda: 2 * 7 / 8 * 4e6,
        "Each rank sends 2(n-1) parts, and a part is an n-th of the tensor: 14 parts of 0.5 MB.",
    ),
    PredictionQuestion(
        "buckets",
        "The gradients of a model are 50 tensors of 2 MB each. DDP's buckets are closed as soon as they hold 25 MB or "
        "more. How many all-reduces does a step take?",
        "",
        lambda: math.ceil(50 / math.ceil(25 / 2)),
        "Thirteen tensors close a bucket, since twelve are 24 MB: three buckets of 26 MB and one of 22 MB.",
    ),
    PredictionQuestion(
        "zero-1-bytes",
        "Mixed-precision Adam keeps 2 bytes per parameter for the weight, 2 for its gradient and 12 for the optimizer. "
        "With ZeRO-1 on 8 GPUs, how many bytes per parameter does each GPU hold?",
        "",
        lambda: 2 + 2 + 12 / 8,
        "ZeRO-1 shards the optimizer's 12 bytes only: 4 + 12/8. Even on a thousand GPUs it stays above 4.",
    ),
    PredictionQuestion(
        "1f1b-live",
        "1F1B with 4 stages and 32 micro-batches: how many micro-batches' activations does the first GPU hold at most?",
        "",
        lambda: float(_simulate("1f1b", 32).peak_memory[0]["activations"]),
        "It begins its backwards after p forwards, and then does one for each forward: p, however large m is.",
    ),
    PredictionQuestion(
        "naive-bubble",
        "Four GPUs hold one stage of a model each, and work one after the other. Which share of a step is each idle?",
        "share",
        lambda: _simulate("naive", 1).bubble,
        "One of four works at any time: the bubble is (p-1)/p, with p stages.",
    ),
    PredictionQuestion(
        "bubble",
        "GPipe with 4 stages and 8 micro-batches: which share of a step is each GPU idle?",
        "share",
        lambda: _simulate("gpipe", 8).bubble,
        "Each GPU is idle for p-1 micro-batches' time out of m+p-1: the bubble is (p-1)/(m+p-1), here 3/11.",
    ),
    PredictionQuestion(
        "ddp-bytes",
        "A model has 1,000,000 parameters in fp32. DDP all-reduces their gradients around a ring of 4 GPUs. "
        "How many bytes does each GPU send per step?",
        "bytes",
        lambda: 2 * 3 / 4 * 4 * 1_000_000,
        "Each of n ranks sends 2(n-1)/n of the payload: once around to add up, once more to tell; the payload is 4 MB.",
    ),
)  # fmt: skip
