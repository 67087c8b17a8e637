"""Advice: the best plan for a model on a machine, with reasons that can be checked.

Every sentence of it comes from `mk.estimate` of a plan that it names, so it replays in one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from numpy import minimum

from mpkit.common.calls import answers
from mpkit.common.display import ChartedResult, data_frame, draw
from mpkit.common.tracebacks import public
from mpkit.devices.catalogue import hardware as find
from mpkit.devices.hardware import Hardware
from mpkit.plan.formats.write import unsaid
from mpkit.plan.kinds import whole
from mpkit.plan.plan import Plan
from mpkit.prediction.advice.reasons import RUNNING, SIMPLER, Family, families_of, summary_of, why_not
from mpkit.prediction.advice.rules import Rule, rules_of
from mpkit.prediction.advice.search import (
    SHOWN,
    TIME,
    FoundLayout,
    LayoutPrices,
    Objective,
    figures_of,
    kinds_of,
    objective_of,
)
from mpkit.prediction.advice.space import TrainingQuestion
from mpkit.prediction.cost_model.check import check_length, check_trainable, checked_load
from mpkit.prediction.cost_model.estimate import Estimate, estimate_checked
from mpkit.prediction.cost_model.known_models import architecture_of
from mpkit.prediction.cost_model.layout import model_under
from mpkit.prediction.cost_model.memory import FRAGMENTATION
from mpkit.prediction.cost_model.preset import Preset, preset_for
from mpkit.prediction.cost_model.stack import Stack, stack_of
from mpkit.timeline.answer import Answer, Basis

if TYPE_CHECKING:
    import pandas as pd


__all__ = ["Advice", "advise"]


@dataclass(frozen=True)
class Advice(ChartedResult, Answer):
    """The plans that fit, the best first; it prints the best of them with reasons.

    A notebook shows a table of the best plan of each family as well, and a chart of step time against memory with the
    frontier marked (`figure`).

    Attributes:
        priced: what was asked, the machine and the stack.
        found: every layout that fits with 8 % of the memory to spare; where none does, those that fit at all.
        tight: those that fit and leave less than that free.
        considered: the number of plans that were considered, those that do not fit included.
        objective: what is best.
    """

    priced: LayoutPrices = field(repr=False)
    found: Sequence[FoundLayout] = field(repr=False)
    tight: Sequence[FoundLayout] = field(repr=False)
    considered: int
    objective: Objective = TIME

    @property
    def best(self) -> Plan | None:
        """The best plan that fits; None if none does."""
        return self.plans[0] if self.found else None

    @cached_property
    def plans(self) -> list[Plan]:
        """The 20 best plans that fit; of those that differ in the samples of a micro-batch only, the best."""
        return [self.priced.plan_of(each.layout) for each in self._best]

    @property
    def _best(self) -> Sequence[FoundLayout]:
        return kinds_of(self.found)[:SHOWN]

    @cached_property
    def frontier(self) -> list[Plan]:
        """Of the plans found, those than which none is both faster and smaller, the fastest first.

        A plan that recomputes or offloads more than it needs to fit is not among those found.
        """
        took, memory = figures_of(self.found)
        order = took.argsort(kind="stable")
        least = minimum.accumulate(memory[order])
        kept = [place for i, place in enumerate(order.tolist()) if not i or memory[place] < least[i - 1]]
        return [self.priced.plan_of(self.found[place].layout) for place in kept]

    @cached_property
    def families(self) -> list[Family]:
        """The best plan of each family, the simplest family first: what every further part gains."""
        return families_of(self.priced, kinds_of(self.found))

    @property
    def simplest(self) -> Plan | None:
        """The plan with the fewest parts within 5 % of the best one's time; None if none fits."""
        near = (each.plan for each in self.families if each.longer <= SIMPLER)
        return next(near, None)

    @cached_property
    def runs_in(self) -> dict[str, str]:
        """Which frameworks can run the best plan: by name, what their file cannot say; "" if it says everything."""
        return {} if self.best is None else {name: unsaid(self.best, name) for name in RUNNING}

    @cached_property
    def rules(self) -> list[Rule]:
        """The guides' rules with this model's numbers, and whether the search agrees."""
        return rules_of(self.priced, kinds_of(self.found))

    def estimate(self, plan: Plan) -> Estimate:
        """Return the estimate of a plan, as `mk.estimate` would."""
        asked = self.priced.asked
        return estimate_checked(
            asked.model, plan, self.priced.hardware, asked.global_batch, asked.sequence, self.priced.stack,
            self.priced.preset, trainable=asked.trainable,
            expert_load=asked.load if asked.model.experts else None,
        )  # fmt: skip

    @property
    def band(self) -> tuple[float, float] | None:
        """The seconds between which such steps were in comparisons with real runs."""
        best: Estimate = self.answer
        return best.band

    @cached_property
    def answer(self) -> Estimate:
        """The best plan's estimate.

        Raises:
            ValueError: no plan fits.
        """
        if self.best is None:
            raise ValueError(
                f"none of the {self.considered:,} plans considered fits {self.priced.hardware.name}, so there is none "
                "to estimate. print(advice) says what is missing"
            )
        return self.estimate(self.best)

    @property
    def basis(self) -> Basis:
        """What was measured, and what is assumed."""
        return Basis(
            self.answer.basis.measured, "what `mk.estimate` assumes, for training with Adam in 16 bits"
        )

    def _ipython_display_(self) -> None:
        from IPython.display import display

        for part in draw(self, "parts"):
            display(part)  # type: ignore[no-untyped-call]

    def fullest_bytes(self, guess: Estimate) -> float:
        """Return the bytes of an estimate's fullest rank, with what fragmentation takes."""
        return guess.peak_memory * (1 + FRAGMENTATION)

    def why_not(self, plan: Plan) -> str:
        """Say why a plan is not the best: it cannot work, does not fit, or takes longer, and because of what.

        >>> advice = advise("llama3-8b", "8x-a100-nvlink", global_batch=64, sequence=4096)
        >>> print(advice.why_not(Plan.ddp(8)))
        Plan(dp=8) does not fit: it needs 341.2 of 79.1 GiB, out by 262.1 GiB; the largest part is activations.
        """
        return why_not(self, plan)

    def to_dataframe(self) -> pd.DataFrame:
        """Return a row per plan of `plans`: step time, memory, tokens per second and utilization."""
        rows = []
        for plan, found in zip(self.plans, self._best, strict=True):
            this = self.estimate(plan)
            rows.append(
                {
                    "plan": repr(plan), "step_time": this.step_time, "memory": found.memory,
                    "tokens_per_second": this.tokens_per_second, "mfu": this.mfu, "because": next(iter(this.because)),
                }
            )  # fmt: skip
        return data_frame(rows)

    def __str__(self) -> str:
        return summary_of(self)


