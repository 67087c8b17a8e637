"""Try out: predicted beside measured, on the ranks at hand.

choose      the best few plans and a bad one, or every plan that the ranks can run
predict     each of them from a profile of this machine (`mk.profile`), before it runs
run         train a few steps under each; the step after the first is what it takes
compare     predicted beside measured, and whether the order is right (Spearman's rank correlation)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from mpkit.common.display import data_frame
from mpkit.common.units import seconds
from mpkit.plan.plan import Plan
from mpkit.plan.schedule.catalogue import GPIPE, INTERLEAVED_1F1B, ONE_F_ONE_B, ZB_H1
from mpkit.prediction.advice.space import divisors

if TYPE_CHECKING:
    import pandas as pd

    from mpkit.launch.session.cluster import Cluster
    from mpkit.prediction.experiments.profile import Profile

__all__ = ["PlanTrials", "every_plan", "try_plans"]

STEPS = 5
TRIED = ((GPIPE, 1), (ONE_F_ONE_B, 1), (ZB_H1, 1), (INTERLEAVED_1F1B, 2))


@dataclass(frozen=True)
class PlanTrials:
    """Plans that were predicted, and then run.

    Attributes:
        plans: in the order of the prediction.
        predicted, ran: seconds per step of each.
        refused: why other plans could not be run here, by plan.
        clock: on which both were taken: "virtual" or "measured".
    """

    plans: Sequence[Plan]
    predicted: Sequence[float]
    ran: Sequence[float]
    refused: dict[Plan, str]
    clock: str

    @property
    def rank_correlation(self) -> float:
        """Spearman's rank correlation of what was predicted and what was measured: 1 for the same order."""
        first, second = (np.argsort(np.argsort(times)) for times in (self.predicted, self.ran))
        return float(np.corrcoef(first, second)[0, 1])

    def to_dataframe(self) -> pd.DataFrame:
        """Return a row per plan: predicted and measured seconds, and predicted / measured."""
        rows = [
            {"plan": repr(plan), "predicted": guess, "ran": ran, "ratio": guess / ran}
            for plan, guess, ran in zip(self.plans, self.predicted, self.ran, strict=True)
        ]
        return data_frame(rows)

    def __str__(self) -> str:
        width = max((len(repr(plan)) for plan in self.plans), default=4)
        lines = [f"{'plan':<{width}}  predicted        ran  ratio   ({self.clock} clock)"]
        for plan, guess, ran in zip(self.plans, self.predicted, self.ran, strict=True):
            lines.append(f"{plan!r:<{width}}  {seconds(guess):>9}  {seconds(ran):>9}  {guess / ran:5.2f}")
        lines += [f"{plan!r}: not run, {why}" for plan, why in self.refused.items()]
        if len(self.plans) > 2:
            lines.append(f"rank correlation {self.rank_correlation:.2f}")
        return "\n".join(lines)


def try_plans(
    profile: Profile,
    plans: Sequence[Plan],
    cluster: Cluster,
    *,
    clock: str = "virtual",
    say: Callable[[str], object] = print,
) -> PlanTrials:
    """Predict each plan, run it, and compare.

    Args:
        profile: of the model on this machine.
        plans: those that the model or the batch cannot have are refused with the reason.
        cluster: CPU ranks, as many as the plans have.
        clock: as in `Profile.predict`.
        say: called with a line as each training begins.
    """
    guesses: dict[Plan, float] = {}
    refused: dict[Plan, str] = {}
    # ---- predict
    for plan in plans:
        try:
            guesses[plan] = profile.predict(plan, clock=clock, cluster=cluster).step_time
        except ValueError as error:
            refused[plan] = str(error)
    # ---- run
    chosen = sorted(guesses, key=guesses.__getitem__)
    ran = []
    for number, plan in enumerate(chosen, 1):
        say(f"training {number} of {len(chosen)}, {STEPS} steps: {plan!r}")
        timeline = profile.train(plan, cluster, steps=STEPS).wait().timeline(clock=clock)
        ran.append(median(timeline.step(step).step_time for step in timeline.steps[1:]))
    # ---- compare
    return PlanTrials(chosen, [guesses[plan] for plan in chosen], ran, refused, clock)


def every_plan(ranks: int, microbatches: int) -> Iterator[Plan]:
    """Yield every mesh of these ranks, with each stage of ZeRO and each schedule that it can have.

    >>> [repr(plan) for plan in every_plan(2, 4)][:3]
    ['Plan(dp=2)', 'Plan(dp=2, zero=1)', 'Plan(dp=2, zero=2)']

    Args:
        ranks: all of them are used.
        microbatches: of plans with a pipeline; others have one.
    """
    for tp in divisors(ranks):
        for cp in divisors(ranks // tp):
            for pp in divisors(ranks // tp // cp):
                dp = ranks // tp // cp // pp
                for zero in range(4) if dp * cp > 1 else (0,):
                    if pp == 1:
                        yield Plan(dp=dp, tp=tp, cp=cp, zero=zero)
                        continue
                    for schedule, v in TRIED:
                        yield Plan(
                            pp=pp, dp=dp, tp=tp, cp=cp, zero=zero, schedule=schedule, virtual_stages=v,
                            microbatches=microbatches,
                        )  # fmt: skip
