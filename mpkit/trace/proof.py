"""The outcome of a run's verification, in words and as a badge."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

PROOF = "proof.json"
"""The file in a run's folder that keeps its proof."""


@dataclass(frozen=True)
class Proof:
    """What is known of a run's equality with serial training.

    Attributes:
        steps: the steps that are equal, counted from 1.
        loss: the largest relative difference of a loss in these steps.
        weights: the largest difference of a weight, relative to the largest weight of its tensor.
        why_not: why no step, or not every due one, was compared, or what is not that of the whole batch.
        difference: the message of a difference; "" if there is none.

    >>> print(Proof((1, 2, 17), 2e-9, 4e-10))
    equal to serial training in steps 1, 2 and 17: loss within 2e-09, weights within 4e-10
    >>> print(Proof((1,), 0.0, 1e-16))
    equal to serial training in step 1: loss to the bit, weights within 1e-16
    """

    steps: tuple[int, ...] = ()
    loss: float = 0.0
    weights: float = 0.0
    why_not: str = ""
    difference: str = ""

    @property
    def status(self) -> str:
        """One of "equal", "not equal" and "not verified"."""
        if self.difference:
            return "not equal"
        return "equal" if self.steps else "not verified"

    @property
    def badge(self) -> str:
        """The status in a few words; "" while nothing is known.

        >>> Proof((1, 2)).badge, Proof(why_not="verify=False").badge, Proof().badge
        ('equal to serial training in steps 1 and 2', 'not verified: verify=False', '')
        >>> Proof((1,), why_not="step 3 cannot be repeated").badge
        'equal to serial training in step 1; step 3 cannot be repeated'
        """
        if self.difference:
            return "not equal to serial training"
        if self.steps:
            equal = f"equal to serial training in {number_steps(self.steps)}"
            return f"{equal}; {self.why_not}" if self.why_not else equal
        return f"not verified: {self.why_not}" if self.why_not else ""

    def __str__(self) -> str:
        if self.difference:
            return self.difference
        if not self.steps:
            return f"not verified: {self.why_not or 'no step is complete'}"
        differences = {"loss": self.loss, "weights": self.weights}
        each = [f"{name} {f'within {power(by)}' if by else 'to the bit'}" for name, by in differences.items()]
        line = f"equal to serial training in {number_steps(self.steps)}: {', '.join(each)}"
        return f"{line}; {self.why_not}" if self.why_not else line

    def to_dict(self) -> dict[str, Any]:
        """Return the proof as JSON types, as a trace keeps it."""
        return asdict(self) | {"steps": list(self.steps)}

    @classmethod
    def from_trace(cls, kept: Any) -> Proof | None:
        """Return the proof that a trace keeps; None if it keeps none, or something else in its place."""
        if not isinstance(kept, dict):
            return None
        known = {key: value for key, value in kept.items() if key in cls.__dataclass_fields__}
        steps = known.get("steps")
        if not isinstance(steps, list) or any(type(step) is not int for step in steps):
            return None
        numbers = all(type(known.get(name, 0.0)) in (int, float) for name in ("loss", "weights"))
        words = all(type(known.get(name, "")) is str for name in ("why_not", "difference"))
        return cls(**known | {"steps": tuple(steps)}) if numbers and words else None


def power(difference: float) -> str:
    """Write a difference with one digit."""
    return f"{difference:.0e}" if difference else "0"


def number_steps(steps: tuple[int, ...]) -> str:
    """Name the steps, with ranges.

    >>> number_steps((1,)), number_steps((1, 2, 17)), number_steps((1, 2, 3, 4, 9))
    ('step 1', 'steps 1, 2 and 17', 'steps 1 to 4 and 9')
    """
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][-1] + 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    words: list[str] = []
    for run in runs:
        words += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else [str(step) for step in run]
    listed = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
    return f"step{'s' * (len(steps) > 1)} {listed}"