@public
@answers('mk.advise("llama3-8b", "8x-a100-nvlink", global_batch=64, sequence=4096)')
def advise(
    model: object, hardware: Hardware | str, *, global_batch: int, sequence: int, by: str = "time",
    price: float | None = None, stack: str | Stack | None = None, preset: Preset | None = None,
    trainable: float = 1.0, expert_load: float | None = None,
) -> Advice:  # fmt: skip
    """Return the plans for a model on a machine that fit, the best first, with reasons.

    Every mesh, that of experts folded over tp included, stage of ZeRO, also within groups of nodes, micro-batch,
    recomputation (also of one of k layers) and offload is considered, with the schedules that can be the best and any
    number of layers per stage, in 16 bits with Adam. A plan leaves 8 % of the memory free, and offload has to gain more
    than the estimate's band. With `stack=`, the framework of that name can run every plan.

    Args:
        model: as for `mk.estimate`.
        hardware: a machine, or its name.
        global_batch: samples per step.
        sequence: tokens per sample.
        by: what is best: "time": the fastest step on all devices. "cost": the cheapest step, on as many devices of the
            machine as that takes. "devices": the fewest devices, and on these the fastest step.
        price: of an hour of a GPU, in any currency, for by="cost".
        stack, preset, trainable, expert_load: as for `mk.estimate`; the load is that of every ep.

    Raises:
        ValueError: the model or the machine is not known, or a number is none.

    >>> advice = advise("llama3-8b", "8x-a100-nvlink", global_batch=64, sequence=4096)
    >>> advice.best is not None and advice.estimate(advice.best).peak_memory < 80e9
    True
    """
    for name, value in (("global_batch", global_batch), ("sequence", sequence)):
        if (whole(value) or 0) < 1:
            raise ValueError(f"advise({name}={value!r}): a whole number, 1 or more")
    check_trainable(trainable)
    sizes = architecture_of(model, trainable=trainable)
    load = checked_load(expert_load, sizes)
    asked = TrainingQuestion(sizes, global_batch, sequence, load, trainable)
    check_length(asked.model, sequence)
    machine = find(hardware)
    chosen = stack if isinstance(stack, Stack) else stack_of(stack)
    return find_advice(asked, machine, chosen, preset, objective_of(by, price))


def find_advice(
    asked: TrainingQuestion, machine: Hardware, stack: Stack, preset: Preset | None = None,
    objective: Objective = TIME,
) -> Advice:  # fmt: skip
    """Return the advice for what `advise` has read."""
    asked = replace(asked, model=model_under(stack, asked.model))
    priced = LayoutPrices(asked, machine, stack, preset or preset_for(machine.device.name, stack.name))
    searched = objective.search(priced)
    found, tight = (searched.found, searched.tight) if searched.found else (searched.tight, [])
    return Advice(priced, found, tight, searched.considered, objective)
