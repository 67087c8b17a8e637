"""The questions whose answers are predicted, and what is true.

What is true is computed by the kit's own simulation, or by the formula that is named, never read from a notebook.
"""

from __future__ import annotations

import difflib
import functools
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpkit.course.predictions.amounts import spell_amount

if TYPE_CHECKING:
    from mpkit.timeline.timeline import Timeline


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
    known = all_questions()
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


TRUTHS: Mapping[str, Callable[[], float]] = {
    "ring-bytes": lambda: 2 * 7 / 8 * 4e6,
    "buckets": lambda: math.ceil(50 / math.ceil(25 / 2)),
    "zero-1-bytes": lambda: 2 + 2 + 12 / 8,
    "1f1b-live": lambda: float(_simulate("1f1b", 32).peak_memory[0]["activations"]),
    "naive-bubble": lambda: _simulate("naive", 1).bubble,
    "bubble": lambda: _simulate("gpipe", 8).bubble,
    "ddp-bytes": lambda: 2 * 3 / 4 * 4 * 1_000_000,
}
"""What is true, by the kit's own simulation or by the formula that the question's `why` gives."""


@functools.cache
def all_questions() -> dict[str, PredictionQuestion]:
    """Return the questions by name."""
    texts = tomllib.loads(Path(__file__).with_name("questions.toml").read_text("utf-8"))
    return {name: PredictionQuestion(name=name, truth=TRUTHS[name], **words) for name, words in texts.items()}
