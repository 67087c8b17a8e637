"""Answers: what every call that says how long a step takes, or what memory it needs, returns.

    Timeline     of a run, a replay, a simulation, a dry run or a profile's prediction
    Estimate     `mk.estimate`; `mk.fits` and `mk.advise` answer with the estimate of their plan
    WhatIf       `run.what_if`

They differ in what was measured and what is assumed (`Answer.basis`), not in how they are asked.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from mpkit.timeline.timeline import Timeline


class Basis(NamedTuple):
    """What was measured for an answer, and what is assumed, in words."""

    measured: str
    assumed: str


WALL = Basis("the time of every operation", "nothing")
VIRTUAL = Basis("the time of every operation", "a link model and a core per rank")
REPLAYED = Basis(
    "which operations there are, their FLOPs and bytes, and who waits for whom",
    "the times: a roofline, and published figures of devices and links",
)
IMPORTED = Basis("what the files hold", "notes on the timeline say what is missing")
SIMULATED = Basis("nothing", "the times that you give, by default 1 per action and free messages")
DRY_RUN = Basis(
    "nothing; the strategy's own code runs on tensors without content", "times, by a roofline per operator"
)
PROFILED = Basis(
    "the whole model's forward, backward and update; what a rank spends on communication",
    "how a plan's operators compare with the whole model's",
)


def basis_of(clock: str, meta: Mapping[str, Any], *, elsewhere: bool = False) -> Basis:
    """Return what the times of a timeline rest on; `elsewhere`: replayed on another machine."""
    if clock == "simulated":
        return SIMULATED
    if "fake" in meta or elsewhere:
        return DRY_RUN if "fake" in meta else REPLAYED
    if "imported" in meta:
        return IMPORTED
    return WALL if clock == "measured" else VIRTUAL


class Answer(ABC):
    """How long a step takes, what the ranks hold, and why, under the names that every answer has.

    >>> import mpkit as mk
    >>> machine = mk.hardware("8x-a100-nvlink")
    >>> guess = mk.estimate("llama3-8b", mk.Plan.zero(3, 8, precision="bf16"), machine, global_batch=16,
    ...                     sequence=4096)
    >>> for answer in (guess, mk.simulate(mk.Plan.gpipe(4, 8))):
    ...     print(round(answer.step_time, 1), answer.band is None, round(answer.bubble, 3), next(iter(answer.because)))
    2.5 False 0.0 products
    33.0 True 0.273 work
    """

    @property
    @abstractmethod
    def basis(self) -> Basis:
        """What was measured, and what is assumed."""

    @property
    def answer(self) -> Answer:
        """The answer that this one gives: its timeline, or a plan's estimate."""
        return self.timeline()

    def timeline(self) -> Timeline:
        """Return the step as a timeline."""
        return self.answer.timeline()

    @property
    def step_time(self) -> float:
        """Seconds per step."""
        return self.answer.step_time

    @property
    def band(self) -> tuple[float, float] | None:
        """The seconds between which such steps were in comparisons with real runs; None where there were none."""
        return None

    @property
    def memory(self) -> Sequence[Mapping[str, float]]:
        """Bytes by rank and category when the rank holds most; they add up to its peak."""
        return self.answer.memory

    @property
    def bubble(self) -> float:
        """The idle share of the step, averaged over ranks (GPipe's definition)."""
        return self.timeline().bubble

    @property
    def because(self) -> Mapping[str, float]:
        """Where the time goes: seconds by cause, which add up to the step, the longest first."""
        return self.answer.because


@runtime_checkable
class HasTimeline(Protocol):
    """A Run, or an answer."""

    def timeline(self) -> Timeline:
        """Return its timeline."""
